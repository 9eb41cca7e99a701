//! Tapline as the demo uses it: its commands, run in the demo's directory, and the disk process that serves a guest.
//!
//! Uses the command line and the lines of statistics. A disk process is killed on drop.

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::Deserialize;
use thiserror::Error;

use super::tool::{self, ToolError};

/// Timeout for a disk process to create its socket, react to a signal or exit, sufficient on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(10);

#[derive(Debug, Error)]
pub enum TaplineError {
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot start `{command}`")]
    Start { command: String, source: io::Error },
    #[error("cannot {what} {}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("the disk process ended ({status}) before it was told to: {said}")]
    Ended { status: ExitStatus, said: String },
    #[error("the disk process did not {what} within {} s: {said}", PATIENCE.as_secs())]
    Late { what: &'static str, said: String },
    #[error("the disk process ended badly ({status}) when told to stop: {said}")]
    Stopped { status: ExitStatus, said: String },
    #[error("statistics of the disk process are no JSON object of the agreed form: {line}")]
    Statistics { line: String, source: serde_json::Error },
    #[error("the answer of the disk process is no JSON: {line}")]
    Answer { line: String, source: serde_json::Error },
    #[error("cannot signal the disk process")]
    Signal { source: rustix::io::Errno },
}

/// Whether the guest may write to the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadWrite,
    ReadOnly,
}

/// Counts of the disk process since its start.
#[derive(Debug, Clone, Deserialize)]
pub struct Statistics {
    pub reads: Count,
    pub writes: Count,
    pub flushes: Count,
    pub discards: Count,
    pub elapsed_ns: u64,
}

/// Number of requests of one kind, and their total time in the disk process.
#[derive(Debug, Clone, Deserialize)]
pub struct Count {
    pub count: u64,
    pub sum_ns: u64,
}

impl Statistics {
    /// Total time of requests in the disk process.
    pub fn time_in_process(&self) -> Duration {
        let kinds = [&self.reads, &self.writes, &self.flushes, &self.discards];
        kinds.into_iter().map(|kind| Duration::from_nanos(kind.sum_ns)).sum()
    }
}

pub struct Tapline {
    program: PathBuf,
    work: PathBuf,
    served: Cell<u32>,
}

impl Tapline {
    /// The program, run in the directory `work`; images are named relative to it.
    pub fn new(program: PathBuf, work: &Path) -> Self {
        Self { program, work: work.to_owned(), served: Cell::new(0) }
    }

    /// Runs `tapline image ARGUMENTS`.
    pub fn image(&self, arguments: &[&str]) -> Result<String, TaplineError> {
        Ok(tool::text(Command::new(&self.program).arg("image").args(arguments).current_dir(&self.work))?)
    }

    /// Runs `tapline disk SOCKET VERB ARGUMENTS` on a served disk; returns the reply.
    pub fn disk(&self, disk: &DiskProcess, words: &[&str]) -> Result<serde_json::Value, TaplineError> {
        let mut command = Command::new(&self.program);
        command.args(["disk", &disk.control]).args(words).arg("--json").current_dir(&self.work);
        let answer = tool::text(&mut command)?;
        // Progress lines precede the reply.
        let line = answer.lines().last().unwrap_or_default().to_owned();
        let mut answer: serde_json::Value =
            serde_json::from_str(&line).map_err(|source| TaplineError::Answer { line, source })?;
        Ok(answer["ok"].take())
    }

    /// Serves the first of `layers`, with the others as its parents, on a socket of its own.
    pub fn serve(&self, layers: &[&str], access: Access, queues: u32) -> Result<DiskProcess, TaplineError> {
        let number = self.served.get() + 1;
        self.served.set(number);
        let socket = format!("disk-{number}.sock");
        let statistics = format!("disk-{number}.stats");
        let control = format!("disk-{number}.control");
        let serial = format!("disk-{number}");
        let log = self.work.join(format!("disk-{number}.log"));
        let mut command = tool::bound_to_us(&self.program);
        command.arg("serve");
        for (depth, layer) in layers.iter().enumerate() {
            command.args((depth > 0).then_some("--parent")).arg(layer);
        }
        command.args(["--vhost-user", &socket, "--queues", &queues.to_string(), "--stats", &statistics]);
        command.args(["--control", &control, "--serial", &serial]);
        command.args((access == Access::ReadOnly).then_some("--read-only"));
        let errors = File::create(&log).map_err(|source| file_error("create", &log, source))?;
        let printed = errors.try_clone().map_err(|source| file_error("share", &log, source))?;
        // In a process group of its own, so that a kill leaves no helper process behind.
        command.current_dir(&self.work).stdin(Stdio::null()).stdout(printed).stderr(errors);
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let spawned = command.spawn();
        let child = spawned.map_err(|source| TaplineError::Start { command: tool::line_of(&command), source })?;
        let statistics = self.work.join(statistics);
        let mut disk = DiskProcess { child, socket, control, serial, statistics, log, stated: 0 };
        let listens = self.work.join(&disk.socket);
        disk.wait_until("open its socket", |_| Ok(listens.exists()))?;
        Ok(disk)
    }
}

/// A disk process that serves a disk.
pub struct DiskProcess {
    child: Child,
    socket: String,
    control: String,
    serial: String,
    statistics: PathBuf,
    log: PathBuf,
    /// Number of lines of statistics read so far.
    stated: usize,
}

impl DiskProcess {
    /// The name of its socket in the demo's directory.
    pub fn socket(&self) -> &str {
        &self.socket
    }

    /// The serial number that the guest sees, which is unique in the directory.
    pub fn serial(&self) -> &str {
        &self.serial
    }

    /// Its current counts.
    pub fn statistics(&mut self) -> Result<Statistics, TaplineError> {
        self.signal(Signal::USR1)?;
        let seen = self.stated;
        let mut line = String::new();
        self.wait_until("state its statistics", |disk| {
            let stated = disk.stated_lines()?;
            line = stated.get(seen).cloned().unwrap_or_default();
            Ok(stated.len() > seen)
        })?;
        self.stated += 1;
        serde_json::from_str(&line).map_err(|source| TaplineError::Statistics { line, source })
    }

    /// Stops it cleanly: everything drained, flushed and unlocked.
    pub fn stop(mut self) -> Result<(), TaplineError> {
        self.signal(Signal::TERM)?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.ended()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(TaplineError::Stopped { status, said: self.said() }),
                None if Instant::now() > until => return Err(TaplineError::Late { what: "stop", said: self.said() }),
                None => thread::sleep(POLL),
            }
        }
    }

    /// Kills it, as a crash would, with all requests in flight.
    pub fn kill(mut self) -> Result<(), TaplineError> {
        kill_process_group(self.pid(), Signal::KILL).map_err(|source| TaplineError::Signal { source })?;
        self.child.wait().map_err(|source| file_error("wait for the process of", &self.log, source))?;
        Ok(())
    }

    fn wait_until(
        &mut self,
        what: &'static str,
        mut done: impl FnMut(&Self) -> Result<bool, TaplineError>,
    ) -> Result<(), TaplineError> {
        let until = Instant::now() + PATIENCE;
        while !done(self)? {
            if let Some(status) = self.ended()? {
                return Err(TaplineError::Ended { status, said: self.said() });
            }
            if Instant::now() > until {
                return Err(TaplineError::Late { what, said: self.said() });
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// The complete lines of its statistics file, which is created with the first one.
    fn stated_lines(&self) -> Result<Vec<String>, TaplineError> {
        match fs::read_to_string(&self.statistics) {
            Ok(text) => Ok(text.split_inclusive('\n').filter(|line| line.ends_with('\n')).map(str::to_owned).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(file_error("read", &self.statistics, source)),
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>, TaplineError> {
        self.child.try_wait().map_err(|source| file_error("wait for the process of", &self.log, source))
    }

    fn signal(&self, signal: Signal) -> Result<(), TaplineError> {
        kill_process(self.pid(), signal).map_err(|source| TaplineError::Signal { source })
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn said(&self) -> String {
        tool::last_lines(&fs::read_to_string(&self.log).unwrap_or_default(), 5)
    }
}

impl Drop for DiskProcess {
    fn drop(&mut self) {
        // The pid of a process that was waited for may have been reused; only ours is killed.
        if matches!(self.child.try_wait(), Ok(None)) {
            let killed = kill_process_group(self.pid(), Signal::KILL).map_err(io::Error::from);
            if let Err(error) = killed.and_then(|()| self.child.wait()) {
                eprintln!("cannot end the disk process {}: {error}", self.child.id());
            }
        }
    }
}

fn file_error(what: &'static str, path: &Path, source: io::Error) -> TaplineError {
    TaplineError::File { what, path: path.to_owned(), source }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn time_in_process_is_that_of_all_kinds() {
        let line = r#"{"reads":{"count":2,"bytes":8192,"sum_ns":1500},"writes":{"count":1,"bytes":512,"sum_ns":500},
            "flushes":{"count":0,"bytes":0,"sum_ns":0},"discards":{"count":1,"bytes":0,"sum_ns":7},"elapsed_ns":9000}"#;

        let statistics: Statistics = serde_json::from_str(line).unwrap();

        assert_eq!(statistics.time_in_process(), Duration::from_nanos(2007));
    }
}
