//! `cargo xtask xen-test`: our programs on real Xen, booted under QEMU, with a dom0 and guests made of the
//! distribution's packages.
//!
//! Here is how tests are chosen, run one after the other and reported; what they check is in `testbed/xen`. Each begins
//! with the same saved machine. A test that failed keeps its directory; so does every one with `--keep`.

pub mod compare;
mod counted;
mod images;
mod machine;
mod packages;
mod programs;
mod stubs;
mod suite;
mod targets;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use control::in_full;
use thiserror::Error;

use self::images::Images;
use self::machine::{Processors, Saved};
use self::packages::{PackageError, Packages};
use self::suite::{Backend, Subject, Test};
use crate::guest::kernel::entries;
use crate::guest::{GuestError, at};
use crate::programs::root;
use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// A quiet machine needs 10 to 60 s, and two minutes for a guest that boots by firmware; one with much else to do
/// several times as long.
const TEST_SECONDS_MAX: u64 = 1500;

/// Enough of the console to see why a test failed.
const LAST_LINES: usize = 25;

/// As automake has it: neither passed nor failed.
const NOT_RUN: i32 = 77;

/// What went wrong with the bed; a test that fails is none of these.
#[derive(Debug, Error)]
pub enum BedError {
    #[error(
        "Xen's packages cannot be had: no network, or a distribution without Xen (Debian 12 and 13 have it, Ubuntu \
         24.04 in universe)"
    )]
    Packages(#[source] PackageError),
    #[error("no xen-*.gz beside {}; remove build/xen to fetch it again", boot.display())]
    NoHypervisor { boot: PathBuf },
    #[error("{} is packed in a way that is not known here", image.display())]
    KernelForm { image: PathBuf },
    #[error("{} has {len} bytes, and only {mib} MiB can be dropped into dom0", file.display())]
    TooMuch { file: PathBuf, len: u64, mib: u64 },
    #[error("Xen or dom0 did not boot; the console is in {}:\n{}", console.display(), tool::last_lines(said, LAST_LINES))]
    NoBoot { console: PathBuf, said: String },
    #[error("QEMU does not: {what}")]
    Monitor { what: String },
    #[error("took too long and was ended")]
    Late { said: String },
    #[error("cannot start `{command}`")]
    Start { command: String, source: io::Error },
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Tool(#[from] ToolError),
}

/// Our programs and our peers' backends on real Xen, under QEMU
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Tests of this backend; it may be named several times [default: all of them]
    #[arg(long = "backend", value_name = "NAME")]
    backends: Vec<Backend>,
    /// Run a test that failed once more, and say so; it has failed if it fails twice
    #[arg(long)]
    again: bool,
    /// Keep the directories of tests that passed
    #[arg(long)]
    keep: bool,
    /// Name the tests and run none
    #[arg(long)]
    list: bool,
    /// Fetch and make what is missing, boot the machine once, and run no test
    #[arg(long)]
    prepare: bool,
    /// A test, its script, or the first words of several: `crate`, `attach`, `qdisk`, `blkback-attach`
    tests: Vec<String>,
}

impl Options {
    /// The tests that are asked for; an error names a word that means none.
    fn chosen(&self) -> Result<Vec<Test>, String> {
        let mut tests = Test::all(if self.backends.is_empty() { &Backend::ALL } else { &self.backends });
        if let Some(word) = self.tests.iter().find(|word| !tests.iter().any(|test| test.is_meant_by(word))) {
            return Err(format!("no test is called '{word}'; --list names them"));
        }
        if !self.tests.is_empty() {
            tests.retain(|test| self.tests.iter().any(|word| test.is_meant_by(word)));
        }
        Ok(tests)
    }
}

/// `cargo xtask xen-test`. Where the packages cannot be had, the process ends here with exit code 77.
pub fn run(options: &Options) -> Result<(), String> {
    let tests = options.chosen()?;
    if options.list {
        tests.iter().for_each(|test| println!("{}", test.name()));
        return Ok(());
    }
    let progress = Progress::start();
    let bed = Bed::prepare(Processors::Shared, &progress).map_err(|error| not_run_or(&error))?;
    if options.prepare {
        return Ok(());
    }
    let failed = bed.perform(&tests, options, &progress).map_err(|error| in_full(&error))?;
    let passed = tests.len() - failed.len();
    println!("\n{passed} passed, {} failed, {:.0} s", failed.len(), progress.elapsed().as_secs_f64());
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(" "))) }
}

fn not_run_or(error: &BedError) -> String {
    if matches!(error, BedError::Packages(_)) {
        eprintln!("not run: {}", in_full(error));
        std::process::exit(NOT_RUN);
    }
    in_full(error)
}

/// The machine, ready for tests.
pub struct Bed {
    saved: Saved,
    build: PathBuf,
}

impl Bed {
    /// Fetches, makes and boots what is not cached. Others that prepare at the same time wait for us.
    pub fn prepare(processors: Processors, progress: &Progress) -> Result<Self, BedError> {
        let build = root().join("build");
        let cache = build.join("xen");
        fs::create_dir_all(&cache).map_err(at("create", &cache))?;
        let path = cache.join("lock");
        let lock = fs::File::create(&path).map_err(at("create", &path))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
            .map_err(|error| at("lock", &path)(error.into()))?;
        progress.step("Xen, dom0 and a guest");
        let packages = Packages::obtain(&cache, progress)?;
        let images = Images::obtain(&cache, &packages, progress)?;
        let saved = Saved::obtain(&cache, &images, processors, progress)?;
        Ok(Self { saved, build })
    }

    /// Runs the tests and returns the names of those that failed.
    fn perform(&self, tests: &[Test], options: &Options, progress: &Progress) -> Result<Vec<String>, BedError> {
        let mut programs = Vec::new();
        if tests.iter().any(|test| test.subject == Subject::Crate) {
            progress.detail("building the tests of the crate xen, static");
            programs.extend(programs::tests()?);
        }
        if tests.iter().any(|test| test.subject == Subject::Hostile) {
            progress.detail("building the front end of our own, static");
            programs.extend(programs::front_end()?);
        }
        if tests.iter().any(Test::uses_tapline) {
            progress.detail("building tapline and tapline-disk");
            programs.extend(programs::tapline()?);
        }
        if tests.iter().any(Test::uses_daemon) {
            progress.detail("building taplined");
            programs.extend(programs::daemon()?);
        }
        progress.step("tests");
        let mut failed = Vec::new();
        for test in tests {
            let name = test.name();
            let work = self.build.join(format!("xen-{name}-{}", std::process::id()));
            progress.live(&name);
            let begun = Instant::now();
            let mut outcome = self.perform_one(test, &programs, &work)?;
            let mut which = "";
            if let (Err(said), true) = (&outcome, options.again) {
                // Translation loses a guest now and then: its kernel dies on entry, or is silent from one moment to the
                // next.
                progress.detail(&format!("{name:<24} failed, and runs again"));
                println!("{}", tool::last_lines(said, LAST_LINES));
                fs::remove_dir_all(&work).map_err(at("remove", &work))?;
                outcome = self.perform_one(test, &programs, &work)?;
                which = ", the second time";
            }
            let seconds = begun.elapsed().as_secs_f64();
            match outcome {
                Ok(()) => {
                    progress.detail(&format!("{name:<24} passed {seconds:6.1} s{which}"));
                    if !options.keep {
                        fs::remove_dir_all(&work).map_err(at("remove", &work))?;
                    }
                }
                Err(said) => {
                    progress.detail(&format!("{name:<24} FAILED {seconds:6.1} s"));
                    println!(
                        "{}\nconsole and /out are kept in {}",
                        tool::last_lines(&said, LAST_LINES),
                        work.display()
                    );
                    failed.push(name);
                }
            }
        }
        Ok(failed)
    }

    /// One test: passed, or what the console said.
    fn perform_one(&self, test: &Test, programs: &[PathBuf], work: &Path) -> Result<Result<(), String>, BedError> {
        let (rounds, most) = rounds();
        let script =
            format!(". /drop/steps.sh\n{rounds}{}. /drop/tests/{}.sh\nfinish\n", test.parameters(), test.script);
        let ended = self.run_script(&script, programs, work, Duration::from_secs(most), None, |_| ());
        Ok(match ended {
            Ok(ended) if ended.code == Some(0) => judged_by_qemu(&work.join("out/images"))?,
            Ok(ended) => Err(ended.console),
            Err(BedError::Late { said }) => Err(format!("{said}\n(not finished after {most} s)")),
            Err(error) => return Err(error),
        })
    }

    /// Has dom0 run `script`, under a plugin of QEMU if one is named, with all of `testbed/xen` and `tools/xen`, and
    /// `programs`, beside it in /drop.
    fn run_script(
        &self,
        script: &str,
        programs: &[PathBuf],
        work: &Path,
        most: Duration,
        plugin: Option<&str>,
        heard: impl FnMut(&str),
    ) -> Result<machine::Ended, BedError> {
        let drop = work.join("drop");
        fs::create_dir_all(&drop).map_err(at("create", &drop))?;
        let scripts = ["testbed/xen/.", "tools/xen/."].map(|place| root().join(place));
        tool::text(Command::new("cp").arg("-r").args(scripts).arg(&drop))?;
        for program in programs {
            let target = drop.join(programs::name_of(program));
            fs::copy(program, &target).map_err(at("copy to", &target))?;
            // Names of functions are enough for a backtrace there, and dom0 has its memory for something else.
            tool::text(Command::new("strip").arg("--strip-debug").arg(&target))?;
        }
        let file = drop.join("run.sh");
        fs::write(&file, script).map_err(at("write", &file))?;
        let ended = self.saved.run(&drop, work, most, plugin, heard)?;
        fs::remove_dir_all(&drop).map_err(at("remove", &drop))?;
        Ok(ended)
    }
}

/// What dom0 is told of how often the process of a disk is to be killed, if more often than usual, and where random
/// numbers begin; and the seconds that a test may take then: a few for a kill, and one test may do it with each of five
/// kinds of disks.
fn rounds() -> (String, u64) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let names = ["TAPLINE_TAKEOVER_ROUNDS", "TAPLINE_TAKEOVER_SEED"];
    let exported = names.map(|name| number(name).map(|value| format!("export {name}={value}\n")).unwrap_or_default());
    let more = number(names[0]).unwrap_or(0).saturating_mul(20);
    (exported.concat(), TEST_SECONDS_MAX.saturating_add(more))
}

/// What QEMU's own tool says of the qcow2 images that a test has left in `directory`; the test has passed if it finds
/// them sound.
fn judged_by_qemu(directory: &Path) -> Result<Result<(), String>, BedError> {
    if !directory.exists() {
        return Ok(Ok(()));
    }
    for image in entries(directory)? {
        let checked = tool::text(Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&image));
        match checked {
            Ok(_) => {}
            Err(error @ ToolError::Failed { .. }) => return Ok(Err(in_full(&error))),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Ok(()))
}

#[cfg(test)]
mod test {
    use super::*;

    fn chosen(words: &[&str]) -> Result<Vec<String>, String> {
        let tests = crate::options::parse::<Options>(words)?.chosen()?;
        Ok(tests.iter().map(Test::name).collect())
    }

    #[test]
    fn without_words_all_tests_are_meant() {
        let all: Vec<String> = Test::all(&Backend::ALL).iter().map(Test::name).collect();
        assert_eq!(chosen(&[]).unwrap(), all);
    }

    #[test]
    fn a_word_chooses_and_one_that_means_nothing_is_refused() {
        let names = chosen(&["--backend", "tapline", "crate", "tapline-attach"]).unwrap();
        assert_eq!(names, ["crate", "tapline-attach-pvh", "tapline-attach-pv"]);
        assert!(chosen(&["vdb9"]).unwrap_err().contains("'vdb9'"));
        assert!(chosen(&["--backend", "qdisk", "tapline"]).is_err(), "of a backend that is not chosen");
    }

    #[test]
    fn an_unknown_option_or_backend_is_refused() {
        assert!(chosen(&["--quick"]).is_err());
        assert!(chosen(&["--backend", "vdb9"]).is_err());
    }
}
