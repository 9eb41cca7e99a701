//! Retries failed operations after a delay: the failure may have consumed the only event that would trigger another
//! attempt.
//!
//! It knows nothing about the operations. Invariants: repeated failures are retried at growing intervals, so that a
//! permanent failure does not keep a CPU busy; the timer runs only while a retry is pending.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::Xen;
use super::event::Log;
use crate::Timer;

/// The first delay, which doubles with each failure.
const DELAY_MIN: Duration = Duration::from_millis(50);

/// The maximum delay, which a guest may have to wait after the cause of the failure has ended.
const DELAY_MAX: Duration = Duration::from_secs(5);

/// The timer for pending retries.
pub struct RetryTimer {
    timer: Timer,
    /// The number of failures since the last success.
    failures: u32,
    is_armed: bool,
}

impl RetryTimer {
    /// Creates a timer that is not armed.
    pub fn new() -> std::io::Result<RetryTimer> {
        Ok(RetryTimer { timer: Timer::new()?, failures: 0, is_armed: false })
    }

    /// Arms the timer after a failure.
    pub fn arm(&mut self, log: &mut Log) {
        if self.is_armed {
            return;
        }
        let delay = DELAY_MIN.saturating_mul(1 << self.failures).min(DELAY_MAX);
        self.failures = (self.failures + 1).min(u32::BITS - 1);
        match self.timer.set(delay) {
            Ok(()) => self.is_armed = true,
            Err(error) => log.failed("cannot set a timer", &error),
        }
    }

    /// Returns true if the timer is running.
    pub fn is_armed(&self) -> bool {
        self.is_armed
    }

    /// Processes the expiry of the timer.
    pub fn expired(&mut self) {
        // The value read is the number of expirations; reading it clears the readiness.
        rustix::io::read(&self.timer, &mut [0; 8]).ok();
        self.is_armed = false;
    }

    /// Resets the delay, after the operation has succeeded or is no longer needed.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}

impl AsFd for RetryTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

/// A count of consecutive failures of one operation: retried immediately a few times, then with delays.
#[derive(Default)]
pub struct RetryBudget {
    failures: u32,
}

impl RetryBudget {
    /// The number of immediate retries.
    const ATTEMPTS: u32 = 3;

    /// Records a failure, and retries, without limit.
    pub fn failed(&mut self, xen: &mut Xen, log: &mut Log) {
        if !self.try_again(xen) {
            xen.retry.arm(log);
        }
    }

    /// Records a failure, and retries immediately a bounded number of times. Returns `false` when these are used up.
    pub fn try_again(&mut self, xen: &Xen) -> bool {
        self.failures += 1;
        let again = self.failures <= RetryBudget::ATTEMPTS;
        if again {
            xen.wake();
        }
        again
    }

    /// Records a success.
    pub fn succeeded(&mut self) {
        self.failures = 0;
    }
}
