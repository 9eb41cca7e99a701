//! `cargo xtask guest-kill`: a real Linux guest under a real QEMU survives its disk's process, killed or replaced at
//! random moments.
//!
//! Here is how it is started and how it ends; `trial` is the guest's life, `autopsy` what its image holds afterwards. A
//! run succeeds only when fio verified every block, the guest's kernel had nothing to complain of, and each record that
//! was fsynced is there.

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

/// For QEMU to say which one it is.
const TO_SAY_VERSION: Duration = Duration::from_secs(60);

/// What ends a run.
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
    /// For `map_err`: a file operation that failed on `path`.
    fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
        let path = path.to_owned();
        move |source| Failure::File { what, path, source }
    }
}

/// A guest survives its disk's process, killed or replaced at random moments
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Kill the disk's process so often
    #[arg(long, default_value_t = 20)]
    kills: u64,
    /// Have another process take its place so often
    #[arg(long, default_value_t = 0)]
    upgrades: u64,
    /// The moments, and what goes on below the guest; another each time, and printed, if not given
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Descriptors that QEMU asks a record for, instead of its own default
    #[arg(long)]
    queue_size: Option<u16>,
    /// The program that is QEMU
    #[arg(long, value_name = "PATH", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,
    /// Use tapline-disk in this directory instead of building it
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a run that held
    #[arg(long)]
    keep: bool,
}

/// `cargo xtask guest-kill`.
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
    let version = Version::of(&qemu, TO_SAY_VERSION).map_err(Failure::Claim)?;
    let programs = options.bin_dir.clone().map_or_else(build_programs, Ok)?;
    let guest = Guest::build(&work.with_file_name("guest"), &progress)?.under(qemu);
    fs::create_dir_all(work).map_err(Failure::file("create", work))?;
    // Sockets have short names, and redo logs lie in memory.
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

/// QEMU runs in a directory of its own, where a path of ours would lead elsewhere.
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
