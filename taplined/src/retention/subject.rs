//! The subject of a schedule of snapshots: a VDI, or a VM with all of its disks. Its snapshots, and which of them can
//! be destroyed.
//!
//! Invariant: only those snapshots of a subject are counted and returned that its own schedule has taken. The disk
//! snapshots within a VM's snapshot are not scheduled snapshots of these disks.

use api::{About, Mode, ObjectKind, Problem, Retention, SrState, Vdi};
use repo::View;
use uuid::Uuid;

use super::plan::{Taken, superfluous};
use crate::clock::Now;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};
use crate::task::job::Job;
use crate::vdi::Merge;

/// The subject of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A VDI.
    Vdi(Uuid),
    /// A VM.
    Vm(Uuid),
}

/// A schedule and its state.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// The scheduled object.
    pub subject: Subject,
    /// The schedule.
    pub schedule: Retention,
    /// The snapshots that it has taken.
    pub taken: Vec<Taken>,
    /// Objects that no other schedule may be using: the subject, its disks and their repositories.
    pub needs: Vec<Uuid>,
    /// Objects reserved while it runs. Repositories are not among them if the VM is in several: one that hangs would
    /// block the schedules in the others.
    pub takes: Vec<Uuid>,
    /// One of its repositories that is not attached.
    pub lacks: Option<Uuid>,
}

impl Subject {
    /// The UUID of the subject.
    pub fn uuid(self) -> Uuid {
        match self {
            Subject::Vdi(uuid) | Subject::Vm(uuid) => uuid,
        }
    }

    /// The object that the task is about.
    pub fn about(self) -> About {
        match self {
            Subject::Vdi(uuid) => About { kind: ObjectKind::Vdi, uuid },
            Subject::Vm(uuid) => About { kind: ObjectKind::Vm, uuid },
        }
    }

    /// The verb of the schedule's task.
    pub fn verb(self) -> &'static str {
        match self {
            Subject::Vdi(_) => "vdi-schedule",
            Subject::Vm(_) => "vm-schedule",
        }
    }

    /// Its disks; of a VM, those that the guest may write.
    pub fn disks(self, view: &View<'_>) -> Result<Vec<Vdi>, Problem> {
        match self {
            Subject::Vdi(vdi) => Ok(vec![view.vdi(vdi)?]),
            Subject::Vm(vm) => {
                let vbds = view.vbds(Some(vm), None)?.into_iter().filter(|vbd| vbd.mode == Mode::ReadWrite);
                vbds.map(|vbd| view.vdi(vbd.vdi)).collect()
            }
        }
    }

    fn taken(self, view: &View<'_>) -> Result<Vec<Taken>, Problem> {
        let all = fault::planted(Planted::TakenByHand);
        Ok(match self {
            Subject::Vdi(vdi) => {
                let scheduled = view.snapshots_of(vdi)?.into_iter().filter(|snapshot| snapshot.scheduled || all);
                scheduled.filter_map(|one| Some(Taken { snapshot: one.uuid, at: one.snapshot_time? })).collect()
            }
            Subject::Vm(vm) => {
                let scheduled = view.vm_snapshots(Some(vm))?.into_iter().filter(|snapshot| snapshot.scheduled || all);
                scheduled.map(|one| Taken { snapshot: one.uuid, at: one.created }).collect()
            }
        })
    }

    /// Whether a snapshot cannot be destroyed for now.
    fn is_used(self, view: &View<'_>, snapshot: Uuid) -> Result<bool, Problem> {
        let Subject::Vm(_) = self else {
            return Ok(view.vm_snapshot_with(snapshot)?.is_some() || is_vdi_used(view, snapshot)?);
        };
        let Some(whole) = view.find_vm_snapshot(snapshot)? else { return Ok(false) };
        for vdi in whole.disks.iter().filter_map(|disk| disk.snapshot) {
            // It may have been destroyed manually.
            if view.find_vdi(vdi)?.is_some() && is_vdi_used(view, vdi)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether a VBD or a task uses a VDI, or a clone is based on it.
fn is_vdi_used(view: &View<'_>, vdi: Uuid) -> Result<bool, Problem> {
    let mut is_held = !view.vbds(None, Some(vdi))?.is_empty();
    for holder in view.holders(vdi)? {
        // A merge gives way, and another schedule of the disk may cause one every time.
        is_held |= view.find_task(holder.holder)?.is_none_or(|task| task.verb != Merge::VERB);
    }
    Ok(is_held || has_clone(view, vdi)?)
}

/// Whether a clone is based on a snapshot. Decided by the owners of its image's children: those of the disk itself
/// and of its other snapshots are no clones, whatever their number; after a revert, the only child may be a clone.
fn has_clone(view: &View<'_>, snapshot: Uuid) -> Result<bool, Problem> {
    let children = view.children(view.vdi_image(snapshot)?)?;
    if fault::planted(Planted::CountedChildren) {
        return Ok(children.len() > 1);
    }
    let Some(of) = view.vdi(snapshot)?.snapshot_of else { return Ok(!children.is_empty()) };
    let is_own = |vdi: Uuid| Ok::<bool, Problem>(vdi == of || view.vdi(vdi)?.snapshot_of == Some(of));
    for child in children {
        // A hidden image belongs to the VDIs based on it; without any, it is a leftover of a job.
        let shown = view.vdi_of_image(child.uuid)?.map_or_else(|| view.vdis_above(child.uuid), |vdi| Ok(vec![vdi]))?;
        let mut foreign = child.kept;
        for vdi in shown {
            foreign |= !is_own(vdi)?;
        }
        if foreign {
            return Ok(true);
        }
    }
    Ok(false)
}

/// All schedules. VMs come first: they need more at once.
pub async fn scheduled(daemon: &Daemon) -> Result<Vec<Scheduled>, Problem> {
    let read = daemon.catalogue.read(|view| {
        let mut found = Vec::new();
        for vm in view.scheduled_vms()? {
            let subject = Subject::Vm(vm.uuid);
            found.extend(of(view, subject, vm.retention, &subject.disks(view)?)?);
        }
        for vdi in view.scheduled_vdis()? {
            found.extend(of(view, Subject::Vdi(vdi.uuid), vdi.retention, std::slice::from_ref(&vdi))?);
        }
        Ok(found)
    });
    read.await
}

fn of(
    view: &View<'_>,
    subject: Subject,
    schedule: Option<Retention>,
    vdis: &[Vdi],
) -> Result<Option<Scheduled>, Problem> {
    let Some(schedule) = schedule else { return Ok(None) };
    let mut srs: Vec<Uuid> = vdis.iter().map(|vdi| vdi.sr).collect();
    srs.sort_unstable();
    srs.dedup();
    let mut lacks = None;
    for sr in &srs {
        if view.sr(*sr)?.state != SrState::Attached {
            lacks = Some(*sr);
        }
    }
    let mut takes: Vec<Uuid> = std::iter::once(subject.uuid()).chain(vdis.iter().map(|vdi| vdi.uuid)).collect();
    let needs = takes.iter().chain(&srs).copied().collect();
    if let [sr] = srs[..] {
        takes.push(sr);
    }
    Ok(Some(Scheduled { subject, schedule, taken: subject.taken(view)?, needs, takes, lacks }))
}

/// The superfluous snapshots that are not in use, oldest first.
pub async fn unneeded(daemon: &Daemon, subject: Subject, now: Now) -> Result<Vec<Uuid>, Problem> {
    let read = daemon.catalogue.read(move |view| {
        let (schedule, rests) = match subject {
            Subject::Vdi(vdi) => (view.vdi(vdi)?.retention, view.retention_rests(vdi)?),
            Subject::Vm(vm) => (view.vm(vm)?.retention, None),
        };
        let Some(schedule) = schedule.filter(|_| rests.is_none_or(|until| now.wall >= until)) else {
            return Ok(Vec::new());
        };
        let mut unneeded = Vec::new();
        for snapshot in superfluous(&schedule, &subject.taken(view)?, now.wall) {
            if !subject.is_used(view, snapshot)? {
                unneeded.push(snapshot);
            }
        }
        Ok(unneeded)
    });
    read.await
}
