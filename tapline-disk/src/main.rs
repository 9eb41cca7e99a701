//! `tapline-disk`: the disk process. It serves one image, or runs one image job; it is the only program of Tapline that
//! parses images.
//!
//! This file maps a command line to a command, and a command's result to an exit code.

#![forbid(unsafe_code)]
// These macros panic if the output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod files;
mod image;
mod jobs;
mod process;
mod serve;

use std::process::ExitCode;

use arguments::{Arguments, Command, ImageCommand, VerifyPeer};

use files::{Files, Handed, passed};
use image::redo_log;
use jobs::snapshot::SnapshotVerb;
use nbd::tls::directory;
use process::confine::Reach;
use process::failure::{Exit, Failure};
use process::{confine, exit_with_parent, log, output, panics, placement, signals};
use serve::{polling, threads};

fn main() -> ExitCode {
    // The daemon executes an open file of this program, so without this `ps` and `pidof` would show the descriptor's
    // number as the process name. A kernel that refuses the name does no harm.
    rustix::thread::set_name(c"tapline-disk").unwrap_or_default();
    panics::abort_on_panic();
    let arguments = match Arguments::of_process() {
        Ok(arguments) => arguments,
        Err(refused) => return explain(&refused),
    };
    match carry_out(&arguments) {
        Ok(exit) => {
            log::end();
            ExitCode::from(exit.code())
        }
        Err(failure) => {
            let failure = image::http::explain(failure);
            log::say_failure(&failure);
            if arguments.command.handing().is_some_and(|handing| handing.handed) {
                output::send_failure(&failure);
            }
            ExitCode::from(failure.exit().code())
        }
    }
}

fn carry_out(arguments: &Arguments) -> Result<Exit, Failure> {
    let command = &arguments.command;
    if let Command::Serve(serve) = command {
        placement::place(serve)?;
    }
    arguments.patience.into_iter().for_each(image::remote::set_patience);
    image::http::configure(arguments);
    signals::ignore_sigxfsz().map_err(|error| Failure::new("handle SIGXFSZ", error))?;
    if let Some(handing) = command.handing() {
        if handing.handed {
            signals::ignore_sighup().map_err(|error| Failure::new("handle SIGHUP", error))?;
        }
    }
    // A confined process cannot open the files of certificates.
    let tls = match command {
        Command::Serve(serve) => {
            let verify_peer = serve.nbd_tls_verify_peer == VerifyPeer::Yes;
            serve.nbd_tls.as_deref().map(|directory| directory::of_server(directory, verify_peer)).transpose()?
        }
        Command::Image(_) | Command::Calibrate(_) => None,
    };
    let files = receive(command)?;
    let files = if arguments.really_raw { files.trusting() } else { files };
    match command {
        Command::Serve(serve) if serve.unknown => serve::run(&files.distrusting(), serve, tls),
        Command::Serve(serve) => serve::run(&files, serve, tls),
        Command::Image(command) => run_job(&files, command),
        Command::Calibrate(calibrate) => jobs::calibrate::run(&files, calibrate),
    }
}

/// Receives passed files, and drops unneeded privileges, before any input is parsed.
fn receive(command: &Command) -> Result<Files, Failure> {
    let Some(handing) = command.handing() else { return Ok(Files::of_system()) };
    if handing.end_with_input && !handing.handed {
        exit_with_parent::enable()?;
    }
    let takes_over = matches!(command, Command::Serve(serve) if serve.take_over);
    let files = match handing.handed {
        // Everything comes from the process that this one replaces, when it is ready.
        true if takes_over => Files::handed(Handed::default()),
        true => Files::handed(passed::receive(std::io::stdin())?),
        false => Files::of_system(),
    };
    redo_log::prepare()?;
    ::stats::Source::of_this_machine();
    polling::prepare();
    threads::prepare();
    serve::admission::share::prepare();
    if handing.network {
        image::http::keep_network();
    }
    if handing.confine {
        confine::enter(if handing.network { Reach::Servers } else { Reach::Nothing })?;
    }
    // A confined process's threads are confined too.
    if handing.end_with_input && handing.handed {
        exit_with_parent::enable()?;
    }
    Ok(files)
}

fn run_job(files: &Files, command: &ImageCommand) -> Result<Exit, Failure> {
    image::remote::refuse(jobs::needing_files(command))?;
    match command {
        ImageCommand::Create(create) => jobs::create::run(files, create),
        ImageCommand::Info(info) => jobs::info::run(files, info),
        ImageCommand::Check(check) => jobs::check::run(files, check),
        ImageCommand::Map(map) => jobs::map::run(files, map),
        ImageCommand::Changes(changes) => jobs::changes::run(files, changes),
        ImageCommand::Seal(seal) => jobs::seal::run(files, seal),
        ImageCommand::Fetch(fetch) => jobs::fetch::run(files, fetch),
        ImageCommand::Convert(convert) => jobs::convert::run(files, convert),
        ImageCommand::Compare(compare) => jobs::compare::run(files, compare),
        ImageCommand::Snapshot(snapshot) => jobs::snapshot::run(files, snapshot, SnapshotVerb::Snapshot),
        ImageCommand::Clone(snapshot) => jobs::snapshot::run(files, snapshot, SnapshotVerb::Clone),
        ImageCommand::Measure(measure) => jobs::measure::run(files, measure),
        ImageCommand::Merge(merge) => jobs::merge::run(files, merge),
        ImageCommand::Rebase(rebase) => jobs::rebase::run(files, rebase),
        ImageCommand::Flatten(flatten) => jobs::rebase::flatten(files, flatten),
        ImageCommand::Resize(resize) => jobs::resize::run(files, resize),
        ImageCommand::Compact(compact) => jobs::compact::run(files, compact),
        ImageCommand::Bench(bench) => jobs::bench::run(files, bench),
        ImageCommand::Replay(replay) => jobs::replay::run(files, replay),
    }
}

/// Prints the help, the version, or why the arguments are invalid.
fn explain(refused: &clap::Error) -> ExitCode {
    let exit = if refused.use_stderr() { Exit::Usage } else { Exit::Done };
    match refused.print() {
        Ok(()) => ExitCode::from(exit.code()),
        Err(_) => ExitCode::from(Exit::Failed.code()),
    }
}
