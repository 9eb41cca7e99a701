//! The transmission phase of one connection: parses requests, and replies in the order in which the disk completes
//! them.
//!
//! It does no I/O, and knows nothing about sockets and other connections. Invariants: at most [`REQUESTS_MAX`] requests
//! are between their header and the last byte of their reply; a request's memory, or that which its reply may need, is
//! counted as held for exactly that time; no more input is processed from a client that does not read its replies.

use std::collections::VecDeque;

use disk::size::in_memory;
use disk::{DiskOffset, Extent, Geometry, Operation, Request, Status, Token};
use memory::Segments;

use super::command::{DiskRequest, ErrorReply, Header, Verdict, first_part, validate};
use super::context::Bitmaps;
use super::error::ProtocolError;
use super::export::Negotiated;
use super::memory_quota::MemoryQuota;
use super::origin::Origin;
use super::outgoing::{Head, Outgoing};
use super::reply::{self, Found};
use super::wire::{self, Errno};

/// The maximum number of one connection's requests in progress. QEMU has 16 in flight, libnbd's tools 64.
pub(super) const REQUESTS_MAX: usize = 128;

/// The state of a transmission.
#[derive(Debug)]
pub(super) struct Transmission {
    negotiated: Negotiated,
    /// The upper bits of every token; the lower 16 are the slot in `pending`.
    prefix: u64,
    receiving: Receiving,
    pending: Vec<Option<Pending>>,
    /// The slots of `pending` that are free. All others have a request in the disk.
    free: Vec<usize>,
    /// Memory held by requests that have not been answered, and reserved for their replies.
    held: usize,
}

/// The kind of the next bytes from the client.
#[derive(Debug)]
pub(super) enum Receiving {
    Header,
    /// Data of a write; `filled` bytes have been received.
    Data {
        origin: Origin,
        request: DiskRequest,
        memory: Segments,
        filled: usize,
    },
    /// Data of a request that is not passed to the disk.
    Discard {
        origin: Origin,
        left: usize,
        error_reply: Option<ErrorReply>,
    },
}

/// A request in the disk.
#[derive(Clone, Copy, Debug)]
struct Pending {
    origin: Origin,
    request: DiskRequest,
    /// With the contexts that the request selects.
    negotiated: Negotiated,
    /// The memory counted as held for it.
    held: usize,
}

/// The result of processing some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InputProgress {
    /// This number of bytes was used.
    Used(usize),
    /// The message is incomplete.
    Incomplete,
    /// There is no memory for a request of this number of bytes.
    Stalled(usize),
    /// This number of bytes was used, and whatever follows is TLS.
    StartTls(usize),
    /// The client has disconnected.
    Disconnect,
}

impl Transmission {
    pub(super) fn new(negotiated: Negotiated, prefix: u64) -> Transmission {
        Transmission {
            negotiated,
            prefix,
            receiving: Receiving::Header,
            pending: Vec::new(),
            free: Vec::new(),
            held: 0,
        }
    }

    /// A transmission taken over from another process, with no request in the disk.
    pub(super) fn resumed(negotiated: Negotiated, prefix: u64, receiving: Receiving) -> Transmission {
        let held = match &receiving {
            Receiving::Data { memory, .. } => memory.len(),
            Receiving::Header | Receiving::Discard { .. } => 0,
        };
        Transmission { receiving, held, ..Transmission::new(negotiated, prefix) }
    }

    /// The negotiated options and the state of reception; `None` if requests are in the disk.
    pub(super) fn state(&self) -> Option<(Negotiated, &Receiving)> {
        (self.in_flight() == 0).then_some((self.negotiated, &self.receiving))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.pending.len() - self.free.len()
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Returns true if another request with `len` bytes of memory may be taken.
    pub(super) fn admits(&self, len: usize, outgoing: &Outgoing, quota: MemoryQuota) -> bool {
        let in_progress = self.in_flight() + outgoing.replies();
        in_progress < REQUESTS_MAX && quota.admits(self.held + outgoing.held(), len)
    }

    /// Processes the front of `bytes`: a header, or data that belongs to the last one.
    pub(super) fn process(
        &mut self,
        bytes: &[u8],
        geometry: &Geometry,
        quota: MemoryQuota,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) -> Result<InputProgress, ProtocolError> {
        match &mut self.receiving {
            Receiving::Header => self.header(bytes, geometry, quota, outgoing, requests),
            Receiving::Data { memory, filled, .. } => {
                let take = (memory.len() - *filled).min(bytes.len());
                memory.slice(*filled, take).copy_from(bytes.get(..take).unwrap_or_default());
                *filled += take;
                self.data_complete(geometry, outgoing, requests);
                Ok(if take == 0 { InputProgress::Incomplete } else { InputProgress::Used(take) })
            }
            Receiving::Discard { left, .. } => {
                let take = (*left).min(bytes.len());
                *left -= take;
                self.discard_complete(outgoing);
                Ok(if take == 0 { InputProgress::Incomplete } else { InputProgress::Used(take) })
            }
        }
    }

    fn header(
        &mut self,
        bytes: &[u8],
        geometry: &Geometry,
        quota: MemoryQuota,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) -> Result<InputProgress, ProtocolError> {
        let Some((header, mut size)) = Header::parse(bytes, self.negotiated)? else {
            return Ok(InputProgress::Incomplete);
        };
        let (header, negotiated) = match header.selection(self.negotiated) {
            None => (header, self.negotiated),
            Some(len) => {
                let Some(data) = bytes.get(size..size + len) else { return Ok(InputProgress::Incomplete) };
                // Without a valid selection, the flag makes the request invalid, and its data is skipped.
                let selected = header.select(data, self.negotiated);
                size += if selected.is_some() { len } else { 0 };
                selected.unwrap_or((header, self.negotiated))
            }
        };
        let verdict = validate(&header, negotiated, geometry);
        let held = held_by(verdict, negotiated);
        if !self.admits(held, outgoing, quota) {
            return Ok(InputProgress::Stalled(held));
        }
        let origin = header.origin;
        let error_reply = match verdict {
            Verdict::Disconnect => return Ok(InputProgress::Disconnect),
            Verdict::Serve(request) => {
                self.serve(Pending { origin, request, negotiated, held }, geometry, outgoing, requests);
                return Ok(InputProgress::Used(size));
            }
            Verdict::Nothing => None,
            Verdict::Error(error_reply) => Some(error_reply),
        };
        if header.data > 0 {
            self.receiving = Receiving::Discard { origin, left: in_memory(header.data.into()), error_reply };
        } else {
            self.reply(origin, header.kind == wire::CMD_READ, error_reply, outgoing);
        }
        Ok(InputProgress::Used(size))
    }

    fn serve(
        &mut self,
        pending: Pending,
        geometry: &Geometry,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) {
        let Pending { origin, request, held, .. } = pending;
        self.held += held;
        let memory_len = memory_of(&request);
        let memory = if memory_len > 0 { outgoing.spare_mut().take(memory_len) } else { Segments::empty() };
        if let Operation::Write { .. } = request.operation {
            self.receiving = Receiving::Data { origin, request, memory, filled: 0 };
        } else {
            self.submit(pending, memory, geometry, outgoing, requests);
        }
    }

    /// Submits a write whose last byte has been received.
    fn data_complete(&mut self, geometry: &Geometry, outgoing: &mut Outgoing, requests: &mut VecDeque<Request>) {
        if let Receiving::Data { origin, request, ref memory, filled } = self.receiving {
            if filled == memory.len() {
                let memory = memory.clone();
                let pending = Pending { origin, request, negotiated: self.negotiated, held: memory.len() };
                self.receiving = Receiving::Header;
                self.submit(pending, memory, geometry, outgoing, requests);
            }
        }
    }

    fn discard_complete(&mut self, outgoing: &mut Outgoing) {
        if let Receiving::Discard { origin, left: 0, error_reply } = self.receiving {
            self.receiving = Receiving::Header;
            self.reply(origin, false, error_reply, outgoing);
        }
    }

    fn submit(
        &mut self,
        pending: Pending,
        memory: Segments,
        geometry: &Geometry,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) {
        let slot = self.free_slot();
        match Request::of_bytes(pending.request.operation, pending.request.span, memory, self.token(slot), geometry) {
            Ok(mut request) => {
                request.fast = pending.request.fast;
                if let Some(place) = self.pending.get_mut(slot) {
                    *place = Some(pending);
                }
                requests.push_back(request);
            }
            // The geometry has changed since the header was validated.
            Err(status) => {
                self.free.push(slot);
                self.held -= pending.held;
                let reads = pending.request.operation == Operation::Read;
                self.reply(pending.origin, reads, reply::error_reply(status), outgoing);
            }
        }
    }

    /// Replies to a request that was not passed to the disk.
    fn reply(&self, origin: Origin, reads: bool, error_reply: Option<ErrorReply>, outgoing: &mut Outgoing) {
        let head = match error_reply {
            None => reply::done(self.negotiated, reads, origin),
            Some(error_reply) => reply::error(self.negotiated, origin, error_reply),
        };
        outgoing.push(head, Segments::empty());
    }

    /// Processes a completion. A flush for a trim with FUA is added to `follow`; without `follow`, the trim fails.
    pub(super) fn complete(
        &mut self,
        request: Request,
        status: Status,
        bitmaps: &dyn Bitmaps,
        outgoing: &mut Outgoing,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        let Some(pending) = self.take_pending(&request) else {
            request.retire();
            return;
        };
        if pending.request.rest > 0 && status == Status::Done {
            request.retire();
            return self.next_part(pending, outgoing, follow);
        }
        if pending.request.flush_after && status == Status::Done && request.operation() == Operation::Discard {
            request.retire();
            return self.flush_before_reply(pending, outgoing, follow);
        }
        match (error_reply(&pending, status), request.operation()) {
            (Some(error_reply), _) => {
                outgoing.push(reply::error(self.negotiated, pending.origin, error_reply), Segments::empty())
            }
            (None, Operation::Read) => {
                let head = reply::data(self.negotiated, pending.origin, request.asked());
                outgoing.push(head, request.asked_memory());
            }
            (None, Operation::Extents { .. }) if !pending.request.discard_result => {
                outgoing.push(extents(&pending, &request, bitmaps), Segments::empty())
            }
            (None, _) => outgoing.push(reply::done(self.negotiated, false, pending.origin), Segments::empty()),
        }
        let written = request.operation().is_write().then(|| request.asked_memory());
        request.retire();
        if let Some(memory) = written {
            outgoing.spare_mut().keep(memory);
        }
    }

    /// Replies to a request that is not passed to the disk because the server is stopping.
    pub(super) fn reject(&mut self, request: Request, outgoing: &mut Outgoing) {
        if let Some(pending) = self.take_pending(&request) {
            outgoing.push(reply::error(self.negotiated, pending.origin, STOPPING), Segments::empty());
        }
        request.retire();
    }

    /// Drops the partly received write of a client that has disconnected.
    pub(super) fn hang_up(&mut self) {
        if let Receiving::Data { memory, .. } = &self.receiving {
            self.held -= memory.len();
        }
        self.receiving = Receiving::Header;
    }

    fn take_pending(&mut self, request: &Request) -> Option<Pending> {
        let slot = in_memory(request.token().0 & SLOT_MASK);
        let pending = self.pending.get_mut(slot).and_then(Option::take);
        debug_assert!(pending.is_some(), "a completion of an unknown request: {:?}", request.token());
        if let Some(pending) = &pending {
            self.free.push(slot);
            self.held -= pending.held;
        }
        pending
    }

    /// Submits the next part of a request that is for more than the disk is to do at once.
    fn next_part(
        &mut self,
        done: Pending,
        outgoing: &mut Outgoing,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        let Some((geometry, requests)) = follow else {
            return self.reply(done.origin, false, Some(STOPPING), outgoing);
        };
        let DiskRequest { operation, span, rest, .. } = done.request;
        let left = disk::Span { at: span.end(), len: rest };
        let span = first_part(operation, left);
        let request = DiskRequest { span, rest: rest - span.len, ..done.request };
        self.submit(Pending { request, ..done }, Segments::empty(), geometry, outgoing, requests);
    }

    /// Submits a flush for a completed trim with FUA, which is answered when the flush has made it durable.
    fn flush_before_reply(
        &mut self,
        trim: Pending,
        outgoing: &mut Outgoing,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        let Some((geometry, requests)) = follow else {
            return self.reply(trim.origin, false, Some(STOPPING), outgoing);
        };
        let span = disk::Span { at: DiskOffset(0), len: 0 };
        let request = DiskRequest { operation: Operation::Flush, span, flush_after: false, ..trim.request };
        self.submit(Pending { request, ..trim }, Segments::empty(), geometry, outgoing, requests);
    }

    fn free_slot(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len().saturating_sub(1)
        })
    }

    fn token(&self, slot: usize) -> Token {
        let Ok(slot) = u16::try_from(slot) else { unreachable!("at most REQUESTS_MAX slots") };
        Token(self.prefix | u64::from(slot))
    }
}

/// The bits of a token that number the request within its connection.
const SLOT_MASK: u64 = 0xffff;

const STOPPING: ErrorReply = ErrorReply { errno: Errno::ShuttingDown, why: "the server is stopping" };

/// The size of the memory that a request's data needs.
fn memory_of(request: &DiskRequest) -> usize {
    match request.operation {
        Operation::Read | Operation::Write { .. } => in_memory(request.span.len),
        _ => 0,
    }
}

/// The memory that is counted as held until the disk has completed a request: that of its data, or the maximum of its
/// reply.
fn held_by(verdict: Verdict, negotiated: Negotiated) -> usize {
    match verdict {
        Verdict::Serve(DiskRequest {
            operation: Operation::Extents { .. }, span, one_extent, discard_result, ..
        }) => {
            if discard_result {
                0
            } else {
                reply::extents_max(negotiated, span.len, one_extent)
            }
        }
        Verdict::Serve(request) => memory_of(&request),
        _ => 0,
    }
}

/// The error of a failed request; `None` for success.
fn error_reply(pending: &Pending, status: Status) -> Option<ErrorReply> {
    match status {
        // "NBD_CMD_WRITE_ZEROES": no other error may be returned for zeroes that are not fast.
        Status::Unsupported if pending.request.fast => {
            Some(ErrorReply { errno: Errno::NotSupported, why: "the zeroes would have to be written" })
        }
        status => reply::error_reply(status),
    }
}

fn extents(pending: &Pending, request: &Request, bitmaps: &dyn Bitmaps) -> Head {
    // The extents begin at the block that contains the start of the request.
    let mut skip = request.asked().at - request.span().at;
    let requested = request.extents().iter().map(|extent| {
        let skipped = skip.min(extent.len);
        skip -= skipped;
        Extent { len: extent.len - skipped, ..*extent }
    });
    let extents: Vec<Extent> = requested.filter(|extent| extent.len > 0).collect();
    if extents.is_empty() {
        // BLOCK_STATUS has no empty reply; a disk that returns no extents is a bug of ours.
        let error_reply = ErrorReply { errno: Errno::Io, why: "the disk returned no extents" };
        return reply::error(pending.negotiated, pending.origin, error_reply);
    }
    let found = Found { extents: &extents, bitmaps };
    reply::extents(pending.negotiated, pending.origin, request.asked(), &found, pending.request.one_extent)
}
