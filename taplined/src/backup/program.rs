//! Runs the backup program on a target, a process for each verb.
//!
//! It knows nothing of chunks and keys. Invariants: every process is given the ID that the target was registered with,
//! so a directory whose mount is missing, or in which there is another target, is never used; a process ends with the
//! task that has started it, and with the daemon; keys and credentials are read by the process only.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Stdio;
use std::time::Duration;

use api::{AbsolutePath, BackupPlace, Code, Problem, S3Access, Transfer};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::process::Command;

use crate::account::is_own;
use crate::disk::oom;
use crate::task::blocking;
use crate::task::process::{Output, TaskProcess};

/// The program, in the directory of this one or in the PATH.
const NAME: &str = "tapline-backup";

/// The exit code of a verification that has found damage, and has printed it.
const DAMAGED: i32 = 2;

/// A target as the program opens it.
#[derive(Clone, Debug)]
pub struct At {
    /// The directory or bucket.
    pub path: BackupPlace,
    /// How the bucket is reached.
    pub s3: Option<S3Access>,
    /// The key file.
    pub key_file: Option<AbsolutePath>,
    /// The ID that the target must have; `None` while it is not known yet.
    pub target_id: Option<String>,
    /// What is kept with a backup that is created, in JSON.
    pub properties: Option<String>,
}

/// The last line of the standard error of a process that has failed.
#[derive(Deserialize)]
struct Failed {
    error: Reason,
}

#[derive(Deserialize)]
struct Reason {
    kind: String,
    message: String,
    advice: Option<String>,
}

impl At {
    /// Runs `backup VERB DIRECTORY WORDS…`, and returns its result. Dropping the future kills the process.
    pub async fn run<T: DeserializeOwned>(
        &self,
        verb: &[&str],
        words: Vec<OsString>,
        mut on_progress: impl FnMut(Transfer),
    ) -> Result<T, Problem> {
        self.check_key_file().await?;
        let mut child = self.command(verb, words)?.spawn().map_err(not_started)?;
        // Its other end stays open until the process has ended.
        let _input = child.stdin.take();
        let process = TaskProcess::of(child);
        process.id().into_iter().for_each(oom::make_normal);
        let ended = process.ended(|line| match serde_json::from_slice::<Transfer>(line) {
            Ok(transfer) => {
                on_progress(transfer);
                true
            }
            Err(_) => false,
        });
        let Output { stdout, words, status } = ended.await?;
        match status.code() {
            Some(0) => parse(&stdout),
            Some(DAMAGED) if !stdout.trim().is_empty() => parse(&stdout),
            _ => Err(self.why(&words, status)),
        }
    }

    /// Like [`At::run`], for a verb that takes a moment if the storage responds: fails after this time.
    pub async fn ask<T: DeserializeOwned>(
        &self,
        verb: &[&str],
        words: Vec<OsString>,
        patience: Duration,
    ) -> Result<T, Problem> {
        let ran = tokio::time::timeout(patience, self.run(verb, words, |_| ())).await;
        ran.unwrap_or_else(|_| {
            let what = format!("the backup target {} has not responded for {} s", self.path, patience.as_secs());
            Err(Problem::new(Code::Timeout, what).advise("check the storage that it is on, then try again"))
        })
    }

    fn command(&self, verb: &[&str], words: Vec<OsString>) -> Result<Command, Problem> {
        let program = control::installed::program(NAME).map_err(not_started)?;
        let mut command = Command::new(program);
        command.arg("backup").args(verb).arg(self.path.as_str()).args(words);
        if let Some(id) = &self.target_id {
            command.args(["--target-id", id]);
        }
        if let Some(file) = &self.key_file {
            command.arg("--key-file").arg(file.as_path());
        }
        if let Some(S3Access { credentials, endpoint, region, ca_file }) = &self.s3 {
            // The process examines the file and reads it by one descriptor.
            command.arg("--credentials").arg(credentials.as_path());
            command.args(endpoint.iter().map(|endpoint| format!("--endpoint={endpoint}")));
            command.args(region.iter().map(|region| format!("--region={region}")));
            command.args(ca_file.iter().flat_map(|file| ["--ca-file", file.as_str()]));
        }
        command.args(["--json", "--end-with-input"]).current_dir("/").process_group(0).env_clear().kill_on_drop(true);
        if let Some(properties) = &self.properties {
            // Every user can read the arguments of a process.
            command.env("TAPLINE_PROPERTIES", properties);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(command)
    }

    /// Refuses a key file that others than root and the daemon's user could read or replace.
    async fn check_key_file(&self) -> Result<(), Problem> {
        let Some(file) = self.key_file.clone() else { return Ok(()) };
        let looked = blocking("examine a key file", move || {
            let found = fs::metadata(file.as_path());
            let found = found.map_err(|error| Problem::failed(format_args!("examine the key file {file}"), error))?;
            let mode = found.permissions().mode() & 0o777;
            if mode & 0o077 == 0 && is_own(found.uid()) {
                return Ok(());
            }
            let what =
                format!("the key file {file} is of user {} with mode {mode:03o}: others may read it", found.uid());
            Err(Problem::new(Code::State, what)
                .field("key_file")
                .advise(format!("make it readable by root only: chown root {file} && chmod 600 {file}")))
        });
        looked.await
    }

    /// Why a process has failed.
    fn why(&self, words: &str, status: std::process::ExitStatus) -> Problem {
        let Some(Failed { error }) = words.lines().rev().find_map(|line| serde_json::from_str(line).ok()) else {
            let words = if words.is_empty() { String::new() } else { format!("; it printed: {}", words.trim_end()) };
            return Problem::new(Code::Failed, format!("the backup program failed: {status}{words}"));
        };
        let code = match error.kind.as_str() {
            "not-found" => Code::NotFound,
            "no-space" => Code::NoSpace,
            "conflict" => Code::Exists,
            // The command line is ours: what it refuses is the target, its key, or the ID of a backup.
            "invalid" => Code::State,
            _ => Code::Failed,
        };
        let problem = Problem::new(code, format!("backup target {}: {}", self.path, error.message));
        match error.advice {
            Some(advice) => problem.advise(advice),
            None if code == Code::NotFound && self.s3.is_some() => problem.advise("check its bucket and prefix"),
            None if code == Code::NotFound => problem.advise("check that its storage is mounted"),
            None if code == Code::NoSpace => problem.advise("remove backups from it, then try again"),
            None => problem,
        }
    }
}

fn parse<T: DeserializeOwned>(stdout: &str) -> Result<T, Problem> {
    serde_json::from_str(stdout).map_err(|error| Problem::failed("parse the output of the backup program", error))
}

fn not_started(error: std::io::Error) -> Problem {
    Problem::failed(format_args!("start {NAME}"), error)
        .advise(format!("install {NAME} in the directory of taplined, or in the PATH"))
}

#[cfg(test)]
mod test {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_last_line_says_why_a_process_has_failed() {
        let path: BackupPlace = "/mnt/backup".parse().unwrap();
        let at = At { path, s3: None, key_file: None, target_id: None, properties: None };
        let status = std::process::ExitStatus::from_raw(6 << 8);
        let words = "a word\n{\"error\":{\"kind\":\"not-found\",\"message\":\"there is no target\"}}\n";
        let problem = at.why(words, status);
        assert_eq!(
            (problem.code, problem.detail.as_str()),
            (Code::NotFound, "backup target /mnt/backup: there is no target")
        );
        assert!(problem.advice.unwrap().contains("mounted"));
        let killed = at.why("half a wo", std::process::ExitStatus::from_raw(9));
        assert!(killed.detail.contains("signal: 9") && killed.detail.contains("half a wo"), "{killed}");
    }
}
