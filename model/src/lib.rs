//! `cargo xtask model`: random operations on repositories, disks and their plugs, against the real daemon and its real
//! processes, under faults of every kind.
//!
//! Invariants checked: every write that was answered is there, in every VDI that shows it, whichever process was
//! killed, stopped, left without space or restored from a backup; an interrupted verb has been done or not; names,
//! sizes and relations are as requested; schedules destroy only snapshots that they have taken; disks, the catalogue
//! and the repositories' own records agree; nothing hangs; no file, process or task is left over.

#![forbid(unsafe_code)]

mod bed;
mod cancels;
mod check;
mod clients;
mod content;
mod images;
mod io;
mod limits;
mod machines;
mod monitors;
mod mounts;
mod operations;
mod planted;
pub mod replaced;
mod repositories;
mod schedules;
mod seldom;
mod settings;
mod troubles;
mod verbs;
mod vm_snapshots;
mod world;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use testbed::options::{any_seed, whole_path};
use testbed::programs::{programs, root};
use testbed::tool;

use self::bed::Bed;
use self::planted::Favoured;
use self::world::{Counts, World};

/// The exit code if the model cannot run here.
const NOT_RUN: i32 = 77;

/// Random operations and faults, checked against the real daemon
///
/// Runs daemons one after the other, each with a number of random operations and faults; at the end of each life all
/// disks are plugged, read and compared. Exit status 0: no error was found; 1: an error was found; 77: cannot run here,
/// which needs root, mkfs.ext4, mkfs.xfs and loop devices. Without qemu-system-x86_64 there are no VMs.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Seed of the first life; each next life has the next seed [default: random; it is printed]
    #[arg(long, default_value_t = any_seed(), hide_default_value = true)]
    seed: u64,
    /// Begin no new life after this time
    #[arg(long)]
    seconds: Option<u64>,
    /// Run at least this many operations
    #[arg(long, default_value_t = 0)]
    operations: u64,
    /// Run until at least this many processes were killed
    #[arg(long, default_value_t = 0)]
    kills: u64,
    /// Number of operations of a life
    #[arg(long, default_value_t = 300)]
    length: u64,
    /// Directory of taplined and tapline-disk [default: they are built]
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    bin_dir: Option<PathBuf>,
    /// Directory for the files
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    /// Do this operation more often
    #[arg(long, value_name = "NAME")]
    favour: Option<Favoured>,
    /// Plant a fixed fault again, or each of `all`, and fail if it is not found
    #[arg(long, value_name = "NAME")]
    planted: Option<String>,
    /// Print each operation
    #[arg(long)]
    verbose: bool,
    /// Keep the files of a life that failed
    #[arg(long)]
    keep: bool,
}

impl Options {
    /// Whether to begin another life.
    fn continues(&self, begun: Instant, operations: u64, kills: u64) -> bool {
        let wanted = self.operations > 0 || self.kills > 0;
        let timely = self.seconds.is_none_or(|seconds| begun.elapsed() < Duration::from_secs(seconds));
        match (wanted, self.seconds) {
            (true, _) => timely && (operations < self.operations || kills < self.kills),
            (false, Some(_)) => timely,
            // By default one life.
            (false, None) => operations == 0,
        }
    }
}

/// Runs `cargo xtask model`.
pub fn run(options: &Options) -> Result<(), String> {
    if !rustix::process::geteuid().is_root()
        || ["mkfs.ext4", "mkfs.xfs"].iter().any(|tool| tool::locate(tool).is_none())
    {
        println!("NOT RUN: it needs root, mkfs.ext4 and mkfs.xfs");
        std::process::exit(NOT_RUN);
    }
    if let Some(name) = &options.planted {
        return planted::run(options, name);
    }
    if !machines::qemu_is_installed() {
        println!("VMs are left out: there is no {}", machines::QEMU);
    }
    let programs = programs(options.bin_dir.as_deref())?;
    let steps = steps(&programs)?;
    let begun = Instant::now();
    let (mut seed, mut operations, mut total) = (options.seed, 0, Counts::default());
    while options.continues(begun, operations, total.kills) {
        println!("seed {seed}");
        let counts = life(options, &programs, &steps, seed, options.favour)?;
        operations += counts.done.values().sum::<u64>();
        total.kills += counts.kills;
        total.compared += counts.compared;
        add(&mut total.done, counts.done);
        add(&mut total.refused, counts.refused);
        seed += 1;
    }
    println!("{} lives in {} s, from seed {}", seed - options.seed, begun.elapsed().as_secs(), options.seed);
    println!("{operations} operations, {} kills, {} MiB compared", total.kills, total.compared >> 20);
    println!("done: {:?}", total.done);
    println!("refused or failed: {:?}", total.refused);
    Ok(())
}

fn add(sum: &mut BTreeMap<String, u64>, more: BTreeMap<String, u64>) {
    for (what, count) in more {
        *sum.entry(what).or_default() += count;
    }
}

/// One life of a daemon.
fn life(
    options: &Options,
    programs: &Path,
    steps: &[String],
    seed: u64,
    favoured: Option<Favoured>,
) -> Result<Counts, String> {
    let bed = Bed::make(&options.dir, programs)?;
    let mut world = World::new(bed, seed, options.verbose);
    world.favoured = favoured;
    let lived = live(&mut world, options.length, steps);
    let Err(why) = lived else { return Ok(world.counts) };
    world.log(format!("WRONG: {why}"));
    let kept = root().join("target/model").join(seed.to_string());
    // A death of a process is noticed a moment later.
    std::thread::sleep(Duration::from_secs(1));
    let log = fs::read_to_string(world.bed.places.room.join("stderr")).unwrap_or_default();
    fs::create_dir_all(&kept).map_err(|error| format!("{}: {error}", kept.display()))?;
    let mut of_disks = Command::new("cp");
    of_disks.arg("-r").arg(world.bed.places.room.join("log")).arg(kept.join("disks"));
    if let Err(error) = tool::run(&mut of_disks) {
        println!("{error}");
    }
    for (name, text) in [("operations", world.trace.join("\n")), ("log", log)] {
        fs::write(kept.join(name), text).map_err(|error| format!("{}: {error}", kept.display()))?;
    }
    // A life with a planted fault is not meant to be examined.
    if !planted::is_searching() {
        for line in world.trace.iter().rev().take(30).rev() {
            println!("{line}");
        }
    }
    if options.keep {
        println!("its files are in {:?}", world.bed.keep());
    }
    println!("all operations and the daemon's log: {}", kept.display());
    Err(format!("{why}\nonce more: cargo xtask model --seed {seed} --length {}", options.length))
}

fn live(world: &mut World, length: u64, steps: &[String]) -> Result<(), String> {
    world.make_repositories()?;
    for _ in 0..length {
        if !world.down {
            world.settle(false)?;
        }
        world.step(steps)?;
    }
    world.check_all()
}

/// The steps at which the daemon can be made to die.
fn steps(programs: &Path) -> Result<Vec<String>, String> {
    let said = tool::text(Command::new(programs.join("taplined")).arg("--steps")).map_err(|error| error.to_string())?;
    let said = said.lines().map(|line| line.trim().replace(' ', ":"));
    Ok(said.chain(machines::STEPS.iter().map(|step| (*step).to_owned())).collect())
}
