//! Which scheduled snapshots of a VDI or a VM are destroyed, and when the next one is due: pure functions of the
//! existing snapshots and the time.
//!
//! It knows no clock, no VDI and no VM. The rule is in docs/decisions/0042-retention.md. Invariants: the passage of
//! time alone destroys nothing, only a newer snapshot does; each new snapshot makes at most one per kind of period
//! superfluous; a snapshot from the future, taken while the clock was ahead, is neither counted nor destroyed; the
//! set of kept snapshots never grows when a snapshot is destroyed.

use std::collections::BTreeSet;

use api::Retention;
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// A scheduled snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// The snapshot.
    pub snapshot: Uuid,
    /// The time of its data.
    pub at: Timestamp,
}

/// A period of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Period {
    Hour,
    Day,
    Week,
    Month,
}

impl Period {
    /// The number of the period that contains a time. Later periods have higher numbers.
    pub fn of(self, at: Timestamp) -> i64 {
        let days = at.as_second().div_euclid(DAY);
        match self {
            Period::Hour => at.as_second().div_euclid(HOUR),
            Period::Day => days,
            // The first day of the epoch was a Thursday.
            Period::Week => (days + 3).div_euclid(7),
            Period::Month => {
                let date = at.to_zoned(TimeZone::UTC).date();
                i64::from(date.year()) * 12 + i64::from(date.month())
            }
        }
    }

    /// The minimum length of a period.
    pub fn length(self) -> SignedDuration {
        SignedDuration::from_secs(match self {
            Period::Hour => HOUR,
            Period::Day => DAY,
            Period::Week => 7 * DAY,
            Period::Month => 28 * DAY,
        })
    }

    /// Time until the next period begins; for a month, until the next day.
    pub fn rest(self, now: Timestamp) -> SignedDuration {
        let seconds = now.as_second();
        let (length, offset) = match self {
            Period::Hour => (HOUR, 0),
            Period::Day | Period::Month => (DAY, 0),
            Period::Week => (7 * DAY, 3 * DAY),
        };
        SignedDuration::from_secs(length - (seconds + offset).rem_euclid(length))
    }
}

/// The periods of a schedule, shortest first, each with the number of snapshots to keep.
fn periods(schedule: &Retention) -> impl Iterator<Item = (Period, usize)> {
    let Retention { hourly, daily, weekly, monthly } = *schedule;
    let all = [(Period::Hour, hourly), (Period::Day, daily), (Period::Week, weekly), (Period::Month, monthly)];
    all.into_iter().filter(|(_, number)| *number > 0).map(|(period, number)| (period, usize::from(number)))
}

/// The period for each of which a snapshot is taken.
pub fn interval(schedule: &Retention) -> Period {
    periods(schedule).map(|(period, _)| period).next().unwrap_or(Period::Month)
}

/// Whether a snapshot is due: there is none of this period.
pub fn is_due(schedule: &Retention, taken: &[Taken], now: Timestamp) -> bool {
    let period = interval(schedule);
    !taken.iter().any(|taken| period.of(taken.at) == period.of(now))
}

/// The snapshots to destroy, oldest first.
pub fn superfluous(schedule: &Retention, taken: &[Taken], now: Timestamp) -> Vec<Uuid> {
    let mut counted: Vec<&Taken> = taken.iter().filter(|taken| taken.at <= now).collect();
    counted.sort_by_key(|taken| (taken.at, taken.snapshot));
    let mut kept = BTreeSet::new();
    for (period, number) in periods(schedule) {
        let mut seen = BTreeSet::new();
        for taken in counted.iter().rev() {
            if seen.len() < number && seen.insert(period.of(taken.at)) {
                kept.insert(taken.snapshot);
            }
        }
    }
    counted.into_iter().map(|taken| taken.snapshot).filter(|snapshot| !kept.contains(snapshot)).collect()
}

#[cfg(test)]
mod test;
