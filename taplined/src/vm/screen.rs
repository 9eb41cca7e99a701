//! The screen of a running machine: the VNC server of its QEMU.
//!
//! It knows nothing about HTTP and RFB. Invariant: it connects to the machine's own QEMU only, whatever is at the
//! path of its socket: the user that QEMU runs as can replace it, and the path of `platform.vnc` may lead elsewhere.

use std::path::PathBuf;

use ::vm::qemu::console;
use api::{Code, Power, Problem, Vm};
use tokio::net::UnixStream;
use uuid::Uuid;

use super::Vms;
use super::directory::vm_directory;
use crate::config::Config;

/// The key in `platform`, and its value for a socket in the machine's directory, which only the daemon uses.
pub const KEY: &str = "vnc";
pub const PRIVATE: &str = "private";

/// The name of the socket in the machine's directory, as the crate `vm` has it for a QEMU of another user.
const SOCKET: &str = "vnc";

/// The socket of a private screen.
pub fn private(config: &Config, vm: Uuid) -> PathBuf {
    vm_directory(config, vm).join(SOCKET)
}

impl Vms {
    /// Connects to the screen of a VM.
    pub fn screen(&self, config: &Config, vm: &Vm) -> Result<UnixStream, Problem> {
        let refused = |why: &str, advice: &str| {
            let what = format!("cannot open the screen of VM '{}' ({}): {why}", vm.name, vm.uuid);
            Err(Problem::new(Code::State, what).advise(advice))
        };
        let wanted = match vm.platform.get(KEY).map(String::as_str) {
            None | Some("none") => {
                let advice = "set vga=std and vnc=private in its platform while it is halted, then start it";
                return refused("it has none", advice);
            }
            Some(PRIVATE) => None,
            Some(path) => path.strip_prefix("unix:").map(PathBuf::from),
        };
        match vm.power {
            Power::Halted => return refused("it is halted", "start it"),
            Power::Suspended => return refused("it is suspended", "start it"),
            Power::Starting | Power::Running | Power::Paused | Power::Stopping => {}
        }
        let pid = self.guest(vm.uuid).and_then(|guest| i32::try_from(guest.process()?.process.pid).ok());
        let Some(pid) = pid else { return refused("its machine is not reached yet", "try again") };
        let mut places = [Some(private(config, vm.uuid)), wanted].into_iter().flatten();
        let connected = places.find_map(|path| console::connect_to(&path, pid));
        let Some(stream) = connected else {
            return refused(
                "its QEMU does not listen there",
                "close other viewers, or shut the VM down and start it again",
            );
        };
        stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream)).map_err(|error| {
            Problem::failed(format_args!("connect to the screen of VM '{}' ({})", vm.name, vm.uuid), error)
        })
    }
}
