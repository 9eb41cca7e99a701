//! A ring: requests in, answers out, and who is to be woken when.
//!
//! Knows nothing of what a request asks for. Invariants: an entry is copied once; an index that ran away ends the ring; and
//! the slots between the last answer and the last request hold, at every moment, exactly the requests that have no answer.
//! The last of these is what lets another process take the ring over from one that was killed. Answers take the slots in
//! order, requests end in any: so whatever lies in the slot that an answer takes is moved to the slot of the request that
//! ended.
//!
//! Specification: Xen's public header io/ring.h.

use std::sync::atomic::{Ordering, fence};

use memory::{Shared, Window};

use super::abi::{Entry, HEADER_LEN, Layout};
use super::moment::{Mistake, mistake, step};

const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// What is before the entries.
type Header<'a> = Window<'a, HEADER_LEN, 8>;

// The header has 44 bytes that nobody uses. What an answer is about to overwrite is noted there, for a process that finds us
// killed half way: which answer, to which slot the other request goes, and the answer itself. The note is one as soon as it
// says that it is about the next answer, and until that is counted; index and slot are stored at once. Whoever finds it may
// be of another version: neither where these lie nor what makes them a note can change.
const NOTE_STEP: usize = 20;
const NOTE_INDEX: usize = 24;
const NOTE_SLOT: usize = 28;
const NOTE_ID: usize = 32;
const NOTE_RESULT: usize = 40;

/// Values of the note's step that nothing else would write by chance.
const MOVING: u32 = 0x7461_7001;
const ANSWERING: u32 = 0x7461_7002;

/// What a front end did that cannot be answered; its ring is not served any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More requests announced than the ring has places.
    #[error("{to} requests were announced when {from} were answered, in a ring of {slots}")]
    RanAway {
        /// Requests answered.
        from: u32,
        /// Requests announced.
        to: u32,
        /// Places in the ring.
        slots: u32,
    },
    /// The ring is not where it was.
    #[error("the ring cannot be accessed")]
    Unreachable,
}

/// An answer, as it stands in a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Response {
    /// The request's `id`.
    pub id: u64,
    /// The request's operation.
    pub operation: u8,
    /// `BLKIF_RSP_*`.
    pub status: i16,
}

impl Response {
    /// What stands in a ring behind `id`. What is not part of an answer is zero: nothing of ours goes to the guest.
    fn result(self) -> u64 {
        let [low, high] = self.status.to_le_bytes();
        u64::from_le_bytes([self.operation, 0, low, high, 0, 0, 0, 0])
    }
}

/// One ring that is being served.
pub struct Ring {
    shared: Shared,
    layout: &'static Layout,
    slots: u32,
    /// The next request to take.
    next: u32,
    /// Requests announced, as last read.
    seen: u32,
    /// Answers given.
    answered: u32,
    /// The step of the note, as last stored; zero before that.
    step: u32,
    /// Answers given when the front end was last signalled, or found not to want it.
    told: u32,
    /// Nothing was signalled yet: the front end may be waiting for what another process answered.
    fresh: bool,
    /// Requests that are announced from now on are not looked at.
    closed: bool,
    /// The number of the request in each slot.
    seats: Vec<u16>,
    /// The slot of each request, by number.
    places: Vec<u16>,
    /// The entry that was copied last.
    entry: Entry,
}

impl Ring {
    /// The ring in these pages, from the first request on that has no answer.
    pub fn attach(shared: Shared, layout: &'static Layout) -> Result<Ring, Broken> {
        let slots = layout.slots(shared.len());
        let count = usize::try_from(slots).unwrap_or(0);
        let (seats, places) = (vec![0; count], vec![0; count]);
        let answered = shared.load_u32(RSP_PROD).ok_or(Broken::Unreachable)?;
        let (next, seen, told) = (answered, answered, answered);
        let (fresh, closed, entry) = (!mistake(Mistake::NotToldAfterwards), false, Entry::default());
        let mut ring =
            Ring { shared, layout, slots, next, seen, answered, step: 0, told, fresh, closed, seats, places, entry };
        if !mistake(Mistake::NoteNotRead) {
            ring.finish_noted()?;
        }
        // Whatever stands there now, it is not about the next answer.
        note_about(ring.header()?, ring.answered.wrapping_sub(1), 0)?;
        ring.look()?;
        Ok(ring)
    }

    /// Requests that fit.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The next request; it has the number `number` until it is answered. There are never more than `slots` of them.
    #[inline]
    pub fn take(&mut self, number: u16) -> Result<Option<&Entry>, Broken> {
        if self.is_empty()? {
            return Ok(None);
        }
        let slot = self.slot(self.next);
        self.layout.read(&self.shared, slot, &mut self.entry).ok_or(Broken::Unreachable)?;
        self.seat(slot, number);
        self.next = self.next.wrapping_add(1);
        Ok(Some(&self.entry))
    }

    /// Whether there may be something to take, at the price of one load.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.next != self.seen || (!self.closed && self.produced() != Ok(self.seen))
    }

    #[inline]
    fn produced(&self) -> Result<u32, Broken> {
        self.header()?.load_u32(REQ_PROD).ok_or(Broken::Unreachable)
    }

    /// Reads how many requests were announced. Loading it orders everything that was written before.
    #[inline]
    fn look(&mut self) -> Result<bool, Broken> {
        let to = self.produced()?;
        let unanswered = to.wrapping_sub(self.answered);
        if unanswered > self.slots || unanswered < self.next.wrapping_sub(self.answered) {
            return Err(Broken::RanAway { from: self.answered, to, slots: self.slots });
        }
        self.seen = to;
        Ok(to != self.next)
    }

    /// Gives the answer to request `number`. It can be seen from now on; `must_signal` says whether it is to be told of.
    #[inline]
    pub fn answer(&mut self, number: u16, response: Response) -> Result<(), Broken> {
        let ours = self.slot(self.answered);
        let freed = self.places.get(usize::from(number)).copied().map_or(ours, u32::from);
        self.note(freed, response, if freed == ours { ANSWERING } else { MOVING })?;
        if mistake(Mistake::NoteClearedEarly) {
            note_about(self.header()?, self.answered.wrapping_sub(1), 0)?;
        }
        if freed != ours && mistake(Mistake::SlotBeforeMove) {
            self.layout.respond(&self.shared, ours, response.id, response.result()).ok_or(Broken::Unreachable)?;
        }
        if freed != ours {
            let other = self.seats.get(usize::try_from(ours).unwrap_or(0)).copied().unwrap_or(0);
            self.relocate(ours, freed)?;
            self.seat(freed, other);
        }
        self.put(ours, response)
    }

    /// Whether the next answer takes the slot of request `number`, so that nothing is moved if it is the answer to that.
    pub fn is_next(&self, number: u16) -> bool {
        self.places.get(usize::from(number)).is_some_and(|&place| u32::from(place) == self.slot(self.answered))
    }

    /// Notes what is going to be overwritten: last what the note is about, which makes it one. The one before is about the
    /// answer before.
    #[inline]
    fn note(&mut self, freed: u32, response: Response, noted: u32) -> Result<(), Broken> {
        self.note_step(noted)?;
        let header = self.header()?;
        step();
        header.store_u64(NOTE_ID, response.id).ok_or(Broken::Unreachable)?;
        step();
        header.store_u64(NOTE_RESULT, response.result()).ok_or(Broken::Unreachable)?;
        note_about(header, self.answered, freed)
    }

    #[inline]
    fn note_step(&mut self, noted: u32) -> Result<(), Broken> {
        if self.step != noted {
            step();
            self.header()?.store_u32(NOTE_STEP, noted).ok_or(Broken::Unreachable)?;
            self.step = noted;
        }
        Ok(())
    }

    #[inline]
    fn header(&self) -> Result<Header<'_>, Broken> {
        self.shared.window(0).ok_or(Broken::Unreachable)
    }

    /// Ends what a process that is gone has begun, if it was about the answer that comes next.
    fn finish_noted(&mut self) -> Result<(), Broken> {
        let header = self.header()?;
        let word = |at| header.load_u32(at).ok_or(Broken::Unreachable);
        let (step, index, freed) = (word(NOTE_STEP)?, word(NOTE_INDEX)?, word(NOTE_SLOT)?);
        if !(step == MOVING || step == ANSWERING) || index != self.answered || freed >= self.slots {
            return Ok(());
        }
        let id = u64::from(word(NOTE_ID)?) | u64::from(word(NOTE_ID + 4)?).wrapping_shl(32);
        let [operation, _, low, high] = word(NOTE_RESULT)?.to_le_bytes();
        let ours = self.slot(self.answered);
        if step == MOVING {
            self.relocate(ours, freed)?;
        }
        self.put(ours, Response { id, operation, status: i16::from_le_bytes([low, high]) })?;
        (self.next, self.seen) = (self.answered, self.answered);
        Ok(())
    }

    /// Moves a request to a slot whose own has ended.
    fn relocate(&mut self, from: u32, to: u32) -> Result<(), Broken> {
        self.layout.read(&self.shared, from, &mut self.entry).ok_or(Broken::Unreachable)?;
        self.layout.write(&self.shared, to, &self.entry).ok_or(Broken::Unreachable)?;
        self.note_step(ANSWERING)
    }

    /// Writes an answer and counts it.
    #[inline]
    fn put(&mut self, slot: u32, response: Response) -> Result<(), Broken> {
        let Response { id, .. } = response;
        self.layout.respond(&self.shared, slot, id, response.result()).ok_or(Broken::Unreachable)?;
        self.answered = self.answered.wrapping_add(1);
        step();
        self.header()?.store_u32(RSP_PROD, self.answered).ok_or(Broken::Unreachable)
    }

    /// Whether the front end wants to be signalled of the answers since this was last asked.
    pub fn must_signal(&mut self) -> Result<bool, Broken> {
        let (old, new) = (self.told, self.answered);
        if old == new && !self.fresh {
            return Ok(false);
        }
        self.told = new;
        // io/ring.h, RING_PUSH_RESPONSES_AND_CHECK_NOTIFY: the count must be visible before we look, or both sides
        // miss each other.
        fence(Ordering::SeqCst);
        let event = self.header()?.load_u32(RSP_EVENT).ok_or(Broken::Unreachable)?;
        Ok(std::mem::take(&mut self.fresh) || crosses(event, old, new))
    }

    /// Asks the front end to signal its next request. To be followed by a full barrier and `is_empty`. Otherwise the event
    /// is left behind, and the front end does not signal while we are busy anyway.
    pub fn ask_for_signal(&mut self) -> Result<(), Broken> {
        step();
        self.header()?.store_u32(REQ_EVENT, self.next.wrapping_add(1)).ok_or(Broken::Unreachable)
    }

    /// Whether there is nothing to take.
    #[inline]
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        Ok(self.next == self.seen && (self.closed || !self.look()?))
    }

    /// Takes in what has been announced, for the last time.
    pub fn close(&mut self) -> Result<(), Broken> {
        self.look()?;
        self.closed = true;
        Ok(())
    }

    fn slot(&self, index: u32) -> u32 {
        // A power of two, or nothing is ever in it.
        index & self.slots.wrapping_sub(1)
    }

    fn seat(&mut self, slot: u32, number: u16) {
        let place = u16::try_from(slot).unwrap_or(0);
        if let Some(seat) = self.seats.get_mut(usize::from(place)) {
            *seat = number;
        }
        if let Some(at) = self.places.get_mut(usize::from(number)) {
            *at = place;
        }
    }
}

/// Has the note be about the answer `index` and the slot that its request has freed, from one store to the next.
#[inline]
fn note_about(header: Header<'_>, index: u32, freed: u32) -> Result<(), Broken> {
    const _: () = assert!(NOTE_SLOT == NOTE_INDEX + 4);
    step();
    header.store_u64(NOTE_INDEX, u64::from(index) | u64::from(freed) << 32).ok_or(Broken::Unreachable)
}

/// Whether a count that went from `old` to `new` has passed `event` (io/ring.h).
fn crosses(event: u32, old: u32, new: u32) -> bool {
    new.wrapping_sub(event) < new.wrapping_sub(old)
}

#[cfg(test)]
mod test;
