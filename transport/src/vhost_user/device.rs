//! The virtio-blk device of one front-end: turns chains of its queues into requests, and completions into used
//! elements.
//!
//! It knows nothing about the socket. Invariants: every chain taken from a ring is either answered at once or counted
//! in its queue until its last request completes; requests of an earlier device are recognised and dropped.
//!
//! Specification: virtio 1.2, 5.2 "Block Device".

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use disk::size::in_memory;
use disk::{DiskOffset, Geometry, Operation, Request, Span, Status, Token};
use memory::{GuestAddr, Segments};

use super::chain::Chain;
use super::dirty_log::{DirtyLog, Unlogged};
use super::event::{Event, Log};
use super::inflight::InflightRegion;
#[cfg(test)]
use super::kill_point;
use super::message::RegionInfo;
use super::queue::{Queue, RingContext};
use super::request::{Header, ID_LEN, MAX_RANGES, Range, RequestKind, S_IOERR, S_OK, take_16};
use super::ring::Broken;
use super::signal::signal;
use super::table::{MAX_REGIONS, MemoryTable};
use super::token::{number, parts, token};

/// Chains taken from one queue before the next queue: enough to benefit from the cache, few enough to be fair.
const CHAINS_PER_TURN: u32 = 16;

/// The maximum size of a request's data: the used element counts bytes in 32 bits, including the status.
const MAX_DATA: u64 = 0xffff_fffe;

/// The maximum number of parts of a request's memory: as many as the kernel accepts in one call.
const MAX_PARTS: usize = 1024;

/// The device of one front-end.
pub struct Device {
    /// Guest memory.
    pub table: MemoryTable,
    /// Regions that were removed and may be added again: a front-end that changes its table removes them first.
    removed_regions: Vec<RegionInfo>,
    /// The front-end's record of requests in flight.
    pub region: Option<InflightRegion>,
    /// The dirty log sent by the front-end, even if it is not in use.
    pub dirty_log: Option<Arc<DirtyLog>>,
    /// Signalled after writes to the log.
    pub log_fd: Option<OwnedFd>,
    /// The log in use: every write to guest memory is logged there.
    log: Option<Arc<DirtyLog>>,
    /// A write to guest memory could not be logged: the front-end must be disconnected.
    unlogged: bool,
    /// The queues, by index; as many as were offered.
    pub queues: Vec<Queue>,
    /// Notifications and interrupts by event index are negotiated.
    pub event_idx: bool,
    /// The driver can flush. If it cannot, writes are durable when answered (virtio 1.2, 5.2.6.2).
    pub can_flush: bool,
    serial: [u8; ID_LEN],
    /// Distinguishes this device's requests from those of the previous one.
    epoch: u32,
    /// Requests of a fully processed chain, to be popped next.
    ready: VecDeque<Request>,
    /// The number of requests popped and not yet completed.
    in_flight: usize,
    /// The queue from which chains are taken now.
    turn: usize,
    /// The number of chains taken in this turn.
    taken: u32,
    /// Bitmap of queues with something to publish.
    unpublished: u64,
    /// [`Event::Started`] was logged.
    logged: bool,
    scratch: Chain,
}

/// The result of processing a chain.
#[derive(Clone, Copy)]
enum ChainResult {
    /// Its requests are in `ready`: they are large, and moved as few times as possible.
    Requests,
    /// It is answered with this status byte and number of bytes.
    Answer(u8, u32),
}

impl Device {
    /// A device in its initial state.
    pub fn new(queues: u16, serial: [u8; ID_LEN], epoch: u32) -> Device {
        Device {
            table: MemoryTable::default(),
            removed_regions: Vec::new(),
            region: None,
            dirty_log: None,
            log_fd: None,
            log: None,
            unlogged: false,
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
            logged: false,
            scratch: Chain::default(),
        }
    }

    /// Sets the dirty log to use from now on, also for requests in flight; `None` for no logging.
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>, events: &mut Log) {
        self.log = log;
        for index in 0..self.queues.len() {
            let log = self.log.as_ref();
            if let Some(Err(why)) = self.queues.get_mut(index).map(|queue| queue.set_log(log)) {
                self.mark_broken(index, why, events);
            }
        }
    }

    /// Returns true if the front-end must be disconnected, because a write could not be logged.
    pub fn is_unlogged(&self) -> bool {
        self.unlogged
    }

    /// The number of queues.
    pub fn queue_count(&self) -> u16 {
        number(self.queues.len())
    }

    /// Starts the ring of a queue, or moves it to its new address, and writes answers that waited for that.
    pub fn start(&mut self, index: usize, log: &mut Log) {
        let Device { queues, table, region, event_idx, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        let context = RingContext { table, event_idx: *event_idx, region: region.as_ref() };
        let begun = queue.start(number(index), context);
        match begun.and_then(|begun| Ok((begun, queue.answer_in_order(table)?))) {
            Ok((begun, _)) => {
                // Including requests answered before the ring's memory was removed.
                self.mark(index);
                let Some(begun) = begun else { return };
                if !std::mem::replace(&mut self.logged, true) {
                    log.record(Event::Started { recorded: begun.recorded });
                }
                if begun.again > 0 {
                    log.record(Event::Resumed { queue: index, count: begun.again });
                }
            }
            Err(why) => self.mark_broken(index, why, log),
        }
    }

    /// Records that a region was removed: chains that need it wait until it is added again.
    pub fn region_removed(&mut self, info: RegionInfo) {
        // The limit of a table; a front-end that exceeds it is not just changing its table.
        if self.removed_regions.len() >= usize::from(MAX_REGIONS) {
            self.removed_regions.clear();
        }
        self.removed_regions.push(info);
    }

    /// Records that a region was added; `None` if all were replaced.
    pub fn region_added(&mut self, info: Option<&RegionInfo>) {
        let is_disjoint = |place: &RegionInfo| {
            info.is_some_and(|info| {
                place.guest.saturating_add(place.len) <= info.guest
                    || info.guest.saturating_add(info.len) <= place.guest
            })
        };
        self.removed_regions.retain(is_disjoint);
    }

    /// Regions that were removed and may be added again.
    pub fn removed_regions(&self) -> &[RegionInfo] {
        &self.removed_regions
    }

    /// Pops the next request of a chain that is already processed.
    #[inline]
    pub fn pop_ready(&mut self) -> Option<Request> {
        if !self.ready.is_empty() {
            self.in_flight += 1;
        }
        self.ready.pop_front()
    }

    /// Returns true if all requests of the processed chains are popped.
    pub fn has_popped_all(&self) -> bool {
        self.ready.is_empty()
    }

    /// Returns true if the front-end records requests in flight; `None` before a ring runs.
    pub fn records_in_flight(&self) -> Option<bool> {
        self.queues.iter().filter_map(Queue::is_recorded).reduce(|all, one| all && one)
    }

    /// Pops the next request. Queues take turns; work per call is bounded by the number of queues.
    pub fn pop(&mut self, geometry: &Geometry, log: &mut Log) -> Option<Request> {
        if self.ready.is_empty() {
            self.take_next(geometry, log);
        }
        self.pop_ready()
    }

    /// Takes chains until there is a request to pop, or none left.
    #[inline]
    fn take_next(&mut self, geometry: &Geometry, log: &mut Log) {
        // One more round than there are queues, because the first queue's turn may end at once.
        for _ in 0..=self.queues.len() {
            while self.taken < CHAINS_PER_TURN {
                self.taken += 1;
                match self.take(self.turn, geometry, log) {
                    Ok(Some(ChainResult::Requests)) => return,
                    Ok(Some(ChainResult::Answer(..))) => {}
                    Ok(None) => break,
                    Err(why) => self.mark_broken(self.turn, why, log),
                }
            }
            self.taken = 0;
            self.turn = self.turn.checked_add(1).filter(|&next| next < self.queues.len()).unwrap_or(0);
        }
    }

    /// Takes one chain from a queue.
    fn take(&mut self, index: usize, geometry: &Geometry, log: &mut Log) -> Result<Option<ChainResult>, Broken> {
        let Some(queue) = self.queues.get_mut(index) else { return Ok(None) };
        let Some((head, ring)) = queue.pop()? else { return Ok(None) };
        ring.prefetch_next(&self.table);
        let filled = self.scratch.fill(ring, &self.table, head);
        let taken = filled.and_then(|status_at| {
            let taken = match take_16(&self.table, &mut self.scratch.readable).map(Header::parse) {
                Some(Ok(Header { kind: RequestKind::GetId, .. })) => self.identify()?,
                Some(Ok(header)) => self.process_chain(index, head, status_at, header, geometry),
                Some(Err(byte)) => ChainResult::Answer(byte, 1),
                None => ChainResult::Answer(S_IOERR, 1),
            };
            Ok((taken, status_at))
        });
        // Checked only after an error, since removed regions may remain removed.
        let is_bad = matches!(taken, Err(_) | Ok((ChainResult::Answer(S_IOERR, _), _)));
        if is_bad && self.scratch.touches(&self.removed_regions) {
            if let Some(queue) = self.queues.get_mut(index) {
                queue.park(head);
            }
            log.record(Event::WaitingForMemory { queue: index });
            return Ok(None);
        }
        let (taken, status_at) = taken?;
        if let ChainResult::Answer(byte, written) = taken {
            let queue = self.queues.get_mut(index);
            if queue.map_or(Ok(false), |queue| queue.answer(head, status_at, byte, written, &self.table))? {
                self.mark(index);
            }
        }
        Ok(Some(taken))
    }

    /// Turns a chain with a valid header into its requests or its answer.
    #[inline]
    fn process_chain(
        &mut self,
        index: usize,
        head: u16,
        status_at: GuestAddr,
        header: Header,
        geometry: &Geometry,
    ) -> ChainResult {
        let durable = !self.can_flush;
        let token = token(self.epoch, number(index), head);
        let (operation, read) = match header.kind {
            RequestKind::Read => (Operation::Read, true),
            RequestKind::Write => (Operation::Write { durable }, false),
            RequestKind::Flush => {
                let nothing = Span { at: DiskOffset(0), len: 0 };
                let Ok(flush) = Request::new(Operation::Flush, nothing, Segments::empty(), token, geometry) else {
                    return ChainResult::Answer(S_IOERR, 1);
                };
                self.ready.push_back(flush);
                self.open(index, head, status_at, 1, 1);
                return ChainResult::Requests;
            }
            RequestKind::GetId => unreachable!("answered by `take`"),
            RequestKind::Discard | RequestKind::WriteZeroes => {
                return match self.ranges(header.kind, durable, token, geometry) {
                    Ok(count) => {
                        self.open(index, head, status_at, 1, count);
                        ChainResult::Requests
                    }
                    Err(byte) => ChainResult::Answer(byte, 1),
                };
            }
        };
        let Some(memory) = self.data(read) else { return ChainResult::Answer(S_IOERR, 1) };
        let Ok(len) = u32::try_from(memory.len()) else { unreachable!("`data` allows MAX_DATA") };
        let span = Span { at: header.at, len: u64::from(len) };
        match Request::new(operation, span, memory, token, geometry) {
            Ok(request) => self.ready.push_back(request),
            // Not within the disk.
            Err(_) => return ChainResult::Answer(S_IOERR, 1),
        }
        self.open(index, head, status_at, if read { len + 1 } else { 1 }, 1);
        ChainResult::Requests
    }

    fn open(&mut self, index: usize, head: u16, status_at: GuestAddr, written: u32, count: u16) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.open(head, status_at, written, count);
        }
    }

    /// The memory of a read or write. `None` if a part has the wrong direction, or the memory is invalid.
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

    /// virtio 1.2, 5.2.6: the serial number, 20 bytes, without a final NUL if it has that length.
    fn identify(&self) -> Result<ChainResult, Unlogged> {
        let Some(memory) = self.table.segments(self.scratch.writable.iter().copied()) else {
            return Ok(ChainResult::Answer(S_IOERR, 1));
        };
        let len = memory.len().min(ID_LEN);
        if let Some(serial) = self.serial.get(..len) {
            let memory = memory.slice(0, len);
            memory.copy_from(serial);
            if let Some(log) = &self.log {
                log.mark_memory(&memory)?;
            }
        }
        let Ok(len) = u32::try_from(len) else { unreachable!("at most ID_LEN bytes") };
        Ok(ChainResult::Answer(S_OK, len + 1))
    }

    /// Creates the requests of a discard or write-zeroes: one per range; returns their number. All are checked before
    /// the first is popped.
    fn ranges(&mut self, kind: RequestKind, durable: bool, token: Token, geometry: &Geometry) -> Result<u16, u8> {
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
                .and_then(|range| request_of(range, kind, durable, token, geometry));
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

    /// Processes the completion of a request. Returns `false` if it belongs to an earlier device.
    #[inline]
    pub fn complete(&mut self, request: Request, status: Status, log: &mut Log) -> bool {
        let logged = if self.log.is_some() { self.log_read(&request) } else { Ok(()) };
        let token = request.retire();
        match logged {
            Ok(()) => self.close(token, Some(status), log),
            // The chain stays unanswered; it is taken again when the front-end has reconnected.
            Err(Unlogged(addr)) => {
                let (_, index, _) = parts(token);
                self.mark_broken(index, Broken::Unlogged(addr), log);
                self.close(token, None, log)
            }
        }
    }

    /// Logs the memory of a read, whichever way the data got there. A failed read may have written as well.
    #[cold]
    fn log_read(&self, request: &Request) -> Result<(), Unlogged> {
        let (epoch, ..) = parts(request.token());
        let Some(log) = self.log.as_ref().filter(|_| epoch == self.epoch) else { return Ok(()) };
        if request.operation() != Operation::Read {
            return Ok(());
        }
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::ReadNotLogged) {
            return Ok(());
        }
        // No read is empty: one whose memory is lost cannot be logged.
        if request.memory().is_empty() {
            return Err(Unlogged(GuestAddr(u64::MAX)));
        }
        log.mark_memory(request.memory())
    }

    /// Drops a request that was not started; its chain stays unanswered. Returns `false` if it belongs to an earlier
    /// device.
    pub fn give_back(&mut self, token: Token, log: &mut Log) -> bool {
        self.close(token, None, log)
    }

    /// Returns true if a request belongs to a queue that is being stopped, or to no queue of this device.
    pub fn recalls(&self, token: Token) -> bool {
        let (epoch, index, _) = parts(token);
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::RecallsAll) && self.queues.iter().any(|queue| queue.draining) {
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
        self.in_flight -= 1;
        let Some(queue) = self.queues.get_mut(index) else { return true };
        match queue.close(head, status, &self.table) {
            Ok(true) => self.mark(index),
            Ok(false) => {}
            Err(why) => self.mark_broken(index, why, log),
        }
        true
    }

    fn mark(&mut self, index: usize) {
        self.unpublished |= 1 << index;
    }

    /// Makes answers visible to the driver, with one index update per queue.
    pub fn publish(&mut self, log: &mut Log) {
        let mut left = std::mem::take(&mut self.unpublished);
        while left != 0 {
            let index = in_memory(left.trailing_zeros().into());
            left &= left.wrapping_sub(1);
            #[cfg(test)]
            if index > 0 && kill_point::is_planted(kill_point::Bug::FirstPublished) {
                continue;
            }
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::publish) {
                self.mark_broken(index, why, log);
            }
            if self.log.is_some() {
                signal(self.log_fd.as_ref());
            }
        }
    }

    /// Requests notifications on all queues, then checks them again. Returns `false` if there are requests to pop.
    pub fn prepare_to_sleep(&mut self, log: &mut Log) -> bool {
        for index in 0..self.queues.len() {
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::request_kicks) {
                self.mark_broken(index, why, log);
            }
        }
        // The driver makes a chain available and then checks whether we want a notification; we request one and then
        // check for a chain. With a full barrier on either side, one of the two sees the other (virtio 1.2,
        // 2.7.13.4.1).
        fence(Ordering::SeqCst);
        let mut empty = self.ready.is_empty();
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(Queue::is_empty) {
                Some(Ok(true)) | None => {}
                Some(Ok(false)) => empty = false,
                Some(Err(why)) => self.mark_broken(index, why, log),
            }
        }
        empty
    }

    fn mark_broken(&mut self, index: usize, why: Broken, log: &mut Log) {
        self.unlogged |= matches!(why, Broken::Unlogged(_));
        if let Some(queue) = self.queues.get_mut(index) {
            queue.mark_broken();
        }
        log.record(Event::QueueBroken { queue: index, why });
    }

    /// Shuts the device down: no more requests are popped. Returns the number of requests still to be completed.
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

/// The request for one range. A range outside the disk is an error, rather than unsupported.
fn request_of(range: Range, kind: RequestKind, durable: bool, token: Token, disk: &Geometry) -> Result<Request, u8> {
    let operation = match kind {
        RequestKind::Discard => Operation::Discard,
        _ => Operation::WriteZeroes { free: range.unmap, durable },
    };
    Request::new(operation, range.span, Segments::empty(), token, disk).map_err(|_| S_IOERR)
}

fn retire_all(requests: impl Iterator<Item = Request>) {
    for request in requests {
        request.retire();
    }
}
