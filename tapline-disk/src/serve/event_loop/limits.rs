//! Requests that wait for a limit of the disk, or for its share of the storage
//! ([`Limiter`](crate::serve::limits::Limiter)), between the server and the disk.
//!
//! It knows no protocol and no format. Invariants: a request that waits is begun once, or returned to its peer; for the
//! statistics it has not come before it is begun, and its wait is a part of the time in the ring.

use transport::Server;

use super::intake::BATCH;
use super::{Disclose, EngineWatch, EventLoop};
use crate::serve::own_keys::LIMIT;

impl<S: Server + Disclose> EventLoop<S> {
    /// Takes a batch of requests in, and begins what the limits let through; how many of both.
    #[cold]
    pub(super) fn take_limited(&mut self) -> usize {
        let now = self.time();
        self.limiter.allot(self.disk.in_flight(), now);
        // Those that wait are older than those that come.
        let released = self.release();
        let now = self.time();
        let seen = self.seen.take().unwrap_or(now);
        let mut came = 0;
        while came < BATCH {
            let Some(mut request) = self.server.pop(&self.geometry) else { break };
            if came == 0 {
                self.note_in_flight(self.disk.in_flight() + BATCH + self.limiter.waiting());
            }
            came += 1;
            request.waited = u32::try_from(now.saturating_sub(seen)).unwrap_or(u32::MAX);
            if let Some(request) = self.limiter.offer(request, now) {
                self.begin(request, seen, came == 1);
            }
        }
        if came == BATCH {
            // There may be more, which could have been seen by now.
            self.seen = Some(now);
        }
        came + released
    }

    /// Begins what has waited and may go now; how many.
    pub(super) fn release(&mut self) -> usize {
        if self.limiter.waiting() == 0 {
            return 0;
        }
        // A guest that gives the disk up, and one that is gone, leaves nothing to be held back.
        self.limiter.set_deserted(self.server.is_finishing() || self.server.peers() == 0);
        let now = self.stats.now();
        self.time = Some(now);
        let mut released = 0;
        while let Some((request, waited)) = self.limiter.release(now) {
            if released == 0 {
                self.note_in_flight(self.disk.in_flight() + BATCH + self.limiter.waiting());
            }
            released += 1;
            if waited.by_share {
                self.stats.shared(waited.ns);
            } else {
                self.stats.throttled(waited.ns);
            }
            let before = waited.ns.saturating_add(u64::from(request.waited));
            self.begin(request, now.saturating_sub(before), released == 1);
        }
        released
    }

    /// Tells the disks that share the storage how it is after this turn.
    #[cold]
    pub(super) fn tell_others(&mut self, answered: usize, in_flight: usize) {
        let now = self.time();
        self.limiter.turned(answered, in_flight, now);
    }

    /// Has the loop woken when the next request may go. Whether it may sleep until then.
    pub(super) fn mind_limits(&mut self) -> bool {
        if self.limiter.waiting() == 0 {
            return true;
        }
        let now = self.stats.now();
        // Requests have ended since it was found out what the share lets go.
        self.limiter.allot(self.disk.in_flight(), now);
        match self.limiter.mind_timer(now, &mut EngineWatch(&mut self.engine), LIMIT) {
            Ok(due) => !due,
            Err(error) => {
                self.log.caused(format_args!("the disk's limits are not kept: no timer: {error}"));
                false
            }
        }
    }
}
