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
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use thiserror::Error;
use vm::qemu::version::Version;
use vm::syntax::in_full;

use crate::demo::guest::{Guest, GuestError};
use crate::demo::progress::Progress;
use crate::demo::tool::ToolError;
use crate::demo::{build_programs, root};

use self::report::Report;
use self::trial::{Bed, Trial};

const USAGE: &str =
    "usage: cargo xtask guest-kill [--kills N] [--upgrades N] [--seed N] [--qemu PATH] [--bin-dir DIR] [--keep]
  --kills N      kill the disk's process so often (20)
  --upgrades N   have another process take its place so often (0)
  --seed N       the moments, and what goes on below the guest; printed at the beginning, random if not given
  --queue-size N descriptors that QEMU asks a record for (its own default)
  --qemu PATH    another QEMU than qemu-system-x86_64
  --bin-dir DIR  use tapline-disk in DIR instead of building it
  --keep         keep the directory of a run that held";

const KILLS: u64 = 20;

/// For QEMU to say which one it is.
const TO_SAY_VERSION: Duration = Duration::from_secs(60);

/// What ends a run.
#[derive(Debug, Error)]
pub enum Failure {
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Tool(#[from] ToolError),
    #[error(transparent)]
    Programs(#[from] crate::demo::story::Failure),
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

#[derive(Debug)]
struct Options {
    kills: u64,
    upgrades: u64,
    seed: u64,
    queue_size: Option<u16>,
    qemu: PathBuf,
    bin_dir: Option<PathBuf>,
    keep: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Option<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut options = Self {
            kills: KILLS,
            upgrades: 0,
            seed: u64::from(now.subsec_nanos()),
            queue_size: None,
            qemu: PathBuf::from("qemu-system-x86_64"),
            bin_dir: None,
            keep: false,
        };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--kills" => options.kills = words.next()?.parse().ok()?,
                "--upgrades" => options.upgrades = words.next()?.parse().ok()?,
                "--seed" => options.seed = words.next()?.parse().ok()?,
                "--queue-size" => options.queue_size = Some(words.next()?.parse().ok()?),
                "--qemu" => options.qemu = PathBuf::from(words.next()?),
                "--bin-dir" => options.bin_dir = Some(PathBuf::from(words.next()?)),
                "--keep" => options.keep = true,
                _ => return None,
            }
        }
        Some(options)
    }
}

/// `cargo xtask guest-kill`.
pub fn run(arguments: &[String]) -> Result<(), String> {
    if matches!(arguments, [word] if word == "--help" || word == "-h") {
        println!("{USAGE}");
        return Ok(());
    }
    let options = Options::parse(arguments).ok_or(USAGE)?;
    let again = format!("--kills {} --upgrades {} --seed {}", options.kills, options.upgrades, options.seed);
    let again = format!("{again} --qemu {}", options.qemu.display());
    let again = options.queue_size.map_or(again.clone(), |size| format!("{again} --queue-size {size}"));
    println!("cargo xtask guest-kill {again}");
    let work = root().join(format!("build/guest-kill-{}", std::process::id()));
    match perform(&options, &work) {
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
    let programs = match &options.bin_dir {
        Some(directory) => std::path::absolute(directory).map_err(Failure::file("find", directory))?,
        None => build_programs(&[])?,
    };
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

    #[test]
    fn options_are_numbers_where_they_must_be() {
        let parse = |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let options = parse("--kills 3 --seed 9 --upgrades 2 --keep").unwrap();
        assert_eq!((options.kills, options.upgrades, options.seed, options.keep), (3, 2, 9, true));
        assert!(parse("--kills many").is_none());
        assert!(parse("--kills").is_none());
        assert!(parse("--slowly").is_none());
    }
}
