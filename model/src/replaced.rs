//! `cargo xtask replaced`: images are served by the real disk process, killed, replaced and used again.
//!
//! Invariants checked: an image shows the content put in its place and all writes answered since, never a byte of an
//! earlier image; after the death of its process no answered write is missing; a sound image is never refused except
//! for the reasons listed in the code, and then the printed advice helps.

mod action;
mod failure;
mod image;
mod judge;
mod library;
mod life;
mod oracle;
mod planted;
mod program;
mod round;
mod site;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use testbed::options::{any_seed, positive, whole_path};
use testbed::programs::programs;
use testbed::tool;

use self::action::Action;
use self::failure::{Failure, FailureClass};
use self::image::ImageKind;
use self::library::Library;
use self::program::Programs;
use self::round::{Restrictions, Round, RoundResources};
use self::site::Medium;
use crate::NOT_RUN;
use crate::mounts::Mounts;

/// Replaces, moves and overwrites images between two uses, and checks what they show
///
/// Each round puts an image on a file system or a loop device, serves it over NBD, writes, kills the process, and does
/// something to the image: nothing, a new name or time, another image in the same place, a job of Tapline, another
/// program. Then the image is used, and all that is read is checked. Exit status 0: no error was found; 1: an error was
/// found; 77: cannot run here, which needs root.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Seed of the first round; each next round has the next seed [default: random; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Number of rounds
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// Begin no round after this time
    #[arg(long)]
    seconds: Option<u64>,
    /// Only these actions; repeat for several
    #[arg(long, value_name = "ACTION")]
    only: Vec<Action>,
    /// Only these kinds of images; repeat for several
    #[arg(long, value_name = "KIND")]
    image: Vec<ImageKind>,
    /// Only these places; repeat for several
    #[arg(long, value_name = "PLACE")]
    place: Vec<Medium>,
    /// Number of parallel rounds
    #[arg(long, default_value = "2", value_parser = positive)]
    jobs: usize,
    /// Run all rounds, and list the failures by kind
    #[arg(long)]
    survey: bool,
    /// Plant a fault in the disk process, or each of `all`, and fail if it is not found
    #[arg(long, value_name = "NAME")]
    planted: Option<String>,
    /// Directory of tapline-disk [default: it is built]
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Directory for the files
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    /// Print the steps of each round
    #[arg(long)]
    verbose: bool,
    /// Keep the files of a round that failed
    #[arg(long)]
    keep: bool,
}

/// A round that failed.
#[derive(Debug)]
struct FailedRound {
    seed: u64,
    steps: String,
    kind: String,
    medium: String,
    failure: Failure,
    story: Vec<String>,
}

/// The results of all rounds.
#[derive(Debug, Default)]
struct Summary {
    rounds: u64,
    failed: Vec<FailedRound>,
}

/// Runs `cargo xtask replaced`.
pub fn run(options: &Options) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        println!("NOT RUN: it needs root");
        std::process::exit(NOT_RUN);
    }
    println!("seed {}", options.seed);
    if let Some(name) = &options.planted {
        return planted::run(options, name);
    }
    let programs = Programs { directory: programs(options.bin_dir.as_deref())?, planted: None };
    let begun = Instant::now();
    let sum = rounds(options, programs)?;
    println!("{} rounds in {} s, from seed {}", sum.rounds, begun.elapsed().as_secs(), options.seed);
    if sum.failed.is_empty() {
        return Ok(());
    }
    list(&sum);
    let first = sum.failed.first().map_or(options.seed, |failed| failed.seed);
    let restricted = restrictions(options);
    Err(format!(
        "{} rounds failed\nonce more: cargo xtask replaced --seed {first} --rounds 1{restricted} --verbose",
        sum.failed.len()
    ))
}

/// The options that restrict rounds, without which a seed yields other rounds.
fn restrictions(options: &Options) -> String {
    let word = |name: &str, value: Option<clap::builder::PossibleValue>| {
        value.map(|value| format!(" --{name} {}", value.get_name())).unwrap_or_default()
    };
    let of = |value: &dyn Fn() -> Vec<String>| value().concat();
    of(&|| options.only.iter().map(|one| word("only", clap::ValueEnum::to_possible_value(one))).collect())
        + &of(&|| options.image.iter().map(|one| word("image", clap::ValueEnum::to_possible_value(one))).collect())
        + &of(&|| options.place.iter().map(|one| word("place", clap::ValueEnum::to_possible_value(one))).collect())
}

/// Lists failures by kind and action.
fn list(sum: &Summary) {
    let mut by_key: BTreeMap<(FailureClass, &str), Vec<&FailedRound>> = BTreeMap::new();
    for failed in &sum.failed {
        by_key.entry((failed.failure.class, &failed.steps)).or_default().push(failed);
    }
    for ((class, steps), all) in by_key {
        let Some(first) = all.first() else { continue };
        let of = |text: &dyn Fn(&FailedRound) -> String| {
            let all: BTreeSet<String> = all.iter().map(|failed| text(failed)).collect();
            all.into_iter().collect::<Vec<_>>().join(" ")
        };
        println!("{class:?} x{} {steps}", all.len());
        println!("    of {} on {}", of(&|failed| failed.kind.clone()), of(&|failed| failed.medium.clone()));
        let what: String = first.failure.what.chars().take(240).collect();
        println!("    seeds {}; the first: {}", of(&|failed| failed.seed.to_string()), what.replace('\n', " | "));
    }
}

/// Runs all rounds.
fn rounds(options: &Options, programs: Programs) -> Result<Summary, String> {
    let room = tempfile::Builder::new().prefix("tl-replaced-").tempdir_in(&options.dir);
    let room = room.map_err(|error| format!("a directory in {}: {error}", options.dir.display()))?;
    let mut mounts = Mounts::below(room.path());
    let places = places(&mut mounts, room.path())?;
    let numbers = free_numbers(2 + 2 * options.jobs)?;
    let library = Library::new(room.path().join("library"), pair(&numbers, 0));
    let limits =
        Restrictions { only: options.only.clone(), kinds: options.image.clone(), media: options.place.clone() };
    let ground = RoundResources { programs, library, places, room: room.path().join("rounds"), limits };
    let (next, ends, sum) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(Summary::default()));
    let begun = Instant::now();
    let work = |numbers: (u32, u32)| {
        while !ends.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let is_late = options.seconds.is_some_and(|seconds| begun.elapsed() > Duration::from_secs(seconds));
            if number >= options.rounds || is_late {
                break;
            }
            let failed = one(options, &ground, options.seed.wrapping_add(number), numbers);
            let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
            sum.rounds += 1;
            if let Some(failed) = failed {
                println!(
                    "seed {}: {:?}: {}\n    {}",
                    failed.seed,
                    failed.failure.class,
                    failed.failure.what,
                    failed.story.join("; ")
                );
                ends.fetch_or(!options.survey, Ordering::Relaxed);
                sum.failed.push(failed);
            }
        }
    };
    std::thread::scope(|scope| {
        for worker in 0..options.jobs {
            let (work, numbers) = (&work, pair(&numbers, 1 + worker));
            scope.spawn(move || work(numbers));
        }
    });
    if options.keep && sum.lock().is_ok_and(|sum| !sum.failed.is_empty()) {
        mounts.keep();
        println!("its files are in {}", room.keep().display());
    }
    Ok(sum.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Runs one round.
fn one(options: &Options, ground: &RoundResources, seed: u64, numbers: (u32, u32)) -> Option<FailedRound> {
    let begun = Round::begin(ground, seed, numbers);
    let mut round = match begun {
        Ok(round) => round,
        Err(why) => {
            let failure = Failure::of_program(why);
            let (steps, kind, medium) = ("a round cannot begin".to_owned(), String::new(), String::new());
            return Some(FailedRound { seed, steps, kind, medium, failure, story: Vec::new() });
        }
    };
    let done = round.run();
    if options.verbose {
        println!("seed {seed}: {}", round.story.join("; "));
    }
    let steps: Vec<String> = round.steps.iter().map(ToString::to_string).collect();
    let (steps, kind) = (steps.join("+"), format!("{:?}", round.kind));
    let medium = format!("{:?}", round.site.medium);
    let story = std::mem::take(&mut round.story);
    let failed = done.err().map(|failure| FailedRound { seed, steps, kind, medium, failure, story });
    if failed.is_none() || !options.keep {
        for directory in [&round.site.files, &round.site.room] {
            if let Err(error) = fs::remove_dir_all(directory) {
                println!("{}: {error}", directory.display());
            }
        }
    }
    failed
}

/// A directory for each kind of place that this machine supports.
fn places(mounts: &mut Mounts, room: &std::path::Path) -> Result<Vec<(Medium, PathBuf)>, String> {
    let made: [(Medium, &str, &str, &[&str], u64); 3] = [
        (Medium::Ext4, "ext4", "mkfs.ext4", &["-q"], 512),
        (Medium::Xfs, "xfs", "mkfs.xfs", &["-q", "-m", "reflink=1"], 512),
        (Medium::Btrfs, "btrfs", "mkfs.btrfs", &["-q"], 1024),
    ];
    let mut places = vec![(Medium::Tmpfs, room.join("tmpfs"))];
    match std::path::Path::new("/dev/loop-control").exists() && tool::locate("losetup").is_some() {
        true => places.push((Medium::Loop, room.join("loop"))),
        false => println!("NOT RUN: loop devices, of which there are none here"),
    }
    for (medium, name, mkfs, options, mebibytes) in made {
        if tool::locate(mkfs).is_none() {
            println!("NOT RUN: {name}, there is no {mkfs}");
            continue;
        }
        match mounts.mount(name, &["-o", "loop"], Some((mkfs, options, mebibytes))) {
            Ok(()) => places.push((medium, room.join(name))),
            Err(why) => println!("NOT RUN: {name}: {why}"),
        }
    }
    if tool::locate("bindfs").is_none() {
        println!("NOT RUN: fuse, there is no bindfs");
    } else if places.iter().any(|(medium, _)| *medium == Medium::Ext4) {
        match mounts.show("fuse", &room.join("ext4/fuse")) {
            Ok(()) => places.push((Medium::Fuse, room.join("fuse"))),
            Err(why) => println!("NOT RUN: fuse: {why}"),
        }
    }
    Ok(places)
}

/// Numbers of unused loop devices.
fn free_numbers(count: usize) -> Result<Vec<u32>, String> {
    let first = 200 + std::process::id() % 400 * 16;
    let is_free = |number: &u32| !std::path::Path::new(&format!("/sys/block/loop{number}/loop/backing_file")).exists();
    let numbers: Vec<u32> = (first..).filter(is_free).take(count).collect();
    if numbers.len() == count { Ok(numbers) } else { Err("there are no free loop devices".into()) }
}

fn pair(numbers: &[u32], at: usize) -> (u32, u32) {
    let of = |at: usize| numbers.get(at).copied().unwrap_or(0);
    (of(2 * at), of(2 * at + 1))
}
