//! What failed and is tried again by ourselves: what failed may have taken with it the only sign that there is
//! something to do.
//!
//! Knows nothing of what it is. Invariants: attempts that fail become rarer, so that nothing that keeps failing keeps a
//! processor busy; the timer runs only while there is something to be tried.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::Machine;
use super::event::Log;
use crate::Timer;

/// The first pause; each is twice as long as the one before.
const FIRST: Duration = Duration::from_millis(50);

/// The longest: what a guest whose disk could be served again waits at most.
const LONGEST: Duration = Duration::from_secs(5);

/// Attempts that have to wait.
pub struct Retry {
    timer: Timer,
    /// Since the last time that something worked.
    failures: u32,
    runs: bool,
}

impl Retry {
    /// Nothing has failed.
    pub fn new() -> std::io::Result<Retry> {
        Ok(Retry { timer: Timer::new()?, failures: 0, runs: false })
    }

    /// Something has failed, and is to be tried again after a pause.
    pub fn arm(&mut self, log: &mut Log) {
        if self.runs {
            return;
        }
        let pause = FIRST.saturating_mul(1u32.checked_shl(self.failures).unwrap_or(u32::MAX)).min(LONGEST);
        self.failures = self.failures.saturating_add(1).min(u32::BITS - 1);
        match self.timer.set(pause) {
            Ok(()) => self.runs = true,
            Err(error) => log.failed("cannot set a timer", &error),
        }
    }

    /// Whether the pause lasts.
    pub fn runs(&self) -> bool {
        self.runs
    }

    /// The pause is over.
    pub fn ran_out(&mut self) {
        // What is read is how often it ran out, and that it is read has it wait for the next time.
        rustix::io::read(&self.timer, &mut [0; 8]).ok();
        self.runs = false;
    }

    /// What had failed has worked, or is not wanted any more: the next pause is short again.
    pub fn worked(&mut self) {
        self.failures = 0;
    }
}

impl AsFd for Retry {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

/// Failures in a row of one thing: tried again at once a few times, and then after pauses.
#[derive(Default)]
pub struct Patience {
    failures: u32,
}

impl Patience {
    /// Attempts that are made at once.
    const ATTEMPTS: u32 = 3;

    /// It has failed, and is to be tried until it works.
    pub fn failed(&mut self, machine: &mut Machine, log: &mut Log) {
        if !self.failed_once_more(machine) {
            machine.retry.arm(log);
        }
    }

    /// It has failed, and is tried again a bounded number of times. `false`: not any more.
    pub fn failed_once_more(&mut self, machine: &Machine) -> bool {
        self.failures = self.failures.saturating_add(1);
        let again = self.failures <= Patience::ATTEMPTS;
        if again {
            machine.wake();
        }
        again
    }

    /// It has worked.
    pub fn worked(&mut self) {
        self.failures = 0;
    }
}
