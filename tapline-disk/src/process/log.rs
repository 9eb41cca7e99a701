//! Log lines for people on stderr.
//!
//! It knows nothing about their contents. Lines that a guest or a client can cause are rate-limited, so that they
//! cannot fill the host's log. A log that is full or not read neither stops nor delays anything (crate `logging`).

use std::fmt::Display;
use std::time::{Duration, Instant};

use logging::Stderr;

use crate::process::failure::Failure;

static STDERR: Stderr = Stderr::of("tapline-disk");

/// Lines per [`PERIOD`]: enough to see what happens, few enough for the host's log.
const LINES_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(10);

/// A rate limiter of log lines.
pub struct Log {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Log {
    /// Makes a log with its full quota.
    pub fn new() -> Log {
        Log { since: Instant::now(), lines: 0, left_out: 0 }
    }

    /// Logs something that a guest or a client has caused, if the limit permits it.
    pub fn caused(&mut self, line: impl Display) {
        if let Some(left_out) = self.admit(Instant::now()) {
            if left_out > 0 {
                say(format_args!("{left_out} lines were dropped"));
            }
            say(line);
        }
    }

    /// Returns how many lines were dropped before this one, or `None` if it must be dropped too.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.since) >= PERIOD {
            self.since = now;
            self.lines = 0;
        }
        if self.lines == LINES_MAX {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Logs something that only we or our user can cause, without a limit.
pub fn say(line: impl Display) {
    STDERR.say(line);
}

/// Prints why a command failed, as its last output.
pub fn say_failure(failure: &Failure) {
    STDERR.write_last(&format!("tapline: {failure}\n"));
}

/// Reports dropped lines, if possible. Call it when the program is about to exit normally.
pub fn end() {
    STDERR.tell_losses();
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn excess_lines_are_dropped_and_counted() {
        let mut log = Log::new();
        let begin = log.since;
        let said = (0..100).filter(|_| log.admit(begin).is_some()).count();
        assert_eq!(said, 20);
        assert_eq!(log.admit(begin + PERIOD), Some(80));
        assert_eq!(log.admit(begin + PERIOD), Some(0));
    }
}
