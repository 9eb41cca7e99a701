//! The requests of a disk, from their start until their answers are fetched.
//!
//! Knows nothing of how they are done. A request is large, and moving it is a good part of what it costs: it stays
//! where it is until its answer is fetched, though it has ended. Keeps: a number finds a request while it is under way,
//! and only then; answers are fetched in the order in which the requests have ended.

use std::collections::VecDeque;

use super::merge_chunk::COPIES_MAX;
use crate::slab::Slab;
use crate::{FileError, Request, Span, Status};

/// Parts of one discard or write of zeroes that are under way at once. One request may cover the whole disk, and a
/// guest can make each sector a part of its own.
const PARTS_MAX: u32 = 256;

/// A request under way.
#[derive(Debug)]
pub(super) struct Active {
    pub request: Request,
    /// Parts under way, and one more while it is being split.
    pub left: u32,
    /// What is to be split when fewer parts are under way. Counts as a part.
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
    /// [`Disk::epoch`](super::Disk::epoch) when it began.
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
}

/// Requests that are under way, and those that have ended.
#[derive(Debug)]
pub(super) struct Requests {
    all: Slab<Active>,
    /// The numbers of those that have ended, in that order.
    ended: VecDeque<u32>,
}

impl Requests {
    /// No requests, and memory for `size` of them.
    pub fn with_capacity(size: usize) -> Requests {
        Requests { all: Slab::with_capacity(size), ended: VecDeque::with_capacity(size) }
    }

    /// Adds a request. Returns its number.
    #[inline(always)]
    pub fn insert(&mut self, request: Active) -> u32 {
        self.all.insert(request)
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
        self.get_mut(number).ended = true;
        self.ended.push_back(number);
    }

    /// The next request that has ended, and its status.
    pub fn answer(&mut self) -> Option<(Request, Status)> {
        let number = self.ended.pop_front()?;
        let Some(active) = self.all.remove(number) else { unreachable!("request {number} was answered before") };
        Some((active.request, active.status))
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

/// How many parts of a request may be under way at once.
pub(super) fn parts_max(active: &Active) -> u32 {
    if active.of_merge { COPIES_MAX } else { PARTS_MAX }
}

/// A file error as the status of the request it failed.
pub(super) fn status_of(result: Result<(), FileError>) -> Status {
    match result {
        Ok(()) => Status::Done,
        Err(FileError::NoSpace) => Status::NoSpace,
        Err(FileError::Unsupported | FileError::Failed(_)) => Status::Failed,
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{Operation, Token};

    fn flush(token: u64) -> Active {
        let geometry =
            crate::Geometry { len: 512, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let nothing = Span { at: 0, len: 0 };
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
    fn a_request_that_has_ended_keeps_its_number_until_it_is_answered() {
        let mut requests = Requests::with_capacity(2);
        let (first, second) = (requests.insert(flush(1)), requests.insert(flush(2)));
        requests.end(second);
        assert_eq!((requests.len(), requests.answers(), requests.iter().count()), (1, 1, 1));
        let third = requests.insert(flush(3));
        assert!(third != second);
        requests.end(first);
        let tokens: Vec<u64> =
            std::iter::from_fn(|| requests.answer()).map(|(request, _)| request.retire().0).collect();
        assert_eq!(tokens, [2, 1]);
        assert_eq!(requests.insert(flush(4)), first);
        [third, first].into_iter().for_each(|number| requests.end(number));
        assert_eq!(std::iter::from_fn(|| requests.answer()).map(|(request, _)| request.retire().0).sum::<u64>(), 3 + 4);
    }
}
