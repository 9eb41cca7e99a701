//! The pause before a dead disk process is restarted: a function of how long its predecessors have served.
//!
//! It knows no clock. There is no pause after a process that has served for a while, because a guest is waiting. If
//! processes keep dying or never serve, the pauses grow, up to [`PAUSE_MAX`]. Retries never stop: a full log or a
//! lost repository is a temporary condition, and must not require a manual plug.

use std::time::Duration;

use crate::fault::{self, Planted};

/// A process that has served for this long has not failed to start.
const SERVED: Duration = Duration::from_secs(1);

/// The second pause; each pause is twice the previous one.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Consecutive failures.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deaths(u32);

impl Deaths {
    /// Records that a process died after serving for this long, or could not be started; returns the pause before the
    /// restart.
    pub fn died(&mut self, served: Duration) -> Duration {
        if served >= SERVED {
            self.0 = 0;
        }
        let before = self.0;
        self.0 = before.saturating_add(1);
        if fault::planted(Planted::StaysDown) && before >= 5 {
            return Duration::from_secs(86_400);
        }
        match before.checked_sub(1) {
            None => Duration::ZERO,
            Some(doubled) => PAUSE.saturating_mul(2_u32.saturating_pow(doubled)).min(PAUSE_MAX),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_retries_never_stop() {
        let mut deaths = Deaths::default();
        let pauses: Vec<_> = (0..12).map(|_| deaths.died(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        for _ in 0..100 {
            assert_eq!(deaths.died(Duration::ZERO), PAUSE_MAX);
        }
    }

    #[test]
    fn after_a_process_that_served_the_restart_is_immediate() {
        let mut deaths = Deaths::default();
        for _ in 0..100 {
            assert_eq!(deaths.died(SERVED), Duration::ZERO);
        }
        assert_eq!(deaths.died(Duration::ZERO), PAUSE);
        assert_eq!(deaths.died(SERVED), Duration::ZERO);
    }
}
