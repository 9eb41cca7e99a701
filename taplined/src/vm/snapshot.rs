//! `vm-snapshot`: snapshots of all disks of a VM at one moment.
//!
//! 1. `disks`: their states are kept, with the guest paused ([`super::moment`]). *If killed:* they are rolled back,
//!    and the guest runs again.
//! 2. `record`: the disks' snapshots and that of the VM are in the catalogue, in one commit. *If killed before:* as
//!    above. *After:* see 3.
//! 3. `seal`: the maps of changed blocks whose intervals have ended are sealed. *If killed:* repeated.

use api::{
    About, Code, Description, Mode, Name, ObjectKind, Problem, Task, Vbd, Vm, VmHardware, VmSnapshot, VmSnapshotCreate,
    VmSnapshotDisk,
};
use jiff::Timestamp;
use repo::catalogue::Among;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::moment::{Found, Moment, states};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::vdi::about_vdi;

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// The states of the disks. Its ID is that of the snapshot.
    pub moment: Moment,
    /// The name; `None`: a free name is chosen when it is recorded.
    pub name: Option<Name>,
    /// The description.
    pub description: Description,
    /// The time of the snapshot.
    pub at: Timestamp,
    /// The hardware of the VM.
    pub hardware: VmHardware,
    /// All disks of the VM.
    pub disks: Vec<VmSnapshotDisk>,
    /// Whether the VM's schedule takes it.
    pub scheduled: bool,
}

/// The hardware of a VM.
pub fn hardware_of(vm: &Vm) -> VmHardware {
    let Vm { driver, memory, vcpus, boot, platform, .. } = vm.clone();
    VmHardware { driver, memory, vcpus, boot, platform }
}

/// The record of a disk, with its snapshot if it has one.
pub fn disk_of(vbd: &Vbd, snapshot: Option<Uuid>) -> VmSnapshotDisk {
    let Vbd { position, mode, bootable, queues, vdi, .. } = *vbd;
    VmSnapshotDisk { position, mode, bootable, queues, vdi, snapshot }
}

/// Starts a `vm-snapshot` task.
pub async fn snapshot(daemon: &Daemon, vm: Uuid, asked: VmSnapshotCreate) -> Result<Task, Problem> {
    begin(daemon, vm, asked, Timestamp::now(), Purpose::User).await
}

/// Starts a `vm-snapshot` task for a backup, which has recorded the UUID of the snapshot; with the time now, by the
/// clock of schedules.
pub async fn backup_snapshot(
    daemon: &Daemon,
    vm: Uuid,
    (id, at): (Uuid, Timestamp),
    description: Description,
) -> Result<Task, Problem> {
    let asked = VmSnapshotCreate { uuid: Some(id), name: None, description };
    begin(daemon, vm, asked, at, Purpose::Backup).await
}

/// Starts a `vm-snapshot` task for the schedule of the VM, due at this time.
pub async fn scheduled_snapshot(daemon: &Daemon, vm: Uuid, at: Timestamp) -> Result<Task, Problem> {
    begin(daemon, vm, VmSnapshotCreate::default(), at, Purpose::Schedule).await
}

/// The one that a snapshot is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    User,
    Schedule,
    Backup,
}

async fn begin(
    daemon: &Daemon,
    vm: Uuid,
    asked: VmSnapshotCreate,
    at: Timestamp,
    purpose: Purpose,
) -> Result<Task, Problem> {
    let found = Found::of(daemon, vm).await?;
    let chosen = asked.uuid;
    let writable = found.writable();
    if writable.is_empty() {
        let what = format!("VM {vm} has no disk that its guest may write, so there is nothing to keep");
        return Err(Problem::new(Code::State, what).advise("give it a disk first: tapline vdi attach"));
    }
    let (mut states, _wants) = states(daemon, &writable, at, false).await?;
    states.iter_mut().for_each(|state| state.for_backup = purpose == Purpose::Backup);
    let hold = found.must_be_held(daemon, &states).await?;
    let snapshot_of = |vbd: &Vbd| states.iter().find(|state| state.of == vbd.vdi).map(|state| state.vdi);
    let disks = found.vbds.iter().map(|vbd| match vbd.mode {
        Mode::ReadWrite => disk_of(vbd, snapshot_of(vbd)),
        Mode::ReadOnly => disk_of(vbd, None),
    });
    let job = Snapshot {
        disks: disks.collect(),
        moment: Moment { vm, id: chosen.unwrap_or_else(Uuid::new_v4), hold, disks: states },
        name: asked.name,
        description: asked.description,
        at,
        hardware: hardware_of(&found.vm),
        scheduled: purpose == Purpose::Schedule,
    };
    let id = job.moment.id;
    found.keep(daemon, id);
    let begun = daemon.tasks.start_job(daemon, job, move |job, task, tx| {
        match chosen {
            Some(uuid) if purpose == Purpose::Backup => tx.take_backup_uuid(uuid, task)?,
            chosen => chosen.map_or(Ok(()), |uuid| tx.take_uuid(uuid, task))?,
        }
        let vdis: Vec<Uuid> = job.moment.disks.iter().map(|state| state.vdi).collect();
        tx.note_backup_disks(job.moment.id, &vdis)?;
        if let Some(name) = &job.name {
            tx.take_name(Among::VmSnapshots(vm), name, task, &format!("snapshot VM {vm} as '{name}'"))?;
        }
        job.moment.prepare(tx, task, "snapshot")
    });
    begun.await.inspect_err(|_| daemon.vms.end_reservation(id))
}

declare_steps!(
    /// The steps of `vm-snapshot`.
    SnapshotStep { Disks = "disks", Record = "record", Seal = "seal" }
);

impl Job for Snapshot {
    type Step = SnapshotStep;

    const VERB: &'static str = "vm-snapshot";
    const NO_RETURN: SnapshotStep = SnapshotStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        self.moment.srs()
    }

    fn about(&self) -> Vec<About> {
        let vdis = self.moment.disks.iter().flat_map(|state| [about_vdi(state.of), about_vdi(state.vdi)]);
        std::iter::once(About { kind: ObjectKind::Vm, uuid: self.moment.vm }).chain(vdis).collect()
    }

    async fn step(&self, step: SnapshotStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            SnapshotStep::Disks => self.moment.keep(daemon, Self::VERB).await,
            SnapshotStep::Record => self.record(daemon).await,
            SnapshotStep::Seal => self.moment.seal(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.moment.undo(daemon).await
    }

    fn result(&self) -> Value {
        let vdis: Vec<Uuid> = self.moment.disks.iter().map(|state| state.vdi).collect();
        json!({ "uuid": self.moment.id, "vdis": vdis })
    }
}

impl Snapshot {
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let kept = self.moment.described(daemon).await?;
        let job = self.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            for (state, images) in &kept {
                state.record_in(tx, images, true)?;
            }
            let Moment { vm, id, .. } = job.moment;
            // The VM may have been destroyed since its disks were released.
            let Some(known) = tx.find_vm(vm)? else { return Ok(()) };
            if tx.find_vm_snapshot(id)?.is_some() {
                return Ok(());
            }
            let name = match job.name {
                Some(name) => name,
                None => tx.free_snapshot_name(Among::VmSnapshots(vm), &known.name, job.at)?,
            };
            let Snapshot { description, hardware, disks, at: created, scheduled, .. } = job;
            tx.add_vm_snapshot(&VmSnapshot { uuid: id, vm, name, description, created, hardware, disks, scheduled })
        });
        recorded.await
    }
}
