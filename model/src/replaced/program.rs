//! Runs the program under test in the place of a round.

use std::path::PathBuf;
use std::process::Command;

use testbed::tool;

use super::site::Site;

/// The programs under test.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The directory of the programs.
    pub directory: PathBuf,
    /// The fault that is planted in them.
    pub planted: Option<&'static str>,
}

/// The exit code and output of a program.
#[derive(Debug)]
pub struct ProgramOutput {
    /// The program's exit code.
    pub code: Option<i32>,
    /// The text that it printed.
    pub text: String,
}

impl Programs {
    /// The command of the disk process, with its redo logs in the round's room.
    pub fn disk(&self, site: &Site) -> Command {
        let mut command = tool::bound_to_us(self.directory.join("tapline-disk"));
        command.current_dir(&site.files).env("TAPLINE_REDO_DIR", site.room.join("redo"));
        if let Some(fault) = self.planted {
            command.env("TAPLINE_DISK_PLANTED", fault);
        }
        command
    }

    /// Runs a job to its end.
    pub fn run(&self, site: &Site, words: &[&str]) -> Result<ProgramOutput, String> {
        let output = self.disk(site).args(words).output().map_err(|error| format!("tapline-disk: {error}"))?;
        // A check prints its findings on stdout.
        let text = [output.stderr, output.stdout].concat();
        Ok(ProgramOutput { code: output.status.code(), text: String::from_utf8_lossy(&text).into_owned() })
    }

    /// Runs a job that must succeed.
    pub fn done(&self, site: &Site, words: &[&str]) -> Result<(), String> {
        let said = self.run(site, words)?;
        if said.code == Some(0) { Ok(()) } else { Err(format!("{}: {said:?}", words.join(" "))) }
    }
}
