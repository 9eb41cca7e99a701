//! A running machine: started or adopted, queried, controlled, and observed to its end.
//!
//! It knows nothing about the servers of its disks. Invariant: the machine is independent of the process that started
//! it, and outlives it; every call returns in bounded time; a QEMU that has exited is reported as such, with its last
//! output.

mod disks;
mod ended;
mod error;
mod launch;
mod run_state;
mod save;

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub use self::ended::{Ended, Shutdown};
pub use self::error::MachineError;
use self::error::{monitor, process};
use self::launch::Files;
pub use self::run_state::Status;
pub use self::save::{Kind, Leftover, Saving};
use super::account::{Account, Means, NotReady};
use super::command_line::{INCOMING, without_sandbox, words};
use super::console::{self, CONSOLE, GUEST_PORT};
use super::hardware::{Console, ConsoleTo, Hardware};
use super::process::{Identity, Process};
use super::version::Version;
use crate::qmp::{Client, Event, QmpError};

/// For one command. Most take a millisecond; one that plugs a disk waits for who serves it.
const COMMAND: Duration = Duration::from_secs(30);

/// For a program to say which QEMU it is, before it is taken for the oldest.
const TO_SAY_VERSION: Duration = Duration::from_secs(10);

/// The interval for polling a QEMU that does not listen yet.
const POLL: Duration = Duration::from_millis(10);

/// The time limit for reading the monitor of a QEMU that has exited: it is closed, and everything sent is available.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The time limit for the exit of QEMU after `quit`: it only has to wait for the disks' processes.
const TO_END: Duration = Duration::from_secs(10);

/// A machine, which keeps running if this is dropped. A process that has started it is its parent, and should keep this
/// until it has [ended](QemuVm::ended).
#[derive(Debug)]
pub struct QemuVm {
    process: Process,
    /// If we have started it.
    child: Option<Child>,
    client: Client,
    files: Files,
    vcpus: u16,
    /// Not known of one that was found again.
    sandboxed: bool,
    /// The connection to its console, until it is taken.
    console: Option<UnixStream>,
    /// The connection to the guest's port, until it is taken.
    guest_port: Option<UnixStream>,
    /// A command that stops or continues the guest, or the query of its state, has no answer yet.
    in_doubt: bool,
}

/// How a machine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The guest has powered off.
    Guest,
    /// It has not done so in time, and QEMU quit on command, as if the power were cut.
    Quit,
    /// QEMU did not either, and was killed.
    Killed,
}

impl QemuVm {
    /// Starts a machine, in a directory for its monitor and its messages, and lets the guest run.
    pub fn start(
        program: &Path,
        hardware: &Hardware,
        directory: &Path,
        patience: Duration,
    ) -> Result<Self, MachineError> {
        Self::start_as(None, program, hardware, directory, patience, None, &|| false)
    }

    /// The same as a user that owns the directory ([`Account::own`]) and has no other permissions; `None` is the
    /// caller's own user. With `memory`, which was saved, the guest is where it was then, and does not run yet. A QEMU
    /// that has not answered when the caller has `given_up` is killed.
    pub fn start_as(
        account: Option<&Account>,
        program: &Path,
        hardware: &Hardware,
        directory: &Path,
        patience: Duration,
        memory: Option<&File>,
        given_up: &dyn Fn() -> bool,
    ) -> Result<Self, MachineError> {
        hardware.check()?;
        let mut files = Files::of(directory)?;
        let means =
            account.map(|account| {
                files.must_be_reachable(account)?;
                Means::prepare(hardware, directory, account)
                    .map_err(|NotReady { what, path, source }| MachineError::File { what, path, source })
            });
        let means = means.transpose()?;
        hardware.disks.iter().try_for_each(disks::see_served)?;
        let deadline = Instant::now() + patience;
        // Nothing else depends on the version. If a program does not print it, its error on start is more useful.
        let version = match hardware.disks.is_empty() {
            true => Version::OLDEST,
            false => Version::of(program, patience.min(TO_SAY_VERSION)).unwrap_or(Version::OLDEST),
        };
        let said = words(means.as_ref().map_or(hardware, |means| &means.hardware), &files.monitor, version);
        let before: Vec<String> =
            means.iter().flat_map(Means::words).chain(account.into_iter().flat_map(Account::words)).collect();
        let incoming = memory.iter().flat_map(|_| INCOMING.map(str::to_owned));
        let said: Vec<String> = means.iter().flat_map(Means::descriptors).chain(said).chain(incoming).collect();
        let mut starting = Starting(Some(files.start(&before, program, &said)?));
        let (client, sandboxed) = match starting.connect(&files, deadline, patience, given_up) {
            Err(MachineError::Ended { what, said: last }) => {
                let Some(said) = without_sandbox(&said, &last) else {
                    return Err(MachineError::Ended { what, said: last });
                };
                starting = Starting(Some(files.start(&before, program, &said)?));
                (starting.connect(&files, deadline, patience, given_up)?, false)
            }
            client => (client?, true),
        };
        let process = starting.process()?;
        let child = starting.0.take();
        let has_console = matches!(hardware.console, Some(Console { to: ConsoleTo::Socket(_), .. }));
        // Before the guest runs: QEMU keeps nothing of what it writes.
        let pid = process.identity().pid;
        let console = if has_console { console::connect(directory, CONSOLE, pid) } else { None };
        let guest_port = hardware.guest_port.as_ref().and_then(|_| console::connect(directory, GUEST_PORT, pid));
        let vcpus = hardware.vcpus;
        let in_doubt = false;
        let mut machine = Self { process, child, client, files, vcpus, sandboxed, console, guest_port, in_doubt };
        let begun = match memory {
            Some(memory) => machine.load(memory, hardware.memory_mib),
            None => machine.resume(),
        };
        if let Err(error) = begun {
            machine.kill()?;
            return Err(error);
        }
        means.iter().for_each(Means::started);
        Ok(machine)
    }

    /// Finds a machine again that was started earlier, by another process perhaps. One that its starter had not let run
    /// yet is paused.
    pub fn adopt(identity: &Identity, directory: &Path, patience: Duration) -> Result<Self, MachineError> {
        let files = Files::of(directory)?;
        let found = Process::find(identity).map_err(process("find"))?;
        let process = found.ok_or_else(|| MachineError::Gone { identity: identity.clone() })?;
        let client = Client::connect(&files.monitor, patience).map_err(monitor("adopt the VM"))?;
        let listener = client.peer().map_err(error::process("get the pid of"))?;
        if listener != identity.pid {
            let (path, expected) = (files.monitor, identity.pid);
            return Err(MachineError::NotIts { path, found: listener, expected });
        }
        let console = console::connect(directory, CONSOLE, identity.pid);
        let guest_port = console::connect(directory, GUEST_PORT, identity.pid);
        let (child, vcpus, sandboxed, in_doubt) = (None, 0, true, false);
        let mut machine = Self { process, child, client, files, vcpus, sandboxed, console, guest_port, in_doubt };
        let processors = machine.command("count its processors", "query-cpus-fast", &json!({}))?;
        machine.vcpus = processors.as_array().and_then(|list| u16::try_from(list.len()).ok()).unwrap_or(1);
        Ok(machine)
    }

    /// The identity of its process, for reattaching.
    pub fn identity(&self) -> &Identity {
        self.process.identity()
    }

    /// Presses the power button and waits for the guest to power off, for at most `patience`; then ends it.
    pub fn shutdown(&mut self, patience: Duration) -> Result<Ending, MachineError> {
        match self.command("press the power button", "system_powerdown", &json!({})) {
            Ok(_) if self.wait_ended(patience)? => return Ok(Ending::Guest),
            Ok(_) => {}
            Err(MachineError::Ended { .. }) => return Ok(Ending::Guest),
            // It may press it later.
            Err(late) if late.is_late() && self.wait_ended(patience)? => return Ok(Ending::Guest),
            // A QEMU that does not listen has to end as well.
            Err(_) => {}
        }
        self.end()
    }

    /// Ends the machine at once, whatever the guest does: as if the power had gone.
    pub fn end(&mut self) -> Result<Ending, MachineError> {
        // A QEMU that exits before it responds has carried out the request.
        let told = self.client.execute("quit", &json!({}), TO_END);
        let heard = matches!(&told, Ok(_) | Err(QmpError::Gone { .. }));
        if heard && self.wait_ended(TO_END)? {
            return Ok(Ending::Quit);
        }
        self.kill()?;
        Ok(Ending::Killed)
    }

    /// Kills QEMU and waits until it is gone.
    fn kill(&mut self) -> Result<(), MachineError> {
        self.process.kill().map_err(process("kill"))?;
        if self.wait_ended(TO_END)? {
            return Ok(());
        }
        let source = std::io::Error::other("it was killed but does not exit: it is waiting in the kernel for storage");
        Err(MachineError::Process { what: "kill", source })
    }

    /// Whether QEMU exits within `patience`.
    pub fn wait_ended(&mut self, patience: Duration) -> Result<bool, MachineError> {
        let ended = self.process.wait(patience).map_err(process("wait for"))?;
        if ended {
            self.reap()?;
        }
        Ok(ended)
    }

    /// How QEMU has ended, if it has: the guest has powered off, or QEMU was killed or crashed. The machine's
    /// descriptor is readable from then on.
    pub fn ended(&mut self) -> Result<Option<Ended>, MachineError> {
        if !self.process.wait(Duration::ZERO).map_err(process("watch"))? {
            return Ok(None);
        }
        let status = self.reap()?;
        Ok(Some(Ended { status, shutdown: self.shutdown_said(), said: self.files.last_words() }))
    }

    /// The reason that an exited QEMU gave for its exit. Its last message may not have been read.
    fn shutdown_said(&mut self) -> Option<Shutdown> {
        // A monitor that fails has nothing more to say.
        let event = self.client.wait_event(LAST_WORDS, |event| event.name == "SHUTDOWN").ok().flatten()?;
        let reason = event.data["reason"].as_str().unwrap_or("unknown").to_owned();
        Some(Shutdown { guest: event.data["guest"] == true, reason })
    }

    /// Has the monitor do what there is no other function for: `command` is QEMU's (docs/interop/qemu-qmp-ref), and so
    /// is the answer.
    pub fn ask(&mut self, command: &str, arguments: &Value) -> Result<Value, MachineError> {
        self.command(&format!("do {command}"), command, arguments)
    }

    /// Whether the QEMU that we started filters its own system calls: one built without support does not.
    pub fn is_sandboxed(&self) -> bool {
        self.sandboxed
    }

    /// The connection to the guest's console: what the guest writes there is lost while nothing reads it. `None` if it
    /// has no console in the machine's directory, or if it was taken before.
    pub fn take_console(&mut self) -> Option<UnixStream> {
        self.console.take()
    }

    /// The connection to the port of the guest's [reader](super::hardware::Hardware::guest_port). `None` if it has no
    /// such port in the machine's directory, or if it was taken before.
    pub fn take_guest_port(&mut self) -> Option<UnixStream> {
        self.guest_port.take()
    }

    /// Where QEMU's messages go.
    pub fn log(&self) -> &Path {
        &self.files.log
    }

    /// Takes the events that QEMU has sent since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.client.take_events()
    }

    fn reap(&mut self) -> Result<Option<ExitStatus>, MachineError> {
        self.child.as_mut().map(Child::wait).transpose().map_err(process("wait for"))
    }

    fn command(&mut self, what: &str, command: &str, arguments: &Value) -> Result<Value, MachineError> {
        self.client.execute(command, arguments, COMMAND).map_err(|error| self.explained(what, error))
    }

    /// A monitor that is gone means that QEMU has ended, which has more to say about it.
    fn explained(&mut self, what: impl Into<String>, error: QmpError) -> MachineError {
        if error.is_gone() && matches!(self.wait_ended(Duration::from_secs(1)), Ok(true)) {
            return MachineError::Ended { what: what.into(), said: self.files.last_words() };
        }
        monitor(what)(error)
    }
}

impl AsFd for QemuVm {
    /// Readable when QEMU has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }
}

/// A QEMU that does not listen yet; killed if it never does.
struct Starting(Option<Child>);

impl Starting {
    fn connect(
        &mut self,
        files: &Files,
        deadline: Instant,
        patience: Duration,
        given_up: &dyn Fn() -> bool,
    ) -> Result<Client, MachineError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match Client::connect_unless(&files.monitor, left, given_up) {
                Ok(client) if self.is_its(&client)? => return Ok(client),
                // An earlier machine's, which has not ended, or has left its socket.
                Ok(_) | Err(QmpError::Connect { .. }) => {}
                Err(error) if error.is_gone() => {}
                Err(error) => return Err(monitor("start the VM")(error)),
            }
            if self.ended()? {
                return Err(MachineError::Ended { what: "start the machine".to_owned(), said: files.last_words() });
            }
            if left.is_zero() || given_up() {
                let source = QmpError::Late { during: "its greeting".to_owned(), after: patience };
                return Err(monitor("start the VM")(source));
            }
            thread::sleep(POLL);
        }
    }

    fn is_its(&self, client: &Client) -> Result<bool, MachineError> {
        let peer = client.peer().map_err(process("get the pid of"))?;
        Ok(self.0.as_ref().is_some_and(|child| i64::from(child.id()) == i64::from(peer)))
    }

    fn ended(&mut self) -> Result<bool, MachineError> {
        let ended = self.0.as_mut().map(Child::try_wait).transpose().map_err(process("watch"))?;
        Ok(ended.flatten().is_some())
    }

    fn process(&self) -> Result<Process, MachineError> {
        let pid = self.0.as_ref().and_then(|child| i32::try_from(child.id()).ok()).unwrap_or(0);
        Process::with_pid(pid).map_err(process("find"))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let Some(mut child) = self.0.take() else { return };
        // One that has ended cannot be killed and needs not; it is waited for in both cases.
        if let Err(error) = child.kill().and_then(|()| child.wait()) {
            // A message that cannot be written is no reason to panic.
            writeln!(std::io::stderr(), "cannot end QEMU, process {}: {error}", child.id()).unwrap_or_default();
        }
    }
}
