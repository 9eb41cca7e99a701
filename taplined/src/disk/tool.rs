//! Runs image jobs: one process each, which is passed its files, has no privileges, and exits with the job.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use api::{Code, Problem};
use control::Progress;
use serde::de::DeserializeOwned;
use tokio::process::{Child, Command};

use super::control::Refused;
use super::handing::Handing;
use super::oom;
use super::owners::Owners;
use super::program::{Opened, Program};
use super::redo::RedoLogs;
use crate::account::{As, Users};
use crate::config::Config;
use crate::task::process::{Output, TaskProcess};
use crate::task::started::Running;

/// The variables of this daemon's environment that a process which may connect to servers gets: its authorities and
/// proxies.
const OF_NETWORK: [&str; 7] =
    ["SSL_CERT_FILE", "https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"];

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
        self.job(all, handing, fractions(on_progress), |_| Ok(())).await
    }

    /// Like [`Tool::long_image`]; `on_progress` receives the reports of the process.
    pub async fn measured_image<T: DeserializeOwned>(
        &self,
        words: Vec<OsString>,
        handing: Handing,
        on_progress: impl FnMut(&Progress),
    ) -> Result<T, Refused> {
        let all = std::iter::once("image".into()).chain(words).collect();
        self.job(all, handing, reports(on_progress), |_| Ok(())).await
    }

    /// Like [`Tool::image`], for a process that exchanges messages over its standard input; `talk` does, on a thread.
    pub async fn talking_image<T: DeserializeOwned>(
        &self,
        words: Vec<OsString>,
        handing: Handing,
        talk: impl FnOnce(OwnedFd) -> Result<(), Problem> + Send + 'static,
    ) -> Result<T, Refused> {
        self.job(std::iter::once("image".into()).chain(words).collect(), handing, reports(|_| ()), talk).await
    }

    async fn job<T: DeserializeOwned>(
        &self,
        mut all: Vec<OsString>,
        handing: Handing,
        on_line: impl FnMut(&[u8]) -> bool,
        talk: impl FnOnce(OwnedFd) -> Result<(), Problem> + Send + 'static,
    ) -> Result<T, Refused> {
        // The process exits with the daemon: the next daemon repeats or rolls back the job, and finds nothing locked.
        all.extend(["--json", "--handed", "--confine", "--end-with-input"].map(OsString::from));
        all.extend(handing.has_network().then(|| "--network".into()));
        let network = handing.has_network();
        let (stdin, ready) = handing.prepare(&self.redo)?;
        let mut starting = self.starting(&all)?;
        if network {
            let set = |name| std::env::var_os(name).map(|value| (name, value));
            starting.command.envs(OF_NETWORK.into_iter().filter_map(set));
        }
        starting.command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let process = TaskProcess::of(starting.start()?);
        process.id().into_iter().for_each(oom::make_normal);
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
        let Output { stdout, words, status } = process.ended(on_line).await?;
        match status.code() {
            // A job without a result prints nothing.
            Some(0) => serde_json::from_str(if stdout.trim().is_empty() { "null" } else { &stdout })
                .map_err(|error| Problem::failed("parse the output of a disk process", error).into()),
            _ => {
                // A failure to pass files is then only a consequence.
                drop(sent.ended().await);
                Err(why(&stdout, &words, status))
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

/// Passes the completed fraction on from lines that report progress, unless it would decrease.
fn fractions(mut on_progress: impl FnMut(f64)) -> impl FnMut(&[u8]) -> bool {
    let mut last = 0.0;
    reports(move |progress| {
        if progress.part() > last {
            last = progress.part();
            on_progress(last);
        }
    })
}

/// Passes lines that report progress on.
fn reports(mut on_progress: impl FnMut(&Progress)) -> impl FnMut(&[u8]) -> bool {
    move |line| serde_json::from_slice(line).map(|progress| on_progress(&progress)).is_ok()
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

    #[test]
    fn progress_is_separate_from_output_and_monotonic() {
        let mut reported = Vec::new();
        let mut lines = fractions(|part| reported.push(part));
        let words = ["tapline-disk: not confined", "tapline: cannot write: it is full"];
        let progress = [
            r#"{"doing":"converting","done":1,"len":4}"#,
            r#"{"done":1,"len":4}"#,
            r#"{"done":0,"len":0}"#,
            r#"{"done":3,"len":4}"#,
        ];
        assert!(progress.iter().all(|line| lines(line.as_bytes())) && !words.iter().any(|line| lines(line.as_bytes())));
        drop(lines);
        assert_eq!(reported, [0.25, 0.75]);
    }
}
