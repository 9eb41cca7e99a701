//! Requests that find no space on the storage, if they are to wait for it (`--when-full wait`).
//!
//! It knows no disk and no server: it only queues requests and returns them. Once a request waits, all later ones that
//! may need space wait behind it; the first is retried from time to time, and when it has found space, so are all
//! others. Reads, discards and flushes continue: a flush waits only if it finds no space itself.
//!
//! Invariants: each queued request is returned once; a timer exists only while the queue is not empty.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use disk::{Operation, Request, Status, Token};
use transport::{Interest, Timer, Watch, WatchKey};

/// Time until it is retried without a notification that there may be space.
const AGAIN: Duration = Duration::from_secs(5);

/// The requests that wait for space.
#[derive(Debug)]
pub struct Full {
    /// Whether they are to wait at all.
    wait: bool,
    waiting: VecDeque<Request>,
    /// The request with which it is being tried.
    probe: Option<Token>,
    stirred: Stirred,
    timer: Option<Timer>,
    /// It was tried in vain.
    again: bool,
}

/// What has happened to those that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stirred {
    Not,
    /// There may be space.
    ToTry,
    /// There is space, or nobody is to wait any more.
    ToGo,
}

/// What is to be done about those that wait.
#[derive(Debug)]
pub enum Next {
    /// To be submitted: the first one, or all, since the first one has found space.
    Submit(VecDeque<Request>),
    /// To be answered that there is no space.
    Refuse(VecDeque<Request>),
    /// Nothing.
    Nothing,
}

impl Full {
    /// Nothing waits.
    pub fn new(wait: bool) -> Full {
        let (waiting, stirred) = (VecDeque::new(), Stirred::Not);
        Full { wait, waiting, probe: None, stirred, timer: None, again: false }
    }

    /// Whether something waits for space.
    pub fn is_full(&self) -> bool {
        !self.waiting.is_empty() || self.probe.is_some()
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + usize::from(self.probe.is_some())
    }

    /// Whether a new request must wait behind the others.
    pub fn holds_back(&self, request: &Request) -> bool {
        self.is_full()
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

    /// Keeps a request that has found no space, if it is to wait; any other is handed back.
    pub fn judge(&mut self, request: Request, status: Status) -> Option<(Request, Status)> {
        let is_probe = self.probe.take_if(|probe| *probe == request.token()).is_some();
        let changes = request.operation().is_write() || request.operation() == Operation::Flush;
        if self.wait && status == Status::NoSpace && changes && !request.at_limit {
            self.again |= is_probe;
            // What was tried stays the first.
            if is_probe {
                self.waiting.push_front(request)
            } else {
                self.waiting.push_back(request)
            }
            return None;
        }
        if is_probe {
            // It has found space, or its failure has nothing to do with that.
            self.stirred = Stirred::ToGo;
        }
        Some((request, status))
    }

    /// Hands out those of the requests that wait which are wanted back. The one with which it is being tried is not
    /// among them: it is under way.
    pub fn recall(&mut self, is_wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        let (wanted, others) = self.waiting.drain(..).partition(|request| is_wanted(request.token()));
        self.waiting = others;
        Vec::from(wanted)
    }

    /// The requests that wait and are not under way.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.waiting.iter()
    }

    /// There may be space again.
    pub fn stir(&mut self) {
        if self.probe.is_none() && !self.waiting.is_empty() && self.stirred == Stirred::Not {
            self.stirred = Stirred::ToTry;
        }
    }

    /// Nobody is to wait any more.
    pub fn stop(&mut self) {
        (self.wait, self.stirred) = (false, Stirred::ToGo);
    }

    /// Whether [`Full::next`] and [`Full::mind_timer`] have something to do. `alone`: there is no client left to wait
    /// for.
    pub fn needs_care(&self, alone: bool) -> bool {
        let deserted = alone && !self.waiting.is_empty();
        deserted || self.stirred != Stirred::Not || self.again || self.is_full() != self.timer.is_some()
    }

    /// What is to be done now.
    pub fn next(&mut self, alone: bool) -> Next {
        let stirred = std::mem::replace(&mut self.stirred, Stirred::Not);
        match stirred {
            _ if self.waiting.is_empty() => Next::Nothing,
            _ if alone || !self.wait => Next::Refuse(std::mem::take(&mut self.waiting)),
            Stirred::ToGo => Next::Submit(std::mem::take(&mut self.waiting)),
            Stirred::ToTry => {
                let first: VecDeque<Request> = self.waiting.pop_front().into_iter().collect();
                self.probe = first.front().map(Request::token);
                Next::Submit(first)
            }
            Stirred::Not => Next::Nothing,
        }
    }

    /// Has a timer run while something waits, and only then. Without one, nothing may wait.
    pub fn mind_timer(&mut self, watch: &mut dyn Watch, key: WatchKey) -> io::Result<()> {
        let minded = match (self.is_full(), &self.timer) {
            (true, None) => begin(watch, key).map(|timer| self.timer = Some(timer)),
            (true, Some(timer)) if self.again => timer.set(AGAIN),
            (false, Some(_)) => {
                watch.forget(key);
                self.timer = None;
                Ok(())
            }
            (true, Some(_)) | (false, None) => Ok(()),
        };
        self.again = false;
        minded.inspect_err(|_| self.stop())
    }
}

fn begin(watch: &mut dyn Watch, key: WatchKey) -> io::Result<Timer> {
    let timer = Timer::new()?;
    watch.watch(timer.as_fd(), Interest::Read, key)?;
    timer.set(AGAIN)?;
    Ok(timer)
}

#[cfg(test)]
mod test {
    use std::os::fd::BorrowedFd;

    use disk::{DiskOffset, Geometry, Span};
    use memory::Segments;

    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
    const WRITE: Operation = Operation::Write { durable: false };
    const KEY: WatchKey = WatchKey(1);

    struct Watched(Vec<WatchKey>);

    impl Watch for Watched {
        fn watch(&mut self, _: BorrowedFd<'_>, _: Interest, key: WatchKey) -> io::Result<()> {
            self.0.push(key);
            Ok(())
        }

        fn forget(&mut self, key: WatchKey) {
            self.0.retain(|other| *other != key);
        }
    }

    fn request(operation: Operation, token: u64) -> Request {
        let len = if operation == Operation::Flush { 0 } else { 512 };
        let memory =
            if matches!(operation, Operation::Read | WRITE) { Segments::zeroed(len) } else { Segments::empty() };
        let len = u64::try_from(len).unwrap();
        Request::new(operation, Span { at: DiskOffset(0), len }, memory, Token(token), &GEOMETRY).unwrap()
    }

    /// Which requests are handed out.
    fn tokens(next: Next) -> (&'static str, Vec<u64>) {
        let (word, requests) = match next {
            Next::Submit(requests) => ("submit", requests),
            Next::Refuse(requests) => ("refuse", requests),
            Next::Nothing => ("nothing", VecDeque::new()),
        };
        (word, requests.into_iter().map(|request| request.retire().0).collect())
    }

    fn full(tokens: &[u64]) -> Full {
        let mut full = Full::new(true);
        tokens.iter().for_each(|&token| assert!(full.judge(request(WRITE, token), Status::NoSpace).is_none()));
        full
    }

    #[test]
    fn all_waiting_requests_follow_once_the_first_finds_space() {
        let mut full = full(&[1, 2]);
        assert!(full.holds_back(&request_kept(WRITE)) && full.waiting() == 2);
        full.keep(request(WRITE, 3));
        assert_eq!(tokens(full.next(false)), ("nothing", vec![]));
        assert!(full.concerns(Status::NoSpace) && !full.concerns(Status::Done), "nothing is being tried");
        full.stir();
        assert_eq!(tokens(full.next(false)), ("submit", vec![1]));
        assert!(full.concerns(Status::Done));
        // Nothing else is tried meanwhile, and what is tried waits still.
        full.stir();
        assert_eq!((tokens(full.next(false)), full.waiting()), (("nothing", vec![]), 3));
        assert!(full.judge(request(WRITE, 1), Status::NoSpace).is_none());
        full.stir();
        assert_eq!(tokens(full.next(false)), ("submit", vec![1]));
        full.judge(request(WRITE, 1), Status::Done).unwrap().0.retire();
        assert_eq!((tokens(full.next(false)), full.is_full()), (("submit", vec![2, 3]), false));
    }

    /// A request that is not submitted, and thus not owed an answer.
    fn request_kept(operation: Operation) -> std::mem::ManuallyDrop<Request> {
        std::mem::ManuallyDrop::new(request(operation, 99))
    }

    #[test]
    fn only_requests_that_may_need_space_wait() {
        let full_now = full(&[1]);
        for operation in [Operation::Read, Operation::Flush, Operation::Discard, Operation::Extents { depths: false }] {
            assert!(!full_now.holds_back(&request_kept(operation)), "{operation:?}");
        }
        assert!(!Full::new(true).holds_back(&request_kept(WRITE)));
        let mut full_now = full_now;
        // A flush that finds no space for metadata waits too.
        assert!(full_now.judge(request(Operation::Flush, 2), Status::NoSpace).is_none());
        for (status, at_limit) in [(Status::Failed, false), (Status::Done, false), (Status::NoSpace, true)] {
            let mut write = request(WRITE, 3);
            write.at_limit = at_limit;
            full_now.judge(write, status).unwrap().0.retire();
        }
        assert_eq!(tokens(full_now.next(true)), ("refuse", vec![1, 2]), "nobody is there any more");
    }

    #[test]
    fn ending_the_wait_fails_new_and_waiting_requests_at_once() {
        let mut full = full(&[1, 2]);
        full.stir();
        assert_eq!(tokens(full.next(false)), ("submit", vec![1]));
        full.stop();
        assert_eq!(tokens(full.next(false)), ("refuse", vec![2]));
        let (probe, status) = full.judge(request(WRITE, 1), Status::NoSpace).unwrap();
        assert_eq!((probe.retire(), status, full.is_full()), (Token(1), Status::NoSpace, false));
        Full::new(false).judge(request(WRITE, 1), Status::NoSpace).unwrap().0.retire();
    }

    #[test]
    fn returned_requests_are_never_retried() {
        let mut full = full(&[1, 2, 3]);
        full.stir();
        assert_eq!(tokens(full.next(false)), ("submit", vec![1]));
        let wanted = |full: &mut Full| {
            let requests = full.recall(|token| token.0 < 3);
            requests.into_iter().map(|request| request.retire().0).collect::<Vec<_>>()
        };
        assert_eq!(wanted(&mut full), [2]);
        assert!(full.judge(request(WRITE, 1), Status::NoSpace).is_none());
        assert_eq!((wanted(&mut full), full.waiting()), (vec![1], 1));
        full.stir();
        assert_eq!(tokens(full.next(false)), ("submit", vec![3]));
        full.judge(request(WRITE, 3), Status::Done).unwrap().0.retire();
        assert!(!full.is_full());
    }

    #[test]
    fn a_timer_exists_while_a_request_waits() {
        let mut watched = Watched(Vec::new());
        let mut full = full(&[1]);
        assert!(full.needs_care(false));
        full.mind_timer(&mut watched, KEY).unwrap();
        assert_eq!((watched.0.as_slice(), full.needs_care(false)), (&[KEY][..], false));
        assert_eq!(tokens(full.next(true)), ("refuse", vec![1]));
        full.mind_timer(&mut watched, KEY).unwrap();
        assert!(watched.0.is_empty() && full.timer.is_none() && !full.needs_care(true));
    }
}
