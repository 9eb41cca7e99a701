//! Follows the schedules of VDIs and VMs: runs [`keep`] for each of them when a snapshot is due.
//!
//! Invariants: a snapshot that fails is retried in the next period, not before; whatever the clock does, two are
//! taken at least half a period apart; no two snapshots of one disk are begun at once, although the schedules of the
//! disk and of its VM are due at the same moment. There is one timer, and none without a schedule.

mod keep;
mod plan;
mod room;
mod steady;
mod subject;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use api::{Event, ObjectKind, Retention, Sr, SrState, Vdi, Vm};
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;
use uuid::Uuid;

use self::plan::{interval, is_due};
use self::subject::{Scheduled, Subject};
use crate::clock::{self, Now};
use crate::daemon::Daemon;

/// The longest sleep: the clock may be set in the meantime, and the timer stands still while the host is suspended.
const CLOCK_TRUSTED: Duration = Duration::from_secs(3600);

/// Longer than the longest period.
const REMEMBERED: Duration = Duration::from_secs(32 * 24 * 3600);

/// The last attempt at a snapshot, successful or not.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    period: i64,
    up: Duration,
}

/// Running snapshots, and the objects that they reserve.
#[derive(Debug, Default)]
struct Work {
    taken: HashSet<Uuid>,
    running: JoinSet<Vec<Uuid>>,
}

impl Work {
    /// Runs work, during which `takes` are reserved.
    fn begin(&mut self, takes: Vec<Uuid>, work: impl Future<Output = ()> + Send + 'static) {
        self.taken.extend(&takes);
        self.running.spawn(async move {
            work.await;
            takes
        });
    }
}

/// Follows the schedules, for the lifetime of the daemon.
pub async fn follow(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    let mut attempts: HashMap<Uuid, Attempt> = HashMap::new();
    let mut work = Work::default();
    loop {
        let scheduled = match subject::scheduled(&daemon).await {
            Ok(scheduled) => scheduled,
            Err(problem) => {
                tracing::warn!("the schedules of snapshots cannot be read: {problem}");
                Vec::new()
            }
        };
        // Includes schedules that have been removed, and may be set again at any time.
        let up = clock::now().up;
        attempts.retain(|_, last| up < last.up + REMEMBERED);
        let mut sleep = None;
        for one in &scheduled {
            if let Some(rest) = begin(&daemon, one, &mut attempts, &mut work).await {
                sleep = Some(sleep.map_or(rest, |sleep: Duration| sleep.min(rest)));
            }
        }
        let known = scheduled.iter().map(|one| (one.subject.uuid(), one.schedule)).collect();
        let lacking = scheduled.iter().filter_map(|one| one.lacks).collect();
        let timer = async {
            match sleep {
                Some(sleep) => tokio::time::sleep(sleep.min(CLOCK_TRUSTED)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = timer => {}
            () = changed(&mut events, &known, &lacking) => {}
            Some(ended) = work.running.join_next() => match ended {
                Ok(taken) => work.taken.retain(|uuid| !taken.contains(uuid)),
                // It panicked, which aborts the daemon, or was cancelled with it.
                Err(_) => return,
            },
        }
    }
}

/// Begins a due snapshot; otherwise returns the time until the next check, unless a running snapshot must end first.
async fn begin(
    daemon: &Daemon,
    one: &Scheduled,
    attempts: &mut HashMap<Uuid, Attempt>,
    work: &mut Work,
) -> Option<Duration> {
    // In each repository one after the other, since all are due at the same moment.
    if one.needs.iter().any(|uuid| work.taken.contains(uuid)) {
        return None;
    }
    let (uuid, now) = (one.subject.uuid(), clock::now());
    let last = attempts.get(&uuid);
    if !may_begin(one, last, now) {
        if is_due(&one.schedule, &one.taken, now.wall) {
            keep::note_lack(daemon, one).await;
        }
        return Some(rest(one, last, now));
    }
    if let Subject::Vm(vm) = one.subject {
        // A VM that is being started would refuse, and get no snapshot in this period.
        if daemon.vms.is_busy(vm) {
            let waiting = daemon.clone();
            work.begin(vec![vm], async move { waiting.vms.settled(vm).await });
            return None;
        }
    }
    attempts.insert(uuid, Attempt { period: interval(&one.schedule).of(now.wall), up: now.up });
    let (daemon, subject) = (daemon.clone(), one.subject);
    work.begin(one.takes.clone(), async move { keep::keep(&daemon, subject, now).await });
    None
}

/// Waits for a change of a schedule, or for a lacking repository to be attached.
async fn changed(events: &mut Receiver<Arc<Event>>, known: &HashMap<Uuid, Retention>, lacking: &HashSet<Uuid>) {
    loop {
        let (uuid, retention) = match events.recv().await {
            Ok(event) => match event.kind {
                ObjectKind::Vdi => (event.uuid, event.object().ok().flatten().and_then(|vdi: Vdi| vdi.retention)),
                ObjectKind::Vm => (event.uuid, event.object().ok().flatten().and_then(|vm: Vm| vm.retention)),
                ObjectKind::Sr if lacking.contains(&event.uuid) => {
                    let sr: Option<Sr> = event.object().ok().flatten();
                    if sr.is_some_and(|sr| sr.state == SrState::Attached) {
                        return;
                    }
                    continue;
                }
                _ => continue,
            },
            // Events were missed, and may have been about a schedule.
            Err(RecvError::Lagged(_)) => return,
            Err(RecvError::Closed) => std::future::pending().await,
        };
        if retention != known.get(&uuid).copied() {
            return;
        }
    }
}

fn may_begin(one: &Scheduled, last: Option<&Attempt>, now: Now) -> bool {
    let failed = last.is_some_and(|last| last.period == interval(&one.schedule).of(now.wall));
    one.lacks.is_none() && !failed && again(one, last, now).is_zero() && is_due(&one.schedule, &one.taken, now.wall)
}

/// Time until half a period has passed since the last snapshot: by the monotonic clock since the last attempt, and by
/// the wall clock since the last snapshot, which a restarted daemon knows too.
fn again(one: &Scheduled, last: Option<&Attempt>, now: Now) -> Duration {
    let apart = interval(&one.schedule).length() / 2;
    let of_attempt = last.map_or(Duration::ZERO, |last| (last.up + apart.unsigned_abs()).saturating_sub(now.up));
    let since = one.taken.iter().map(|taken| now.wall.duration_since(taken.at));
    // A snapshot farther ahead was taken while the clock was wrong.
    let near = since.filter(|since| since.abs() < apart).min();
    near.map_or(of_attempt, |since| of_attempt.max((apart - since).unsigned_abs()))
}

/// Time until the next check.
fn rest(one: &Scheduled, last: Option<&Attempt>, now: Now) -> Duration {
    if one.lacks.is_some() {
        return CLOCK_TRUSTED;
    }
    let period = interval(&one.schedule);
    let again = again(one, last, now);
    match is_due(&one.schedule, &one.taken, now.wall) && last.is_none_or(|last| last.period != period.of(now.wall)) {
        true => again,
        false => period.rest(now.wall).unsigned_abs().max(again),
    }
}

#[cfg(test)]
mod test {
    use super::plan::Taken;
    use super::*;

    fn at(wall: &str, up: u64) -> Now {
        Now { wall: wall.parse().unwrap(), up: Duration::from_secs(up) }
    }

    fn hourly(taken: &[&str]) -> Scheduled {
        let taken = taken.iter().map(|at| Taken { snapshot: Uuid::new_v4(), at: at.parse().unwrap() });
        let schedule = Retention::new(24, 0, 0, 0).unwrap();
        let subject = Subject::Vdi(Uuid::new_v4());
        Scheduled { subject, schedule, taken: taken.collect(), needs: Vec::new(), takes: Vec::new(), lacks: None }
    }

    #[test]
    fn a_snapshot_is_begun_once_in_a_period_and_half_a_period_after_the_last() {
        let one = hourly(&["2026-11-27T09:20:00Z"]);
        assert!(may_begin(&one, None, at("2026-11-27T10:00:00Z", 1000)));
        assert!(!may_begin(&one, None, at("2026-11-27T09:59:00Z", 1000)));
        // A failed one is not retried in its period.
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
        // In a period without a snapshot, half a period after the last one.
        assert_eq!(rest(&one, Some(&last(1000)), at("2026-11-27T11:00:00Z", 1600)).as_secs(), 1200);
        assert_eq!(rest(&one, None, at("2026-11-27T11:00:00Z", 1600)), Duration::ZERO);
        // After a failure, not before the next period.
        let failed =
            Attempt { period: interval(&one.schedule).of("2026-11-27T11:30:00Z".parse().unwrap()), ..last(1000) };
        assert_eq!(rest(&one, Some(&failed), at("2026-11-27T11:30:00Z", 1000)).as_secs(), 1800);
    }

    #[test]
    fn snapshots_are_half_a_period_apart_even_after_a_restart() {
        let one = hourly(&["2026-11-27T08:50:00Z", "2026-11-27T09:50:00Z"]);
        assert!(!may_begin(&one, None, at("2026-11-27T10:19:59Z", 1000)));
        assert_eq!(rest(&one, None, at("2026-11-27T10:19:00Z", 1000)).as_secs(), 60);
        assert!(may_begin(&one, None, at("2026-11-27T10:20:00Z", 1000)));
        // The clock was a little ahead.
        assert!(!may_begin(&hourly(&["2026-11-27T11:10:00Z"]), None, at("2026-11-27T10:50:00Z", 1000)));
        // The clock was a day ahead: that snapshot is not waited for.
        assert!(may_begin(&hourly(&["2026-11-28T10:10:00Z"]), None, at("2026-11-27T10:50:00Z", 1000)));
    }
}
