//! Follows the schedules of VDIs and VMs: runs [`keep`] for each of them when a snapshot is due, and [`back_up`] when a
//! backup is.
//!
//! Invariants: a snapshot that fails is retried in the next period, a backup in the next hour, not before; whatever the
//! clock does, two snapshots are taken at least half a period apart, and two backups half an hour; no two snapshots of
//! one disk are begun at once, although the schedules of the disk and of its VM, and those of backups, are due at the
//! same moment; backups by schedules to one target are made one after the other, since each takes the memory of its
//! process, and one that is due while its predecessor is being made is left out. There is one timer, and none without a
//! schedule.

mod back_up;
mod keep;
mod plan;
mod room;
mod steady;
mod subject;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use api::{BackupSchedule, Event, ObjectKind, Sr, SrState, Vdi, Vm};
use jiff::SignedDuration;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use uuid::Uuid;

use self::plan::is_due;
use self::subject::{Made, Scheduled, Subject};
use crate::clock::{self, Now};
use crate::daemon::Daemon;

/// The longest sleep: the clock may be set in the meantime, and the timer stands still while the host is suspended.
const CLOCK_TRUSTED: Duration = Duration::from_secs(3600);

/// Longer than the longest period.
const REMEMBERED: Duration = Duration::from_secs(32 * 24 * 3600);

/// Whose attempts are counted together: those of an object, and for backups of a target.
type Key = (Uuid, Option<Uuid>);

/// All schedules: their objects, whether they are of backups, and what they make.
type Known = HashMap<(Uuid, bool), Made>;

/// The last attempt at a snapshot or backup, successful or not.
#[derive(Clone, Copy, Debug)]
struct Attempt {
    /// The period in which it is not repeated ([`Made::retry`]).
    period: i64,
    /// The period of the schedule, if nothing was begun in it since the backup before was still being made.
    skipped: Option<i64>,
    up: Duration,
}

/// What runs, and the objects that it reserves.
#[derive(Debug, Default)]
struct Work {
    taken: HashSet<Uuid>,
    /// The objects that are being backed up, since when (uptime), and the periods that these backups are of.
    backed_up: HashMap<Uuid, (i64, Duration)>,
    running: JoinSet<Ended>,
}

/// What is not reserved any more.
#[derive(Debug)]
struct Ended {
    taken: Vec<Uuid>,
    /// The backup that has ended, and when: it is not repeated in the period of its end.
    backed_up: Option<(Key, Attempt)>,
}

impl Work {
    /// Runs work, during which `takes` are reserved.
    fn begin(&mut self, takes: Vec<Uuid>, work: impl Future<Output = ()> + Send + 'static) {
        self.taken.extend(&takes);
        self.running.spawn(async move {
            work.await;
            Ended { taken: takes, backed_up: None }
        });
    }

    /// Makes a backup, during which its target is reserved; what `takes` names, until it has its snapshot.
    fn begin_backup(&mut self, daemon: &Daemon, one: &Scheduled, schedule: BackupSchedule, now: Now) {
        let (disks_free, are_free) = oneshot::channel();
        self.begin(one.takes.clone(), async move { drop(are_free.await) });
        let (daemon, subject) = (daemon.clone(), one.subject);
        self.taken.insert(schedule.target);
        self.backed_up.insert(subject.uuid(), (one.period(now), now.up));
        let (has_ended, ended) = oneshot::channel();
        let (at_work, made) = (daemon.clone(), one.made);
        self.running.spawn(async move {
            let is_made = back_up::back_up(&at_work, subject, schedule, now, disks_free).await;
            let attempt = made.attempt(clock::now());
            // Its receiver is there until it has received this, or the daemon ends.
            has_ended.send(is_made).unwrap_or_default();
            Ended { taken: Vec::new(), backed_up: Some(((subject.uuid(), Some(schedule.target)), attempt)) }
        });
        self.running.spawn(async move {
            if ended.await == Ok(true) {
                back_up::remove_superfluous(&daemon, subject, schedule, now).await;
            }
            Ended { taken: vec![schedule.target], backed_up: None }
        });
    }

    fn end(&mut self, ended: Ended, attempts: &mut HashMap<Key, Attempt>) {
        self.taken.retain(|uuid| !ended.taken.contains(uuid));
        if let Some((key, attempt)) = ended.backed_up {
            self.backed_up.remove(&key.0);
            let skipped = attempts.get(&key).and_then(|before| before.skipped);
            attempts.insert(key, Attempt { skipped, ..attempt });
        }
    }
}

/// Follows the schedules, for the lifetime of the daemon.
pub async fn follow(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    let mut attempts: HashMap<Key, Attempt> = HashMap::new();
    let mut work = Work::default();
    loop {
        let mut scheduled = match subject::scheduled(&daemon).await {
            Ok(scheduled) => scheduled,
            Err(problem) => {
                tracing::warn!("the schedules cannot be read: {problem}");
                Vec::new()
            }
        };
        // Includes schedules that have been removed, and may be set again at any time.
        let up = clock::now().up;
        attempts.retain(|_, last| up < last.up + REMEMBERED);
        // At a target that is hardly ever free, the one that has waited longest is next.
        scheduled.sort_by_key(|one| match one.made {
            Made::Snapshots(_) => (None, None),
            Made::Backups(_) => (attempts.get(&one.key()).map(|last| last.up), one.taken.iter().max().copied()),
        });
        let mut sleep = None;
        for one in &scheduled {
            if let Some(rest) = begin(&daemon, one, &mut attempts, &mut work).await {
                sleep = Some(sleep.map_or(rest, |sleep: Duration| sleep.min(rest)));
            }
        }
        let known = scheduled.iter().map(|one| ((one.subject.uuid(), one.key().1.is_some()), one.made)).collect();
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
                Ok(ended) => work.end(ended, &mut attempts),
                // It panicked, which aborts the daemon, or was cancelled with it.
                Err(_) => return,
            },
        }
    }
}

/// Begins what is due; otherwise returns the time until the next check, unless something that runs must end first.
async fn begin(
    daemon: &Daemon,
    one: &Scheduled,
    attempts: &mut HashMap<Key, Attempt>,
    work: &mut Work,
) -> Option<Duration> {
    let (key, now) = (one.key(), clock::now());
    let last = attempts.get(&key);
    if let (Made::Backups(schedule), Some(running)) = (one.made, work.backed_up.get(&one.subject.uuid())) {
        if must_skip(one, *running, last, now) {
            attempts.insert(key, Attempt { skipped: Some(one.period(now)), ..one.made.attempt(now) });
            back_up::note_skip(daemon, one.subject, schedule).await;
        }
        return Some(one.made.rule().interval().rest(now.wall).unsigned_abs());
    }
    // In each repository one after the other, since all are due at the same moment.
    if one.needs.iter().any(|uuid| work.taken.contains(uuid)) {
        return None;
    }
    if !may_begin(one, last, now) {
        if one.is_due(now) {
            match one.made {
                Made::Snapshots(_) => keep::note_lack(daemon, one).await,
                Made::Backups(schedule) => back_up::note_lack(daemon, one, schedule).await,
            }
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
    attempts.insert(key, one.made.attempt(now));
    let (daemon, subject) = (daemon.clone(), one.subject);
    match one.made {
        Made::Snapshots(_) => work.begin(one.takes.clone(), async move { keep::keep(&daemon, subject, now).await }),
        Made::Backups(schedule) => {
            work.begin_backup(&daemon, one, schedule, now);
            // The next one may be due before this one is made.
            return Some(one.made.rule().interval().rest(now.wall).unsigned_abs());
        }
    }
    None
}

impl Scheduled {
    fn key(&self) -> Key {
        let target = match self.made {
            Made::Snapshots(_) => None,
            Made::Backups(schedule) => Some(schedule.target),
        };
        (self.subject.uuid(), target)
    }

    /// The number of the period now.
    fn period(&self, now: Now) -> i64 {
        self.made.rule().interval().of(now.wall.as_second())
    }

    fn is_due(&self, now: Now) -> bool {
        is_due(self.made.rule(), self.taken.iter().copied(), now.wall)
    }

    /// Whether an attempt may not be repeated yet.
    fn is_tried(&self, last: Option<&Attempt>, now: Now) -> bool {
        let period = self.made.retry().of(now.wall.as_second());
        last.is_some_and(|last| last.period == period || last.skipped == Some(self.period(now)))
    }
}

impl Made {
    fn attempt(self, now: Now) -> Attempt {
        Attempt { period: self.retry().of(now.wall.as_second()), skipped: None, up: now.up }
    }
}

/// Waits for a change of a schedule, or for a lacking repository to be attached.
async fn changed(events: &mut Receiver<Arc<Event>>, known: &Known, lacking: &HashSet<Uuid>) {
    loop {
        let (uuid, schedules) = match events.recv().await {
            Ok(event) => match event.kind {
                ObjectKind::Vdi => {
                    let vdi: Option<Vdi> = event.object().ok().flatten();
                    (event.uuid, vdi.map(|vdi| (vdi.retention, vdi.backup_schedule)))
                }
                ObjectKind::Vm => {
                    let vm: Option<Vm> = event.object().ok().flatten();
                    (event.uuid, vm.map(|vm| (vm.retention, vm.backup_schedule)))
                }
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
        let (retention, backups) = schedules.unwrap_or_default();
        let known = |is_backup| known.get(&(uuid, is_backup)).copied();
        if retention.map(Made::Snapshots) != known(false) || backups.map(Made::Backups) != known(true) {
            return;
        }
    }
}

fn may_begin(one: &Scheduled, last: Option<&Attempt>, now: Now) -> bool {
    one.lacks.is_none() && !one.is_tried(last, now) && again(one, last, now).is_zero() && one.is_due(now)
}

/// Whether the backup of this period is left out, because the one of an earlier period is still being made, and has
/// taken longer than a period. One that has not is followed by that of this period.
fn must_skip(one: &Scheduled, (running, since): (i64, Duration), last: Option<&Attempt>, now: Now) -> bool {
    let (period, length) = (one.period(now), one.made.rule().interval().length().unsigned_abs());
    running != period && now.up.saturating_sub(since) >= length && last.is_none_or(|last| last.skipped != Some(period))
}

/// Time until half a period ([`Made::retry`]) has passed since the last snapshot or backup: by the monotonic clock
/// since the last attempt, and by the wall clock since the last one, which a restarted daemon knows too.
fn again(one: &Scheduled, last: Option<&Attempt>, now: Now) -> Duration {
    let apart: SignedDuration = one.made.retry().length() / 2;
    let of_attempt = last.map_or(Duration::ZERO, |last| (last.up + apart.unsigned_abs()).saturating_sub(now.up));
    let since = one.taken.iter().map(|taken| now.wall.duration_since(*taken));
    // A snapshot farther ahead was taken while the clock was wrong.
    let near = since.filter(|since| since.abs() < apart).min();
    near.map_or(of_attempt, |since| of_attempt.max((apart - since).unsigned_abs()))
}

/// Time until the next check.
fn rest(one: &Scheduled, last: Option<&Attempt>, now: Now) -> Duration {
    if one.lacks.is_some() {
        return CLOCK_TRUSTED;
    }
    let again = again(one, last, now);
    let period = match one.is_due(now) {
        true if !one.is_tried(last, now) => return again,
        true => one.made.retry(),
        false => one.made.rule().interval(),
    };
    period.rest(now.wall).unsigned_abs().max(again)
}

#[cfg(test)]
mod test {
    use api::Retention;

    use super::*;

    fn at(wall: &str, up: u64) -> Now {
        Now { wall: wall.parse().unwrap(), up: Duration::from_secs(up) }
    }

    fn hourly(taken: &[&str]) -> Scheduled {
        of(Made::Snapshots(Retention::new(24, 0, 0, 0).unwrap()), taken)
    }

    fn of(made: Made, taken: &[&str]) -> Scheduled {
        let taken = taken.iter().map(|at| at.parse().unwrap()).collect();
        let subject = Subject::Vdi(Uuid::new_v4());
        Scheduled { subject, made, taken, needs: Vec::new(), takes: Vec::new(), lacks: None }
    }

    #[test]
    fn a_snapshot_is_begun_once_in_a_period_and_half_a_period_after_the_last() {
        let one = hourly(&["2026-11-27T09:20:00Z"]);
        assert!(may_begin(&one, None, at("2026-11-27T10:00:00Z", 1000)));
        assert!(!may_begin(&one, None, at("2026-11-27T09:59:00Z", 1000)));
        // A failed one is not retried in its period.
        let failed = one.made.attempt(at("2026-11-27T10:00:00Z", 1000));
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
        let last = |up| Attempt { period: 0, skipped: None, up: Duration::from_secs(up) };
        assert_eq!(rest(&one, None, at("2026-11-27T10:10:00Z", 1000)).as_secs(), 3000);
        assert_eq!(rest(&one, Some(&last(1000)), at("2026-11-27T10:10:00Z", 1000)).as_secs(), 3000);
        // In a period without a snapshot, half a period after the last one.
        assert_eq!(rest(&one, Some(&last(1000)), at("2026-11-27T11:00:00Z", 1600)).as_secs(), 1200);
        assert_eq!(rest(&one, None, at("2026-11-27T11:00:00Z", 1600)), Duration::ZERO);
        // After a failure, not before the next period.
        let failed = one.made.attempt(at("2026-11-27T11:30:00Z", 1000));
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

    #[test]
    fn a_failed_backup_is_tried_each_hour_and_one_that_was_left_out_in_the_next_period() {
        let target = Uuid::new_v4();
        let daily = Made::Backups(BackupSchedule { target, hourly: 0, daily: 7, weekly: 0, monthly: 0 });
        let one = of(daily, &["2026-11-26T00:00:00Z"]);
        let begun = at("2026-11-27T00:00:00Z", 1000);
        assert!(may_begin(&one, None, begun));
        let failed = one.made.attempt(begun);
        assert!(!may_begin(&one, Some(&failed), at("2026-11-27T00:59:59Z", 4599)));
        assert!(may_begin(&one, Some(&failed), at("2026-11-27T01:00:00Z", 4600)));
        assert_eq!(rest(&one, Some(&failed), at("2026-11-27T00:10:00Z", 1600)).as_secs(), 3000);
        // The one of the day before is still being made, and for longer than a day.
        let (before, since) = (one.period(begun) - 1, Duration::from_secs(1000));
        let later = at("2026-11-27T02:00:00Z", 90_000);
        assert!(must_skip(&one, (before, since), None, later) && !must_skip(&one, (before + 1, since), None, later));
        assert!(!must_skip(&one, (before, Duration::from_secs(80_000)), None, later), "it began late");
        let skipped = Attempt { skipped: Some(one.period(begun)), ..failed };
        assert!(!must_skip(&one, (before, since), Some(&skipped), later));
        assert!(!may_begin(&one, Some(&skipped), at("2026-11-27T10:00:00Z", 37_000)));
        assert!(may_begin(&one, Some(&skipped), at("2026-11-28T00:00:00Z", 87_400)));
        // It was made.
        let made = of(daily, &["2026-11-27T00:00:00Z"]);
        assert!(!may_begin(&made, None, at("2026-11-27T23:59:00Z", 90_000)));
        assert_eq!(rest(&made, Some(&failed), at("2026-11-27T12:00:00Z", 44_200)).as_secs(), 12 * 3600);
        assert!(may_begin(&made, None, at("2026-12-24T09:00:00Z", 5)), "one that was missed is made, once");
    }
}
