//! The disk under test: successive processes at the same sockets, killed, or replaced by one that is not our child.
//!
//! Uses the command line of `tapline-disk` and its log. Invariants: the process that serves is the one that is killed,
//! and none survives the drop.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, set_child_subreaper, waitid,
};

use serde_json::Value;

use super::Failure;
use super::chain;
use crate::guest::CPUS;
use crate::tool;

const LOG: &str = "disk.log";

/// Timeout for the end of a process that was requested, sufficient on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The progress of the current process, according to its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// No client can connect yet.
    Opening,
    /// The guest may be connecting.
    Listening,
    /// The guest's rings are running.
    Serving,
}

pub struct Disk {
    program: PathBuf,
    work: PathBuf,
    run: PathBuf,
    process: Option<Process>,
    /// Offset in the log at which the output of this process begins.
    log_from: u64,
    /// Whether it has taken over from a predecessor.
    upgraded: bool,
    /// Number of processes so far.
    pub started: u64,
}

struct Process {
    pidfd: OwnedFd,
}

impl Disk {
    /// A disk with the images in `work`, and with sockets and redo logs in `run`. No process serves it yet.
    pub fn new(program: PathBuf, work: &Path, run: &Path) -> Result<Self, Failure> {
        // A successor becomes our child when its predecessor ends.
        set_child_subreaper(Pid::from_raw(1)).map_err(io::Error::from).map_err(Failure::file("watch over", work))?;
        let (work, run) = (work.to_owned(), run.to_owned());
        Ok(Self { program, work, run, process: None, log_from: 0, upgraded: false, started: 0 })
    }

    /// The path of the vhost-user socket.
    pub fn socket(&self) -> PathBuf {
        self.run.join("disk.sock")
    }

    /// The path of the control socket.
    pub fn control(&self) -> PathBuf {
        self.run.join("disk.control")
    }

    /// The directory of its redo logs.
    pub fn redo(&self) -> PathBuf {
        redo_in(&self.run)
    }

    /// Starts a process that has only the files.
    pub fn start(&mut self) -> Result<(), Failure> {
        let layers = chain::of(&self.work).map_err(Failure::file("look for images in", &self.work))?;
        let path = self.work.join(LOG);
        let log = OpenOptions::new().create(true).append(true).open(&path).map_err(Failure::file("open", &path))?;
        self.log_from = log.metadata().map_err(Failure::file("look at", &path))?.len();
        let mut command = tool::bound_to_us(&self.program);
        command.arg("serve");
        for (depth, layer) in layers.iter().enumerate() {
            command.args((depth > 0).then_some("--parent")).arg(format!("qcow2:{layer}"));
        }
        command.arg("--vhost-user").arg(self.socket()).arg("--control").arg(self.control());
        command.args(["--queues", &CPUS.to_string()]);
        command.current_dir(&self.work).env("TAPLINE_REDO_DIR", self.redo()).stdin(Stdio::null());
        command.stdout(log.try_clone().map_err(Failure::file("share", &path))?).stderr(log);
        let child = command.spawn().map_err(Failure::file("start", &self.program))?;
        let pid = Pid::from_child(&child);
        self.process = Some(Process { pidfd: pidfd(pid).map_err(Failure::file("start", &self.program))? });
        (self.started, self.upgraded) = (self.started + 1, false);
        Ok(())
    }

    /// Kills the process, as a crash would, with all requests in flight.
    pub fn kill(&mut self) -> Result<(), Failure> {
        let Some(process) = self.process.take() else { return Ok(()) };
        let failed = || Failure::file("kill the process of", &self.program);
        pidfd_send_signal(&process.pidfd, Signal::KILL).map_err(io::Error::from).map_err(failed())?;
        process.reap().map_err(failed())
    }

    /// Replaces the process, as an upgrade of the program does.
    pub fn upgrade(&mut self) -> Result<Duration, Failure> {
        let answer = self.request_upgrade()?;
        let Some(old) = self.process.take() else { return Ok(Duration::ZERO) };
        let failed = || Failure::file("replace the process of", &self.program);
        if !old.ends_within(PATIENCE).map_err(failed())? {
            self.process = Some(old);
            return Err(Failure::Claim("a process that was replaced is still running".to_owned()));
        }
        old.reap().map_err(failed())?;
        let pid = answer["ok"]["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        let (Some(pid), Some(pause)) = (pid, answer["ok"]["pause_us"].as_u64()) else {
            return Err(Failure::Claim(format!("the response names no successor of the process: {answer}")));
        };
        self.process = Some(Process { pidfd: pidfd(pid).map_err(failed())? });
        (self.started, self.upgraded) = (self.started + 1, true);
        Ok(Duration::from_micros(pause))
    }

    /// Requests an upgrade; repeated if the process was just started or is taking a snapshot.
    fn request_upgrade(&self) -> Result<Value, Failure> {
        let begun = Instant::now();
        loop {
            let mut command = Command::new(self.program.with_file_name("tapline"));
            command.arg("disk").arg(self.control()).args(["upgrade", "--json", "--pause-max", "60000"]);
            let output = command.output().map_err(Failure::file("ask for an upgrade", &self.program))?;
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            if output.status.success() {
                return Ok(answer);
            }
            let is_busy = answer.is_null() || answer["error"]["kind"] == "busy";
            if !is_busy || begun.elapsed() > PATIENCE {
                let said = String::from_utf8_lossy(&output.stderr);
                return Err(Failure::Claim(format!("the disk was not handed to another process: {answer} {said}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The progress of the process; an error if it has ended by itself.
    pub fn stage(&self) -> Result<Stage, Failure> {
        let said = self.said()?;
        let ended = self.process.as_ref().map_or(Ok(true), |process| process.ends_within(Duration::ZERO));
        if ended.map_err(Failure::file("watch the process of", &self.program))? {
            return Err(Failure::Ended { said: tool::last_lines(&said, 6) });
        }
        // With or without a record of requests in flight.
        if self.upgraded || said.contains("the front-end records") {
            return Ok(Stage::Serving);
        }
        Ok(if said.contains("serving vhost-user-blk at") { Stage::Listening } else { Stage::Opening })
    }

    /// Whether the guest's front-end records requests in flight, according to the current process.
    pub fn is_recorded(&self) -> Result<bool, Failure> {
        Ok(self.said()?.contains("they survive a crash of this process"))
    }

    /// The log output of the current process.
    fn said(&self) -> Result<String, Failure> {
        let path = self.work.join(LOG);
        let mut text = String::new();
        let read = File::open(&path).and_then(|mut log| {
            log.seek(SeekFrom::Start(self.log_from))?;
            log.read_to_string(&mut text)
        });
        read.map_err(Failure::file("read", &path))?;
        Ok(text)
    }
}

/// The directory of redo logs in `run`.
pub fn redo_in(run: &Path) -> PathBuf {
    run.join("redo")
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Err(failure) = self.kill() {
            eprintln!("{failure}");
        }
    }
}

impl Process {
    fn ends_within(&self, patience: Duration) -> io::Result<bool> {
        let timeout = Timespec { tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX), tv_nsec: 0 };
        Ok(poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&timeout))? > 0)
    }

    /// Waits for the end of the process.
    fn reap(self) -> io::Result<()> {
        waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED)?;
        Ok(())
    }
}

fn pidfd(pid: Pid) -> io::Result<OwnedFd> {
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}
