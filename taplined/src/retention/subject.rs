//! The subject of a schedule: a VDI, or a VM with all of its disks; what its schedules make; and which of its snapshots
//! can be destroyed.
//!
//! Invariant: only those snapshots of a subject are counted and returned that its own schedule has taken. The disk
//! snapshots within a VM's snapshot are not scheduled snapshots of these disks.

use api::{About, BackupSchedule, Code, Mode, ObjectKind, Problem, Retention, SrState, Vdi};
use jiff::Timestamp;
use periods::{Period, Rule};
use repo::View;
use uuid::Uuid;

use super::plan::{Taken, rule, superfluous};
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

/// What a schedule makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Made {
    /// Snapshots.
    Snapshots(Retention),
    /// Backups.
    Backups(BackupSchedule),
}

impl Made {
    /// How often, and how many are kept.
    pub fn rule(self) -> Rule {
        match self {
            Made::Snapshots(schedule) => rule(&schedule),
            Made::Backups(BackupSchedule { hourly, daily, weekly, monthly, .. }) => {
                Rule { hourly, daily, weekly, monthly }
            }
        }
    }

    /// The period after which one that has failed is tried again. A backup is tried each hour: a day without one,
    /// because the target was away for a moment, would be a high price.
    pub fn retry(self) -> Period {
        match self {
            Made::Snapshots(_) => self.rule().interval(),
            Made::Backups(_) => Period::Hour,
        }
    }
}

/// A schedule and its state.
#[derive(Clone, Debug)]
pub struct Scheduled {
    /// The scheduled object.
    pub subject: Subject,
    /// What is made, and how often.
    pub made: Made,
    /// When that was done.
    pub taken: Vec<Timestamp>,
    /// Objects that no other schedule may be using: the subject, its disks and their repositories, and the target.
    pub needs: Vec<Uuid>,
    /// Objects reserved while it runs, or while a backup takes its snapshot. Repositories are not among them if the VM
    /// is in several: one that hangs would block the schedules in the others.
    pub takes: Vec<Uuid>,
    /// One of its repositories that is not attached.
    pub lacks: Option<Uuid>,
}

impl Scheduled {
    /// Why what is due (`due` is its noun) cannot be made, if a repository is not attached.
    pub fn lack(&self, due: &str) -> Option<Problem> {
        let sr = self.lacks?;
        let what = match self.subject {
            Subject::Vdi(_) => format!("a {due} is due, and the repository {sr} of the disk is not attached"),
            Subject::Vm(_) => format!("a {due} is due, and the repository {sr} with a disk of the VM is not attached"),
        };
        Some(Problem::new(Code::State, what).advise(format!("attach it: tapline sr attach {sr}")))
    }
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

/// All schedules. VMs come first: they need more at once. Snapshots come before backups, which take longer.
pub async fn scheduled(daemon: &Daemon) -> Result<Vec<Scheduled>, Problem> {
    let read = daemon.catalogue.read(|view| {
        let mut found = Vec::new();
        for vm in view.scheduled_vms()? {
            let subject = Subject::Vm(vm.uuid);
            found.extend(of_snapshots(view, subject, vm.retention, &subject.disks(view)?)?);
        }
        for vdi in view.scheduled_vdis()? {
            found.extend(of_snapshots(view, Subject::Vdi(vdi.uuid), vdi.retention, std::slice::from_ref(&vdi))?);
        }
        let vms =
            view.vms_to_back_up()?.into_iter().map(|vm| (Subject::Vm(vm.uuid), vm.backup_schedule, vm.last_backup));
        let vdis = view.vdis_to_back_up()?;
        let vdis = vdis.into_iter().map(|vdi| (Subject::Vdi(vdi.uuid), vdi.backup_schedule, vdi.last_backup));
        for (subject, schedule, last) in vms.chain(vdis) {
            let Some(schedule) = schedule else { continue };
            let one = of(view, subject, Made::Backups(schedule), last.into_iter().collect(), &subject.disks(view)?)?;
            let needs = one.needs.iter().copied().chain([schedule.target]).collect();
            found.push(Scheduled { needs, ..one });
        }
        Ok(found)
    });
    read.await
}

fn of_snapshots(
    view: &View<'_>,
    subject: Subject,
    schedule: Option<Retention>,
    vdis: &[Vdi],
) -> Result<Option<Scheduled>, Problem> {
    let Some(schedule) = schedule else { return Ok(None) };
    let taken = subject.taken(view)?.into_iter().map(|taken| taken.at).collect();
    of(view, subject, Made::Snapshots(schedule), taken, vdis).map(Some)
}

fn of(
    view: &View<'_>,
    subject: Subject,
    made: Made,
    taken: Vec<Timestamp>,
    vdis: &[Vdi],
) -> Result<Scheduled, Problem> {
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
    Ok(Scheduled { subject, made, taken, needs, takes, lacks })
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
