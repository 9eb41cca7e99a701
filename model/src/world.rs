//! The expected state of the daemon, and the daemon itself.
//!
//! It contains repositories, VDIs, VBDs and verbs in progress, each with its possible effects. A verb whose response
//! was lost has been done or not; this is determined by querying the daemon.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;
use sim::random::Random;
use testkit::nbd::Client;

use super::bed::Bed;
use super::content::{Content, Range};
use super::limits::Qos;
use super::machines::{Power, Vm};
use super::vm_snapshots::SnapshotDisk;

/// A repository of the model.
#[derive(Clone, Debug)]
pub struct Sr {
    /// The UUID of the repository.
    pub uuid: String,
    /// Index of its storage in the bed.
    pub storage: usize,
    /// The name of the repository.
    pub name: String,
    /// The description of the repository.
    pub description: String,
}

/// A VDI of the model.
#[derive(Clone, Debug)]
pub struct Vdi {
    /// Its name, which is unique.
    pub name: String,
    /// The description of the VDI.
    pub description: String,
    /// Index of its repository.
    pub sr: usize,
    /// The sizes that it may have.
    pub sizes: Vec<u64>,
    /// Whether it is read-only.
    pub read_only: bool,
    /// The VDI of which it is a snapshot.
    pub snapshot_of: Option<String>,
    /// The content that it shows.
    pub content: Content,
}

impl Vdi {
    /// A VDI with the same content and another name: a snapshot of it, or an independent VDI.
    pub fn copied(&self, name: String, sr: usize, snapshot_of: Option<String>) -> Vdi {
        let read_only = snapshot_of.is_some();
        Vdi { name, description: String::new(), sr, read_only, snapshot_of, ..self.clone() }
    }

    /// The smallest size that it may have.
    pub fn least(&self) -> u64 {
        self.sizes.iter().copied().min().unwrap_or(0)
    }
}

/// A VBD of the model.
#[derive(Debug, Default)]
pub struct Vbd {
    /// The UUID of its VDI.
    pub vdi: String,
    /// The UUID of its VM. A disk of a VM has no client here.
    pub vm: Option<String>,
    /// Its position among the disks of its VM.
    pub position: u64,
    /// Whether it is plugged at boot.
    pub autostart: bool,
    /// Its limits and weight.
    pub qos: Qos,
    /// Whether it is plugged.
    pub plugged: bool,
    /// The NBD client that uses it.
    pub client: Option<Client>,
    /// A write that was sent and not answered yet.
    pub sent: Option<(Range, u64)>,
    /// The process of the disk if it is stopped.
    pub stopped: Option<u32>,
}

/// A verb with its effect.
#[derive(Clone, Debug)]
pub enum PendingVerb {
    /// Creates a VDI; a copy, clone, snapshot or import has content.
    Make(Vdi),
    /// Exports a VDI to a file.
    Export,
    /// Grows a VDI to a size.
    Resize(String, u64),
    /// Reverts a VDI to a snapshot.
    Revert(String, String),
    /// Destroys a VDI.
    Destroy(String),
    /// Merges hidden images below a VDI.
    Merge,
    /// Plugs a VBD.
    Plug(String),
    /// Unplugs a VBD.
    Unplug(String),
    /// Plugs or unplugs several VBDs.
    Many(Vec<String>),
    /// Replaces the process of a VBD.
    Upgrade,
    /// Changes the power state of a VM.
    Power(String, Power),
    /// Takes a snapshot of a VM, with this name.
    Keep(String, String),
    /// Reverts all VDIs of a VM to their snapshots.
    RevertAll(Vec<(String, String)>),
    /// Destroys a snapshot of a VM.
    Forget(String, String),
    /// Clones a VM, with this name and these disks.
    CloneVm(String, Vec<SnapshotDisk>),
    /// Shuts down and unplugs everything.
    Drain,
}

/// A verb in progress.
#[derive(Clone, Debug)]
pub struct Pending {
    /// The verb with its effect.
    pub verb: PendingVerb,
    /// The VDIs and VMs that no other verb may use meanwhile.
    pub holds: Vec<String>,
    /// The task; `None` if the response was lost.
    pub task: Option<Value>,
    /// The VDI whose concurrent writes may be in the new one.
    pub source: Option<String>,
    /// Whether rival verbs or a cancel may make it fail.
    pub contested: bool,
    /// Whether a cancel was accepted: it must not end as done.
    pub cancelled: bool,
}

impl Pending {
    /// A verb without rivals.
    pub fn new(verb: PendingVerb, holds: Vec<String>, source: Option<String>) -> Pending {
        Pending { verb, holds, task: None, source, contested: false, cancelled: false }
    }
}

/// Counts for the report.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Operations by name.
    pub done: BTreeMap<String, u64>,
    /// Excused refusals and failures, by verb and code.
    pub refused: BTreeMap<String, u64>,
    /// Number of processes killed.
    pub kills: u64,
    /// Number of bytes compared.
    pub compared: u64,
}

/// The expected state, and the daemon under test.
#[derive(Debug)]
pub struct World {
    /// The daemon and its directories.
    pub bed: Bed,
    /// The source of all choices.
    pub random: Random,
    /// The repositories.
    pub srs: Vec<Sr>,
    /// VDIs by their UUIDs.
    pub vdis: BTreeMap<String, Vdi>,
    /// VBDs by their UUIDs.
    pub vbds: BTreeMap<String, Vbd>,
    /// VMs by their UUIDs.
    pub vms: BTreeMap<String, Vm>,
    /// Tokens by their UUIDs, with their names.
    pub tokens: BTreeMap<String, String>,
    /// Image jobs and QEMUs that are stopped.
    pub stopped: Vec<u32>,
    /// Whether QEMU is installed.
    pub has_qemu: bool,
    /// The verbs in progress.
    pub pending: Vec<Pending>,
    /// Whether a fault has occurred since the last rest, so that failures are excused.
    pub troubled: bool,
    /// Whether the daemon is down, or is to die by itself.
    pub down: bool,
    /// The step at which the running daemon is to die.
    pub dies_at: Option<String>,
    /// Snapshots of VDIs and VMs that a schedule has taken.
    pub by_schedule: BTreeSet<String>,
    /// Number of hours that have passed for schedules.
    pub hours: u64,
    /// An older catalogue, if one is kept.
    pub backup: Option<super::troubles::Backup>,
    /// Counts for the report.
    pub counts: Counts,
    /// The operation that is done more often than at random.
    pub favoured: Option<super::planted::Favoured>,
    /// Whether operations are printed.
    pub verbose: bool,
    /// The operations so far, for the report.
    pub trace: Vec<String>,
    names: u64,
    stamps: u64,
    begun: std::time::Instant,
}

impl World {
    /// A world without objects.
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
            has_qemu: super::machines::qemu_is_installed(),
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

    /// Logs what is done.
    pub fn log(&mut self, words: impl Into<String>) {
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

    /// Returns a name that was never used.
    pub fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// A stamp that was never used.
    pub fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    /// A random element.
    pub fn one_of<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        of.get(self.random.index(of.len())).cloned()
    }

    /// VDIs and VMs that verbs in progress hold.
    pub fn held(&self) -> BTreeSet<String> {
        self.pending.iter().flat_map(|pending| pending.holds.iter().cloned()).collect()
    }

    /// The VBDs through which clients of the model use a VDI.
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

    /// A VDI that fits and that no verb holds.
    pub fn free_vdi(&mut self, fits: impl Fn(&World, &str, &Vdi) -> bool) -> Option<String> {
        let held = self.held();
        let free = self.vdis.iter().filter(|(uuid, vdi)| !held.contains(*uuid) && fits(self, uuid, vdi));
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        self.one_of(&free)
    }

    /// A VDI that must exist.
    pub fn vdi(&mut self, uuid: &str) -> Result<&mut Vdi, String> {
        self.vdis.get_mut(uuid).ok_or_else(|| format!("the model has no VDI {uuid}"))
    }

    /// A VM that must exist.
    pub fn vm(&mut self, uuid: &str) -> Result<&mut Vm, String> {
        self.vms.get_mut(uuid).ok_or_else(|| format!("the model has no VM {uuid}"))
    }

    /// A VBD that must exist.
    pub fn vbd(&mut self, uuid: &str) -> Result<&mut Vbd, String> {
        self.vbds.get_mut(uuid).ok_or_else(|| format!("the model has no VBD {uuid}"))
    }
}
