//! `vm-revert`: reverts all disks of a halted VM to a snapshot of it; `vm-snapshot-destroy`: destroys one.
//!
//! A revert combines those of all disks ([`crate::vdi::Revert`]), step by step:
//!
//! 1. `files`: new images based on the snapshots'. *If killed:* they are removed.
//! 2. `record`: they become the VDIs' images, in one commit. *If killed before:* as above.
//! 3. `remove`: the old images' files are removed. *If killed:* repeated.
//!
//! The destruction of a snapshot combines those of all disks' snapshots ([`crate::vdi::Destroy`]):
//!
//! 1. `forget`: they and the VM's snapshot are removed from the catalogue, in one commit. There is no rollback from
//!    here.
//! 2. `remove`: the files on which no image is based are removed. *If killed:* repeated.

use api::{About, Code, ObjectKind, Power, Problem, Task, VmRevert};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::clone::is_gone;
use super::moment::{Found, distinct};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::vdi::{self, about_vdi, begin};

/// The intent of `vm-revert`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Revert {
    /// The VM.
    pub vm: Uuid,
    /// The ID under which the VM is kept reserved.
    pub id: Uuid,
    /// Its disks.
    pub disks: Vec<vdi::Revert>,
}

/// The intent of `vm-snapshot-destroy`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DestroySnapshot {
    /// The VM.
    pub vm: Uuid,
    /// The snapshot.
    pub snapshot: Uuid,
    /// The snapshots of its disks.
    pub disks: Vec<vdi::Destroy>,
}

/// Starts a `vm-revert` task. All disks are checked before one is changed.
pub async fn revert(daemon: &Daemon, vm: Uuid, asked: VmRevert) -> Result<Task, Problem> {
    let found = Found::of(daemon, vm).await?;
    let snapshot = asked.snapshot;
    let known = daemon.catalogue.read(move |view| view.vm_snapshot(vm, snapshot)).await;
    let known = known.map_err(|problem| problem.field("snapshot"))?;
    if found.vm.power != Power::Halted {
        let what = format!("VM {vm} is not halted, so its disks cannot be reverted");
        return Err(Problem::new(Code::State, what).advise("shut it down first"));
    }
    let (mut disks, mut wants) = (Vec::new(), Vec::new());
    for disk in &known.disks {
        let Some(snapshot) = disk.snapshot.filter(|_| disks.iter().all(|one: &vdi::Revert| one.vdi != disk.vdi)) else {
            continue;
        };
        if found.vbds.iter().all(|vbd| vbd.vdi != disk.vdi) {
            let what = format!("VDI {} is no disk of VM {vm} any more, but its snapshot {snapshot} has it", disk.vdi);
            let advice = "attach it again, or clone the snapshot: tapline vm clone";
            return Err(Problem::new(Code::State, what).field("snapshot").advise(advice));
        }
        let (job, both) = begin::plan_revert(daemon, disk.vdi, snapshot).await.map_err(is_gone)?;
        disks.push(job);
        wants.push(both);
    }
    let job = Revert { vm, id: Uuid::new_v4(), disks };
    let id = job.id;
    found.keep(daemon, id);
    let begun = daemon.tasks.start_job(daemon, job, |job, task, tx| {
        job.disks.iter().try_for_each(|disk| begin::hold_revert(disk, task, tx))
    });
    begun.await.inspect_err(|_| daemon.vms.end_reservation(id))
}

/// Starts a `vm-snapshot-destroy` task. Snapshots of its disks that are already destroyed are left out.
pub async fn destroy_snapshot(daemon: &Daemon, vm: Uuid, snapshot: Uuid) -> Result<Task, Problem> {
    begin_to_destroy(daemon, vm, snapshot, false).await
}

/// Like [`destroy_snapshot`], for one taken by the schedule of the VM, unless a user has since pinned it.
pub async fn destroy_scheduled_snapshot(daemon: &Daemon, vm: Uuid, snapshot: Uuid) -> Result<Task, Problem> {
    begin_to_destroy(daemon, vm, snapshot, true).await
}

async fn begin_to_destroy(daemon: &Daemon, vm: Uuid, snapshot: Uuid, scheduled: bool) -> Result<Task, Problem> {
    let known = daemon.catalogue.read(move |view| view.vm_snapshot(vm, snapshot)).await?;
    let (mut disks, mut wants) = (Vec::new(), Vec::new());
    for vdi in known.disks.iter().filter_map(|disk| disk.snapshot) {
        match begin::plan_destroy(daemon, vdi).await {
            Ok((job, want)) => {
                disks.push(job);
                wants.push(want);
            }
            Err(problem) if problem.code == Code::NotFound => {}
            Err(problem) => return Err(problem),
        }
    }
    let job = DestroySnapshot { vm, snapshot, disks };
    let held = move |job: &DestroySnapshot, task, tx: &mut repo::Tx<'_>| {
        let known = tx.vm_snapshot(job.vm, job.snapshot)?;
        begin::must_be_scheduled(scheduled, known.scheduled, "snapshot", job.snapshot)?;
        job.disks.iter().try_for_each(|disk| begin::hold_destroy(disk, task, tx))
    };
    daemon.tasks.start_job(daemon, job, held).await
}

fn of_vm(vm: Uuid, vdis: impl Iterator<Item = Uuid>) -> Vec<About> {
    std::iter::once(About { kind: ObjectKind::Vm, uuid: vm }).chain(vdis.map(about_vdi)).collect()
}

declare_steps!(
    /// The steps of `vm-revert`.
    RevertStep { Files = "files", Record = "record", Remove = "remove" }
);

impl Job for Revert {
    type Step = RevertStep;

    const VERB: &'static str = "vm-revert";
    const NO_RETURN: RevertStep = RevertStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        distinct(self.disks.iter().map(|disk| disk.sr))
    }

    fn about(&self) -> Vec<About> {
        of_vm(self.vm, self.disks.iter().flat_map(|disk| [disk.vdi, disk.snapshot]))
    }

    async fn step(&self, step: RevertStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            RevertStep::Files => {
                for disk in &self.disks {
                    disk.file(daemon).await?;
                }
            }
            RevertStep::Record => {
                let mut described = Vec::new();
                for disk in &self.disks {
                    described.push((disk.clone(), disk.described(daemon).await?));
                }
                let recorded = daemon
                    .catalogue
                    .write(move |tx| described.iter().try_for_each(|(disk, image)| disk.record_in(tx, image)));
                recorded.await?;
                daemon.vms.end_reservation(self.id);
            }
            RevertStep::Remove => {
                for disk in &self.disks {
                    disk.remove(daemon).await?;
                }
            }
        }
        Ok(())
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        daemon.vms.end_reservation(self.id);
        let mut undone = Ok(());
        for disk in &self.disks {
            undone = undone.and(disk.undo(daemon).await);
        }
        undone
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vm })
    }
}

declare_steps!(
    /// The steps of `vm-snapshot-destroy`.
    DestroyStep { Forget = "forget", Remove = "remove" }
);

impl Job for DestroySnapshot {
    type Step = DestroyStep;

    const VERB: &'static str = "vm-snapshot-destroy";
    const NO_RETURN: DestroyStep = DestroyStep::Forget;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        distinct(self.disks.iter().map(|disk| disk.sr))
    }

    fn about(&self) -> Vec<About> {
        of_vm(self.vm, self.disks.iter().map(|disk| disk.vdi))
    }

    /// A VBD was created for a disk's snapshot in the meantime.
    fn is_hopeless(&self, problem: &Problem) -> bool {
        problem.code == Code::InUse
    }

    async fn step(&self, step: DestroyStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            DestroyStep::Forget => {
                let job = self.clone();
                let forgotten = daemon.catalogue.write(move |tx| {
                    job.disks.iter().try_for_each(|disk| tx.remove_vdi(disk.vdi))?;
                    tx.remove_vm_snapshot(job.snapshot)
                });
                forgotten.await
            }
            DestroyStep::Remove => {
                for disk in &self.disks {
                    disk.remove(daemon).await?;
                }
                Ok(())
            }
        }
    }

    async fn undo(&self, _: &Daemon) -> Result<(), Problem> {
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.snapshot })
    }
}
