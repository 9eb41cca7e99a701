//! `vm-restore`: a machine from the backups of its disks at one moment.
//!
//! 1. `copy`: each disk is restored to a file, as by [`super::restore`]. Nothing refers to them yet. *If killed:* they
//!    are removed.
//! 2. `record`: the disks, the VM and its VBDs are in the catalogue, in one commit. *If killed before:* as above.
//!    *After:* done.

use std::collections::HashMap;

use api::{About, BackupId, BackupTarget, Code, Mode, ObjectKind, Problem, Sr, Task, Vbd, Vm, VmRestore};
use repo::catalogue::Among;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::restore::{Shown, fill};
use super::{Machine, MachineDisk, target};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::vdi::{Target, about_vdi};
use crate::vm;

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RestoreVm {
    /// The backup target, as it was when the task began.
    pub from: BackupTarget,
    /// The backups, and the VDIs to create.
    pub disks: Vec<(BackupId, Target)>,
    /// The new VM.
    pub vm: Vm,
    /// Its VBDs.
    pub vbds: Vec<Vbd>,
    /// What the original had and it has not.
    pub note: Option<String>,
}

/// Starts a `vm-restore` task. `backup` may be that of any disk of the machine.
pub async fn restore_vm(daemon: &Daemon, from: Uuid, asked: VmRestore) -> Result<Task, Problem> {
    let sr = asked.sr;
    let from = daemon.catalogue.read(move |view| view.backup_target(from)).await?;
    let sr = daemon.catalogue.read(move |view| view.sr(sr)).await.map_err(|problem| problem.field("sr"))?;
    let shown = Shown::of(daemon, &from, &asked.backup).await?;
    let machine = shown.machine("restore the disk: tapline vdi restore; then create a machine with it")?;
    let backups = backups_of(daemon, &from, &shown, &machine).await?;
    let takes = backups.values().map(Shown::takes).fold(0, u64::saturating_add);
    daemon.srs.room(sr.uuid, takes).await?;
    let chosen = asked.uuid;
    let mut new = Vm::halted(asked.name, machine.hardware.clone());
    new.uuid = chosen.unwrap_or(new.uuid);
    new.description = asked.description.unwrap_or_else(|| machine.description.clone());
    let note = settle_network(daemon, &mut new).await?;
    vm::check(&daemon.config, &new)?;
    let job = RestoreVm { from, disks: Vec::new(), vm: new, vbds: Vec::new(), note };
    let job = with_disks(daemon, job, &machine, &backups, &sr).await?;
    let held = move |job: &RestoreVm, task, tx: &mut repo::Tx<'_>| {
        chosen.map_or(Ok(()), |uuid| tx.take_uuid(uuid, task))?;
        tx.take_name(Among::Vms, &job.vm.name, task, &format!("restore VM '{}'", job.vm.name))
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// The problem that a target lacks the backup of a disk of a machine.
pub fn no_backup_of(disk: &MachineDisk) -> Problem {
    let what = format!("the backup of the disk at position {} is not on the target", disk.position);
    Problem::new(Code::State, what).field("backup").advise(
        "it was removed, or the backup of the machine has failed; restore the others as disks: tapline vdi restore",
    )
}

/// The backups of all disks at a moment, by VDI. `shown` is one of them.
pub async fn backups_of(
    daemon: &Daemon,
    from: &BackupTarget,
    shown: &Shown,
    machine: &Machine,
) -> Result<HashMap<Uuid, Shown>, Problem> {
    let all = target::backups_on(daemon, from, None).await?;
    let listed = all.iter().find(|backup| backup.id == shown.id).and_then(|backup| backup.moment.as_ref());
    let mut found = HashMap::new();
    // The log of a target of version 1 has no moments if an older program has pruned it: then each backup is examined.
    for backup in all.iter().filter(|backup| backup.moment.as_ref() == listed) {
        let shown = Shown::of(daemon, from, &backup.id).await?;
        let properties = shown.properties();
        let is_part = |of: Machine| of.moment == machine.moment;
        if let (Some(vdi), Some(true)) = (properties.vdi, properties.machine.map(is_part)) {
            found.insert(vdi, shown);
        }
    }
    Ok(found)
}

/// Adds the disks and VBDs of a machine to the job.
async fn with_disks(
    daemon: &Daemon,
    mut job: RestoreVm,
    machine: &Machine,
    backups: &HashMap<Uuid, Shown>,
    sr: &Sr,
) -> Result<RestoreVm, Problem> {
    let mut made: HashMap<Uuid, Uuid> = HashMap::new();
    for disk in &machine.disks {
        let vdi = match (disk.mode, made.get(&disk.vdi)) {
            (_, Some(known)) => *known,
            (Mode::ReadOnly, None) => {
                // It was not backed up, and is used again if it is still there.
                let vdi = disk.vdi;
                if daemon.catalogue.read(move |view| view.find_vdi(vdi)).await?.is_none() {
                    let missing = format!("the read-only disk at position {} is not there any more", disk.position);
                    job.note = Some(job.note.map_or(missing.clone(), |note| format!("{note}; {missing}")));
                    continue;
                }
                vdi
            }
            (Mode::ReadWrite, None) => {
                let shown = backups.get(&disk.vdi).ok_or_else(|| no_backup_of(disk))?;
                let name = format!("{}-{}", job.vm.name, disk.position).parse();
                let name = name.map_err(|why: String| Problem::new(Code::Invalid, why).field("name"))?;
                let target = Target { name_is_default: true, ..shown.target(sr, name, None, None)? };
                made.insert(disk.vdi, target.vdi);
                job.disks.push((shown.id.clone(), target.clone()));
                target.vdi
            }
        };
        job.vbds.push(Vbd {
            vm: Some(job.vm.uuid),
            position: disk.position,
            mode: disk.mode,
            bootable: disk.bootable,
            queues: disk.queues,
            ..Vbd::unplugged(vdi, job.vm.driver.transport())
        });
    }
    Ok(job)
}

/// Lets the machine have the network card of the original, with its address unless another machine has that; returns
/// a note about what it has not.
async fn settle_network(daemon: &Daemon, vm: &mut Vm) -> Result<Option<String>, Problem> {
    let (uuid, mut platform) = (vm.uuid, vm.platform.clone());
    let settled = daemon.catalogue.read(move |view| {
        let nic = platform.get("nic").cloned();
        let is_used = view.vms()?.iter().any(|other| nic.is_some() && other.platform.get("nic") == nic.as_ref());
        let mut note = None;
        if let Some(nic) = nic.filter(|_| is_used) {
            platform.remove("nic");
            match vm::without_mac(&nic) {
                Some(without) => drop(platform.insert("nic".into(), without)),
                None => note = Some(format!("it has no network card: another machine uses the tap interface of {nic}")),
            }
        }
        vm::settle_mac(view, uuid, &mut platform)?;
        Ok((platform, note))
    });
    let note;
    (vm.platform, note) = settled.await?;
    Ok(note)
}

declare_steps!(
    /// The steps of `vm-restore`.
    RestoreVmStep { Copy = "copy", Record = "record" }
);

impl Job for RestoreVm {
    type Step = RestoreVmStep;

    const VERB: &'static str = "vm-restore";
    const NO_RETURN: RestoreVmStep = RestoreVmStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        self.disks.first().map(|(_, target)| target.sr).into_iter().collect()
    }

    fn about(&self) -> Vec<About> {
        let vm = About { kind: ObjectKind::Vm, uuid: self.vm.uuid };
        std::iter::once(vm).chain(self.disks.iter().map(|(_, target)| about_vdi(target.vdi))).collect()
    }

    async fn step(&self, step: RestoreVmStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            RestoreVmStep::Copy => {
                for (backup, target) in &self.disks {
                    let filled = fill(daemon, context, (&self.from, backup), target.into());
                    context.unless_cancelled(filled).await?;
                }
                Ok(())
            }
            RestoreVmStep::Record => self.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        let mut undone = Ok(());
        for (_, target) in &self.disks {
            undone = undone.and(target.undo(daemon).await);
        }
        undone
    }

    fn result(&self) -> Value {
        let vdis: Vec<Uuid> = self.disks.iter().map(|(_, target)| target.vdi).collect();
        let mut result = json!({ "uuid": self.vm.uuid, "vdis": vdis });
        if let Some(note) = &self.note {
            result["note"] = json!(note);
        }
        result
    }
}

impl RestoreVm {
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let mut images = Vec::new();
        for (_, target) in &self.disks {
            images.push(target.described(daemon).await?);
        }
        let job = self.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            if tx.find_vm(job.vm.uuid)?.is_some() {
                return Ok(());
            }
            for ((_, target), image) in job.disks.iter().zip(&images) {
                target.record_in(tx, image)?;
            }
            let mut vm = job.vm.clone();
            // Another VM may have been given the address since.
            if vm::settle_mac(tx, vm.uuid, &mut vm.platform).is_err() {
                let nic = vm.platform.get("nic").and_then(|nic| vm::without_mac(nic)).unwrap_or_default();
                vm.platform.insert("nic".into(), nic);
                vm::settle_mac(tx, vm.uuid, &mut vm.platform)?;
            }
            tx.insert_vm(&vm)?;
            for vbd in &job.vbds {
                // A read-only disk may have been destroyed since.
                if tx.find_vdi(vbd.vdi)?.is_some() {
                    tx.add_vbd(vbd)?;
                }
            }
            Ok(())
        });
        recorded.await
    }
}
