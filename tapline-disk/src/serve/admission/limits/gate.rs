//! Decides what a disk's limits and its share of the storage let through now, what must wait, and until when.
//!
//! It knows the direction and size of items, and no requests; callers pass the time in nanoseconds, so that tests can
//! simulate it. Reads and writes are queued separately, each in order. Among those that their own limits allow, the
//! oldest is next at the shared limits, however large it is.
//!
//! Invariants: each held item is returned once; while an item waits for a limit, [`Gate::next_at`] is later than now
//! and progress is made then; neither direction waits for a limit of the other one.

use std::collections::VecDeque;

use control::limits::Limits;
use serde::{Deserialize, Serialize};
use shares::{Allowance, cost};

use super::bucket::Bucket;

/// Selects the limits that apply to an item, besides the shared ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The limits of reads.
    Read,
    /// The limits of writes.
    Write,
}

impl Direction {
    const ALL: [Direction; 2] = [Direction::Read, Direction::Write];
}

/// An item that is held, and its wait.
#[derive(Debug)]
pub struct Held<T> {
    /// The item itself.
    pub item: T,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it arrived.
    pub came: u64,
    /// Whether the limits allowed it at that time, so that it waited for the disk's share.
    pub by_share: bool,
}

/// The limits of requests and of bytes; `None` is unlimited.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    iops: Option<Bucket>,
    bandwidth: Option<Bucket>,
}

/// The levels of all buckets, for a successor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Levels([Option<i64>; 6]);

/// The limits, and the items held for them.
#[derive(Debug)]
pub struct Gate<T> {
    /// The limits of all, of reads and of writes.
    pairs: [Pair; 3],
    reads: VecDeque<Held<T>>,
    writes: VecDeque<Held<T>>,
    /// Whether nothing is held, but only counted.
    open: bool,
    /// What the disk's share of the storage allows now.
    allowance: Allowance,
}

impl<T> Gate<T> {
    /// Makes a gate with full buckets.
    pub fn new(limits: &Limits, now: u64) -> Gate<T> {
        let (pairs, allowance) = ([Pair::default(); 3], Allowance::ALL);
        let mut gate = Gate { pairs, reads: VecDeque::new(), writes: VecDeque::new(), open: false, allowance };
        gate.set(limits, now);
        gate
    }

    /// Replaces the limits, also for held items.
    pub fn set(&mut self, limits: &Limits, now: u64) {
        let burst = limits.burst_ms().saturating_mul(1_000_000);
        let replaced = |bucket: Option<Bucket>, rate: Option<u64>| {
            let rate = rate?;
            Some(bucket.map_or(Bucket::new(rate, burst, now), |bucket| bucket.replaced(rate, burst, now)))
        };
        let rates = [
            (limits.iops, limits.bandwidth),
            (limits.read_iops, limits.read_bandwidth),
            (limits.write_iops, limits.write_bandwidth),
        ];
        for (pair, (iops, bandwidth)) in self.pairs.iter_mut().zip(rates) {
            *pair = Pair { iops: replaced(pair.iops, iops), bandwidth: replaced(pair.bandwidth, bandwidth) };
        }
    }

    /// Sets whether the gate is open: nothing is held then. It is still counted, up to a debt of a second.
    pub fn set_open(&mut self, open: bool) {
        self.open = open;
    }

    /// Sets what the share allows, in addition to the limits.
    pub fn set_allowance(&mut self, allowance: Allowance) {
        self.allowance = allowance;
    }

    /// Returns whether the next item is held by the disk's share only.
    pub fn waits_for_share(&self) -> bool {
        let by_limits = || {
            let next = self.candidate().and_then(|direction| self.head(direction));
            next.is_some_and(|head| self.total().allows(head.bytes))
        };
        !self.open && !self.allowance.allows() && by_limits()
    }

    /// Returns the number of held items.
    pub fn waiting(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    fn items(&self) -> impl Iterator<Item = &T> {
        self.reads.iter().chain(&self.writes).map(|held| &held.item)
    }

    /// Returns whether an item that has arrived may pass now, and then counts it; else it must be held.
    pub fn admits(&mut self, direction: Direction, bytes: u64, now: u64) -> bool {
        self.refill(now);
        let may_go = self.open || self.limits_allow(direction, bytes) && self.allowance.allows();
        let admitted = may_go && self.waiting() == 0;
        if admitted {
            self.take(direction, bytes);
        }
        admitted
    }

    /// Holds an item that was not admitted.
    pub fn hold(&mut self, direction: Direction, bytes: u64, now: u64, item: T) {
        let by_share = self.limits_allow(direction, bytes);
        self.queue(direction).push_back(Held { item, bytes, came: now, by_share });
    }

    fn limits_allow(&self, direction: Direction, bytes: u64) -> bool {
        self.own(direction).allows(bytes) && self.total().allows(bytes)
    }

    /// Returns a held item that may pass now.
    pub fn release(&mut self, now: u64) -> Option<Held<T>> {
        self.refill(now);
        let direction = if self.open { self.oldest(|_, _| true) } else { self.candidate() }?;
        let bytes = self.head(direction)?.bytes;
        let may_go = self.open || self.total().allows(bytes) && self.allowance.allows();
        if !may_go {
            return None;
        }
        self.take(direction, bytes);
        self.queue(direction).pop_front()
    }

    /// Returns when the limits let the next held item pass; now, if one may already.
    pub fn next_at(&self, now: u64) -> Option<u64> {
        let candidate = self.candidate();
        let waits = Direction::ALL.into_iter().filter_map(|direction| {
            let bytes = self.head(direction)?.bytes;
            match self.own(direction).wait(bytes) {
                0 if candidate == Some(direction) => Some(self.total().wait(bytes)),
                // It comes after the other direction's, which has its own time.
                0 => None,
                wait => Some(wait),
            }
        });
        let wait = waits.min();
        wait.map(|wait| now.saturating_add(if self.open { 0 } else { wait }))
    }

    /// Removes and returns the wanted items, as if they had not arrived.
    pub fn recall(&mut self, is_wanted: impl Fn(&T) -> bool) -> Vec<T> {
        if !self.items().any(&is_wanted) {
            return Vec::new();
        }
        let mut wanted = Vec::new();
        for queue in [&mut self.reads, &mut self.writes] {
            let (theirs, others) = queue.drain(..).partition(|held| is_wanted(&held.item));
            *queue = others;
            let theirs: VecDeque<Held<T>> = theirs;
            wanted.extend(theirs.into_iter().map(|held| held.item));
        }
        wanted
    }

    /// Returns the levels of all buckets.
    pub fn levels(&self) -> Levels {
        let [all, reads, writes] = self.pairs;
        let buckets = [all.iops, all.bandwidth, reads.iops, reads.bandwidth, writes.iops, writes.bandwidth];
        Levels(buckets.map(|bucket| bucket.map(|bucket| bucket.units())))
    }

    /// Continues with the levels of another process.
    pub fn resume(&mut self, levels: &Levels) {
        let buckets = self.pairs.iter_mut().flat_map(|pair| [&mut pair.iops, &mut pair.bandwidth]);
        for (bucket, level) in buckets.zip(levels.0) {
            if let (Some(bucket), Some(level)) = (bucket, level) {
                bucket.resume(level);
            }
        }
    }

    /// Returns the direction that is next at the shared limits.
    fn candidate(&self) -> Option<Direction> {
        self.oldest(|direction, bytes| self.own(direction).allows(bytes))
    }

    fn oldest(&self, is_ready: impl Fn(Direction, u64) -> bool) -> Option<Direction> {
        let heads = Direction::ALL.into_iter().filter_map(|direction| Some((direction, self.head(direction)?)));
        let ready = heads.filter(|(direction, head)| is_ready(*direction, head.bytes));
        ready.min_by_key(|(_, head)| head.came).map(|(direction, _)| direction)
    }

    fn refill(&mut self, now: u64) {
        let waiting = [self.waiting() > 0, !self.reads.is_empty(), !self.writes.is_empty()];
        for (pair, waiting) in self.pairs.iter_mut().zip(waiting) {
            pair.each(|bucket| bucket.refill(now, waiting));
        }
    }

    fn take(&mut self, direction: Direction, bytes: u64) {
        let take = if self.open { Bucket::take_anyway } else { Bucket::take };
        let [total, reads, writes] = &mut self.pairs;
        let own = if direction == Direction::Read { reads } else { writes };
        for pair in [total, own] {
            pair.iops.iter_mut().for_each(|bucket| take(bucket, 1));
            pair.bandwidth.iter_mut().for_each(|bucket| take(bucket, bytes));
        }
        self.allowance.take(cost(bytes));
    }

    fn total(&self) -> &Pair {
        let [total, ..] = &self.pairs;
        total
    }

    fn own(&self, direction: Direction) -> &Pair {
        let [_, reads, writes] = &self.pairs;
        if direction == Direction::Read { reads } else { writes }
    }

    fn head(&self, direction: Direction) -> Option<&Held<T>> {
        if direction == Direction::Read { self.reads.front() } else { self.writes.front() }
    }

    fn queue(&mut self, direction: Direction) -> &mut VecDeque<Held<T>> {
        if direction == Direction::Read { &mut self.reads } else { &mut self.writes }
    }
}

impl Pair {
    fn each(&mut self, act: impl Fn(&mut Bucket)) {
        self.iops.iter_mut().chain(&mut self.bandwidth).for_each(act);
    }

    fn allows(&self, bytes: u64) -> bool {
        self.iops.is_none_or(|bucket| bucket.allows(1)) && self.bandwidth.is_none_or(|bucket| bucket.allows(bytes))
    }

    fn wait(&self, bytes: u64) -> u64 {
        let iops = self.iops.map_or(0, |bucket| bucket.wait(1));
        iops.max(self.bandwidth.map_or(0, |bucket| bucket.wait(bytes)))
    }
}

#[cfg(test)]
mod test;
