//! Limits the rate of a merge: it yields to the guest, and stays below the configured rate.
//!
//! It knows time and bytes, but no disk. After each piece it waits as long as the piece has taken, if the guest had
//! requests in the meantime: a merge then takes at most half of the storage's time. Its timer lives as long as the
//! merge.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use transport::Timer;

/// Unused rate is saved up to this much time.
const BURST: Duration = Duration::from_millis(100);

/// The rate limiter of a merge.
#[derive(Debug)]
pub struct RateLimiter {
    timer: Timer,
    /// The maximum of bytes per second.
    rate: Option<u64>,
    /// When the piece in progress began.
    begun: Option<Duration>,
    /// The earliest start of the next piece.
    due: Duration,
    /// The time by which the rate allows what has been copied.
    paid: Duration,
}

impl RateLimiter {
    /// Makes a rate limiter that allows a piece at once.
    pub fn new(rate: Option<u64>, now: Duration) -> io::Result<RateLimiter> {
        Ok(RateLimiter { timer: Timer::new()?, rate, begun: None, due: now, paid: now })
    }

    /// Records that a piece begins.
    pub fn begin(&mut self, now: Duration) {
        self.begun = Some(now);
    }

    /// Records that the piece has ended. `copied`: the bytes written; `guest`: whether the guest had requests
    /// meanwhile.
    pub fn end(&mut self, now: Duration, copied: u64, guest: bool) {
        let Some(begun) = self.begun.take() else { return };
        let courtesy = if guest { now.saturating_sub(begun) } else { Duration::ZERO };
        if let Some(rate) = self.rate {
            let cost = u128::from(copied).saturating_mul(1_000_000_000).checked_div(u128::from(rate)).unwrap_or(0);
            let cost = Duration::from_nanos(u64::try_from(cost).unwrap_or(u64::MAX));
            self.paid = self.paid.max(now.saturating_sub(BURST)).saturating_add(cost);
        }
        self.due = now.saturating_add(courtesy).max(self.paid);
    }

    /// Returns whether a piece may begin; if not, the timer fires when it may.
    pub fn allows(&mut self, now: Duration) -> io::Result<bool> {
        if now >= self.due {
            return Ok(true);
        }
        self.timer.set(self.due.saturating_sub(now))?;
        Ok(false)
    }
}

impl AsFd for RateLimiter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn under_guest_load_each_piece_is_followed_by_an_equal_wait() {
        let mut rate_limiter = RateLimiter::new(None, ms(100)).unwrap();
        assert!(rate_limiter.allows(ms(100)).unwrap());
        rate_limiter.begin(ms(100));
        rate_limiter.end(ms(103), 1 << 20, true);
        assert!(!rate_limiter.allows(ms(105)).unwrap());
        assert!(rate_limiter.allows(ms(106)).unwrap());
    }

    #[test]
    fn an_idle_guest_is_not_waited_for() {
        let mut rate_limiter = RateLimiter::new(None, ms(0)).unwrap();
        rate_limiter.begin(ms(10));
        rate_limiter.end(ms(13), 1 << 20, false);
        assert!(rate_limiter.allows(ms(13)).unwrap());
    }

    #[test]
    fn a_rate_limit_holds_on_average_and_idle_time_is_lost() {
        let mut rate_limiter = RateLimiter::new(Some(1_000_000), ms(0)).unwrap();
        let mut now = ms(0);
        for _ in 0..10 {
            rate_limiter.begin(now);
            rate_limiter.end(now + ms(1), 100_000, false);
            now = rate_limiter.due;
        }
        assert_eq!(now, ms(1000));
        rate_limiter.begin(ms(60_000));
        rate_limiter.end(ms(60_000), 1_000_000, false);
        assert_eq!(rate_limiter.due, ms(60_900));
    }
}
