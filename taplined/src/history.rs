//! The history of a day: rates and latencies of each plugged VBD by minute, for plots.
//!
//! Invariants: memory and file are bounded ([`file`]); a minute is the difference of two readings of the same
//! statistics page, so a disk that is replugged has no entry for that minute; a minute without requests has no entry.
//! Damage to the history never stops the daemon.

mod file;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{HistoryPoint, VbdHistory};
use jiff::Timestamp;
use stats::{Histogram, Kind};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::statistics::{self, DiskFilter, Read};
use crate::task::blocking;
use file::File;

/// Length of a step in seconds.
const STEP: i64 = 60;

/// Number of steps kept: a day.
const KEPT: i64 = 24 * 60;

/// Maximum number of VBDs recorded per minute, the busiest ones. At 64 bytes each, a day needs 96 MB at most.
const DISKS_MAX: usize = 1024;

/// A minute of a VBD: reads, writes, bytes read and written per second, and mean and p99 latency in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Minute(u32, u32, u64, u64, u32, u32);

/// The minutes of a VBD, each with its number since 1970, oldest first.
type Minutes = VecDeque<(i64, Minute)>;

/// The minutes of each VBD.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<HashMap<Uuid, Minutes>>>);

/// A reading of a page, to be subtracted from the next one.
#[derive(Debug)]
struct Reading {
    vbd: Uuid,
    /// When the page was created: a new page has new counters.
    created: u64,
    at_ns: u64,
    reads: u64,
    writes: u64,
    read_bytes: u64,
    written_bytes: u64,
    busy_ns: u64,
    requests: u64,
    latencies: Histogram,
}

impl Reading {
    fn of(read: &Read) -> Reading {
        let kind = |kind: Kind| read.snapshot.kind(kind);
        let histogram = |kind| read.reader.histogram(kind, None).unwrap_or_default();
        let all = read.snapshot.all_kinds();
        Reading {
            vbd: read.disk.vbd.uuid,
            created: read.snapshot.created,
            at_ns: read.snapshot.read,
            reads: kind(Kind::Read).count(),
            writes: kind(Kind::Write).count(),
            read_bytes: kind(Kind::Read).bytes(),
            written_bytes: kind(Kind::Write).bytes(),
            busy_ns: all.sum_of_all(),
            requests: all.count(),
            latencies: Kind::ALL.iter().fold(Histogram::default(), |sum, kind| sum.with(&histogram(*kind))),
        }
    }

    /// The minute between an earlier reading and this one; `None` without requests, or if they are of different
    /// pages.
    fn since(&self, before: &Reading) -> Option<Minute> {
        let ns = self.at_ns.checked_sub(before.at_ns).filter(|ns| *ns > 0 && self.created == before.created)?;
        let requests = self.requests.checked_sub(before.requests).filter(|requests| *requests > 0)?;
        let rate = |now: u64, was: u64| {
            let product = u128::from(now.saturating_sub(was)) * 1_000_000_000;
            u64::try_from(product.div_ceil(u128::from(ns))).unwrap_or(u64::MAX)
        };
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let mean_ns = self.busy_ns.saturating_sub(before.busy_ns) / requests;
        let p99_ns = self.latencies.since(&before.latencies).quantile(0.99).unwrap_or(mean_ns);
        Some(Minute(
            small(rate(self.reads, before.reads)),
            small(rate(self.writes, before.writes)),
            rate(self.read_bytes, before.read_bytes),
            rate(self.written_bytes, before.written_bytes),
            small(mean_ns / 1000),
            small(p99_ns / 1000),
        ))
    }
}

impl Minute {
    fn requests(&self) -> u64 {
        u64::from(self.0) + u64::from(self.1)
    }
}

impl History {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Minutes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a minute and drops those older than a day. After the clock was set back, later minutes are dropped: they
    /// would hide new ones.
    fn add(&self, number: i64, minutes: &[(Uuid, Minute)]) {
        let mut all = self.lock();
        for known in all.values_mut() {
            known.retain(|(at, _)| *at < number && *at + KEPT > number);
        }
        for (vbd, minute) in minutes {
            all.entry(*vbd).or_default().push_back((number, *minute));
        }
        all.retain(|_, known| !known.is_empty());
    }

    /// The last day of a VBD. Copies up to 1,440 points.
    pub fn of(&self, vbd: Uuid) -> VbdHistory {
        let all = self.lock();
        let points = all.get(&vbd).into_iter().flatten().filter_map(|(number, minute)| {
            let Minute(reads, writes, read_bytes, written_bytes, mean_us, p99_us) = *minute;
            Some(HistoryPoint {
                at: Timestamp::from_second(number * STEP).ok()?,
                reads: reads.into(),
                writes: writes.into(),
                read_bytes,
                written_bytes,
                mean_ns: u64::from(mean_us) * 1000,
                p99_ns: u64::from(p99_us) * 1000,
            })
        });
        VbdHistory { vbd, step: STEP.unsigned_abs(), points: points.collect() }
    }
}

/// The number of the current minute, and the time until it ends.
fn present() -> (i64, Duration) {
    let seconds = Timestamp::now().as_second();
    (seconds.div_euclid(STEP), Duration::from_secs((STEP - seconds.rem_euclid(STEP)).unsigned_abs()))
}

/// Loads the history of earlier daemons, then reads all pages at the end of each minute, for the lifetime of the
/// daemon.
pub async fn keep(daemon: Daemon) {
    let directory = daemon.config.state_directory.clone();
    let opened = blocking("read the history", move || Ok(File::open(&directory, present().0 - KEPT))).await;
    let (mut file, kept) = match opened {
        Ok((file, kept)) => (Some(file), kept),
        Err(problem) => {
            tracing::warn!("the history is not kept: {problem}");
            (None, Vec::new())
        }
    };
    for (number, minutes) in kept {
        daemon.history.add(number, &minutes);
    }
    let mut before: HashMap<Uuid, Reading> = HashMap::new();
    loop {
        let (number, rest) = present();
        tokio::time::sleep(rest).await;
        let Ok(readings) = statistics::read(&daemon, DiskFilter::default(), |read| Reading::of(&read)).await else {
            continue;
        };
        let mut minutes: Vec<(Uuid, Minute)> =
            readings.iter().filter_map(|now| Some((now.vbd, now.since(before.get(&now.vbd)?)?))).collect();
        minutes.sort_by_key(|(_, minute)| std::cmp::Reverse(minute.requests()));
        minutes.truncate(DISKS_MAX);
        before = readings.into_iter().map(|reading| (reading.vbd, reading)).collect();
        if minutes.is_empty() {
            continue;
        }
        daemon.history.add(number, &minutes);
        if let Some(open) = file.take() {
            file = blocking("write the history", move || Ok(open.append(number, &minutes))).await.ok();
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn reading(created: u64, at_s: u64, requests: u64) -> Reading {
        Reading {
            vbd: Uuid::nil(),
            created,
            at_ns: at_s * 1_000_000_000,
            reads: requests,
            writes: 0,
            read_bytes: requests * 4096,
            written_bytes: 0,
            busy_ns: requests * 50_000,
            requests,
            latencies: Histogram::of([(100, requests)]),
        }
    }

    #[test]
    fn a_minute_has_rates_a_second_and_the_mean_latency() {
        let minute = reading(1, 160, 6500).since(&reading(1, 100, 500)).unwrap();
        let Minute(reads, writes, read_bytes, written_bytes, mean_us, _) = minute;
        assert_eq!((reads, writes, read_bytes, written_bytes, mean_us), (100, 0, 409_600, 0, 50));
    }

    #[test]
    fn an_idle_minute_and_another_page_have_no_entry() {
        assert_eq!(reading(1, 160, 500).since(&reading(1, 100, 500)), None);
        assert_eq!(reading(2, 160, 6500).since(&reading(1, 100, 500)), None);
        assert_eq!(reading(1, 160, 400).since(&reading(1, 100, 500)), None);
        assert_eq!(reading(1, 100, 600).since(&reading(1, 100, 500)), None);
    }

    #[test]
    fn a_day_is_kept_and_a_clock_set_back_forgets_what_is_later() {
        let (history, vbd) = (History::default(), Uuid::from_u128(7));
        let minute = Minute(1, 2, 3, 4, 5, 6);
        let numbers = |history: &History| {
            history.lock().get(&vbd).into_iter().flatten().map(|(number, _)| *number).collect::<Vec<_>>()
        };
        for number in 1..=KEPT + 10 {
            history.add(number, &[(vbd, minute)]);
        }
        assert_eq!(numbers(&history), (11..=KEPT + 10).collect::<Vec<_>>());
        history.add(20, &[(vbd, minute)]);
        assert_eq!(numbers(&history), (11..=20).collect::<Vec<_>>());
        assert_eq!(history.of(vbd).points.len(), 10);
        history.add(KEPT * 3, &[]);
        assert!(history.lock().is_empty(), "a VBD that is gone is forgotten");
    }
}
