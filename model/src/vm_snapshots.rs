//! Snapshots of VMs: of all writable disks at one moment, or of none; and reverts to, clones of and ends of them.
//!
//! The record of a snapshot is in the catalogue only and is removed with its VM; its VDIs are like all others.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use testbed::daemon::api::{Ended, uuid};

use super::check::text;
use super::machines::{DISKS_MAX, Power, VMS_MAX, Vm};
use super::verbs::Request;
use super::world::{PendingVerb, Vbd, World};

/// A disk of a VM in a snapshot of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotDisk {
    /// Its position among the disks.
    pub position: u64,
    /// The VDI of the disk.
    pub vdi: String,
    /// The snapshot of the VDI; `None` if the disk was read-only.
    pub snapshot: Option<String>,
}

/// A snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmSnapshot {
    /// The name of the snapshot.
    pub name: String,
    /// The disks of the VM.
    pub disks: Vec<SnapshotDisk>,
}

impl VmSnapshot {
    /// Parses a snapshot of the API.
    fn parse(value: &Value) -> VmSnapshot {
        let disk = |disk: &Value| SnapshotDisk {
            position: disk["position"].as_u64().unwrap_or(0),
            vdi: text(&disk["vdi"]),
            snapshot: disk["snapshot"].as_str().map(str::to_owned),
        };
        let disks = value["disks"].as_array().into_iter().flatten().map(disk).collect();
        VmSnapshot { name: text(&value["name"]), disks }
    }

    /// The VDIs with their snapshots.
    pub fn pairs(&self) -> Vec<(String, String)> {
        let pair = |disk: &SnapshotDisk| Some((disk.vdi.clone(), disk.snapshot.clone()?));
        self.disks.iter().filter_map(pair).collect()
    }
}

impl World {
    /// Does a random operation with snapshots of VMs.
    pub fn vm_snapshot_step(&mut self) -> Result<(), String> {
        match self.random.below(8) {
            0..=2 => self.snapshot_vm(),
            3 => self.clone_machine(),
            4..=5 => self.revert_machine(),
            _ => self.destroy_vm_snapshot(),
        }
    }

    /// Whether no disk of a VM is plugged except by the VM.
    fn is_by_itself(&self, vm: &str) -> bool {
        let mine = self.vbds_of_vm(vm);
        let mut vdis = mine.iter().filter_map(|vbd| self.vbds.get(vbd)).map(|vbd| &vbd.vdi);
        vdis.all(|vdi| self.vbds.iter().all(|(uuid, vbd)| vbd.vdi != *vdi || !vbd.plugged || mine.contains(uuid)))
    }

    fn may_be_written(&self, vbd: &str) -> bool {
        let vdi = self.vbds.get(vbd).and_then(|vbd| self.vdis.get(&vbd.vdi));
        vdi.is_some_and(|vdi| !vdi.read_only)
    }

    fn snapshot_vm(&mut self) -> Result<(), String> {
        if !self.has_room_for(DISKS_MAX) {
            return self.destroy_vm_snapshot();
        }
        let fits = |world: &World, vm: &str, _: &Vm| {
            world.is_by_itself(vm) && world.vbds_of_vm(vm).iter().any(|vbd| world.may_be_written(vbd))
        };
        let Some(vm) = self.free_vm(fits) else { return Ok(()) };
        let (holds, name) = (self.held_by(&vm), self.name());
        let request = Request::post(format!("/vms/{vm}/snapshot"), json!({ "name": name }));
        self.begin(PendingVerb::Keep(vm, name), holds, None, &request)
    }

    /// A snapshot of a VM that fits and is complete, where neither the VM nor its disks are in use by a verb.
    fn free_vm_snapshot(
        &mut self,
        fits: impl Fn(&World, &str, &VmSnapshot) -> bool,
    ) -> Option<(String, String, VmSnapshot)> {
        let held = self.held();
        let is_there = |world: &World, moment: &VmSnapshot| {
            moment.disks.iter().all(|disk| {
                let all = [Some(&disk.vdi), disk.snapshot.as_ref()];
                all.into_iter().flatten().all(|vdi| world.vdis.contains_key(vdi) && !held.contains(vdi))
            })
        };
        let vm = self.free_vm(|world, uuid, vm| {
            vm.snapshots.values().any(|moment| is_there(world, moment) && fits(world, uuid, moment))
        })?;
        let snapshots = self.vms.get(&vm)?.snapshots.iter();
        let free: Vec<(String, VmSnapshot)> = snapshots
            .filter(|(_, moment)| is_there(self, moment) && fits(self, &vm, moment))
            .map(|(uuid, moment)| (uuid.clone(), moment.clone()))
            .collect();
        let (uuid, moment) = self.one_of(&free)?;
        Some((vm, uuid, moment))
    }

    fn revert_machine(&mut self) -> Result<(), String> {
        let fits = |world: &World, vm: &str, moment: &VmSnapshot| {
            let disks = world.vbds_of_vm(vm);
            let disks: Vec<&String> = disks.iter().filter_map(|vbd| Some(&world.vbds.get(vbd)?.vdi)).collect();
            let halted = world.vms.get(vm).is_some_and(|vm| vm.power == Power::Halted);
            let pairs = moment.pairs();
            // Disks that were read-only are not reverted, and may have been removed.
            halted && world.is_by_itself(vm) && pairs.iter().all(|(vdi, _)| disks.contains(&vdi))
        };
        let Some((vm, uuid, moment)) = self.free_vm_snapshot(fits) else { return Ok(()) };
        let pairs = moment.pairs();
        let mut holds = self.held_by(&vm);
        holds.extend(pairs.iter().map(|(_, snapshot)| snapshot.clone()));
        let request = Request::post(format!("/vms/{vm}/revert"), json!({ "snapshot": uuid }));
        self.begin(PendingVerb::RevertAll(pairs), holds, None, &request)
    }

    fn destroy_vm_snapshot(&mut self) -> Result<(), String> {
        let unused = |world: &World, _: &str, moment: &VmSnapshot| {
            moment.pairs().iter().all(|(_, snapshot)| world.vbds_of(snapshot).is_empty())
        };
        let Some((vm, uuid, moment)) = self.free_vm_snapshot(unused) else { return Ok(()) };
        let mut holds = self.held_by(&vm);
        holds.extend(moment.pairs().into_iter().map(|(_, snapshot)| snapshot));
        let request = Request::delete(format!("/vms/{vm}/snapshots/{uuid}"));
        self.begin(PendingVerb::Forget(vm, uuid), holds, None, &request)
    }

    /// Clones a snapshot of a VM, or the VM itself.
    fn clone_machine(&mut self) -> Result<(), String> {
        if self.vms.len() >= VMS_MAX || !self.has_room_for(DISKS_MAX) {
            return self.destroy_vm_snapshot();
        }
        let name = self.name();
        let (vm, body, disks) = match self.free_vm_snapshot(|_, _, _| true).filter(|_| self.random_is(2)) {
            Some((vm, uuid, moment)) => (vm, json!({ "name": name, "snapshot": uuid }), moment.disks),
            None => {
                let fits = |world: &World, vm: &str, _: &Vm| !world.vbds_of_vm(vm).is_empty() && world.is_by_itself(vm);
                let Some(vm) = self.free_vm(fits) else { return Ok(()) };
                let vbds = self.vbds_of_vm(&vm);
                let disk = |vbd: &Vbd| SnapshotDisk { position: vbd.position, vdi: vbd.vdi.clone(), snapshot: None };
                let disks = vbds.iter().filter_map(|vbd| self.vbds.get(vbd).map(disk)).collect();
                (vm, json!({ "name": name }), disks)
            }
        };
        let mut holds = self.held_by(&vm);
        holds.extend(disks.iter().filter_map(|disk| disk.snapshot.clone()));
        let request = Request::post(format!("/vms/{vm}/clone"), body);
        self.begin(PendingVerb::CloneVm(name, disks), holds, None, &request)
    }

    /// The snapshots of a VM according to the daemon.
    pub fn vm_snapshots(&mut self, vm: &str) -> Result<BTreeMap<String, VmSnapshot>, String> {
        let shown = self.list(&format!("/vms/{vm}/snapshots"))?;
        Ok(shown.iter().map(|moment| (text(&moment["uuid"]), VmSnapshot::parse(moment))).collect())
    }

    /// Updates the model after a snapshot of a VM: it exists with all disks, or nothing exists.
    pub fn vm_snapshot_ended(&mut self, vm: &str, name: &str, ended: &Ended) -> Result<(), String> {
        let found = self.vm_snapshots(vm)?.into_iter().find(|(_, moment)| moment.name == *name);
        let (made, moment) = match (ended, found) {
            (Ended::Done(result), Some((made, moment))) if uuid(result)? == made => (made, moment),
            (Ended::Forgotten, Some(found)) => found,
            (Ended::Failed(_) | Ended::Forgotten, None) => return Ok(()),
            (_, found) => return Err(format!("the snapshot '{name}' of VM {vm}: {ended:?}, and there is {found:?}")),
        };
        let mut wanted: Vec<String> = self.vbds_of_vm(vm);
        wanted.retain(|vbd| self.may_be_written(vbd));
        let mut wanted: Vec<&String> = wanted.iter().filter_map(|vbd| Some(&self.vbds.get(vbd)?.vdi)).collect();
        let pairs = moment.pairs();
        let mut has: Vec<&String> = pairs.iter().map(|(vdi, _)| vdi).collect();
        wanted.sort();
        has.sort();
        if wanted != has {
            return Err(format!("the snapshot '{name}' of VM {vm} has {moment:?}, and should have {wanted:?}"));
        }
        for (of, snapshot) in &pairs {
            self.add_copied_vdi(snapshot, of, Some(of.clone()))?;
        }
        self.vm(vm)?.snapshots.insert(made, moment);
        Ok(())
    }

    /// Adds a VDI that a verb about a VM has made of another one, with the same content.
    pub fn add_copied_vdi(&mut self, made: &str, of: &str, snapshot_of: Option<String>) -> Result<(), String> {
        let shown = self.get_vdi(made)?.ok_or_else(|| format!("the VDI {made}, made of {of}, is not there"))?;
        let source = self.vdi(of)?;
        let copy = source.copied(text(&shown["name"]), source.sr, snapshot_of);
        self.vdis.insert(made.to_owned(), copy);
        Ok(())
    }

    /// Updates the model after the end of a snapshot of a VM.
    pub fn vm_snapshot_destroyed(&mut self, vm: &str, moment: &str, done: bool) -> Result<(), String> {
        let there = self.vm_snapshots(vm)?.contains_key(moment);
        if done && there {
            return Err(format!("the snapshot {moment} of VM {vm} was destroyed and is there"));
        }
        if !there {
            let gone = self.vm(vm)?.snapshots.remove(moment);
            for (_, snapshot) in gone.iter().flat_map(VmSnapshot::pairs) {
                self.vdis.remove(&snapshot);
            }
        }
        Ok(())
    }

    /// Updates the model after a clone of a VM: it exists with all disks, or nothing exists.
    pub fn vm_clone_ended(&mut self, name: &str, disks: &[SnapshotDisk], ended: &Ended) -> Result<(), String> {
        let shown = self.list("/vms")?.into_iter().find(|vm| vm["name"] == *name);
        let shown = match (ended, shown) {
            (Ended::Done(_) | Ended::Forgotten, Some(shown)) => shown,
            (Ended::Failed(_) | Ended::Forgotten, None) => return Ok(()),
            (_, shown) => return Err(format!("the clone '{name}': {ended:?}, and there is {shown:?}")),
        };
        let vm = text(&shown["uuid"]);
        let vbds = self.list(&format!("/vbds?vm={vm}"))?;
        if vbds.len() != disks.len() {
            return Err(format!("the clone '{name}' has {vbds:?}, and should have {disks:?}"));
        }
        for vbd in &vbds {
            let (position, vdi) = (vbd["position"].as_u64().unwrap_or(0), text(&vbd["vdi"]));
            let source = disks.iter().find(|disk| disk.position == position);
            let source = source.ok_or_else(|| format!("the clone '{name}' has a disk too many: {vbd}"))?;
            // A read-only VDI is shared.
            if vdi != source.vdi {
                self.add_copied_vdi(&vdi, source.snapshot.as_ref().unwrap_or(&source.vdi), None)?;
                self.vdi(&vdi)?.read_only = false;
            }
            let new = Vbd { vdi, vm: Some(vm.clone()), position, ..Vbd::default() };
            self.vbds.insert(text(&vbd["uuid"]), new);
        }
        self.vms.insert(vm, Vm::parse(&shown)?);
        Ok(())
    }

    /// Compares the snapshots of VMs with the model.
    pub fn compare_vm_snapshots(&mut self) -> Result<(), String> {
        for vm in self.vms.keys().cloned().collect::<Vec<_>>() {
            let shown = self.vm_snapshots(&vm)?;
            let known = &self.vm(&vm)?.snapshots;
            if shown != *known {
                return Err(format!("the snapshots of VM {vm} are {shown:?}, should be {known:?}"));
            }
        }
        Ok(())
    }
}
