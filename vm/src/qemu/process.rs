//! A process that can be reattached to: identified by its pid, start time and the host's boot.
//!
//! It knows nothing about the program. Invariant: only the intended process is polled, signalled and waited for, never
//! another one that has got the same pid.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// The index of `starttime` in /proc/PID/stat, counted from after the name in brackets (proc(5): field 22).
const START_FIELD: usize = 19;

/// Identifies a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Its number.
    pub pid: i32,
    /// When it was started, in ticks since the host's boot.
    pub started: u64,
    /// The boot of the host.
    pub boot: String,
}

/// A process, by a descriptor that is readable when it has ended.
#[derive(Debug)]
pub struct Process {
    identity: Identity,
    descriptor: OwnedFd,
}

impl Process {
    /// The process with this number, which must be known to be alive or not yet waited for.
    pub fn with_pid(pid: i32) -> io::Result<Self> {
        let descriptor = open(pid)?;
        Ok(Self { identity: Identity { pid, started: started(pid)?, boot: boot()? }, descriptor })
    }

    /// The process that is meant, if it still runs.
    pub fn find(identity: &Identity) -> io::Result<Option<Self>> {
        if identity.boot != boot()? {
            return Ok(None);
        }
        let descriptor = match open(identity.pid) {
            Ok(descriptor) => descriptor,
            Err(error) if gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        };
        // The start is read after the descriptor was opened: if it is the right one, then so is the descriptor's
        // process.
        match started(identity.pid) {
            Ok(started) if started == identity.started => {}
            Ok(_) => return Ok(None),
            Err(error) if gone(&error) => return Ok(None),
            Err(error) => return Err(error),
        }
        let process = Self { identity: identity.clone(), descriptor };
        Ok(if process.wait(Duration::ZERO)? { None } else { Some(process) })
    }

    /// The identity of the process, for reattaching.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Whether it has ended, or does within `timeout`.
    pub fn wait(&self, timeout: Duration) -> io::Result<bool> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let timespec = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&self.descriptor, PollFlags::IN)], timespec.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Kills it; that it has ended already is no error.
    pub fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.descriptor, Signal::KILL) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

/// Whether the process does not exist or is a zombie. In doubt it exists.
pub fn has_ended(pid: i32) -> bool {
    match open(pid) {
        Err(error) => error.raw_os_error() == Some(Errno::SRCH.raw_os_error()),
        Ok(process) => {
            let (mut polled, at_once) = ([PollFd::new(&process, PollFlags::IN)], Timespec::default());
            poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
        }
    }
}

fn open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or_else(|| io::Error::from(Errno::SRCH))?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn gone(error: &io::Error) -> bool {
    // If a process exits while its file is being read, the read fails with ESRCH.
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

fn started(pid: i32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let start = start_in(&stat);
    start.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has no start: {stat}")))
}

/// The name before it is in brackets, and may have blanks and brackets itself.
fn start_in(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(START_FIELD)?.parse().ok()
}

fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod test {
    use std::process::{Child, Command};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    fn sleeper() -> (Child, Process) {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = Process::with_pid(child.id().try_into().unwrap()).unwrap();
        (child, process)
    }

    #[test]
    fn the_start_time_is_parsed_after_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 98765 1 1 1\n";
        assert_eq!(start_in(stat), Some(98765));
        assert_eq!(start_in("42 (a"), None);
    }

    #[test]
    fn a_process_is_found_until_it_has_exited() {
        let (mut child, process) = sleeper();
        let identity = process.identity().clone();
        let again = Process::find(&identity).unwrap().unwrap();
        assert!(!again.wait(Duration::from_millis(10)).unwrap());
        process.kill().unwrap();
        assert!(again.wait(SOON).unwrap());
        // It has not been waited for: its number is still its own, and it is gone nevertheless.
        assert!(Process::find(&identity).unwrap().is_none());
        child.wait().unwrap();
        assert!(Process::find(&identity).unwrap().is_none());
        process.kill().unwrap();
    }

    #[test]
    fn another_process_with_the_same_pid_is_not_confused() {
        let (mut child, process) = sleeper();
        let identity = process.identity();
        let earlier = Identity { started: identity.started - 1, ..identity.clone() };
        assert!(Process::find(&earlier).unwrap().is_none());
        let of_another_boot = Identity { boot: "another".to_owned(), ..identity.clone() };
        assert!(Process::find(&of_another_boot).unwrap().is_none());
        process.kill().unwrap();
        child.wait().unwrap();
    }
}
