//! How long storage takes, by how long it took before.
//!
//! A mean of the last waits and their mean deviation, as TCP keeps them of its round trips (RFC 6298, section 2). It
//! forecasts nothing for a disk that is not busy, nor where waits differ too much.

/// Waits below this are not worth a nap.
const LEAST: u64 = 50_000;
/// Longer ones are not storage that is busy with this disk, but a disk that died or a cache that is written back.
const LONGEST: u64 = 2_000_000;
/// How long before the expected time the look begins: what waking up takes, at least, and not much more than that.
const MARGIN: std::ops::RangeInclusive<u64> = 30_000..=120_000;
/// The shortest nap.
const SHORTEST: u64 = 20_000;

/// The mean of the waits, and how much they differ from it. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Forecast {
    mean: u64,
    deviation: u64,
    /// When the last wait ended.
    ended: u64,
}

/// A way to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nap {
    /// To sleep so long at most.
    pub sleep: u64,
    /// Then to look so long.
    pub look: u64,
}

impl Forecast {
    /// Storage was waited for from then until then.
    pub fn waited(&mut self, begun: u64, ended: u64) {
        let time = ended.saturating_sub(begun);
        self.ended = ended;
        if !(LEAST..LONGEST).contains(&time) {
            return;
        }
        if self.mean == 0 {
            (self.mean, self.deviation) = (time, time / 2);
            return;
        }
        self.deviation = (self.deviation * 7 + time.abs_diff(self.mean)) / 8;
        self.mean = (self.mean * 7 + time) / 8;
    }

    /// Whether there is a forecast: the disk is busy, and has waited for storage lately.
    #[inline]
    pub fn is_of(&self, now: u64) -> bool {
        // Between two waits it works; a disk that is used now and then would pay for each request.
        self.mean > 0 && now.saturating_sub(self.ended) <= self.mean
    }

    /// How to wait from `now` on, if a forecast can be made.
    pub fn nap(&self, now: u64) -> Option<Nap> {
        let margin = (self.deviation * 2).clamp(*MARGIN.start(), *MARGIN.end());
        let sleep = self.mean.saturating_sub(margin);
        let is_regular = self.deviation < self.mean / 4;
        (self.is_of(now) && is_regular && sleep >= SHORTEST).then_some(Nap { sleep, look: 2 * margin })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// After waits of these times, with `between` from one to the next; the forecast, and when it is asked.
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
    fn storage_whose_times_differ_too_much_has_none_and_gets_one_when_they_no_longer_do() {
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
