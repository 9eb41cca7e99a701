//! `cargo xtask api-fuzz`: the daemon's API asked by schemathesis, a program by others, for all that its own document
//! promises.
//!
//! It is asked as its users do it over a network, with TLS and a token. Nothing may come that the document does not
//! have, no request may be at fault with the daemon (5xx), and what makes no sense must be refused. Then the daemon
//! must still be there, and its catalogue sound, also for the next daemon. What is asked depends on a seed, which is
//! printed.

mod daemon;
mod tester;

use std::path::{Path, PathBuf};
use std::time::Instant;

use testbed::options::{any_seed, whole_path};
use testbed::programs::{programs, root};
use testbed::tool;

use daemon::Daemon;
use tester::Tester;

/// As automake has it: neither passed nor failed.
const NOT_RUN: i32 = 77;

/// Ask the daemon for all that its OpenAPI document promises
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Requests of each kind for each operation
    #[arg(long, value_name = "N", default_value_t = 15)]
    max_examples: u32,
    /// The same requests again [default: others each time; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Use the programs in this directory instead of building them
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Keep the directory of a successful run
    #[arg(long)]
    keep: bool,
}

/// Runs the chore. Where there is no python, no package of the tester or no openssl, the process ends here with exit
/// code 77.
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
    let outcome = ask(&tester, options, &root.join("docs/openapi.json"), &programs, room.path());
    if options.keep || outcome.is_err() {
        println!("kept: {}", room.keep().display());
    }
    outcome.map(|()| println!("everything held: {:.0} s", begun.elapsed().as_secs_f64()))
}

fn ask(tester: &Tester, options: &Options, document: &Path, programs: &Path, room: &Path) -> Result<(), String> {
    let mut daemon = Daemon::start(programs, room)?;
    daemon.furnish()?;
    let asked = tester.ask(document, &daemon.target()?, options.max_examples, options.seed);
    // What has become of the daemon is of interest in any case.
    let sound = daemon.is_alive().and_then(|()| {
        let before = daemon.objects()?;
        daemon.stop()?;
        tester.check_catalogue(&daemon.catalogue())?;
        daemon.restart()?;
        let after = daemon.objects()?;
        let same = before == after;
        if same { daemon.stop() } else { Err(format!("another daemon sees other objects\n{before}\n{after}")) }
    });
    match (asked, sound) {
        (Ok(()), Ok(())) => Ok(()),
        (Err(asked), Ok(())) => Err(asked),
        (Ok(()), Err(sound)) => Err(sound),
        (Err(asked), Err(sound)) => Err(format!("{asked}\nand {sound}")),
    }
}

fn not_run(why: &str) -> ! {
    eprintln!("not run: {why}");
    std::process::exit(NOT_RUN)
}
