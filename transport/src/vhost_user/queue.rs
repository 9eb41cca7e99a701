//! One queue: its configuration by the front-end, its ring while that runs, and the chains in progress.
//!
//! It knows nothing about the meaning of a chain. Invariants: a chain is answered once, after the last of its requests;
//! a chain not answered when the ring stops is taken again when it starts: according to the record of requests in
//! flight if the front-end keeps one, otherwise according to the used index alone, since chains are then answered in
//! the order of the available ring. A broken queue is not accessed until the front-end sets it up again.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use disk::Status;
use memory::GuestAddr;

use super::dirty_log::{DirtyLog, UsedLog};
use super::inflight::{InflightRecord, InflightRegion, RecordError, Recovered};
use super::kill_point;
use super::message::VringAddr;
use super::request::{S_OK, status_byte};
use super::ring::{Broken, Ring, RingPosition};
use super::signal::signal;
use super::table::MemoryTable;

/// In the flags of SET_VRING_ADDR: writes to the used ring are logged.
const VRING_LOG: u32 = 1;

/// A virtqueue of a device.
#[derive(Default)]
pub struct Queue {
    /// Slots in the ring; zero until set.
    pub size: u16,
    /// The index to start at.
    pub base: u16,
    /// The addresses of the ring.
    pub place: Option<VringAddr>,
    /// The dirty log in use.
    log: Option<Arc<DirtyLog>>,
    /// Whether chains may be taken; always set if the front-end does not negotiate enabling.
    pub enabled: bool,
    /// Signalled by the driver on new requests; present if the queue is started.
    pub kick: Option<OwnedFd>,
    /// Signalled on answers.
    call: Option<OwnedFd>,
    /// Signalled when the queue breaks.
    pub err: Option<OwnedFd>,
    /// No chains are taken until the front-end starts it again.
    pub draining: bool,
    ring: Option<Ring>,
    /// The position of the ring when its memory was removed.
    lost: Option<RingPosition>,
    broken: bool,
    /// The next chain uses memory that was removed: no more are taken before the table changes.
    parked: bool,
    /// By head of the chain; as many as the ring has slots, so that every head is in bounds.
    slots: Vec<ChainSlot>,
    /// The number of chains with requests in progress.
    in_flight: u16,
    /// The front-end's record of chains in flight.
    record: Option<InflightRecord>,
    /// Chains to be taken first: in flight of an earlier process, or parked.
    again: VecDeque<u16>,
    /// Without a record: chains taken and not answered, in the order of the available ring. With one: completed chains
    /// that wait for their ring's memory.
    order: VecDeque<u16>,
}

/// The parts of the device needed to start a ring.
#[derive(Clone, Copy)]
pub struct RingContext<'a> {
    /// Guest memory.
    pub table: &'a MemoryTable,
    /// Notifications and interrupts by event index are negotiated.
    pub event_idx: bool,
    /// The front-end's record of requests in flight.
    pub region: Option<&'a InflightRegion>,
}

/// How a ring was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStarted {
    /// The front-end records requests in flight.
    pub recorded: bool,
    /// The number of chains that are taken again.
    pub again: usize,
}

/// The state of the chain at one head.
#[derive(Clone, Copy)]
struct ChainSlot {
    status_at: GuestAddr,
    /// The number of bytes reported as written, including the status, if all requests succeed.
    written: u32,
    /// The number of requests of the chain that have not completed.
    open: u16,
    stage: ChainState,
    /// The status to report: success, or an error.
    status: u8,
}

/// The progress of a chain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChainState {
    /// Owned by the driver.
    Free,
    /// Its requests are in progress.
    Taken,
    /// One of its requests was given back: it remains unanswered.
    GivenBack,
    /// Completed; its answer is not written or not published yet.
    Done,
}

impl ChainSlot {
    /// After a failed read only the status byte is valid.
    #[cold]
    fn fail(&mut self, status: Status) {
        (self.status, self.written) = (status_byte(status), 1);
    }
}

const FREE: ChainSlot =
    ChainSlot { status_at: GuestAddr(0), written: 0, open: 0, stage: ChainState::Free, status: S_OK };

impl Queue {
    /// Returns true if the front-end has started the queue.
    pub fn is_started(&self) -> bool {
        self.kick.is_some()
    }

    /// Returns true if no request is in progress.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Returns true if the front-end records requests in flight; `None` while the ring does not run.
    pub fn is_recorded(&self) -> Option<bool> {
        (self.ring.is_some() || self.lost.is_some()).then_some(self.record.is_some())
    }

    /// Sets the descriptor on which answers are signalled, and signals it once: an earlier signal may have been lost
    /// with its process or its descriptor.
    pub fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::SignalLost) {
            return;
        }
        signal(self.call.as_ref());
    }

    /// Starts the ring, or moves it, if its configuration is complete. A ring that is not within the table waits for
    /// the next table, and completed chains are answered then.
    pub fn start(&mut self, index: u16, context: RingContext<'_>) -> Result<Option<RingStarted>, Broken> {
        let Some(place) = self.place.filter(|_| self.is_started() && self.size > 0 && !self.broken) else {
            return Ok(None);
        };
        let started = self.start_or_move(index, &place, context)?;
        self.update_ring_log()?;
        Ok(started)
    }

    fn start_or_move(
        &mut self,
        index: u16,
        place: &VringAddr,
        context: RingContext<'_>,
    ) -> Result<Option<RingStarted>, Broken> {
        let RingContext { table, event_idx, .. } = context;
        self.parked = false;
        match (&mut self.ring, self.lost) {
            (Some(ring), _) => {
                if ring.move_to(table, place).is_none() {
                    self.lost = Some(ring.position());
                    self.ring = None;
                }
                Ok(None)
            }
            (None, Some(at)) => {
                self.ring = Ring::resume(table, place, self.size, at, event_idx);
                self.lost = self.ring.is_none().then_some(at);
                Ok(None)
            }
            (None, None) => match Ring::new(table, place, self.size, self.base, event_idx) {
                Some(ring) => self.begin(index, ring, context.region).map(Some),
                None => Ok(None),
            },
        }
    }

    /// Sets the dirty log to use from now on, also for the answers of requests in flight.
    pub fn set_log(&mut self, log: Option<&Arc<DirtyLog>>) -> Result<(), Broken> {
        self.log = log.cloned();
        self.update_ring_log()
    }

    /// Logs writes to the used ring if the front-end has set that flag.
    fn update_ring_log(&mut self) -> Result<(), Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(()) };
        let at = self.place.filter(|place| place.flags & VRING_LOG != 0).map(|place| place.log);
        ring.set_log(self.log.clone().zip(at).map(|(log, at)| UsedLog { log, at }))
    }

    /// Continues where an earlier process, or the ring before it was stopped, left off.
    fn begin(&mut self, index: u16, mut ring: Ring, region: Option<&InflightRegion>) -> Result<RingStarted, Broken> {
        let used = ring.used();
        let recorded = region.and_then(|region| InflightRecord::begin(region, index, self.size, used)).transpose();
        let (record, recovered) = match recorded.map_err(Broken::Inflight)? {
            Some((record, recovered)) => (Some(record), recovered),
            None => (None, Recovered::Nothing),
        };
        match recovered {
            // The requests taken are those answered plus those in flight; the base from the front-end is ignored.
            Recovered::InFlight(heads) => {
                let count = u16::try_from(heads.len()).unwrap_or(u16::MAX);
                let offered = ring.unanswered().ok_or(Broken::OutOfBounds)?;
                if count > offered {
                    return Err(Broken::Inflight(RecordError::TooMany { count, offered }));
                }
                let next = used.wrapping_add(count);
                #[cfg(test)]
                let next = if kill_point::is_planted(kill_point::Bug::BaseTrusted) { self.base } else { next };
                ring.continue_at(next);
                self.again = heads.into();
            }
            // Chains answered after the front-end has read the used index count as well.
            Recovered::Nothing if (1..=self.size).contains(&used.wrapping_sub(self.base)) => ring.continue_at(used),
            Recovered::Nothing => {}
        }
        self.ring = Some(ring);
        self.record = record;
        self.slots.clear();
        self.slots.resize(usize::from(self.size), FREE);
        Ok(RingStarted { recorded: self.record.is_some(), again: self.again.len() })
    }

    /// Stops the ring; returns the index at which it must be continued. Unanswered chains will be taken again: recorded
    /// ones count as taken, others are returned to the available ring.
    pub fn stop(&mut self) -> u16 {
        self.base = self.next_base();
        (self.ring, self.lost) = (None, None);
        self.kick = None;
        self.draining = false;
        (self.broken, self.parked) = (false, false);
        self.record = None;
        self.again.clear();
        self.order.clear();
        self.slots.clear();
        self.base
    }

    /// The index at which the ring would be continued if it were stopped now.
    pub fn next_base(&self) -> u16 {
        let Some(at) = self.ring.as_ref().map(Ring::position).or(self.lost) else { return self.base };
        at.next_avail().wrapping_sub(self.unanswered().wrapping_add(if self.record.is_some() {
            0
        } else {
            at.unpublished()
        }))
    }

    /// The number of chains that were taken and whose answers are not written; zero with a record.
    pub fn unanswered(&self) -> u16 {
        if self.record.is_some() { 0 } else { u16::try_from(self.order.len()).unwrap_or(u16::MAX) }
    }

    /// The descriptor on which answers are signalled.
    pub fn call(&self) -> Option<&OwnedFd> {
        self.call.as_ref()
    }

    /// Returns true if the queue is not accessed until the front-end sets it up again.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The ring, if chains may be taken from it.
    fn served(&mut self) -> Option<&mut Ring> {
        let serve = self.enabled && !self.draining && !self.broken && !self.parked;
        self.ring.as_mut().filter(|_| serve)
    }

    /// Takes the next chain; returns its head, and the ring to read it from.
    pub fn pop(&mut self) -> Result<Option<(u16, &Ring)>, Broken> {
        let again = self.next_again();
        let head = match again {
            Some(head) => head,
            None => {
                let Some(ring) = self.served() else { return Ok(None) };
                let Some(head) = ring.pop()? else { return Ok(None) };
                head
            }
        };
        let slot = self.slots.get_mut(usize::from(head)).filter(|slot| slot.stage == ChainState::Free);
        slot.ok_or(Broken::InUse(head))?.stage = ChainState::Taken;
        match &mut self.record {
            Some(record) if again.is_none() => record.take(head).ok_or(Broken::OutOfBounds)?,
            None if again.is_none() => self.order.push_back(head),
            Some(_) | None => {}
        }
        Ok(self.ring.as_ref().map(|ring| (head, ring)))
    }

    /// The next chain that is already in flight.
    fn next_again(&mut self) -> Option<u16> {
        if self.again.is_empty() || self.served().is_none() {
            return None;
        }
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::NewFirst) && !self.served()?.is_empty().ok()? {
            return None;
        }
        self.again.pop_front()
    }

    /// Puts back a popped chain until the table changes.
    pub fn park(&mut self, head: u16) {
        self.parked = true;
        self.again.push_front(head);
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            slot.stage = ChainState::Free;
        }
    }

    /// Records that `open` requests were created for a chain.
    pub fn open(&mut self, head: u16, status_at: GuestAddr, written: u32, open: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            *slot = ChainSlot { status_at, written, open, stage: ChainState::Taken, status: S_OK };
            self.in_flight += 1;
        }
    }

    /// Records that one request of a chain has completed, or was given back (`None`). After the last one the chain is
    /// answered, unless one was given back. Returns `true` if there is something to publish.
    #[inline(always)]
    pub fn close(&mut self, head: u16, status: Option<Status>, table: &MemoryTable) -> Result<bool, Broken> {
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Ok(false) };
        let Some(left) = slot.open.checked_sub(1) else { return Ok(false) };
        slot.open = left;
        #[cfg(test)]
        let status = match status {
            Some(_) if kill_point::is_planted(kill_point::Bug::ErrorLost) => Some(Status::Done),
            None if kill_point::is_planted(kill_point::Bug::GivenBackAnswered) => Some(Status::Done),
            status => status,
        };
        match status {
            #[cfg(test)]
            Some(Status::Done) if kill_point::is_planted(kill_point::Bug::LastStatusWins) => slot.status = S_OK,
            #[cfg(test)]
            Some(status) if status != Status::Done && kill_point::is_planted(kill_point::Bug::LengthOfFailure) => {
                slot.status = status_byte(status);
            }
            Some(Status::Done) => {}
            Some(status) => slot.fail(status),
            None => slot.stage = ChainState::GivenBack,
        }
        if left > 0 {
            return Ok(false);
        }
        self.in_flight -= 1;
        if slot.stage == ChainState::GivenBack {
            return Ok(false);
        }
        slot.stage = ChainState::Done;
        self.finish(head, table)
    }

    /// Answers a chain for which no request was created. Returns `true` if there is something to publish.
    pub fn answer(
        &mut self,
        head: u16,
        status_at: GuestAddr,
        status: u8,
        written: u32,
        table: &MemoryTable,
    ) -> Result<bool, Broken> {
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Ok(false) };
        *slot = ChainSlot { status_at, written, open: 0, stage: ChainState::Done, status };
        self.finish(head, table)
    }

    /// Answers a completed chain if it is next in order and its memory is accessible; otherwise that happens later.
    #[inline(always)]
    fn finish(&mut self, head: u16, table: &MemoryTable) -> Result<bool, Broken> {
        #[cfg(test)]
        if (kill_point::is_planted(kill_point::Bug::AnswerWithoutRing) && self.ring.is_none())
            || (kill_point::is_planted(kill_point::Bug::OutOfOrder) && self.record.is_none())
        {
            self.order.retain(|&other| other != head);
            return self.put_answer(head, table);
        }
        if self.record.is_none() {
            return if self.order.front() == Some(&head) { self.answer_in_order(table) } else { Ok(false) };
        }
        let answered = self.put_answer(head, table)?;
        if !answered {
            self.order.push_back(head);
        }
        Ok(answered)
    }

    /// Answers completed chains, in order, as far as possible. Returns `true` if there is something to publish.
    pub fn answer_in_order(&mut self, table: &MemoryTable) -> Result<bool, Broken> {
        let mut any = false;
        while let Some(&head) = self.order.front() {
            if !self.put_answer(head, table)? {
                break;
            }
            self.order.pop_front();
            any = true;
        }
        Ok(any)
    }

    /// Writes an answer: status first, then the used element. Returns `false` if the chain is not completed, or its
    /// memory is not accessible.
    #[inline(always)]
    fn put_answer(&mut self, head: u16, table: &MemoryTable) -> Result<bool, Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(false) };
        let slot = self.slots.get_mut(usize::from(head)).filter(|slot| slot.stage == ChainState::Done);
        let Some(slot) = slot else { return Ok(false) };
        if kill_point::is_alive() && table.write_byte(slot.status_at, slot.status).is_none() {
            return Ok(false);
        }
        if let Some(log) = &self.log {
            log.mark(slot.status_at, 1)?;
        }
        match &mut self.record {
            Some(record) => record.answer(head).ok_or(Broken::OutOfBounds)?,
            None => slot.stage = ChainState::Free,
        }
        ring.push_used(head, slot.written)?;
        Ok(true)
    }

    /// Makes answers visible to the driver, and signals it if it has requested that.
    pub fn publish(&mut self) -> Result<(), Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(()) };
        #[cfg(test)]
        if let Some(record) =
            self.record.as_ref().filter(|_| kill_point::is_planted(kill_point::Bug::ClearBeforePublish))
        {
            record.clear_early();
        }
        let wanted = ring.publish()?;
        if let Some(record) = &mut self.record {
            let slots = &mut self.slots;
            let free = |head: u16| {
                if let Some(slot) = slots.get_mut(usize::from(head)) {
                    slot.stage = ChainState::Free;
                }
            };
            record.published(ring.used(), free).ok_or(Broken::OutOfBounds)?;
        }
        if wanted {
            signal(self.call.as_ref());
        }
        Ok(())
    }

    /// Requests notifications of new chains.
    pub fn request_kicks(&mut self) -> Result<(), Broken> {
        self.served().map_or(Ok(()), Ring::request_kicks)
    }

    /// Returns true if there is no chain to take.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        let none_again = self.again.is_empty();
        self.served().map_or(Ok(true), |ring| Ok(ring.is_empty()? && none_again))
    }

    /// Stops using the ring, and signals the error. Results of chains in progress are discarded.
    pub fn mark_broken(&mut self) {
        self.broken = true;
        signal(self.err.as_ref());
    }
}
