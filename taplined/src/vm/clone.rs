//! `vm-clone`: a halted VM with the hardware of another and thin clones of its disks, as they are at one moment or
//! were when a snapshot of it was taken.
//!
//! 1. `disks`: the clones' images, with the guest paused if it writes to the disks ([`super::moment`]). *If killed:*
//!    they are rolled back, and the guest runs again.
//! 2. `record`: the clones, the VM and its VBDs are in the catalogue, in one commit. *If killed before:* as above.
//!    *After:* see 3.
//! 3. `seal`: the maps of changed blocks whose intervals have ended are sealed. *If killed:* repeated.

use std::collections::HashMap;

use api::{
    About, Code, Mode, Name, ObjectKind, Problem, SHARE_WEIGHT, Seed, Task, Vbd, Vm, VmClone, VmHardware,
    VmSnapshotDisk,
};
use jiff::Timestamp;
use repo::catalogue::Among;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::moment::{Found, Moment, states};
use super::network;
use super::snapshot::{disk_of, hardware_of};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::vdi::{KeptState, about_vdi};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Clone {
    /// The disks that are cloned.
    pub moment: Moment,
    /// The names on which those of the clones are based, in the order of `moment`.
    pub named_after: Vec<Name>,
    /// The new VM.
    pub vm: Vm,
    /// Its VBDs.
    pub vbds: Vec<Vbd>,
    /// A note about parts of the original that it does not have.
    pub note: Option<String>,
}

/// Starts a `vm-clone` task.
pub async fn clone(daemon: &Daemon, vm: Uuid, asked: VmClone) -> Result<Task, Problem> {
    let found = Found::of(daemon, vm).await?;
    let (hardware, disks) = match asked.snapshot {
        None => {
            let disks = found.vbds.iter().map(|vbd| disk_of(vbd, (vbd.mode == Mode::ReadWrite).then_some(vbd.vdi)));
            (hardware_of(&found.vm), disks.collect())
        }
        Some(snapshot) => {
            let known = daemon.catalogue.read(move |view| view.vm_snapshot(vm, snapshot)).await;
            let known = known.map_err(|problem| problem.field("snapshot"))?;
            (known.hardware, known.disks)
        }
    };
    let (sources, named_after) = sources(daemon, &disks).await?;
    let (states, _wants) = states(daemon, &sources, Timestamp::now(), true).await?;
    let hold = asked.snapshot.is_none() && found.must_be_held(daemon, &states).await?;
    let clones: HashMap<Uuid, Uuid> = states.iter().map(|state| (state.of, state.vdi)).collect();
    let chosen = asked.uuid;
    let seed = daemon.catalogue.read(move |view| view.seed(vm)).await?;
    let (mut new, note) = machine(asked, hardware, seed.as_ref());
    let (uuid, mut platform) = (new.uuid, new.platform);
    let settled = daemon.catalogue.read(move |view| {
        network::settle_mac(view, uuid, &mut platform)?;
        Ok(platform)
    });
    new.platform = settled.await?;
    super::check(&daemon.config, &new)?;
    let originals = daemon.catalogue.read(move |view| view.vbds(Some(vm), None)).await?;
    let vbds = disks.iter().map(|disk| {
        // Limits and weights are not in a snapshot: the disk's current ones are used.
        let is_original = |vbd: &&Vbd| vbd.position == disk.position && vbd.vdi == disk.vdi;
        let original = originals.iter().find(is_original);
        let limits = original.and_then(|original| original.limits);
        let share_weight = original.map_or(SHARE_WEIGHT, |original| original.share_weight);
        let vdi = disk.snapshot.and_then(|source| clones.get(&source).copied()).unwrap_or(disk.vdi);
        Vbd { limits, share_weight, ..vbd(&new, disk, vdi) }
    });
    let id = Uuid::new_v4();
    let vbds = vbds.collect();
    let job = Clone { moment: Moment { vm, id, hold, disks: states }, named_after, vm: new, vbds, note };
    found.keep(daemon, id);
    let begun = daemon.tasks.start_job(daemon, job, move |job, task, tx| {
        chosen.map_or(Ok(()), |uuid| tx.take_uuid(uuid, task))?;
        tx.take_name(Among::Vms, &job.vm.name, task, &format!("clone VM {vm} as '{}'", job.vm.name))?;
        job.moment.prepare(tx, task, "clone")
    });
    begun.await.inspect_err(|_| daemon.vms.end_reservation(id))
}

/// The VDIs to clone, and the names of the disks that they are states of.
async fn sources(daemon: &Daemon, disks: &[VmSnapshotDisk]) -> Result<(Vec<Uuid>, Vec<Name>), Problem> {
    let disks = disks.to_vec();
    let read = daemon.catalogue.read(move |view| {
        let (mut sources, mut names) = (Vec::new(), Vec::new());
        for disk in disks {
            let Some(source) = disk.snapshot.filter(|source| !sources.contains(source)) else {
                // Not cloned: the new VM shares it, read-only.
                view.vdi(disk.snapshot.unwrap_or(disk.vdi)).map_err(is_gone)?;
                continue;
            };
            let state = view.vdi(source).map_err(is_gone)?;
            names.push(view.find_vdi(disk.vdi)?.map_or(state.name, |of| of.name));
            sources.push(source);
        }
        Ok((sources, names))
    });
    read.await
}

/// The problem of a snapshot of which a disk was destroyed.
pub fn is_gone(problem: Problem) -> Problem {
    if problem.code != Code::NotFound {
        return problem;
    }
    let what = format!("not all disks of the snapshot are there any more: {}", problem.detail);
    Problem::new(Code::State, what).field("snapshot").advise("choose another snapshot; this one can only be destroyed")
}

/// The new VM, and a note about what it does not have.
fn machine(asked: VmClone, mut hardware: VmHardware, seed: Option<&Seed>) -> (Vm, Option<String>) {
    let platform = &mut hardware.platform;
    // Two network cards must not have the same address.
    let nic = platform.remove("nic").and_then(|nic| match network::without_mac(&nic) {
        Some(without) => {
            platform.insert("nic".into(), without);
            None
        }
        None => {
            Some(format!("the network card was not copied, because its tap interface is the original's: nic={nic}"))
        }
    });
    // Its instance ID would keep cloud-init from setting up the clone as a machine of its own.
    let meta_data = seed.is_some_and(|seed| seed.meta_data.is_some()).then(|| {
        "the meta-data of the cloud-init seed was not copied: it has the identity of the original instance".to_owned()
    });
    let notes: Vec<String> = [nic, meta_data].into_iter().flatten().collect();
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    let new = Vm::halted(asked.name, hardware);
    let uuid = asked.uuid.unwrap_or(new.uuid);
    (Vm { uuid, description: asked.description, seed: seed.is_some(), ..new }, note)
}

fn vbd(vm: &Vm, disk: &VmSnapshotDisk, vdi: Uuid) -> Vbd {
    let VmSnapshotDisk { position, mode, bootable, queues, .. } = *disk;
    Vbd { vm: Some(vm.uuid), position, mode, bootable, queues, ..Vbd::unplugged(vdi, vm.driver.transport()) }
}

declare_steps!(
    /// The steps of `vm-clone`.
    CloneStep { Disks = "disks", Record = "record", Seal = "seal" }
);

impl Job for Clone {
    type Step = CloneStep;

    const VERB: &'static str = "vm-clone";
    const NO_RETURN: CloneStep = CloneStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        self.moment.srs()
    }

    fn about(&self) -> Vec<About> {
        let vms = [self.moment.vm, self.vm.uuid].map(|uuid| About { kind: ObjectKind::Vm, uuid });
        let vdis = self.moment.disks.iter().flat_map(|state| [about_vdi(state.of), about_vdi(state.vdi)]);
        vms.into_iter().chain(vdis).collect()
    }

    async fn step(&self, step: CloneStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            CloneStep::Disks => self.moment.keep(daemon, Self::VERB).await,
            CloneStep::Record => self.record(daemon).await,
            CloneStep::Seal => self.moment.seal(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.moment.undo(daemon).await
    }

    fn result(&self) -> Value {
        let mut result = json!({ "uuid": self.vm.uuid });
        if let Some(note) = &self.note {
            result["note"] = json!(note);
        }
        result
    }
}

impl Clone {
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let kept = self.moment.described(daemon).await?;
        let job = self.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            if tx.find_vm(job.vm.uuid)?.is_some() {
                return Ok(());
            }
            for ((state, images), base) in kept.into_iter().zip(&job.named_after) {
                let name = tx.free_name(Among::Vdis(state.sr), base, "-clone")?;
                KeptState { name: Some(name), ..state }.record_in(tx, &images, false)?;
            }
            // Its name was reserved when the job began.
            let mut vm = job.vm.clone();
            // Another VM may have been given the address since.
            if let Some(nic) = vm.platform.get_mut("nic") {
                *nic = network::without_mac(nic).unwrap_or_default();
            }
            network::settle_mac(tx, vm.uuid, &mut vm.platform)?;
            tx.insert_vm(&vm)?;
            // Not in the job: secrets must not be in the journal.
            let seed = tx.seed(job.moment.vm)?.map(|seed| Seed { meta_data: None, ..seed });
            tx.set_seed(job.vm.uuid, seed.as_ref())?;
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
