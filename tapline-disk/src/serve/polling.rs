//! How long to poll before sleeping.
//!
//! Falling asleep and being woken costs both sides more than a request does. So after work the thread polls rings and
//! completions for a while: longer when that has been worthwhile, not at all when it has not. The budget grows when a
//! sleep turns out to have been shorter than the maximum polling time, and shrinks when polling finds nothing; after a
//! few misses it is zero, and a disk that is idle or used occasionally pays nothing.
//!
//! It knows nothing about what is polled.

use std::time::Duration;

/// The first budget, and the one below which looking is given up: less than a sleep and a wake-up cost.
const LEAST: u64 = 4_000;

/// The budget, and what became of it. Times are in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Polling {
    most: u64,
    budget: u64,
}

impl Polling {
    /// Looks for at most `most`; zero: never.
    pub fn new(most: Duration) -> Polling {
        Polling { most: u64::try_from(most.as_nanos()).unwrap_or(u64::MAX), budget: 0 }
    }

    /// For how long to look now.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// After polling without success, or no polling, the thread has slept for this long.
    pub fn slept(&mut self, time: u64) {
        if time <= self.most {
            self.budget = self.budget.saturating_mul(2).clamp(LEAST.min(self.most), self.most);
        } else {
            let half = self.budget / 2;
            self.budget = if half < LEAST { 0 } else { half };
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const MOST: Duration = Duration::from_micros(50);

    #[test]
    fn short_sleeps_lengthen_polling_up_to_the_maximum() {
        let mut polling = Polling::new(MOST);
        let budgets: Vec<u64> = (0..6)
            .map(|_| {
                polling.slept(10_000);
                polling.budget()
            })
            .collect();
        assert_eq!(budgets, [4_000, 8_000, 16_000, 32_000, 50_000, 50_000]);
    }

    #[test]
    fn long_sleeps_stop_polling() {
        let mut polling = Polling::new(MOST);
        (0..6).for_each(|_| polling.slept(0));
        (0..4).for_each(|_| polling.slept(1_000_000_000));
        assert_eq!(polling.budget(), 0);
    }

    #[test]
    fn a_maximum_of_zero_never_polls() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.slept(0);
        assert_eq!(polling.budget(), 0);
    }
}
