//! `make demo` and `cargo xtask guest-test`: Tapline with a real Linux guest, from an empty directory to a verdict.
//!
//! This module starts and ends a run; the steps are in `story`. A run succeeds only if every claim holds. A failed run
//! keeps its directory, with images, consoles and logs; a successful one leaves only the cached guest.

mod daemon;
mod findings;
mod layers;
mod machines;
mod story;
mod suspended;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::in_full;
use vm::qemu::accelerator::Accelerator;

use self::findings::Findings;
use self::story::{Amount, Failure, Story};
use crate::guest::Guest;
use crate::options::whole_path;
use crate::programs::{build_programs, root};
use crate::progress::Progress;
use crate::tapline::Tapline;

/// Options for the programs and the directory.
#[derive(Debug, clap::Args)]
pub struct Common {
    /// Use the programs in this directory instead of building them
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a successful run
    #[arg(long)]
    keep: bool,
}

/// Kills a guest that fills a disk, and checks everything that it has fsynced
#[derive(Debug, clap::Args)]
pub struct GuestTest {
    #[command(flatten)]
    common: Common,
    /// Only the machine of Tapline's driver
    #[arg(long)]
    machine: bool,
    /// Only the layers: counts of the guest, Tapline and the storage at several queue depths
    #[arg(long, conflicts_with = "machine")]
    layers: bool,
    /// Number of its disks: 40 fill one bridge and begin another
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u8).range(4..))]
    disks: u8,
}

/// Shows the life of a thin disk with a real guest
#[derive(Debug, clap::Args)]
pub struct Demo {
    #[command(flatten)]
    common: Common,
}

/// Runs `make demo`.
pub fn run(options: &Demo) -> Result<(), String> {
    let amount = Amount { fill_mib: 128, load_seconds: 10 };
    perform("demo", &options.common, |story| story.whole(&amount))
}

/// Runs `cargo xtask guest-test`, with the programs of the tests.
pub fn guest_test(options: &GuestTest) -> Result<(), String> {
    perform("guest-test", &options.common, |story| match (options.machine, options.layers) {
        (true, _) => story.only_machine(options.disks),
        (false, true) => story.only_layers(),
        (false, false) => story.short(&Amount { fill_mib: 32, load_seconds: 3 }, options.disks),
    })
}

fn perform(
    name: &str,
    options: &Common,
    tell: impl FnOnce(Story<'_>) -> Result<Findings, Failure>,
) -> Result<(), String> {
    let build = root().join("build");
    let work = build.join(format!("{name}-{}", std::process::id()));
    let progress = Progress::start();
    match rehearse(&build, &work, &progress, options, tell) {
        Ok((findings, prepared, accelerator)) => {
            let run_time = progress.elapsed().saturating_sub(prepared).as_secs();
            println!("\n{findings}\n  everything held: {run_time} s, after {} s of preparation", prepared.as_secs());
            if accelerator == Accelerator::Tcg {
                println!("  the guest was emulated (QEMU's TCG): with KVM its figures are many times better");
            }
            clean_up(&work, options.keep)
        }
        Err(failure) => {
            let mut why = format!("FAILED after {:.0} s: {}", progress.elapsed().as_secs_f64(), in_full(&failure));
            if work.exists() {
                why.push_str(&format!("\nimages, consoles and logs are kept in {}", work.display()));
            }
            Err(why)
        }
    }
}

/// Prepares and runs a story; returns its findings, the duration of the preparation, and the accelerator of the guest.
fn rehearse(
    build: &Path,
    work: &Path,
    progress: &Progress,
    options: &Common,
    tell: impl FnOnce(Story<'_>) -> Result<Findings, Failure>,
) -> Result<(Findings, Duration, Accelerator), Failure> {
    progress.step("the programs and the guest");
    let programs = options.bin_dir.clone().map_or_else(build_programs, Ok)?;
    let guest = Guest::build(&build.join("guest"), progress)?;
    fs::create_dir_all(work).map_err(|source| Failure::File { what: "create", path: work.to_owned(), source })?;
    let tapline = Tapline::new(programs.join("tapline"), work);
    let prepared = progress.elapsed();
    let findings = Findings::default();
    let story = Story { guest: &guest, tapline: &tapline, programs: &programs, progress, work, findings };
    let findings = tell(story)?;
    Ok((findings, prepared, guest.accelerator()))
}

fn clean_up(work: &Path, keep: bool) -> Result<(), String> {
    if keep {
        println!("  kept: {}", work.display());
        return Ok(());
    }
    fs::remove_dir_all(work).map_err(|error| format!("cannot remove {}: {error}", work.display()))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::options::parse;

    #[test]
    fn an_unknown_option_is_refused() {
        for refused in [&["--quick"][..], &["--bin-dir"], &["--disks", "256"], &["--disks", "3"]] {
            assert!(parse::<GuestTest>(refused).is_err(), "{refused:?}");
        }
    }

    #[test]
    fn options_are_taken_in_any_order() {
        let options: GuestTest = parse(&["--keep", "--bin-dir", "/target/release"]).unwrap();

        assert!(options.common.keep);
        assert_eq!(options.common.bin_dir, Some(PathBuf::from("/target/release")));
    }
}
