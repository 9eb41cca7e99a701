//! What there should be, and the daemon of which it should be true.
//!
//! Knows SRs, VDIs, VBDs and verbs that are under way, each with what it may make of them. A verb whose answer was cut
//! off has come about or has not: who resolves it asks the daemon, and takes nothing else for an answer.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sim::random::Random;
use testkit::nbd::Client;

use super::bed::Bed;
use super::content::{Content, Range};
use super::limits::Qos;
use super::machines::{Power, Vm};
use super::moments::Disk;

/// A repository.
#[derive(Clone, Debug)]
pub struct Sr {
    /// Its identity.
    pub uuid: String,
    /// Which of the bed's storages it is on.
    pub storage: usize,
    /// What it is called.
    pub name: String,
    /// Its description.
    pub description: String,
}

/// A VDI.
#[derive(Clone, Debug)]
pub struct Vdi {
    /// What it is called. No two are called the same.
    pub name: String,
    /// Its description.
    pub description: String,
    /// Its repository.
    pub sr: usize,
    /// The sizes that it may have.
    pub sizes: Vec<u64>,
    /// Whether it may only be read.
    pub read_only: bool,
    /// The VDI whose state it keeps.
    pub snapshot_of: Option<String>,
    /// What it shows.
    pub content: Content,
}

impl Vdi {
    /// What shows the same under another name: a snapshot of it, or a VDI of its own.
    pub fn copied(&self, name: String, sr: usize, snapshot_of: Option<String>) -> Vdi {
        let read_only = snapshot_of.is_some();
        Vdi { name, description: String::new(), sr, read_only, snapshot_of, ..self.clone() }
    }

    /// A size that it has in any case.
    pub fn least(&self) -> u64 {
        self.sizes.iter().copied().min().unwrap_or(0)
    }
}

/// A VBD.
#[derive(Debug, Default)]
pub struct Vbd {
    /// Its VDI.
    pub vdi: String,
    /// Its VM. The disk of a VM has no client here.
    pub vm: Option<String>,
    /// Its place among the disks of its VM.
    pub position: u64,
    /// Whether it is plugged when the host was started.
    pub autostart: bool,
    /// Its limits and its weight.
    pub qos: Qos,
    /// Whether it is plugged.
    pub plugged: bool,
    /// Who uses it.
    pub client: Option<Client>,
    /// A write that was sent, and not answered yet.
    pub sent: Option<(Range, u64)>,
    /// The process, if it was stopped.
    pub stopped: Option<u32>,
}

/// A verb, with what it changes.
#[derive(Clone, Debug)]
pub enum Verb {
    /// Makes a VDI; a copy, a clone, a snapshot or an imported one has content.
    Make(Vdi),
    /// Writes a VDI to a file.
    Export,
    /// Grows a VDI.
    Resize(String, u64),
    /// Gives a VDI the content of its snapshot.
    Revert(String, String),
    /// Destroys a VDI.
    Destroy(String),
    /// Merges what is hidden below a VDI.
    Merge,
    /// Plugs a VBD.
    Plug(String),
    /// Unplugs a VBD.
    Unplug(String),
    /// Plugs or unplugs many VBDs.
    Many(Vec<String>),
    /// Has another process serve a VBD.
    Upgrade,
    /// Has a VM come to this state.
    Power(String, Power),
    /// Takes a snapshot of a VM, which is to be called so.
    Keep(String, String),
    /// Gives all VDIs of a VM the content of their snapshots.
    RevertAll(Vec<(String, String)>),
    /// Destroys a snapshot of a VM.
    Forget(String, String),
    /// Makes a VM that is to be called so, with these disks.
    CloneVm(String, Vec<Disk>),
    /// Shuts everything down and unplugs it.
    Drain,
}

/// A verb that is under way.
#[derive(Clone, Debug)]
pub struct Pending {
    /// It.
    pub verb: Verb,
    /// The VDIs and VMs with which nothing else is begun meanwhile.
    pub holds: Vec<String>,
    /// The task; none if the answer was lost.
    pub task: Option<Value>,
    /// The VDI whose writes may be in what it makes.
    pub source: Option<String>,
    /// Others are at work on the same, or it is to be cancelled: it may fail for that.
    pub contested: bool,
    /// It was cancelled, and that was accepted: it does not end as done.
    pub cancelled: bool,
}

impl Pending {
    /// One that nobody contests.
    pub fn new(verb: Verb, holds: Vec<String>, source: Option<String>) -> Pending {
        Pending { verb, holds, task: None, source, contested: false, cancelled: false }
    }
}

/// What was done.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Operations by their names.
    pub done: BTreeMap<String, u64>,
    /// Refusals and failures that are nobody's fault, by verb and code.
    pub refused: BTreeMap<String, u64>,
    /// Processes killed.
    pub kills: u64,
    /// Bytes that were compared.
    pub compared: u64,
}

/// The world.
#[derive(Debug)]
pub struct World {
    /// The daemon.
    pub bed: Bed,
    /// What comes next.
    pub random: Random,
    /// Repositories.
    pub srs: Vec<Sr>,
    /// VDIs by their UUIDs.
    pub vdis: BTreeMap<String, Vdi>,
    /// VBDs by their UUIDs.
    pub vbds: BTreeMap<String, Vbd>,
    /// VMs by their UUIDs.
    pub vms: BTreeMap<String, Vm>,
    /// Tokens by their UUIDs, with their names.
    pub tokens: BTreeMap<String, String>,
    /// Image jobs and QEMUs that were stopped.
    pub stopped: Vec<u32>,
    /// Whether there is a QEMU.
    pub has_qemu: bool,
    /// What is under way.
    pub pending: Vec<Pending>,
    /// Something was killed, stopped or filled since all was last at rest: what fails has its excuse.
    pub troubled: bool,
    /// The daemon does not run, or is to die by itself.
    pub down: bool,
    /// Where the running daemon is to die.
    pub dies_at: Option<String>,
    /// Snapshots, of VDIs and of VMs, that a schedule has taken.
    pub by_schedule: BTreeSet<String>,
    /// How many hours have passed for schedules.
    pub hours: u64,
    /// A catalogue of earlier.
    pub backup: Option<super::troubles::Backup>,
    /// What was done.
    pub counts: Counts,
    /// What is done more often than by chance.
    pub favoured: Option<super::planted::Favoured>,
    /// Whether each operation is printed.
    pub verbose: bool,
    /// What was done, in words.
    pub trace: Vec<String>,
    names: u64,
    stamps: u64,
    begun: std::time::Instant,
}

impl World {
    /// One with nothing in it.
    pub fn new(bed: Bed, seed: u64, verbose: bool) -> World {
        World {
            bed,
            random: Random::new(seed),
            srs: Vec::new(),
            vdis: BTreeMap::new(),
            vbds: BTreeMap::new(),
            vms: BTreeMap::new(),
            tokens: BTreeMap::new(),
            stopped: Vec::new(),
            has_qemu: super::machines::there_is_qemu(),
            pending: Vec::new(),
            troubled: false,
            down: false,
            dies_at: None,
            by_schedule: BTreeSet::new(),
            hours: 0,
            backup: None,
            counts: Counts::default(),
            favoured: None,
            verbose,
            trace: Vec::new(),
            names: 0,
            stamps: 0,
            begun: std::time::Instant::now(),
        }
    }

    /// Says what is done.
    pub fn tell(&mut self, words: impl Into<String>) {
        let line = format!("{:8.3} {}", self.begun.elapsed().as_secs_f64(), words.into());
        if self.verbose {
            eprintln!("{line}");
        }
        self.trace.push(line);
    }

    /// Counts an operation.
    pub fn count(&mut self, what: &str) {
        *self.counts.done.entry(what.to_owned()).or_default() += 1;
    }

    /// A name that nothing else has.
    pub fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// A stamp that nothing else was written with.
    pub fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    /// One of several.
    pub fn one_of<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.random.index(of.len())).cloned()
    }

    /// VDIs and VMs that a verb has in hand.
    pub fn held(&self) -> BTreeSet<String> {
        self.pending.iter().flat_map(|pending| pending.holds.iter().cloned()).collect()
    }

    /// The VBDs of a VDI through which clients use it.
    pub fn own_vbds_of(&self, vdi: &str) -> Vec<String> {
        self.vbds.iter().filter(|(_, vbd)| vbd.vdi == vdi && vbd.vm.is_none()).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// The VBDs of a VDI.
    pub fn vbds_of(&self, vdi: &str) -> Vec<String> {
        self.vbds.iter().filter(|(_, vbd)| vbd.vdi == vdi).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// Whether a VDI is plugged.
    pub fn is_plugged(&self, vdi: &str) -> bool {
        self.vbds.values().any(|vbd| vbd.vdi == vdi && vbd.plugged)
    }

    /// A VDI that fits and that nothing has in hand.
    pub fn free_vdi(&mut self, fits: impl Fn(&World, &str, &Vdi) -> bool) -> Option<String> {
        let held = self.held();
        let free = self.vdis.iter().filter(|(uuid, vdi)| !held.contains(*uuid) && fits(self, uuid, vdi));
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        self.one_of(&free)
    }

    /// A VDI that there must be.
    pub fn vdi(&mut self, uuid: &str) -> Result<&mut Vdi, String> {
        self.vdis.get_mut(uuid).ok_or_else(|| format!("the model has no VDI {uuid}"))
    }

    /// A VM that there must be.
    pub fn vm(&mut self, uuid: &str) -> Result<&mut Vm, String> {
        self.vms.get_mut(uuid).ok_or_else(|| format!("the model has no VM {uuid}"))
    }

    /// A VBD that there must be.
    pub fn vbd(&mut self, uuid: &str) -> Result<&mut Vbd, String> {
        self.vbds.get_mut(uuid).ok_or_else(|| format!("the model has no VBD {uuid}"))
    }
}
