//! One queue: what the front-end has set up for it, the ring once it runs, and the chains being worked on.
//!
//! Knows nothing about what a chain asks for. Invariants: a chain is answered once, after the last of the requests that
//! were made of it; what is not answered when the ring stops is offered again when it starts: by the record of what is
//! in flight if the front-end keeps one, else by the used index alone, since answers are then given in the order of the
//! available ring. A broken queue is not touched again before it is set up anew.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use disk::Status;
use memory::GuestAddr;

use super::inflight::{Damaged, InflightRegion, Left, Record};
use super::message::VringAddr;
use super::moment;
use super::request::{S_OK, status_byte};
use super::ring::{Broken, Position, Ring};
use super::table::Table;

/// One queue.
#[derive(Default)]
pub struct Queue {
    /// Places in the ring; zero until told.
    pub size: u16,
    /// The index to start at.
    pub base: u16,
    /// Where the ring lies.
    pub place: Option<VringAddr>,
    /// May be served (when the front-end negotiates that at all).
    pub enabled: bool,
    /// Started: signalled by the driver on new requests.
    pub kick: Option<OwnedFd>,
    /// To be signalled on answers.
    call: Option<OwnedFd>,
    /// To be signalled when the queue breaks.
    pub err: Option<OwnedFd>,
    /// No chains are taken until the front-end starts it again.
    pub draining: bool,
    ring: Option<Ring>,
    /// How far the ring was when its memory went away.
    lost: Option<Position>,
    broken: bool,
    /// The next chain lies in memory that was taken away: no more are taken before the table changes.
    parked: bool,
    /// By head of the chain; as many as the ring has places, so that no head is outside.
    slots: Vec<Slot>,
    /// Chains of which requests are under way.
    in_flight: u16,
    /// What the front-end keeps of chains in flight.
    record: Option<Record>,
    /// Chains to be taken first: in flight of a process before this one, or parked.
    again: VecDeque<u16>,
    /// Without a record: chains taken and not answered, in the order of the available ring. With one: chains that are
    /// done and wait for memory to be answered in.
    order: VecDeque<u16>,
}

/// What there is to start a ring with.
#[derive(Clone, Copy)]
pub struct Ground<'a> {
    /// Guest memory.
    pub table: &'a Table,
    /// Notifications and interrupts by index are negotiated.
    pub event_idx: bool,
    /// The front-end's record of what is in flight.
    pub region: Option<&'a InflightRegion>,
}

/// How a ring has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The front-end records what is in flight.
    pub recorded: bool,
    /// Chains that are taken again.
    pub again: usize,
}

/// A chain that was taken.
#[derive(Clone, Copy)]
struct Slot {
    status_at: GuestAddr,
    /// Bytes that the driver is told were written, status included: when all is well, and then the truth.
    written: u32,
    /// Requests made of the chain that have no answer yet.
    open: u16,
    stage: Stage,
    /// What the driver is told: all is well, or what was not.
    status: u8,
}

/// How far a chain is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The driver's.
    Free,
    /// Being worked on.
    Taken,
    /// One of its requests was given back: it stays unanswered.
    GivenBack,
    /// Done, and its answer not written yet, or not published.
    Done,
}

impl Slot {
    /// Of a failed read nothing is promised but the status byte.
    #[cold]
    fn fail(&mut self, status: Status) {
        (self.status, self.written) = (status_byte(status), 1);
    }
}

const FREE: Slot = Slot { status_at: GuestAddr(0), written: 0, open: 0, stage: Stage::Free, status: S_OK };

impl Queue {
    /// Whether the front-end has started it.
    pub fn is_started(&self) -> bool {
        self.kick.is_some()
    }

    /// Whether no request is under way.
    pub fn is_idle(&self) -> bool {
        self.in_flight == 0
    }

    /// Whether its answers are recorded by the front-end; `None` while it does not run.
    pub fn is_recorded(&self) -> Option<bool> {
        (self.ring.is_some() || self.lost.is_some()).then_some(self.record.is_some())
    }

    /// Has answers signalled at `call` from now on. One of before may have been lost with its process, or its channel.
    pub fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
        #[cfg(test)]
        if moment::is_planted(moment::Bug::SignalLost) {
            return;
        }
        signal(self.call.as_ref());
    }

    /// Brings the ring up, or to its new place, once everything for it is known; without one if it does not lie in
    /// the table, until the next table. What is done in the meantime is answered then.
    pub fn start(&mut self, index: u16, ground: Ground<'_>) -> Result<Option<Begun>, Broken> {
        let Some(place) = self.place.filter(|_| self.is_started() && self.size > 0 && !self.broken) else {
            return Ok(None);
        };
        let Ground { table, event_idx, .. } = ground;
        self.parked = false;
        match (&mut self.ring, self.lost) {
            (Some(ring), _) => {
                if ring.move_to(table, &place).is_none() {
                    self.lost = Some(ring.position());
                    self.ring = None;
                }
                Ok(None)
            }
            (None, Some(at)) => {
                self.ring = Ring::resume(table, &place, self.size, at, event_idx);
                self.lost = self.ring.is_none().then_some(at);
                Ok(None)
            }
            (None, None) => match Ring::new(table, &place, self.size, self.base, event_idx) {
                Some(ring) => self.begin(index, ring, ground.region).map(Some),
                None => Ok(None),
            },
        }
    }

    /// Goes on where a process before this one, or the ring before it was stopped, has left it.
    fn begin(&mut self, index: u16, mut ring: Ring, region: Option<&InflightRegion>) -> Result<Begun, Broken> {
        let used = ring.used();
        let recorded = region.and_then(|region| Record::begin(region, index, self.size, used)).transpose();
        let (record, left) = match recorded.map_err(Broken::Inflight)? {
            Some((record, left)) => (Some(record), left),
            None => (None, Left::Nothing),
        };
        match left {
            // What was taken is what was answered and what is in flight, whatever the front-end believes.
            Left::InFlight(heads) => {
                let count = u16::try_from(heads.len()).unwrap_or(u16::MAX);
                let offered = ring.unanswered().ok_or(Broken::Unreachable)?;
                if count > offered {
                    return Err(Broken::Inflight(Damaged::TooMany { count, offered }));
                }
                let next = used.wrapping_add(count);
                #[cfg(test)]
                let next = if moment::is_planted(moment::Bug::BaseBelieved) { self.base } else { next };
                ring.go_on_at(next);
                self.again = heads.into();
            }
            // Answers that were given after the front-end has looked at the used index are given.
            Left::Nothing if (1..=self.size).contains(&used.wrapping_sub(self.base)) => ring.go_on_at(used),
            Left::Nothing => {}
        }
        self.ring = Some(ring);
        self.record = record;
        self.slots.clear();
        self.slots.resize(usize::from(self.size), FREE);
        Ok(Begun { recorded: self.record.is_some(), again: self.again.len() })
    }

    /// Takes the ring down; the answer is the index at which it is to be continued. Chains that were not answered will
    /// be taken again: recorded ones count as taken, others are given back to the available ring.
    pub fn stop(&mut self) -> u16 {
        self.base = self.goes_on_at();
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

    /// The index at which the ring is to be continued, were it stopped now.
    pub fn goes_on_at(&self) -> u16 {
        let Some(at) = self.ring.as_ref().map(Ring::position).or(self.lost) else { return self.base };
        at.next_avail().wrapping_sub(self.unanswered().wrapping_add(if self.record.is_some() {
            0
        } else {
            at.unpublished()
        }))
    }

    /// Without a record: chains that were taken and whose answers are not written.
    pub fn unanswered(&self) -> u16 {
        if self.record.is_some() { 0 } else { u16::try_from(self.order.len()).unwrap_or(u16::MAX) }
    }

    /// Where answers are signalled.
    pub fn call(&self) -> Option<&OwnedFd> {
        self.call.as_ref()
    }

    /// Whether it is not touched any more until it is set up anew.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// The ring, if chains may be taken from it.
    fn served(&mut self) -> Option<&mut Ring> {
        let serve = self.enabled && !self.draining && !self.broken && !self.parked;
        self.ring.as_mut().filter(|_| serve)
    }

    /// The next chain: its head, and the ring to read it from.
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
        let slot = self.slots.get_mut(usize::from(head)).filter(|slot| slot.stage == Stage::Free);
        slot.ok_or(Broken::InUse(head))?.stage = Stage::Taken;
        match &mut self.record {
            Some(record) if again.is_none() => record.take(head).ok_or(Broken::Unreachable)?,
            None if again.is_none() => self.order.push_back(head),
            Some(_) | None => {}
        }
        Ok(self.ring.as_ref().map(|ring| (head, ring)))
    }

    /// The next chain that is in flight already.
    fn next_again(&mut self) -> Option<u16> {
        if self.again.is_empty() || self.served().is_none() {
            return None;
        }
        #[cfg(test)]
        if moment::is_planted(moment::Bug::NewFirst) && !self.served()?.is_empty().ok()? {
            return None;
        }
        self.again.pop_front()
    }

    /// Puts a chain back that was popped, until the table changes.
    pub fn park(&mut self, head: u16) {
        self.parked = true;
        self.again.push_front(head);
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            slot.stage = Stage::Free;
        }
    }

    /// Notes that `open` requests were made of a chain.
    pub fn open(&mut self, head: u16, status_at: GuestAddr, written: u32, open: u16) {
        if let Some(slot) = self.slots.get_mut(usize::from(head)) {
            *slot = Slot { status_at, written, open, stage: Stage::Taken, status: S_OK };
            self.in_flight = self.in_flight.saturating_add(1);
        }
    }

    /// One request of a chain has its answer, or was given back without one; with the last of them the chain is
    /// answered, or never will be. `true`: there is something to publish.
    #[inline(always)]
    pub fn close(&mut self, head: u16, status: Option<Status>, table: &Table) -> Result<bool, Broken> {
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Ok(false) };
        let Some(left) = slot.open.checked_sub(1) else { return Ok(false) };
        slot.open = left;
        #[cfg(test)]
        let status = match status {
            Some(_) if moment::is_planted(moment::Bug::ErrorLost) => Some(Status::Done),
            None if moment::is_planted(moment::Bug::GivenBackAnswered) => Some(Status::Done),
            status => status,
        };
        match status {
            #[cfg(test)]
            Some(Status::Done) if moment::is_planted(moment::Bug::LastSaysAll) => slot.status = S_OK,
            #[cfg(test)]
            Some(status) if status != Status::Done && moment::is_planted(moment::Bug::LengthOfFailure) => {
                slot.status = status_byte(status);
            }
            Some(Status::Done) => {}
            Some(status) => slot.fail(status),
            None => slot.stage = Stage::GivenBack,
        }
        if left > 0 {
            return Ok(false);
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        if slot.stage == Stage::GivenBack {
            return Ok(false);
        }
        slot.stage = Stage::Done;
        self.finish(head, table)
    }

    /// Answers a chain of which no request was made. `true`: there is something to publish.
    pub fn answer(
        &mut self,
        head: u16,
        status_at: GuestAddr,
        status: u8,
        written: u32,
        table: &Table,
    ) -> Result<bool, Broken> {
        let Some(slot) = self.slots.get_mut(usize::from(head)) else { return Ok(false) };
        *slot = Slot { status_at, written, open: 0, stage: Stage::Done, status };
        self.finish(head, table)
    }

    /// Answers a chain that is done, if its turn has come and its memory is there; else that comes later.
    #[inline(always)]
    fn finish(&mut self, head: u16, table: &Table) -> Result<bool, Broken> {
        #[cfg(test)]
        if (moment::is_planted(moment::Bug::AnswerWithoutRing) && self.ring.is_none())
            || (moment::is_planted(moment::Bug::OutOfOrder) && self.record.is_none())
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

    /// Answers what is done, in order, as far as it can be. `true`: there is something to publish.
    pub fn answer_in_order(&mut self, table: &Table) -> Result<bool, Broken> {
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

    /// Writes an answer: status first, then the used element. `false`: it is not done, or the memory for it is not
    /// there.
    #[inline(always)]
    fn put_answer(&mut self, head: u16, table: &Table) -> Result<bool, Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(false) };
        let slot = self.slots.get_mut(usize::from(head)).filter(|slot| slot.stage == Stage::Done);
        let Some(slot) = slot else { return Ok(false) };
        if moment::lives() && table.write_byte(slot.status_at, slot.status).is_none() {
            return Ok(false);
        }
        match &mut self.record {
            Some(record) => record.answer(head).ok_or(Broken::Unreachable)?,
            None => slot.stage = Stage::Free,
        }
        ring.push_used(head, slot.written)?;
        Ok(true)
    }

    /// Shows the driver its answers and signals it if it wants that.
    pub fn publish(&mut self) -> Result<(), Broken> {
        let Some(ring) = self.ring.as_mut().filter(|_| !self.broken) else { return Ok(()) };
        #[cfg(test)]
        if let Some(record) = self.record.as_ref().filter(|_| moment::is_planted(moment::Bug::ClearBeforePublish)) {
            record.clear_early();
        }
        let wanted = ring.publish()?;
        if let Some(record) = &mut self.record {
            let slots = &mut self.slots;
            let free = |head: u16| {
                if let Some(slot) = slots.get_mut(usize::from(head)) {
                    slot.stage = Stage::Free;
                }
            };
            record.published(ring.used(), free).ok_or(Broken::Unreachable)?;
        }
        if wanted {
            signal(self.call.as_ref());
        }
        Ok(())
    }

    /// Asks to be notified of new chains.
    pub fn ask_for_kicks(&mut self) -> Result<(), Broken> {
        self.served().map_or(Ok(()), Ring::ask_for_kicks)
    }

    /// Whether there is no chain to take.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        let none_again = self.again.is_empty();
        self.served().map_or(Ok(true), |ring| Ok(ring.is_empty()? && none_again))
    }

    /// Gives the ring up, and says so. Chains being worked on are finished into nothing.
    pub fn break_off(&mut self) {
        self.broken = true;
        signal(self.err.as_ref());
    }
}

/// Signals an eventfd. It does not block (see `session::signal_fd`), and one that is full is signalled already.
fn signal(fd: Option<&OwnedFd>) {
    if let Some(fd) = fd.filter(|_| moment::lives()) {
        // Nothing can be lost: a front-end that closed the other end does not listen.
        rustix::io::write(fd, &1u64.to_ne_bytes()).ok();
    }
}
