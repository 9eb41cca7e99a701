//! Periods of the calendar, and which states a rule retains: the newest of each of the newest N periods that have one.
//!
//! The rule of schedules of snapshots and of backup targets (docs/decisions/0042-retention.md). It is about positions
//! in an order, and knows neither clocks nor what the states are: which of them are counted, and what "newest" means,
//! is decided by the caller. Invariants: whether a state is retained depends on the other states only, never on the
//! time now; the newest state is retained by every rule with a number.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp};

const HOUR: i64 = 3600;
const DAY: i64 = 24 * HOUR;

/// A period of the calendar, in UTC. Weeks begin on Monday.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Period {
    /// An hour.
    Hour,
    /// A day.
    Day,
    /// A week.
    Week,
    /// A month.
    Month,
}

impl Period {
    /// The number of the period that contains a time, in seconds since the epoch. Later periods have higher numbers.
    pub fn of(self, seconds: i64) -> i64 {
        let days = seconds.div_euclid(DAY);
        match self {
            Period::Hour => seconds.div_euclid(HOUR),
            Period::Day => days,
            // The first day of the epoch was a Thursday.
            Period::Week => days.saturating_add(3).div_euclid(7),
            Period::Month => Timestamp::from_second(seconds).map_or(i64::MAX, |moment| {
                let date = moment.to_zoned(TimeZone::UTC).date();
                i64::from(date.year()) * 12 + i64::from(date.month())
            }),
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
        let (length, offset) = match self {
            Period::Hour => (HOUR, 0),
            Period::Day | Period::Month => (DAY, 0),
            Period::Week => (7 * DAY, 3 * DAY),
        };
        SignedDuration::from_secs(length - (now.as_second() + offset).rem_euclid(length))
    }
}

/// Of how many periods of each kind the newest state is retained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Hours.
    pub hourly: u16,
    /// Days.
    pub daily: u16,
    /// Weeks.
    pub weekly: u16,
    /// Months.
    pub monthly: u16,
}

impl Rule {
    /// The kinds of periods that have a number, the shortest first, each with its number.
    pub fn periods(self) -> impl Iterator<Item = (Period, usize)> {
        let Rule { hourly, daily, weekly, monthly } = self;
        let all = [(Period::Hour, hourly), (Period::Day, daily), (Period::Week, weekly), (Period::Month, monthly)];
        all.into_iter().filter(|(_, number)| *number > 0).map(|(period, number)| (period, usize::from(number)))
    }

    /// The shortest period that has a number: a schedule has a state made in each.
    pub fn interval(self) -> Period {
        self.periods().map(|(period, _)| period).next().unwrap_or(Period::Month)
    }

    /// The positions of the states that are retained, among states of these times (in seconds), the newest first.
    pub fn retained(self, newest_first: &[i64]) -> BTreeSet<usize> {
        let mut retained = BTreeSet::new();
        for (period, number) in self.periods() {
            let mut seen = BTreeSet::new();
            for (position, seconds) in newest_first.iter().enumerate() {
                if seen.len() < number && seen.insert(period.of(*seconds)) {
                    retained.insert(position);
                }
            }
        }
        retained
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn seconds(at: &str) -> i64 {
        at.parse::<Timestamp>().unwrap().as_second()
    }

    #[test]
    fn weeks_begin_on_monday_and_months_on_their_first_day() {
        let same = |period: Period, one: &str, other: &str| period.of(seconds(one)) == period.of(seconds(other));
        assert!(same(Period::Week, "2026-11-23T00:00:00Z", "2026-11-29T23:59:59Z"));
        assert!(!same(Period::Week, "2026-11-29T23:59:59Z", "2026-11-30T00:00:00Z"));
        assert!(same(Period::Month, "2026-11-01T00:00:00Z", "2026-11-30T23:59:59Z"));
        assert!(!same(Period::Month, "2026-11-30T23:59:59Z", "2026-12-01T00:00:00Z"));
        assert!(!same(Period::Month, "2026-11-30T00:00:00Z", "2025-11-30T00:00:00Z"));
        assert_eq!((Period::Month.of(i64::MAX), Period::Week.of(i64::MAX) > 0), (i64::MAX, true));
        let now: Timestamp = "2026-11-27T11:30:00Z".parse().unwrap();
        for (period, rest) in [(Period::Hour, 1800), (Period::Day, 12 * HOUR + 1800), (Period::Week, 3 * DAY - 41_400)]
        {
            assert_eq!(period.rest(now).as_secs(), rest, "{period:?}");
            let next = now + period.rest(now);
            assert_eq!(period.of(next.as_second()), period.of(now.as_second()) + 1, "{period:?}");
            assert_eq!(period.rest(next).as_secs(), period.length().as_secs());
        }
    }

    #[test]
    fn the_newest_state_of_each_period_that_has_one_is_retained() {
        let times = ["2026-11-30T10:30:00Z", "2026-11-30T10:00:00Z", "2026-11-30T08:00:00Z", "2026-11-20T08:00:00Z"];
        let times = times.map(seconds);
        let retained = |rule: Rule| rule.retained(&times).into_iter().collect::<Vec<_>>();
        assert_eq!(retained(Rule { hourly: 2, ..Rule::default() }), [0, 2]);
        assert_eq!(retained(Rule { hourly: 1, daily: 2, ..Rule::default() }), [0, 3]);
        assert_eq!(retained(Rule::default()), [0; 0]);
        assert_eq!(Rule { daily: 1, monthly: 1, ..Rule::default() }.interval(), Period::Day);
    }
}
