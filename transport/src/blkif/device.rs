//! The queues of one front end: turns ring entries into disk requests, and sends back responses.
//!
//! It knows nothing about the store. Invariants: a taken entry is answered once; a pass takes a bounded number of
//! entries and makes a bounded number of system calls for all of them; requests of an earlier front end are recognised.

use std::sync::atomic::{Ordering, fence};

use disk::{Geometry, Request, Span, Status, Token};
use memory::Segments;
use xen::{EventChannels, Grants, PAGE, Port};

use super::data::{DESCRIPTORS_MAX, DataTransfer, TransferState};
use super::event::{Event, Log};
use super::kill_point::{InjectedBug, injected};
use super::queue::{Queue, RequestRecord};
use super::request::{self, Descriptors, ERROR, Operation, UNSUPPORTED};
use super::ring::Broken;
use crate::MemoryChange;

/// Entries taken from one queue before the next queue: a ring of one page.
const BATCH_MAX: usize = 32;

/// Attempts to notify a closing front end, which may have closed its event channel already.
const NOTIFY_ATTEMPTS_MAX: u32 = 4;

/// The device of one front end.
pub struct Device {
    queues: Vec<Queue>,
    data: DataTransfer,
    limits: Limits,
    /// Distinguishes its requests from those of the previous device.
    epoch: u32,
    /// Requests taken in the last pass.
    taken: Vec<TakenRequest>,
    /// The number of taken requests that were popped.
    popped: usize,
    /// Indirect requests of the current pass whose descriptors must be fetched.
    indirect: Vec<(RequestId, Descriptors)>,
    /// Scratch space for the descriptors of one request.
    descriptors: Box<[u8; DESCRIPTORS_MAX]>,
    /// A transfer of the current pass was deferred.
    deferred: bool,
    responses: Vec<PendingResponse>,
    /// The number of requests popped and not yet completed.
    in_flight: usize,
    /// No new requests are taken.
    finishing: bool,
    /// Nothing was published yet: the front end may not have been notified of responses of an earlier process.
    first_publish: bool,
    /// The number of consecutive failures to notify the front end.
    failed_notifications: u32,
}

/// Limits on requests of a front end, in addition to those of the disk.
#[derive(Clone, Copy)]
pub struct Limits {
    /// The maximum number of segments of an indirect request.
    pub segments_max: u16,
    /// Writes are refused.
    pub read_only: bool,
    /// Discards are allowed.
    pub discard: bool,
}

/// A request that was taken: its queue, and its number within that queue.
#[derive(Clone, Copy, PartialEq, Eq)]
struct RequestId {
    queue: u16,
    number: u16,
}

/// A response that was not written to the ring yet.
struct PendingResponse {
    request: RequestId,
    status: i16,
    /// The state of the transfer of read data, which must be done first.
    transfer: TransferState,
}

/// A request taken in the current pass.
struct TakenRequest {
    request: RequestId,
    /// The state of the transfer of its data, for a write.
    state: TransferState,
}

impl Device {
    /// Creates a device with these queues.
    pub fn new(queues: Vec<Queue>, data: DataTransfer, limits: Limits, epoch: u32) -> Device {
        let (taken, indirect, responses) = Default::default();
        let (popped, deferred, in_flight, finishing, first_publish, failed_notifications) =
            (0, false, 0, false, true, 0);
        Device {
            queues,
            data,
            limits,
            epoch,
            taken,
            popped,
            indirect,
            descriptors: Box::new([0; DESCRIPTORS_MAX]),
            deferred,
            responses,
            in_flight,
            finishing,
            first_publish,
            failed_notifications,
        }
    }

    /// Pops the next request. If there is none this costs one load per queue: it is called on every turn of the event
    /// loop.
    #[inline]
    pub fn pop(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) -> Option<Request> {
        match self.popped < self.taken.len() || self.queues.iter().any(Queue::has_requests) {
            true => self.next_request(geometry, grants, log),
            false => None,
        }
    }

    #[inline(never)]
    fn next_request(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) -> Option<Request> {
        if self.popped == self.taken.len() {
            self.take_all(geometry, grants, log);
        }
        while let Some(&TakenRequest { request, state }) = self.taken.get(self.popped) {
            self.popped += 1;
            if let Some(request) = self.build_request(request, state, geometry) {
                self.in_flight += 1;
                return Some(request);
            }
        }
        None
    }

    /// Processes the rings: first all entries, then all indirect descriptors, then all data that needs system calls.
    #[inline(never)]
    fn take_all(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) {
        let read_only = geometry.read_only || self.limits.read_only;
        let geometry = Geometry { read_only, ..*geometry };
        self.taken.clear();
        self.popped = 0;
        let mut bytes = 0;
        for queue in 0..self.queues.len() {
            self.take_from(queue, &geometry, &mut bytes, grants, log);
        }
        if self.deferred {
            self.deferred = false;
            self.fetch_indirect(grants);
            self.acquire_deferred(grants);
        }
        self.data.copy_from_guest(grants);
        self.update_states();
    }

    /// Records the results of copies from the guest.
    fn update_states(&mut self) {
        if self.data.has_copies_from_guest() {
            self.taken.iter_mut().for_each(|taken| taken.state = self.data.incoming_state(taken.state));
            self.data.clear_from_guest();
        }
    }

    /// Takes the entries of one queue, and transfers data if that needs no system call. An upper bound for the size of
    /// other data is added to `bytes`.
    fn take_from(
        &mut self,
        index: usize,
        geometry: &Geometry,
        bytes: &mut usize,
        grants: &mut dyn Grants,
        log: &mut Log,
    ) {
        let Device { queues, data, limits, taken, indirect, descriptors, deferred, responses, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        for _ in 0..BATCH_MAX {
            if !data.has_room(*bytes) {
                return;
            }
            let (number, RequestRecord { parsed, ranges, buffer }) = match queue.take(limits.segments_max, geometry) {
                Ok(Some(taken)) => taken,
                Ok(None) => return,
                Err(why) => return self.mark_broken(index, why, log),
            };
            let Ok(index) = u16::try_from(index) else { unreachable!("at most QUEUES_MAX queues") };
            let request = RequestId { queue: index, number };
            let state = match (parsed.operation, parsed.descriptors) {
                (Ok(operation), None) if operation.has_data() => {
                    data.acquire(grants, (ranges, ranges.bytes()), operation.is_write(), buffer)
                }
                (Ok(Operation::Discard), None) if !limits.discard => {
                    queue.finish_request();
                    responses.push(PendingResponse { request, status: UNSUPPORTED, transfer: TransferState::Done });
                    continue;
                }
                (Ok(_), None) => TransferState::Done,
                (Ok(operation), Some(wanted)) => match data.mapped_descriptors(wanted, descriptors) {
                    Some(bytes) if ranges.parse_indirect(bytes).is_ok() => {
                        data.acquire(grants, (ranges, ranges.bytes()), operation.is_write(), buffer)
                    }
                    Some(_) => TransferState::Failed,
                    None => {
                        indirect.push((request, wanted));
                        TransferState::Deferred
                    }
                },
                (Err(status), _) => {
                    responses.push(PendingResponse { request, status, transfer: TransferState::Done });
                    continue;
                }
            };
            if state == TransferState::Deferred {
                *deferred = true;
                let pages = parsed.descriptors.map_or(ranges.len(), |indirect| usize::from(indirect.count));
                *bytes += pages * PAGE;
            }
            taken.push(TakenRequest { request, state });
        }
    }

    fn record(&mut self, request: RequestId) -> Option<&mut RequestRecord> {
        self.queues.get_mut(usize::from(request.queue))?.record_mut(request.number)
    }

    /// Fetches the descriptors of indirect requests. Without descriptors, the transfer of data fails.
    fn fetch_indirect(&mut self, grants: &mut dyn Grants) {
        if self.indirect.is_empty() {
            return;
        }
        let indirect = std::mem::take(&mut self.indirect);
        let wanted: Vec<Descriptors> = indirect.iter().map(|&(_, descriptors)| descriptors).collect();
        let fetched = self.data.fetch_descriptors(grants, &wanted);
        for (&(request, _), bytes) in indirect.iter().zip(fetched) {
            let Some(record) = self.record(request) else { continue };
            let found = bytes.and_then(|bytes| record.ranges.parse_indirect(&bytes).ok());
            if found.is_none() {
                record.ranges.clear();
            }
        }
        self.indirect = indirect;
        self.indirect.clear();
        self.update_states();
    }

    /// Acquires memory for requests with deferred transfers: their pages must be mapped first, or their descriptors
    /// were not known.
    fn acquire_deferred(&mut self, grants: &mut dyn Grants) {
        let Device { queues, data, taken, .. } = self;
        let deferred = |taken: &&TakenRequest| taken.state == TransferState::Deferred;
        let ranges = |taken: &TakenRequest| {
            let queue = queues.get(usize::from(taken.request.queue));
            queue.and_then(|queue| queue.record(taken.request.number)).map_or(&[][..], |record| &*record.ranges)
        };
        data.map_pages(grants, taken.iter().filter(deferred).flat_map(ranges));
        for TakenRequest { request, state } in taken.iter_mut().filter(|taken| taken.state == TransferState::Deferred) {
            let queue = queues.get_mut(usize::from(request.queue));
            let Some(RequestRecord { parsed, ranges, buffer }) =
                queue.and_then(|queue| queue.record_mut(request.number))
            else {
                continue;
            };
            *state = match ranges.is_empty() {
                false => {
                    let ranges = (&**ranges, ranges.bytes());
                    data.acquire_or_fail(grants, ranges, parsed.operation.is_ok_and(Operation::is_write), buffer)
                }
                true => TransferState::Failed,
            };
        }
    }

    /// Builds a request for the disk; rejects it if its data was not transferred or it is invalid.
    #[inline]
    fn build_request(&mut self, request: RequestId, state: TransferState, geometry: &Geometry) -> Option<Request> {
        let queue = self.queues.get_mut(usize::from(request.queue))?;
        let RequestRecord { parsed, buffer, .. } = queue.record_mut(request.number)?;
        if let (TransferState::Done, Ok(operation)) = (state, parsed.operation) {
            let (len, memory) = match buffer {
                Some(buffer) => (buffer.len(), self.data.memory(buffer)),
                None => (parsed.span.len, Segments::empty()),
            };
            let (span, token) = (Span { at: parsed.span.at, len }, token(self.epoch, request));
            if let Ok(request) = Request::new(operation.operation(), span, memory, token, geometry) {
                return Some(request);
            }
        }
        self.reject(request, ERROR);
        None
    }

    #[cold]
    fn reject(&mut self, request: RequestId, status: i16) {
        if let Some(queue) = self.queues.get_mut(usize::from(request.queue)) {
            queue.finish_request();
            self.responses.push(PendingResponse { request, status, transfer: TransferState::Done });
        }
    }

    /// Processes the completion of a request. Without a status, the request stays in its ring for the next process.
    /// Returns `false` if it belongs to an earlier device.
    #[inline]
    pub fn complete(&mut self, request: Request, status: Option<Status>, grants: &mut dyn Grants) -> bool {
        let (epoch, id) = parts(request.token());
        let read = request.operation() == disk::Operation::Read && status == Some(Status::Done);
        request.retire();
        if epoch != self.epoch {
            return false;
        }
        self.in_flight -= 1;
        if let Some(queue) = self.queues.get_mut(usize::from(id.queue)) {
            queue.finish_request();
            let (Some(record), Some(status)) = (queue.record(id.number), status) else { return true };
            let transfer = match &record.buffer {
                Some(buffer) if read => self.data.queue_to_guest(grants, &record.ranges, buffer),
                _ => TransferState::Done,
            };
            self.responses.push(PendingResponse {
                request: id,
                status: request::status(status, record.parsed.opcode),
                transfer,
            });
        }
        true
    }

    /// Transfers read data to the guest, publishes responses, and notifies the guest if it has requested that.
    #[inline]
    pub fn publish(&mut self, grants: &mut dyn Grants, channels: &mut dyn EventChannels, log: &mut Log) {
        if self.first_publish || !self.responses.is_empty() || self.has_pending_notification() {
            self.first_publish = false;
            self.publish_responses(grants, channels, log);
        }
    }

    #[inline(never)]
    fn publish_responses(&mut self, grants: &mut dyn Grants, channels: &mut dyn EventChannels, log: &mut Log) {
        self.data.copy_to_guest(grants);
        let mut responses = std::mem::take(&mut self.responses);
        if self.are_reversed(&responses) {
            responses.reverse();
        }
        for PendingResponse { request, status, transfer } in responses.drain(..) {
            let transferred = transfer == TransferState::Done || self.data.is_transferred(transfer);
            let status = if transferred { status } else { ERROR };
            let Some(queue) = self.queues.get_mut(usize::from(request.queue)) else { continue };
            if let Err(why) = queue.respond(request.number, status, |buffer| self.data.release(buffer)) {
                self.mark_broken(usize::from(request.queue), why, log);
            }
        }
        self.data.clear_to_guest();
        self.responses = responses;
        let mut failed_notifications = 0;
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(|queue| queue.notify(channels)) {
                Some(Ok(Ok(()))) | None => {}
                Some(Ok(Err(error))) => {
                    failed_notifications =
                        if injected(InjectedBug::NotificationLost) { 0 } else { self.failed_notifications + 1 };
                    log.failed("cannot notify the guest", &error);
                }
                Some(Err(why)) => self.mark_broken(index, why, log),
            }
        }
        self.failed_notifications = failed_notifications;
    }

    /// Returns true if a notification of the front end failed and must be retried.
    pub fn has_pending_notification(&self) -> bool {
        self.failed_notifications > 0
    }

    /// Returns true if responses are in the reverse order of their requests, in which some kernels complete immediate
    /// I/O. Reversed again, no request has to be moved in its ring.
    fn are_reversed(&self, responses: &[PendingResponse]) -> bool {
        let [_, .., PendingResponse { request, .. }] = responses else { return false };
        self.queues.get(usize::from(request.queue)).is_some_and(|queue| queue.is_next(request.number))
    }

    /// Requests notifications on all queues, then checks them again. Returns `false` if there are requests to take or
    /// responses to publish.
    pub fn prepare_to_sleep(&mut self, log: &mut Log) -> bool {
        if self.popped < self.taken.len() || !self.responses.is_empty() {
            return false;
        }
        if self.in_flight > 0 && !self.data.has_room(0) {
            // Nothing can be taken before a request completes.
            return true;
        }
        for index in 0..self.queues.len() {
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::request_notification) {
                self.mark_broken(index, why, log);
            }
        }
        // io/ring.h, RING_FINAL_CHECK_FOR_REQUESTS: the request for a notification must be visible before this check,
        // or a request could be missed by both sides.
        fence(Ordering::SeqCst);
        let mut empty = true;
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(Queue::is_empty) {
                Some(Ok(true)) | None => {}
                Some(Ok(false)) => empty = false,
                Some(Err(why)) => self.mark_broken(index, why, log),
            }
        }
        empty
    }

    /// Ignores requests announced from now on. Returns `false` if earlier ones are still unanswered.
    pub fn finish(&mut self, log: &mut Log) -> bool {
        if !std::mem::replace(&mut self.finishing, true) {
            for index in 0..self.queues.len() {
                if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::close) {
                    self.mark_broken(index, why, log);
                }
            }
        }
        self.is_finished()
    }

    /// Returns true if no new requests are taken.
    pub fn is_finishing(&self) -> bool {
        self.finishing
    }

    /// Returns true if no new requests are taken and all are answered.
    pub fn is_finished(&mut self) -> bool {
        let idle = self.in_flight == 0 && self.popped == self.taken.len() && self.responses.is_empty();
        // The first publication notifies the front end of responses of an earlier process, even without any of ours.
        let notified =
            !self.first_publish && (self.failed_notifications == 0 || self.failed_notifications >= NOTIFY_ATTEMPTS_MAX);
        // A broken queue counts as empty.
        self.finishing && idle && notified && self.queues.iter_mut().all(|queue| queue.is_empty().unwrap_or(true))
    }

    /// The next change of its buffers that was not reported to the engine yet.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        self.data.take_memory_change()
    }

    /// Releases its own memory; returns all changes that were not reported to the engine yet.
    pub fn release_all_memory(&mut self) -> impl Iterator<Item = MemoryChange> + '_ {
        self.data.release_all_memory();
        std::iter::from_fn(|| self.take_memory_change())
    }

    /// Returns true if it keeps more memory than an idle disk should.
    pub fn has_excess_memory(&self) -> bool {
        self.data.has_excess_memory()
    }

    /// Releases excess memory that was not needed since the last call.
    pub fn trim(&mut self) {
        self.data.trim();
    }

    #[cold]
    fn mark_broken(&mut self, index: usize, why: Broken, log: &mut Log) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.mark_broken();
        }
        log.record(Event::QueueBroken { queue: index, why });
    }

    /// Our ports of the event channels.
    pub fn ports(&self) -> impl Iterator<Item = Port> + '_ {
        self.queues.iter().map(|queue| queue.port)
    }

    /// Shuts the device down: no more requests are popped. Returns the number of requests still to be completed.
    pub fn shut_down(&mut self) -> usize {
        self.popped = self.taken.len();
        self.in_flight
    }
}

/// Encodes the epoch, queue and number of a request as its token: 32, 16 and 16 bits.
fn token(epoch: u32, RequestId { queue, number }: RequestId) -> Token {
    Token((u64::from(epoch) << 32) | (u64::from(queue) << 16) | u64::from(number))
}

/// A description of the origin of a request, for log messages.
pub fn place_of(token: Token) -> String {
    let (_, RequestId { queue, .. }) = parts(token);
    format!("queue {queue}")
}

fn parts(token: Token) -> (u32, RequestId) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    let request = RequestId { queue: u16::from_be_bytes([e, f]), number: u16::from_be_bytes([g, h]) };
    (u32::from_be_bytes([a, b, c, d]), request)
}
