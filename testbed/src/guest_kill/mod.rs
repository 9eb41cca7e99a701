//! `cargo xtask guest-kill`: a real Linux guest under a real QEMU must survive when its disk's process is killed or
//! replaced at random times.
//!
//! This module starts and ends a run; `trial` is the guest's life, `autopsy` checks its image afterwards. A run
//! succeeds only if fio verified every block, the guest's kernel reported no error, and each record that was fsynced is
//! there.

mod autopsy;
mod chain;
mod changes;
mod disk;
mod moments;
mod records;
mod report;
mod trial;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::in_full;
use thiserror::Error;
use vm::qemu::version::Version;

use crate::guest::{Guest, GuestError};
use crate::options::{any_seed, whole_path};
use crate::programs::{build_programs, root};
use crate::progress::Progress;
use crate::tool::ToolError;

use self::report::Report;
use self::trial::{Bed, Trial};

/// Timeout for QEMU to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(60);

/// A failure that ends a run.
#[derive(Debug, Error)]
pub enum Failure {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error("cannot {what} {}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("the disk's process has ended by itself: {said}")]
    Ended { said: String },
    #[error("{0}")]
    Claim(String),
}

impl Failure {
    /// For `map_err`: a failed file operation on `path`.
    fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
        let path = path.to_owned();
        move |source| Failure::File { what, path, source }
    }
}

/// Kills or replaces a guest's disk process at random times
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Number of kills of the disk's process
    #[arg(long, default_value_t = 20)]
    kills: u64,
    /// Number of replacements of the disk's process
    #[arg(long, default_value_t = 0)]
    upgrades: u64,
    /// Seed of the times and of the changes below the guest [default: random; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Queue size that QEMU requests, instead of its default
    #[arg(long)]
    queue_size: Option<u16>,
    /// The program of QEMU
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// Use tapline-disk in this directory instead of building it
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a successful run
    #[arg(long)]
    keep: bool,
}

/// Runs `cargo xtask guest-kill`.
pub fn run(options: &Options) -> Result<(), String> {
    let again = format!("--kills {} --upgrades {} --seed {}", options.kills, options.upgrades, options.seed);
    let again = format!("{again} --qemu {}", options.qemu.display());
    let again = options.queue_size.map_or(again.clone(), |size| format!("{again} --queue-size {size}"));
    println!("cargo xtask guest-kill {again}");
    let work = root().join(format!("build/guest-kill-{}", std::process::id()));
    match perform(options, &work) {
        Ok(report) => {
            println!("\n{report}\n  everything held");
            if options.keep {
                println!("  kept: {}", work.display());
                return Ok(());
            }
            fs::remove_dir_all(&work).map_err(|error| format!("cannot remove {}: {error}", work.display()))
        }
        Err(failure) => {
            let mut why = format!("FAILED: {}\nthe same moments: cargo xtask guest-kill {again}", in_full(&failure));
            if work.exists() {
                why.push_str(&format!("\nimages, console and logs are kept in {}", work.display()));
            }
            Err(why)
        }
    }
}

fn perform(options: &Options, work: &Path) -> Result<Report, Failure> {
    let progress = Progress::start();
    progress.step("the programs and the guest");
    let qemu = located(&options.qemu)?;
    let version = Version::of(&qemu, VERSION_TIMEOUT).map_err(Failure::Claim)?;
    let programs = options.bin_dir.clone().map_or_else(build_programs, Ok)?;
    let guest = Guest::build(&work.with_file_name("guest"), &progress)?.under(qemu);
    fs::create_dir_all(work).map_err(Failure::file("create", work))?;
    // Sockets need short paths, and redo logs are in memory.
    let memory = Path::new("/dev/shm");
    let run = tempfile::Builder::new().prefix("tapline-guest-kill-").tempdir_in(memory);
    let run = run.map_err(Failure::file("make a directory in", memory))?;
    let program = programs.join("tapline-disk");
    let begun = Instant::now();
    let bed = Bed { guest: &guest, version, queue_size: options.queue_size, program: &program, work, run: run.path() };
    let trial = Trial::begin(&bed, options.seed, &progress)?;
    let lived = trial.live(&moments::of(options.seed, options.kills, options.upgrades))?;
    progress.step("what the image holds, after the power loss and with what the last process left in memory");
    autopsy::perform(&program, work, &disk::redo_in(run.path()), &lived.records, &progress)?;
    Ok(Report { version, took: begun.elapsed(), lived })
}

/// The absolute path of QEMU, which runs in another directory.
fn located(qemu: &Path) -> Result<PathBuf, Failure> {
    if qemu.components().count() == 1 && !qemu.is_file() {
        return Ok(qemu.to_owned());
    }
    fs::canonicalize(qemu).map_err(Failure::file("find", qemu))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::options::parse;

    #[test]
    fn options_are_numbers_where_they_must_be() {
        let options: Options = parse(&["--kills", "3", "--seed", "9", "--upgrades", "2", "--keep"]).unwrap();
        assert_eq!((options.kills, options.upgrades, options.seed, options.keep), (3, 2, 9, true));
        assert!(parse::<Options>(&["--kills", "many"]).is_err());
        assert!(parse::<Options>(&["--kills"]).is_err());
        assert!(parse::<Options>(&["--slowly"]).is_err());
    }
}
