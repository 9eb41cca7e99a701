//! The queues of one front end: entries of their rings become requests of the disk, and answers go back.
//!
//! Knows nothing of the store. Invariants: an entry that is taken is answered once; a pass takes a bounded number of them,
//! and makes a bounded number of calls into the kernel for all; requests of an earlier front end are recognised.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use disk::{Geometry, Operation, Request, Span, Status, Token};
use memory::Segments;
use xen::{EventChannels, Grants, Port};

use super::data::{Data, Descriptors, Load, Sent};
use super::event::{Event, Log};
use super::queue::Queue;
use super::request::{self, Ask, ERROR, Kind, Memory, Parsed, Pieces, Transfer};
use super::ring::Broken;

/// Entries taken from one queue before the next has its turn: a ring of one page.
const TURN: usize = 32;

/// The device of one front end.
pub struct Device {
    queues: Vec<Queue>,
    data: Data,
    segments_max: u16,
    /// Tells its requests from those of the one before.
    epoch: u32,
    /// To be popped.
    ready: VecDeque<Request>,
    answers: Vec<Answer>,
    /// Data of one pass, kept for its room.
    coming: Vec<Load<Coming>>,
    /// Requests popped and not yet completed.
    in_flight: usize,
    /// Nothing new is taken.
    finishing: bool,
}

/// A request that was done, on the way to its ring.
struct Answer {
    queue: usize,
    number: u16,
    status: i16,
    /// What has to be with the guest before.
    sent: Sent,
}

/// A transfer in the pass.
struct Coming {
    queue: usize,
    number: u16,
    at: u64,
    kind: Kind,
    /// Where its pieces are told, if not in the entry.
    told: Option<Descriptors>,
}

impl Device {
    /// A device with these queues.
    pub fn new(queues: Vec<Queue>, data: Data, segments_max: u16, epoch: u32) -> Device {
        let (ready, answers, coming) = Default::default();
        Device { queues, data, segments_max, epoch, ready, answers, coming, in_flight: 0, finishing: false }
    }

    /// The next request.
    pub fn pop(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) -> Option<Request> {
        if self.ready.is_empty() {
            self.pass(geometry, grants, log);
        }
        let request = self.ready.pop_front()?;
        self.in_flight = self.in_flight.saturating_add(1);
        Some(request)
    }

    /// Takes what is in the rings: first all entries, then all descriptors, then all data.
    fn pass(&mut self, geometry: &Geometry, grants: &mut dyn Grants, log: &mut Log) {
        let mut coming = std::mem::take(&mut self.coming);
        let mut bytes = 0;
        for queue in 0..self.queues.len() {
            self.take(queue, geometry, &mut coming, &mut bytes, log);
        }
        if !coming.is_empty() {
            self.resolve(&mut coming, grants);
            self.data.lend(grants, &mut coming);
            for load in coming.drain(..) {
                self.hand_over(load, geometry);
            }
        }
        self.coming = coming;
    }

    /// Takes the entries of one queue; `bytes` is what those of the pass have at most. What needs no data is done with at once.
    fn take(
        &mut self,
        index: usize,
        geometry: &Geometry,
        coming: &mut Vec<Load<Coming>>,
        bytes: &mut usize,
        log: &mut Log,
    ) {
        for _ in 0..TURN {
            if !self.data.has_room(*bytes) {
                return;
            }
            let Some(queue) = self.queues.get_mut(index) else { return };
            let (number, Parsed { ask, .. }) = match queue.take(self.segments_max, geometry) {
                Ok(Some(taken)) => taken,
                Ok(None) => return,
                Err(why) => return self.break_off(index, why, log),
            };
            let token = token(self.epoch, index, number);
            match ask {
                Ok(Ask::Flush | Ask::Barrier) => {
                    self.ask(token, Operation::Flush, Span { at: 0, len: 0 }, Segments::empty(), geometry);
                }
                Ok(Ask::Discard(span)) => self.ask(token, Operation::Discard, span, Segments::empty(), geometry),
                Ok(Ask::Transfer(Transfer { at, kind, memory })) => {
                    *bytes = bytes.saturating_add(memory.len_max());
                    let (pieces, told) = match memory {
                        Memory::Direct(pieces) => (pieces, None),
                        Memory::Indirect { page, count } => (Pieces::new(), Some(Descriptors { page, count })),
                    };
                    let what = Coming { queue: index, number, at, kind, told };
                    coming.push(Load::new(what, pieces, kind.is_write()));
                }
                Err(status) => self.refuse(index, number, status),
            }
        }
    }

    /// Finds the pieces of those that are told in pages of their own. Those that have none are refused and gone.
    fn resolve(&mut self, coming: &mut Vec<Load<Coming>>, grants: &mut dyn Grants) {
        let wanted: Vec<Descriptors> = coming.iter().filter_map(|load| load.what.told).collect();
        if wanted.is_empty() {
            return;
        }
        let mut fetched = self.data.fetch(grants, &wanted).into_iter();
        let mut refused = Vec::new();
        coming.retain_mut(|load| {
            if load.what.told.is_none() {
                return true;
            }
            match fetched.next().flatten().and_then(|bytes| request::pieces(&bytes).ok()) {
                Some(pieces) => load.pieces = pieces,
                None => {
                    refused.push((load.what.queue, load.what.number));
                    return false;
                }
            }
            true
        });
        for (queue, number) in refused {
            self.refuse(queue, number, ERROR);
        }
    }

    /// A transfer becomes a request, if its data could be had.
    fn hand_over(&mut self, load: Load<Coming>, geometry: &Geometry) {
        let Load { what: Coming { queue: index, number, at, kind, .. }, pieces, memory, loan, .. } = load;
        let Some(memory) = memory else { return self.refuse(index, number, ERROR) };
        if let Some(queue) = self.queues.get_mut(index) {
            queue.keep(number, pieces, loan);
        }
        let span = Span { at, len: u64::try_from(memory.len()).unwrap_or(u64::MAX) };
        self.ask(token(self.epoch, index, number), kind.operation(), span, memory, geometry);
    }

    fn ask(&mut self, token: Token, operation: Operation, span: Span, memory: Segments, geometry: &Geometry) {
        match Request::new(operation, span, memory, token, geometry) {
            Ok(request) => self.ready.push_back(request),
            Err(_) => {
                let (_, index, number) = parts(token);
                self.refuse(index, number, ERROR);
            }
        }
    }

    fn refuse(&mut self, index: usize, number: u16, status: i16) {
        if let Some(queue) = self.queues.get_mut(index) {
            queue.done(number);
            self.answers.push(Answer { queue: index, number, status, sent: Sent::There });
        }
    }

    /// Takes the answer to a request. `false`: it was one of an earlier device.
    pub fn complete(&mut self, request: Request, status: Status, grants: &mut dyn Grants) -> bool {
        let (epoch, index, number) = parts(request.token());
        if epoch != self.epoch {
            request.retire();
            return false;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        if let Some(queue) = self.queues.get_mut(index) {
            let (operation, pieces, loan) = queue.done(number);
            let read = request.operation() == Operation::Read && status == Status::Done;
            let sent = if read { self.data.send(grants, pieces, loan) } else { Sent::There };
            self.answers.push(Answer { queue: index, number, status: request::status(status, operation), sent });
        }
        request.retire();
        true
    }

    /// Brings what was read to the guest, shows it the answers, and signals it where it asked for that.
    pub fn publish(&mut self, grants: &mut dyn Grants, channels: &mut dyn EventChannels, log: &mut Log) {
        if !self.answers.is_empty() {
            self.data.deliver(grants);
            let answers = std::mem::take(&mut self.answers);
            for &Answer { queue: index, number, status, sent } in &answers {
                let status = if self.data.delivered(sent) { status } else { ERROR };
                let Some(queue) = self.queues.get_mut(index) else { continue };
                let (loan, answered) = queue.answer(number, status);
                if let Some(loan) = loan {
                    self.data.give_back(loan);
                }
                if let Err(why) = answered {
                    self.break_off(index, why, log);
                }
            }
            self.data.forget_delivered();
            self.answers = answers;
            self.answers.clear();
        }
        for index in 0..self.queues.len() {
            if let Some(Err(why)) = self.queues.get_mut(index).map(|queue| queue.tell(channels)) {
                self.break_off(index, why, log);
            }
        }
    }

    /// Asks for signals on all queues, and looks once more. `false`: there is something to take, or to publish.
    pub fn may_sleep(&mut self, log: &mut Log) -> bool {
        if !self.ready.is_empty() || !self.answers.is_empty() {
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
        // io/ring.h, RING_FINAL_CHECK_FOR_REQUESTS: the wish must be visible before we look, or both sides miss each other.
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
        let idle = self.in_flight == 0 && self.ready.is_empty() && self.answers.is_empty();
        // One that is broken is empty.
        self.finishing && idle && self.queues.iter_mut().all(|queue| queue.is_empty().unwrap_or(true))
    }

    /// Whether it keeps memory that an idle disk should not have.
    pub fn keeps_much(&self) -> bool {
        self.data.keeps_much()
    }

    /// Gives that up.
    pub fn rest(&mut self) {
        self.data.rest();
    }

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
        self.ready.drain(..).for_each(retire);
        self.in_flight
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.ready.drain(..).for_each(retire);
    }
}

/// Ends a request that the disk has not seen.
fn retire(request: Request) {
    request.retire();
}

/// The epoch, queue and number that a request belongs to, in its token: 32, 16 and 16 bits.
fn token(epoch: u32, index: usize, number: u16) -> Token {
    let index = u64::from(u16::try_from(index).unwrap_or(u16::MAX));
    Token((u64::from(epoch) << 32) | (index << 16) | u64::from(number))
}

fn parts(token: Token) -> (u32, usize, u16) {
    let [a, b, c, d, e, f, g, h] = token.0.to_be_bytes();
    (u32::from_be_bytes([a, b, c, d]), usize::from(u16::from_be_bytes([e, f])), u16::from_be_bytes([g, h]))
}
