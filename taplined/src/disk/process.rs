//! A disk process: started or reattached to, signalled, and waited for without polling.
//!
//! It is identified by its pid and start time, a combination that is never reused, and held by a pidfd, which becomes
//! readable when it exits and can never refer to another process. It outlives the daemon: dropping this value does not
//! affect the process.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::Child;

use api::Problem;
use repo::catalogue::Process;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::kernel::started;

/// Bytes of output that are read when a process has exited before it served.
const OUTPUT_MAX: u64 = 64 << 10;

/// A disk process.
#[derive(Debug)]
pub struct DiskProcess {
    identity: Process,
    pidfd: AsyncFd<OwnedFd>,
    /// Set if this daemon has started it: then it must be reaped, and its exit status is available.
    child: Option<Child>,
}

impl DiskProcess {
    /// A process that was just started. If it cannot be watched, it is killed.
    pub fn of_child(mut child: Child) -> Result<DiskProcess, Problem> {
        match hold(child.id()) {
            Ok(Some((identity, pidfd))) => Ok(DiskProcess { identity, pidfd, child: Some(child) }),
            held => {
                let why = held.err().unwrap_or_else(|| Problem::failed("watch a disk process", "it does not exist"));
                // It has received nothing yet and only waits for its files; killing it cannot fail, so the wait ends.
                let ended = child.kill().and_then(|()| child.wait());
                ended.map_err(|error| Problem::failed(format_args!("kill a disk process ({why})"), error))?;
                Err(why)
            }
        }
    }

    /// A process that an earlier daemon started, if it still exists.
    pub fn find(identity: Process) -> Result<Option<DiskProcess>, Problem> {
        let found = hold(identity.pid)?.filter(|(found, _)| *found == identity);
        Ok(found.map(|(identity, pidfd)| DiskProcess { identity, pidfd, child: None }))
    }

    /// The process with this pid, if it exists and `ours` recognizes its command line. The command line, everything
    /// else that `ours` checks, and the pidfd belong to the same process.
    pub fn with_words(pid: u32, ours: impl Fn(&[u8]) -> bool) -> Result<Option<DiskProcess>, Problem> {
        let Some((identity, pidfd)) = hold(pid)? else { return Ok(None) };
        let is_ours = std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|words| ours(&words));
        // The pid may have been reused between the two: that process started later.
        let found = is_ours && started(pid) == Some(identity.started);
        Ok(found.then_some(DiskProcess { identity, pidfd, child: None }))
    }

    /// The process serves: its output is no longer needed.
    pub fn serves(&mut self) {
        if let Some(child) = &mut self.child {
            child.stdout = None;
        }
    }

    /// The error that the process printed, if any. Call once it has exited.
    pub fn last_word(&mut self) -> Option<control::Error> {
        let output = self.child.as_mut()?.stdout.take()?;
        // The pipe may outlive the process: do not block on it.
        rustix::io::ioctl_fionbio(&output, true).ok()?;
        let mut text = String::new();
        // On a read error, only the part read so far is searched.
        output.take(OUTPUT_MAX).read_to_string(&mut text).ok()?;
        control::Error::in_output(&text)
    }

    /// The pid and start time.
    pub fn identity(&self) -> Process {
        self.identity
    }

    /// Waits until the process has exited and returns its status, if known. May be called repeatedly.
    pub async fn ended(&mut self) -> Result<Ended, Problem> {
        let wait = |error| Problem::failed(format_args!("wait for the disk process {}", self.identity.pid), error);
        let readable = self.pidfd.ready(Interest::READABLE).await.map_err(wait)?;
        drop(readable);
        let Some(child) = &mut self.child else { return Ok(Ended::Unknown) };
        // Does not block, because the pidfd is readable.
        let status = child.wait().map_err(wait)?;
        Ok(if status.success() { Ended::Well } else { Ended::Badly(status.to_string()) })
    }

    /// Whether the process has exited. It must still be reaped ([`DiskProcess::ended`]).
    pub fn has_ended(&self) -> bool {
        let mut look = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        // If the poll fails, the next call checks again.
        poll(&mut look, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// Sends a signal; not an error if the process has exited.
    pub fn signal(&self, signal: Signal) -> Result<(), Problem> {
        match pidfd_send_signal(self.pidfd.get_ref(), signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(errno) => {
                Err(Problem::failed(format_args!("send a signal to the disk process {}", self.identity.pid), errno))
            }
        }
    }

    /// Kills the process and waits for its exit, which takes as long as storage that does not answer.
    pub async fn kill(&mut self) -> Result<(), Problem> {
        self.signal(Signal::KILL)?;
        self.ended().await.map(drop)
    }
}

/// How a process has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It exited as requested, with everything flushed.
    Well,
    /// It failed; how, in words.
    Badly(String),
    /// It was not this daemon's child, so its exit status is unknown.
    Unknown,
}

/// The start time and a pidfd of the process with this pid.
fn hold(pid: u32) -> Result<Option<(Process, AsyncFd<OwnedFd>)>, Problem> {
    let watch = |why: std::io::Error| Problem::failed(format_args!("watch the disk process {pid}"), why);
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let pidfd = match pidfd_open(number, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => pidfd,
        Err(Errno::SRCH) => return Ok(None),
        Err(errno) => return Err(watch(errno.into())),
    };
    // Checked after the pidfd was opened: the process found now is the one that it refers to, or that one has exited
    // and none is found.
    let Some(started) = started(pid) else { return Ok(None) };
    // The function is deprecated for types that may return a different descriptor each time; the replacement is unsafe
    // because of those.
    #[allow(deprecated, reason = "an OwnedFd has one descriptor")]
    let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE).map_err(watch)?;
    Ok(Some((Process { pid, started }, pidfd)))
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    /// A process with a readable command line: it counts as started slightly before that is readable.
    fn sleeper() -> Child {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        while std::fs::read(format!("/proc/{}/cmdline", child.id())).unwrap() != SLEEPER {}
        child
    }

    const SLEEPER: &[u8] = b"sleep\x0060\0";

    #[tokio::test]
    async fn a_process_is_reattached_to_and_not_confused() {
        let mut child = sleeper();
        let (identity, _) = hold(child.id()).unwrap().unwrap();
        let mut found = DiskProcess::find(identity).unwrap().unwrap();
        let other = Process { started: identity.started + 1, ..identity };
        assert!(DiskProcess::find(other).unwrap().is_none());
        child.kill().unwrap();
        assert_eq!(found.ended().await.unwrap(), Ended::Unknown);
        child.wait().unwrap();
        assert!(DiskProcess::find(identity).unwrap().is_none());
        found.signal(Signal::TERM).unwrap();
    }

    #[tokio::test]
    async fn a_process_is_identified_by_its_command_line_and_its_exit_noticed() {
        let mut child = sleeper();
        let ours = |words: &[u8]| words == SLEEPER;
        let found = DiskProcess::with_words(child.id(), ours).unwrap().unwrap();
        assert!(DiskProcess::with_words(child.id(), |_| false).unwrap().is_none());
        assert!(!found.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.has_ended());
        assert!(DiskProcess::with_words(child.id(), ours).unwrap().is_none());
    }

    #[tokio::test]
    async fn a_childs_exit_status_can_be_queried_repeatedly() {
        let mut process = DiskProcess::of_child(sleeper()).unwrap();
        process.kill().await.unwrap();
        let Ended::Badly(how) = process.ended().await.unwrap() else { panic!("it was killed") };
        assert!(how.contains('9'), "{how}");
        let mut well = DiskProcess::of_child(Command::new("true").spawn().unwrap()).unwrap();
        assert_eq!(well.ended().await.unwrap(), Ended::Well);
    }
}
