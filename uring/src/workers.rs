//! Threads of ours for what would block: each does one step at a time with plain system calls.
//!
//! They are started when there is work, and end after a second without: an idle engine has none, and none that wakes.
//! The kernel's own workers for io_uring (io-wq) do the same work, but the last of them stays in the process and wakes
//! every five seconds for ever; so the ring is never asked for anything that would need them (`uring`).
//!
//! **Lanes.** Reads, writes, syncs and deallocations have threads of their own: a sync may take seconds and must not hold
//! up a write, nor the reverse. Within a lane the first to come is the first to be begun.
//!
//! **Direct I/O** blocks while it is begun (locks, allocation), seldom while it is under way. So a thread does not wait
//! for a direct transfer: it submits it through Linux AIO and goes on to the next, and storage has many at once.
//!
//! **Results** of threads wait in a queue, those of AIO in its ring. An eventfd wakes who sleeps for them; threads signal it
//! only to who has said that he sleeps ([`Workers::may_sleep`]).
//!
//! A machine that refuses a thread (RLIMIT_NPROC, a cgroup's limit, seccomp) or AIO makes things slower and nothing fail:
//! with no other thread in the lane the caller does the step himself, and without AIO threads wait.
//!
//! Invariant: a lane with work has a thread. What a step points to, and its file, are in use until its result was taken.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::aio_context::{AioContext, Event, Iocb, Submitter};
use crate::call::Call;
use crate::flight::Step;
use crate::flights::Slot;
use crate::{Cache, ImageFile};

/// A thread without work ends after this: long enough that a stream of syncs goes by one thread, short enough that an
/// idle disk soon has none.
const IDLE: Duration = Duration::from_secs(1);

/// A system call and the few frames of a thread's own beginning; the least that threads can have is 16 KiB.
const STACK: usize = 64 << 10;

/// Transfers at once in the AIO context; of more than these the threads wait for the end themselves. All contexts of
/// a machine together have 65536 (fs.aio-max-nr), and most disks never need theirs.
const SUBMITTED_MAX: u32 = 64;

/// What has threads of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneId {
    Reads,
    Writes,
    Syncs,
    Deallocations,
}

const LANES: [LaneId; 4] = [LaneId::Reads, LaneId::Writes, LaneId::Syncs, LaneId::Deallocations];

/// The steps of one kind, and who does them.
#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    threads: usize,
    /// Threads that wait for work, woken ones included until they are back.
    idle: usize,
}

/// A step that a thread is to do.
struct Job {
    slot: Slot,
    call: Call,
    /// As what and where to submit it, if it need not be waited for.
    submission: Option<(Submitter, Iocb)>,
}

/// A step that was done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) slot: Slot,
    /// A count, or an errno as a negative number.
    pub(crate) result: i32,
}

/// What threads share with the engine.
#[derive(Default)]
struct State {
    reads: Lane,
    writes: Lane,
    syncs: Lane,
    deallocations: Lane,
    done: Vec<Outcome>,
    /// Jobs that are queued or being done.
    unfinished: usize,
    /// The engine's thread sleeps, or is about to, and is to be woken.
    asleep: bool,
    /// There will be no more work.
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    reads: Condvar,
    writes: Condvar,
    syncs: Condvar,
    deallocations: Condvar,
    /// Nothing is unfinished.
    finished: Condvar,
    event: OwnedFd,
}

/// The threads of one engine.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    /// For direct transfers, from the first on; `None` inside where the machine has none for us.
    context: Option<Option<AioContext>>,
    /// The files of steps that were given and whose results were not yet taken, by slot.
    held: Box<[Option<Arc<File>>]>,
    /// How many these are.
    out: usize,
}

impl Workers {
    /// No threads yet, for steps of so many slots.
    pub(crate) fn new(slots: usize) -> io::Result<Workers> {
        let shared = Shared {
            state: Mutex::default(),
            reads: Condvar::new(),
            writes: Condvar::new(),
            syncs: Condvar::new(),
            deallocations: Condvar::new(),
            finished: Condvar::new(),
            event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        };
        let held = (0..slots).map(|_| None).collect();
        Ok(Workers { shared: Arc::new(shared), context: None, held, out: 0 })
    }

    /// What becomes readable when a result has come while the engine's thread sleeps. It is never read.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Whether there are results to wait for.
    pub(crate) fn are_at_work(&self) -> bool {
        self.out > 0
    }

    /// Has a thread do `step`; answers its result if there is no thread and none can be had: it is done then.
    ///
    /// # Safety
    /// What the step points to stays valid and in its place until its result was taken, or was answered here.
    pub(crate) unsafe fn give(&mut self, slot: Slot, file: &ImageFile, step: &Step<'_>) -> Option<i32> {
        let (lane, fd, data) = (LaneId::of(step), file.as_fd().as_raw_fd(), u64::from(slot));
        let direct = file.options().cache == Cache::None;
        let request = match *step {
            Step::Read { at, parts } if direct => Some(Iocb::read(at, parts, fd, data)),
            Step::Write { at, parts } if direct => Some(Iocb::write(at, parts, fd, data)),
            _ => None,
        };
        let submission = request.and_then(|request| Some((self.submitter()?, request)));
        let job = Job { slot, call: Call::of(fd, step), submission };
        let mut state = self.shared.lock();
        let place = state.lane(lane);
        let enough = place.queue.len() < place.idle || place.threads >= lane.threads_max(job.submission.is_none());
        if !enough {
            match start(&self.shared, lane) {
                Ok(()) => place.threads = place.threads.saturating_add(1),
                // It waits for one of those that there are.
                Err(_) if place.threads > 0 => {}
                Err(_) => {
                    drop(state);
                    // SAFETY: the contract of this function.
                    return Some(unsafe { job.call.run() });
                }
            }
        }
        place.queue.push_back(job);
        let waiting = place.idle > 0;
        state.unfinished = state.unfinished.saturating_add(1);
        drop(state);
        if waiting {
            self.shared.work(lane).notify_one();
        }
        if let Some(place) = self.held(slot) {
            *place = Some(file.share());
        }
        self.out = self.out.saturating_add(1);
        None
    }

    fn submitter(&mut self) -> Option<Submitter> {
        let context = self.context.get_or_insert_with(|| AioContext::new(SUBMITTED_MAX).ok());
        context.as_ref().map(AioContext::submitter)
    }

    fn held(&mut self, slot: Slot) -> Option<&mut Option<Arc<File>>> {
        self.held.get_mut(usize::try_from(slot).ok()?)
    }

    /// Moves the results that there are into `into`.
    pub(crate) fn take(&mut self, into: &mut Vec<Outcome>) -> io::Result<()> {
        let before = into.len();
        let mut state = self.shared.lock();
        state.asleep = false;
        into.append(&mut state.done);
        drop(state);
        if let Some(Some(context)) = &mut self.context {
            context.harvest(|event| into.push(Outcome::of(event)))?;
        }
        for outcome in into.iter().skip(before) {
            if let Some(place) = self.held(outcome.slot) {
                *place = None;
            }
        }
        self.out = self.out.saturating_sub(into.len().saturating_sub(before));
        Ok(())
    }

    /// Says that the engine's thread goes to sleep unless a thread has a result already: whether it may. The next
    /// result wakes it through the event.
    pub(crate) fn may_sleep(&self) -> bool {
        let mut state = self.shared.lock();
        state.asleep = state.done.is_empty();
        state.asleep
    }

    /// Waits until all that was given is done. There is no more to come.
    pub(crate) fn finish(&mut self) {
        let mut state = self.shared.lock();
        while state.unfinished > 0 {
            state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        // This waits for what the kernel has.
        self.context = None;
        self.held = Box::default();
    }
}

impl Drop for Workers {
    /// Does all that was given, and lets the threads end.
    fn drop(&mut self) {
        self.finish();
        self.shared.lock().closed = true;
        for lane in LANES {
            self.shared.work(lane).notify_all();
        }
    }
}

impl LaneId {
    fn of(step: &Step<'_>) -> LaneId {
        match step {
            Step::Read { .. } => LaneId::Reads,
            Step::Write { .. } | Step::WriteCached { .. } => LaneId::Writes,
            Step::SyncData => LaneId::Syncs,
            Step::Deallocate { .. } => LaneId::Deallocations,
        }
    }

    /// As many as there may be. Direct transfers are not waited for, and where their submission blocks it is mostly for
    /// a lock of the file: more threads would only wait in line. Reads through the page cache each wait for another page.
    fn threads_max(self, waits: bool) -> usize {
        match self {
            LaneId::Reads if waits => 16,
            LaneId::Reads | LaneId::Writes | LaneId::Syncs | LaneId::Deallocations => 4,
        }
    }

    fn thread_name(self) -> &'static str {
        match self {
            LaneId::Reads => "reads",
            LaneId::Writes => "writes",
            LaneId::Syncs => "syncs",
            LaneId::Deallocations => "deallocations",
        }
    }
}

impl Outcome {
    fn of(event: Event) -> Outcome {
        let Ok(slot) = Slot::try_from(event.data) else { unreachable!("requests are named by their slots") };
        Outcome { slot, result: i32::try_from(event.res).unwrap_or(i32::MAX) }
    }
}

impl State {
    fn lane(&mut self, lane: LaneId) -> &mut Lane {
        match lane {
            LaneId::Reads => &mut self.reads,
            LaneId::Writes => &mut self.writes,
            LaneId::Syncs => &mut self.syncs,
            LaneId::Deallocations => &mut self.deallocations,
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, lane: LaneId) -> &Condvar {
        match lane {
            LaneId::Reads => &self.reads,
            LaneId::Writes => &self.writes,
            LaneId::Syncs => &self.syncs,
            LaneId::Deallocations => &self.deallocations,
        }
    }

    /// The life of a thread.
    fn serve(&self, lane: LaneId) {
        while let Some(job) = self.next(lane) {
            let outcome = self.run(&job);
            self.hand_in(outcome);
        }
    }

    /// What to do next; nothing: the thread is to end.
    fn next(&self, lane: LaneId) -> Option<Job> {
        let mut state = self.lock();
        let mut late = false;
        loop {
            let closed = state.closed;
            let place = state.lane(lane);
            if let Some(job) = place.queue.pop_front() {
                return Some(job);
            }
            if closed || late {
                place.threads = place.threads.saturating_sub(1);
                return None;
            }
            place.idle = place.idle.saturating_add(1);
            let woken = self.work(lane).wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            late = woken.1.timed_out();
            let place = state.lane(lane);
            place.idle = place.idle.saturating_sub(1);
        }
    }

    /// Does a job; `None`: it was submitted.
    fn run(&self, job: &Job) -> Option<Outcome> {
        if let Some((submitter, request)) = job.submission {
            let request = request.signalling(self.event.as_raw_fd());
            // SAFETY: the context lives until nothing is unfinished, the memory by the contract of `Workers::give`.
            if unsafe { submitter.submit(request) }.is_ok() {
                return None;
            }
        }
        // SAFETY: what the call points to is valid by the contract of `Workers::give`.
        Some(Outcome { slot: job.slot, result: unsafe { job.call.run() } })
    }

    /// A job is finished.
    fn hand_in(&self, outcome: Option<Outcome>) {
        let mut state = self.lock();
        state.unfinished = state.unfinished.saturating_sub(1);
        if state.unfinished == 0 {
            self.finished.notify_all();
        }
        let Some(outcome) = outcome else { return };
        state.done.push(outcome);
        let wake = std::mem::take(&mut state.asleep);
        drop(state);
        if wake {
            // It fails only with a count near 2^64, which is as readable as any other.
            rustix::io::write(&self.event, &1u64.to_ne_bytes()).ok();
        }
    }
}

/// Has all threads allocate from one heap. What they allocate is next to nothing; a heap for each would be 8 KiB a thread,
/// which stay when it has ended.
fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Starts a thread. It gets no signals: those are for the thread that sleeps in the engine, which they are to wake.
fn start(shared: &Arc<Shared>, lane: LaneId) -> io::Result<()> {
    static ONCE: Once = Once::new();
    ONCE.call_once(share_heap);
    let shared = shared.clone();
    let builder = thread::Builder::new().name(lane.thread_name().to_owned()).stack_size(STACK);
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call fills one set, the second reads it and fills the other; both live until the end.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let started = builder.spawn(move || shared.serve(lane));
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.map(drop)
}

#[cfg(test)]
mod test {
    use crate::OpenOptions;

    use super::*;

    #[test]
    fn threads_are_bounded_and_each_step_is_done_once() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 4096]).unwrap();
        let options = OpenOptions { write: true, cache: Cache::None, lock: true };
        let file = ImageFile::open(&path, options).unwrap();
        let mut workers = Workers::new(200).unwrap();
        for slot in 0..100 {
            // SAFETY: neither step points to memory.
            unsafe {
                assert!(workers.give(slot, &file, &Step::SyncData).is_none());
                let free = Step::Deallocate { at: 0, len: 4096 };
                assert!(workers.give(100 + slot, &file, &free).is_none());
            }
            let state = workers.shared.lock();
            assert!(state.syncs.threads <= 4 && state.deallocations.threads <= 4);
        }
        drop(file);
        let mut outcomes = Vec::new();
        while workers.are_at_work() {
            workers.take(&mut outcomes).unwrap();
        }
        let mut slots: Vec<Slot> = outcomes.iter().map(|outcome| outcome.slot).collect();
        slots.sort();
        assert_eq!(slots, (0..200).collect::<Vec<Slot>>());
        assert!(outcomes.iter().all(|outcome| outcome.result == 0));
        assert!(ImageFile::open(&path, options).is_ok(), "a thread still has the file, and its lock");
    }
}
