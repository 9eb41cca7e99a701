//! Plants faults that were fixed earlier (`taplined/src/fault.rs`) again; the model must find each.
//!
//! Defines which operations expose each fault; these are done more often.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use testbed::daemon::api::uuid;
use testbed::programs::cargo;
use testbed::tool;

use super::verbs::Request;
use super::world::{PendingVerb, World};
use super::{Options, life, programs, root, steps};

/// The environment variable that selects the daemon's fault.
const VARIABLE: &str = "TAPLINED_PLANTED";

/// Time after which a fault counts as not found.
const PATIENCE: Duration = Duration::from_secs(120);

/// Number of snapshots after which a further one must be refused.
const DEEP: usize = 64;

/// An operation that is done more often than at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Favoured {
    /// Kills the daemon after a merge into a plugged disk's leaf has ended.
    DieBehindMerge,
    /// Forgets and introduces a repository.
    Forget,
    /// Restores an older catalogue.
    PutBack,
    /// Removes the catalogue.
    LoseCatalogue,
    /// Kills a disk repeatedly.
    KillAgain,
    /// Takes snapshots until one is refused.
    Deepen,
    /// Rare operations.
    Seldom,
    /// VMs and their snapshots.
    Machines,
    /// Schedules of snapshots.
    Schedules,
    /// Limits and weights of disks.
    Limits,
    /// Cancels tasks at a random time.
    CancelSoon,
    /// Cancels tasks, or kills the daemon, before their first step.
    CancelWaiting,
    /// Lets QEMUs obey late.
    ObeyLate,
    /// Links, moves or replaces images.
    Images,
    /// Clones snapshots that a schedule has taken.
    Clones,
    /// Lets clocks jump.
    Clocks,
}

/// Whether this process searches for a planted fault.
pub fn is_searching() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// The faults, each with the operation that exposes it.
const ALL: &[(&str, Favoured)] = &[
    ("forgotten-merge", Favoured::DieBehindMerge),
    ("forgotten-names", Favoured::Forget),
    ("old-catalogue", Favoured::PutBack),
    ("killed-strays", Favoured::LoseCatalogue),
    ("stays-down", Favoured::KillAgain),
    ("deep-chain", Favoured::Deepen),
    ("taken-by-hand", Favoured::Schedules),
    ("untold-weight", Favoured::Limits),
    ("deaf-destroy", Favoured::CancelWaiting),
    ("nothing-is-begun", Favoured::CancelWaiting),
    ("late-is-never", Favoured::ObeyLate),
    ("hasty-undo", Favoured::CancelSoon),
    ("hard-link", Favoured::Images),
    ("counted-children", Favoured::Clones),
    ("jumped-clock", Favoured::Clocks),
];

/// Runs `--planted` with a fault or `all`.
pub fn run(options: &Options, wanted: &str) -> Result<(), String> {
    let chosen: Vec<_> = ALL.iter().filter(|(name, _)| wanted == "all" || *name == wanted).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = ALL.iter().map(|(name, _)| *name).collect();
        return Err(format!("there is no planted fault '{wanted}'; there are {}", names.join(", ")));
    }
    match std::env::var(VARIABLE) {
        // This process and its children have the named fault.
        Ok(named) if named == wanted => {
            let (_, favoured) = chosen.first().ok_or("no fault")?;
            search(options, *favoured)
        }
        _ => {
            let programs = planted_programs(options)?;
            let mut missed = Vec::new();
            for (name, _) in chosen {
                let found = search_in_child(options, &programs, name)?;
                println!("{name}: {found}");
                if !found.starts_with("found") {
                    missed.push(*name);
                }
            }
            if missed.is_empty() { Ok(()) } else { Err(format!("not found: {}", missed.join(", "))) }
        }
    }
}

/// Builds the programs with the planted faults; returns their directory.
fn planted_programs(options: &Options) -> Result<PathBuf, String> {
    let plain = programs(options.bin_dir.as_deref())?;
    let into = planted_program("taplined")?;
    copy_program("tapline-disk", &plain, &into)?;
    Ok(into)
}

/// Builds a program with its planted faults; returns its directory. The usual build directory is given the plain
/// program again.
pub fn planted_program(name: &str) -> Result<PathBuf, String> {
    let built = programs(None)?;
    let into = root().join("target/planted").join(name);
    fs::create_dir_all(&into).map_err(|error| format!("{}: {error}", into.display()))?;
    // The same set of programs as always, so that only this one is rebuilt.
    let build_with = |more: &[&str]| {
        let mut build = cargo();
        build.args(["build", "--quiet", "--bin", "tapline", "--bin", "tapline-disk", "--bin", "taplined"]);
        tool::text(build.args(more)).map(drop).map_err(|error| error.to_string())
    };
    build_with(&["--features", &format!("{name}/planted")])?;
    copy_program(name, &built, &into)?;
    build_with(&[])?;
    Ok(into)
}

/// Replaces a copy of a program. It is removed first, because a running program cannot be written to.
fn copy_program(name: &str, from: &Path, into: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", into.display());
    fs::remove_file(into.join(name)).or_else(ignore_missing).map_err(failed)?;
    fs::copy(from.join(name), into.join(name)).map(drop).map_err(failed)
}

fn ignore_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Searches for a fault in another process of this program; returns its output.
fn search_in_child(options: &Options, programs: &Path, name: &str) -> Result<String, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut another = Command::new(program);
    another.args(["model", "--planted", name, "--seed", &options.seed.to_string(), "--bin-dir"]).arg(programs);
    another.arg("--dir").arg(&options.dir).env(VARIABLE, name);
    let said = another.output().map_err(|error| format!("{name}: {error}"))?;
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    let last = text.lines().rev().find(|line| line.starts_with("found") || line.starts_with("not found"));
    Ok(last.map_or_else(|| format!("{text}{}", String::from_utf8_lossy(&said.stderr)), str::to_owned))
}

/// Runs lives until one fails.
fn search(options: &Options, favoured: Favoured) -> Result<(), String> {
    let programs = programs(options.bin_dir.as_deref())?;
    let steps = steps(&programs)?;
    let begun = Instant::now();
    let mut seed = options.seed;
    while begun.elapsed() < PATIENCE {
        let lived = life(options, &programs, &steps, seed, Some(favoured));
        let elapsed = begun.elapsed().as_secs();
        if let Err(why) = lived {
            let first: String = why.lines().next().unwrap_or_default().chars().take(200).collect();
            println!("found in {elapsed} s, {} lives: {first}", seed - options.seed + 1);
            return Ok(());
        }
        seed += 1;
    }
    println!("not found in {} s", begun.elapsed().as_secs());
    Err("not found".into())
}

impl World {
    /// Returns true with a probability of 1 to `one_in`.
    pub fn random_is(&mut self, one_in: u64) -> bool {
        self.random.below(one_in) == 0
    }

    /// Does an operation that exposes a planted fault.
    pub fn favour(&mut self, what: Favoured) -> Result<(), String> {
        match what {
            Favoured::Machines => (0..4).try_for_each(|_| self.machine_step().and_then(|()| self.vm_snapshot_step())),
            Favoured::DieBehindMerge => self.die_behind_merge(),
            Favoured::Forget => self.detach_and_return(true),
            Favoured::PutBack => self.put_back(),
            Favoured::LoseCatalogue => self.lose_catalogue(),
            Favoured::KillAgain => self.kill_repeatedly(),
            Favoured::Deepen => self.deepen(),
            Favoured::Seldom => self.seldom(),
            Favoured::Limits => self.set_qos(),
            Favoured::CancelSoon => self.cancel_soon(),
            Favoured::CancelWaiting => self.cancel_waiting(),
            Favoured::ObeyLate => self.obey_late(),
            Favoured::Images => self.meddle(),
            Favoured::Clones => self.clone_by_schedule(),
            Favoured::Clocks => self.clock_jumps(),
            Favoured::Schedules => self.machine_step().and_then(|()| self.follow_schedule()),
        }
    }

    /// Destroys a snapshot of a plugged disk, and lets the daemon die when the leaf is merged.
    fn die_behind_merge(&mut self) -> Result<(), String> {
        self.rest()?;
        let Some(vbd) = self.usable_vbd() else { return Ok(()) };
        let of = self.vbd(&vbd)?.vdi.clone();
        if self.vdi(&of)?.read_only {
            return Ok(());
        }
        let Some(snapshot) = self.snapshot_now(&of)? else { return Ok(()) };
        self.write(&vbd)?;
        self.die_at("vdi-merge:merge:after".into())?;
        self.destroy_now(&snapshot)?;
        // The merge begins in the background.
        std::thread::sleep(Duration::from_millis(300));
        self.check()
    }

    /// Takes a snapshot and waits for it; `None` if it was refused.
    pub fn snapshot_now(&mut self, of: &str) -> Result<Option<String>, String> {
        let name = self.name();
        let now = self.vdi(of)?;
        let made = now.copied(name.clone(), now.sr, Some(of.to_owned()));
        let request = Request::post(format!("/vdis/{of}/snapshot"), json!({ "name": name }));
        self.begin(PendingVerb::Make(made), vec![of.to_owned()], Some(of.to_owned()), &request)?;
        self.settle(true)?;
        let shown = self.list(&format!("/vdis?match={name}"))?;
        Ok(shown.first().map(|vdi| uuid(vdi).map(str::to_owned)).transpose()?)
    }

    pub fn destroy_now(&mut self, vdi: &str) -> Result<(), String> {
        let request = Request::delete(format!("/vdis/{vdi}"));
        self.begin(PendingVerb::Destroy(vdi.to_owned()), vec![vdi.to_owned()], None, &request)?;
        self.settle(true)
    }

    /// Takes snapshots of a VDI until one is refused. The VDI must remain usable, and the snapshots removable.
    pub fn deepen(&mut self) -> Result<(), String> {
        self.rest()?;
        let fits = |world: &World, uuid: &str, vdi: &super::world::Vdi| {
            !vdi.read_only && !world.is_plugged(uuid) && world.srs.get(vdi.sr).is_some_and(|sr| sr.storage == 0)
        };
        let Some(of) = self.free_vdi(fits) else { return Ok(()) };
        self.count("deepen");
        let mut made = Vec::new();
        // The last snapshot is refused as intended.
        self.troubled = true;
        while let (Some(snapshot), true) = (self.snapshot_now(&of)?, made.len() < DEEP) {
            made.push(snapshot);
        }
        for vbd in self.vbds_of(&of) {
            self.delete_vbd(&vbd)?;
        }
        let vbd = self.make_vbd(&of)?.ok_or("a deep VDI gets no VBD")?;
        self.troubled = false;
        let request = Request::post(format!("/vbds/{vbd}/plug"), json!({}));
        self.begin(PendingVerb::Plug(vbd.clone()), vec![of.clone()], None, &request)?;
        self.settle(true)?;
        self.compare_all(&vbd)?;
        for snapshot in made {
            self.destroy_now(&snapshot)?;
        }
        self.check()
    }
}
