//! Commands that another program carries out, which replaces this process: `tapline-disk` those about images,
//! `tapline-backup` those about backups.
//!
//! The arguments are passed on unchecked.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::Problem;

/// The program of disk processes, installed in this program's directory or in the PATH.
const DISK_PROGRAM: &str = "tapline-disk";
/// The program of backups, installed there as well.
const BACKUP_PROGRAM: &str = "tapline-backup";

/// The nouns of other programs.
const NOUNS: [(&str, &str); 4] =
    [("image", DISK_PROGRAM), ("serve", DISK_PROGRAM), ("calibrate", DISK_PROGRAM), ("backup", BACKUP_PROGRAM)];

/// Runs `tapline-disk` with all arguments of this process; returns only on failure.
pub fn to_disk_program() -> Problem {
    hand_over(DISK_PROGRAM, &std::env::args_os().skip(1).collect::<Vec<OsString>>())
}

/// Runs `tapline-backup` with all arguments of this process; returns only on failure.
pub fn to_backup_program() -> Problem {
    hand_over(BACKUP_PROGRAM, &std::env::args_os().skip(1).collect::<Vec<OsString>>())
}

/// Runs `tapline-disk image create --help` for `help image create`, if this is a request for help on a command of
/// another program.
pub fn help() -> Option<Problem> {
    let mut words = std::env::args_os().skip(1).filter(|word| word != "help").collect::<Vec<OsString>>();
    let is_help = std::env::args_os().nth(1).is_some_and(|word| word == "help");
    let noun = words.first().filter(|_| is_help)?;
    let program = NOUNS.iter().find(|(own, _)| OsStr::new(own) == noun)?.1;
    words.push("--help".into());
    Some(hand_over(program, &words))
}

fn hand_over(program: &str, words: &[OsString]) -> Problem {
    let failed = match control::installed::program(program) {
        Ok(program) => become_program(&program, words),
        Err(error) => error,
    };
    Problem::failed(format_args!("run {program}"), failed)
        .advise(format!("install {program} in the directory of tapline or in the PATH"))
}

/// Path of the disk program.
pub fn disk_program() -> io::Result<PathBuf> {
    control::installed::program(DISK_PROGRAM)
}

/// Replaces this process. The program is started as `tapline`, the name that it then uses in its output.
fn become_program(program: &Path, words: &[OsString]) -> io::Error {
    Command::new(program).arg0("tapline").args(words).exec()
}
