//! The transmission phase of one connection: requests in, answers in whatever order the disk gives them.
//!
//! Pure: bytes and [`Request`]s. Knows nothing about sockets and other connections. Invariants: at most
//! [`REQUESTS_MAX`] requests are between their header and the last byte of their reply; a request's memory is
//! counted as held for exactly that time; a client that sends without reading is not listened to any more.

use std::collections::VecDeque;

use disk::{Extent, Geometry, Operation, Request, Status, Token};
use memory::Segments;
use zerocopy::FromBytes;

use super::command::{Ask, Refusal, Verdict, judge};
use super::error::ProtocolError;
use super::export::{Agreed, REQUEST_MAX};
use super::outgoing::Outgoing;
use super::reply;
use super::room::Room;
use super::wire::{self, Errno, RequestHeader};

/// Requests of one connection under way. QEMU has 16 in flight, libnbd's tools 64.
pub(super) const REQUESTS_MAX: usize = 128;

/// The state of a transmission.
#[derive(Debug)]
pub(super) struct Transmission {
    agreed: Agreed,
    /// The upper bits of every token; the lower 16 number the slot in `pending`.
    prefix: u64,
    receiving: Receiving,
    pending: Vec<Option<Pending>>,
    in_flight: usize,
    /// Bytes of memory of requests that have not been answered.
    held: usize,
}

/// What the next bytes of the client are.
#[derive(Debug)]
pub(super) enum Receiving {
    Header,
    /// Data of a write, of which `filled` bytes are there.
    Data {
        cookie: u64,
        ask: Ask,
        memory: Segments,
        filled: usize,
    },
    /// Data of a write that is answered without doing it.
    Waste {
        cookie: u64,
        left: usize,
        refusal: Option<Refusal>,
    },
}

/// A request that the disk has.
#[derive(Clone, Copy, Debug)]
struct Pending {
    cookie: u64,
    ask: Ask,
}

/// What came of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many were used.
    Used(usize),
    /// There are too few of them.
    Incomplete,
    /// There is no room for another request of so many bytes.
    Stalled(usize),
    /// The client has said farewell.
    Disconnect,
}

impl Transmission {
    pub(super) fn new(agreed: Agreed, prefix: u64) -> Transmission {
        Transmission { agreed, prefix, receiving: Receiving::Header, pending: Vec::new(), in_flight: 0, held: 0 }
    }

    /// One that goes on from there, with no request in the disk.
    pub(super) fn resumed(agreed: Agreed, prefix: u64, receiving: Receiving) -> Transmission {
        let held = match &receiving {
            Receiving::Data { memory, .. } => memory.len(),
            Receiving::Header | Receiving::Waste { .. } => 0,
        };
        Transmission { receiving, held, ..Transmission::new(agreed, prefix) }
    }

    /// What was agreed, and what is being received; unless requests are in the disk.
    pub(super) fn parts(&self) -> Option<(Agreed, &Receiving)> {
        (self.in_flight == 0).then_some((self.agreed, &self.receiving))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Whether another request of `len` bytes of memory may be taken in.
    pub(super) fn admits(&self, len: usize, outgoing: &Outgoing, room: Room) -> bool {
        let under_way = self.in_flight.saturating_add(outgoing.replies());
        under_way < REQUESTS_MAX && room.admits(self.held.saturating_add(outgoing.held()), len)
    }

    /// Takes in the front of `bytes`: a header, or data that belongs to the last one.
    pub(super) fn step(
        &mut self,
        bytes: &[u8],
        geometry: &Geometry,
        room: Room,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) -> Result<Step, ProtocolError> {
        match &mut self.receiving {
            Receiving::Header => self.header(bytes, geometry, room, outgoing, requests),
            Receiving::Data { memory, filled, .. } => {
                let take = memory.len().saturating_sub(*filled).min(bytes.len());
                memory.slice(*filled, take).copy_from(bytes.get(..take).unwrap_or_default());
                *filled = filled.saturating_add(take);
                self.data_complete(geometry, outgoing, requests);
                Ok(if take == 0 { Step::Incomplete } else { Step::Used(take) })
            }
            Receiving::Waste { left, .. } => {
                let take = (*left).min(bytes.len());
                *left = left.saturating_sub(take);
                self.waste_complete(outgoing);
                Ok(if take == 0 { Step::Incomplete } else { Step::Used(take) })
            }
        }
    }

    fn header(
        &mut self,
        bytes: &[u8],
        geometry: &Geometry,
        room: Room,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) -> Result<Step, ProtocolError> {
        let Ok((header, _)) = RequestHeader::read_from_prefix(bytes) else { return Ok(Step::Incomplete) };
        if header.magic != wire::REQUEST_MAGIC {
            return Err(ProtocolError::RequestMagic);
        }
        let writes = header.kind == wire::CMD_WRITE;
        if writes && header.len > REQUEST_MAX {
            return Err(ProtocolError::WriteTooLong(header.len.get()));
        }
        let verdict = judge(&header, self.agreed, geometry);
        let memory_len = memory_of(verdict);
        if !self.admits(memory_len, outgoing, room) {
            return Ok(Step::Stalled(memory_len));
        }
        let cookie = header.cookie.get();
        let data_len = if writes { usize::try_from(header.len.get()).unwrap_or(usize::MAX) } else { 0 };
        let refusal = match verdict {
            Verdict::Disconnect => return Ok(Step::Disconnect),
            Verdict::Serve(ask) => {
                self.serve(cookie, ask, memory_len, geometry, outgoing, requests);
                return Ok(Step::Used(size_of::<RequestHeader>()));
            }
            Verdict::Nothing => None,
            Verdict::Refuse(refusal) => Some(refusal),
        };
        if data_len > 0 {
            self.receiving = Receiving::Waste { cookie, left: data_len, refusal };
        } else {
            self.answer(cookie, header.kind == wire::CMD_READ, refusal, outgoing);
        }
        Ok(Step::Used(size_of::<RequestHeader>()))
    }

    fn serve(
        &mut self,
        cookie: u64,
        ask: Ask,
        memory_len: usize,
        geometry: &Geometry,
        outgoing: &mut Outgoing,
        requests: &mut VecDeque<Request>,
    ) {
        self.held = self.held.saturating_add(memory_len);
        let memory = if memory_len > 0 { Segments::zeroed(memory_len) } else { Segments::empty() };
        if let Operation::Write { .. } = ask.operation {
            self.receiving = Receiving::Data { cookie, ask, memory, filled: 0 };
        } else {
            self.submit(Pending { cookie, ask }, memory, geometry, outgoing, requests);
        }
    }

    /// Submits a write whose last byte has come.
    fn data_complete(&mut self, geometry: &Geometry, outgoing: &mut Outgoing, requests: &mut VecDeque<Request>) {
        if let Receiving::Data { cookie, ask, ref memory, filled } = self.receiving {
            if filled == memory.len() {
                let memory = memory.clone();
                self.receiving = Receiving::Header;
                self.submit(Pending { cookie, ask }, memory, geometry, outgoing, requests);
            }
        }
    }

    fn waste_complete(&mut self, outgoing: &mut Outgoing) {
        if let Receiving::Waste { cookie, left: 0, refusal } = self.receiving {
            self.receiving = Receiving::Header;
            self.answer(cookie, false, refusal, outgoing);
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
        let held = memory.len();
        let slot = self.free_slot();
        match Request::of_bytes(pending.ask.operation, pending.ask.span, memory, self.token(slot), geometry) {
            Ok(mut request) => {
                request.fast = pending.ask.fast;
                if let Some(place) = self.pending.get_mut(slot) {
                    *place = Some(pending);
                    self.in_flight = self.in_flight.saturating_add(1);
                }
                requests.push_back(request);
            }
            // The geometry has changed since the header was judged.
            Err(status) => {
                self.held = self.held.saturating_sub(held);
                let reads = pending.ask.operation == Operation::Read;
                self.answer(pending.cookie, reads, reply::refusal(status), outgoing);
            }
        }
    }

    /// Answers a request that the disk has never seen.
    fn answer(&self, cookie: u64, reads: bool, refusal: Option<Refusal>, outgoing: &mut Outgoing) {
        let head = match refusal {
            None => reply::done(self.agreed, reads, cookie),
            Some(refusal) => reply::error(self.agreed, cookie, refusal),
        };
        outgoing.push(head, Segments::empty());
    }

    /// The disk's answer. A trim with FUA goes back to it once, as a flush, unless `follow` is `None`.
    pub(super) fn complete(
        &mut self,
        request: Request,
        status: Status,
        outgoing: &mut Outgoing,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        let Some(pending) = self.take_pending(&request) else {
            request.retire();
            return;
        };
        if pending.ask.then_flush && status == Status::Done && request.operation() == Operation::Discard {
            request.retire();
            return self.flush_before_answer(pending, outgoing, follow);
        }
        match (refusal(&pending, status), request.operation()) {
            (Some(refusal), _) => outgoing.push(reply::error(self.agreed, pending.cookie, refusal), Segments::empty()),
            (None, Operation::Read) => {
                let head = reply::data(self.agreed, pending.cookie, request.asked());
                outgoing.push(head, request.asked_memory());
            }
            (None, Operation::Extents { .. }) if !pending.ask.silent => {
                outgoing.push(extents(&pending, &request, self.agreed), Segments::empty())
            }
            (None, _) => outgoing.push(reply::done(self.agreed, false, pending.cookie), Segments::empty()),
        }
        request.retire();
    }

    /// Answers a request that the disk will not see because the server stops.
    pub(super) fn turn_away(&mut self, request: Request, outgoing: &mut Outgoing) {
        if let Some(pending) = self.take_pending(&request) {
            outgoing.push(reply::error(self.agreed, pending.cookie, STOPPING), Segments::empty());
        }
        request.retire();
    }

    /// The client is gone: its half-received write will never be whole.
    pub(super) fn hang_up(&mut self) {
        if let Receiving::Data { memory, .. } = &self.receiving {
            self.held = self.held.saturating_sub(memory.len());
        }
        self.receiving = Receiving::Header;
    }

    fn take_pending(&mut self, request: &Request) -> Option<Pending> {
        let slot = usize::try_from(request.token().0 & SLOT_MASK).unwrap_or(usize::MAX);
        let pending = self.pending.get_mut(slot).and_then(Option::take);
        debug_assert!(pending.is_some(), "an answer to a request that nobody made: {:?}", request.token());
        if pending.is_some() {
            self.in_flight = self.in_flight.saturating_sub(1);
            self.held = self.held.saturating_sub(pending.map_or(0, |pending| memory_of(Verdict::Serve(pending.ask))));
        }
        pending
    }

    /// FUA: the trim is done, and is answered when a flush has made it durable.
    fn flush_before_answer(
        &mut self,
        trim: Pending,
        outgoing: &mut Outgoing,
        follow: Option<(&Geometry, &mut VecDeque<Request>)>,
    ) {
        let Some((geometry, requests)) = follow else {
            return self.answer(trim.cookie, false, Some(STOPPING), outgoing);
        };
        let span = disk::Span { at: 0, len: 0 };
        let ask = Ask { operation: Operation::Flush, span, then_flush: false, ..trim.ask };
        self.submit(Pending { cookie: trim.cookie, ask }, Segments::empty(), geometry, outgoing, requests);
    }

    fn free_slot(&mut self) -> usize {
        self.pending.iter().position(Option::is_none).unwrap_or_else(|| {
            self.pending.push(None);
            self.pending.len().saturating_sub(1)
        })
    }

    fn token(&self, slot: usize) -> Token {
        Token(self.prefix | u64::try_from(slot).unwrap_or(SLOT_MASK))
    }
}

/// The bits of a token that number the request within its connection.
const SLOT_MASK: u64 = 0xffff;

const STOPPING: Refusal = Refusal { errno: Errno::ShuttingDown, why: "the server is stopping" };

/// Bytes of memory that a request needs.
fn memory_of(verdict: Verdict) -> usize {
    match verdict {
        Verdict::Serve(Ask { operation: Operation::Read | Operation::Write { .. }, span, .. }) => {
            usize::try_from(span.len).unwrap_or(usize::MAX)
        }
        _ => 0,
    }
}

/// Why a request has failed, if it has.
fn refusal(pending: &Pending, status: Status) -> Option<Refusal> {
    match status {
        // "NBD_CMD_WRITE_ZEROES": nothing else may be said of zeroes that are not fast.
        Status::Unsupported if pending.ask.fast => {
            Some(Refusal { errno: Errno::NotSupported, why: "zeroes would have to be written" })
        }
        status => reply::refusal(status),
    }
}

fn extents(pending: &Pending, request: &Request, agreed: Agreed) -> Vec<u8> {
    // They begin with the block in which the question does.
    let mut skip = request.asked().at.saturating_sub(request.span().at);
    let asked = request.extents().iter().map(|extent| {
        let skipped = skip.min(extent.len);
        skip = skip.saturating_sub(skipped);
        Extent { len: extent.len.saturating_sub(skipped), ..*extent }
    });
    let extents: Vec<Extent> = asked.filter(|extent| extent.len > 0).collect();
    if extents.is_empty() {
        // BLOCK_STATUS has no empty answer; a disk that knows nothing is a mistake of ours.
        let refusal = Refusal { errno: Errno::Io, why: "the disk does not know" };
        return reply::error(agreed, pending.cookie, refusal);
    }
    reply::extents(agreed, pending.cookie, request.asked(), &extents, pending.ask.one_extent)
}
