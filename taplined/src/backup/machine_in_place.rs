//! `vm-restore-in-place`: the content of all disks of a halted VM is replaced by that of a backup of it. The rest of
//! the VM stays, as after `vm-revert`.
//!
//! It combines what [`super::in_place`] does for a disk, step by step:
//!
//! 1. `copy`: the backups become new images. *If killed:* they are removed.
//! 2. `record`: they become the VDIs' images, in one commit. *If killed before:* as above.
//! 3. `remove`: the files of the old images are removed. *If killed:* repeated.
//!
//! Invariant: the disks that the guest can write now are those that it could write at the moment of the backup, each of
//! which has one. Otherwise nothing is changed: the machine would have disks of different moments.

use std::collections::{HashMap, HashSet};

use api::{About, BackupId, BackupTarget, Code, Mode, ObjectKind, Power, Problem, Task, VmRestoreInPlace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::in_place::{copy, must_be_of, plan, reason};
use super::machine_restore::{backups_of, no_backup_of};
use super::restore::Shown;
use super::{Machine, MachineDisk};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::vdi::{Replacement, about_vdi, begin};
use crate::vm::{Found, distinct};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RestoreVmInPlace {
    /// The VM.
    pub vm: Uuid,
    /// The ID under which the VM is kept reserved.
    pub id: Uuid,
    /// The backup target, as it was when the task began.
    pub from: BackupTarget,
    /// The backups, and the new images of the VDIs.
    pub disks: Vec<(BackupId, Replacement)>,
}

/// Starts a `vm-restore-in-place` task. `backup` may be that of any disk of the machine. All disks are checked before
/// one is changed.
pub async fn restore_vm_in_place(daemon: &Daemon, vm: Uuid, asked: VmRestoreInPlace) -> Result<Task, Problem> {
    let found = Found::of(daemon, vm).await?;
    let from = daemon.catalogue.read(move |view| {
        view.check_not_suspended(vm, "its disks cannot be restored")?;
        view.backup_target(asked.target).map_err(|problem| problem.field("target"))
    });
    let from = from.await?;
    if found.vm.power != Power::Halted {
        let what = format!("VM {vm} is not halted, so its disks cannot be restored");
        return Err(Problem::new(Code::State, what).advise("shut it down first"));
    }
    let shown = Shown::of(daemon, &from, &asked.backup).await?;
    let machine = shown.machine("restore the disk: tapline vdi restore")?;
    if machine.vm != vm {
        let what = format!("backup {} is of another machine, '{}' ({})", shown.id, machine.name, machine.vm);
        let advice = format!("restore it to a new machine: tapline vm restore {} {} --name NEW", from.name, shown.id);
        return Err(Problem::new(Code::State, what).field("backup").advise(advice));
    }
    let backups = backups_of(daemon, &from, &shown, &machine).await?;
    let disks = matching(daemon, &found, &machine, &backups).await?;
    let mut needed: HashMap<Uuid, u64> = HashMap::new();
    for (vdi, shown) in &disks {
        must_be_of(daemon, &from, shown, *vdi).await?;
        let sum = needed.entry(begin::replaceable(daemon, *vdi).await?.sr).or_default();
        *sum = sum.saturating_add(shown.takes());
    }
    for (sr, takes) in needed {
        daemon.srs.room(sr, takes).await?;
    }
    let (mut planned, mut wants) = (Vec::new(), Vec::new());
    for (vdi, shown) in disks {
        let (replacement, want) = plan(daemon, vdi, shown).await?;
        planned.push((shown.id.clone(), replacement));
        wants.push(want);
    }
    let job = RestoreVmInPlace { vm, id: Uuid::new_v4(), from, disks: planned };
    let id = job.id;
    found.keep(daemon, id);
    let begun = daemon.tasks.start_job(daemon, job, |job, task, tx| {
        job.disks.iter().try_for_each(|(_, disk)| begin::hold_replacement(disk, task, tx))
    });
    begun.await.inspect_err(|_| daemon.vms.end_reservation(id))
}

/// The disks of a machine with their backups. Refused if a disk has no backup, or a backup no disk.
async fn matching<'a>(
    daemon: &Daemon,
    found: &Found,
    machine: &Machine,
    backups: &'a HashMap<Uuid, Shown>,
) -> Result<Vec<(Uuid, &'a Shown)>, Problem> {
    let (vm, now) = (found.vm.uuid, found.writable());
    let mut known = HashSet::new();
    let then = machine.disks.iter().filter(|disk| disk.mode == Mode::ReadWrite && known.insert(disk.vdi));
    let then: Vec<&MachineDisk> = then.collect();
    let refused = |what, advice: &str| Err(Problem::new(Code::State, what).field("backup").advise(advice));
    if let Some(vbd) = found.vbds.iter().find(|vbd| now.contains(&vbd.vdi) && !known.contains(&vbd.vdi)) {
        let what = format!(
            "VDI {}, at position {} of VM {vm}, was not a disk that its guest could write when the backup was made, so it \
             cannot be brought back to that moment",
            vbd.vdi, vbd.position
        );
        let advice =
            "detach it first (tapline vdi detach), or restore disks by themselves: tapline vdi restore --in-place";
        return refused(what, advice);
    }
    let mut disks = Vec::new();
    for disk in then {
        let (vdi, position) = (disk.vdi, disk.position);
        if !now.contains(&vdi) {
            let is_there = daemon.catalogue.read(move |view| view.find_vdi(vdi)).await?.is_some();
            let what = format!("the disk at position {position} of the backup, VDI {vdi},");
            return match is_there {
                true => refused(
                    format!("{what} is not a disk of VM {vm} that its guest can write"),
                    "attach it again (tapline vdi attach), or restore the backup to a new machine: tapline vm restore",
                ),
                false => refused(
                    format!("{what} was destroyed"),
                    "restore the backup to a new machine (tapline vm restore), or the disks that are left: tapline vdi \
                     restore --in-place",
                ),
            };
        }
        disks.push((vdi, backups.get(&vdi).ok_or_else(|| no_backup_of(disk))?));
    }
    Ok(disks)
}

declare_steps!(
    /// The steps of `vm-restore-in-place`.
    VmInPlaceStep { Copy = "copy", Record = "record", Remove = "remove" }
);

impl Job for RestoreVmInPlace {
    type Step = VmInPlaceStep;

    const VERB: &'static str = "vm-restore-in-place";
    const NO_RETURN: VmInPlaceStep = VmInPlaceStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        distinct(self.disks.iter().map(|(_, disk)| disk.sr))
    }

    fn about(&self) -> Vec<About> {
        let vm = About { kind: ObjectKind::Vm, uuid: self.vm };
        std::iter::once(vm).chain(self.disks.iter().map(|(_, disk)| about_vdi(disk.vdi))).collect()
    }

    async fn step(&self, step: VmInPlaceStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            VmInPlaceStep::Copy => {
                for (backup, disk) in &self.disks {
                    copy(daemon, context, (&self.from, backup), disk).await?;
                }
                // The first was examined before the others were copied.
                for (_, disk) in &self.disks {
                    begin::must_be_unwritten(daemon, disk.vdi).await?;
                }
            }
            VmInPlaceStep::Record => {
                self.record(daemon).await?;
                daemon.vms.end_reservation(self.id);
            }
            VmInPlaceStep::Remove => {
                for (_, disk) in &self.disks {
                    disk.remove(daemon).await?;
                }
            }
        }
        Ok(())
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        daemon.vms.end_reservation(self.id);
        let mut undone = Ok(());
        // A repository that does not respond must not prevent the rollback in others.
        for (_, disk) in &self.disks {
            undone = undone.and(disk.undo(daemon).await);
        }
        undone
    }

    fn result(&self) -> Value {
        let vdis: Vec<Uuid> = self.disks.iter().map(|(_, disk)| disk.vdi).collect();
        json!({ "uuid": self.vm, "vdis": vdis })
    }
}

impl RestoreVmInPlace {
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let mut images = Vec::new();
        for (_, disk) in &self.disks {
            images.push(disk.described(daemon).await?);
        }
        let job = self.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            let mut pairs = job.disks.iter().zip(&images);
            pairs.try_for_each(|((backup, disk), image)| disk.record_in(tx, image, &reason(backup)))
        });
        recorded.await
    }
}
