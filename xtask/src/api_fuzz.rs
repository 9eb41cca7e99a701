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
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::demo::tool;
use daemon::Daemon;
use tester::Tester;

const USAGE: &str = "usage: cargo xtask api-fuzz [--max-examples N] [--seed N] [--bin-dir DIR] [--keep]
  --max-examples N  requests of each kind for each operation (15)
  --seed N          the same requests again
  --bin-dir DIR     use the programs in DIR instead of building them
  --keep            keep the directory of a successful run";

/// As automake has it: neither passed nor failed.
const NOT_RUN: i32 = 77;

struct Options {
    max_examples: u32,
    seed: u32,
    bin_dir: Option<PathBuf>,
    keep: bool,
}

impl Options {
    fn parse(arguments: &[String]) -> Option<Options> {
        // Any number will do, and another one each time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.subsec_micros());
        let mut options = Options { max_examples: 15, seed: now, bin_dir: None, keep: false };
        let mut words = arguments.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--max-examples" => options.max_examples = words.next()?.parse().ok()?,
                "--seed" => options.seed = words.next()?.parse().ok()?,
                "--bin-dir" => options.bin_dir = Some(words.next()?.into()),
                "--keep" => options.keep = true,
                _ => return None,
            }
        }
        Some(options)
    }
}

/// Runs the chore. Where there is no python, no package of the tester or no openssl, the process ends here with exit
/// code 77.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments).ok_or(USAGE)?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask has no parent directory")?;
    let tester = Tester::install(&root.join("build")).unwrap_or_else(|why| not_run(&why));
    if tool::locate("openssl").is_none() {
        not_run("there is no openssl; `make prepare` installs it");
    }
    let programs = match &options.bin_dir {
        Some(directory) => {
            std::path::absolute(directory).map_err(|error| format!("{}: {error}", directory.display()))?
        }
        None => crate::demo::build_programs(&[]).map_err(|failure| failure.to_string())?,
    };
    let room = tempfile::Builder::new().prefix("tapline-api-fuzz-").tempdir().map_err(|error| error.to_string())?;
    println!(
        "seed {}: cargo xtask api-fuzz --seed {} --max-examples {}",
        options.seed, options.seed, options.max_examples
    );
    let begun = Instant::now();
    let outcome = ask(&tester, &options, &root.join("docs/openapi.json"), &programs, room.path());
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
