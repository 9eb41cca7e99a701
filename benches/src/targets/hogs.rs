//! Processes that want all of a CPU.

use std::process::{Child, Command, Stdio};

use testbed::process::cpu_seconds;

/// One on each of the two CPUs of a measurement; they end when this goes.
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

    /// CPU seconds that the one on the server's CPU has had.
    pub(super) fn beside_server(&self) -> Result<f64, String> {
        self.children.first().map_or(Ok(0.0), |child| cpu_seconds(child.id()))
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        for child in &mut self.children {
            // It ends by nothing else.
            if child.kill().is_ok() {
                drop(child.wait());
            }
        }
    }
}
