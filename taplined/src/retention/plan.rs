//! Which scheduled snapshots of a VDI or a VM are destroyed, and when the next one is due: pure functions of the
//! snapshots that exist, and of the time.
//!
//! It knows no clock, no VDI and no VM. The rule is in docs/decisions/0042-retention.md. Invariants: the time alone
//! destroys nothing, only a newer snapshot does; each snapshot that is taken makes at most as many superfluous as there
//! are; one whose time has not come yet, because the clock was ahead, is neither counted nor destroyed; what is kept
//! never grows when a snapshot is destroyed.

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
    /// The time of its state.
    pub at: Timestamp,
}

/// A part of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Period {
    Hour,
    Day,
    Week,
    Month,
}

impl Period {
    /// The number of the period that a time is in. Later periods have higher numbers.
    pub fn of(self, at: Timestamp) -> i64 {
        let days = at.as_second().div_euclid(DAY);
        match self {
            Period::Hour => at.as_second().div_euclid(HOUR),
            Period::Day => days,
            // The first day of all was a Thursday.
            Period::Week => (days + 3).div_euclid(7),
            Period::Month => {
                let date = at.to_zoned(TimeZone::UTC).date();
                i64::from(date.year()) * 12 + i64::from(date.month())
            }
        }
    }

    /// The shortest time that one lasts.
    pub fn length(self) -> SignedDuration {
        SignedDuration::from_secs(match self {
            Period::Hour => HOUR,
            Period::Day => DAY,
            Period::Week => 7 * DAY,
            Period::Month => 28 * DAY,
        })
    }

    /// How long it is until the next one begins; of a month, until the next day.
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

/// The periods of a schedule, the shortest first, and how many of each are kept.
fn periods(schedule: &Retention) -> impl Iterator<Item = (Period, usize)> {
    let Retention { hourly, daily, weekly, monthly } = *schedule;
    let all = [(Period::Hour, hourly), (Period::Day, daily), (Period::Week, weekly), (Period::Month, monthly)];
    all.into_iter().filter(|(_, number)| *number > 0).map(|(period, number)| (period, usize::from(number)))
}

/// The period in each of which a snapshot is taken.
pub fn interval(schedule: &Retention) -> Period {
    periods(schedule).map(|(period, _)| period).next().unwrap_or(Period::Month)
}

/// Whether a snapshot is due: there is none of this period.
pub fn is_due(schedule: &Retention, taken: &[Taken], now: Timestamp) -> bool {
    let period = interval(schedule);
    !taken.iter().any(|taken| period.of(taken.at) == period.of(now))
}

/// The snapshots that are destroyed, the oldest first.
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
