//! `cargo xtask api-fuzz`: tests the daemon's API with schemathesis against the API's own document.
//!
//! Requests are sent over TLS with a token, as by users on a network. Every response must be in the document, no
//! request may fail in the daemon (5xx), and invalid ones must be refused. Afterwards the daemon must still run, and
//! its catalogue must be sound and survive a restart. The requests depend on a seed, which is printed.

mod daemon;
mod tester;

use std::path::{Path, PathBuf};
use std::time::Instant;

use testbed::options::{any_seed, whole_path};
use testbed::programs::{programs, root};
use testbed::tool;

use daemon::Daemon;
use tester::Tester;

/// The exit code of a skipped test, as in automake.
const NOT_RUN: i32 = 77;

/// Tests the daemon's API against its OpenAPI document
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Number of requests of each kind for each operation
    #[arg(long, value_name = "N", default_value_t = 15)]
    max_examples: u32,
    /// Seed of the requests [default: random; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Use the programs in this directory instead of building them
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a successful run
    #[arg(long)]
    keep: bool,
}

/// Runs the chore. If python, the packages of the tester or openssl are missing, the process exits with code 77.
pub fn run(options: &Options) -> Result<(), String> {
    let root = root();
    let tester = Tester::install(&root.join("build")).unwrap_or_else(|why| not_run(&why));
    if tool::locate("openssl").is_none() {
        not_run("there is no openssl; `make prepare` installs it");
    }
    let programs = programs(options.bin_dir.as_deref())?;
    let room = tempfile::Builder::new().prefix("tapline-api-fuzz-").tempdir().map_err(|error| error.to_string())?;
    println!(
        "seed {}: cargo xtask api-fuzz --seed {} --max-examples {}",
        options.seed, options.seed, options.max_examples
    );
    let begun = Instant::now();
    let outcome = test(&tester, options, &root.join("docs/openapi.json"), &programs, room.path());
    if options.keep || outcome.is_err() {
        println!("kept: {}", room.keep().display());
    }
    outcome.map(|()| println!("everything held: {:.0} s", begun.elapsed().as_secs_f64()))
}

fn test(tester: &Tester, options: &Options, document: &Path, programs: &Path, room: &Path) -> Result<(), String> {
    let mut daemon = Daemon::start(programs, room)?;
    daemon.furnish()?;
    let tested = tester.test(document, &daemon.target()?, options.max_examples, options.seed);
    // The state of the daemon is of interest even if the requests failed.
    let sound = daemon.is_alive().and_then(|()| {
        let before = daemon.objects()?;
        daemon.stop()?;
        tester.check_catalogue(&daemon.catalogue())?;
        daemon.restart()?;
        let after = daemon.objects()?;
        let same = before == after;
        if same { daemon.stop() } else { Err(format!("another daemon sees other objects\n{before}\n{after}")) }
    });
    match (tested, sound) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(tested), Ok(())) => Err(tested),
        (Ok(()), Err(sound)) => Err(sound),
        (Err(failed), Err(sound)) => Err(format!("{failed}\nand {sound}")),
    }
}

fn not_run(why: &str) -> ! {
    eprintln!("not run: {why}");
    std::process::exit(NOT_RUN)
}
