//! Processes that use all of a CPU.

use std::process::{Child, Command, Stdio};

use testbed::process::cpu_seconds;

/// One process on each of the two CPUs of a measurement; killed on drop.
pub(super) struct Hogs {
    children: Vec<Child>,
}

impl Hogs {
    pub(super) fn start() -> Result<Hogs, String> {
        let mut hogs = Hogs { children: Vec::new() };
        for cpu in ["0", "1"] {
            let mut command = Command::new("taskset");
            command.args(["-c", cpu, "sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
            hogs.children.push(command.spawn().map_err(|error| format!("taskset: {error}"))?);
        }
        Ok(hogs)
    }

    /// CPU seconds used by the one on the server's CPU.
    pub(super) fn on_servers_cpu(&self) -> Result<f64, String> {
        self.children.first().map_or(Ok(0.0), |child| cpu_seconds(child.id()))
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The loop ends only by a kill.
            if child.kill().is_ok() {
                drop(child.wait());
            }
        }
    }
}
