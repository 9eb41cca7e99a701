//! A ring of requests and responses, and the notifications of both sides.
//!
//! It knows nothing about the meaning of a request. Invariants: an entry is copied once; an invalid index ends the
//! ring; and the slots between the last response and the last request contain, at every moment, exactly the unanswered
//! requests. The latter lets another process take over the ring of a killed one. Responses take the slots in order, but
//! requests complete in any order: so a request in the slot that a response takes is moved to the slot of the completed
//! request.
//!
//! Specification: Xen's public header io/ring.h.

use std::sync::atomic::{Ordering, fence};

use memory::{Shared, Window};

use super::abi::{Entry, EntryLayout, HEADER_LEN};
use super::kill_point::{InjectedBug, injected, kill_point};

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// The header before the entries.
type Header<'a> = Window<'a, HEADER_LEN, 8>;

// 44 bytes of the header are unused. An intent record is kept there for each response, for a process that takes over if
// this one is killed while it writes the response: the index of the response, the slot to which a request is moved, and
// the response itself. The record is valid as soon as its index is that of the next response, until that response is
// counted; index and slot are written by one store. The process that finds it may be of another version: neither these
// offsets nor the condition for validity can change.
const INTENT_PHASE: usize = 20;
const INTENT_INDEX: usize = 24;
const INTENT_SLOT: usize = 28;
const INTENT_ID: usize = 32;
const INTENT_RESULT: usize = 40;

/// The phases, with values that are unlikely to be written there by chance.
const PHASE_MOVING: u32 = 0x7461_7001;
const PHASE_RESPONDING: u32 = 0x7461_7002;

/// A protocol violation by the front end; its ring is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More requests announced than the ring has slots.
    #[error("the request index is {to} with {from} requests answered, in a ring of {slots}")]
    IndexOutOfRange {
        /// The number of requests answered.
        from: u32,
        /// The number of requests announced.
        to: u32,
        /// Slots in the ring.
        slots: u32,
    },
    /// The ring's memory is too small.
    #[error("the ring cannot be accessed")]
    OutOfBounds,
}

/// A response, as it is stored in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request's `id`.
    pub id: u64,
    /// The request's operation.
    pub operation: u8,
    /// The status: `BLKIF_RSP_*`.
    pub status: i16,
}

impl Response {
    /// The bytes stored after `id`. Unused ones are zero, so that none of our memory leaks to the guest.
    fn result(self) -> u64 {
        let [low, high] = self.status.to_le_bytes();
        u64::from_le_bytes([self.operation, 0, low, high, 0, 0, 0, 0])
    }
}

/// One ring that is being served.
pub struct Ring {
    shared: Shared,
    layout: &'static EntryLayout,
    slots: u16,
    /// The index of the next request to take.
    next: u32,
    /// The number of requests announced, as last read.
    seen: u32,
    /// The number of responses written.
    answered: u32,
    /// The phase in the intent record, as last stored; zero before that.
    phase: u32,
    /// The number of responses at the last call of [`Ring::must_notify`].
    notified_at: u32,
    /// No notification was sent yet: the front end may be waiting for one of an earlier process's responses.
    first_notification: bool,
    /// Requests announced from now on are ignored.
    closed: bool,
    /// The number of the request in each slot.
    request_by_slot: Vec<u16>,
    /// The slot of each request, by number.
    slot_by_request: Vec<u16>,
    /// The entry that was copied last.
    entry: Entry,
}

impl Ring {
    /// Attaches to the ring in these pages, starting at the first unanswered request.
    pub fn attach(shared: Shared, layout: &'static EntryLayout) -> Result<Ring, Broken> {
        let slots = layout.slots(shared.len());
        let (request_by_slot, slot_by_request) = (vec![0; slots.into()], vec![0; slots.into()]);
        let answered = shared.load_u32(RSP_PROD).ok_or(Broken::OutOfBounds)?;
        let (next, seen, notified_at) = (answered, answered, answered);
        let (first_notification, closed, entry) =
            (!injected(InjectedBug::NoInitialNotification), false, Entry::default());
        let mut ring = Ring {
            shared,
            layout,
            slots,
            next,
            seen,
            answered,
            phase: 0,
            notified_at,
            first_notification,
            closed,
            request_by_slot,
            slot_by_request,
            entry,
        };
        if !injected(InjectedBug::IntentNotCompleted) {
            ring.complete_intent()?;
        }
        // Makes the record invalid in any case: its index must not be that of the next response.
        set_intent_target(ring.header()?, ring.answered.wrapping_sub(1), 0)?;
        ring.read_producer()?;
        Ok(ring)
    }

    /// The number of slots.
    pub fn slots(&self) -> u16 {
        self.slots
    }

    /// Takes the next request, which has the number `number` until it is answered. There are never more unanswered
    /// requests than slots.
    #[inline]
    pub fn take(&mut self, number: u16) -> Result<Option<&Entry>, Broken> {
        if self.is_empty()? {
            return Ok(None);
        }
        let slot = self.slot(self.next);
        self.layout.read(&self.shared, slot, &mut self.entry).ok_or(Broken::OutOfBounds)?;
        self.assign_slot(slot, number);
        self.next = self.next.wrapping_add(1);
        Ok(Some(&self.entry))
    }

    /// Returns true if there may be requests, at the cost of one load.
    #[inline]
    pub fn has_requests(&self) -> bool {
        self.next != self.seen || (!self.closed && self.produced() != Ok(self.seen))
    }

    #[inline]
    fn produced(&self) -> Result<u32, Broken> {
        self.header()?.load_u32(REQ_PROD).ok_or(Broken::OutOfBounds)
    }

    /// Reads the number of announced requests; returns true if there are new ones. The load is ordered before reads of
    /// data that the front end has written before it.
    #[inline]
    fn read_producer(&mut self) -> Result<bool, Broken> {
        let to = self.produced()?;
        let unanswered = to.wrapping_sub(self.answered);
        let slots = u32::from(self.slots);
        if unanswered > slots || unanswered < self.next.wrapping_sub(self.answered) {
            return Err(Broken::IndexOutOfRange { from: self.answered, to, slots });
        }
        self.seen = to;
        Ok(to != self.next)
    }

    /// Writes the response to request `number`, which is visible immediately. [`Ring::must_notify`] returns whether a
    /// notification is needed.
    #[inline]
    pub fn respond(&mut self, number: u16, response: Response) -> Result<(), Broken> {
        let ours = self.slot(self.answered);
        let freed = self.slot_by_request.get(usize::from(number)).copied().unwrap_or(ours);
        self.record_intent(freed, response, if freed == ours { PHASE_RESPONDING } else { PHASE_MOVING })?;
        if injected(InjectedBug::IntentClearedEarly) {
            set_intent_target(self.header()?, self.answered.wrapping_sub(1), 0)?;
        }
        if freed != ours && injected(InjectedBug::ResponseBeforeMove) {
            self.layout.respond(&self.shared, ours, response.id, response.result()).ok_or(Broken::OutOfBounds)?;
        }
        if freed != ours {
            let other = self.request_by_slot.get(usize::from(ours)).copied().unwrap_or(0);
            self.relocate(ours, freed)?;
            self.assign_slot(freed, other);
        }
        self.write_response(ours, response)
    }

    /// Returns true if the next response takes the slot of request `number`, so that answering that one moves nothing.
    pub fn is_next(&self, number: u16) -> bool {
        self.slot_by_request.get(usize::from(number)).is_some_and(|&slot| slot == self.slot(self.answered))
    }

    /// Writes the intent record. The response index is stored last, which makes the record valid; until then it has the
    /// index of the previous response.
    #[inline]
    fn record_intent(&mut self, freed: u16, response: Response, phase: u32) -> Result<(), Broken> {
        self.store_phase(phase)?;
        let header = self.header()?;
        kill_point();
        header.store_u64(INTENT_ID, response.id).ok_or(Broken::OutOfBounds)?;
        kill_point();
        header.store_u64(INTENT_RESULT, response.result()).ok_or(Broken::OutOfBounds)?;
        set_intent_target(header, self.answered, freed)
    }

    #[inline]
    fn store_phase(&mut self, phase: u32) -> Result<(), Broken> {
        if self.phase != phase {
            kill_point();
            self.header()?.store_u32(INTENT_PHASE, phase).ok_or(Broken::OutOfBounds)?;
            self.phase = phase;
        }
        Ok(())
    }

    #[inline]
    fn header(&self) -> Result<Header<'_>, Broken> {
        self.shared.window(0).ok_or(Broken::OutOfBounds)
    }

    /// Completes the response in the intent record of an earlier process, if the record is valid.
    fn complete_intent(&mut self) -> Result<(), Broken> {
        let header = self.header()?;
        let word = |at| header.load_u32(at).ok_or(Broken::OutOfBounds);
        let (phase, index, freed) = (word(INTENT_PHASE)?, word(INTENT_INDEX)?, word(INTENT_SLOT)?);
        if !(phase == PHASE_MOVING || phase == PHASE_RESPONDING) || index != self.answered {
            return Ok(());
        }
        let Some(freed) = u16::try_from(freed).ok().filter(|&freed| freed < self.slots) else { return Ok(()) };
        let id = u64::from(word(INTENT_ID)?) | u64::from(word(INTENT_ID + 4)?).wrapping_shl(32);
        let [operation, _, low, high] = word(INTENT_RESULT)?.to_le_bytes();
        let ours = self.slot(self.answered);
        if phase == PHASE_MOVING {
            self.relocate(ours, freed)?;
        }
        self.write_response(ours, Response { id, operation, status: i16::from_le_bytes([low, high]) })?;
        (self.next, self.seen) = (self.answered, self.answered);
        Ok(())
    }

    /// Moves a request to the slot of a completed one.
    fn relocate(&mut self, from: u16, to: u16) -> Result<(), Broken> {
        self.layout.read(&self.shared, from, &mut self.entry).ok_or(Broken::OutOfBounds)?;
        self.layout.write(&self.shared, to, &self.entry).ok_or(Broken::OutOfBounds)?;
        self.store_phase(PHASE_RESPONDING)
    }

    /// Writes a response and counts it.
    #[inline]
    fn write_response(&mut self, slot: u16, response: Response) -> Result<(), Broken> {
        let Response { id, .. } = response;
        self.layout.respond(&self.shared, slot, id, response.result()).ok_or(Broken::OutOfBounds)?;
        self.answered = self.answered.wrapping_add(1);
        kill_point();
        self.header()?.store_u32(RSP_PROD, self.answered).ok_or(Broken::OutOfBounds)
    }

    /// Returns true if the front end must be notified of the responses since the last call.
    pub fn must_notify(&mut self) -> Result<bool, Broken> {
        let (old, new) = (self.notified_at, self.answered);
        if old == new && !self.first_notification {
            return Ok(false);
        }
        self.notified_at = new;
        // io/ring.h, RING_PUSH_RESPONSES_AND_CHECK_NOTIFY: the count must be visible before this check, or a response
        // could be missed by both sides.
        fence(Ordering::SeqCst);
        let event = self.header()?.load_u32(RSP_EVENT).ok_or(Broken::OutOfBounds)?;
        Ok(std::mem::take(&mut self.first_notification) || has_crossed(event, old, new))
    }

    /// Requests a notification of the next request. A full barrier and [`Ring::is_empty`] must follow. Until this is
    /// called again the front end sends no further notifications, which are not needed while we are busy.
    pub fn request_notification(&mut self) -> Result<(), Broken> {
        kill_point();
        self.header()?.store_u32(REQ_EVENT, self.next.wrapping_add(1)).ok_or(Broken::OutOfBounds)
    }

    /// Returns true if there is no request to take.
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        Ok(self.next == self.seen && (self.closed || !self.read_producer()?))
    }

    /// Reads the number of announced requests for the last time: later ones are ignored.
    pub fn close(&mut self) -> Result<(), Broken> {
        self.read_producer()?;
        self.closed = true;
        Ok(())
    }

    fn slot(&self, index: u32) -> u16 {
        let [low, high, ..] = index.to_le_bytes();
        // The number of slots is a power of two, or zero and the ring is always empty.
        u16::from_le_bytes([low, high]) & self.slots.wrapping_sub(1)
    }

    fn assign_slot(&mut self, slot: u16, number: u16) {
        if let Some(assigned) = self.request_by_slot.get_mut(usize::from(slot)) {
            *assigned = number;
        }
        if let Some(assigned) = self.slot_by_request.get_mut(usize::from(number)) {
            *assigned = slot;
        }
    }
}

/// Sets the response index and the freed slot of the intent record, with a single store.
#[inline]
fn set_intent_target(header: Header<'_>, index: u32, freed: u16) -> Result<(), Broken> {
    const _: () = assert!(INTENT_SLOT == INTENT_INDEX + 4);
    kill_point();
    header.store_u64(INTENT_INDEX, u64::from(index) | u64::from(freed) << 32).ok_or(Broken::OutOfBounds)
}

/// Returns true if a count has passed `event` on its way from `old` to `new` (io/ring.h).
fn has_crossed(event: u32, old: u32, new: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

#[cfg(test)]
mod test;
