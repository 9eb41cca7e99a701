//! Runs image jobs: one process each, which is passed its files, has no privileges, and exits with the job.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{ExitStatus, Stdio};

use api::{Code, Problem};
use control::Progress;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;

use super::control::Refused;
use super::handing::Handing;
use super::oom;
use super::owners::Owners;
use super::program::{Opened, Program};
use super::redo::RedoLogs;
use crate::account::{As, Users};
use crate::config::Config;
use crate::task::started::Running;

/// Maximum bytes of a process's result; the longest is the map of a disk.
const OUTPUT_MAX: u64 = 64 << 20;
/// Bytes of its other output that are kept, and the maximum length of a line.
const WORDS_MAX: usize = 16 << 10;
const LINE_MAX: u64 = 4096;

/// Starts disk processes.
#[derive(Clone, Debug)]
pub struct Tool {
    program: Program,
    users: Users,
    /// The redo logs of image files.
    pub redo: RedoLogs,
}

/// A disk process to be started.
#[derive(Debug)]
pub struct Starting {
    /// The command.
    pub command: Command,
    program: Opened,
    runs_as: As,
}

/// Checks the users and the program of disk processes, which [`Tool::of`] and each start need.
pub fn check(config: &Config) -> Result<(), Problem> {
    users(config)?;
    Program::of(config).open().map(drop)
}

fn users(config: &Config) -> Result<Users, Problem> {
    Users::of(("disk-user", config.disk_user.as_deref()), ("disk-user-range", &config.disk_user_range))
}

impl Tool {
    /// Reads the settings. The disk users are recorded for the next daemon.
    pub fn of(config: &Config) -> Result<Tool, Problem> {
        let users = users(config)?;
        Owners::add(config, &users)?;
        Ok(Tool { program: Program::of(config), users, redo: RedoLogs::of(config) })
    }

    /// Prepares a disk process with this command line.
    pub fn starting(&self, words: &[OsString]) -> Result<Starting, Problem> {
        let program = self.program.open()?;
        let mut command = std::process::Command::new(program.executed());
        command.arg0(program.path()).args(words).current_dir("/").process_group(0).env_clear();
        let runs_as = self.users.choose()?;
        if let Some((uid, gid)) = runs_as.user {
            // Changing the user drops other groups.
            command.uid(uid).gid(gid);
        }
        Ok(Starting { command: command.into(), program, runs_as })
    }

    /// Runs `image VERB …` and returns its result. Dropping the future kills the process.
    pub async fn image<T: DeserializeOwned>(&self, words: Vec<OsString>, handing: Handing) -> Result<T, Refused> {
        self.long_image(words, handing, |_| ()).await
    }

    /// Like [`Tool::image`], for a long-running verb; `on_progress` receives the completed fraction, which never
    /// decreases.
    pub async fn long_image<T: DeserializeOwned>(
        &self,
        words: Vec<OsString>,
        handing: Handing,
        on_progress: impl FnMut(f64),
    ) -> Result<T, Refused> {
        let all = std::iter::once("image".into()).chain(words).collect();
        self.long_job(all, handing, on_progress).await
    }

    /// Like [`Tool::long_image`], for a command that is not one of `image`.
    pub async fn long_job<T: DeserializeOwned>(
        &self,
        all: Vec<OsString>,
        handing: Handing,
        on_progress: impl FnMut(f64),
    ) -> Result<T, Refused> {
        self.job(all, handing, on_progress, |_| Ok(())).await
    }

    /// Like [`Tool::image`], for a process that exchanges messages over its standard input; `talk` does, on a thread.
    pub async fn talking_image<T: DeserializeOwned>(
        &self,
        words: Vec<OsString>,
        handing: Handing,
        talk: impl FnOnce(OwnedFd) -> Result<(), Problem> + Send + 'static,
    ) -> Result<T, Refused> {
        self.job(std::iter::once("image".into()).chain(words).collect(), handing, |_| (), talk).await
    }

    async fn job<T: DeserializeOwned>(
        &self,
        mut all: Vec<OsString>,
        handing: Handing,
        on_progress: impl FnMut(f64),
        talk: impl FnOnce(OwnedFd) -> Result<(), Problem> + Send + 'static,
    ) -> Result<T, Refused> {
        // The process exits with the daemon: the next daemon repeats or rolls back the job, and finds nothing locked.
        all.extend(["--json", "--handed", "--confine", "--end-with-input"].map(OsString::from));
        let (stdin, ready) = handing.prepare(&self.redo)?;
        let mut starting = self.starting(&all)?;
        starting.command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut process = JobProcess::of(starting.start()?);
        process.child().into_iter().filter_map(|child| child.id()).for_each(oom::make_normal);
        let running = Running::begin();
        // Our end of its standard input stays open until it has exited.
        let mut sent = repo::blocking::start(move || {
            let sent = ready.send().and_then(|socket| {
                let theirs = socket.try_clone().map_err(|error| Problem::failed("talk to a disk process", error))?;
                talk(theirs).map(|()| socket)
            });
            drop(running);
            sent
        });
        let (output, words, status) = process.ended(on_progress).await?;
        match status.code() {
            // A job without a result prints nothing.
            Some(0) => serde_json::from_str(if output.trim().is_empty() { "null" } else { &output })
                .map_err(|error| Problem::failed("parse the output of a disk process", error).into()),
            _ => {
                // A failure to pass files is then only a consequence.
                drop(sent.ended().await);
                Err(why(&output, &words, status))
            }
        }
    }
}

impl Starting {
    /// Starts the process. Passed descriptors are closed here: our copy of the other end of a socket would keep it
    /// open.
    pub fn start(mut self) -> Result<Child, Problem> {
        let started = self.command.spawn();
        let started = started.map_err(|error| self.program.not_started(self.runs_as.user, &error))?;
        if let Some(pid) = started.id() {
            self.runs_as.given_to(pid);
        }
        Ok(started)
    }

    /// Starts a process that outlives its caller.
    pub fn start_to_stay(self) -> Result<std::process::Child, Problem> {
        let started = self.command.into_std().spawn();
        let started = started.map_err(|error| self.program.not_started(self.runs_as.user, &error))?;
        self.runs_as.given_to(started.id());
        Ok(started)
    }
}

/// The process of an image job. Dropping it kills the process, which counts as running for its task until it is
/// reaped: until then it may write, and has its files locked.
struct JobProcess(Option<(Child, Running)>);

impl JobProcess {
    fn of(child: Child) -> JobProcess {
        JobProcess(Some((child, Running::begin())))
    }

    fn child(&mut self) -> Option<&mut Child> {
        self.0.as_mut().map(|(child, _)| child)
    }

    /// Waits for its exit; returns its result, its other output, and its status.
    async fn ended(mut self, on_progress: impl FnMut(f64)) -> Result<(String, String, ExitStatus), Problem> {
        let Some(child) = self.child() else { return Err(Problem::failed("wait for a disk process", "there is none")) };
        let (output, words) = read_both(child, on_progress).await?;
        let status = child.wait().await.map_err(|error| Problem::failed("wait for a disk process", error))?;
        self.0 = None;
        Ok((output, words, status))
    }
}

impl Drop for JobProcess {
    fn drop(&mut self) {
        let Some((mut child, running)) = self.0.take() else { return };
        // Without a runtime the daemon exits, and the process with it.
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(error) = child.kill().await {
                tracing::error!(%error, "a disk process cannot be killed or reaped");
            }
            drop(running);
        });
    }
}

async fn read_both(child: &mut Child, on_progress: impl FnMut(f64)) -> Result<(String, String), Problem> {
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (output, words) = tokio::join!(read(stdout), read_words(stderr, on_progress));
    let failed = |error| Problem::failed("read from a disk process", error);
    Ok((output.map_err(failed)?, words.map_err(failed)?))
}

async fn read(from: Option<impl AsyncRead + Unpin>) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(OUTPUT_MAX).read_to_end(&mut bytes).await?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The output of a process except for progress messages, which are passed to `on_progress`. Everything is read, so
/// that the process never blocks on the pipe.
async fn read_words(from: Option<impl AsyncRead + Unpin>, mut on_progress: impl FnMut(f64)) -> std::io::Result<String> {
    let mut words = Vec::new();
    let Some(from) = from else { return Ok(String::new()) };
    let (mut from, mut line, mut last) = (BufReader::new(from), Vec::new(), 0.0);
    while (&mut from).take(LINE_MAX).read_until(b'\n', &mut line).await? > 0 {
        match serde_json::from_slice::<Progress>(&line) {
            Ok(progress) if progress.part() > last => {
                last = progress.part();
                on_progress(last);
            }
            Ok(_) => {}
            Err(_) if words.len() < WORDS_MAX => words.extend_from_slice(&line),
            Err(_) => {}
        }
        line.clear();
    }
    Ok(String::from_utf8_lossy(&words).into_owned())
}

/// Why a process has failed, according to the last line of its output. There is none if it was killed, or did not
/// understand its arguments.
fn why(output: &str, words: &str, how: impl std::fmt::Display) -> Refused {
    match control::Error::in_output(output) {
        Some(error) => Refused::Disk(error),
        None => {
            let words = if words.is_empty() { String::new() } else { format!("; it printed: {}", words.trim_end()) };
            Problem::new(Code::Failed, format!("a disk process failed: {how}{words}")).into()
        }
    }
}

#[cfg(test)]
mod test {
    use control::Kind;

    use super::*;

    #[test]
    fn the_last_line_of_output_is_the_error() {
        let output = "[{\"start\":0}]\n{\"id\":null,\"error\":{\"kind\":\"no-space\",\"message\":\"it is full\"}}\n";
        assert_eq!(why(output, "tapline: it is full\n", 4), control::Error::new(Kind::NoSpace, "it is full").into());
        for output in ["", "{\"size\":1}\n"] {
            let problem = Problem::from(why(output, "error: --sise is unknown\n", "exit status: 64"));
            assert_eq!(problem.detail, "a disk process failed: exit status: 64; it printed: error: --sise is unknown");
        }
    }

    #[tokio::test]
    async fn progress_is_separate_from_output_and_monotonic() {
        let said = "tapline-disk: not confined\n{\"doing\":\"converting\",\"done\":1,\"len\":4}\n{\"done\":1,\"len\":4}\n\
                    {\"done\":0,\"len\":0}\n{\"done\":3,\"len\":4}\ntapline: cannot write: it is full\n";
        let mut on_progress = Vec::new();
        let words = read_words(Some(said.as_bytes()), |part| on_progress.push(part)).await.unwrap();
        assert_eq!(words, "tapline-disk: not confined\ntapline: cannot write: it is full\n");
        assert_eq!(on_progress, [0.25, 0.75]);
    }

    #[tokio::test]
    async fn excess_output_is_read_and_dropped() {
        let said = "word ".repeat(100_000);
        let words = read_words(Some(said.as_bytes()), |_| ()).await.unwrap();
        assert!((WORDS_MAX..WORDS_MAX + 4096).contains(&words.len()), "{}", words.len());
    }
}
