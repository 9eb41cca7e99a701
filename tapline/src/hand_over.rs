//! Commands that `tapline-disk` carries out, which takes this process's place.
//!
//! Its words are not judged here, only handed on.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use api::{Code, Problem};

/// The disk process's program, which lies beside this one or in the PATH.
const DISK_PROGRAM: &str = "tapline-disk";

/// Hands over all the words of this process; returns only if that fails.
pub fn hand_over() -> Problem {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let program = disk_program(std::env::current_exe().ok().as_deref());
    let failed = become_disk_program(&program, &words);
    Problem::new(Code::Failed, format!("cannot run {}: {failed}", program.display()))
        .advise(format!("{DISK_PROGRAM} is looked for beside tapline and then in the PATH: install it there"))
}

/// The program beside this one, if there is one; else its name, to be found in the PATH.
fn disk_program(me: Option<&Path>) -> PathBuf {
    let beside = me.and_then(Path::parent).map(|directory| directory.join(DISK_PROGRAM));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| DISK_PROGRAM.into())
}

/// Replaces this process. Called by the name `tapline`, the other program speaks of itself by that name.
fn become_disk_program(program: &Path, words: &[OsString]) -> io::Error {
    Command::new(program).arg0("tapline").args(words).exec()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn without_a_neighbour_the_program_is_sought_in_the_path() {
        assert_eq!(disk_program(Some(Path::new("/nowhere/at/all/tapline"))), Path::new(DISK_PROGRAM));
        assert_eq!(disk_program(None), Path::new(DISK_PROGRAM));
    }
}
