//! The virtio-blk device of one front-end: chains of its queues become requests, answers go back.
//!
//! Knows nothing about the socket. Invariant: every chain taken from a ring is either answered at once or counted
//! in its queue until its last request comes back; requests of an earlier device are recognised and dropped.
//!
//! Specification: virtio 1.2, 5.2 "Block Device".

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use disk::{Geometry, Operation, Request, Span, Status, Token};
use memory::{GuestAddr, Segments};

use super::chain::Chain;
use super::event::{Event, Log};
use super::inflight::InflightRegion;
use super::message::RegionInfo;
#[cfg(test)]
use super::moment;
use super::queue::{Ground, Queue};
use super::request::{Header, ID_LEN, Kind, MAX_RANGES, Range, S_IOERR, S_OK, take_16};
use super::ring::Broken;
use super::table::{MAX_REGIONS, Table};

/// Chains taken from one queue before the next has its turn: enough to stay in the cache, few enough to be fair.
const TURN: u32 = 16;

/// The used element counts bytes in 32 bits, the status among them.
const MAX_DATA: u64 = 0xffff_fffe;

/// Parts of one request's memory: as many as the kernel takes in one call.
const MAX_PARTS: usize = 1024;

/// The device of one front-end.
pub struct Device {
    /// Guest memory.
    pub table: Table,
    /// Memory that was taken away and may come back: a front-end that changes its table takes away first.
    gone: Vec<RegionInfo>,
    /// The front-end's record of what is in flight.
    pub region: Option<InflightRegion>,
    /// The queues, by index; as many as were offered.
    pub queues: Vec<Queue>,
    /// Notifications and interrupts by index are negotiated.
    pub event_idx: bool,
    /// The driver can flush. Where it cannot, writes are durable when answered (virtio 1.2, 5.2.6.2).
    pub can_flush: bool,
    serial: [u8; ID_LEN],
    /// Tells this device's requests from those of the one before.
    epoch: u32,
    /// Requests of a chain that was taken whole, to be popped next.
    ready: VecDeque<Request>,
    /// Requests popped and not yet completed.
    in_flight: usize,
    /// The queue whose turn it is, and the chains it has taken in this turn.
    turn: usize,
    taken: u32,
    /// Queues with something to publish: one bit each.
    unpublished: u64,
    /// How rings run was said.
    said: bool,
    scratch: Chain,
}

/// What became of a chain.
#[derive(Clone, Copy)]
enum Taken {
    /// Requests, which are in `ready`: they are large, and handed on as few times as can be.
    Requests,
    /// Answered with this status byte and so many bytes.
    Answer(u8, u32),
}

impl Device {
    /// A device as it is before a front-end has said anything.
    pub fn new(queues: u16, serial: [u8; ID_LEN], epoch: u32) -> Device {
        Device {
            table: Table::default(),
            gone: Vec::new(),
            region: None,
            queues: (0..queues).map(|_| Queue::default()).collect(),
            event_idx: false,
            can_flush: false,
            serial,
            epoch,
            ready: VecDeque::new(),
            in_flight: 0,
            turn: 0,
            taken: 0,
            unpublished: 0,
            said: false,
            scratch: Chain::default(),
        }
    }

    /// Brings up the ring of a queue, or to its new place, and gives the answers that waited for that.
    pub fn start(&mut self, index: usize, log: &mut Log) {
        let Device { queues, table, region, event_idx, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        let ground = Ground { table, event_idx: *event_idx, region: region.as_ref() };
        let begun = queue.start(u16::try_from(index).unwrap_or(u16::MAX), ground);
        match begun.and_then(|begun| Ok((begun, queue.answer_in_order(table)?))) {
            Ok((begun, _)) => {
                // Also of what was answered before the ring's memory went away.
                self.mark(index);
                let Some(begun) = begun else { return };
                if !std::mem::replace(&mut self.said, true) {
                    log.record(Event::Started { recorded: begun.recorded });
                }
                if begun.again > 0 {
                    log.record(Event::TakenAgain { queue: index, count: begun.again });
                }
            }
            Err(why) => self.break_off(index, why, log),
        }
    }

    /// A region was taken away: chains that need it wait until it comes back.
    pub fn removed(&mut self, info: RegionInfo) {
        // As many as there can have been; a front-end that plays with more does not change a table.
        if self.gone.len() >= MAX_REGIONS {
            self.gone.clear();
        }
        self.gone.push(info);
    }

    /// A region has come, or all are new.
    pub fn added(&mut self, info: Option<&RegionInfo>) {
        let is_apart = |place: &RegionInfo| {
            info.is_some_and(|info| {
                place.guest.saturating_add(place.len) <= info.guest
                    || info.guest.saturating_add(info.len) <= place.guest
            })
        };
        self.gone.retain(is_apart);
    }

    /// Memory that was taken away and may come back.
    pub fn gone(&self) -> &[RegionInfo] {
        &self.gone
    }

    /// The next request of a chain that was taken before.
    #[inline]
    pub fn pop_begun(&mut self) -> Option<Request> {
        if !self.ready.is_empty() {
            self.in_flight = self.in_flight.saturating_add(1);
        }
        self.ready.pop_front()
    }

    /// Whether all requests of the chains that were taken are popped.
    pub fn has_begun_all(&self) -> bool {
        self.ready.is_empty()
    }

    /// Whether the front-end records what is in flight; `None` before a ring runs.
    pub fn is_recorded(&self) -> Option<bool> {
        self.queues.iter().filter_map(Queue::is_recorded).reduce(|all, one| all && one)
    }

    /// The next request. Each queue has its turn; work per call is bounded by the number of queues.
    pub fn pop(&mut self, geometry: &Geometry, log: &mut Log) -> Option<Request> {
        if self.ready.is_empty() {
            self.take_next(geometry, log);
        }
        self.pop_begun()
    }

    /// Takes chains until there is a request to pop, or none left.
    #[inline]
    fn take_next(&mut self, geometry: &Geometry, log: &mut Log) {
        // One round more than there are queues, for the one whose turn ends at once.
        for _ in 0..=self.queues.len() {
            while self.taken < TURN {
                self.taken = self.taken.saturating_add(1);
                match self.take(self.turn, geometry, log) {
                    Ok(Some(Taken::Requests)) => return,
                    Ok(Some(Taken::Answer(..))) => {}
                    Ok(None) => break,
                    Err(why) => self.break_off(self.turn, why, log),
                }
            }
            self.taken = 0;
            self.turn = self.turn.checked_add(1).filter(|&next| next < self.queues.len()).unwrap_or(0);
        }
    }

    /// Takes one chain from a queue.
    fn take(&mut self, index: usize, geometry: &Geometry, log: &mut Log) -> Result<Option<Taken>, Broken> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(None) };
        let Some((head, ring)) = queue.pop()? else { return Ok(None) };
        let filled = self.scratch.fill(ring, &self.table, head);
        let taken = filled.map(|status_at| {
            let taken = match take_16(&self.table, &mut self.scratch.readable).map(Header::parse) {
                Some(Ok(header)) => self.judge(index, head, status_at, header, geometry),
                Some(Err(byte)) => Taken::Answer(byte, 1),
                None => Taken::Answer(S_IOERR, 1),
            };
            (taken, status_at)
        });
        // Looked at only when something is wrong, since what is gone may stay so.
        let is_bad = matches!(taken, Err(_) | Ok((Taken::Answer(S_IOERR, _), _)));
        if is_bad && self.scratch.touches(&self.gone) {
            if let Some(queue) = self.queues.get_mut(index) {
                queue.park(head);
            }
            log.record(Event::Waits { queue: index });
            return Ok(None);
        }
        let (taken, status_at) = taken?;
        if let Taken::Answer(byte, written) = taken {
            let queue = self.queues.get_mut(index);
            if queue.map_or(Ok(false), |queue| queue.answer(head, status_at, byte, written, &self.table))? {
                self.mark(index);
            }
        }
        Ok(Some(taken))
    }

    /// Turns a chain with a good header into its requests or its answer.
    #[inline]
    fn judge(&mut self, index: usize, head: u16, status_at: GuestAddr, header: Header, geometry: &Geometry) -> Taken {
        let durable = !self.can_flush;
        let token = token(self.epoch, index, head);
        let (operation, read) = match header.kind {
            Kind::Read => (Operation::Read, true),
            Kind::Write => (Operation::Write { durable }, false),
            Kind::Flush => {
                let nothing = Span { at: 0, len: 0 };
                let Ok(flush) = Request::new(Operation::Flush, nothing, Segments::empty(), token, geometry) else {
                    return Taken::Answer(S_IOERR, 1);
                };
                self.ready.push_back(flush);
                self.open(index, head, status_at, 1, 1);
                return Taken::Requests;
            }
            Kind::GetId => return self.identify(),
            Kind::Discard | Kind::WriteZeroes => {
                return match self.ranges(header.kind, durable, token, geometry) {
                    Ok(count) => {
                        self.open(index, head, status_at, 1, count);
                        Taken::Requests
                    }
                    Err(byte) => Taken::Answer(byte, 1),
                };
            }
        };
        let Some(memory) = self.data(read) else { return Taken::Answer(S_IOERR, 1) };
        // `data` has checked that this fits.
        let len = u32::try_from(memory.len()).unwrap_or(u32::MAX);
        let span = Span { at: header.at, len: u64::from(len) };
        match Request::new(operation, span, memory, token, geometry) {
            Ok(request) => self.ready.push_back(request),
            // Not on this disk.
            Err(_) => return Taken::Answer(S_IOERR, 1),
        }
        self.open(index, head, status_at, if read { len.saturating_add(1) } else { 1 }, 1);
        Taken::Requests
    }

    fn open(&mut self, index: usize, head: u16, status_at: GuestAddr, written: u32, count: u16) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.open(head, status_at, written, count);
        }
    }

    /// The memory of a read or write: all of it in the direction that the kind asks for.
    #[inline]
    fn data(&self, read: bool) -> Option<Segments> {
        let Chain { readable, writable } = &self.scratch;
        let (data, wrong) = if read { (writable, readable) } else { (readable, writable) };
        let len: u64 = data.iter().map(|&(_, len)| u64::from(len)).sum();
        if len == 0 || len > MAX_DATA || wrong.iter().any(|&(_, len)| len > 0) {
            return None;
        }
        let memory = self.table.segments(data.iter().copied())?;
        if memory.parts().len() <= MAX_PARTS { Some(memory) } else { None }
    }

    /// virtio 1.2, 5.2.6: the serial number, 20 bytes, without a final zero if it is as long as that.
    fn identify(&self) -> Taken {
        let Some(memory) = self.table.segments(self.scratch.writable.iter().copied()) else {
            return Taken::Answer(S_IOERR, 1);
        };
        let len = memory.len().min(ID_LEN);
        if let Some(serial) = self.serial.get(..len) {
            memory.slice(0, len).copy_from(serial);
        }
        Taken::Answer(S_OK, u32::try_from(len).unwrap_or(0).saturating_add(1))
    }

    /// The requests of a discard or write-zeroes: one a range, and how many. All are checked before the first is handed
    /// out.
    fn ranges(&mut self, kind: Kind, durable: bool, token: Token, geometry: &Geometry) -> Result<u16, u8> {
        let bytes: u64 = self.scratch.readable.iter().map(|&(_, len)| u64::from(len)).sum();
        let count = u16::try_from(bytes / 16).ok().filter(|&count| count <= MAX_RANGES).ok_or(S_IOERR)?;
        if bytes % 16 != 0 {
            return Err(S_IOERR);
        }
        let before = self.ready.len();
        for _ in 0..count {
            let made = take_16(&self.table, &mut self.scratch.readable)
                .ok_or(S_IOERR)
                .and_then(|bytes| Range::parse(bytes, kind))
                .and_then(|range| request_for(range, kind, durable, token, geometry));
            match made {
                Ok(request) => self.ready.push_back(request),
                Err(byte) => {
                    retire_all(self.ready.drain(before..));
                    return Err(byte);
                }
            }
        }
        if count == 0 { Err(S_IOERR) } else { Ok(count) }
    }

    /// Takes the answer to a request. `false`: it was one of an earlier device.
    #[inline]
    pub fn complete(&mut self, token: Token, status: Status, log: &mut Log) -> bool {
        self.close(token, Some(status), log)
    }

    /// Takes back a request that was not begun. `false`: it was one of an earlier device.
    pub fn give_back(&mut self, token: Token, log: &mut Log) -> bool {
        self.close(token, None, log)
    }

    /// Whether a request belongs to a queue that is to stop, or to no queue of this device.
    pub fn recalls(&self, token: Token) -> bool {
        let (epoch, index, _) = parts(token);
        #[cfg(test)]
        if moment::is_planted(moment::Bug::RecallsAll) && self.queues.iter().any(|queue| queue.draining) {
            return true;
        }
        epoch != self.epoch || self.queues.get(index).is_none_or(|queue| queue.draining)
    }

    #[inline(always)]
    fn close(&mut self, token: Token, status: Option<Status>, log: &mut Log) -> bool {
        let (epoch, index, head) = parts(token);
        if epoch != self.epoch {
            return false;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(queue) = self.queues.get_mut(index) else { return true };
        match queue.close(head, status, &self.table) {
            Ok(true) => self.mark(index),
            Ok(false) => {}
            Err(why) => self.break_off(index, why, log),
        }
        true
    }

    fn mark(&mut self, index: usize) {
        self.unpublished |= bit(index);
    }

    /// Shows the driver its answers: once a queue, however many there are.
    pub fn publish(&mut self, log: &mut Log) {
        let mut left = std::mem::take(&mut self.unpublished);
        while left != 0 {
            let index = usize::try_from(left.trailing_zeros()).unwrap_or(0);
            left &= left.wrapping_sub(1);
            #[cfg(test)]
            if index > 0 && moment::is_planted(moment::Bug::FirstPublished) {
                continue;
            }
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::publish) {
                self.break_off(index, why, log);
            }
        }
    }

    /// Asks for notifications on all queues, and looks once more. `false`: there are requests to pop first.
    pub fn may_sleep(&mut self, log: &mut Log) -> bool {
        for index in 0..self.queues.len() {
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::ask_for_kicks) {
                self.break_off(index, why, log);
            }
        }
        // The driver offers a chain and then looks whether we want to be notified; we ask and then look for a
        // chain. With a full barrier on either side, one of the two sees the other (virtio 1.2, 2.7.13.4.1).
        fence(Ordering::SeqCst);
        let mut empty = self.ready.is_empty();
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(Queue::is_empty) {
                Some(Ok(true)) | None => {}
                Some(Ok(false)) => empty = false,
                Some(Err(why)) => self.break_off(index, why, log),
            }
        }
        empty
    }

    fn break_off(&mut self, index: usize, why: Broken, log: &mut Log) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.break_off();
        }
        log.record(Event::QueueBroken { queue: index, why });
    }

    /// Ends the device: nothing more is popped. The answer is the number of requests still to be completed.
    pub fn end(&mut self) -> usize {
        retire_all(self.ready.drain(..));
        self.in_flight
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        retire_all(self.ready.drain(..));
    }
}

/// The request for one range. A place outside of the disk is an error, not something unsupported.
fn request_for(range: Range, kind: Kind, durable: bool, token: Token, geometry: &Geometry) -> Result<Request, u8> {
    let operation = match kind {
        Kind::Discard => Operation::Discard,
        _ => Operation::WriteZeroes { free: range.unmap, durable },
    };
    Request::new(operation, range.span, Segments::empty(), token, geometry).map_err(|_| S_IOERR)
}

fn retire_all(requests: impl Iterator<Item = Request>) {
    for request in requests {
        request.retire();
    }
}

fn bit(index: usize) -> u64 {
    u32::try_from(index).ok().and_then(|index| 1u64.checked_shl(index)).unwrap_or(0)
}

/// The epoch, queue and head that a request belongs to, in its token: 32, 16 and 16 bits.
fn token(epoch: u32, index: usize, head: u16) -> Token {
    let index = u64::from(u16::try_from(index).unwrap_or(u16::MAX));
    Token((u64::from(epoch) << 32) | (index << 16) | u64::from(head))
}

/// Where the request of a token came from, for people.
pub fn place_of(token: Token) -> String {
    let (_, index, head) = parts(token);
    format!("queue {index}, descriptor {head}")
}

pub fn parts(token: Token) -> (u32, usize, u16) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    (u32::from_be_bytes([a, b, c, d]), usize::from(u16::from_be_bytes([e, f])), u16::from_be_bytes([g, h]))
}
