//! `tapline`: the command line.
//!
//! This program parses no image and opens no disk: it passes the arguments of `image` and `serve` unchanged to
//! `tapline-disk`, the only program that does ([`hand_over`]), so that a crash on a hostile image never affects more
//! than that image; and those of `backup` to `tapline-backup`.
//!
//! [`disk`] controls a disk process through its control socket, [`xen`] attaches disks to guests without a daemon,
//! [`top`] reads the statistics pages of disks. Everything else is a request to the daemon, `taplined`, over its API,
//! one request per noun and verb.

#![forbid(unsafe_code)]
// Those macros panic if the output cannot be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod attach;
mod column;
mod completion;
mod confirm;
mod disk;
mod doctor;
mod endpoint;
mod event;
mod explain;
mod failure;
mod find;
mod hand_over;
mod health;
mod host;
mod image_source;
mod label;
mod libvirt_hook;
mod manual;
mod output;
mod panics;
mod place;
mod removal;
mod schedule;
mod session;
mod sr;
mod target;
mod task;
mod token;
mod top;
mod trace;
mod transfer;
mod unit;
mod vbd;
mod vdi;
mod vm;
mod wait;
mod word;
mod wrap;
mod xen;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use api::Problem;
use arguments::{example, mistyped};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use event::EventVerb;
use failure::{Failure, exit};
use host::HostVerb;
use session::{How, Session};
use sr::SrVerb;
use target::TargetVerb;
use task::TaskVerb;
use token::TokenVerb;
use vbd::VbdVerb;
use vdi::VdiVerb;
use vm::VmVerb;

/// Examples of all commands except those of `tapline-disk` and `tapline-backup`.
const EXAMPLES: &str = include_str!("examples.txt");

/// Thin, snapshottable virtual disks for virtual machines.
#[derive(Parser)]
#[command(name = "tapline", version, subcommand_required = true, arg_required_else_help = true)]
struct Arguments {
    #[command(flatten)]
    how: How,
    #[command(subcommand)]
    command: Command,
}

impl Arguments {
    /// The definition of the commands with their examples.
    fn with_examples() -> clap::Command {
        example::teach(Arguments::command(), &example::examples(EXAMPLES))
    }

    /// Parses the command line of this process.
    fn of_process() -> Result<Arguments, clap::Error> {
        let parsed = Arguments::with_examples().try_get_matches().and_then(|found| Arguments::from_arg_matches(&found));
        parsed.map_err(|refused| mistyped::with_tips(refused, &Arguments::with_examples()))
    }
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Noun(Box<Nouns>),
    /// Create, describe, check, convert and compare image files
    #[command(disable_help_flag = true)]
    Image(PassedOn),
    /// Serve one image to a virtual machine (vhost-user, Xen) or to NBD clients
    #[command(disable_help_flag = true)]
    Serve(PassedOn),
    /// Measure which I/O sizes a storage device handles best
    #[command(disable_help_flag = true)]
    Calibrate(PassedOn),
    /// Back up disks to a target without the daemon, list, verify, restore and serve backups
    #[command(disable_help_flag = true)]
    Backup(PassedOn),
    /// Control a disk that is being served: snapshot, merge, clone, revert, resize, pause
    Disk(disk::Disk),
    /// Show where the time of a disk's requests goes, stage by stage
    Trace(trace::Trace),
    /// Explain whether a disk is healthy and what limits it
    Explain(explain::Explain),
    /// Check this host's configuration and the health of its disks, and suggest fixes
    Doctor(doctor::Doctor),
    /// Attach disks to Xen guests and detach them
    Xen(xen::Xen),
    Top(top::Top),
    /// Print a shell completion script for this command
    Completion(completion::Completion),
    /// Plug the disks of a libvirt domain before it starts and unplug them after it has stopped; run by libvirt
    #[command(hide = true)]
    LibvirtHook(libvirt_hook::LibvirtHook),
    /// Write the manual pages of the daemon's nouns
    #[command(hide = true)]
    Manual(manual::Manual),
}

/// The nouns of the daemon.
#[derive(Subcommand)]
enum Nouns {
    /// The host and its daemon
    Host(Noun<HostVerb>),
    /// Storage repositories, which contain disks
    Sr(Box<Noun<SrVerb>>),
    /// Virtual disk images
    Vdi(Box<Noun<VdiVerb>>),
    /// Virtual block devices, which attach disks to machines
    Vbd(Box<Noun<VbdVerb>>),
    /// Virtual machines run by the daemon
    Vm(Box<Noun<VmVerb>>),
    /// Backup targets that the daemon knows
    Target(Box<Noun<TargetVerb>>),
    /// Long-running operations: progress and results
    Task(Noun<TaskVerb>),
    /// Tokens for access to the daemon over the network
    Token(Noun<TokenVerb>),
    /// Changes of objects
    Event(Noun<EventVerb>),
}

/// Arguments that another program parses; it also prints their help.
#[derive(Debug, Args)]
struct PassedOn {
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// A noun of the daemon together with one of its verbs.
#[derive(Args)]
struct Noun<V: Subcommand> {
    #[command(subcommand)]
    verb: V,
}

fn main() -> ExitCode {
    panics::abort_on_panic(top::restore_terminal);
    completion::answer();
    if let Some(problem) = hand_over::help() {
        return report_failure(&problem.into(), false);
    }
    loop {
        let Arguments { how, command } = match Arguments::of_process() {
            Ok(arguments) => arguments,
            Err(refused) => {
                let code = if refused.use_stderr() { ExitCode::from(exit::USAGE) } else { ExitCode::SUCCESS };
                // If even the help cannot be printed, nothing else can.
                return if refused.print().is_ok() { code } else { ExitCode::from(exit::FAILED) };
            }
        };
        let json = how.json;
        match run(command, how) {
            Ok(None) => return ExitCode::SUCCESS,
            // Parsed again, because a verb consumes its arguments.
            Ok(Some(rest)) => std::thread::sleep(rest),
            Err(failure) => return report_failure(&failure, json),
        }
    }
}

/// Prints why a command failed, and returns its exit code.
fn report_failure(failure: &Failure, json: bool) -> ExitCode {
    output::say(&if json { failure.json() } else { failure.message() });
    ExitCode::from(failure.exit_code())
}

/// Runs the command; returns the delay until it is to be run again, if any (`--watch`).
fn run(command: Command, how: How) -> Result<Option<Duration>, Failure> {
    let has_endpoint = matches!(
        command,
        Command::Noun(_)
            | Command::Top(_)
            | Command::Trace(_)
            | Command::Explain(_)
            | Command::Doctor(_)
            | Command::LibvirtHook(_)
    );
    if !has_endpoint {
        how.refuse_endpoint()?;
    }
    match command {
        Command::Noun(noun) => return Ok(noun.run(how)?),
        Command::Disk(disk) => disk::run(&disk, how.json)?,
        Command::Trace(trace) => trace::run(&trace, how)?,
        Command::Explain(explain) => explain::run(&explain, how)?,
        Command::Doctor(doctor) => doctor::run(&doctor, how)?,
        Command::Xen(xen) => xen::run(&xen, how.json)?,
        Command::Top(top) => top::run(top, how)?,
        Command::Image(_) | Command::Serve(_) | Command::Calibrate(_) => {
            return Err(hand_over::to_disk_program().into());
        }
        Command::Backup(_) => return Err(hand_over::to_backup_program().into()),
        Command::Completion(completion) => completion.run()?,
        Command::LibvirtHook(hook) => libvirt_hook::run(&hook, how)?,
        Command::Manual(manual) => manual.run()?,
    }
    Ok(None)
}

impl Nouns {
    fn run(self, how: How) -> Result<Option<Duration>, Problem> {
        match self {
            Nouns::Host(Noun { verb }) => in_session(how, async |session| verb.run(session).await),
            Nouns::Sr(noun) => in_session(how, async |session| noun.verb.run(session).await),
            Nouns::Vdi(noun) => in_session(how, async |session| noun.verb.run(session).await),
            Nouns::Vbd(noun) => in_session(how, async |session| noun.verb.run(session).await),
            Nouns::Vm(noun) => in_session(how, async |session| noun.verb.run(session).await),
            Nouns::Target(noun) => in_session(how, async |session| noun.verb.run(session).await),
            Nouns::Task(Noun { verb }) => in_session(how, async |session| verb.run(session).await),
            Nouns::Token(Noun { verb }) => in_session(how, async |session| verb.run(session).await),
            Nouns::Event(Noun { verb }) => in_session(how, async |session| verb.run(session).await),
        }
    }
}

/// Sends a command's requests to the daemon; returns the delay until it is to be run again, if any.
fn in_session(how: How, what: impl AsyncFnOnce(&Session) -> Result<(), Problem>) -> Result<Option<Duration>, Problem> {
    let (runtime, session) = (session::runtime()?, Session::new(how)?);
    runtime.block_on(session.explaining(what(&session)))?;
    Ok(session.again())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_command_has_examples_that_it_understands() {
        // Their help is printed by `tapline-disk` and `tapline-backup`.
        let elsewhere = "\n== image\n    tapline image create\n== serve\n    tapline serve\n== calibrate\n    \
                         tapline calibrate raw:a\n== backup\n    tapline backup list\n";
        let faults = example::faults(&Arguments::command(), &format!("{EXAMPLES}{elsewhere}"));
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }

    #[test]
    fn arguments_of_tapline_disk_commands_are_not_parsed_here() {
        let parsed = Arguments::try_parse_from(["tapline", "image", "create", "--size", "10G", "--json", "--help"]);
        let Ok(Arguments { command: Command::Image(words), .. }) = parsed else {
            panic!("not taken as an image command")
        };
        assert_eq!(words.words.len(), 5);
    }

    #[test]
    fn commands_named_in_tips_exist() {
        let (own, of_disks) = (Arguments::command(), arguments::Arguments::command());
        let of_backups = arguments::backup::BackupArguments::command();
        let exists = |words: &str| {
            [&own, &of_disks, &of_backups].into_iter().any(|program| {
                let mut command = program;
                words
                    .split(' ')
                    .take_while(|word| word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'))
                    .all(|word| match command.find_subcommand(word) {
                        Some(below) => {
                            command = below;
                            true
                        }
                        None => word.starts_with('-') || !command.has_subcommands(),
                    })
            })
        };
        let named = mistyped::named_commands();
        assert!(named.len() > 100, "{}", named.len());
        let unknown: Vec<&&str> = named.iter().filter(|words| !exists(words)).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
    }

    #[test]
    fn an_unknown_command_is_refused() {
        assert!(Arguments::try_parse_from(["tapline", "frobnicate"]).is_err());
        assert!(Arguments::try_parse_from(["tapline"]).is_err());
    }

    #[test]
    fn the_command_definition_is_consistent() {
        Arguments::command().debug_assert();
    }
}
