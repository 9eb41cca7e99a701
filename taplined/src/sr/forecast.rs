//! Predicts when a repository will be full, by linear regression over the usage of the last hours.
//!
//! A pure function of samples. All sums are of integers, which cannot overflow for the few and recent samples that
//! [`Samples`] keeps.

use std::collections::VecDeque;

use api::Forecast;
use jiff::{SignedDuration, Timestamp};

/// Seconds between two samples.
const EVERY: i64 = 60;

/// Seconds for which samples are kept: six hours, and so no more than 361 samples.
const KEPT: i64 = 6 * 3600;

/// A rate observed for less time is meaningless.
const WATCHED_MIN: i64 = 600;

/// Forecasts beyond ten years are useless.
const FAR: i128 = 10 * 365 * 86_400;

const DAY: i128 = 86_400;

/// Samples of the used space over time.
#[derive(Clone, Debug, Default)]
pub struct Samples(VecDeque<(Timestamp, u64)>);

impl Samples {
    /// Adds a sample, unless the last one is recent.
    pub fn note(&mut self, at: Timestamp, used: u64) {
        match self.0.back() {
            // The clock was set back: the samples are useless.
            Some((last, _)) if at < *last => self.0.clear(),
            Some((last, _)) if seconds(*last, at) < EVERY => return,
            _ => {}
        }
        self.0.retain(|(then, _)| seconds(*then, at) <= KEPT);
        self.0.push_back((at, used));
    }

    /// When `free` bytes will be used up; `None` if usage does not grow, or cannot be predicted yet.
    pub fn forecast(&self, free: u64) -> Option<Forecast> {
        let ((first, _), (last, _)) = (self.0.front()?, self.0.back()?);
        let watched = seconds(*first, *last);
        if watched < WATCHED_MIN {
            return None;
        }
        // Least squares: the slope is (n Σxy − Σx Σy) / (n Σx² − (Σx)²).
        let points = self.0.iter().map(|(at, used)| (i128::from(seconds(*first, *at)), i128::from(*used)));
        let (n, x, y, xy, xx) = points
            .fold((0, 0, 0, 0, 0), |(n, sx, sy, sxy, sxx), (x, y)| (n + 1, sx + x, sy + y, sxy + x * y, sxx + x * x));
        let (rise, run): (i128, i128) = (n * xy - x * y, n * xx - x * x);
        if rise <= 0 || run <= 0 {
            return None;
        }
        let bytes_per_day = u64::try_from(rise.saturating_mul(DAY) / run).ok().filter(|rate| *rate > 0)?;
        let left = i128::from(free).saturating_mul(run) / rise;
        let left = i64::try_from(left.min(FAR)).ok()?;
        if i128::from(left) >= FAR {
            return None;
        }
        let full_at = last.checked_add(SignedDuration::from_secs(left)).ok()?;
        Some(Forecast { full_at, bytes_per_day, watched_seconds: watched.unsigned_abs() })
    }
}

/// Seconds between two times, not negative.
fn seconds(from: Timestamp, to: Timestamp) -> i64 {
    to.as_second().saturating_sub(from.as_second()).max(0)
}

#[cfg(test)]
mod test {
    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn of(points: impl Iterator<Item = (i64, u64)>) -> Samples {
        let mut samples = Samples::default();
        points.for_each(|(second, used)| samples.note(at(second), used));
        samples
    }

    #[test]
    fn a_constant_rate_predicts_the_full_time() {
        // A mebibyte a minute for an hour, and sixty are left.
        let samples = of((0..=60).map(|minute: i64| (minute * 60, minute.unsigned_abs() << 20)));
        let forecast = samples.forecast(60 << 20).unwrap();
        assert_eq!(forecast.full_at, at(7200));
        assert_eq!((forecast.bytes_per_day, forecast.watched_seconds), (1440 << 20, 3600));
        assert_eq!(samples.forecast(0).unwrap().full_at, at(3600));
    }

    #[test]
    fn a_single_jump_does_not_dominate_the_forecast() {
        let saw =
            |minute: i64| (minute * 60, 1_000_000 + 1000 * minute.unsigned_abs() + if minute == 30 { 5000 } else { 0 });
        let forecast = of((0..=60).map(saw)).forecast(1_000_000).unwrap();
        assert!((1_400_000..1_500_000).contains(&forecast.bytes_per_day), "{forecast:?}");
    }

    #[test]
    fn constant_usage_is_never_full() {
        assert_eq!(of((0..=60).map(|minute| (minute * 60, 1 << 30))).forecast(1), None);
        assert_eq!(of((0..=60).map(|minute: i64| (minute * 60, 100 - minute.unsigned_abs()))).forecast(1), None);
        // Four bytes a day on a petabyte: never within ten years.
        let slow = of((0..=1).map(|time: i64| (time * KEPT, time.unsigned_abs())));
        assert_eq!(slow.forecast(1 << 50), None);
    }

    #[test]
    fn a_short_observation_gives_no_forecast() {
        assert_eq!(Samples::default().forecast(1), None);
        assert_eq!(of([(0, 1), (300, 1 << 30)].into_iter()).forecast(1), None);
        assert!(of([(0, 1), (600, 1 << 30)].into_iter()).forecast(1).is_some());
    }

    #[test]
    fn samples_are_bounded_and_the_largest_do_not_overflow() {
        let samples = of((0..2000).map(|minute: i64| (minute * 60, u64::MAX - 2000 + minute.unsigned_abs())));
        assert_eq!(samples.0.len(), 361);
        assert!(samples.forecast(u64::MAX).is_none());
        assert_eq!(samples.forecast(60).unwrap().full_at, at(1999 * 60 + 3600));
        let mut sudden = of([(0, 0), (3600, u64::MAX / 32)].into_iter());
        assert!(sudden.forecast(u64::MAX).is_some());
        sudden.note(at(1), 7);
        assert_eq!(sudden.0.len(), 1, "the clock was set back");
    }
}
