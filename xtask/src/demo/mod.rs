//! `cargo xtask demo` and `cargo xtask guest-test`: Tapline with a real Linux guest, from an empty directory to a
//! verdict.
//!
//! Here is how they are started and how they end; the story itself is in `story`. A run succeeds only when every claim
//! held. A failed run keeps its directory, with images, consoles and logs; a successful one leaves nothing but the
//! cached guest.

mod daemon;
mod findings;
pub(crate) mod guest;
mod machines;
pub(crate) mod progress;
pub(crate) mod story;
pub(crate) mod tapline;
pub(crate) mod tool;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use vm::syntax::in_full;

use self::findings::Findings;
use self::guest::Guest;
use self::progress::Progress;
use self::story::{Amount, Failure, Story};
use self::tapline::Tapline;

const USAGE: &str = "[--bin-dir DIR] [--keep] [--machine] [--disks N]
  --bin-dir DIR  use the programs in DIR instead of building them
  --keep         keep the directory of a successful run
  --machine      guest-test: only the machine of our own driver
  --disks N      guest-test: its disks, 4 to 255 (40: two bridges)";

/// Disks of the machine, if nobody says another number: they fill one bridge and begin another.
const DISKS: u8 = 40;

/// `cargo xtask demo`: the whole story, with the programs as they are released.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let amount = Amount { fill_mib: 128, load_seconds: 10 };
    perform("demo", arguments, &["--release"], |story, _| story.whole(&amount))
}

/// `cargo xtask guest-test`: a short story, with the programs as tests have them.
pub fn guest_test(arguments: &[String]) -> Result<(), String> {
    perform("guest-test", arguments, &[], |story, options| match options.machine {
        true => story.only_machine(options.disks),
        false => story.short(&Amount { fill_mib: 32, load_seconds: 3 }, options.disks),
    })
}

struct Options {
    bin_dir: Option<PathBuf>,
    keep: bool,
    machine: bool,
    disks: u8,
}

impl Options {
    fn parse(arguments: &[String]) -> Option<Self> {
        let mut options = Self { bin_dir: None, keep: false, machine: false, disks: DISKS };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--bin-dir" => options.bin_dir = Some(PathBuf::from(words.next()?)),
                "--keep" => options.keep = true,
                "--machine" => options.machine = true,
                "--disks" => options.disks = words.next()?.parse().ok().filter(|&disks| disks >= 4)?,
                _ => return None,
            }
        }
        Some(options)
    }
}

fn perform(
    name: &str,
    arguments: &[String],
    profile: &[&str],
    tell: impl FnOnce(Story<'_>, &Options) -> Result<Findings, Failure>,
) -> Result<(), String> {
    let options = Options::parse(arguments).ok_or_else(|| format!("usage: cargo xtask {name} {USAGE}"))?;
    let build = root().join("build");
    let work = build.join(format!("{name}-{}", std::process::id()));
    let progress = Progress::start();
    match rehearse(&build, &work, &progress, &options, profile, tell) {
        Ok((findings, prepared)) => {
            let told = progress.elapsed().saturating_sub(prepared).as_secs();
            println!("\n{findings}\n  everything held: {told} s, after {} s of preparation", prepared.as_secs());
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

/// Prepares and tells a story: what it found, and how long the preparation took.
fn rehearse(
    build: &Path,
    work: &Path,
    progress: &Progress,
    options: &Options,
    profile: &[&str],
    tell: impl FnOnce(Story<'_>, &Options) -> Result<Findings, Failure>,
) -> Result<(Findings, Duration), Failure> {
    progress.step("the programs and the guest");
    let programs = match &options.bin_dir {
        Some(directory) => std::path::absolute(directory).map_err(|source| Failure::File {
            what: "find",
            path: directory.clone(),
            source,
        })?,
        None => build_programs(profile)?,
    };
    let guest = Guest::build(&build.join("guest"), progress)?;
    fs::create_dir_all(work).map_err(|source| Failure::File { what: "create", path: work.to_owned(), source })?;
    let tapline = Tapline::new(programs.join("tapline"), work);
    let prepared = progress.elapsed();
    let findings = Findings::default();
    let story = Story { guest: &guest, tapline: &tapline, programs: &programs, progress, work, findings };
    let findings = tell(story, options)?;
    Ok((findings, prepared))
}

/// The directory of the programs: one that is named, or that of those of the tests, which are built.
pub(crate) fn programs(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(directory) = named {
        return std::path::absolute(directory).map_err(|error| format!("{}: {error}", directory.display()));
    }
    build_programs(&[]).map_err(|failure| in_full(&failure))
}

/// Builds the programs and returns their directory.
pub(crate) fn build_programs(profile: &[&str]) -> Result<PathBuf, Failure> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--bin", "tapline", "--bin", "tapline-disk", "--bin", "taplined"]);
    command.args(profile).current_dir(root());
    tool::run(&mut command)?;
    // We lie in the target directory ourselves, as target/debug/xtask.
    let ours = std::env::current_exe().map_err(|source| Failure::File {
        what: "find",
        path: PathBuf::from("xtask"),
        source,
    })?;
    let target = ours.ancestors().nth(2).unwrap_or(Path::new("target"));
    Ok(target.join(if profile.is_empty() { "debug" } else { "release" }))
}

fn clean_up(work: &Path, keep: bool) -> Result<(), String> {
    if keep {
        println!("  kept: {}", work.display());
        return Ok(());
    }
    fs::remove_dir_all(work).map_err(|error| format!("cannot remove {}: {error}", work.display()))
}

/// The top of the source tree, below which everything lies that a run makes.
pub(crate) fn root() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_owned()
}

#[cfg(test)]
mod test {
    use super::*;

    fn parse(words: &[&str]) -> Option<Options> {
        Options::parse(&words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn an_unknown_option_is_refused() {
        assert!(parse(&["--quick"]).is_none());
        assert!(parse(&["--bin-dir"]).is_none());
        assert!(parse(&["--disks", "256"]).is_none());
        assert!(parse(&["--disks", "3"]).is_none());
    }

    #[test]
    fn options_are_taken_in_any_order() {
        let options = parse(&["--keep", "--bin-dir", "target/release"]).unwrap();

        assert!(options.keep);
        assert_eq!(options.bin_dir, Some(PathBuf::from("target/release")));
    }
}
