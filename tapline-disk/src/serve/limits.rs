//! What a disk is limited to, and requests that wait for it (docs/decisions/0047).
//!
//! It knows no disk and no server: it keeps requests and hands them out again. A request that has to wait was taken
//! from its peer and not begun: nothing that waits for the disk to be idle waits for it. Flushes and queries of extents
//! never wait: a flush covers what was answered, and what waits was not. A discard or a write of zeroes is one write of
//! no bytes.
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
use transport::{Interest, Timer, Watch, WatchKey};

use gate::{Direction, Gate, Held, Levels};

/// The limits of a served disk.
#[derive(Debug)]
pub struct Limiter {
    limits: Limits,
    gate: Gate<Request>,
    /// There are limits, or there were and something waits still.
    active: bool,
    /// There were limits at some time, under this process or one before it.
    had_limits: bool,
    timer: Option<Timer>,
    /// When the timer fires.
    set_for: Option<u64>,
    /// Why nothing is held back, though there are limits.
    open: Open,
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
}

impl Limiter {
    /// With full buckets.
    pub fn new(limits: Limits) -> Limiter {
        let gate = Gate::new(&limits, ::stats::monotonic());
        let (timer, set_for, open) = (None, None, Open::default());
        let active = !limits.is_none();
        Limiter { limits, gate, active, had_limits: active, timer, set_for, open }
    }

    /// That of another process, as it was there.
    pub fn taken_over(handed: Handed) -> Limiter {
        let mut limiter = Limiter::new(handed.limits);
        limiter.had_limits = true;
        limiter.gate.resume(&handed.levels);
        limiter
    }

    /// For the process that takes the place of this one, which has the command line of the first; nothing where there
    /// never were limits.
    pub fn handed(&self) -> Option<Handed> {
        self.had_limits.then(|| Handed { limits: self.limits, levels: self.gate.levels() })
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
        self.gate.offer(direction, bytes, now, request)
    }

    /// A request that may be begun now, and for how many nanoseconds it has waited.
    pub fn release(&mut self, now: u64) -> Option<(Request, u64)> {
        let Held { item, came, .. } = self.gate.release(now)?;
        self.mind_active();
        Some((item, now.saturating_sub(came)))
    }

    /// Hands out those that are wanted back by their peers, as if they had not come.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let wanted = self.gate.recall(|request| is_wanted(request.token()));
        self.mind_active();
        wanted
    }

    /// Has the timer fire when the next request may go. Whether one may go already. Without a timer nothing may wait.
    pub fn mind_timer(&mut self, now: u64, watch: &mut dyn Watch, key: WatchKey) -> io::Result<bool> {
        let Some(at) = self.gate.next_at(now) else { return Ok(false) };
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
        self.active = !self.limits.is_none() || self.gate.waiting() > 0;
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
