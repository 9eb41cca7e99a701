//! How much of the storage is one disk's: start-time fair queueing with a depth, SFQ(D), as each disk works it out for
//! itself.
//!
//! A disk's virtual time is the cost of all that it has begun, divided by its weight. Of the disks that have requests
//! waiting, none is to be ahead of the others. A disk may begin a request
//!
//! 1. always, while it has none in flight: so each continues at the pace of the storage, and tries again when that has
//!    ended;
//! 2. while less than the depth is in flight of all disks together, it takes no more than its part of the rest, and is
//!    not ahead by more than a quantum of any disk that waits;
//! 3. while that much is in flight: one at a time, if it is behind the mean of the others by more than a quantum. So
//!    what it lacks comes to it although others have the depth among them; and weights, and requests of different
//!    sizes, count among more disks than the depth, each of which has one in flight by rule 1.
//!
//! A disk for which nothing waits is not behind: its virtual time is raised to that of the disks that wait, so that it
//! cannot save up. What other disks say may be stale, or a lie. A slot that does not change while it says that
//! something is in flight counts for [`STUCK`] only, a count counts up to [`IN_FLIGHT_MAX`], and a disk that is ahead
//! of one that waits by more than [`DEBT`] waits for no more than that.
//!
//! It knows no clock: times are given, in nanoseconds. Invariant: [`Share::allowance`] is never nothing for a disk with
//! nothing in flight.

/// Whether something is done wrong on purpose, to see that a test notices it.
#[cfg(not(test))]
macro_rules! planted {
    ($fault:ident) => {
        false
    };
}

#[cfg(test)]
macro_rules! planted {
    ($fault:ident) => {
        test::is_planted(test::Planted::$fault)
    };
}

#[cfg(test)]
mod test;

use std::ops::RangeInclusive;

/// The weight of a disk of which nothing else is said.
pub const WEIGHT: u32 = 100;
/// Weights that a disk can have: those of cgroups (io.weight).
pub const WEIGHTS: RangeInclusive<u32> = 1..=10_000;
/// Requests in flight of all disks that share a storage, beyond which rule 2 lets none begin.
pub const DEPTH: u32 = 128;
/// Depths that can be set: less than 1 would leave rule 1 alone, and more is more than any device takes.
pub const DEPTHS: RangeInclusive<u32> = 1..=4096;

/// The fixed cost of a request, added to its bytes: about what a drive could have transferred meanwhile. A request of 4
/// KiB thus costs 20 KiB, and one of 1 MiB costs 52 times as much.
const FIXED: u64 = 16 << 10;
/// Virtual time that a byte of cost is for a disk with the largest weight, so that no weight loses more to rounding
/// than a request of 4 KiB in 20,480.
const SCALE: u64 = 10_000;
/// How far ahead a disk may be, in virtual time: 256 KiB of cost for a disk of the usual weight. With less, a disk
/// waits for one that looks only when a request of its own has ended, and the storage runs dry.
const QUANTUM: i64 = (256 << 10) * 100;
/// How far ahead a disk may be held to be: 64 MiB of cost for a disk of the usual weight.
const DEBT: i64 = (64 << 20) * 100;
/// In nanoseconds, how long a slot counts that does not change. A process that was killed, and one whose storage does
/// not answer, keeps others back for so long at most.
const STUCK: u64 = 2_000_000_000;
/// The most requests in flight that a slot can state: a disk has no more operations than these in flight (`DEPTH` in
/// tapline-disk).
const IN_FLIGHT_MAX: u32 = 256;
/// In nanoseconds, how long a disk that has seen another one takes it that there are others. At any one moment all of
/// those that use little may have nothing in flight.
const COMPANY: u64 = 100_000_000;
/// In nanoseconds, how often a disk looks that has seen no other one for so long.
const LOOK_ALONE: u64 = 1_000_000;
/// In nanoseconds, how often a disk looks at most, for each slot that it has to look at. A look takes about a hundredth
/// of it.
const LOOK_PER_SLOT: u64 = 500;
/// However few these are.
const LOOK_MIN: u64 = 20_000;
/// How many times the depth, or the number of disks, rule 3 lets be in flight, however unequal weights are.
const BEHIND_MAX: u32 = 8;
/// In nanoseconds, after how long without an end of a request of its own a disk that waits begins one more.
const OVERDUE: u64 = 1_000_000_000;

/// Cost of a request of this length.
#[inline(always)]
pub fn cost(bytes: u64) -> u64 {
    FIXED.saturating_add(bytes)
}

/// The state that a disk publishes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slot {
    /// Requests that are begun and not answered.
    pub in_flight: u32,
    /// Something waits for its share.
    pub waits: bool,
    /// The virtual time. It wraps around.
    pub time: u64,
    /// Requests that were answered. It wraps around.
    pub answered: u64,
}

impl Slot {
    fn is_active(&self) -> bool {
        self.in_flight > 0 || self.waits
    }
}

/// How much may be begun now: while there are requests and cost left. The last request may cost more than is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// Number of requests.
    pub requests: u32,
    /// Their cost.
    pub cost: i64,
}

impl Allowance {
    /// Without any limit.
    pub const ALL: Allowance = Allowance { requests: u32::MAX, cost: i64::MAX };
    const NONE: Allowance = Allowance { requests: 0, cost: 0 };
    const ONE: Allowance = Allowance { requests: 1, cost: 1 };

    /// Whether a request may go.
    #[inline(always)]
    pub fn allows(&self) -> bool {
        self.requests > 0 && self.cost > 0
    }

    /// A request of this cost goes.
    #[inline(always)]
    pub fn take(&mut self, cost: u64) {
        if self.requests != u32::MAX {
            self.requests = self.requests.saturating_sub(1);
            self.cost = self.cost.saturating_sub_unsigned(cost);
        }
    }
}

/// When a slot has changed last.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    slot: Slot,
    since: u64,
}

/// A summary of the other disks, as of the last look.
#[derive(Clone, Copy, Debug, Default)]
struct Others {
    /// Disks with something in flight or waiting.
    active: u32,
    waiting: u32,
    in_flight: u32,
    /// The least virtual time of one that waits.
    least: Option<u64>,
    /// The mean of the active ones.
    mean: u64,
}

/// One disk's share.
#[derive(Debug)]
pub struct Share {
    weight: u32,
    depth: u32,
    /// All cost that was ever begun, and the part of it that is in `time`.
    begun: u64,
    counted: u64,
    time: u64,
    waits: bool,
    others: Others,
    /// The last observation of each slot.
    seen: Vec<Seen>,
    look_at: u64,
    /// Until when there are others, as far as is known.
    company: u64,
    is_shared: bool,
    /// When a request of this disk has ended last, or none was in flight.
    ended: u64,
    answered: u64,
}

impl Share {
    /// With this weight, at a virtual time: zero, or that of the process before.
    pub fn new(weight: u32, time: u64) -> Share {
        Share {
            weight: weight.clamp(*WEIGHTS.start(), *WEIGHTS.end()),
            depth: DEPTH,
            begun: 0,
            counted: 0,
            time,
            waits: false,
            others: Others::default(),
            seen: Vec::new(),
            look_at: 0,
            company: 0,
            is_shared: false,
            ended: 0,
            answered: 0,
        }
    }

    /// The weight of the disk, clamped to [`WEIGHTS`].
    pub fn weight(&self) -> u32 {
        self.weight
    }

    /// Has another weight from now on.
    pub fn set_weight(&mut self, weight: u32) {
        self.count();
        self.weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
    }

    /// Other disks that were seen using the storage in the last look.
    pub fn others(&self) -> u32 {
        self.others.active
    }

    /// A request of this cost is begun.
    #[inline(always)]
    pub fn begin(&mut self, cost: u64) {
        self.begun = self.begun.wrapping_add(cost);
    }

    /// Counts completed requests.
    pub fn answered(&mut self, count: usize, now: u64) {
        if count > 0 {
            self.answered = self.answered.wrapping_add(u64::try_from(count).unwrap_or(0));
            self.ended = now;
        }
    }

    /// Whether other disks have used the storage lately, so that requests may have to wait.
    #[inline(always)]
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// Whether it is time to look at the others.
    #[inline(always)]
    pub fn is_due(&self, now: u64) -> bool {
        now >= self.look_at
    }

    /// The state to publish to the other disks.
    pub fn slot(&mut self, in_flight: u32, waits: bool) -> Slot {
        self.count();
        self.waits = waits;
        Slot { in_flight, waits, time: self.time, answered: self.answered }
    }

    /// Looks at what the others say, each with its number, and at the depth.
    pub fn look(&mut self, now: u64, depth: u32, others: impl Iterator<Item = (usize, Slot)>) {
        self.count();
        self.depth = depth.clamp(*DEPTHS.start(), *DEPTHS.end());
        let (mut found, mut looked) = (Others::default(), 0);
        let (mut least, mut most, mut sum): (Option<i64>, Option<i64>, i128) = (None, None, 0);
        for (number, slot) in others {
            looked += 1;
            if !slot.is_active() || self.is_stuck(number, slot, now) && !planted!(TrustsForGood) {
                continue;
            }
            let ahead = self.ahead(slot.time);
            found.active += 1;
            found.in_flight = found.in_flight.saturating_add(slot.in_flight.min(IN_FLIGHT_MAX));
            sum += i128::from(ahead.clamp(-DEBT, DEBT));
            most = most.max(Some(ahead));
            if slot.waits {
                found.waiting += 1;
                least = Some(least.map_or(ahead, |least| least.min(ahead)));
            }
        }
        let moved = match (least, most) {
            // What waits has waited since the time of the least, and no longer.
            (Some(least), _) if self.waits && !planted!(ForgivesNothing) => least.saturating_add(DEBT).min(0),
            _ if self.waits || planted!(SavesUp) => 0,
            (Some(least), _) => least.max(0),
            (None, Some(most)) => most.max(0),
            (None, None) => 0,
        };
        let mean = sum.checked_div(i128::from(found.active)).and_then(|mean| i64::try_from(mean).ok()).unwrap_or(0);
        found.least = least.map(|least| self.time.wrapping_add_signed(least));
        found.mean = self.time.wrapping_add_signed(mean);
        self.time = self.time.wrapping_add_signed(moved);
        self.others = found;
        if found.active > 0 {
            self.company = now.saturating_add(COMPANY);
        }
        self.is_shared = if planted!(ForgetsOthersAtOnce) { found.active > 0 } else { now < self.company };
        let pause = if self.is_shared { (looked * LOOK_PER_SLOT).max(LOOK_MIN) } else { LOOK_ALONE };
        self.look_at = now.saturating_add(pause);
    }

    /// The requests that may start now, with this number in flight.
    pub fn allowance(&mut self, in_flight: u32, now: u64) -> Allowance {
        let Others { active, waiting, in_flight: theirs, least, mean } = self.others;
        if !self.is_shared {
            return Allowance::ALL;
        }
        self.count();
        let all = theirs.saturating_add(in_flight);
        let allowance = if all < self.depth || planted!(HasNoDepth) {
            let least = least.filter(|_| !planted!(IsNeverAhead));
            let left = least.map_or(i64::MAX, |least| self.ahead(least).saturating_add(QUANTUM));
            let part = self.depth.saturating_sub(all).div_ceil(waiting + 1).max(1);
            Allowance { requests: part, cost: self.cost_of(left) }
        } else if !planted!(IsNeverBehind) && all / BEHIND_MAX < self.depth.max(active) && self.ahead(mean) > QUANTUM {
            Allowance { requests: 1, cost: self.cost_of(self.ahead(mean) - QUANTUM) }
        } else {
            Allowance::NONE
        };
        if (in_flight > 0 || planted!(MayHaveNone)) && now.saturating_sub(self.ended) <= OVERDUE {
            return allowance;
        }
        if in_flight > 0 && planted!(WaitsForGood) {
            return allowance;
        }
        self.ended = now;
        if allowance.allows() { allowance } else { Allowance::ONE }
    }

    /// How far a time is ahead of this disk's.
    fn ahead(&self, time: u64) -> i64 {
        if planted!(NeverWraps) {
            let ahead = i128::from(time) - i128::from(self.time);
            return i64::try_from(ahead).unwrap_or(if ahead < 0 { i64::MIN } else { i64::MAX });
        }
        i64::from_ne_bytes(time.wrapping_sub(self.time).to_ne_bytes())
    }

    /// The cost that equals this virtual time for this disk.
    fn cost_of(&self, time: i64) -> i64 {
        let cost = i128::from(time) * i128::from(self.weight) / i128::from(SCALE);
        // What is too small for a byte is not nothing.
        i64::try_from(cost).unwrap_or(i64::MAX).max(i64::from(time > 0))
    }

    /// Brings the virtual time to what was begun.
    fn count(&mut self) {
        let cost = self.begun.wrapping_sub(std::mem::replace(&mut self.counted, self.begun));
        let weight = if planted!(HasOneWeight) { WEIGHT } else { self.weight };
        self.time = self.time.wrapping_add(cost.saturating_mul(SCALE) / u64::from(weight));
    }

    /// Whether a slot has said the same for too long.
    fn is_stuck(&mut self, number: usize, slot: Slot, now: u64) -> bool {
        if number >= self.seen.len() {
            self.seen.resize(number + 1, Seen::default());
        }
        let Some(seen) = self.seen.get_mut(number) else { return true };
        if seen.slot != slot {
            *seen = Seen { slot, since: now };
        }
        now.saturating_sub(seen.since) > STUCK
    }
}
