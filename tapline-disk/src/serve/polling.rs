//! How the thread waits: whether it looks for more before it sleeps, and for how long it may sleep.
//!
//! Falling asleep and being woken costs both sides more than a request does. So after work the thread polls rings and
//! completions for a while: longer when that has been worthwhile, not at all when it has not. What it waits for are two
//! different things, each with a budget of its own: a peer that has its answers and nothing in flight, and storage. A
//! budget is there when sleeps are so short that polling may be in their place, and shrinks when polling finds
//! nothing; after a few misses it is zero, and tried more and more rarely. Hits pay for misses: one in a few looks may
//! find nothing, as a peer is held up now and then. A disk that is idle or used occasionally pays nothing.
//!
//! Storage takes longer than it is sensible to look for, but about as long each time ([`Forecast`]). So a busy disk
//! sleeps for most of that time, and looks for the rest: the wake-up of a halted processor falls into the time in which
//! there is nothing to do yet.
//!
//! Nothing of that is done while others want the processors ([`Contention`]). It knows nothing about what is polled.

mod contention;
mod forecast;

use std::time::Duration;

use control::PollingMode;
use serde::{Deserialize, Serialize};

pub use contention::{Contention, prepare};
use forecast::Forecast;
pub use forecast::Nap;

/// The budget below which polling is given up: less than a sleep and a wake-up cost.
const LEAST: u64 = 4_000;
/// Hits that pay for a miss, and how many are remembered.
const MISS: u32 = 4;
const HITS_MAX: u32 = 16;
/// Short sleeps in place of which nothing is tried, at most.
const SKIPPED_MAX: u32 = 256;

/// What was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// When to look.
    pub mode: PollingMode,
    /// The longest look, in nanoseconds.
    pub most: u64,
}

impl Settings {
    /// Looks for at most `most`.
    pub fn new(mode: PollingMode, most: Duration) -> Settings {
        Settings { mode, most: u64::try_from(most.as_nanos()).unwrap_or(u64::MAX) }
    }
}

/// What is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaited {
    /// A request of the peer: nothing is in flight.
    Peer,
    /// The end of an operation, or another request.
    Storage,
}

/// How to wait, by what became of it before. Times are in nanoseconds of the disk's clock.
pub struct Polling {
    settings: Settings,
    peer: Budget,
    storage: Budget,
    forecast: Forecast,
    contention: Contention,
}

/// For how long to poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Budget {
    now: u64,
    /// Short sleeps before it is tried again, and how many there will be the next time.
    skip: u32,
    skip_next: u32,
    /// Hits that have not paid for a miss.
    hits: u32,
}

impl Budget {
    /// Polling has found something.
    #[inline]
    fn hit(&mut self, most: u64) {
        *self = Budget { now: most, skip: 0, skip_next: 0, hits: HITS_MAX.min(self.hits + 1) };
    }

    /// Polling has found nothing.
    fn missed(&mut self) {
        if let Some(left) = self.hits.checked_sub(MISS) {
            self.hits = left;
            return;
        }
        self.now /= 2;
        if self.now < LEAST {
            self.now = 0;
            self.skip = self.skip_next;
            self.skip_next = (self.skip_next * 2).clamp(1, SKIPPED_MAX);
        }
    }

    /// The thread has slept for that long, without polling before.
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
    /// Nothing is known yet.
    pub fn new(settings: Settings, contention: Contention) -> Polling {
        Polling {
            settings,
            peer: Budget::default(),
            storage: Budget::default(),
            forecast: Forecast::default(),
            contention,
        }
    }

    /// What was asked for.
    pub fn settings(&self) -> Settings {
        self.settings
    }

    /// From now on that is wanted.
    pub fn set(&mut self, settings: Settings) {
        (self.settings, self.peer, self.storage) = (settings, Budget::default(), Budget::default());
    }

    /// For how long to look now.
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

    /// Whether to stop polling: the look that began at `before` was interrupted by others, who want the processor.
    #[inline]
    pub fn must_stop(&mut self, before: u64, now: u64) -> bool {
        self.settings.mode == PollingMode::Adaptive && self.contention.has_interrupted(before, now)
    }

    /// How to wait for storage from `now` on, if not until something happens.
    pub fn nap(&self, awaited: Awaited, now: u64) -> Option<Nap> {
        let may = match self.settings.mode {
            PollingMode::Off => false,
            PollingMode::Adaptive => !self.contention.is_there(now),
            PollingMode::On => true,
        };
        let may = may && awaited == Awaited::Storage && self.settings.most > 0;
        if may { self.forecast.nap(now) } else { None }
    }

    /// Whether storage takes its time, by what it did last: what is submitted now is not done at once.
    #[inline]
    pub fn storage_takes_time(&self, now: u64) -> bool {
        self.forecast.is_of(now)
    }

    /// Polling within the budget has found something, or not.
    #[inline]
    pub fn polled(&mut self, awaited: Awaited, found: bool) {
        let most = self.settings.most;
        let budget = self.budget_of(awaited);
        if found { budget.hit(most) } else { budget.missed() }
    }

    /// The thread has waited from then until then, after polling in vain or at once.
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
        Polling::new(Settings::new(mode, most), Contention::of_nobody())
    }

    /// For how long it polls in `count` waits of `time` each, and how often in vain.
    fn wait(polling: &mut Polling, awaited: Awaited, time: u64, count: u32) -> (u64, u32) {
        let (mut polled, mut in_vain, mut now) = (0, 0, 0);
        for _ in 0..count {
            let budget = polling.budget(awaited, now);
            if budget > 0 {
                polling.polled(awaited, time <= budget);
                polled += time.min(budget);
                in_vain += u32::from(time > budget);
            }
            if time > budget {
                // A sleep ends some time after that.
                polling.waited(awaited, budget > 0, now + budget, now + time + 30_000);
            }
            now += 1_000_000;
        }
        (polled, in_vain)
    }

    #[test]
    fn waits_shorter_than_the_maximum_are_polled_away() {
        for awaited in [Awaited::Peer, Awaited::Storage] {
            let mut polling = polling(PollingMode::Adaptive, MOST);
            assert_eq!(wait(&mut polling, awaited, 45_000, 101), (4_500_000, 0));
            let other = if awaited == Awaited::Peer { Awaited::Storage } else { Awaited::Peer };
            assert_eq!(polling.budget(other, 0), 0, "each has a budget of its own");
        }
    }

    #[test]
    fn waits_that_polling_cannot_shorten_are_polled_less_and_less() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        // A sleep of this length may be one of 50 us and a slow wake-up.
        let (polled, in_vain) = wait(&mut polling, Awaited::Storage, 65_000, 10_000);
        assert!(polled <= 10_000 * 700, "{polled}");
        assert!((20..500).contains(&in_vain), "{in_vain}");
        // They become shorter: that is noticed.
        let (_, in_vain) = wait(&mut polling, Awaited::Storage, 20_000, 1_000);
        assert_eq!(in_vain, 0);
        assert_eq!(polling.budget(Awaited::Storage, 0), 50_000);
    }

    #[test]
    fn long_waits_cost_a_few_misses_at_most() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        wait(&mut polling, Awaited::Peer, 10_000, 10);
        let (polled, in_vain) = wait(&mut polling, Awaited::Peer, 1_000_000, 1_000);
        // Ten hits have paid for two misses.
        assert_eq!((polled, in_vain), (2 * 50_000 + 50_000 + 25_000 + 12_500 + 6_250, 6));
    }

    #[test]
    fn a_peer_that_is_held_up_now_and_then_is_polled_for_all_the_same() {
        let mut polling = polling(PollingMode::Adaptive, MOST);
        wait(&mut polling, Awaited::Peer, 20_000, 20);
        for _ in 0..100 {
            assert_eq!(wait(&mut polling, Awaited::Peer, 300_000, 1), (50_000, 1));
            assert_eq!(wait(&mut polling, Awaited::Peer, 20_000, 4), (80_000, 0));
        }
        let (_, in_vain) = wait(&mut polling, Awaited::Peer, 300_000, 100);
        assert_eq!(in_vain, 4 + 4, "and no longer when it has changed");
    }

    #[test]
    fn polling_that_is_off_or_has_a_maximum_of_zero_never_polls_and_never_naps() {
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
    fn polling_that_is_on_looks_for_the_maximum_whatever_came_of_it() {
        let mut polling = polling(PollingMode::On, MOST);
        assert_eq!(wait(&mut polling, Awaited::Peer, 1_000_000, 10), (500_000, 10));
        polling.set(Settings::new(PollingMode::Off, MOST));
        assert_eq!(polling.budget(Awaited::Peer, 0), 0);
    }
}
