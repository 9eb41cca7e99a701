//! How long to wait before a disk process that has died is started again: a function of when it died.
//!
//! The first time not at all, since a guest waits. If it dies again and again, there is something wrong that starting it does
//! not mend: the pauses grow, and after [`IN_A_MINUTE`] deaths within a minute it stays down.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Deaths within a minute after which it stays down.
const IN_A_MINUTE: usize = 6;
const MINUTE: Duration = Duration::from_secs(60);

/// The second pause; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The deaths of the last minute.
#[derive(Clone, Debug, Default)]
pub struct Deaths(VecDeque<Instant>);

impl Deaths {
    /// It has died; how long to wait before it is started again, or none if it is not.
    pub fn died(&mut self, now: Instant) -> Option<Duration> {
        while self.0.front().is_some_and(|at| now.saturating_duration_since(*at) >= MINUTE) {
            self.0.pop_front();
        }
        self.0.push_back(now);
        let before = u32::try_from(self.0.len().saturating_sub(1)).unwrap_or(u32::MAX);
        match self.0.len() {
            0 | 1 => Some(Duration::ZERO),
            IN_A_MINUTE.. => None,
            _ => Some(PAUSE.saturating_mul(2_u32.saturating_pow(before.saturating_sub(1))).min(PAUSE_MAX)),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pauses_grow_and_after_too_many_it_stays_down() {
        let mut deaths = Deaths::default();
        let begin = Instant::now();
        let pauses: Vec<_> = (0..6).map(|second| deaths.died(begin + Duration::from_secs(second))).collect();
        let ms = |ms| Some(Duration::from_millis(ms));
        assert_eq!(pauses, [ms(0), ms(100), ms(200), ms(400), ms(800), None]);
    }

    #[test]
    fn deaths_that_are_far_apart_are_each_the_first() {
        let mut deaths = Deaths::default();
        let begin = Instant::now();
        for minute in 0..20 {
            assert_eq!(deaths.died(begin + MINUTE * minute), Some(Duration::ZERO));
        }
    }
}
