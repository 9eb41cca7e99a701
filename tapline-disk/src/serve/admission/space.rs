//! Requests that find no space on the storage, and wait for it (`--when-full wait`).
//!
//! It knows no disk, no server and no clock: it only queues requests and returns them. Once a request waits, all later
//! ones that may need space wait behind it; the first is retried periodically, and when it has found space, so are all
//! others. Reads, discards and flushes continue: a flush waits only if it finds no space itself.
//!
//! Invariants: each queued request is returned once; while one waits and none is being retried, [`Space::retry_at`]
//! returns when the first will be.

use std::collections::VecDeque;

use disk::{Operation, Request, Status, Token};

use super::{Released, planted};

/// The time in nanoseconds between retries without a notification that there may be space.
const RETRY: u64 = 5_000_000_000;

/// The requests that wait for space.
#[derive(Debug)]
pub struct Space {
    /// Whether requests may wait at all.
    wait: bool,
    waiting: VecDeque<Request>,
    /// The request that is being retried.
    probe: Option<Token>,
    hint: Hint,
    /// When the first is retried without a notification.
    retry_at: u64,
}

/// What to do with the requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Start them when there may be space.
    Begun,
    /// Hold them: others must complete before one starts.
    Held,
    /// Refuse them: there is no peer left to wait for.
    Refused,
}

/// What is known about free space since the first request was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hint {
    None,
    /// There may be some.
    Maybe,
    /// The first request has found some.
    Found,
}

impl Space {
    /// Makes an empty queue. `wait`: whether requests may wait.
    pub fn new(wait: bool) -> Space {
        Space { wait, waiting: VecDeque::new(), probe: None, hint: Hint::None, retry_at: 0 }
    }

    /// Returns whether a request waits for space.
    #[inline]
    pub fn is_full(&self) -> bool {
        !self.waiting.is_empty() || self.probe.is_some()
    }

    /// Returns the number of waiting requests, including the one that is being retried.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + usize::from(self.probe.is_some())
    }

    /// Returns whether a new request must wait behind the others.
    pub fn holds_back(&self, request: &Request) -> bool {
        let is_full = if planted!(OvertakesProbe) { !self.waiting.is_empty() } else { self.is_full() };
        is_full
            && self.wait
            && matches!(
                request.operation(),
                Operation::Write { .. } | Operation::Patch { .. } | Operation::WriteZeroes { .. }
            )
    }

    /// Queues a request that is held back.
    pub fn keep(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Returns whether a completion must be checked. Hardly any must, and moving requests is costly.
    #[inline]
    pub fn concerns(&self, status: Status) -> bool {
        status == Status::NoSpace || self.probe.is_some()
    }

    /// Queues a request that has found no space, if it may wait; any other is returned with its status.
    pub fn completed(&mut self, request: Request, status: Status, now: u64) -> Option<(Request, Status)> {
        let is_probe = self.probe.take_if(|probe| *probe == request.token()).is_some();
        let changes = request.operation().is_write() || request.operation() == Operation::Flush;
        if self.wait && status == Status::NoSpace && changes && !request.at_limit {
            if is_probe || self.waiting.is_empty() || self.hint == Hint::Found {
                // If space was found, it was not enough for all.
                self.hint = Hint::None;
                self.retry_at = if planted!(RetriesInThePast) { 0 } else { now.saturating_add(RETRY) };
            }
            // The retried request stays the first.
            if is_probe {
                self.waiting.push_front(request)
            } else {
                self.waiting.push_back(request)
            }
            return None;
        }
        if is_probe && !planted!(RetriesOnlyTheFirst) {
            // It has found space, or its failure has other reasons.
            self.hint = Hint::Found;
        }
        Some((request, status))
    }

    /// Returns the waiting requests that their peers take back; not the one that is being retried, which the disk has.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let (wanted, others) = self.waiting.drain(..).partition(|request| is_wanted(request.token()));
        self.waiting = others;
        Vec::from(wanted)
    }

    /// Returns the waiting requests without the one that is being retried.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.waiting.iter()
    }

    /// Called when there may be space again.
    pub fn may_have_space(&mut self) {
        if self.probe.is_none() && !self.waiting.is_empty() && self.hint == Hint::None {
            self.hint = Hint::Maybe;
        }
    }

    /// From now on no request waits.
    pub fn close(&mut self) {
        self.wait = false;
    }

    /// Returns when the first request is retried, unless it is known before that there may be space.
    pub fn retry_at(&self) -> Option<u64> {
        (!self.waiting.is_empty() && self.probe.is_none()).then_some(self.retry_at)
    }

    /// Returns whether [`Space::next`] would return a request.
    pub fn is_due(&self, now: u64, fate: Fate) -> bool {
        let may_have_space = || self.hint != Hint::None || self.retry_at().is_some_and(|at| at <= now);
        let leaves = !self.wait || fate == Fate::Refused || fate == Fate::Begun && may_have_space();
        !self.waiting.is_empty() && leaves
    }

    /// Returns a request that leaves the queue now: the first, to be retried; any, once that has found space; or one to
    /// refuse, because none may wait any more.
    pub fn next(&mut self, now: u64, fate: Fate) -> Option<Released> {
        if !self.is_due(now, fate) {
            return None;
        }
        let request = self.waiting.pop_front()?;
        if fate == Fate::Refused || !self.wait {
            self.hint = Hint::None;
            return Some(Released::Refuse(request));
        }
        if self.hint != Hint::Found {
            self.hint = Hint::None;
            self.probe = Some(request.token());
        } else if self.waiting.is_empty() {
            self.hint = Hint::None;
        }
        Some(Released::Start(request))
    }
}

#[cfg(test)]
mod test {
    use disk::{DiskOffset, Geometry, Span};
    use memory::Segments;

    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
    const WRITE: Operation = Operation::Write { durable: false };

    fn request(operation: Operation, token: u64) -> Request {
        let len = if operation == Operation::Flush { 0 } else { 512 };
        let memory =
            if matches!(operation, Operation::Read | WRITE) { Segments::zeroed(len) } else { Segments::empty() };
        let len = u64::try_from(len).unwrap();
        Request::new(operation, Span { at: DiskOffset(0), len }, memory, Token(token), &GEOMETRY).unwrap()
    }

    /// Returns the requests that leave at that time, and how.
    fn next_at(space: &mut Space, now: u64, fate: Fate) -> (&'static str, Vec<u64>) {
        let (mut word, mut tokens) = ("none", Vec::new());
        while let Some(released) = space.next(now, fate) {
            let (how, request) = match released {
                Released::Start(request) => ("start", request),
                Released::Refuse(request) => ("refuse", request),
            };
            word = how;
            tokens.push(request.retire().0);
        }
        (word, tokens)
    }

    fn next(space: &mut Space) -> (&'static str, Vec<u64>) {
        next_at(space, 0, Fate::Begun)
    }

    fn refused(space: &mut Space, token: u64) {
        assert!(space.completed(request(WRITE, token), Status::NoSpace, 0).is_none());
    }

    fn answered(space: &mut Space, token: u64, status: Status) {
        let (request, as_it_was) = space.completed(request(WRITE, token), status, 0).unwrap();
        assert_eq!((request.retire(), as_it_was), (Token(token), status));
    }

    fn full(tokens: &[u64]) -> Space {
        let mut space = Space::new(true);
        tokens.iter().for_each(|&token| refused(&mut space, token));
        space
    }

    /// A request that is not submitted, and need not complete.
    fn request_kept(operation: Operation) -> std::mem::ManuallyDrop<Request> {
        std::mem::ManuallyDrop::new(request(operation, 99))
    }

    #[test]
    fn all_waiting_requests_follow_once_the_first_finds_space() {
        let mut space = full(&[1, 2]);
        assert!(space.holds_back(&request_kept(WRITE)) && space.waiting() == 2);
        space.keep(request(WRITE, 3));
        assert_eq!(next(&mut space), ("none", vec![]));
        assert!(space.concerns(Status::NoSpace) && !space.concerns(Status::Done), "nothing is being retried");
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![1]));
        assert!(space.concerns(Status::Done));
        // Nothing else is retried meanwhile, and the retried request still counts as waiting.
        space.may_have_space();
        assert_eq!((next(&mut space), space.waiting()), (("none", vec![]), 3));
        refused(&mut space, 1);
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![1]));
        answered(&mut space, 1, Status::Done);
        assert_eq!((next(&mut space), space.is_full()), (("start", vec![2, 3]), false));
        refused(&mut space, 4);
        assert_eq!(next(&mut space), ("none", vec![]), "the space that was found is for those only");
        assert_eq!(next_at(&mut space, 0, Fate::Refused), ("refuse", vec![4]));
    }

    #[test]
    fn only_requests_that_may_need_space_wait() {
        let mut space = full(&[1]);
        for operation in [Operation::Read, Operation::Flush, Operation::Discard, Operation::Extents { depths: false }] {
            assert!(!space.holds_back(&request_kept(operation)), "{operation:?}");
        }
        assert!(!Space::new(true).holds_back(&request_kept(WRITE)));
        // A flush that finds no space for metadata waits too.
        assert!(space.completed(request(Operation::Flush, 2), Status::NoSpace, 0).is_none());
        for (status, at_limit) in [(Status::Failed, false), (Status::Done, false), (Status::NoSpace, true)] {
            let mut write = request(WRITE, 3);
            write.at_limit = at_limit;
            space.completed(write, status, 0).unwrap().0.retire();
        }
        assert_eq!(next_at(&mut space, 0, Fate::Refused), ("refuse", vec![1, 2]), "no peer is left");
    }

    #[test]
    fn closing_fails_new_and_waiting_requests_at_once() {
        let mut space = full(&[1, 2]);
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![1]));
        space.close();
        assert_eq!(next(&mut space), ("refuse", vec![2]));
        answered(&mut space, 1, Status::NoSpace);
        assert!(!space.is_full());
        answered(&mut Space::new(false), 1, Status::NoSpace);
    }

    #[test]
    fn returned_requests_are_never_retried() {
        let mut space = full(&[1, 2, 3]);
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![1]));
        let wanted = |space: &mut Space| {
            let requests = space.recall(|token| token.0 < 3);
            requests.into_iter().map(|request| request.retire().0).collect::<Vec<_>>()
        };
        assert_eq!(wanted(&mut space), [2]);
        refused(&mut space, 1);
        assert_eq!((wanted(&mut space), space.waiting()), (vec![1], 1));
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![3]));
        answered(&mut space, 3, Status::Done);
        assert!(!space.is_full());
    }

    #[test]
    fn the_first_request_is_retried_every_five_seconds() {
        let mut space = full(&[1, 2]);
        assert_eq!((space.retry_at(), next_at(&mut space, RETRY - 1, Fate::Begun)), (Some(RETRY), ("none", vec![])));
        assert_eq!(next_at(&mut space, RETRY, Fate::Begun), ("start", vec![1]));
        assert_eq!((space.retry_at(), next_at(&mut space, 10 * RETRY, Fate::Begun)), (None, ("none", vec![])));
        assert!(space.completed(request(WRITE, 1), Status::NoSpace, RETRY + 1).is_none());
        assert_eq!(
            (space.retry_at(), next_at(&mut space, 2 * RETRY, Fate::Begun)),
            (Some(2 * RETRY + 1), ("none", vec![]))
        );
        assert_eq!(next_at(&mut space, 0, Fate::Refused), ("refuse", vec![1, 2]));
        assert_eq!(space.retry_at(), None);
    }
}
