//! What a disk's limits and its share of the storage let through now, what has to wait, and until when.
//!
//! It knows directions and sizes of what waits, and no request; times are given, in nanoseconds, so that tests run it
//! on a time of their own. Reads and writes wait apart, each in their order. Of those that their own limits allow, the
//! one that has come first has the next turn at the limits of all, however large it is.
//!
//! Invariants: what was kept is handed out once; while something waits for a limit, [`Gate::next_at`] is later than now
//! and brings something nearer; neither direction waits for a limit of the other one.

use std::collections::VecDeque;

use control::limits::Limits;
use serde::{Deserialize, Serialize};
use shares::{Allowance, cost};

use super::bucket::Bucket;

/// Which limits something is under, besides those of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Those of reads.
    Read,
    /// Those of writes.
    Write,
}

impl Direction {
    const ALL: [Direction; 2] = [Direction::Read, Direction::Write];
}

/// Something that wants to go.
#[derive(Debug)]
pub struct Held<T> {
    /// What it is.
    pub item: T,
    /// Its bytes.
    pub bytes: u64,
    /// When it came.
    pub came: u64,
    /// The limits would have let it go then: it has waited for the disk's share.
    pub by_share: bool,
}

/// A limit of requests and one of bytes. No limit is no bucket.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    iops: Option<Bucket>,
    bandwidth: Option<Bucket>,
}

/// The levels of all buckets, for a process that continues with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Levels([Option<i64>; 6]);

/// The limits, and what waits for them.
#[derive(Debug)]
pub struct Gate<T> {
    /// Of all, of reads, of writes.
    pairs: [Pair; 3],
    reads: VecDeque<Held<T>>,
    writes: VecDeque<Held<T>>,
    /// Nothing is held back: it is only counted.
    open: bool,
    /// What the disk's share of the storage lets go now.
    allowance: Allowance,
}

impl<T> Gate<T> {
    /// Full buckets.
    pub fn new(limits: &Limits, now: u64) -> Gate<T> {
        let (pairs, allowance) = ([Pair::default(); 3], Allowance::ALL);
        let mut gate = Gate { pairs, reads: VecDeque::new(), writes: VecDeque::new(), open: false, allowance };
        gate.set(limits, now);
        gate
    }

    /// Has other limits from now on. What waits is held to them at once.
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

    /// Holds nothing back while `open`. It is counted all the same, up to what a second brings.
    pub fn set_open(&mut self, open: bool) {
        self.open = open;
    }

    /// Lets go no more than this from now on, besides what the limits let go.
    pub fn set_allowance(&mut self, allowance: Allowance) {
        self.allowance = allowance;
    }

    /// Whether something waits that only the disk's share holds back.
    pub fn waits_for_share(&self) -> bool {
        let by_limits = || {
            let next = self.candidate().and_then(|direction| self.head(direction));
            next.is_some_and(|head| self.total().allows(head.bytes))
        };
        !self.open && !self.allowance.allows() && by_limits()
    }

    /// How much waits.
    pub fn waiting(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    fn items(&self) -> impl Iterator<Item = &T> {
        self.reads.iter().chain(&self.writes).map(|held| &held.item)
    }

    /// Whether something that has come may go at once, as which it is counted then; else it is to be held.
    pub fn admits(&mut self, direction: Direction, bytes: u64, now: u64) -> bool {
        self.refill(now);
        let may_go = self.open || self.limits_allow(direction, bytes) && self.allowance.allows();
        let admitted = may_go && self.waiting() == 0;
        if admitted {
            self.take(direction, bytes);
        }
        admitted
    }

    /// Holds something that was not admitted just now.
    pub fn hold(&mut self, direction: Direction, bytes: u64, now: u64, item: T) {
        let by_share = self.limits_allow(direction, bytes);
        self.queue(direction).push_back(Held { item, bytes, came: now, by_share });
    }

    fn limits_allow(&self, direction: Direction, bytes: u64) -> bool {
        self.own(direction).allows(bytes) && self.total().allows(bytes)
    }

    /// Something that has waited and may go now.
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

    /// When the limits let something go, if something waits: now, if something may.
    pub fn next_at(&self, now: u64) -> Option<u64> {
        let candidate = self.candidate();
        let waits = Direction::ALL.into_iter().filter_map(|direction| {
            let bytes = self.head(direction)?.bytes;
            match self.own(direction).wait(bytes) {
                0 if candidate == Some(direction) => Some(self.total().wait(bytes)),
                // It comes after the other one, which has its own time.
                0 => None,
                wait => Some(wait),
            }
        });
        let wait = waits.min();
        wait.map(|wait| now.saturating_add(if self.open { 0 } else { wait }))
    }

    /// Hands out what is wanted, as if it had not come.
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

    /// What was saved up, or is a debt.
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

    /// The direction whose turn it is at the limits of all.
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
