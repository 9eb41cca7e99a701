//! `cargo xtask xen-test`: Tapline's programs on real Xen, booted under QEMU, with a dom0 and guests built from the
//! distribution's packages.
//!
//! This module selects tests, runs them one after the other and reports the results; the tests are in `testbed/xen`.
//! Each begins with the same saved machine. A failed test keeps its directory; with `--keep`, every test does.

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

/// Timeout of a test. On a quiet machine tests take 10 to 60 s, and two minutes for a guest that boots by firmware; on
/// a loaded one several times as long.
const TEST_SECONDS_MAX: u64 = 1500;

/// Lines of the console that are shown when a test has failed.
const LAST_LINES: usize = 25;

/// The exit code of a skipped test, as in automake.
const NOT_RUN: i32 = 77;

/// An error of the test environment, as opposed to a failed test.
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

/// Tests Tapline's and other backends on real Xen, under QEMU
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Tests of this backend; repeat for several [default: all]
    #[arg(long = "backend", value_name = "NAME")]
    backends: Vec<Backend>,
    /// Repeat a failed test once, and report that; it fails if it fails twice
    #[arg(long)]
    again: bool,
    /// Keep the directories of successful tests
    #[arg(long)]
    keep: bool,
    /// List the tests without running them
    #[arg(long)]
    list: bool,
    /// Fetch and build what is missing, boot the machine once, and run no test
    #[arg(long)]
    prepare: bool,
    /// A test, its script, or the first words of several: `crate`, `attach`, `qdisk`, `blkback-attach`
    tests: Vec<String>,
}

impl Options {
    /// The selected tests; an error names a word that matches none.
    fn chosen(&self) -> Result<Vec<Test>, String> {
        let mut tests = Test::all(if self.backends.is_empty() { &Backend::ALL } else { &self.backends });
        if let Some(word) = self.tests.iter().find(|word| !tests.iter().any(|test| test.is_selected_by(word))) {
            return Err(format!("no test is called '{word}'; --list names them"));
        }
        if !self.tests.is_empty() {
            tests.retain(|test| self.tests.iter().any(|word| test.is_selected_by(word)));
        }
        Ok(tests)
    }
}

/// Runs `cargo xtask xen-test`. If the packages are not available, the process exits with code 77.
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

/// The machine with its programs, ready for tests.
pub struct Bed {
    saved: Saved,
    build: PathBuf,
}

impl Bed {
    /// Fetches, builds and boots what is not cached. Concurrent preparations wait.
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

    /// Runs the tests; returns the names of those that failed.
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
                // Emulation sometimes loses a guest: its kernel dies on entry, or hangs suddenly.
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

    /// Runs one test: passed, or the output of the console.
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

    /// Lets dom0 run `script`, optionally with a plugin of QEMU, with all of `testbed/xen` and `tools/xen`, and
    /// `programs`, next to it in /drop.
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
            // Names of functions suffice for a backtrace, and save dom0's memory.
            tool::text(Command::new("strip").arg("--strip-debug").arg(&target))?;
        }
        let file = drop.join("run.sh");
        fs::write(&file, script).map_err(at("write", &file))?;
        let ended = self.saved.run(&drop, work, most, plugin, heard)?;
        fs::remove_dir_all(&drop).map_err(at("remove", &drop))?;
        Ok(ended)
    }
}

/// Parameters for dom0 if a disk's process is to be killed more often than usual: the number of kills and the seed; and
/// the timeout of a test then: some seconds per kill, for each of up to five kinds of disks.
fn rounds() -> (String, u64) {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let names = ["TAPLINE_TAKEOVER_ROUNDS", "TAPLINE_TAKEOVER_SEED"];
    let exported = names.map(|name| number(name).map(|value| format!("export {name}={value}\n")).unwrap_or_default());
    let more = number(names[0]).unwrap_or(0).saturating_mul(20);
    (exported.concat(), TEST_SECONDS_MAX.saturating_add(more))
}

/// Checks the qcow2 images that a test has left in `directory` with QEMU's own tool; the test has passed if it finds no
/// damage.
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
    fn without_words_all_tests_are_selected() {
        let all: Vec<String> = Test::all(&Backend::ALL).iter().map(Test::name).collect();
        assert_eq!(chosen(&[]).unwrap(), all);
    }

    #[test]
    fn words_select_tests_and_unknown_ones_are_refused() {
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
