//! Lines for people on stderr, while a disk is served.
//!
//! What a guest or a client can cause is limited in rate: they cannot fill the host's log.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// Lines in a [`PERIOD`]: enough to see what happens, too few to matter.
const LINES_MAX: u32 = 20;
const PERIOD: Duration = Duration::from_secs(10);

/// A log with a limit.
pub struct Log {
    since: Instant,
    lines: u32,
    left_out: u64,
}

impl Log {
    /// An empty log.
    pub fn new() -> Log {
        Log { since: Instant::now(), lines: 0, left_out: 0 }
    }

    /// Says something that a guest or a client has caused.
    pub fn caused(&mut self, line: impl Display) {
        if let Some(left_out) = self.admit(Instant::now()) {
            if left_out > 0 {
                say(format_args!("{left_out} lines were left out"));
            }
            say(line);
        }
    }

    /// Whether a line may be said now, and how many were left out before it.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.since) >= PERIOD {
            self.since = now;
            self.lines = 0;
        }
        if self.lines == LINES_MAX {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Says something that only we or our user can cause.
pub fn say(line: impl Display) {
    eprintln!("tapline-disk: {line}");
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut log = Log::new();
        let begin = log.since;
        let said = (0..100).filter(|_| log.admit(begin).is_some()).count();
        assert_eq!(said, 20);
        assert_eq!(log.admit(begin + PERIOD), Some(80));
        assert_eq!(log.admit(begin + PERIOD), Some(0));
    }
}
