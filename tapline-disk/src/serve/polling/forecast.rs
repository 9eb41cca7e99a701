//! Forecasts how long storage takes from how long it took before.
//!
//! It keeps a mean of the last waits and their mean deviation, as TCP does for its round trips (RFC 6298, section 2).
//! There is no forecast for a disk that is not busy, nor if waits differ too much.

/// Shorter waits are not worth a nap.
const WAIT_MIN: u64 = 50_000;
/// Longer waits are not typical of storage that is busy with this disk: a drive has failed, or a cache is written back.
const WAIT_MAX: u64 = 2_000_000;
/// How long before the expected time polling begins: at least the time to wake up, and not much more.
const MARGIN: std::ops::RangeInclusive<u64> = 30_000..=120_000;
/// The shortest nap.
const NAP_MIN: u64 = 20_000;

/// The mean of the waits and their mean deviation, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forecast {
    mean: u64,
    deviation: u64,
    /// When the last wait ended.
    ended: u64,
}

/// A sleep followed by polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nap {
    /// The maximum duration of the sleep.
    pub sleep: u64,
    /// The duration of polling after that.
    pub look: u64,
}

impl Forecast {
    /// Adds a wait for storage from `begun` to `ended`.
    pub fn waited(&mut self, begun: u64, ended: u64) {
        let time = ended.saturating_sub(begun);
        self.ended = ended;
        if !(WAIT_MIN..WAIT_MAX).contains(&time) {
            return;
        }
        if self.mean == 0 {
            (self.mean, self.deviation) = (time, time / 2);
            return;
        }
        self.deviation = (self.deviation * 7 + time.abs_diff(self.mean)) / 8;
        self.mean = (self.mean * 7 + time) / 8;
    }

    /// Returns whether there is a forecast: the disk is busy, and has waited for storage recently.
    #[inline]
    pub fn is_of(&self, now: u64) -> bool {
        // Between two waits it works; a disk that is used occasionally would pay for each request.
        self.mean > 0 && now.saturating_sub(self.ended) <= self.mean
    }

    /// Returns how to wait from `now` on, if there is a forecast.
    pub fn nap(&self, now: u64) -> Option<Nap> {
        let margin = (self.deviation * 2).clamp(*MARGIN.start(), *MARGIN.end());
        let sleep = self.mean.saturating_sub(margin);
        let is_regular = self.deviation < self.mean / 4;
        (self.is_of(now) && is_regular && sleep >= NAP_MIN).then_some(Nap { sleep, look: 2 * margin })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// Makes a forecast from waits of these durations, with `between` from one to the next; also returns the time after
    /// them.
    fn after(waits: impl IntoIterator<Item = u64>, between: u64) -> (Forecast, u64) {
        let (mut forecast, mut now) = (Forecast::default(), 1);
        for wait in waits {
            forecast.waited(now, now + wait);
            now += wait + between;
        }
        (forecast, now)
    }

    #[test]
    fn a_busy_disk_sleeps_until_shortly_before_its_storage_is_done() {
        let (forecast, now) = after([300_000; 40], 90_000);
        let nap = forecast.nap(now).unwrap();
        assert_eq!(nap, Nap { sleep: 270_000, look: 60_000 });
    }

    #[test]
    fn a_disk_that_is_used_now_and_then_has_no_forecast() {
        let (forecast, now) = after([100_000; 40], 900_000);
        assert_eq!((forecast.nap(now), forecast.is_of(now)), (None, false));
    }

    #[test]
    fn irregular_storage_has_no_forecast_until_it_becomes_regular() {
        let (mut forecast, mut now) = after([100_000, 900_000].into_iter().cycle().take(40), 50_000);
        assert_eq!((forecast.nap(now), forecast.is_of(now)), (None, true));
        for _ in 0..100 {
            forecast.waited(now, now + 400_000);
            now += 450_000;
        }
        let nap = forecast.nap(now).unwrap();
        assert!((360_000..=370_000).contains(&nap.sleep), "{nap:?}");
    }

    #[test]
    fn waits_too_short_or_too_long_for_a_forecast_do_not_count() {
        let (forecast, now) = after([10_000, 5_000_000_000, 10_000], 1_000);
        assert_eq!(forecast.nap(now), None);
        let (mut forecast, now) = after([300_000; 40], 90_000);
        forecast.waited(now, now + 7_000_000_000);
        assert_eq!(forecast.nap(now + 7_000_000_000).map(|nap| nap.sleep), Some(270_000));
    }
}
