//! Commands that `tapline-disk` carries out: this process is replaced by that program.
//!
//! The arguments are passed on unchecked.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::{Code, Problem};

/// The disk process's program, installed in this program's directory or in the PATH.
const DISK_PROGRAM: &str = "tapline-disk";

/// Passes all arguments of this process to `tapline-disk`; returns only if that fails.
pub fn hand_over() -> Problem {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let program = disk_program(std::env::current_exe().ok().as_deref());
    let failed = become_disk_program(&program, &words);
    Problem::new(Code::Failed, format!("cannot run {}: {failed}", program.display()))
        .advise(format!("install {DISK_PROGRAM} in the directory of tapline or in the PATH"))
}

/// The program in this program's directory if it exists there, otherwise its name for a search in the PATH.
fn disk_program(me: Option<&Path>) -> PathBuf {
    let beside = me.and_then(Path::parent).map(|directory| directory.join(DISK_PROGRAM));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| DISK_PROGRAM.into())
}

/// Replaces this process. The other program is started with the name `tapline`, which it uses for itself in its output.
fn become_disk_program(program: &Path, words: &[OsString]) -> io::Error {
    Command::new(program).arg0("tapline").args(words).exec()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn without_a_sibling_program_the_path_is_searched() {
        assert_eq!(disk_program(Some(Path::new("/nowhere/at/all/tapline"))), Path::new(DISK_PROGRAM));
        assert_eq!(disk_program(None), Path::new(DISK_PROGRAM));
    }
}
