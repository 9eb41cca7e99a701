//! How the thread waits: whether it polls before it sleeps, and for how long it may sleep.
//!
//! Falling asleep and being woken costs both sides more than a request does. So after work the thread polls rings and
//! completions for a while, at most for `--poll-max` (50 µs unless set): longer if that has paid, not at all if it has
//! not. It waits for two different things, each
//! with its own budget: a peer that has its completions and nothing in flight, and storage. A budget is granted when
//! sleeps are so short that polling can replace them, and shrinks when polling finds nothing; after a few misses it is
//! zero, and is retried more and more rarely. Hits pay for misses: one in a few polls may find nothing, as a peer may
//! be delayed at times. A disk that is idle or used occasionally pays nothing.
//!
//! Storage takes too long to poll all the time, but about as long each time ([`Forecast`]). So a busy disk sleeps for
//! most of that time, and polls for the rest: the wake-up of a halted processor then falls into time in which there is
//! nothing to do yet.
//!
//! With `adaptive`, none of this is done while other threads want the processors ([`Contention`]); with `on` it always
//! polls for the maximum; in quarantine never. It knows nothing about what is polled.

mod contention;
mod forecast;

use std::time::Duration;

use control::PollingMode;
use serde::{Deserialize, Serialize};

pub use contention::{Contention, prepare};
use forecast::Forecast;
pub use forecast::Nap;

/// The minimum budget in nanoseconds: a smaller one counts as zero, as a sleep with its wake-up costs more.
const BUDGET_MIN: u64 = 4_000;
/// The hits that pay for a miss.
const HITS_PER_MISS: u32 = 4;
/// The maximum number of hits that are remembered to pay for misses.
const HITS_MAX: u32 = 16;
/// The maximum number of short sleeps without a retry of polling.
const SKIPPED_MAX: u32 = 256;

/// The requested polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// When to poll.
    pub mode: PollingMode,
    /// The maximum polling time in nanoseconds.
    pub most: u64,
}

impl Settings {
    /// Polls for at most `most`.
    pub fn new(mode: PollingMode, most: Duration) -> Settings {
        Settings { mode, most: u64::try_from(most.as_nanos()).unwrap_or(u64::MAX) }
    }
}

/// What the thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// A request of the peer: nothing is in flight.
    Peer,
    /// The completion of an operation, or another request.
    Storage,
}

/// Decides how to wait, from the results of past waits. Times are in nanoseconds of the disk's clock.
pub struct Polling {
    settings: Settings,
    peer: Budget,
    storage: Budget,
    forecast: Forecast,
    contention: Contention,
}

/// The polling time for one thing that is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Budget {
    now: u64,
    /// The number of short sleeps before a retry, and the number before the one after that.
    skip: u32,
    skip_next: u32,
    /// Hits that have not yet paid for a miss.
    hits: u32,
}

impl Budget {
    /// Called when polling has found something.
    #[inline]
    fn hit(&mut self, most: u64) {
        *self = Budget { now: most, skip: 0, skip_next: 0, hits: HITS_MAX.min(self.hits + 1) };
    }

    /// Called when polling has found nothing.
    fn missed(&mut self) {
        if let Some(left) = self.hits.checked_sub(HITS_PER_MISS) {
            self.hits = left;
            return;
        }
        self.now /= 2;
        if self.now < BUDGET_MIN {
            self.now = 0;
            self.skip = self.skip_next;
            self.skip_next = (self.skip_next * 2).clamp(1, SKIPPED_MAX);
        }
    }

    /// Called when the thread has slept for `time` without polling before.
    fn slept(&mut self, time: u64, most: u64) {
        // Half of it may have been the wake-up.
        if time > most.saturating_mul(2) {
            return;
        }
        match self.skip {
            0 => self.now = most,
            _ => self.skip -= 1,
        }
    }
}

impl Polling {
    /// Starts without experience.
    pub fn new(settings: Settings, contention: Contention) -> Polling {
        Polling {
            settings,
            peer: Budget::default(),
            storage: Budget::default(),
            forecast: Forecast::default(),
            contention,
        }
    }

    /// Returns the requested polling.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// Replaces the requested polling.
    pub fn set(&mut self, settings: Settings) {
        (self.settings, self.peer, self.storage) = (settings, Budget::default(), Budget::default());
    }

    /// Returns for how long to poll now.
    #[inline]
    pub fn budget(&self, awaited: Awaited, now: u64) -> u64 {
        let budget = match (self.settings.mode, awaited) {
            (PollingMode::Off, _) => 0,
            (PollingMode::On, _) => return self.settings.most,
            (PollingMode::Adaptive, Awaited::Peer) => self.peer.now,
            (PollingMode::Adaptive, Awaited::Storage) => self.storage.now,
        };
        if budget > 0 && self.contention.is_there(now) { 0 } else { budget }
    }

    /// Returns whether to stop polling: an iteration that began at `before` was interrupted by threads that want the
    /// processor.
    #[inline]
    pub fn must_stop(&mut self, before: u64, now: u64) -> bool {
        self.settings.mode == PollingMode::Adaptive && self.contention.has_interrupted(before, now)
    }

    /// Returns how to wait for storage from `now` on; `None` means until something happens.
    pub fn nap(&self, awaited: Awaited, now: u64) -> Option<Nap> {
        let may = match self.settings.mode {
            PollingMode::Off => false,
            PollingMode::Adaptive => !self.contention.is_there(now),
            PollingMode::On => true,
        };
        let may = may && awaited == Awaited::Storage && self.settings.most > 0;
        if may { self.forecast.nap(now) } else { None }
    }

    /// Returns whether storage is slow, judging by its last operations, so that operations submitted now do not
    /// complete at once.
    #[inline]
    pub fn storage_takes_time(&self, now: u64) -> bool {
        self.forecast.is_of(now)
    }

    /// Called after polling within the budget. `found`: whether it has found something.
    #[inline]
    pub fn polled(&mut self, awaited: Awaited, found: bool) {
        let most = self.settings.most;
        let budget = self.budget_of(awaited);
        if found { budget.hit(most) } else { budget.missed() }
    }

    /// Called after a wait from `begun` to `ended`. `polled`: polling has found nothing before.
    pub fn waited(&mut self, awaited: Awaited, polled: bool, begun: u64, ended: u64) {
        if awaited == Awaited::Storage {
            self.forecast.waited(begun, ended);
        }
        if !polled {
            let most = self.settings.most;
            self.budget_of(awaited).slept(ended.saturating_sub(begun), most);
        }
    }

    #[inline]
    fn budget_of(&mut self, awaited: Awaited) -> &mut Budget {
        match awaited {
            Awaited::Peer => &mut self.peer,
            Awaited::Storage => &mut self.storage,
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const MOST: Duration = Duration::from_micros(50);

    fn polling(mode: PollingMode, most: Duration) -> Polling {
        Polling::new(Settings::new(mode, most), Contention::none())
    }

    /// Simulates `count` waits of `time` each; returns the polling time, and the number of misses.
    fn wait(polling: &mut Polling, awaited: Awaited, time: u64, count: u32) -> (u64, u32) {
        let (mut polled, mut misses, mut now) = (0, 0, 0);
        for _ in 0..count {
            let budget = polling.budget(awaited, now);
            if budget > 0 {
                polling.polled(awaited, time <= budget);
                polled += time.min(budget);
                misses += u32::from(time > budget);
            }
            if time > budget {
                // A sleep ends some time after that.
                polling.waited(awaited, budget > 0, now + budget, now + time + 30_000);
            }
            now += 1_000_000;
        }
        (polled, misses)
    }

    #[test]
    fn waits_shorter_than_the_maximum_are_polled_away() {
        for awaited in [Awaited::Peer, Awaited::Storage] {
            let mut polling = polling(PollingMode::Adaptive, MOST);
            assert_eq!(wait(&mut polling, awaited, 45_000, 101), (4_500_000, 0));
            let other = if awaited == Awaited::Peer { Awaited::Storage } else { Awaited::Peer };
            assert_eq!(polling.budget(other, 0), 0, "each has its own budget");
        }
    }

    #[test]
    fn waits_that_polling_cannot_shorten_are_polled_less_and_less() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        // A sleep of this length may be one of 50 us and a slow wake-up.
        let (polled, misses) = wait(&mut polling, Awaited::Storage, 65_000, 10_000);
        assert!(polled <= 10_000 * 700, "{polled}");
        assert!((20..500).contains(&misses), "{misses}");
        // Waits become shorter, which is noticed.
        let (_, misses) = wait(&mut polling, Awaited::Storage, 20_000, 1_000);
        assert_eq!(misses, 0);
        assert_eq!(polling.budget(Awaited::Storage, 0), 50_000);
    }

    #[test]
    fn long_waits_cost_a_few_misses_at_most() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        wait(&mut polling, Awaited::Peer, 10_000, 10);
        let (polled, misses) = wait(&mut polling, Awaited::Peer, 1_000_000, 1_000);
        // Ten hits have paid for two misses.
        assert_eq!((polled, misses), (2 * 50_000 + 50_000 + 25_000 + 12_500 + 6_250, 6));
    }

    #[test]
    fn a_peer_that_is_delayed_at_times_is_still_polled() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        wait(&mut polling, Awaited::Peer, 20_000, 20);
        for _ in 0..100 {
            assert_eq!(wait(&mut polling, Awaited::Peer, 300_000, 1), (50_000, 1));
            assert_eq!(wait(&mut polling, Awaited::Peer, 20_000, 4), (80_000, 0));
        }
        let (_, misses) = wait(&mut polling, Awaited::Peer, 300_000, 100);
        assert_eq!(misses, 4 + 4, "and no longer when it has changed");
    }

    #[test]
    fn polling_that_is_off_or_limited_to_zero_never_polls_or_naps() {
        for (mode, most) in [(PollingMode::Off, MOST), (PollingMode::Adaptive, Duration::ZERO)] {
            let mut polling = polling(mode, most);
            assert_eq!(wait(&mut polling, Awaited::Peer, 0, 10).0, 0);
            let mut now = 0;
            for _ in 0..20 {
                polling.waited(Awaited::Storage, false, now, now + 300_000);
                now += 310_000;
            }
            assert_eq!(polling.nap(Awaited::Storage, now), None);
            assert!(polling.storage_takes_time(now));
        }
    }

    #[test]
    fn polling_that_is_on_always_polls_for_the_maximum() {
        let mut polling = polling(PollingMode::On, MOST);
        assert_eq!(wait(&mut polling, Awaited::Peer, 1_000_000, 10), (500_000, 10));
        polling.set(Settings::new(PollingMode::Off, MOST));
        assert_eq!(polling.budget(Awaited::Peer, 0), 0);
    }
}
