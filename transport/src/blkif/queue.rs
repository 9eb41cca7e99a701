//! One queue: a ring, its event channel, and the requests taken from it and not yet answered.
//!
//! It knows nothing about grants. Invariants: a request is answered once; a barrier runs alone; a broken queue is not
//! accessed again.

use std::io;

use disk::Geometry;
use xen::{EventChannels, Port};

use super::data::DataBuffer;
use super::kill_point::{InjectedBug, injected};
use super::request::{PageRanges, Parsed};
use super::ring::{Broken, Response, Ring};

/// One queue.
pub struct Queue {
    ring: Ring,
    /// Our port of its event channel.
    pub port: Port,
    records: Vec<RequestRecord>,
    free: Vec<u16>,
    /// Requests taken and not yet completed.
    in_progress: usize,
    barrier: Barrier,
    broken: bool,
    /// There are responses of which the front end may have to be notified.
    has_new_responses: bool,
    /// A notification failed and is still to be sent.
    owes_notification: bool,
}

/// A request that was taken and not yet answered.
pub struct RequestRecord {
    /// Its parsed entry.
    pub parsed: Parsed,
    /// The ranges of the guest's pages that hold its data.
    pub ranges: PageRanges,
    /// The memory that holds its data meanwhile.
    pub buffer: Option<DataBuffer>,
}

/// The state of a barrier. No requests are taken while there is one.
enum Barrier {
    None,
    /// It waits for earlier requests.
    Waiting(u16),
    /// It is running.
    Running,
}

impl Barrier {
    /// Starts it once it is alone; returns its number.
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
        let (in_progress, barrier, broken, has_new_responses, owes_notification) =
            (0, Barrier::None, false, true, false);
        Queue { ring, port, records, free, in_progress, barrier, broken, has_new_responses, owes_notification }
    }

    /// Whether there may be requests, at the cost of one load.
    #[inline]
    pub fn has_requests(&self) -> bool {
        !self.broken && (self.ring.has_requests() || !matches!(self.barrier, Barrier::None))
    }

    /// The next request, with its number. Its record contains only what its entry says. A rejected request counts as
    /// completed.
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

    /// Whether this request's response would go into the request's own slot, if it were next.
    pub fn is_next(&self, number: u16) -> bool {
        self.ring.is_next(number)
    }

    /// Puts the response to a completed request into the ring and frees its memory, if it has any.
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

    /// Notifies the front end of responses, if it wants to know. A failed notification is retried by the next call: the
    /// front end may be waiting for nothing else.
    pub fn notify(&mut self, channels: &mut dyn EventChannels) -> Result<io::Result<()>, Broken> {
        if self.broken || !(std::mem::take(&mut self.has_new_responses) || self.owes_notification) {
            return Ok(Ok(()));
        }
        if !self.ring.must_notify()? && !self.owes_notification {
            return Ok(Ok(()));
        }
        let notified = channels.notify(self.port);
        self.owes_notification = notified.is_err() && !injected(InjectedBug::NotificationLost);
        Ok(notified)
    }

    /// Requests a notification for the next request.
    pub fn request_notification(&mut self) -> Result<(), Broken> {
        if self.broken { Ok(()) } else { self.ring.request_notification() }
    }

    /// Whether nothing can be taken now.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        match &self.barrier {
            _ if self.broken => Ok(true),
            Barrier::None => self.ring.is_empty(),
            Barrier::Waiting(..) => Ok(self.in_progress > 0),
            Barrier::Running => Ok(true),
        }
    }

    /// Takes no requests announced from now on.
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
