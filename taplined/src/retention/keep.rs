//! Takes a snapshot that is due by a schedule, and destroys those that [`super::plan`] then considers superfluous:
//! `vdi-schedule` and `vm-schedule`, a task for each VDI and each VM.
//!
//! 0. `shorten`: only if a disk's chain cannot get longer: superfluous snapshots are destroyed, and hidden images are
//!    merged.
//! 1. `snapshot`: the job `vdi-snapshot` or `vm-snapshot`, which marks the snapshot as scheduled.
//! 2. `destroy`: the jobs `vdi-destroy` or `vm-snapshot-destroy`, one after the other. Nothing is destroyed unless
//!    the snapshot was taken.
//!
//! *If killed:* the next daemon completes or rolls back the jobs; everything else is left to the next period.
//!
//! Invariants: only scheduled snapshots that are not in use are destroyed, and none while the clock is not trusted
//! ([`super::steady`]).

use api::Problem;
use repo::catalogue::NewTask;
use serde_json::{Value, json};
use uuid::Uuid;

use super::room;
use super::steady::Seen;
use super::subject::{Scheduled, Subject, unneeded};
use crate::clock::{self, Now};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::vdi::begin;
use crate::vm;

/// The catalogue's key for the clock readings of the last run.
const CLOCKS: &str = "clocks";

/// Takes a snapshot, and destroys superfluous ones.
pub async fn keep(daemon: &Daemon, subject: Subject, now: Now) {
    let uuid = Uuid::new_v4();
    let new = NewTask { uuid, verb: subject.verb(), about: vec![subject.about()], cancellable: true, intent: None };
    let at_work = daemon.clone();
    let started =
        daemon.tasks.start(daemon, new, move |context| async move { work(&at_work, subject, now, context).await });
    match started.await {
        Ok(task) => {
            if let Err(problem) = daemon.tasks.success_of(task.uuid).await {
                let what = "its schedule was not followed in full; the next snapshot is tried in the next period";
                tracing::warn!(?subject, "{what}: {problem}");
            }
        }
        Err(problem) => {
            tracing::warn!(?subject, "a snapshot by its schedule could not be begun: {problem}");
            note(daemon, subject, Some(problem)).await;
        }
    }
}

/// Records that a snapshot is due but cannot be taken while a repository is not attached.
pub async fn note_lack(daemon: &Daemon, one: &Scheduled) {
    if let Some(problem) = one.lack("snapshot") {
        note(daemon, one.subject, Some(problem)).await;
    }
}

/// Records on a VDI or a VM why no snapshot was taken.
async fn note(daemon: &Daemon, subject: Subject, problem: Option<Problem>) {
    // When the daemon stops, tasks are cancelled, and the next daemon follows the schedule.
    if daemon.tasks.is_stopping() {
        return;
    }
    let noted = daemon.catalogue.write(move |tx| match subject {
        Subject::Vdi(vdi) => tx.set_vdi_retention_problem(vdi, problem.as_ref()),
        Subject::Vm(vm) => tx.set_vm_retention_problem(vm, problem.as_ref()),
    });
    if let Err(problem) = noted.await {
        tracing::warn!(?subject, "what became of a snapshot by its schedule cannot be recorded: {problem}");
    }
}

async fn work(daemon: &Daemon, subject: Subject, now: Now, mut context: Context) -> Result<Value, Problem> {
    let held = held(daemon, now).await?;
    if room::is_lacking(daemon, subject).await? {
        context.step("shorten", true).await?;
        if held.is_none() {
            destroy_unneeded(daemon, subject, now, &context).await?;
        }
        context.unless_cancelled(room::make(daemon, subject)).await?;
    }
    context.step("snapshot", true).await?;
    let taken = take(daemon, subject, now, &context).await;
    note(daemon, subject, taken.as_ref().err().cloned()).await;
    let uuid = taken?;
    context.step("destroy", true).await?;
    if let Some(why) = held {
        tracing::warn!(?subject, "nothing is destroyed by its schedule: {why}");
        return Ok(json!({ "uuid": uuid, "destroyed": [], "held": why }));
    }
    let destroyed = destroy_unneeded(daemon, subject, now, &context).await?;
    Ok(json!({ "uuid": uuid, "destroyed": destroyed }))
}

/// Why nothing may be destroyed now, because the clock has jumped. Records the clock readings for the next run.
pub async fn held(daemon: &Daemon, now: Now) -> Result<Option<String>, Problem> {
    let boot = clock::boot();
    let recorded = daemon.catalogue.write(move |tx| {
        let before = tx.meta(CLOCKS)?.and_then(|text| serde_json::from_str::<Seen>(&text).ok());
        let seen = Seen::after(before, &boot, now);
        let text = serde_json::to_string(&seen).map_err(|error| Problem::failed("record the time", error))?;
        tx.set_meta(CLOCKS, &text)?;
        Ok(seen.why_held())
    });
    recorded.await
}

/// Destroys superfluous snapshots, one after the other.
async fn destroy_unneeded(
    daemon: &Daemon,
    subject: Subject,
    now: Now,
    context: &Context,
) -> Result<Vec<Uuid>, Problem> {
    let mut destroyed = Vec::new();
    for snapshot in unneeded(daemon, subject, now).await? {
        context.check()?;
        let begun = match subject {
            Subject::Vdi(_) => begin::destroy_scheduled(daemon, snapshot).await,
            Subject::Vm(vm) => vm::destroy_scheduled_snapshot(daemon, vm, snapshot).await,
        };
        let ended = match begun {
            Ok(task) => daemon.tasks.success_of(task.uuid).await.map(drop),
            Err(problem) => Err(problem),
        };
        match ended {
            Ok(()) => destroyed.push(snapshot),
            // It stays until the next period.
            Err(problem) => tracing::info!(?subject, %snapshot, "a superfluous snapshot stays for now: {problem}"),
        }
    }
    Ok(destroyed)
}

/// Takes the snapshot; returns its UUID.
async fn take(daemon: &Daemon, subject: Subject, now: Now, context: &Context) -> Result<Value, Problem> {
    let begun = match subject {
        Subject::Vdi(vdi) => begin::scheduled_snapshot(daemon, vdi, now.wall).await?,
        Subject::Vm(vm) => vm::scheduled_snapshot(daemon, vm, now.wall).await?,
    };
    let done = context.part(daemon, &begun).await?;
    Ok(done.result.as_ref().map(|result| result["uuid"].clone()).unwrap_or_default())
}
