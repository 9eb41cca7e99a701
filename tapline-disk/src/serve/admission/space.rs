//! Requests that find no space on the storage, if they are to wait for it (`--when-full wait`).
//!
//! It knows no disk, no server and no clock: it only queues requests and returns them. Once a request waits, all later
//! ones that may need space wait behind it; the first is retried from time to time, and when it has found space, so are
//! all others. Reads, discards and flushes continue: a flush waits only if it finds no space itself.
//!
//! Invariants: each queued request is returned once; while one waits and none is being retried, [`Space::retry_at`]
//! says when the first is.

use std::collections::VecDeque;

use disk::{Operation, Request, Status, Token};

use super::{Released, planted};

/// Time until it is retried without a notification that there may be space, in nanoseconds.
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

/// What may become of the requests that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// They are begun when there may be space.
    Begun,
    /// They are held: others must end before one begins.
    Held,
    /// They are refused: there is no peer left to wait for.
    Refused,
}

/// What is known of the space since the first request was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hint {
    None,
    /// There may be some.
    Maybe,
    /// The first request has found some.
    Found,
}

impl Space {
    /// Nothing waits. `wait`: whether requests may.
    pub fn new(wait: bool) -> Space {
        Space { wait, waiting: VecDeque::new(), probe: None, hint: Hint::None, retry_at: 0 }
    }

    /// Whether something waits for space.
    #[inline]
    pub fn is_full(&self) -> bool {
        !self.waiting.is_empty() || self.probe.is_some()
    }

    /// How many requests wait, with the one that is being retried.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + usize::from(self.probe.is_some())
    }

    /// Whether a new request must wait behind the others.
    pub fn holds_back(&self, request: &Request) -> bool {
        let is_full = if planted!(OvertakesProbe) { !self.waiting.is_empty() } else { self.is_full() };
        is_full
            && self.wait
            && matches!(
                request.operation(),
                Operation::Write { .. } | Operation::Patch { .. } | Operation::WriteZeroes { .. }
            )
    }

    /// Keeps a request that is held back.
    pub fn keep(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// Whether a completion must be checked: nearly none must, and requests are large.
    #[inline]
    pub fn concerns(&self, status: Status) -> bool {
        status == Status::NoSpace || self.probe.is_some()
    }

    /// Keeps a request that has found no space, if it is to wait; any other is returned with its status.
    pub fn completed(&mut self, request: Request, status: Status, now: u64) -> Option<(Request, Status)> {
        let is_probe = self.probe.take_if(|probe| *probe == request.token()).is_some();
        let changes = request.operation().is_write() || request.operation() == Operation::Flush;
        if self.wait && status == Status::NoSpace && changes && !request.at_limit {
            if is_probe || self.waiting.is_empty() || self.hint == Hint::Found {
                // Perhaps it had found some, but not enough for all.
                self.hint = Hint::None;
                self.retry_at = if planted!(RetriesInThePast) { 0 } else { now.saturating_add(RETRY) };
            }
            // The one that was retried stays the first.
            if is_probe {
                self.waiting.push_front(request)
            } else {
                self.waiting.push_back(request)
            }
            return None;
        }
        if is_probe && !planted!(ForgetsThoseBehind) {
            // It has found space, or its failure has nothing to do with that.
            self.hint = Hint::Found;
        }
        Some((request, status))
    }

    /// Returns the waiting requests that their peers want back. The one that is being retried is not among them: the
    /// disk has it.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let (wanted, others) = self.waiting.drain(..).partition(|request| is_wanted(request.token()));
        self.waiting = others;
        Vec::from(wanted)
    }

    /// The requests that wait, without the one that is being retried.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.waiting.iter()
    }

    /// There may be space again.
    pub fn may_have_space(&mut self) {
        if self.probe.is_none() && !self.waiting.is_empty() && self.hint == Hint::None {
            self.hint = Hint::Maybe;
        }
    }

    /// No request waits any more, now and later.
    pub fn close(&mut self) {
        self.wait = false;
    }

    /// When the first request is retried, unless something is known of the space before.
    pub fn retry_at(&self) -> Option<u64> {
        (!self.waiting.is_empty() && self.probe.is_none()).then_some(self.retry_at)
    }

    /// Whether [`Space::next`] returns a request.
    pub fn is_due(&self, now: u64, fate: Fate) -> bool {
        let may_have_space = || self.hint != Hint::None || self.retry_at().is_some_and(|at| at <= now);
        let leaves = !self.wait || fate == Fate::Refused || fate == Fate::Begun && may_have_space();
        !self.waiting.is_empty() && leaves
    }

    /// A request that leaves the queue now: the first, to be retried; any, once that has found space; or one that is
    /// refused, since none may wait any more.
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

    /// Which requests leave at that time, and how.
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

    /// A request that is not submitted, and thus not owed an answer.
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
        // Nothing else is retried meanwhile, and the one that is waits still.
        space.may_have_space();
        assert_eq!((next(&mut space), space.waiting()), (("none", vec![]), 3));
        refused(&mut space, 1);
        space.may_have_space();
        assert_eq!(next(&mut space), ("start", vec![1]));
        answered(&mut space, 1, Status::Done);
        assert_eq!((next(&mut space), space.is_full()), (("start", vec![2, 3]), false));
        refused(&mut space, 4);
        assert_eq!(next(&mut space), ("none", vec![]), "what was found counts for those only");
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
