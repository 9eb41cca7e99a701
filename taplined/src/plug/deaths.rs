//! How long to wait before a disk process that has died is started again: a function of how long each has served.
//!
//! It knows no clock. Not at all after one that has served, since a guest waits. If it dies again and again, or does
//! not come to serve, there is something that starting it does not mend: the pauses grow, up to [`PAUSE_MAX`]. They
//! never become for ever: a full log or a repository that is lost come to an end, and nobody should have to plug the
//! disk again for that.

use std::time::Duration;

use crate::fault::{self, Planted};

/// A process that has served so long was no failure.
const SERVED: Duration = Duration::from_secs(1);

/// The second pause; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Failures in a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Deaths(u32);

impl Deaths {
    /// It has died, or could not be started, after having served so long; how long to wait before it is started again.
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
    fn pauses_grow_to_a_limit_and_it_is_always_started_again() {
        let mut deaths = Deaths::default();
        let pauses: Vec<_> = (0..12).map(|_| deaths.died(Duration::ZERO).as_millis()).collect();
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000]);
        for _ in 0..100 {
            assert_eq!(deaths.died(Duration::ZERO), PAUSE_MAX);
        }
    }

    #[test]
    fn after_one_that_has_served_it_is_started_at_once_however_many_there_were() {
        let mut deaths = Deaths::default();
        for _ in 0..100 {
            assert_eq!(deaths.died(SERVED), Duration::ZERO);
        }
        assert_eq!(deaths.died(Duration::ZERO), PAUSE);
        assert_eq!(deaths.died(SERVED), Duration::ZERO);
    }
}
