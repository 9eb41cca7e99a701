//! The program under test, run in a place of a round.

use std::path::PathBuf;
use std::process::Command;

use testbed::tool;

use super::site::Site;

/// Where the programs are.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Their directory.
    pub directory: PathBuf,
    /// The fault that is put into them.
    pub planted: Option<&'static str>,
}

/// What a program left behind.
#[derive(Debug)]
pub struct Said {
    /// Its exit code.
    pub code: Option<i32>,
    /// What it printed.
    pub text: String,
}

impl Programs {
    /// The disk process, with its redo logs in the round's room.
    pub fn disk(&self, site: &Site) -> Command {
        let mut command = tool::bound_to_us(self.directory.join("tapline-disk"));
        command.current_dir(&site.files).env("TAPLINE_REDO_DIR", site.room.join("redo"));
        if let Some(fault) = self.planted {
            command.env("TAPLINE_DISK_PLANTED", fault);
        }
        command
    }

    /// Runs a job to its end.
    pub fn run(&self, site: &Site, words: &[&str]) -> Result<Said, String> {
        let output = self.disk(site).args(words).output().map_err(|error| format!("tapline-disk: {error}"))?;
        // The findings of a check are its output.
        let text = [output.stderr, output.stdout].concat();
        Ok(Said { code: output.status.code(), text: String::from_utf8_lossy(&text).into_owned() })
    }

    /// A job that must succeed.
    pub fn done(&self, site: &Site, words: &[&str]) -> Result<(), String> {
        let said = self.run(site, words)?;
        if said.code == Some(0) { Ok(()) } else { Err(format!("{}: {said:?}", words.join(" "))) }
    }
}
