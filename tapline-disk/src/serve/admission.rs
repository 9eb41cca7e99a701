//! Everything that can hold a request back between its transport and the disk, in this order:
//!
//! 1. *quarantine*: after a crash, one request at a time (docs/decisions/0018);
//! 2. the disk's *limits* (0047);
//! 3. its *share* of the storage (0051);
//! 4. *space*: requests may have to wait for it (`--when-full wait`).
//!
//! A flush is held by none of them, except that it waits for its turn in quarantine, and for space if it finds none.
//! Limits and share do not apply to requests in quarantine. A request that needs no space overtakes those that wait for
//! it. A request is counted in the statistics of the disk when it has passed the first three: the time before that is
//! part of its time in the ring. A peer may take back held requests, and nothing is held any more once the disk stops.
//!
//! It knows no server, no disk, no timer and no clock: callers pass the state of the disk and the time. Invariants:
//! each request leaves once: started, refused or returned; while a request is held that no completion will release,
//! [`Admission::deadline`] returns when one may leave.

pub mod limits;
mod quarantine;
pub mod share;
mod space;

use control::answer::Condition;
use disk::{RedoLog, Request, Status, Token};

use limits::{Limiter, Waited};
use quarantine::Quarantine;
use space::{Fate, Space};

/// Whether a fault is planted, to check that a test finds it.
#[cfg(not(test))]
macro_rules! planted {
    ($fault:ident) => {
        false
    };
}

#[cfg(test)]
macro_rules! planted {
    ($fault:ident) => {
        crate::serve::admission::test::is_planted(crate::serve::admission::test::Planted::$fault)
    };
}

use planted;

#[cfg(test)]
mod test;

/// The held requests of a disk, and the reasons to hold more.
#[derive(Debug)]
pub struct Admission {
    quarantine: Quarantine,
    /// The limits and the share, to be set and reported.
    pub limiter: Limiter,
    space: Space,
}

/// The state of the disk, as far as admission depends on it.
#[derive(Clone, Copy, Debug)]
pub struct DiskState {
    /// Requests in flight.
    pub in_flight: usize,
    /// Whether no work of past requests is in progress.
    pub is_quiet: bool,
    /// Whether a verb of the control socket is being executed.
    pub is_working: bool,
}

/// Whether peers wait for their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// There are peers.
    Here,
    /// The peers wait for their completions to release the disk.
    Finishing,
    /// There are no peers.
    Gone,
}

/// What to do with a request that has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Arrival {
    /// Start it.
    Start,
    /// Pass it to [`Admission::hold`].
    Hold(Reason),
    /// Complete it with an error: it has killed processes.
    Fail,
}

/// Why a request is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A limit, or the disk's share of the storage.
    Pace,
    /// Lack of space.
    Space,
}

/// A request that is no longer held.
#[derive(Debug)]
pub enum Released {
    /// Start it.
    Start(Request),
    /// Complete it with an error: there is no space, and it must not wait for any.
    Refuse(Request),
}

/// A held request that its peer has taken back.
#[derive(Debug)]
pub struct Recalled {
    /// The request.
    pub request: Request,
    /// Whether it was counted in the statistics.
    pub counted: bool,
}

impl Admission {
    /// Makes an admission that holds nothing. With `waits_for_space`, a request that finds no space waits.
    pub fn new(limiter: Limiter, waits_for_space: bool) -> Admission {
        Admission { quarantine: Quarantine::default(), limiter, space: Space::new(waits_for_space) }
    }

    /// Called when the process begins to serve. There is a quarantine if the last process has died, according to its
    /// log. `fatal`: the number of requests failed by earlier processes, because they had killed some.
    pub fn begin(&mut self, log: Option<&RedoLog>, fatal: u64, now: u64) {
        self.limiter.go();
        self.quarantine = Quarantine::after(log, fatal, now);
    }

    /// Returns true if [`Admission::arrive`] would start every request, until one is held.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        !self.quarantine.is_on() && !self.limiter.is_active() && !self.space.is_full()
    }

    /// Returns whether requests are started one at a time.
    #[inline(always)]
    pub fn is_in_quarantine(&self) -> bool {
        self.quarantine.is_on()
    }

    /// Returns how many requests, at most `most`, may be accepted from the peers now.
    pub fn batch(&self, most: usize, disk: DiskState, now: u64) -> usize {
        if !self.quarantine.is_on() {
            return most;
        }
        let settled = disk.is_quiet || disk.is_working || self.space.is_full();
        let is_alone = disk.in_flight == 0 || planted!(TwoInQuarantine);
        let may_take = self.quarantine.rests_until(now).is_none() && is_alone && settled;
        usize::from(may_take)
    }

    /// Returns whether the process would do nothing but the next request of the quarantine.
    pub fn is_alone(&self, disk: DiskState) -> bool {
        self.quarantine.is_on() && disk.is_quiet && !disk.is_working && !self.space.is_full()
    }

    /// Decides about a request that has arrived. `count` is called unless a limit or the share holds it.
    pub fn arrive(&mut self, request: &mut Request, now: u64, count: impl FnOnce(&mut Request)) -> Arrival {
        if !self.quarantine.is_on() && self.limiter.is_active() && !self.limiter.admits(request, now) {
            return Arrival::Hold(Reason::Pace);
        }
        count(request);
        if self.quarantine.condemns(request) {
            return Arrival::Fail;
        }
        if self.space.holds_back(request) { Arrival::Hold(Reason::Space) } else { Arrival::Start }
    }

    /// Holds a request, as [`Admission::arrive`] has decided.
    pub fn hold(&mut self, request: Request, reason: Reason, now: u64) {
        match reason {
            Reason::Pace => self.limiter.hold(request, now),
            Reason::Space => self.space.keep(request),
        }
    }

    /// Returns the number of held requests.
    #[inline(always)]
    pub fn held(&self) -> usize {
        self.limiter.waiting() + self.space.waiting()
    }

    /// Returns the next released request, if there is one. `count` is called with the wait of one that a limit or the
    /// share has held, even if it must still wait for space.
    pub fn next(
        &mut self,
        in_flight: usize,
        peers: Peers,
        now: u64,
        mut count: impl FnMut(&mut Request, Waited),
    ) -> Option<Released> {
        // No pacing for peers that release the disk, or that are gone.
        self.limiter.set_deserted(peers != Peers::Here);
        while let Some((mut request, waited)) = self.limiter.release(now) {
            count(&mut request, waited);
            if !self.space.holds_back(&request) {
                return Some(Released::Start(request));
            }
            self.space.keep(request);
        }
        self.space.next(now, self.fate(in_flight, peers))
    }

    /// Returns whether [`Admission::next`] would return a request that has waited for space.
    pub fn has_news_of_space(&self, in_flight: usize, peers: Peers, now: u64) -> bool {
        self.space.is_due(now, self.fate(in_flight, peers))
    }

    /// Returns what to do with requests that wait for space. In quarantine they, too, are started one at a time.
    fn fate(&self, in_flight: usize, peers: Peers) -> Fate {
        match peers {
            Peers::Gone => Fate::Refused,
            _ if self.quarantine.is_on() && in_flight > 0 && !planted!(TwoInQuarantine) => Fate::Held,
            Peers::Here | Peers::Finishing => Fate::Begun,
        }
    }

    /// Returns whether [`Admission::completed`] must see a completion with this status. Hardly any must, and moving
    /// requests is costly.
    #[inline(always)]
    pub fn concerns(&self, status: Status) -> bool {
        self.space.concerns(status)
    }

    /// Called when the disk has completed a request: returns it, unless it has found no space and waits for some.
    pub fn completed(&mut self, request: Request, status: Status, now: u64) -> Option<(Request, Status)> {
        self.space.completed(request, status, now)
    }

    /// Called when `count` completions are visible to their peers.
    #[inline(always)]
    pub fn answered(&mut self, count: usize, log: Option<&RedoLog>) {
        if self.quarantine.is_on() {
            (0..count).for_each(|_| self.quarantine.answered(log));
        }
    }

    /// Called when the error of a condemned request is visible to its peer.
    pub fn failed(&mut self, log: Option<&RedoLog>) {
        self.quarantine.failed(log);
        self.quarantine.answered(log);
    }

    /// Returns the held requests that their peers take back.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Recalled> {
        let by_pace = self.limiter.recall(&is_wanted).into_iter().map(|request| Recalled { request, counted: false });
        let by_space = self.space.recall(&is_wanted).into_iter().map(|request| Recalled { request, counted: true });
        by_pace.chain(by_space).collect()
    }

    /// Returns when a request may leave without a completion; a time in the past means now.
    pub fn deadline(&mut self, in_flight: usize, now: u64) -> Option<u64> {
        if planted!(IsAlwaysDue) && self.held() > 0 {
            return Some(now);
        }
        let space = self.space.retry_at().filter(|_| self.fate(in_flight, Peers::Here) == Fate::Begun);
        [self.quarantine.rests_until(now), self.limiter.next_at(now), space].into_iter().flatten().min()
    }

    /// Disables timed waits while there is no timer to end them.
    pub fn set_untimed(&mut self, untimed: bool) {
        self.limiter.set_untimed(untimed);
        if untimed {
            self.quarantine.end_rest();
            self.space.close();
        }
    }

    /// Called when the disk stops: nothing is held any more, and a request that finds no space is refused.
    pub fn close(&mut self) {
        self.limiter.set_ending(true);
        self.space.close();
    }

    /// Called when there may be space again.
    pub fn may_have_space(&mut self) {
        self.space.may_have_space();
    }

    /// Returns whether requests wait for space.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.space.is_full()
    }

    /// Returns the requests that wait for space, and stay with their peers when another process takes over the disk.
    pub fn waiting_for_space(&self) -> impl Iterator<Item = &Request> {
        self.space.requests()
    }

    /// Returns what prevents the disk from writing.
    pub fn condition(&self, broken: bool) -> Condition {
        let (full, waiting) = (self.space.is_full(), self.space.waiting());
        Condition { broken, full, waiting, fatal: self.quarantine.fatal(), away_ms: None }
    }

    /// Returns the number of requests that were failed because they had killed processes.
    pub fn fatal(&self) -> u64 {
        self.quarantine.fatal()
    }

    /// Returns how many processes have been killed by one request, as far as is known.
    pub fn deaths(&self) -> Option<u64> {
        self.quarantine.deaths()
    }

    /// Returns how many requests the next process must start one at a time, if this one dies.
    pub fn left_in_quarantine(&self) -> u64 {
        self.quarantine.left()
    }
}
