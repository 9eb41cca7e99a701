//! How fast something long goes, and when it will end: bytes done, by time.
//!
//! It knows no clock and prints nothing.

use std::collections::VecDeque;
use std::time::Duration;

use crate::size::readable;

/// The rate is measured over these last seconds, because it predicts the remaining time.
const RATE_OVER: Duration = Duration::from_secs(5);
const BAR_WIDTH: u64 = 30;

/// The pace of one job.
#[derive(Clone, Debug)]
pub struct Pace {
    total: u64,
    done: u64,
    /// Times and the bytes done by then, oldest first; covers [`RATE_OVER`].
    samples: VecDeque<(Duration, u64)>,
}

impl Pace {
    /// A job on `total` bytes begins.
    pub fn new(total: u64) -> Pace {
        Pace { total, done: 0, samples: VecDeque::from([(Duration::ZERO, 0)]) }
    }

    /// Number of bytes of the job.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Number of bytes done.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Sets the number of bytes done.
    pub fn reach(&mut self, done: u64) {
        self.done = done.min(self.total);
    }

    /// Notes what is done after this time.
    pub fn sample(&mut self, elapsed: Duration) {
        self.samples.push_back((elapsed, self.done));
        while self.samples.get(1).is_some_and(|&(at, _)| at + RATE_OVER <= elapsed) {
            self.samples.pop_front();
        }
    }

    /// Bytes per second over the samples; `None` while nothing is done.
    pub fn rate(&self) -> Option<u64> {
        let (&(from, before), &(to, after)) = (self.samples.front()?, self.samples.back()?);
        let ms = u64::try_from(to.checked_sub(from)?.as_millis()).ok()?;
        let rate = after.checked_sub(before)?.saturating_mul(1000).checked_div(ms)?;
        (rate > 0).then_some(rate)
    }

    /// Seconds until the end at this rate.
    pub fn left(&self) -> Option<u64> {
        self.rate().map(|rate| (self.total - self.done) / rate)
    }

    /// The part that is done, of `parts`.
    pub fn share(&self, parts: u64) -> u64 {
        let scaled = u128::from(self.done) * u128::from(parts);
        scaled.checked_div(u128::from(self.total)).and_then(|share| u64::try_from(share).ok()).unwrap_or(parts)
    }

    /// A bar for a terminal.
    pub fn bar(&self) -> String {
        let filled = self.share(BAR_WIDTH);
        (0..BAR_WIDTH).map(|at| if at < filled { '█' } else { '·' }).collect()
    }

    /// Percentage, rate and remaining time, for people.
    pub fn figures(&self) -> String {
        let mut text = format!("{:3} % of {}", self.share(100), readable(self.total));
        if let Some((rate, left)) = self.rate().zip(self.left()) {
            text.push_str(&format!(", {}/s, {} left", readable(rate), clock(left)));
        }
        text
    }
}

/// Formats a duration for people.
pub fn clock(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{}:{:02} min", seconds / 60, seconds % 60),
        _ => format!("{}:{:02} h", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn half_way() -> Pace {
        let mut pace = Pace::new(10 << 30);
        pace.reach(5 << 30);
        pace.sample(Duration::from_secs(10));
        pace
    }

    #[test]
    fn figures_show_percentage_rate_and_remaining_time() {
        assert_eq!(half_way().figures(), " 50 % of 10 GiB, 512 MiB/s, 10 s left");
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let mut pace = half_way();
        pace.sample(Duration::from_secs(11));
        pace.reach(pace.done() + (1 << 20));
        pace.sample(Duration::from_secs(12));
        pace.sample(Duration::from_secs(16));
        assert_eq!(pace.rate(), Some((1 << 20) / 5));
    }

    #[test]
    fn an_empty_job_is_complete_and_has_no_rate() {
        let pace = Pace::new(0);
        assert_eq!(pace.figures(), "100 % of 0 B");
        assert_eq!(pace.bar(), "█".repeat(30));
    }

    #[test]
    fn times_are_short() {
        assert_eq!((clock(59), clock(61), clock(3660)), ("59 s".into(), "1:01 min".into(), "1:01 h".into()));
    }
}
