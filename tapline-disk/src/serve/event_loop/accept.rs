//! Requests on their way from the server through [admission](crate::serve::admission) to the disk.
//!
//! It knows no protocol and no format. Invariants: before a request is begun, the fact that something is in flight is
//! recorded for the next process; a request is counted once, and its time before that is a part of its time in the
//! ring; a held request is begun once, answered, or returned to its peer.

use std::time::Duration;

use disk::{Request, Status};
use transport::Server;

use super::EventLoop;
use crate::process::fault;
use crate::serve::admission::limits::Waited;
use crate::serve::admission::{Arrival, Peers, Recalled, Released};
use crate::serve::blkback_stats::BlkbackStats;
use crate::serve::control::FLUSH;
use crate::serve::stats::Stats;

/// Requests taken in before operations are submitted and answers published. Small enough that the peer can work on the
/// answers to one batch while we are at the next, large enough that a system call and an interrupt a batch do not
/// count.
const BATCH: usize = 16;

/// Bytes of them, after which no more are taken in: copying these takes longer than a batch of small ones.
const BATCH_BYTES: u64 = 256 << 10;

/// The same number while the storage has nothing to do, and will not be done at once: it begins with these while we are
/// at the next.
const FIRST: usize = 4;

/// Where requests are counted.
struct Ledger<'a>(&'a mut Stats, &'a mut Option<BlkbackStats>);

impl Ledger<'_> {
    /// A request has come at `now`, and has waited as it says.
    #[inline(always)]
    fn count(&mut self, request: &mut Request, now: u64) {
        self.0.came(request, now);
        if let Some(stats) = &mut self.1 {
            stats.came(request);
        }
    }
}

/// A wait as a request has it: more than four seconds count as that.
fn waited(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

impl<S: Server> EventLoop<S> {
    /// Begins the held requests that may go now, and takes a batch of new ones in; how many of both.
    pub(super) fn accept_requests(&mut self) -> usize {
        let is_open = self.admission.is_open();
        // Those that are held are older than those that come.
        let released = if is_open { 0 } else { self.refresh_admission() };
        let looked = self.time();
        let most = match self.disk.in_flight() {
            0 if self.polling.storage_takes_time(looked) => FIRST,
            _ => BATCH,
        };
        let most = if is_open { most } else { self.batch(most) };
        if most == 0 {
            return released;
        }
        let seen = self.seen.take().unwrap_or(looked);
        let (mut came, mut bytes) = (0, 0);
        while came < most && bytes < BATCH_BYTES {
            let Some(request) = self.server.pop(&self.geometry) else { return came + released };
            if came == 0 {
                self.note_about_to_begin(most);
            }
            bytes += request.span().len;
            // Nothing that is held could follow from a request that is begun.
            match is_open {
                true => self.count_and_begin(request, seen, came == 0),
                false => self.arrive(request, seen, came == 0),
            }
            came += 1;
        }
        // There may be more, which could have been seen by now.
        self.seen = Some(looked);
        came + released
    }

    /// Begins a request that has come, and could have been seen at `seen`, while admission is open.
    #[inline(always)]
    fn count_and_begin(&mut self, mut request: Request, seen: u64, first: bool) {
        let now = self.time();
        request.waited = waited(now.saturating_sub(seen));
        Ledger(&mut self.stats, &mut self.blkback_stats).count(&mut request, now);
        self.is_about_to_begin(&request, first);
        self.disk.submit(request, &mut self.engine);
    }

    /// A request is given to the disk next. `first`: of its batch. It is not moved here: on this way each move counts.
    #[inline(always)]
    fn is_about_to_begin(&mut self, request: &Request, first: bool) {
        if first {
            let now = self.time();
            self.pause.came(Duration::from_nanos(now));
        }
        fault::point("begin", request);
    }

    /// A request has come, and could have been seen at `seen`.
    #[cold]
    fn arrive(&mut self, mut request: Request, seen: u64, first: bool) {
        let now = self.time();
        request.waited = waited(now.saturating_sub(seen));
        let mut ledger = Ledger(&mut self.stats, &mut self.blkback_stats);
        match self.admission.arrive(&mut request, now, |request| ledger.count(request, now)) {
            Arrival::Start => self.begin(request, first),
            Arrival::Hold(reason) => self.admission.hold(request, reason, now),
            Arrival::Fail => self.fail(request),
        }
    }

    /// Begins a request that was counted. `first`: of its batch.
    fn begin(&mut self, request: Request, first: bool) {
        self.note_if_alone(&request);
        self.is_about_to_begin(&request, first);
        self.disk.submit(request, &mut self.engine);
        self.at_work(false);
    }

    /// Finds out what limits and share release now, and begins that; how many requests.
    #[cold]
    fn refresh_admission(&mut self) -> usize {
        let now = self.time();
        self.admission.limiter.allot(self.disk.in_flight(), now);
        if self.admission.held() == 0 { 0 } else { self.begin_released() }
    }

    /// Begins the requests that are not held any more, or answers them; how many.
    #[cold]
    pub(super) fn begin_released(&mut self) -> usize {
        let (peers, now) = (self.peers(), self.stats.now());
        self.time = Some(now);
        let mut count = 0;
        loop {
            let mut ledger = Ledger(&mut self.stats, &mut self.blkback_stats);
            let counted = |request: &mut Request, held: Waited| {
                request.waited = waited(held.ns.saturating_add(u64::from(request.waited)));
                ledger.count(request, now);
                match held.by_share {
                    true => ledger.0.shared(held.ns),
                    false => ledger.0.throttled(held.ns),
                }
            };
            let in_flight = self.disk.in_flight();
            let Some(released) = self.admission.next(in_flight, peers, now, counted) else { return count };
            if count == 0 {
                self.note_about_to_begin(BATCH);
            }
            count += 1;
            match released {
                Released::Start(request) => self.begin(request, count == 1),
                Released::Refuse(request) => self.give_late(request, Status::NoSpace),
            }
        }
    }

    /// Sees to the requests that wait for space, and to those that their peers want back, until there is nothing more
    /// to do at once; how many were answered or begun.
    pub(super) fn see_to_space(&mut self) -> usize {
        let mut moved = self.give_back();
        while self.admission.is_full() && self.has_news_of_space() {
            moved += self.begin_released() + self.answer();
        }
        self.tell_of_space();
        moved
    }

    fn has_news_of_space(&mut self) -> bool {
        let (peers, now) = (self.peers(), self.time());
        self.admission.has_news_of_space(self.disk.in_flight(), peers, now)
    }

    /// Gives back the held requests that their peers want, or that stay with them when the server stops; how many.
    pub(super) fn give_back(&mut self) -> usize {
        if self.admission.is_open() && !self.disk.is_quiesced() {
            return 0;
        }
        let Some(server) = self.server.takes_back() else { return 0 };
        let mut wanted = self.admission.recall(|token| server.recalls(token));
        // Requests are held back for as long as a client of the control socket likes.
        let quiesced = self.disk.take_waiting(|token| token != FLUSH && server.recalls(token));
        wanted.extend(quiesced.into_iter().map(|request| Recalled { request, counted: true }));
        let count = wanted.len();
        for Recalled { request, counted } in wanted {
            if counted {
                self.stats.given_back(&request);
            }
            server.give_back(request);
        }
        self.given_back += count;
        count
    }

    /// Has the loop woken when something that is held may go. Whether it may sleep until then.
    pub(super) fn may_sleep(&mut self) -> bool {
        if self.admission.is_open() && self.timer.is_none() {
            return self.server.may_sleep();
        }
        self.may_sleep_until_deadline()
    }

    #[cold]
    fn may_sleep_until_deadline(&mut self) -> bool {
        if self.admission.is_open() {
            self.end_timer();
        } else if !self.mind_deadline() {
            return false;
        }
        // Requests that wait in a ring while one of the quarantine is under way are no reason to stay awake.
        self.batch(1) == 0 || self.server.may_sleep()
    }

    /// Whether nothing that is held may go yet; the timer is set for when it may.
    fn mind_deadline(&mut self) -> bool {
        if self.admission.held() == 0 && !self.admission.is_in_quarantine() {
            return true;
        }
        let now = self.stats.now();
        // Requests have ended since it was found out what the share lets go.
        let in_flight = self.disk.in_flight();
        self.admission.limiter.allot(in_flight, now);
        let Some(at) = self.admission.deadline(in_flight, now) else { return true };
        if at <= now {
            return false;
        }
        let set = self.set_deadline(at, now);
        self.admission.set_untimed(set.is_err());
        if let Err(error) = &set {
            self.log.caused(format_args!("no request is held back for limits or space: no timer: {error}"));
        }
        set.is_ok()
    }

    fn peers(&mut self) -> Peers {
        match self.server.peers() {
            0 => Peers::Gone,
            _ if self.server.detaches().is_some_and(|device| device.is_finishing()) => Peers::Finishing,
            _ => Peers::Here,
        }
    }

    /// Says that the disk is full now, or is not any more.
    fn tell_of_space(&mut self) {
        let full = self.admission.is_full();
        if std::mem::replace(&mut self.said_full, full) == full {
            return;
        }
        self.control_due = true;
        self.log.caused(match full {
            true => "no space is left on the image's storage: writes wait for space, reads continue",
            false => "no more requests are waiting for space",
        });
    }

    /// Notes for the next process how many requests are in flight at most when `more` have begun.
    #[inline(always)]
    fn note_about_to_begin(&self, more: usize) {
        self.note_in_flight(self.disk.in_flight() + more + self.admission.held());
    }
}
