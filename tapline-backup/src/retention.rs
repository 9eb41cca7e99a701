//! Which backups of a disk are superfluous by a rule: a pure function of the existing backups and the time.
//!
//! The rule is that of schedules of snapshots (docs/decisions/0042-retention.md), with the last N in addition.
//! Newer means published later, whatever the clocks of hosts show. Invariants: the passage of time alone makes nothing
//! superfluous, only a newer backup does, so the newest one never is; a backup from the future, made while the clock
//! was ahead, is neither counted nor superfluous.

use std::collections::BTreeSet;

use arguments::backup::Keep;
use backup::{Id, Record};
use jiff::Timestamp;
use jiff::tz::TimeZone;

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// A period of the calendar, in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Period {
    Hour,
    Day,
    Week,
    Month,
}

impl Period {
    /// The number of the period that contains a time. Later periods have higher numbers.
    fn of(self, seconds: i64) -> i64 {
        let days = seconds.div_euclid(DAY);
        match self {
            Period::Hour => seconds.div_euclid(HOUR),
            Period::Day => days,
            // The first day of the epoch was a Thursday.
            Period::Week => (days + 3).div_euclid(7),
            Period::Month => Timestamp::from_second(seconds).map_or(i64::MAX, |moment| {
                let date = moment.to_zoned(TimeZone::UTC).date();
                i64::from(date.year()) * 12 + i64::from(date.month())
            }),
        }
    }
}

/// The superfluous ones of the backups of one disk, which are in the order in which they were published.
pub fn superfluous(keep: &Keep, taken: &[&Record], now: u64) -> Vec<Id> {
    let counted: Vec<&Record> = taken.iter().copied().filter(|record| record.time <= now).collect();
    let number = |kept: Option<u16>| usize::from(kept.unwrap_or(0));
    let last = counted.iter().rev().take(number(keep.last).max(1)).map(|record| record.id);
    let mut kept: BTreeSet<Id> = last.collect();
    let periods = [
        (Period::Hour, keep.hourly),
        (Period::Day, keep.daily),
        (Period::Week, keep.weekly),
        (Period::Month, keep.monthly),
    ];
    for (period, most) in periods {
        let mut seen = BTreeSet::new();
        for record in counted.iter().rev() {
            let seconds = i64::try_from(record.time).unwrap_or(i64::MAX);
            if seen.len() < number(most) && seen.insert(period.of(seconds)) {
                kept.insert(record.id);
            }
        }
    }
    counted.into_iter().map(|record| record.id).filter(|id| !kept.contains(id)).collect()
}

#[cfg(test)]
mod test {
    use backup::Digest;

    use super::*;

    fn record(time: u64) -> Record {
        let id = Id::from_bytes(u128::from(time).to_be_bytes());
        Record { id, disk: Id::of_name("web"), label: "web".into(), time, len: 0, content: Digest::HOLE, base: None }
    }

    fn superfluous_times(keep: Keep, times: &[u64], now: u64) -> Vec<u64> {
        let records: Vec<Record> = times.iter().map(|time| record(*time)).collect();
        let taken: Vec<&Record> = records.iter().collect();
        let chosen = superfluous(&keep, &taken, now);
        records.iter().filter(|record| chosen.contains(&record.id)).map(|record| record.time).collect()
    }

    #[test]
    fn a_backup_that_was_made_while_the_clock_was_behind_is_the_newest() {
        let last = Keep { last: Some(1), ..Keep::default() };
        assert_eq!(superfluous_times(last, &[50, 20], 100), [50]);
        let weekly = Keep { weekly: Some(2), ..Keep::default() };
        let week = 7 * 86_400;
        assert_eq!(superfluous_times(weekly, &[8 * week, 9 * week, week], 10 * week), [8 * week]);
    }

    #[test]
    fn the_last_of_each_period_is_retained_whatever_the_time_is() {
        let day = 86_400;
        let times = [10 * day, 10 * day + 5, 11 * day, 14 * day + 1, 14 * day + 2];
        let daily = Keep { daily: Some(3), ..Keep::default() };
        assert_eq!(superfluous_times(daily, &times, 20 * day), [10 * day, 14 * day + 1]);
        assert_eq!(superfluous_times(daily, &times, 9000 * day), [10 * day, 14 * day + 1]);
        let last = Keep { last: Some(2), ..Keep::default() };
        assert_eq!(superfluous_times(last, &times, 20 * day), times[..3]);
        // 1970-01-11 was a Sunday, 1970-01-12 and 15 of the next week.
        let weekly = Keep { weekly: Some(1), ..Keep::default() };
        assert_eq!(superfluous_times(weekly, &times, 20 * day), times[..4]);
        let both = Keep { last: Some(1), monthly: Some(2), ..Keep::default() };
        assert_eq!(superfluous_times(both, &[day, 31 * day, 32 * day], 99 * day), [31 * day]);
    }

    #[test]
    fn a_backup_from_the_future_is_neither_counted_nor_superfluous() {
        let last = Keep { last: Some(1), ..Keep::default() };
        assert_eq!(superfluous_times(last, &[1, 2, 900], 100), [1]);
    }
}
