//! The requests of a disk, from their start until their answers are fetched.
//!
//! Knows nothing of how they are done. A request is large, and moving it is a good part of what it costs: it stays
//! where it is until its answer is fetched, though it has ended. Keeps: a number finds a request while it is under way,
//! and only then; answers are fetched in the order in which the requests have ended.

use std::collections::VecDeque;

use super::stages::{Times, Waiting};
use crate::slab::Slab;
use crate::{Request, Span, Status};

/// Parts of one discard or write of zeroes that are under way at once. One request may cover the whole disk, and a
/// guest can make each sector a part of its own.
const PARTS_MAX: u32 = 256;
/// Copies of a merge under way at once.
const COPIES_MAX: u32 = 2;

/// A request under way.
#[derive(Debug)]
pub(super) struct Active {
    pub request: Request,
    /// Parts under way, and one more while it is being split.
    pub left: u32,
    /// The rest of the span, to be split when fewer parts are under way. Counts as a part.
    pub rest: Option<Span>,
    pub status: Status,
    /// Of an unaligned write: the blocks at its ends have been read.
    pub edges_read: bool,
    /// It is a chunk of a merge.
    pub of_merge: bool,
    /// The merge's target has no space for it: it starts over without the merge.
    pub retry_without_merge: bool,
    /// It has its answer. Only [`Requests`] changes this.
    pub ended: bool,
    /// The epoch of the routing of writes when it began.
    pub epoch: u64,
}

impl Active {
    pub fn new(request: Request, epoch: u64) -> Active {
        let (edges_read, of_merge, retry_without_merge, ended) = (false, false, false, false);
        Active {
            request,
            left: 1,
            rest: None,
            status: Status::Done,
            edges_read,
            of_merge,
            retry_without_merge,
            ended,
            epoch,
        }
    }

    /// How many parts may be under way at once.
    fn parts_max(&self) -> u32 {
        if self.of_merge { COPIES_MAX } else { PARTS_MAX }
    }

    fn fail(&mut self, status: Status) {
        if self.status == Status::Done {
            self.status = status;
        }
    }
}

/// The effect of the end of a part on its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartEnd {
    /// Others are under way.
    UnderWay,
    /// The postponed rest is to be split now. It counts as a part already.
    Split(Span),
    /// Nothing of it is under way any more.
    Last,
}

/// Requests that are under way, and those that have ended.
#[derive(Debug)]
pub(super) struct Requests {
    all: Slab<Active>,
    /// What each of them waits for, by their numbers. Kept apart from the requests, since these are moved.
    pub(super) waiting: Waiting,
    /// The numbers of those that have ended, in that order.
    ended: VecDeque<u32>,
}

impl Requests {
    /// No requests, and memory for `size` of them.
    pub fn with_capacity(size: usize) -> Requests {
        let (waiting, ended) = (Waiting::with_capacity(size), VecDeque::with_capacity(size));
        Requests { all: Slab::with_capacity(size), waiting, ended }
    }

    /// Adds a request. Returns its number.
    #[inline(always)]
    pub fn insert(&mut self, request: Active) -> u32 {
        let slot = request.request.slot;
        let number = self.all.insert(request);
        self.waiting.begin(number, slot);
        number
    }

    /// The request under way that has this number.
    pub fn get(&self, number: u32) -> &Active {
        match self.all.get(number) {
            Some(active) if !active.ended => active,
            _ => unreachable!("request {number} is not under way"),
        }
    }

    /// The same, mutably.
    pub fn get_mut(&mut self, number: u32) -> &mut Active {
        match self.all.get_mut(number) {
            Some(active) if !active.ended => active,
            _ => unreachable!("request {number} is not under way"),
        }
    }

    /// Counts one more part of a request that is under way.
    pub fn part_begun(&mut self, number: u32) {
        self.get_mut(number).left += 1;
    }

    /// Counts a part of a request that has ended.
    pub fn part_ended(&mut self, number: u32, status: Status) -> PartEnd {
        let active = self.get_mut(number);
        active.left -= 1;
        active.fail(status);
        let few = active.left <= active.parts_max() / 2;
        match active.rest.take_if(|_| few) {
            Some(rest) => PartEnd::Split(rest),
            None if active.left > 0 => PartEnd::UnderWay,
            None => PartEnd::Last,
        }
    }

    /// Records that a request has failed. It ends with its last part.
    pub fn fail(&mut self, number: u32, status: Status) {
        self.get_mut(number).fail(status);
    }

    /// Whether something of the request has failed.
    pub fn has_failed(&self, number: u32) -> bool {
        self.get(number).status != Status::Done
    }

    /// Whether a request has enough parts under way; if so, `rest` is split later.
    pub fn is_postponed(&mut self, number: u32, rest: Span) -> bool {
        let active = self.get_mut(number);
        let postponed = active.left > active.parts_max();
        if postponed {
            assert!(active.rest.is_none(), "two rests of request {number} are postponed");
            active.left += 1;
            active.rest = Some(rest);
        }
        postponed
    }

    /// Records that the blocks at the ends of an unaligned write were read, if that is what has just been done: what is
    /// to be written now.
    pub fn edges_read(&mut self, number: u32) -> Option<Span> {
        let active = self.get_mut(number);
        let is_next = active.request.unaligned().is_some() && !active.edges_read && active.status == Status::Done;
        active.edges_read |= is_next;
        is_next.then(|| active.request.span())
    }

    /// Whether a write to `span` is under way that began before `epoch`.
    pub fn is_written_since_before(&self, epoch: u64, span: Span) -> bool {
        let mut old = self.iter().filter(|active| active.epoch != epoch).map(|active| &active.request);
        old.any(|request| request.operation().is_write() && request.span().overlaps(span))
    }

    /// Takes a request back that starts over; it gets no answer yet.
    pub fn remove(&mut self, number: u32) -> Active {
        match self.all.remove(number) {
            Some(active) if !active.ended => active,
            _ => unreachable!("request {number} is not under way"),
        }
    }

    /// Ends a request; its status is its answer.
    #[inline(always)]
    pub fn end(&mut self, number: u32) {
        let active = self.get_mut(number);
        active.ended = true;
        debug_assert!(self.waiting.is_for_nothing(number), "request {number} still waits for the engine");
        self.ended.push_back(number);
    }

    /// The next request that has ended, its status, and what became of its time.
    #[inline(always)]
    pub fn answer(&mut self) -> Option<(Request, Status, &Times)> {
        let number = self.ended.pop_front()?;
        let Some(active) = self.all.remove(number) else { unreachable!("request {number} was answered before") };
        Some((active.request, active.status, self.waiting.times(number)))
    }

    /// Number of requests under way.
    pub fn len(&self) -> usize {
        self.all.len() - self.ended.len()
    }

    /// Number of requests that have ended and wait for their answers to be fetched.
    pub fn answers(&self) -> usize {
        self.ended.len()
    }

    /// The requests under way.
    pub fn iter(&self) -> impl Iterator<Item = &Active> {
        self.all.iter().filter(|active| !active.ended)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{DiskOffset, Operation, Token};

    fn flush(token: u64) -> Active {
        let geometry =
            crate::Geometry { len: 512, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let nothing = Span { at: DiskOffset(0), len: 0 };
        let request = Request::new(Operation::Flush, nothing, memory::Segments::empty(), Token(token), &geometry);
        Active::new(request.unwrap(), 0)
    }

    #[test]
    #[should_panic = "request 0 is not under way"]
    fn a_request_ends_once() {
        let mut requests = Requests::with_capacity(1);
        let number = requests.insert(flush(1));
        requests.end(number);
        requests.end(number);
    }

    #[test]
    fn a_request_ends_with_its_last_part_and_fails_with_its_first_failure() {
        let mut requests = Requests::with_capacity(1);
        let number = requests.insert(flush(1));
        requests.part_begun(number);
        assert_eq!(requests.part_ended(number, Status::NoSpace), PartEnd::UnderWay);
        assert_eq!(requests.part_ended(number, Status::Failed), PartEnd::Last);
        requests.end(number);
        let (request, status, _) = requests.answer().unwrap();
        request.retire();
        assert_eq!(status, Status::NoSpace);
    }

    #[test]
    fn the_rest_of_a_request_with_many_parts_is_split_when_half_of_them_have_ended() {
        let mut requests = Requests::with_capacity(1);
        let number = requests.insert(flush(1));
        let rest = Span { at: DiskOffset(0), len: 512 };
        while !requests.is_postponed(number, rest) {
            requests.part_begun(number);
        }
        let parts = requests.get(number).left;
        let ended = (0..parts).take_while(|_| requests.part_ended(number, Status::Done) == PartEnd::UnderWay).count();
        let left = requests.get(number).left;
        assert_eq!((u32::try_from(ended).unwrap() + 1 + left, left), (parts, PARTS_MAX / 2));
        assert!((1..left).all(|_| requests.part_ended(number, Status::Done) == PartEnd::UnderWay));
        assert_eq!(requests.part_ended(number, Status::Done), PartEnd::Last);
        requests.end(number);
        requests.answer().unwrap().0.retire();
    }

    #[test]
    fn a_request_that_has_ended_keeps_its_number_until_it_is_answered() {
        let mut requests = Requests::with_capacity(2);
        let (first, second) = (requests.insert(flush(1)), requests.insert(flush(2)));
        requests.end(second);
        assert_eq!((requests.len(), requests.answers(), requests.iter().count()), (1, 1, 1));
        let third = requests.insert(flush(3));
        assert!(third != second);
        requests.end(first);
        let tokens: Vec<u64> =
            std::iter::from_fn(|| requests.answer().map(|(request, ..)| request.retire().0)).collect();
        assert_eq!(tokens, [2, 1]);
        assert_eq!(requests.insert(flush(4)), first);
        [third, first].into_iter().for_each(|number| requests.end(number));
        assert_eq!(
            std::iter::from_fn(|| requests.answer().map(|(request, ..)| request.retire().0)).sum::<u64>(),
            3 + 4
        );
    }
}
