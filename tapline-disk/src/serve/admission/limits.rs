//! What a disk is limited to, its share of the storage, and requests that wait for either (docs/decisions/0047, 0051).
//!
//! It knows no disk, no server and no clock: it holds requests and returns them later. Flushes and queries of extents
//! never wait: a flush covers writes that were answered, and a request that waits was not. A discard or a write of
//! zeroes is one write of no bytes. While a request waits for the disk's share another one of the disk is in flight,
//! whose end releases it; a time to try again is for a storage that does not answer.
//!
//! Invariants: each request is handed out once; what is released is counted.

mod bucket;
mod gate;

use control::limits::Limits;
use disk::{Operation, Request, Token};
use serde::{Deserialize, Serialize};
use shares::{Allowance, cost};

use super::planted;
use super::share::{self, Sharing};
use gate::{Direction, Gate, Held, Levels};

/// In nanoseconds, how often it is tried whether the disk's share lets something go while nothing of the disk ends.
const TRY: u64 = 100_000_000;

/// The limits and the share of a served disk.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    gate: Gate<Request>,
    /// The disk's part of its storage, where others share it.
    sharing: Option<Sharing>,
    /// There are limits, or there were and something waits still; or other disks use the storage.
    active: bool,
    /// When it is tried again whether the share lets something go.
    try_at: u64,
    /// Why nothing is held back, though there are limits.
    open: Open,
}

/// How long a request was held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waited {
    /// In nanoseconds.
    pub ns: u64,
    /// By the disk's share of its storage; else by a limit.
    pub by_share: bool,
}

/// Reasons to hold nothing back.
#[derive(Clone, Copy, Debug, Default)]
struct Open {
    /// The disk is handed to another process, or stops.
    ends: bool,
    /// No peer is there, or one waits to let the disk go.
    deserted: bool,
    /// There is no timer that would end a wait.
    untimed: bool,
}

/// What a process hands to the one that takes its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    limits: Limits,
    levels: Levels,
    /// Its share of the storage, where others share that.
    pub share: Option<share::Handed>,
}

impl Limiter {
    /// With full buckets.
    pub fn new(limits: Limits, now: u64) -> Limiter {
        let gate = Gate::new(&limits, now);
        let active = !limits.is_none();
        Limiter { limits, gate, sharing: None, active, try_at: 0, open: Open::default() }
    }

    /// That of another process, as it was there.
    pub fn taken_over(handed: Handed, now: u64) -> Limiter {
        let mut limiter = Limiter::new(handed.limits, now);
        limiter.gate.resume(&handed.levels);
        limiter
    }

    /// For the process that takes the place of this one.
    pub fn handed(&mut self) -> Handed {
        let share = self.sharing.as_mut().and_then(Sharing::handed);
        Handed { limits: self.limits, levels: self.gate.levels(), share }
    }

    /// Has this part of the storage from now on; another one is left.
    pub fn set_sharing(&mut self, sharing: Option<Sharing>) {
        self.leave();
        self.sharing = sharing;
        self.gate.set_allowance(Allowance::ALL);
        self.mind_active();
    }

    /// The disk's part of its storage, if others may share that.
    #[inline(always)]
    pub fn sharing(&mut self) -> Option<&mut Sharing> {
        self.sharing.as_mut()
    }

    /// The process begins, and no one before it is left.
    pub fn go(&self) {
        self.sharing.iter().for_each(Sharing::go);
    }

    /// The process ends, and no one takes its place.
    pub fn leave(&mut self) {
        self.sharing.iter_mut().for_each(Sharing::leave);
    }

    /// Finds out how much the share allows now, with `in_flight` requests in flight.
    pub fn allot(&mut self, in_flight: usize, now: u64) {
        if let Some(sharing) = &mut self.sharing {
            self.gate.set_allowance(sharing.allowance(in_flight, now));
        }
    }

    /// Tells the disks that share the storage how it is after a turn in which `answered` requests were answered.
    pub fn turned(&mut self, answered: usize, in_flight: usize, now: u64) {
        let waits = self.gate.waits_for_share();
        let Some(sharing) = &mut self.sharing else { return };
        sharing.turned(answered, in_flight, waits, now);
        self.mind_active();
    }

    /// Whether requests must pass here.
    #[inline(always)]
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// The limits.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.gate.waiting()
    }

    /// How many requests wait, if it is the disk's share that they wait for.
    pub fn waiting_for_share(&self) -> usize {
        if self.gate.waits_for_share() { self.waiting() } else { 0 }
    }

    /// Has other limits from now on.
    pub fn set(&mut self, limits: Limits, now: u64) {
        self.limits = limits;
        self.gate.set(&limits, now);
        self.mind_active();
    }

    /// Holds nothing back from now on, or does again: the disk is to be handed over or to stop.
    pub fn set_ending(&mut self, ends: bool) {
        self.open.ends = ends;
        self.mind_open();
    }

    /// Holds nothing back while no peer is there, or one waits for its answers to let the disk go.
    pub fn set_deserted(&mut self, deserted: bool) {
        self.open.deserted = deserted;
        self.mind_open();
    }

    /// Holds nothing back while there is no timer that would end a wait.
    pub fn set_untimed(&mut self, untimed: bool) {
        self.open.untimed = untimed;
        self.mind_open();
    }

    /// Whether a request that has come may be begun now, as which it is counted; else it is to be held.
    pub fn admits(&mut self, request: &Request, now: u64) -> bool {
        let Some(direction) = direction_of(request.operation()) else { return true };
        let bytes = bytes_of(request);
        let admitted = self.gate.admits(direction, bytes, now);
        if admitted {
            self.begun(bytes);
        }
        admitted
    }

    /// Holds a request that was not admitted.
    pub fn hold(&mut self, request: Request, now: u64) {
        let direction = direction_of(request.operation()).unwrap_or(Direction::Write);
        self.gate.hold(direction, bytes_of(&request), now, request);
    }

    /// A request that may be begun now, and how long it has waited.
    pub fn release(&mut self, now: u64) -> Option<(Request, Waited)> {
        let Held { item, bytes, came, by_share } = self.gate.release(now)?;
        self.begun(bytes);
        self.mind_active();
        Some((item, Waited { ns: now.saturating_sub(came), by_share }))
    }

    fn begun(&mut self, bytes: u64) {
        if let Some(sharing) = &mut self.sharing {
            sharing.begin(cost(bytes));
        }
    }

    /// Hands out those that are wanted back by their peers, as if they had not come.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let wanted = self.gate.recall(|request| is_wanted(request.token()) && !planted!(KeepsRecalled));
        self.mind_active();
        wanted
    }

    /// When the next request may go, if one waits: now, if one may.
    pub fn next_at(&mut self, now: u64) -> Option<u64> {
        if !self.gate.waits_for_share() {
            return self.gate.next_at(now);
        }
        if self.try_at <= now {
            self.try_at = now.saturating_add(TRY);
        }
        Some(self.try_at)
    }

    fn mind_open(&mut self) {
        self.gate.set_open(self.open.ends || self.open.deserted || self.open.untimed);
    }

    fn mind_active(&mut self) {
        let is_shared = self.sharing.as_ref().is_some_and(Sharing::is_shared);
        self.active = is_shared || !self.limits.is_none() || self.gate.waiting() > 0;
    }
}

/// The direction of an operation that is limited.
fn direction_of(operation: Operation) -> Option<Direction> {
    match operation {
        Operation::Flush if planted!(LimitsFlush) => Some(Direction::Write),
        Operation::Read => Some(Direction::Read),
        Operation::Write { .. } | Operation::Patch { .. } => Some(Direction::Write),
        Operation::Discard | Operation::WriteZeroes { .. } => Some(Direction::Write),
        Operation::Flush | Operation::Extents { .. } => None,
    }
}

/// The bytes that pass: none where only the storage's metadata changes.
fn bytes_of(request: &Request) -> u64 {
    match request.operation() {
        Operation::Discard | Operation::WriteZeroes { .. } => 0,
        _ => request.span().len,
    }
}
