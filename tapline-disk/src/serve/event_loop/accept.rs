//! Requests on their way from the server through [admission](crate::serve::admission) to the disk.
//!
//! It knows no protocol and no format. Invariants: before a request starts, it is recorded for the next process that
//! something is in flight; a request is counted once, and the time before that is part of its time in the ring; a held
//! request is started once, completed, or returned to its peer.

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

/// The number of requests accepted before operations are submitted and completions published. Small enough that the
/// peer can work on the completions of one batch while we process the next; large enough to amortize one system call
/// and one interrupt per batch.
const BATCH: usize = 16;

/// The bytes after which no more requests are accepted: copying these takes longer than a batch of small requests.
const BATCH_BYTES: u64 = 256 << 10;

/// The batch size while the storage is idle and slow: it starts with these requests while we process the next.
const FIRST: usize = 4;

/// The counters of requests.
struct Ledger<'a>(&'a mut Stats, &'a mut Option<BlkbackStats>);

impl Ledger<'_> {
    /// Counts a request accepted at `now`; its waiting time is already set.
    #[inline(always)]
    fn count(&mut self, request: &mut Request, now: u64) {
        self.0.came(request, now);
        if let Some(stats) = &mut self.1 {
            stats.came(request);
        }
    }
}

/// Converts a waiting time for a request: the maximum is about four seconds.
fn waited(ns: u64) -> u32 {
    u32::try_from(ns).unwrap_or(u32::MAX)
}

impl<S: Server> EventLoop<S> {
    /// Starts the held requests that are released, and accepts a batch of new ones; returns the number of both.
    pub(super) fn accept_requests(&mut self) -> usize {
        let is_open = self.admission.is_open();
        // Held requests are older than new ones.
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
            // Starting a request never makes admission hold others.
            match is_open {
                true => self.count_and_begin(request, seen, came == 0),
                false => self.arrive(request, seen, came == 0),
            }
            came += 1;
        }
        // There may be more, which may have been visible by now.
        self.seen = Some(looked);
        came + released
    }

    /// Starts a new request while admission is open. It was visible from `seen` on.
    #[inline(always)]
    fn count_and_begin(&mut self, mut request: Request, seen: u64, first: bool) {
        let now = self.time();
        request.waited = waited(now.saturating_sub(seen));
        Ledger(&mut self.stats, &mut self.blkback_stats).count(&mut request, now);
        self.is_about_to_begin(&request, first);
        self.disk.submit(request, &mut self.engine);
    }

    /// Called just before a request is passed to the disk. `first`: the first of its batch. Takes a reference, because
    /// each move of a request costs time on this path.
    #[inline(always)]
    fn is_about_to_begin(&mut self, request: &Request, first: bool) {
        if first {
            let now = self.time();
            self.pause.came(Duration::from_nanos(now));
        }
        fault::point("begin", request);
    }

    /// Admits a new request. It was visible from `seen` on.
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

    /// Starts a counted request. `first`: the first of its batch.
    fn begin(&mut self, request: Request, first: bool) {
        self.note_if_alone(&request);
        self.is_about_to_begin(&request, first);
        self.disk.submit(request, &mut self.engine);
        self.at_work(false);
    }

    /// Updates what limits and share allow, and starts the released requests; returns their number.
    #[cold]
    fn refresh_admission(&mut self) -> usize {
        let now = self.time();
        self.admission.limiter.allot(self.disk.in_flight(), now);
        if self.admission.held() == 0 { 0 } else { self.begin_released() }
    }

    /// Starts the released requests, or completes them with an error; returns their number.
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

    /// Processes the requests that wait for space, and those that their peers take back, until nothing more can be done
    /// now; returns how many were completed or started.
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

    /// Returns the held requests that their peers take back, or keep when the server stops; returns their number.
    pub(super) fn give_back(&mut self) -> usize {
        if self.admission.is_open() && !self.disk.is_quiesced() {
            return 0;
        }
        let Some(server) = self.server.takes_back() else { return 0 };
        let mut wanted = self.admission.recall(|token| server.recalls(token));
        // A client of the control socket may hold requests for any length of time.
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

    /// Sets the timer for the next release of a held request. Returns whether the loop may sleep until then.
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
        // Requests that wait in a ring while one of the quarantine is in flight do not keep the loop awake.
        self.batch(1) == 0 || self.server.may_sleep()
    }

    /// Sets the timer for the next release. Returns false if a held request may start already.
    fn mind_deadline(&mut self) -> bool {
        if self.admission.held() == 0 && !self.admission.is_in_quarantine() {
            return true;
        }
        let now = self.stats.now();
        // Requests have completed since the share was last queried.
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

    /// Logs that the disk is full, or is not any more.
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

    /// Records for the next process the maximum number of requests in flight when `more` have started.
    #[inline(always)]
    fn note_about_to_begin(&self, more: usize) {
        self.note_in_flight(self.disk.in_flight() + more + self.admission.held());
    }
}
