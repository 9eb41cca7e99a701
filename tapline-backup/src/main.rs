//! `tapline-backup`: backs up disks to a target and restores them.
//!
//! It reads and writes disks over NBD only, so it parses no image, has no lock or lease of its own, and limits and
//! shares of a served disk hold for it. An image that is named as FORMAT:PATH is served for it by a child (`child`); a
//! new raw image is written directly (`new_image`). What a target is, and why several hosts may use one, is in the
//! crate `backup`. This file maps a command line to a command, and a result to an exit code.

#![forbid(unsafe_code)]
// These macros panic if the output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod changed;
mod child;
mod create;
mod failure;
mod list;
mod mount;
mod new_image;
mod output;
mod parent;
mod place;
mod progress;
mod prune;
mod remote;
mod restore;
mod retention;
mod s3;
mod serve;
mod stop;
mod target;
mod verify;

use std::process::ExitCode;

use arguments::backup::{At, Backup, BackupArguments, BackupNoun, BackupTarget};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use failure::{Exit, Failure};

/// Standard error, with the name by which people start this program.
static STDERR: logging::Stderr = logging::Stderr::of("tapline");

fn main() -> ExitCode {
    logging::panics::abort_on_panic(|panic| {
        STDERR.say(panic.during("nothing counts on the target that was not finished; repeat the command"));
    });
    let arguments = match BackupArguments::of_process() {
        Ok(arguments) => arguments,
        Err(refused) => return explain(&refused),
    };
    let BackupNoun::Backup(command) = arguments.noun;
    let watch = || if at(&command).end_with_input { parent::watch() } else { Ok(()) };
    match hide().and_then(|()| watch()).and_then(|()| stop::prepare()).and_then(|()| carry_out(&command)) {
        Ok(exit) => exit.code(),
        Err(failure) => {
            STDERR.write_last(&if at(&command).json { failure.json() } else { failure.message() });
            failure.exit.code()
        }
    }
}

/// Keeps other processes of the user from reading the memory of this one, which has keys, and from controlling it
/// (ptrace(2)): the child that parses an image may be taken over by that.
fn hide() -> Result<(), Failure> {
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    hidden.map_err(|errno| Failure::cannot("hide this process from others of its user", std::io::Error::from(errno)))
}

fn carry_out(command: &Backup) -> Result<Exit, Failure> {
    match command {
        Backup::Target(BackupTarget::Create(create)) => target::create(create),
        Backup::Target(BackupTarget::Show(show)) => target::show(show),
        Backup::Create(create) => create::run(create),
        Backup::List(list) => list::list(list),
        Backup::Show(one) => list::show(one),
        Backup::Restore(restore) => restore::run(restore),
        Backup::Verify(verify) => verify::run(verify),
        Backup::Remove(remove) => prune::remove(remove),
        Backup::Prune(prune) => prune::prune(prune),
        Backup::Mount(mount) => mount::run(mount),
    }
}

fn at(command: &Backup) -> &At {
    match command {
        Backup::Target(BackupTarget::Create(create)) => &create.at,
        Backup::Target(BackupTarget::Show(show)) => &show.at,
        Backup::Create(create) => &create.at,
        Backup::List(list) => &list.at,
        Backup::Show(one) => &one.at,
        Backup::Restore(restore) => &restore.at,
        Backup::Verify(verify) => &verify.at,
        Backup::Remove(remove) => &remove.at,
        Backup::Prune(prune) => &prune.at,
        Backup::Mount(mount) => &mount.at,
    }
}

/// Prints the help, the version, or why the arguments are invalid.
fn explain(refused: &clap::Error) -> ExitCode {
    let exit = if refused.use_stderr() { Exit::Usage } else { Exit::Done };
    match refused.print() {
        Ok(()) => exit.code(),
        Err(_) => Exit::Failed.code(),
    }
}
