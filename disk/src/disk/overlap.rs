//! Requests that wait because they overlap others.
//!
//! Knows what may overlap what, and nothing of how a request is done. Keeps: nothing overlaps a discard, a write of
//! zeroes, a write of parts of blocks (counted in whole blocks) or a merge's chunk; and no request overtakes another
//! that it must not overlap.

use std::collections::VecDeque;

use super::active::Requests;
use crate::{Operation, Request, Span, Token};

/// The requests that wait, and what they wait for.
#[derive(Debug, Default)]
pub(super) struct Overlap {
    /// How many of the requests under way nothing may overlap.
    exclusive: usize,
    waiting: VecDeque<Request>,
    /// A merge's chunk that waits until nothing in flight overlaps it. What comes waits for it.
    claim: Option<Span>,
    /// Something may have ended that one of them has waited for.
    ended: bool,
    /// New requests wait: the disk is quiesced.
    quiesced: bool,
    /// They wait until nothing is in flight, because a merge has no space for one of them.
    draining: bool,
}

impl Overlap {
    /// Whether the request overlaps, in flight or ahead of it in the queue, something that it must not.
    #[inline(always)]
    pub fn must_wait(&self, request: &Request, requests: &Requests) -> bool {
        if self.quiesced || self.draining {
            return true;
        }
        let exclusive = is_exclusive(request.operation());
        if !exclusive && self.exclusive == 0 && self.waiting.is_empty() && self.claim.is_none() {
            return false;
        }
        self.overlaps_what_it_must_not(request, exclusive, requests)
    }

    fn overlaps_what_it_must_not(&self, request: &Request, exclusive: bool, requests: &Requests) -> bool {
        if self.claim.is_some_and(|chunk| chunk.overlaps(request.span())) {
            return true;
        }
        let ahead = requests.iter().map(|active| &active.request).chain(&self.waiting);
        ahead
            .filter(|other| exclusive || is_exclusive(other.operation()))
            .any(|other| other.span().overlaps(request.span()))
    }

    /// A request has begun.
    pub fn begun(&mut self, operation: Operation) {
        self.exclusive += usize::from(is_exclusive(operation));
    }

    /// A request that had begun has ended.
    #[inline(always)]
    pub fn ended(&mut self, operation: Operation) {
        if is_exclusive(operation) {
            self.exclusive -= 1;
        }
        self.ended = !self.waiting.is_empty() || self.claim.is_some();
    }

    /// Has a request wait, behind all others.
    pub fn wait(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// How many requests wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether some of them may go, if the disk is not quiesced.
    #[inline(always)]
    pub fn is_due(&self) -> bool {
        self.ended
    }

    /// All that wait, in their order, if some of them may go.
    pub fn take_due(&mut self) -> Option<VecDeque<Request>> {
        let due = !self.quiesced && std::mem::take(&mut self.ended);
        due.then(|| std::mem::take(&mut self.waiting))
    }

    /// A map of changed blocks may admit some of them now.
    pub fn may_go(&mut self) {
        self.ended = !self.waiting.is_empty() || self.claim.is_some();
    }

    /// Takes out those of a quiesced disk that `wanted` names. Nothing of them was begun, and nothing will be.
    pub fn take_waiting(&mut self, wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        if !self.quiesced || !self.waiting.iter().any(|request| wanted(request.token())) {
            return Vec::new();
        }
        let (taken, waiting) =
            std::mem::take(&mut self.waiting).into_iter().partition(|request| wanted(request.token()));
        self.waiting = waiting;
        taken.into()
    }

    /// Has a merge's chunk wait until nothing overlaps it.
    pub fn claim(&mut self, chunk: Span) {
        assert!(self.claim.is_none(), "two chunks wait to be merged");
        self.claim = Some(chunk);
    }

    /// The chunk that waits does so no longer.
    pub fn withdraw_claim(&mut self) {
        self.claim = None;
    }

    /// The chunk that waits, if nothing in flight overlaps it any more; it does not wait then.
    pub fn take_claim(&mut self, requests: &Requests) -> Option<Span> {
        self.claim.take_if(|chunk| !requests.iter().any(|active| active.request.span().overlaps(*chunk)))
    }

    /// New requests wait.
    pub fn quiesce(&mut self) {
        self.quiesced = true;
    }

    /// They wait no longer for that.
    pub fn resume(&mut self) {
        self.quiesced = false;
        self.ended = true;
    }

    /// Whether the disk is quiesced.
    pub fn is_quiesced(&self) -> bool {
        self.quiesced
    }

    /// New requests wait until [`Overlap::drained`].
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Nothing is in flight.
    pub fn drained(&mut self) {
        self.draining = false;
    }
}

/// Whether nothing may overlap it while it is in flight.
fn is_exclusive(operation: Operation) -> bool {
    matches!(operation, Operation::Patch { .. } | Operation::Discard | Operation::WriteZeroes { .. })
}

#[cfg(test)]
mod test {
    use memory::Segments;

    use super::super::active::Active;
    use super::*;
    use crate::{DiskOffset, Geometry};

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
    const DISCARD: Operation = Operation::Discard;
    const EXTENTS: Operation = Operation::Extents { depths: false };

    fn request(operation: Operation, at: u64, len: u64) -> Request {
        Request::new(operation, Span { at: DiskOffset(at), len }, Segments::empty(), Token(at), &GEOMETRY).unwrap()
    }

    struct Requested {
        overlap: Overlap,
        requests: Requests,
    }

    impl Requested {
        fn new() -> Requested {
            Requested { overlap: Overlap::default(), requests: Requests::with_capacity(4) }
        }

        /// Begins a request or has it wait: its number if it has begun.
        fn submit(&mut self, request: Request) -> Option<u32> {
            if self.overlap.must_wait(&request, &self.requests) {
                self.overlap.wait(request);
                return None;
            }
            self.overlap.begun(request.operation());
            Some(self.requests.insert(Active::new(request, 0)))
        }

        fn end(&mut self, number: u32) {
            let operation = self.requests.get(number).request.operation();
            self.requests.end(number);
            self.overlap.ended(operation);
        }

        /// Answers all, whether they have begun or not.
        fn retire(mut self) {
            while let Some((request, ..)) = self.requests.answer() {
                request.retire();
            }
            self.overlap.waiting.drain(..).for_each(|request| {
                request.retire();
            });
        }
    }

    #[test]
    fn nothing_overlaps_a_discard_and_nothing_overtakes_one_that_waits() {
        let mut requested = Requested::new();
        let first = requested.submit(request(EXTENTS, 0, 1024)).unwrap();
        assert_eq!(requested.submit(request(DISCARD, 512, 1024)), None);
        assert_eq!(requested.submit(request(EXTENTS, 1024, 512)), None, "it overlaps what waits");
        let third = requested.submit(request(DISCARD, 4096, 512)).unwrap();
        assert_eq!(requested.submit(request(EXTENTS, 4096, 512)), None, "it overlaps what is under way");
        requested.end(first);
        let waiting = requested.overlap.take_due().unwrap();
        let begun: Vec<Option<u32>> = waiting.into_iter().map(|request| requested.submit(request)).collect();
        let [Some(second), None, None] = begun[..] else { panic!("{begun:?} have begun") };
        [second, third].into_iter().for_each(|number| requested.end(number));
        requested.retire();
    }

    #[test]
    fn requests_that_change_nothing_overlap() {
        let mut requested = Requested::new();
        let numbers = [(); 2].map(|()| requested.submit(request(EXTENTS, 0, 512)).unwrap());
        numbers.into_iter().for_each(|number| requested.end(number));
        assert!(!requested.overlap.is_due(), "nothing waits");
        requested.retire();
    }

    #[test]
    fn a_claimed_chunk_waits_for_what_overlaps_it_and_what_comes_waits_for_it() {
        let mut requested = Requested::new();
        let first = requested.submit(request(EXTENTS, 0, 512)).unwrap();
        requested.overlap.claim(Span { at: DiskOffset(0), len: 4096 });
        assert_eq!(requested.overlap.take_claim(&requested.requests), None);
        assert_eq!(requested.submit(request(EXTENTS, 2048, 512)), None);
        requested.end(first);
        assert!(requested.overlap.is_due());
        assert_eq!(requested.overlap.take_claim(&requested.requests), Some(Span { at: DiskOffset(0), len: 4096 }));
        assert_eq!(requested.overlap.take_claim(&requested.requests), None, "once");
        requested.retire();
    }

    #[test]
    fn requests_of_a_quiesced_disk_wait_and_can_be_taken() {
        let mut requested = Requested::new();
        requested.overlap.quiesce();
        assert_eq!(requested.submit(request(EXTENTS, 0, 512)), None);
        assert_eq!(requested.submit(request(EXTENTS, 512, 512)), None);
        let taken = requested.overlap.take_waiting(|token| token == Token(512));
        assert_eq!(taken.into_iter().map(Request::retire).collect::<Vec<_>>(), [Token(512)]);
        assert!(requested.overlap.take_due().is_none());
        requested.overlap.resume();
        assert!(requested.overlap.take_waiting(|_| true).is_empty(), "the disk may begin them at any moment");
        assert_eq!(requested.overlap.take_due().map(|due| due.into_iter().map(Request::retire).count()), Some(1));
        requested.retire();
    }
}
