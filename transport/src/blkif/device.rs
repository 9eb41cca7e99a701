//! The queues of one front end: entries of their rings become requests of the disk, and answers go back.
//!
//! Knows nothing of the store. Invariants: an entry that is taken is answered once; a pass takes a bounded number of
//! them, and makes a bounded number of calls into the kernel for all; requests of an earlier front end are recognised.

use std::sync::atomic::{Ordering, fence};

use disk::{Geometry, Operation, Request, Span, Status, Token};
use memory::Segments;
use xen::{EventChannels, Grants, PAGE, Port};

use super::data::{Data, Moved};
use super::event::{Event, Log};
use super::moment::{Mistake, mistake};
use super::queue::{Queue, Record};
use super::request::{self, Ask, Descriptors, ERROR, UNSUPPORTED};
use super::ring::Broken;
use crate::MemoryChange;

/// Entries taken from one queue before the next has its turn: a ring of one page.
const TURN: usize = 32;

/// Attempts to signal a front end that closes. It may listen to nobody any more.
const UNTOLD_MAX: u32 = 4;

/// The device of one front end.
pub struct Device {
    queues: Vec<Queue>,
    data: Data,
    limits: Limits,
    /// Tells its requests from those of the one before.
    epoch: u32,
    /// Requests of the last pass.
    coming: Vec<Coming>,
    /// How many of them were popped.
    popped: usize,
    /// Those whose pieces are told in pages of their own, while it lasts.
    told: Vec<(Seat, Descriptors)>,
    /// Some data of the pass could not be had at once.
    later: bool,
    answers: Vec<Answer>,
    /// Requests popped and not yet completed.
    in_flight: usize,
    /// Nothing new is taken.
    finishing: bool,
    /// Nothing was published yet: the front end may have to be told of what another process answered.
    fresh: bool,
    /// Times in a row that the front end could not be told of its answers.
    untold: u32,
}

/// What a front end may ask for, beside what the disk allows.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Segments of an indirect request.
    pub segments_max: u16,
    /// Nothing is written.
    pub read_only: bool,
    /// Space may be given up.
    pub discard: bool,
}

/// A request that was taken: its queue, and its number there.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Seat {
    queue: u16,
    number: u16,
}

/// A request that was done, on the way to its ring.
struct Answer {
    seat: Seat,
    status: i16,
    /// What has to be with the guest before.
    sent: Moved,
}

/// A request that was taken in the pass.
struct Coming {
    seat: Seat,
    /// How it stands with its data, if they are to be written.
    moved: Moved,
}

impl Device {
    /// A device with these queues.
    pub fn new(queues: Vec<Queue>, data: Data, limits: Limits, epoch: u32) -> Device {
        let (coming, told, answers) = Default::default();
        let (popped, later, in_flight, finishing, fresh, untold) = (0, false, 0, false, true, 0);
        Device {
            queues,
            data,
            limits,
            epoch,
            coming,
            popped,
            told,
            later,
            answers,
            in_flight,
            finishing,
            fresh,
            untold,
        }
    }

    /// The next request. Where there is none this costs one load a queue: it is asked in each turn of the loop.
    #[inline]
    pub fn pop(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) -> Option<Request> {
        match self.popped < self.coming.len() || self.queues.iter().any(Queue::has_news) {
            true => self.next(geometry, grants, log),
            false => None,
        }
    }

    #[inline(never)]
    fn next(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) -> Option<Request> {
        if self.popped == self.coming.len() {
            self.pass(geometry, grants, log);
        }
        while let Some(&Coming { seat, moved }) = self.coming.get(self.popped) {
            self.popped = self.popped.saturating_add(1);
            if let Some(request) = self.ask(seat, moved, geometry) {
                self.in_flight = self.in_flight.saturating_add(1);
                return Some(request);
            }
        }
        None
    }

    /// Takes what is in the rings: first all entries, then all descriptors, then all data for which calls are needed.
    #[inline(never)]
    fn pass(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) {
        let read_only = geometry.read_only || self.limits.read_only;
        let geometry = Geometry { read_only, ..*geometry };
        self.coming.clear();
        self.popped = 0;
        let mut bytes = 0;
        for queue in 0..self.queues.len() {
            self.take(queue, &geometry, &mut bytes, grants, log);
        }
        if self.later {
            self.later = false;
            self.resolve(grants);
            self.supply(grants);
        }
        self.data.gather(grants);
        self.note_gathered();
    }

    /// What was to be written and was gathered is there, or lost.
    fn note_gathered(&mut self) {
        if self.data.has_noted() {
            self.coming.iter_mut().for_each(|coming| coming.moved = self.data.gathered(coming.moved));
            self.data.forget_gathered();
        }
    }

    /// Takes the entries of one queue, with the data of those for which no call is needed; `bytes` is what the others
    /// have at most.
    fn take(&mut self, index: usize, geometry: &Geometry, bytes: &mut usize, grants: &mut dyn Grants, log: &mut Log) {
        let Device { queues, data, limits, coming, told, later, answers, .. } = self;
        let Some(queue) = queues.get_mut(index) else { return };
        for _ in 0..TURN {
            if !data.has_room(*bytes) {
                return;
            }
            let (number, Record { parsed, pieces, lent }) = match queue.take(limits.segments_max, geometry) {
                Ok(Some(taken)) => taken,
                Ok(None) => return,
                Err(why) => return self.break_off(index, why, log),
            };
            let seat = Seat { queue: u16::try_from(index).unwrap_or(u16::MAX), number };
            let moved = match (parsed.ask, parsed.told) {
                (Ok(ask), None) if ask.has_data() => data.lend(grants, (pieces, pieces.bytes()), ask.is_write(), lent),
                (Ok(Ask::Discard), None) if !limits.discard => {
                    queue.done();
                    answers.push(Answer { seat, status: UNSUPPORTED, sent: Moved::There });
                    continue;
                }
                (Ok(_), None) => Moved::There,
                (Ok(_), Some(descriptors)) => {
                    told.push((seat, descriptors));
                    Moved::Later
                }
                (Err(status), _) => {
                    answers.push(Answer { seat, status, sent: Moved::There });
                    continue;
                }
            };
            if moved == Moved::Later {
                *later = true;
                let pages = parsed.told.map_or(pieces.len(), |told| usize::from(told.count));
                *bytes = bytes.saturating_add(pages.saturating_mul(PAGE));
            }
            coming.push(Coming { seat, moved });
        }
    }

    fn record(&mut self, seat: Seat) -> Option<&mut Record> {
        self.queues.get_mut(usize::from(seat.queue))?.record_mut(seat.number)
    }

    /// Finds the pieces of those that are told in pages of their own. Those that have none are lost.
    fn resolve(&mut self, grants: &mut dyn Grants) {
        if self.told.is_empty() {
            return;
        }
        let told = std::mem::take(&mut self.told);
        let wanted: Vec<Descriptors> = told.iter().map(|&(_, descriptors)| descriptors).collect();
        let fetched = self.data.fetch(grants, &wanted);
        for (&(seat, _), bytes) in told.iter().zip(fetched) {
            let Some(record) = self.record(seat) else { continue };
            let found = bytes.and_then(|bytes| record.pieces.put_told(&bytes).ok());
            if found.is_none() {
                record.pieces.clear();
            }
        }
        self.told = told;
        self.told.clear();
        self.note_gathered();
    }

    /// Lends memory for the data that could not be had at once: those whose pages are to be mapped first, and those
    /// whose pieces were not known.
    fn supply(&mut self, grants: &mut dyn Grants) {
        let Device { queues, data, coming, .. } = self;
        let later = |coming: &&Coming| coming.moved == Moved::Later;
        let pieces = |coming: &Coming| {
            let queue = queues.get(usize::from(coming.seat.queue));
            queue.and_then(|queue| queue.record(coming.seat.number)).map_or(&[][..], |record| &*record.pieces)
        };
        data.bring(grants, coming.iter().filter(later).flat_map(pieces));
        for Coming { seat, moved } in coming.iter_mut().filter(|coming| coming.moved == Moved::Later) {
            let queue = queues.get_mut(usize::from(seat.queue));
            let Some(Record { parsed, pieces, lent }) = queue.and_then(|queue| queue.record_mut(seat.number)) else {
                continue;
            };
            *moved = match pieces.is_empty() {
                false => {
                    let pieces = (&**pieces, pieces.bytes());
                    data.lend_at_last(grants, pieces, parsed.ask.is_ok_and(Ask::is_write), lent)
                }
                true => Moved::Lost,
            };
        }
    }

    /// A request for the disk, if its data could be had and it may be asked for that.
    #[inline]
    fn ask(&mut self, seat: Seat, moved: Moved, geometry: &Geometry) -> Option<Request> {
        let queue = self.queues.get_mut(usize::from(seat.queue))?;
        let Record { parsed, lent, .. } = queue.record_mut(seat.number)?;
        if let (Moved::There, Ok(ask)) = (moved, parsed.ask) {
            let (len, memory) = match lent {
                Some(lent) => (lent.len(), self.data.memory(lent)),
                None => (parsed.span.len, Segments::empty()),
            };
            let (span, token) = (Span { at: parsed.span.at, len }, token(self.epoch, seat));
            if let Ok(request) = Request::new(ask.operation(), span, memory, token, geometry) {
                return Some(request);
            }
        }
        self.refuse(seat, ERROR);
        None
    }

    #[cold]
    fn refuse(&mut self, seat: Seat, status: i16) {
        if let Some(queue) = self.queues.get_mut(usize::from(seat.queue)) {
            queue.done();
            self.answers.push(Answer { seat, status, sent: Moved::There });
        }
    }

    /// Takes the answer to a request; one that has none stays in its ring, for whoever takes that over. `false`: it was
    /// one of an earlier device.
    #[inline]
    pub fn complete(&mut self, request: Request, status: Option<Status>, grants: &mut dyn Grants) -> bool {
        let (epoch, seat) = parts(request.token());
        let read = request.operation() == Operation::Read && status == Some(Status::Done);
        request.retire();
        if epoch != self.epoch {
            return false;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(queue) = self.queues.get_mut(usize::from(seat.queue)) {
            queue.done();
            let (Some(record), Some(status)) = (queue.record(seat.number), status) else { return true };
            let sent = match &record.lent {
                Some(lent) if read => self.data.send(grants, &record.pieces, lent),
                _ => Moved::There,
            };
            self.answers.push(Answer { seat, status: request::status(status, record.parsed.operation), sent });
        }
        true
    }

    /// Brings what was read to the guest, shows it the answers, and signals it where it asked for that.
    #[inline]
    pub fn publish(&mut self, grants: &mut dyn Grants, channels: &mut dyn EventChannels, log: &mut Log) {
        if self.fresh || !self.answers.is_empty() || self.owes_signal() {
            self.fresh = false;
            self.show(grants, channels, log);
        }
    }

    #[inline(never)]
    fn show(&mut self, grants: &mut dyn Grants, channels: &mut dyn EventChannels, log: &mut Log) {
        self.data.deliver(grants);
        let mut answers = std::mem::take(&mut self.answers);
        if self.is_backwards(&answers) {
            answers.reverse();
        }
        for Answer { seat, status, sent } in answers.drain(..) {
            let there = sent == Moved::There || self.data.is_delivered(sent);
            let status = if there { status } else { ERROR };
            let Some(queue) = self.queues.get_mut(usize::from(seat.queue)) else { continue };
            if let Err(why) = queue.answer(seat.number, status, |lent| self.data.give_back(lent)) {
                self.break_off(usize::from(seat.queue), why, log);
            }
        }
        self.data.forget_delivered();
        self.answers = answers;
        let mut untold = 0;
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(|queue| queue.tell(channels)) {
                Some(Ok(Ok(()))) | None => {}
                Some(Ok(Err(error))) => {
                    untold = if mistake(Mistake::SignalLost) { 0 } else { self.untold.saturating_add(1) };
                    log.failed("cannot signal the guest", &error);
                }
                Some(Err(why)) => self.break_off(index, why, log),
            }
        }
        self.untold = untold;
    }

    /// Whether the front end could not be told of answers, and is to be.
    pub fn owes_signal(&self) -> bool {
        self.untold > 0
    }

    /// Whether answers come in the reverse order of their requests, as some kernels complete what ends at once. The
    /// other way round none of these has to be moved in its ring.
    fn is_backwards(&self, answers: &[Answer]) -> bool {
        let [_, .., Answer { seat, .. }] = answers else { return false };
        self.queues.get(usize::from(seat.queue)).is_some_and(|queue| queue.is_next(seat.number))
    }

    /// Asks for signals on all queues, and looks once more. `false`: there is something to take, or to publish.
    pub fn may_sleep(&mut self, log: &mut Log) -> bool {
        if self.popped < self.coming.len() || !self.answers.is_empty() {
            return false;
        }
        if self.in_flight > 0 && !self.data.has_room(0) {
            // Nothing can be taken before something is done.
            return true;
        }
        for index in 0..self.queues.len() {
            if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::ask_for_signal) {
                self.break_off(index, why, log);
            }
        }
        // io/ring.h, RING_FINAL_CHECK_FOR_REQUESTS: the wish must be visible before we look, or both sides miss each
        // other.
        fence(Ordering::SeqCst);
        let mut empty = true;
        for index in 0..self.queues.len() {
            match self.queues.get_mut(index).map(Queue::is_empty) {
                Some(Ok(true)) | None => {}
                Some(Ok(false)) => empty = false,
                Some(Err(why)) => self.break_off(index, why, log),
            }
        }
        empty
    }

    /// Takes nothing that the front end announces from now on. `false`: something is still to be answered.
    pub fn finish(&mut self, log: &mut Log) -> bool {
        if !std::mem::replace(&mut self.finishing, true) {
            for index in 0..self.queues.len() {
                if let Some(Err(why)) = self.queues.get_mut(index).map(Queue::close) {
                    self.break_off(index, why, log);
                }
            }
        }
        self.is_finished()
    }

    /// Whether nothing new is taken.
    pub fn is_finishing(&self) -> bool {
        self.finishing
    }

    /// Whether nothing new is taken and all is answered.
    pub fn is_finished(&mut self) -> bool {
        let idle = self.in_flight == 0 && self.popped == self.coming.len() && self.answers.is_empty();
        // What a process before us has answered is told of with the first answers of ours, or without any.
        let told = !self.fresh && (self.untold == 0 || self.untold >= UNTOLD_MAX);
        // One that is broken is empty.
        self.finishing && idle && told && self.queues.iter_mut().all(|queue| queue.is_empty().unwrap_or(true))
    }

    /// What the engine should know of its memory, and was not yet told.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        self.data.take_memory_change()
    }

    /// Gives up the memory that is its own; what the engine is to be told of that and before.
    pub fn let_memory_go(&mut self) -> impl Iterator<Item = MemoryChange> + '_ {
        self.data.let_memory_go();
        std::iter::from_fn(|| self.take_memory_change())
    }

    /// Whether it keeps memory that an idle disk should not have.
    pub fn keeps_much(&self) -> bool {
        self.data.keeps_much()
    }

    /// Gives that up.
    pub fn rest(&mut self) {
        self.data.rest();
    }

    #[cold]
    fn break_off(&mut self, index: usize, why: Broken, log: &mut Log) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.break_off();
        }
        log.note(Event::QueueBroken { queue: index, why });
    }

    /// Our ends of the event channels.
    pub fn ports(&self) -> impl Iterator<Item = Port> + '_ {
        self.queues.iter().map(|queue| queue.port)
    }

    /// Ends the device: nothing more is popped. The answer is the number of requests still to be completed.
    pub fn end(&mut self) -> usize {
        self.popped = self.coming.len();
        self.in_flight
    }
}

/// The epoch, queue and number that a request belongs to, in its token: 32, 16 and 16 bits.
fn token(epoch: u32, Seat { queue, number }: Seat) -> Token {
    Token((u64::from(epoch) << 32) | (u64::from(queue) << 16) | u64::from(number))
}

/// Where a request came from, for people.
pub fn place_of(token: Token) -> String {
    let (_, Seat { queue, .. }) = parts(token);
    format!("queue {queue}")
}

fn parts(token: Token) -> (u32, Seat) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    let seat = Seat { queue: u16::from_be_bytes([e, f]), number: u16::from_be_bytes([g, h]) };
    (u32::from_be_bytes([a, b, c, d]), seat)
}
