//! Worker threads for blocking steps: each performs one step at a time with plain system calls.
//!
//! They are started on demand, and end after a second without work: an idle engine has none, and nothing wakes. The
//! kernel's own workers for io_uring (io-wq) do the same work, but the last of them stays in the process forever and
//! wakes every five seconds; so the ring is never asked for anything that would need them (`uring`).
//!
//! **Lanes.** Reads, writes, syncs and deallocations have separate threads: a sync may take seconds and must not hold
//! up a write, nor the reverse. Each lane is FIFO.
//!
//! **Direct I/O** blocks while it is submitted (locks, allocation), seldom while it is in flight. So a thread does not
//! wait for a direct transfer: it submits it through Linux AIO and goes on to the next, so that many can be in flight.
//!
//! **Results** of threads wait in a queue, those of AIO in its ring. An eventfd wakes the engine's thread; workers
//! signal it only if that thread has said that it is about to sleep ([`Workers::prepare_to_sleep`]).
//!
//! If the machine refuses a thread (RLIMIT_NPROC, a cgroup limit, seccomp) or AIO, I/O is slower but does not fail:
//! with no other thread in the lane the caller performs the step itself, and without AIO the threads wait.
//!
//! Invariant: a lane with work has a thread. What a step points to, and its file, stay in use until its result has been
//! taken.

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
use crate::flight_slab::Slot;
use crate::{Cache, ImageFile};

/// A thread without work ends after this time: long enough that one thread serves a stream of syncs, short enough that
/// an idle disk soon has none.
const IDLE: Duration = Duration::from_secs(1);

/// Enough for a system call and the few frames of thread startup; the minimum is 16 KiB.
const STACK: usize = 64 << 10;

/// Concurrent transfers in the AIO context; beyond these the threads wait for completion themselves. All contexts of a
/// machine together have 65536 (fs.aio-max-nr), and most disks never need theirs.
const SUBMITTED_MAX: u32 = 64;

/// A kind of step that has its own threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LaneId {
    Reads,
    Writes,
    Syncs,
    Deallocations,
}

const LANES: [LaneId; 4] = [LaneId::Reads, LaneId::Writes, LaneId::Syncs, LaneId::Deallocations];

/// The steps of one kind, and their threads.
#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    threads: usize,
    /// Threads waiting for work, including woken ones that have not resumed yet.
    idle: usize,
}

/// A step for a thread.
struct Job {
    slot: Slot,
    call: Call,
    /// Where and as what to submit it, if it need not be waited for.
    submission: Option<(Submitter, Iocb)>,
}

/// The result of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) slot: Slot,
    /// A count, or a negative errno.
    pub(crate) result: i32,
}

/// State shared by the threads and the engine.
#[derive(Default)]
struct State {
    reads: Lane,
    writes: Lane,
    syncs: Lane,
    deallocations: Lane,
    done: Vec<Outcome>,
    /// Jobs that are queued or running.
    unfinished: usize,
    /// The engine's thread sleeps, or is about to, and must be woken.
    asleep: bool,
    /// No more jobs will be submitted.
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    reads: Condvar,
    writes: Condvar,
    syncs: Condvar,
    deallocations: Condvar,
    /// Signalled when nothing is unfinished.
    finished: Condvar,
    event: OwnedFd,
}

/// The threads of one engine.
pub(crate) struct Workers {
    shared: Arc<Shared>,
    /// For direct transfers, created with the first; the inner value is `None` if the machine refuses one.
    context: Option<Option<AioContext>>,
    /// The files of steps whose results have not been taken yet, by slot.
    file_slot: Box<[Option<Arc<File>>]>,
    /// How many of these there are.
    outstanding: usize,
}

impl Workers {
    /// Workers for this many slots, with no threads yet.
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
        let file_slot = (0..slots).map(|_| None).collect();
        Ok(Workers { shared: Arc::new(shared), context: None, file_slot, outstanding: 0 })
    }

    /// Becomes readable when a result arrives while the engine's thread sleeps. It is never read.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Whether there are outstanding results.
    pub(crate) fn are_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// Has a thread perform `step`. If there is no thread and none can be started, performs it inline and returns its
    /// result.
    ///
    /// # Safety
    /// What the step points to stays valid and in place until its result has been taken, or was returned here.
    pub(crate) unsafe fn submit(&mut self, slot: Slot, file: &ImageFile, step: &Step<'_>) -> Option<i32> {
        let (lane, fd, data) = (LaneId::of(step), file.as_fd().as_raw_fd(), u64::from(slot));
        let direct = file.options().cache == Cache::None;
        let request = match *step {
            Step::Read { at, parts, .. } if direct => Some(Iocb::read(at, parts, fd, data)),
            Step::Write { at, parts } if direct => Some(Iocb::write(at, parts, fd, data)),
            _ => None,
        };
        let submission = request.and_then(|request| Some((self.submitter()?, request)));
        let job = Job { slot, call: Call::of(fd, step), submission };
        let mut state = self.shared.lock();
        let place = state.lane(lane);
        let enough = place.queue.len() < place.idle || place.threads >= lane.threads_max(job.submission.is_none());
        if !enough {
            match spawn_thread(&self.shared, lane) {
                Ok(()) => place.threads += 1,
                // It waits for one of the existing threads.
                Err(_) if place.threads > 0 => {}
                Err(_) => {
                    drop(state);
                    // SAFETY: this function's contract.
                    return Some(unsafe { job.call.run() });
                }
            }
        }
        place.queue.push_back(job);
        let waiting = place.idle > 0;
        state.unfinished += 1;
        drop(state);
        if waiting {
            self.shared.condvar(lane).notify_one();
        }
        if let Some(place) = self.file_slot(slot) {
            *place = Some(file.share());
        }
        self.outstanding += 1;
        None
    }

    fn submitter(&mut self) -> Option<Submitter> {
        let context = self.context.get_or_insert_with(|| AioContext::new(SUBMITTED_MAX).ok());
        context.as_ref().map(AioContext::submitter)
    }

    fn file_slot(&mut self, slot: Slot) -> Option<&mut Option<Arc<File>>> {
        self.file_slot.get_mut(usize::try_from(slot).ok()?)
    }

    /// Moves the available results into `into`.
    pub(crate) fn drain(&mut self, into: &mut Vec<Outcome>) -> io::Result<()> {
        let before = into.len();
        let mut state = self.shared.lock();
        state.asleep = false;
        into.append(&mut state.done);
        drop(state);
        if let Some(Some(context)) = &mut self.context {
            context.harvest(|event| into.push(Outcome::of(event)))?;
        }
        for outcome in into.iter().skip(before) {
            if let Some(place) = self.file_slot(outcome.slot) {
                *place = None;
            }
        }
        self.outstanding -= into.len() - before;
        Ok(())
    }

    /// Announces that the engine's thread is about to sleep. Returns whether it may: `false` if there is a result
    /// already. The next result wakes it through the event.
    pub(crate) fn prepare_to_sleep(&self) -> bool {
        let mut state = self.shared.lock();
        state.asleep = state.done.is_empty();
        state.asleep
    }

    /// Waits until all submitted jobs are done. No more may follow.
    pub(crate) fn finish(&mut self) {
        let mut state = self.shared.lock();
        while state.unfinished > 0 {
            state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        // This waits for requests in the kernel.
        self.context = None;
        self.file_slot = Box::default();
    }
}

impl Drop for Workers {
    /// Finishes all submitted jobs, and lets the threads end.
    fn drop(&mut self) {
        self.finish();
        self.shared.lock().closed = true;
        for lane in LANES {
            self.shared.condvar(lane).notify_all();
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

    /// The maximum number of threads. Direct transfers are not waited for, and if submitting one blocks it is mostly on
    /// a lock of the file: more threads would only queue for it. Reads through the page cache each wait for a different
    /// page.
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
        let Ok(slot) = Slot::try_from(event.data) else { unreachable!("a request's data is its slot") };
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

    fn condvar(&self, lane: LaneId) -> &Condvar {
        match lane {
            LaneId::Reads => &self.reads,
            LaneId::Writes => &self.writes,
            LaneId::Syncs => &self.syncs,
            LaneId::Deallocations => &self.deallocations,
        }
    }

    /// The main loop of a thread.
    fn run_thread(&self, lane: LaneId) {
        while let Some(job) = self.next(lane) {
            let outcome = self.run(&job);
            self.complete(outcome);
        }
    }

    /// The next job, or `None` if the thread should end.
    fn next(&self, lane: LaneId) -> Option<Job> {
        let mut state = self.lock();
        let mut timed_out_once = false;
        loop {
            let closed = state.closed;
            let place = state.lane(lane);
            if let Some(job) = place.queue.pop_front() {
                return Some(job);
            }
            if closed || timed_out_once {
                place.threads -= 1;
                return None;
            }
            place.idle += 1;
            let woken = self.condvar(lane).wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            timed_out_once = woken.1.timed_out();
            let place = state.lane(lane);
            place.idle -= 1;
        }
    }

    /// Performs a job; `None` if it was submitted to AIO.
    fn run(&self, job: &Job) -> Option<Outcome> {
        if let Some((submitter, request)) = job.submission {
            let request = request.signalling(self.event.as_raw_fd());
            // SAFETY: the context lives until nothing is unfinished, the memory by the contract of `Workers::submit`.
            if unsafe { submitter.submit(request) }.is_ok() {
                return None;
            }
        }
        // SAFETY: what the call points to is valid by the contract of `Workers::submit`.
        Some(Outcome { slot: job.slot, result: unsafe { job.call.run() } })
    }

    /// Records that a job is finished.
    fn complete(&self, outcome: Option<Outcome>) {
        let mut state = self.lock();
        state.unfinished -= 1;
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

/// Has all threads allocate from one heap. They allocate almost nothing; a heap each would cost 8 KiB per thread, which
/// remain when it has ended.
fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it sets a number.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Starts a thread. It gets no signals: those are meant to wake the thread that sleeps in the engine.
fn spawn_thread(shared: &Arc<Shared>, lane: LaneId) -> io::Result<()> {
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
    let started = builder.spawn(move || shared.run_thread(lane));
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    started.map(drop)
}

#[cfg(test)]
mod test {
    use crate::OpenOptions;

    use super::*;

    #[test]
    fn the_number_of_threads_is_bounded_and_each_step_runs_once() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 4096]).unwrap();
        let options = OpenOptions { write: true, cache: Cache::None, lock: true };
        let file = ImageFile::open(&path, options).unwrap();
        let mut workers = Workers::new(200).unwrap();
        for slot in 0..100 {
            // SAFETY: neither step points to memory.
            unsafe {
                assert!(workers.submit(slot, &file, &Step::SyncData).is_none());
                let free = Step::Deallocate { at: 0, len: 4096 };
                assert!(workers.submit(100 + slot, &file, &free).is_none());
            }
            let state = workers.shared.lock();
            assert!(state.syncs.threads <= 4 && state.deallocations.threads <= 4);
        }
        drop(file);
        let mut outcomes = Vec::new();
        while workers.are_busy() {
            workers.drain(&mut outcomes).unwrap();
        }
        let mut slots: Vec<Slot> = outcomes.iter().map(|outcome| outcome.slot).collect();
        slots.sort();
        assert_eq!(slots, (0..200).collect::<Vec<Slot>>());
        assert!(outcomes.iter().all(|outcome| outcome.result == 0));
        assert!(ImageFile::open(&path, options).is_ok(), "a thread still holds the file and its lock");
    }
}
