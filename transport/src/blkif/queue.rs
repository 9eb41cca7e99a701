//! One queue: a ring, its event channel, and the requests taken from it and not yet answered.
//!
//! It knows nothing about grants. Invariants: a request is answered once; while a barrier runs, no other request does;
//! a broken queue is not accessed again.

use std::io;

use disk::Geometry;
use xen::{EventChannels, Port};

use super::data::DataBuffer;
use super::kill_point::{InjectedBug, injected};
use super::request::{PageRanges, Parsed};
use super::ring::{Broken, Response, Ring};

/// A queue of a front end.
pub struct Queue {
    ring: Ring,
    /// Our port of its event channel.
    pub port: Port,
    records: Vec<RequestRecord>,
    free: Vec<u16>,
    /// The number of requests taken and not yet completed.
    in_progress: usize,
    barrier: Barrier,
    broken: bool,
    /// There are responses of which the front end may have to be notified.
    has_new_responses: bool,
    /// A notification failed and must be retried.
    pending_notification: bool,
}

/// A request that was taken and not yet answered.
pub struct RequestRecord {
    /// The parsed entry.
    pub parsed: Parsed,
    /// The ranges of the guest's pages that contain its data.
    pub ranges: PageRanges,
    /// The memory for its data while it is in progress.
    pub buffer: Option<DataBuffer>,
}

/// The state of a barrier. While there is one, no further requests are taken.
enum Barrier {
    None,
    /// The request with this number waits for earlier ones.
    Waiting(u16),
    /// The barrier is in progress.
    Running,
}

impl Barrier {
    /// Starts a waiting barrier if no other request is in progress; returns its number.
    fn start(&mut self, in_progress: &mut usize) -> Option<u16> {
        match *self {
            Barrier::Waiting(number) if *in_progress == 0 => {
                (*self, *in_progress) = (Barrier::Running, 1);
                Some(number)
            }
            _ => None,
        }
    }
}

impl Queue {
    /// A queue whose front end notifies `port`.
    pub fn new(ring: Ring, port: Port) -> Queue {
        let slots = ring.slots();
        let records = (0..slots).map(|_| RequestRecord::default()).collect();
        let free = (0..slots).rev().collect();
        let (in_progress, barrier, broken) = (0, Barrier::None, false);
        let (has_new_responses, pending_notification) = (true, false);
        Queue { ring, port, records, free, in_progress, barrier, broken, has_new_responses, pending_notification }
    }

    /// Returns true if there may be requests, at the cost of one load.
    #[inline]
    pub fn has_requests(&self) -> bool {
        !self.broken && (self.ring.has_requests() || !matches!(self.barrier, Barrier::None))
    }

    /// Takes the next request; returns its number and its record, which has only the contents of the entry. A request
    /// that the parser rejects counts as completed.
    #[inline]
    pub fn take(
        &mut self,
        segments_max: u16,
        geometry: &Geometry,
    ) -> Result<Option<(u16, &mut RequestRecord)>, Broken> {
        if self.broken {
            return Ok(None);
        }
        if !matches!(self.barrier, Barrier::None) {
            let Some(number) = self.barrier.start(&mut self.in_progress) else { return Ok(None) };
            return Ok(self.records.get_mut(usize::from(number)).map(|record| (number, record)));
        }
        let Some(&number) = self.free.last() else { return Ok(None) };
        let Some(record) = self.records.get_mut(usize::from(number)) else { return Ok(None) };
        let Some(entry) = self.ring.take(number)? else { return Ok(None) };
        self.free.pop();
        record.parsed.parse(entry, segments_max, geometry, &mut record.ranges);
        match record.parsed.operation {
            Ok(operation) if operation.is_barrier() => {
                self.barrier = Barrier::Waiting(number);
                return Ok(self.barrier.start(&mut self.in_progress).map(|number| (number, record)));
            }
            Ok(_) => self.in_progress += 1,
            Err(_) => {}
        }
        Ok(Some((number, record)))
    }

    /// The record of a request.
    #[inline]
    pub fn record(&self, number: u16) -> Option<&RequestRecord> {
        self.records.get(usize::from(number))
    }

    /// The record of a request, mutably.
    #[inline]
    pub fn record_mut(&mut self, number: u16) -> Option<&mut RequestRecord> {
        self.records.get_mut(usize::from(number))
    }

    /// Records that a request has completed.
    #[inline]
    pub fn finish_request(&mut self) {
        self.in_progress -= 1;
        if matches!(self.barrier, Barrier::Running) {
            self.barrier = Barrier::None;
        }
    }

    /// Returns true if the next response would take the slot of this request.
    pub fn is_next(&self, number: u16) -> bool {
        self.ring.is_next(number)
    }

    /// Writes the response to a completed request into the ring, and passes its memory, if it has any, to `free`.
    #[inline]
    pub fn respond(&mut self, number: u16, status: i16, free: impl FnOnce(DataBuffer)) -> Result<(), Broken> {
        let Some(record) = self.records.get_mut(usize::from(number)) else { return Ok(()) };
        if let Some(buffer) = record.buffer.take() {
            free(buffer);
        }
        record.ranges.clear();
        if self.broken {
            return Ok(());
        }
        self.free.push(number);
        self.has_new_responses = true;
        let Parsed { id, opcode: operation, .. } = record.parsed;
        self.ring.respond(number, Response { id, operation, status })
    }

    /// Notifies the front end of responses, if it has requested that. A failed notification is retried by the next
    /// call, as the front end may be waiting for it.
    pub fn notify(&mut self, channels: &mut dyn EventChannels) -> Result<io::Result<()>, Broken> {
        if self.broken || !(std::mem::take(&mut self.has_new_responses) || self.pending_notification) {
            return Ok(Ok(()));
        }
        if !self.ring.must_notify()? && !self.pending_notification {
            return Ok(Ok(()));
        }
        let notified = channels.notify(self.port);
        self.pending_notification = notified.is_err() && !injected(InjectedBug::NotificationLost);
        Ok(notified)
    }

    /// Requests a notification for the next request.
    pub fn request_notification(&mut self) -> Result<(), Broken> {
        if self.broken { Ok(()) } else { self.ring.request_notification() }
    }

    /// Returns true if no request can be taken now.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        match &self.barrier {
            _ if self.broken => Ok(true),
            Barrier::None => self.ring.is_empty(),
            Barrier::Waiting(..) => Ok(self.in_progress > 0),
            Barrier::Running => Ok(true),
        }
    }

    /// Ignores requests announced from now on.
    pub fn close(&mut self) -> Result<(), Broken> {
        if self.broken { Ok(()) } else { self.ring.close() }
    }

    /// Stops using the ring.
    pub fn mark_broken(&mut self) {
        self.broken = true;
    }
}

impl Default for RequestRecord {
    fn default() -> RequestRecord {
        RequestRecord { parsed: Parsed::empty(), ranges: PageRanges::default(), buffer: None }
    }
}
