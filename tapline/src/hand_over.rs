//! Commands that `tapline-disk` carries out: it replaces this process.
//!
//! The arguments are passed on unchecked.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::Problem;

/// The program of disk processes, installed in this program's directory or in the PATH.
const DISK_PROGRAM: &str = "tapline-disk";

/// Runs `tapline-disk` with all arguments of this process; returns only on failure.
pub fn hand_over() -> Problem {
    hand_over_words(&std::env::args_os().skip(1).collect::<Vec<OsString>>())
}

/// Runs `tapline-disk image create --help` for `help image create`, if this is a request for help on its commands.
pub fn help() -> Option<Problem> {
    let mut words = std::env::args_os().skip(1).filter(|word| word != "help").collect::<Vec<OsString>>();
    let is_help = std::env::args_os().nth(1).is_some_and(|word| word == "help");
    let of_disk = words.first().is_some_and(|word| ["image", "serve", "calibrate"].iter().any(|own| word == own));
    (is_help && of_disk).then(|| {
        words.push("--help".into());
        hand_over_words(&words)
    })
}

fn hand_over_words(words: &[OsString]) -> Problem {
    let failed = match disk_program() {
        Ok(program) => become_disk_program(&program, words),
        Err(error) => error,
    };
    Problem::failed(format_args!("run {DISK_PROGRAM}"), failed)
        .advise(format!("install {DISK_PROGRAM} in the directory of tapline or in the PATH"))
}

/// Path of the disk program: in this program's directory, otherwise the first in the PATH.
pub fn disk_program() -> io::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let me = std::env::current_exe().ok();
    let own = me.as_deref().and_then(Path::parent).map(Path::to_owned);
    let found = own.into_iter().chain(std::env::split_paths(&path)).map(|directory| directory.join(DISK_PROGRAM));
    let found = found.into_iter().find(|path| path.is_file());
    found.map_or_else(|| Err(io::ErrorKind::NotFound.into()), std::path::absolute)
}

/// Replaces this process. The program is started as `tapline`, the name that it then uses in its output.
fn become_disk_program(program: &Path, words: &[OsString]) -> io::Error {
    Command::new(program).arg0("tapline").args(words).exec()
}
