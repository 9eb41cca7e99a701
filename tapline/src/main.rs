//! `tapline`: the command line.
//!
//! It parses no image and opens no file: `image`, `serve`, `disk` and `xen` are handed, word by word, to `tapline-disk`, the
//! one program that does, which takes this process's place. A crash on a hostile image is therefore never a crash of
//! anything that holds more than that image.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;

/// The disk process's program, which lies beside this one or in the PATH.
const DISK_PROGRAM: &str = "tapline-disk";

/// The exit code of a command that could not be done. The others are those of `tapline-disk`.
const FAILED: u8 = 4;
/// The exit code for wrong arguments (`EX_USAGE`).
const USAGE: u8 = 64;

/// Thin, snapshottable virtual disks for virtual machines.
#[derive(Parser)]
#[command(name = "tapline", version, subcommand_required = true, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Handed,
}

/// Commands that `tapline-disk` carries out; help on them is its own.
#[derive(clap::Subcommand)]
enum Handed {
    /// Create, describe, check, convert and compare image files
    #[command(disable_help_flag = true)]
    Image(Words),
    /// Serve one image to a virtual machine (vhost-user, Xen) or to anything that speaks NBD
    #[command(disable_help_flag = true)]
    Serve(Words),
    /// Ask a disk that is served to snapshot, merge, clone, revert, resize or pause, while its guest goes on
    #[command(disable_help_flag = true)]
    Disk(Words),
    /// Give Xen guests disks and take them away
    #[command(disable_help_flag = true)]
    Xen(Words),
}

#[derive(clap::Args)]
struct Words {
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

fn main() -> ExitCode {
    if let Err(refused) = Arguments::try_parse() {
        let code = if refused.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        // Nothing is left to do when even the help cannot be printed.
        return if refused.print().is_ok() { code } else { ExitCode::from(FAILED) };
    }
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let program = disk_program(std::env::current_exe().ok().as_deref());
    let failed = become_disk_program(&program, &words);
    eprintln!("tapline: cannot run {}: {failed}", program.display());
    eprintln!("  {DISK_PROGRAM} is looked for beside tapline and then in the PATH: install it there");
    ExitCode::from(FAILED)
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
    fn the_words_of_a_handed_command_are_not_judged_here() {
        let parsed = Arguments::try_parse_from(["tapline", "image", "create", "--size", "10G", "--help"]);
        let Ok(Arguments { command: Handed::Image(words) }) = parsed else { panic!("not taken as an image command") };
        assert_eq!(words.words.len(), 4);
    }

    #[test]
    fn an_unknown_command_is_refused_here() {
        assert!(Arguments::try_parse_from(["tapline", "frobnicate"]).is_err());
        assert!(Arguments::try_parse_from(["tapline"]).is_err());
    }

    #[test]
    fn without_a_neighbour_the_program_is_sought_in_the_path() {
        assert_eq!(disk_program(Some(Path::new("/nowhere/at/all/tapline"))), Path::new(DISK_PROGRAM));
        assert_eq!(disk_program(None), Path::new(DISK_PROGRAM));
    }
}
