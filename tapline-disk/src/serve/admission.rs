//! Everything that can hold a request back before the disk has it, in this order:
//!
//! 1. *quarantine*: after a crash, one request at a time (docs/decisions/0018);
//! 2. the disk's *limits* (0047);
//! 3. its *share* of the storage (0051);
//! 4. *space*: where requests may wait for it (`--when-full wait`).
//!
//! A flush is held by none of them, but that it comes when its turn comes in quarantine, and waits for space if it
//! finds none. Requests in quarantine are not held to limits and share. A request that needs no space overtakes those
//! that wait for it. A request is counted, for the statistics of the disk, when it has passed the first three: its time
//! before that is a part of its time in the ring. A peer may have back what is held, and nothing is held any more once
//! the disk ends.
//!
//! It knows no server, no disk, no timer and no clock: the state of the disk and the time are given. Invariants: each
//! request leaves once: begun, refused or given back; while one is held that no request in flight will release,
//! [`Admission::deadline`] says when one may leave.

pub mod limits;
mod quarantine;
pub mod share;
mod space;

use control::answer::Condition;
use disk::{RedoLog, Request, Status, Token};

use limits::{Limiter, Waited};
use quarantine::Quarantine;
use space::{Fate, Space};

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
        crate::serve::admission::test::is_planted(crate::serve::admission::test::Planted::$fault)
    };
}

use planted;

#[cfg(test)]
mod test;

/// The requests of a disk that are held back, and the reasons to hold more.
#[derive(Debug)]
pub struct Admission {
    quarantine: Quarantine,
    /// The limits and the share, to be set and reported.
    pub limiter: Limiter,
    space: Space,
}

/// What the disk is doing, as far as it decides what is accepted.
#[derive(Clone, Copy, Debug)]
pub struct DiskState {
    /// Requests in flight.
    pub in_flight: usize,
    /// Nothing is under way that a request has left behind.
    pub is_quiet: bool,
    /// A verb of the control socket is at work.
    pub is_working: bool,
}

/// The peers that wait for their requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peers {
    /// There are some.
    Here,
    /// They wait for their answers to release the disk.
    Finishing,
    /// There are none.
    Gone,
}

/// What is to be done with a request that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Arrival {
    /// Begin it.
    Start,
    /// Give it to [`Admission::hold`].
    Hold(Reason),
    /// Answer it with an error: processes have died of it.
    Fail,
}

/// Why a request is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A limit, or the disk's share of the storage.
    Pace,
    /// There is no space.
    Space,
}

/// A request that has been released.
#[derive(Debug)]
pub enum Released {
    /// Begin it.
    Start(Request),
    /// Answer it: there is no space, and none is waited for.
    Refuse(Request),
}

/// A request that its peer has back.
#[derive(Debug)]
pub struct Recalled {
    /// The request.
    pub request: Request,
    /// Whether it had been counted.
    pub counted: bool,
}

impl Admission {
    /// Nothing is held. `waits_for_space`: a request that finds no space waits.
    pub fn new(limiter: Limiter, waits_for_space: bool) -> Admission {
        Admission { quarantine: Quarantine::default(), limiter, space: Space::new(waits_for_space) }
    }

    /// The process begins to serve: with a quarantine if the last one has died, as its log says. `fatal`: requests that
    /// were failed before, since processes had died of them.
    pub fn begin(&mut self, log: Option<&RedoLog>, fatal: u64, now: u64) {
        self.limiter.go();
        self.quarantine = Quarantine::after(log, fatal, now);
    }

    /// Whether [`Admission::arrive`] would have every request begun, until one is held.
    #[inline(always)]
    pub fn is_open(&self) -> bool {
        !self.quarantine.is_on() && !self.limiter.is_active() && !self.space.is_full()
    }

    /// Whether requests are begun one at a time.
    #[inline(always)]
    pub fn is_in_quarantine(&self) -> bool {
        self.quarantine.is_on()
    }

    /// How many requests may be taken from the peers now, of `most`.
    pub fn batch(&self, most: usize, disk: DiskState, now: u64) -> usize {
        if !self.quarantine.is_on() {
            return most;
        }
        let settled = disk.is_quiet || disk.is_working || self.space.is_full();
        let is_alone = disk.in_flight == 0 || planted!(TwoInQuarantine);
        let may_take = self.quarantine.rests_until(now).is_none() && is_alone && settled;
        usize::from(may_take)
    }

    /// Whether the process would do nothing but the next request of the quarantine.
    pub fn is_alone(&self, disk: DiskState) -> bool {
        self.quarantine.is_on() && disk.is_quiet && !disk.is_working && !self.space.is_full()
    }

    /// Decides about a request that has come. `count` is called unless it is held by a limit or the share.
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

    /// How many requests are held.
    #[inline(always)]
    pub fn held(&self) -> usize {
        self.limiter.waiting() + self.space.waiting()
    }

    /// The next request that is released, if there is one. `count` is called for one that a limit or the share
    /// has held, with how long: it may still wait for space.
    pub fn next(
        &mut self,
        in_flight: usize,
        peers: Peers,
        now: u64,
        mut count: impl FnMut(&mut Request, Waited),
    ) -> Option<Released> {
        // Peers that release the disk, and those that are gone, leave nothing to be paced.
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

    /// Whether [`Admission::next`] returns a request that has waited for space.
    pub fn has_news_of_space(&self, in_flight: usize, peers: Peers, now: u64) -> bool {
        self.space.is_due(now, self.fate(in_flight, peers))
    }

    /// What may become of requests that wait for space. In quarantine they, too, are begun one at a time.
    fn fate(&self, in_flight: usize, peers: Peers) -> Fate {
        match peers {
            Peers::Gone => Fate::Refused,
            _ if self.quarantine.is_on() && in_flight > 0 && !planted!(TwoInQuarantine) => Fate::Held,
            Peers::Here | Peers::Finishing => Fate::Begun,
        }
    }

    /// Whether [`Admission::completed`] must see an answer of this status: nearly none, and requests are large.
    #[inline(always)]
    pub fn concerns(&self, status: Status) -> bool {
        self.space.concerns(status)
    }

    /// The disk has completed a request: it is returned, unless it has found no space and waits for some.
    pub fn completed(&mut self, request: Request, status: Status, now: u64) -> Option<(Request, Status)> {
        self.space.completed(request, status, now)
    }

    /// `count` answers can be seen by their peers.
    #[inline(always)]
    pub fn answered(&mut self, count: usize, log: Option<&RedoLog>) {
        if self.quarantine.is_on() {
            (0..count).for_each(|_| self.quarantine.answered(log));
        }
    }

    /// The error of a request that processes have died of can be seen by its peer.
    pub fn failed(&mut self, log: Option<&RedoLog>) {
        self.quarantine.failed(log);
        self.quarantine.answered(log);
    }

    /// Returns the held requests that their peers want back.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Recalled> {
        let by_pace = self.limiter.recall(&is_wanted).into_iter().map(|request| Recalled { request, counted: false });
        let by_space = self.space.recall(&is_wanted).into_iter().map(|request| Recalled { request, counted: true });
        by_pace.chain(by_space).collect()
    }

    /// When something changes that no request in flight will report. Earlier than now: at once.
    pub fn deadline(&mut self, in_flight: usize, now: u64) -> Option<u64> {
        if planted!(IsAlwaysDue) && self.held() > 0 {
            return Some(now);
        }
        let space = self.space.retry_at().filter(|_| self.fate(in_flight, Peers::Here) == Fate::Begun);
        [self.quarantine.rests_until(now), self.limiter.next_at(now), space].into_iter().flatten().min()
    }

    /// Holds nothing for a time while there is no timer that would end it.
    pub fn set_untimed(&mut self, untimed: bool) {
        self.limiter.set_untimed(untimed);
        if untimed {
            self.quarantine.end_rest();
            self.space.close();
        }
    }

    /// The disk ends: nothing is held any more, and a request that finds no space is refused.
    pub fn close(&mut self) {
        self.limiter.set_ending(true);
        self.space.close();
    }

    /// There may be space again.
    pub fn may_have_space(&mut self) {
        self.space.may_have_space();
    }

    /// Whether requests wait for space.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.space.is_full()
    }

    /// The requests that wait for space and stay with their peers when the disk is handed over.
    pub fn waiting_for_space(&self) -> impl Iterator<Item = &Request> {
        self.space.requests()
    }

    /// What keeps the disk from writing.
    pub fn condition(&self, broken: bool) -> Condition {
        let (full, waiting) = (self.space.is_full(), self.space.waiting());
        Condition { broken, full, waiting, fatal: self.quarantine.fatal() }
    }

    /// Requests that were failed, since processes had died of them.
    pub fn fatal(&self) -> u64 {
        self.quarantine.fatal()
    }

    /// How many processes have died of one request, as far as that is known.
    pub fn deaths(&self) -> Option<u64> {
        self.quarantine.deaths()
    }

    /// Requests that the next process is to begin one at a time, if this one dies.
    pub fn left_in_quarantine(&self) -> u64 {
        self.quarantine.left()
    }
}
