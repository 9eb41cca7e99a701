//! Makes a backup that is due by a schedule, and removes from the target what is superfluous then by its rule: the
//! tasks `vdi-backup` or `vm-backup`, and `backup-prune`.
//!
//! *If killed:* the next daemon removes what the backup has left, and begins again; a backup that counts by then is not
//! repeated, unless its success was not recorded, and then sends nothing twice. What is superfluous waits for the next
//! backup.
//!
//! Invariants: nothing is removed unless a backup has just been made by this very schedule, nor while the clock is not
//! trusted ([`super::steady`]); the rule is applied on the target, which never removes the last complete state.

use api::{BackupPrune, BackupSchedule, Code, Problem, Task, VdiBackup, VmBackup};
use repo::catalogue::BackupOutcome;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::keep::held;
use super::subject::{Made, Scheduled, Subject};
use crate::backup;
use crate::clock::{self, Now};
use crate::daemon::Daemon;

/// The steps of a backup in which it takes its snapshot, and needs the disks for itself.
const WITH_DISKS: [&str; 2] = ["find", "snapshot"];

/// For how many hours what no backup refers to is spared by a schedule: another host may be sending its first backup,
/// for days.
const GRACE: u32 = 168;

/// Makes a backup; returns whether that has succeeded. `disks_free` is dropped when it does not need the disks for
/// itself any more.
pub async fn back_up(
    daemon: &Daemon,
    subject: Subject,
    schedule: BackupSchedule,
    now: Now,
    disks_free: oneshot::Sender<()>,
) -> bool {
    let made = made(daemon, subject, schedule, disks_free).await;
    let outcome = match &made {
        Ok(()) => {
            let period = Made::Backups(schedule).rule().interval();
            match period.of(clock::now().wall.as_second()) == period.of(now.wall.as_second()) {
                true => BackupOutcome::Made(now.wall, None),
                false => BackupOutcome::MadeLate(now.wall),
            }
        }
        Err(problem) => {
            tracing::warn!(?subject, target = %schedule.target, "no backup by its schedule, for now: {problem}");
            let advice = "it is tried again in the next hour; see what happened: tapline task list --all";
            let advice = problem.advice.clone().or_else(|| Some(advice.into()));
            BackupOutcome::Not(Problem { advice, ..problem.clone() })
        }
    };
    note(daemon, subject, schedule, outcome).await;
    made.is_ok()
}

/// Removes from the target what is superfluous since a backup was made that was due at `due`. It is no part of the
/// backup, which counts.
pub async fn remove_superfluous(daemon: &Daemon, subject: Subject, schedule: BackupSchedule, due: Now) {
    // Other schedules have been followed since: an older reading of the clock would be taken for a jump.
    let now = clock::now();
    if let Err(problem) = prune(daemon, subject, schedule, now).await {
        tracing::warn!(?subject, target = %schedule.target, "{problem}");
        note(daemon, subject, schedule, BackupOutcome::Made(due.wall, Some(problem))).await;
    }
}

/// Records that a backup was due while the one before is still being made, and is left out.
pub async fn note_skip(daemon: &Daemon, subject: Subject, schedule: BackupSchedule) {
    let what = "the backup that was due by the schedule was left out: the one before it was still being made";
    let problem = Problem::new(Code::Busy, what).advise(
        "if it makes no progress, cancel it (tapline task list); if it takes longer than the period, back up less often, or \
         have changes recorded so that only these are read: tapline vdi cbt enable",
    );
    tracing::warn!(?subject, target = %schedule.target, "{problem}");
    note(daemon, subject, schedule, BackupOutcome::Not(problem)).await;
}

/// Records that a backup is due but cannot be made while a repository is not attached.
pub async fn note_lack(daemon: &Daemon, one: &Scheduled, schedule: BackupSchedule) {
    if let Some(problem) = one.lack("backup") {
        note(daemon, one.subject, schedule, BackupOutcome::Not(problem)).await;
    }
}

/// Records what became of a backup that was due.
async fn note(daemon: &Daemon, subject: Subject, schedule: BackupSchedule, outcome: BackupOutcome) {
    // When the daemon stops, tasks are cancelled, and the next daemon follows the schedule.
    if daemon.tasks.is_stopping() && matches!(outcome, BackupOutcome::Not(_)) {
        return;
    }
    let about = subject.about();
    let noted = daemon.catalogue.write(move |tx| tx.set_backup_outcome(about.kind, about.uuid, &schedule, &outcome));
    if let Err(problem) = noted.await {
        tracing::warn!(?subject, "what became of a backup by its schedule cannot be recorded: {problem}");
    }
}

async fn made(
    daemon: &Daemon,
    subject: Subject,
    schedule: BackupSchedule,
    disks_free: oneshot::Sender<()>,
) -> Result<(), Problem> {
    let (target, full) = (schedule.target, false);
    let task = match subject {
        Subject::Vdi(vdi) => backup::back_up(daemon, vdi, VdiBackup { target, full, repair: false }).await?,
        Subject::Vm(vm) => backup::back_up_vm(daemon, vm, VmBackup { target, full, repair: false }).await?,
    };
    until_disks_free(daemon, task.uuid).await?;
    drop(disks_free);
    daemon.tasks.success_of(task.uuid).await.map(drop)
}

/// Waits until a backup task has its snapshot, or has ended.
async fn until_disks_free(daemon: &Daemon, uuid: Uuid) -> Result<(), Problem> {
    let mut events = daemon.catalogue.subscribe();
    let needs_disks = |task: &Task| {
        let step = task.step.as_deref();
        !task.state.is_over() && step.is_none_or(|step| WITH_DISKS.contains(&step))
    };
    while needs_disks(&daemon.catalogue.read(move |view| view.task(uuid)).await?) {
        // An event that was missed is no end: the state is read again.
        drop(events.recv().await);
    }
    Ok(())
}

/// Removes superfluous backups from the target, if the schedule is still this one.
async fn prune(daemon: &Daemon, subject: Subject, schedule: BackupSchedule, now: Now) -> Result<(), Problem> {
    if let Some(why) = held(daemon, now).await? {
        let what = format!("the backup was made, and superfluous ones stay for now: {why}");
        return Err(Problem::new(Code::State, what));
    }
    let read = daemon.catalogue.read(move |view| {
        Ok(match subject {
            Subject::Vdi(vdi) => view.find_vdi(vdi)?.and_then(|vdi| vdi.backup_schedule),
            Subject::Vm(vm) => view.find_vm(vm)?.and_then(|vm| vm.backup_schedule),
        })
    });
    if read.await? != Some(schedule) {
        return Ok(());
    }
    let (vdi, vm) = match subject {
        Subject::Vdi(vdi) => (Some(vdi), None),
        Subject::Vm(vm) => (None, Some(vm)),
    };
    let number = |number: u16| Some(number).filter(|number| *number > 0);
    let asked = BackupPrune {
        vdi,
        vm,
        hourly: number(schedule.hourly),
        daily: number(schedule.daily),
        weekly: number(schedule.weekly),
        monthly: number(schedule.monthly),
        grace: Some(GRACE),
        ..BackupPrune::default()
    };
    let begun = backup::prune(daemon, schedule.target, asked).await?;
    let pruned = daemon.tasks.success_of(begun.uuid).await.map_err(|problem| {
        let what = format!("the backup was made, but superfluous ones were not removed: {}", problem.detail);
        Problem { detail: what, ..problem }
    })?;
    // Nothing of this machine is being backed up now.
    let left = pruned.result.as_ref().and_then(|result| result["unjudged"].as_u64()).unwrap_or(0);
    match (subject, left) {
        (Subject::Vdi(_), _) | (_, 0) => Ok(()),
        (Subject::Vm(_), left) => {
            let what = format!("{left} backups on the target belong to states of the machine that are not complete");
            Err(Problem::new(Code::State, what).advise(
                "backups that did not end have left them; remove them: tapline target backups, tapline target \
                 remove-backups",
            ))
        }
    }
}
