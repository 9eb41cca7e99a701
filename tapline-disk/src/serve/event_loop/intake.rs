//! Incoming requests, from the server to the disk.
//!
//! It knows no protocol and no format. Invariant: before a request is begun, the fact that something is in flight is
//! recorded for the next process.

use std::time::Duration;

use disk::Request;
use transport::Server;

use super::{Disclose, EventLoop};
use crate::process::fault;

/// Requests taken in before operations are submitted and answers published. Small enough that the peer can work on the
/// answers to one batch while we are at the next, large enough that a system call and an interrupt a batch do not
/// count.
pub(super) const BATCH: usize = 16;

/// Bytes of them, after which no more are taken in: copying these takes longer than a batch of small ones.
const BATCH_BYTES: u64 = 256 << 10;

/// The same number while the storage has nothing to do, and will not be done at once: it begins with these while we are
/// at the next.
const FIRST: usize = 4;

impl<S: Server + Disclose> EventLoop<S> {
    /// Takes a batch of requests in; how many.
    pub(super) fn take_in(&mut self) -> usize {
        if self.suspects.are_there() {
            return self.take_suspect();
        }
        if self.limiter.is_active() {
            return self.take_limited();
        }
        let looked = self.time();
        let seen = self.seen.take().unwrap_or(looked);
        let most = match self.disk.in_flight() {
            0 if self.polling.storage_takes_time(looked) => FIRST,
            _ => BATCH,
        };
        let (mut came, mut bytes) = (0, 0);
        while came < most && bytes < BATCH_BYTES {
            let Some(request) = self.server.pop(&self.geometry) else { return came };
            if came == 0 {
                self.note_in_flight(self.disk.in_flight() + BATCH);
            }
            bytes += request.span().len;
            self.begin(request, seen, came == 0);
            came += 1;
        }
        // There may be more, which could have been seen by now.
        self.seen = Some(looked);
        came
    }

    /// Begins a request that has come and could have been seen at `seen`, or keeps it until there is space.
    #[inline(always)]
    pub(super) fn begin(&mut self, mut request: Request, seen: u64, first: bool) {
        if self.came(&mut request, seen, first) {
            fault::point("begin", &request);
            self.disk.submit(request, &mut self.engine);
        } else {
            self.full.keep(request);
        }
    }

    /// A request has come, which could have been seen at `seen`. Whether it is to be begun; else it is to wait for
    /// space.
    #[inline(always)]
    pub(super) fn came(&mut self, request: &mut Request, seen: u64, first: bool) -> bool {
        let now = self.time();
        // More than four seconds are counted as that.
        request.waited = u32::try_from(now.saturating_sub(seen)).unwrap_or(u32::MAX);
        self.stats.came(request, now);
        if let Some(stats) = &mut self.blkback_stats {
            stats.came(request);
        }
        if self.full.holds_back(request) {
            return false;
        }
        if first {
            self.pause.came(Duration::from_nanos(now));
        }
        true
    }
}
