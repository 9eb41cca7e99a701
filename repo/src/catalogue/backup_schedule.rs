//! Schedules of backups of VDIs and VMs, and what became of the last backup that was due.
//!
//! It knows nothing of when one is due. Invariant: what became of a backup is recorded only with the schedule that it
//! was made by; another schedule, or another target, begins without a past.

use api::{BackupSchedule, Change, Code, ObjectKind, Problem};
use jiff::Timestamp;
use uuid::Uuid;

use super::Tx;
use super::row::{Id, Json, Time};

/// What became of a backup that was due.
#[derive(Clone, Debug)]
pub enum BackupOutcome {
    /// It was made: when it was due, and why something of it is not as it should be.
    Made(Timestamp, Option<Problem>),
    /// It was made, and the one that was due meanwhile was left out: what is recorded of that stays.
    MadeLate(Timestamp),
    /// It was not made.
    Not(Problem),
}

/// The table of a kind of objects.
fn table(kind: ObjectKind) -> &'static str {
    if kind == ObjectKind::Vm { "vm" } else { "vdi" }
}

impl Tx<'_> {
    /// Sets the schedule of a VDI or VM, which had `before`. What became of earlier backups is forgotten if they went
    /// to another target.
    pub(super) fn set_backup_schedule(
        &mut self,
        kind: ObjectKind,
        uuid: Uuid,
        (before, schedule): (Option<BackupSchedule>, Option<BackupSchedule>),
    ) -> Result<(), Problem> {
        if let Some(schedule) = schedule {
            self.backup_target(schedule.target).map_err(|problem| problem.field("backup_schedule.target"))?;
        }
        let target = |schedule: Option<BackupSchedule>| schedule.map(|schedule| schedule.target);
        let is_same = target(before) == target(schedule);
        let sql = format!(
            "UPDATE {} SET backup_schedule = ?2, last_backup = iif(?3, last_backup, NULL),
             backup_problem = iif(?4, backup_problem, NULL) WHERE uuid = ?1",
            table(kind)
        );
        self.execute(&sql, (Id(uuid), schedule.map(Json), is_same, before == schedule)).map(drop)
    }

    /// Records what became of a backup that was due by a schedule. Nothing if the object has another one by now, or
    /// none, or is gone.
    pub fn set_backup_outcome(
        &mut self,
        kind: ObjectKind,
        uuid: Uuid,
        schedule: &BackupSchedule,
        outcome: &BackupOutcome,
    ) -> Result<(), Problem> {
        let (now, problem) = match kind {
            ObjectKind::Vm => self.find_vm(uuid)?.map(|vm| (vm.backup_schedule, vm.backup_problem)),
            _ => self.find_vdi(uuid)?.map(|vdi| (vdi.backup_schedule, vdi.backup_problem)),
        }
        .unwrap_or_default();
        if now.as_ref() != Some(schedule) {
            return Ok(());
        }
        let (at, problem) = match outcome {
            BackupOutcome::Made(at, problem) => (Some(*at), problem.clone()),
            BackupOutcome::MadeLate(at) => (Some(*at), problem),
            BackupOutcome::Not(why) if problem.as_ref() == Some(why) => return Ok(()),
            BackupOutcome::Not(why) => (None, Some(why.clone())),
        };
        let sql = format!(
            "UPDATE {} SET last_backup = coalesce(?2, last_backup), backup_problem = ?3 WHERE uuid = ?1",
            table(kind)
        );
        self.execute(&sql, (Id(uuid), at.map(Time), problem.as_ref().map(Json)))?;
        self.touch(kind, uuid, Change::Changed);
        Ok(())
    }

    /// Refuses to forget a target that a schedule backs up to.
    pub(super) fn check_target_not_scheduled(&self, target: Uuid) -> Result<(), Problem> {
        let vdis = self.vdis_to_back_up()?.into_iter().map(|vdi| ("vdi", vdi.uuid, vdi.name, vdi.backup_schedule));
        let vms = self.vms_to_back_up()?.into_iter().map(|vm| ("vm", vm.uuid, vm.name, vm.backup_schedule));
        let uses = |schedule: Option<BackupSchedule>| schedule.is_some_and(|schedule| schedule.target == target);
        let Some((noun, uuid, name, _)) = vms.chain(vdis).find(|(_, _, _, schedule)| uses(*schedule)) else {
            return Ok(());
        };
        let what = format!("a schedule backs up the {noun} '{name}' to this target");
        let advice = format!("end it: tapline {noun} schedule {uuid} --to {target} --none");
        Err(Problem::new(Code::InUse, what).advise(advice))
    }
}

#[cfg(test)]
mod test;
