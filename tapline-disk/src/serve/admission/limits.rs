//! The limits of a disk, its share of the storage, and the requests held for either (docs/decisions/0047, 0051).
//!
//! It knows no disk, no server and no clock: it holds requests and returns them later. Flushes and queries of extents
//! never wait: a flush covers completed writes, and a held request is not completed. A discard or a write of zeroes
//! counts as one write of no bytes. While a request waits for the disk's share, another one of the disk is in flight,
//! whose completion releases it; retries are for storage that does not respond.
//!
//! Invariants: each request is returned once; each released request is counted.

mod bucket;
mod gate;

use control::limits::Limits;
use disk::{Operation, Request, Token};
use serde::{Deserialize, Serialize};
use shares::{Allowance, cost};

use super::planted;
use super::share::{self, Sharing};
use gate::{Direction, Gate, Held, Levels};

/// The retry interval in nanoseconds for requests held by the share, while none of the disk's requests completes.
const SHARE_RETRY_NS: u64 = 100_000_000;

/// The limits and the share of a served disk.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    gate: Gate<Request>,
    /// The disk's share of its storage, if other disks use that.
    sharing: Option<Sharing>,
    /// Whether requests must be checked: there are limits or other disks on the storage, or requests are still held.
    active: bool,
    /// When to retry requests that are held by the share.
    try_at: u64,
    /// Why nothing is held although there are limits.
    open: Open,
}

/// The time for which a request was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// In nanoseconds.
    pub ns: u64,
    /// Whether the disk's share held it last; else a limit.
    pub by_share: bool,
}

/// Reasons to hold nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    /// The disk stops or is taken over by another process.
    ends: bool,
    /// There is no peer, or one waits to release the disk.
    deserted: bool,
    /// There is no timer to end a wait.
    untimed: bool,
}

/// What a process passes to its successor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    limits: Limits,
    levels: Levels,
    /// Its share of the storage, if that is shared.
    pub share: Option<share::Handed>,
}

impl Limiter {
    /// Makes a limiter with full buckets.
    pub fn new(limits: Limits, now: u64) -> Limiter {
        let gate = Gate::new(&limits, now);
        let active = !limits.is_none();
        Limiter { limits, gate, sharing: None, active, try_at: 0, open: Open::default() }
    }

    /// Continues with the limiter of another process.
    pub fn taken_over(handed: Handed, now: u64) -> Limiter {
        let mut limiter = Limiter::new(handed.limits, now);
        limiter.gate.resume(&handed.levels);
        limiter
    }

    /// Returns what the successor of this process needs.
    pub fn handed(&mut self) -> Handed {
        let share = self.sharing.as_mut().and_then(Sharing::handed);
        Handed { limits: self.limits, levels: self.gate.levels(), share }
    }

    /// Replaces the share of the storage; leaves the previous one.
    pub fn set_sharing(&mut self, sharing: Option<Sharing>) {
        self.leave();
        self.sharing = sharing;
        self.gate.set_allowance(Allowance::ALL);
        self.update_active();
    }

    /// Returns the disk's share of its storage, if that may be shared.
    #[inline(always)]
    pub fn sharing(&mut self) -> Option<&mut Sharing> {
        self.sharing.as_mut()
    }

    /// Called when the process begins, and its predecessor has gone.
    pub fn go(&self) {
        self.sharing.iter().for_each(Sharing::go);
    }

    /// Called when the process ends without a successor.
    pub fn leave(&mut self) {
        self.sharing.iter_mut().for_each(Sharing::leave);
    }

    /// Updates what the share allows now, with `in_flight` requests in flight.
    pub fn allot(&mut self, in_flight: usize, now: u64) {
        if let Some(sharing) = &mut self.sharing {
            self.gate.set_allowance(sharing.allowance(in_flight, now));
        }
    }

    /// Publishes the state to the disks that share the storage, after a loop iteration with `answered` completions.
    pub fn turned(&mut self, answered: usize, in_flight: usize, now: u64) {
        let waits = self.gate.waits_for_share();
        let Some(sharing) = &mut self.sharing else { return };
        sharing.turned(answered, in_flight, waits, now);
        self.update_active();
    }

    /// Returns whether requests must be checked here.
    #[inline(always)]
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// Returns the limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the number of held requests.
    pub fn waiting(&self) -> usize {
        self.gate.waiting()
    }

    /// Returns the number of held requests if they wait for the disk's share, else 0.
    pub fn waiting_for_share(&self) -> usize {
        if self.gate.waits_for_share() { self.waiting() } else { 0 }
    }

    /// Replaces the limits.
    pub fn set(&mut self, limits: Limits, now: u64) {
        self.limits = limits;
        self.gate.set(&limits, now);
        self.update_active();
    }

    /// Sets whether the disk stops or is handed over; nothing is held then.
    pub fn set_ending(&mut self, ends: bool) {
        self.open.ends = ends;
        self.update_open();
    }

    /// Sets whether there is no peer, or one waits for its completions to release the disk; nothing is held then.
    pub fn set_deserted(&mut self, deserted: bool) {
        self.open.deserted = deserted;
        self.update_open();
    }

    /// Sets whether there is no timer to end a wait; nothing is held then.
    pub fn set_untimed(&mut self, untimed: bool) {
        self.open.untimed = untimed;
        self.update_open();
    }

    /// Returns whether a request that has arrived may start now, and then counts it; else it must be held.
    pub fn admits(&mut self, request: &Request, now: u64) -> bool {
        let Some(direction) = direction_of(request.operation()) else { return true };
        let bytes = bytes_of(request);
        let admitted = self.gate.admits(direction, bytes, now);
        if admitted {
            self.count(bytes);
        }
        admitted
    }

    /// Holds a request that was not admitted.
    pub fn hold(&mut self, request: Request, now: u64) {
        let direction = direction_of(request.operation()).unwrap_or(Direction::Write);
        self.gate.hold(direction, bytes_of(&request), now, request);
    }

    /// Returns a held request that may start now, and how long it has waited.
    pub fn release(&mut self, now: u64) -> Option<(Request, Waited)> {
        let Held { item, bytes, came, by_share } = self.gate.release(now)?;
        self.count(bytes);
        self.update_active();
        Some((item, Waited { ns: now.saturating_sub(came), by_share }))
    }

    fn count(&mut self, bytes: u64) {
        if let Some(sharing) = &mut self.sharing {
            sharing.begin(cost(bytes));
        }
    }

    /// Returns the requests that their peers take back, as if they had not arrived.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let wanted = self.gate.recall(|request| is_wanted(request.token()) && !planted!(KeepsRecalled));
        self.update_active();
        wanted
    }

    /// Returns when the next held request may start; now, if one may already.
    pub fn next_at(&mut self, now: u64) -> Option<u64> {
        if !self.gate.waits_for_share() {
            return self.gate.next_at(now);
        }
        if self.try_at <= now {
            self.try_at = now.saturating_add(SHARE_RETRY_NS);
        }
        Some(self.try_at)
    }

    fn update_open(&mut self) {
        self.gate.set_open(self.open.ends || self.open.deserted || self.open.untimed);
    }

    fn update_active(&mut self) {
        let is_shared = self.sharing.as_ref().is_some_and(Sharing::is_shared);
        self.active = is_shared || !self.limits.is_none() || self.gate.waiting() > 0;
    }
}

/// Returns the direction of an operation, if it is limited.
fn direction_of(operation: Operation) -> Option<Direction> {
    match operation {
        Operation::Flush if planted!(LimitsFlush) => Some(Direction::Write),
        Operation::Read => Some(Direction::Read),
        Operation::Write { .. } | Operation::Patch { .. } => Some(Direction::Write),
        Operation::Discard | Operation::WriteZeroes { .. } => Some(Direction::Write),
        Operation::Flush | Operation::Extents { .. } => None,
    }
}

/// Returns the bytes that count: none if only the storage's metadata changes.
fn bytes_of(request: &Request) -> u64 {
    match request.operation() {
        Operation::Discard | Operation::WriteZeroes { .. } => 0,
        _ => request.span().len,
    }
}
