//! What a disk is limited to, its share of the storage, and requests that wait for either (docs/decisions/0047, 0051).
//!
//! It knows no disk and no server: it keeps requests and hands them out again. A request that has to wait was taken
//! from its peer and not begun: nothing that waits for the disk to be idle waits for it. Flushes and queries of extents
//! never wait: a flush covers what was answered, and what waits was not. A discard or a write of zeroes is one write of
//! no bytes. What waits for the disk's share has another request of the disk in flight, whose end lets it go; the timer
//! is for a storage that does not answer.
//!
//! Invariants: each request is handed out once; a timer is set only while one waits; what is released is counted.

mod bucket;
mod gate;

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use control::limits::Limits;
use disk::{Operation, Request, Token};
use serde::{Deserialize, Serialize};
use shares::{Allowance, cost};
use transport::{Interest, Timer, Watch, WatchKey};

use crate::serve::sharing::{self, Sharing};
use gate::{Direction, Gate, Held, Levels};

/// In nanoseconds, how often it is tried whether the disk's share lets something go while nothing of the disk ends.
const TRY: u64 = 100_000_000;

/// The limits of a served disk.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    gate: Gate<Request>,
    /// The disk's part of its storage, where others share it.
    sharing: Option<Sharing>,
    /// There are limits, or there were and something waits still; or other disks use the storage.
    active: bool,
    /// There were limits at some time, under this process or one before it.
    had_limits: bool,
    timer: Option<Timer>,
    /// When the timer fires.
    set_for: Option<u64>,
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
    no_timer: bool,
}

/// What a process hands to the one that takes its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    limits: Limits,
    levels: Levels,
    /// Earlier programs know none, and ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<sharing::Handed>,
}

impl Limiter {
    /// With full buckets.
    pub fn new(limits: Limits) -> Limiter {
        let gate = Gate::new(&limits, ::stats::monotonic());
        let (timer, set_for, open, sharing) = (None, None, Open::default(), None);
        let active = !limits.is_none();
        Limiter { limits, gate, sharing, active, had_limits: active, timer, set_for, try_at: 0, open }
    }

    /// That of another process, as it was there.
    pub fn taken_over(handed: Handed) -> Limiter {
        let mut limiter = Limiter::new(handed.limits);
        limiter.had_limits = true;
        limiter.gate.resume(&handed.levels);
        limiter
    }

    /// For the process that takes the place of this one, which has the command line of the first; nothing where there
    /// never were limits, and no share.
    pub fn handed(&mut self) -> Option<Handed> {
        let share = self.sharing.as_mut().and_then(Sharing::handed);
        let is_known = self.had_limits || share.is_some();
        is_known.then(|| Handed { limits: self.limits, levels: self.gate.levels(), share })
    }

    /// Has this part of the storage from now on.
    pub fn set_sharing(&mut self, sharing: Option<Sharing>) {
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

    /// Finds out what the share lets go now, with so many requests in flight.
    pub fn allot(&mut self, in_flight: usize, now: u64) {
        if let Some(sharing) = &mut self.sharing {
            self.gate.set_allowance(sharing.allowance(in_flight, now));
        }
    }

    /// Tells the disks that share the storage how it is after a turn in which so many requests were answered.
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
        self.had_limits |= !limits.is_none();
        self.gate.set(&limits, now);
        self.set_for = None;
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

    /// A request has come. It is handed back if it may be begun.
    pub fn offer(&mut self, request: Request, now: u64) -> Option<Request> {
        let Some(direction) = direction_of(request.operation()) else { return Some(request) };
        let bytes = bytes_of(&request);
        let offered = self.gate.offer(direction, bytes, now, request);
        if offered.is_some() {
            self.begun(bytes);
        }
        offered
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
        let wanted = self.gate.recall(|request| is_wanted(request.token()));
        self.mind_active();
        wanted
    }

    /// Has the timer fire when the next request may go. Whether one may go already. Without a timer nothing may wait.
    pub fn mind_timer(&mut self, now: u64, watch: &mut dyn Watch, key: WatchKey) -> io::Result<bool> {
        let Some(at) = self.next_at(now) else { return Ok(false) };
        if at <= now {
            return Ok(true);
        }
        if self.set_for == Some(at) {
            return Ok(false);
        }
        let set = self.set_timer(Duration::from_nanos(at - now), watch, key);
        self.set_for = set.is_ok().then_some(at);
        self.open.no_timer = set.is_err();
        self.mind_open();
        set.map(|()| false)
    }

    fn next_at(&mut self, now: u64) -> Option<u64> {
        if !self.gate.waits_for_share() {
            return self.gate.next_at(now);
        }
        if self.try_at <= now {
            self.try_at = now.saturating_add(TRY);
        }
        Some(self.try_at)
    }

    fn set_timer(&mut self, after: Duration, watch: &mut dyn Watch, key: WatchKey) -> io::Result<()> {
        if self.timer.is_none() {
            let timer = Timer::new()?;
            watch.watch(timer.as_fd(), Interest::Read, key)?;
            self.timer = Some(timer);
        }
        self.timer.as_ref().map_or(Ok(()), |timer| timer.set(after))
    }

    /// The timer has fired.
    pub fn timer_fired(&mut self) {
        self.set_for = None;
    }

    fn mind_open(&mut self) {
        self.gate.set_open(self.open.ends || self.open.deserted || self.open.no_timer);
    }

    fn mind_active(&mut self) {
        let is_shared = self.sharing.as_ref().is_some_and(Sharing::is_shared);
        self.active = is_shared || !self.limits.is_none() || self.gate.waiting() > 0;
    }
}

/// The direction of an operation that is limited.
fn direction_of(operation: Operation) -> Option<Direction> {
    match operation {
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
