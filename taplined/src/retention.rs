//! Takes the snapshots that are due by the schedules of VDIs, and destroys those that [`plan`] says are superfluous:
//! `vdi-keep`, a task for each VDI.
//!
//! 1. `snapshot`: the job `vdi-snapshot`, which marks the snapshot as scheduled.
//! 2. `destroy`: the jobs `vdi-destroy`, one after the other. Nothing is destroyed unless the snapshot was taken.
//!
//! *If killed:* the jobs are done or undone by the next daemon; the rest is left to the next period.
//!
//! Invariants: only scheduled snapshots that nothing uses are destroyed; a snapshot that fails is tried again in the
//! next period, not before; whatever the clock does, two are taken no sooner than half a period after each other. There
//! is one timer, and none without a schedule.

mod plan;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Event, ObjectKind, Problem, Retention, SrState, Task, TaskState, Vdi};
use repo::catalogue::NewTask;
use serde_json::{Value, json};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use uuid::Uuid;

use self::plan::{Taken, interval, is_due, superfluous};
use crate::clock::{self, Now};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::vdi::{about_vdi, begin};

/// The longest sleep: the clock may be set meanwhile, and the timer stands still while the host is suspended.
const CLOCK_TRUSTED: Duration = Duration::from_secs(3600);

/// Longer than the longest period.
const REMEMBERED: Duration = Duration::from_secs(32 * 24 * 3600);

/// For a job that waits for storage to be looked at again.
const TO_END: Duration = Duration::from_secs(3600);

/// When a snapshot of a VDI was last begun, whether it was taken or not.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    period: i64,
    up: Duration,
}

/// A VDI with a schedule, and the scheduled snapshots of it.
#[derive(Clone, Debug)]
struct Scheduled {
    vdi: Vdi,
    schedule: Retention,
    taken: Vec<Taken>,
    /// Whether its repository is there.
    attached: bool,
}

/// Follows the schedules, for the lifetime of the daemon.
pub async fn follow(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    let mut attempts: HashMap<Uuid, Attempt> = HashMap::new();
    // Repositories in which a schedule is followed now. One that hangs keeps no other from its own.
    let (mut at_work, mut working) = (HashSet::new(), JoinSet::new());
    loop {
        let scheduled = match scheduled(&daemon).await {
            Ok(scheduled) => scheduled,
            Err(problem) => {
                tracing::warn!("the schedules of snapshots cannot be read: {problem}");
                Vec::new()
            }
        };
        // Also of schedules that have ended, and may be set again at once.
        let up = clock::now().up;
        attempts.retain(|_, last| up < last.up + REMEMBERED);
        let mut sleep = None;
        for one in &scheduled {
            let (now, last) = (clock::now(), attempts.get(&one.vdi.uuid));
            // In each repository one after the other, since all are due at the same moment.
            if at_work.contains(&one.vdi.sr) {
                continue;
            }
            if !may_begin(one, last, now) {
                let rest = rest(one, last, now);
                sleep = Some(sleep.map_or(rest, |sleep: Duration| sleep.min(rest)));
                continue;
            }
            attempts.insert(one.vdi.uuid, Attempt { period: interval(&one.schedule).of(now.wall), up: now.up });
            at_work.insert(one.vdi.sr);
            let (daemon, vdi, sr) = (daemon.clone(), one.vdi.uuid, one.vdi.sr);
            working.spawn(async move {
                keep(&daemon, vdi, now).await;
                sr
            });
        }
        let known = scheduled.iter().map(|one| (one.vdi.uuid, one.schedule)).collect();
        let timer = async {
            match sleep {
                Some(sleep) => tokio::time::sleep(sleep.min(CLOCK_TRUSTED)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = timer => {}
            () = changed(&mut events, &known) => {}
            Some(ended) = working.join_next() => match ended {
                Ok(sr) => drop(at_work.remove(&sr)),
                // It panicked, which has ended the daemon, or was cancelled with it.
                Err(_) => return,
            },
        }
    }
}

/// Waits for the change of a schedule. A repository that has been attached is noticed by the timer.
async fn changed(events: &mut Receiver<Arc<Event>>, known: &HashMap<Uuid, Retention>) {
    loop {
        match events.recv().await {
            Ok(event) if event.kind == ObjectKind::Vdi => {
                let vdi: Option<Vdi> = event.object().ok().flatten();
                if vdi.and_then(|vdi| vdi.retention) != known.get(&event.uuid).copied() {
                    return;
                }
            }
            Ok(_) => {}
            // Some were missed, and a schedule may have been among them.
            Err(RecvError::Lagged(_)) => return,
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

async fn scheduled(daemon: &Daemon) -> Result<Vec<Scheduled>, Problem> {
    let read = daemon.catalogue.read(|view| {
        let mut found = Vec::new();
        for vdi in view.scheduled_vdis()? {
            let Some(schedule) = vdi.retention else { continue };
            let taken = taken(&view.snapshots_of(vdi.uuid)?);
            let attached = view.sr(vdi.sr)?.state == SrState::Attached;
            found.push(Scheduled { vdi, schedule, taken, attached });
        }
        Ok(found)
    });
    read.await
}

fn taken(snapshots: &[Vdi]) -> Vec<Taken> {
    let scheduled = snapshots.iter().filter(|snapshot| snapshot.scheduled);
    scheduled.filter_map(|snapshot| Some(Taken { vdi: snapshot.uuid, at: snapshot.snapshot_time? })).collect()
}

fn may_begin(one: &Scheduled, last: Option<&Attempt>, now: Now) -> bool {
    let period = interval(&one.schedule);
    let apart = period.length().unsigned_abs() / 2;
    let waits = last.is_some_and(|last| last.period == period.of(now.wall) || now.up < last.up + apart);
    one.attached && !waits && is_due(&one.schedule, &one.taken, now.wall)
}

/// How long nothing is to be done for a VDI.
fn rest(one: &Scheduled, last: Option<&Attempt>, now: Now) -> Duration {
    if !one.attached {
        return CLOCK_TRUSTED;
    }
    let period = interval(&one.schedule);
    let next = period.rest(now.wall).unsigned_abs();
    let apart = period.length().unsigned_abs() / 2;
    let again = last.map_or(Duration::ZERO, |last| (last.up + apart).saturating_sub(now.up));
    match is_due(&one.schedule, &one.taken, now.wall) && last.is_none_or(|last| last.period != period.of(now.wall)) {
        true => again,
        false => next.max(again),
    }
}

/// Takes a snapshot of a VDI, and destroys what is superfluous then.
async fn keep(daemon: &Daemon, vdi: Uuid, now: Now) {
    let new = NewTask {
        uuid: Uuid::new_v4(),
        verb: "vdi-keep",
        about: vec![about_vdi(vdi)],
        cancellable: true,
        intent: None,
    };
    let at_work = daemon.clone();
    let started =
        daemon.tasks.start(daemon, new, move |context| async move { work(&at_work, vdi, now, context).await });
    match started.await {
        Ok(task) => {
            if let Err(problem) = wait(daemon, &task).await {
                tracing::warn!(%vdi, "no snapshot was taken by its schedule; the next one is tried in the next period: {problem}");
            }
        }
        Err(problem) => tracing::warn!(%vdi, "a snapshot by its schedule could not be begun: {problem}"),
    }
}

async fn work(daemon: &Daemon, vdi: Uuid, now: Now, mut context: Context) -> Result<Value, Problem> {
    context.step("snapshot", true).await?;
    let begun = begin::scheduled_snapshot(daemon, vdi, now.wall).await?;
    let done = context.unless_cancelled(wait(daemon, &begun)).await?;
    let uuid = done.result.as_ref().map(|result| result["uuid"].clone()).unwrap_or_default();
    context.step("destroy", true).await?;
    let mut destroyed = Vec::new();
    for snapshot in unneeded(daemon, vdi, now).await? {
        context.check()?;
        let ended = match begin::destroy(daemon, snapshot).await {
            Ok(task) => wait(daemon, &task).await.map(drop),
            Err(problem) => Err(problem),
        };
        match ended {
            Ok(()) => destroyed.push(snapshot),
            // It stays until the next period.
            Err(problem) => tracing::info!(%vdi, %snapshot, "a superfluous snapshot stays for now: {problem}"),
        }
    }
    Ok(json!({ "uuid": uuid, "destroyed": destroyed }))
}

/// The superfluous snapshots that nothing uses.
async fn unneeded(daemon: &Daemon, vdi: Uuid, now: Now) -> Result<Vec<Uuid>, Problem> {
    let read = daemon.catalogue.read(move |view| {
        let Some(schedule) = view.vdi(vdi)?.retention else { return Ok(Vec::new()) };
        if view.retention_rests(vdi)?.is_some_and(|until| now.wall < until) {
            return Ok(Vec::new());
        }
        let mut unneeded = Vec::new();
        for snapshot in superfluous(&schedule, &taken(&view.snapshots_of(vdi)?), now.wall) {
            let is_used = !view.vbds(None, Some(snapshot))?.is_empty() || !view.holders(snapshot)?.is_empty();
            // The next image of the chain is one child; any other is a clone, or what a revert has left.
            let has_clones = view.children(view.vdi_image(snapshot)?)?.len() > 1;
            let is_in_another = view.is_in_vm_snapshot(snapshot)?;
            if !is_used && !has_clones && !is_in_another {
                unneeded.push(snapshot);
            }
        }
        Ok(unneeded)
    });
    read.await
}

/// Waits for a task, and returns why it has failed if it has.
async fn wait(daemon: &Daemon, task: &Task) -> Result<Task, Problem> {
    loop {
        let now = daemon.tasks.wait(task.uuid, TO_END).await?;
        match now.state {
            TaskState::Done => return Ok(now),
            state if state.is_over() => {
                let unknown = || Problem::new(Code::Failed, format!("the task {} {} has failed", now.verb, now.uuid));
                return Err(now.problem.clone().unwrap_or_else(unknown));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(wall: &str, up: u64) -> Now {
        Now { wall: wall.parse().unwrap(), up: Duration::from_secs(up) }
    }

    fn hourly(taken: &[&str]) -> Scheduled {
        let taken = taken.iter().map(|at| Taken { vdi: Uuid::new_v4(), at: at.parse().unwrap() });
        let schedule = Retention::new(24, 0, 0, 0).unwrap();
        Scheduled { vdi: vdi(), schedule, taken: taken.collect(), attached: true }
    }

    fn vdi() -> Vdi {
        let text = json!({
            "uuid": Uuid::new_v4(), "name": "web", "description": "", "sr": Uuid::new_v4(), "size": 512,
            "physical_utilisation": 0, "format": "qcow2", "file": "a", "depth": 1, "read_only": false,
            "state": "ready", "users": [], "created": "2026-11-27T09:00:00Z"
        });
        serde_json::from_value(text).unwrap()
    }

    #[test]
    fn a_snapshot_is_begun_once_in_a_period_and_half_a_period_after_the_last() {
        let one = hourly(&["2026-11-27T09:50:00Z"]);
        assert!(may_begin(&one, None, at("2026-11-27T10:00:00Z", 1000)));
        assert!(!may_begin(&one, None, at("2026-11-27T09:59:00Z", 1000)));
        // One that failed is not tried again in its period.
        let period = interval(&one.schedule).of("2026-11-27T10:00:00Z".parse().unwrap());
        let failed = Attempt { period, up: Duration::from_secs(1000) };
        assert!(!may_begin(&one, Some(&failed), at("2026-11-27T10:59:59Z", 4500)));
        assert!(may_begin(&one, Some(&failed), at("2026-11-27T11:00:00Z", 4600)));
        // The clock was set a day ahead, and then back.
        assert!(!may_begin(&one, Some(&failed), at("2026-11-28T10:00:00Z", 2799)));
        assert!(!may_begin(&one, Some(&failed), at("2026-11-26T10:00:00Z", 2799)));
        assert!(may_begin(&one, Some(&failed), at("2026-11-28T10:00:00Z", 2800)));
    }

    #[test]
    fn the_timer_ends_when_a_snapshot_may_be_begun() {
        let one = hourly(&["2026-11-27T10:10:00Z"]);
        let last = |up| Attempt { period: 0, up: Duration::from_secs(up) };
        assert_eq!(rest(&one, None, at("2026-11-27T10:10:00Z", 1000)).as_secs(), 3000);
        assert_eq!(rest(&one, Some(&last(1000)), at("2026-11-27T10:10:00Z", 1000)).as_secs(), 3000);
        // In a period in which none was taken, half a period after the last one.
        assert_eq!(rest(&one, Some(&last(1000)), at("2026-11-27T11:00:00Z", 1600)).as_secs(), 1200);
        assert_eq!(rest(&one, None, at("2026-11-27T11:00:00Z", 1600)), Duration::ZERO);
        // Not before the next period after one that failed.
        let failed =
            Attempt { period: interval(&one.schedule).of("2026-11-27T11:30:00Z".parse().unwrap()), ..last(1000) };
        assert_eq!(rest(&one, Some(&failed), at("2026-11-27T11:30:00Z", 1000)).as_secs(), 1800);
    }
}
