//! Worker threads for blocking steps: each performs one step at a time with plain system calls.
//!
//! They are started on demand, and end after a second without work: an idle engine has none, and causes no wake-ups.
//! The kernel's own workers for io_uring (io-wq) do the same work, but the last of them stays in the process forever
//! and wakes every five seconds; so nothing that would need them is submitted to the ring (`uring`).
//!
//! **Kinds.** Reads, writes, syncs and deallocations have separate threads: a sync may take seconds and must not hold
//! up a write, nor the reverse. The queue of each kind is FIFO.
//!
//! **Direct I/O** blocks while it is submitted (locks, allocation), seldom while it is in flight. So a thread does not
//! wait for a direct transfer: it submits it through Linux AIO and takes the next, so that many can be in flight.
//!
//! **Results** of threads wait in a queue, those of AIO in its ring. An eventfd wakes the engine's thread; workers
//! signal it only if that thread has announced that it will sleep ([`Workers::prepare_to_sleep`]).
//!
//! If the system refuses a thread (RLIMIT_NPROC, a cgroup limit, seccomp) or AIO, I/O is slower but does not fail: if
//! no thread of the kind exists, the caller performs the step itself, and without AIO the threads wait.
//!
//! Invariant: a kind with work has a thread. The memory that a step points to, and its file, stay in use until its
//! result has been taken.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::aio_context::{AioContext, AioEvent, Iocb, Submitter};
use crate::call::Call;
use crate::flight::IoStep;
use crate::flight_slab::Slot;
use crate::{Cache, ImageFile, thread};

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
enum StepKind {
    Reads,
    Writes,
    Syncs,
    Deallocations,
}

const STEP_KINDS: [StepKind; 4] = [StepKind::Reads, StepKind::Writes, StepKind::Syncs, StepKind::Deallocations];

/// The steps of one kind, and their threads.
#[derive(Default)]
struct KindQueue {
    queue: VecDeque<QueuedStep>,
    threads: usize,
    /// Threads waiting for work, including woken ones that have not resumed yet.
    idle: usize,
}

/// A step for a thread.
struct QueuedStep {
    slot: Slot,
    call: Call,
    /// The AIO context and request through which to submit it, if it is a direct transfer.
    submission: Option<(Submitter, Iocb)>,
}

/// The result of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOutcome {
    pub(crate) slot: Slot,
    /// A count, or a negative errno.
    pub(crate) result: i32,
}

/// State shared by the threads and the engine.
#[derive(Default)]
struct WorkersState {
    reads: KindQueue,
    writes: KindQueue,
    syncs: KindQueue,
    deallocations: KindQueue,
    done: Vec<StepOutcome>,
    /// Steps that are queued or running.
    unfinished: usize,
    /// The engine's thread sleeps, or is about to, and must be woken.
    asleep: bool,
    /// No more steps will be submitted.
    closed: bool,
}

struct WorkersShared {
    state: Mutex<WorkersState>,
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
    shared: Arc<WorkersShared>,
    /// For direct transfers, created with the first; the inner value is `None` if the system refuses one.
    context: Option<Option<AioContext>>,
    /// The files of steps whose results have not been taken yet, by slot.
    file_slot: Box<[Option<Arc<File>>]>,
    /// The number of these files.
    outstanding: usize,
}

impl Workers {
    /// Workers for this many slots, with no threads yet.
    pub(crate) fn new(slots: usize) -> io::Result<Workers> {
        let shared = WorkersShared {
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

    /// Returns true if there are outstanding results.
    pub(crate) fn are_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// Queues `step` for a thread. If there is no thread and none can be started, performs it inline and returns its
    /// result.
    ///
    /// # Safety
    /// The memory that the step points to stays valid and in place until its result has been taken or returned here.
    pub(crate) unsafe fn submit(&mut self, slot: Slot, file: &ImageFile, step: &IoStep<'_>) -> Option<i32> {
        let (kind, fd, data) = (StepKind::of(step), file.as_fd().as_raw_fd(), u64::from(slot));
        let direct = file.options().cache == Cache::None;
        let request = match *step {
            IoStep::Read { at, parts, .. } if direct => Some(Iocb::read(at, parts, fd, data)),
            IoStep::Write { at, parts } if direct => Some(Iocb::write(at, parts, fd, data)),
            _ => None,
        };
        let submission = request.and_then(|request| Some((self.submitter()?, request)));
        let queued = QueuedStep { slot, call: Call::of(fd, step), submission };
        let mut state = self.shared.lock();
        let place = state.queue_of(kind);
        let enough = place.queue.len() < place.idle || place.threads >= kind.threads_max(queued.submission.is_none());
        if !enough {
            let shared = self.shared.clone();
            match thread::spawn(kind.thread_name(), STACK, move || shared.run_thread(kind)) {
                Ok(_) => place.threads += 1,
                // One of the existing threads will perform it.
                Err(_) if place.threads > 0 => {}
                Err(_) => {
                    drop(state);
                    // SAFETY: this function's contract.
                    return Some(unsafe { queued.call.run() });
                }
            }
        }
        place.queue.push_back(queued);
        let waiting = place.idle > 0;
        state.unfinished += 1;
        drop(state);
        if waiting {
            self.shared.condvar(kind).notify_one();
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
    pub(crate) fn drain(&mut self, into: &mut Vec<StepOutcome>) -> io::Result<()> {
        let before = into.len();
        let mut state = self.shared.lock();
        state.asleep = false;
        into.append(&mut state.done);
        drop(state);
        if let Some(Some(context)) = &mut self.context {
            context.harvest(|event| into.push(StepOutcome::of(event)))?;
        }
        for outcome in into.iter().skip(before) {
            if let Some(place) = self.file_slot(outcome.slot) {
                *place = None;
            }
        }
        self.outstanding -= into.len() - before;
        Ok(())
    }

    /// Announces that the engine's thread is about to sleep: the next result signals the event. Returns `false` if
    /// there is a result already, so that it must not sleep.
    pub(crate) fn prepare_to_sleep(&self) -> bool {
        let mut state = self.shared.lock();
        state.asleep = state.done.is_empty();
        state.asleep
    }

    /// Waits until all submitted steps are done. No more may follow.
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
    /// Finishes all submitted steps, and ends the threads.
    fn drop(&mut self) {
        self.finish();
        self.shared.lock().closed = true;
        for kind in STEP_KINDS {
            self.shared.condvar(kind).notify_all();
        }
    }
}

impl StepKind {
    fn of(step: &IoStep<'_>) -> StepKind {
        match step {
            IoStep::Read { .. } => StepKind::Reads,
            IoStep::Write { .. } | IoStep::WriteCached { .. } => StepKind::Writes,
            IoStep::SyncData => StepKind::Syncs,
            IoStep::Deallocate { .. } => StepKind::Deallocations,
        }
    }

    /// The maximum number of threads. Direct transfers are not waited for, and if submitting one blocks it is mostly on
    /// a lock of the file: more threads would only queue for it. Reads through the page cache each wait for a different
    /// page.
    fn threads_max(self, waits: bool) -> usize {
        match self {
            StepKind::Reads if waits => 16,
            StepKind::Reads | StepKind::Writes | StepKind::Syncs | StepKind::Deallocations => 4,
        }
    }

    fn thread_name(self) -> &'static str {
        match self {
            StepKind::Reads => "reads",
            StepKind::Writes => "writes",
            StepKind::Syncs => "syncs",
            StepKind::Deallocations => "deallocations",
        }
    }
}

impl StepOutcome {
    fn of(event: AioEvent) -> StepOutcome {
        let Ok(slot) = Slot::try_from(event.data) else { unreachable!("a request's data is its slot") };
        StepOutcome { slot, result: i32::try_from(event.res).unwrap_or(i32::MAX) }
    }
}

impl WorkersState {
    fn queue_of(&mut self, kind: StepKind) -> &mut KindQueue {
        match kind {
            StepKind::Reads => &mut self.reads,
            StepKind::Writes => &mut self.writes,
            StepKind::Syncs => &mut self.syncs,
            StepKind::Deallocations => &mut self.deallocations,
        }
    }
}

impl WorkersShared {
    fn lock(&self) -> MutexGuard<'_, WorkersState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn condvar(&self, kind: StepKind) -> &Condvar {
        match kind {
            StepKind::Reads => &self.reads,
            StepKind::Writes => &self.writes,
            StepKind::Syncs => &self.syncs,
            StepKind::Deallocations => &self.deallocations,
        }
    }

    /// The main loop of a thread.
    fn run_thread(&self, kind: StepKind) {
        while let Some(step) = self.next(kind) {
            let outcome = self.run(&step);
            self.complete(outcome);
        }
    }

    /// The next step, or `None` if the thread should end.
    fn next(&self, kind: StepKind) -> Option<QueuedStep> {
        let mut state = self.lock();
        let mut timed_out_once = false;
        loop {
            let closed = state.closed;
            let place = state.queue_of(kind);
            if let Some(step) = place.queue.pop_front() {
                return Some(step);
            }
            if closed || timed_out_once {
                place.threads -= 1;
                return None;
            }
            place.idle += 1;
            let woken = self.condvar(kind).wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = woken.0;
            timed_out_once = woken.1.timed_out();
            let place = state.queue_of(kind);
            place.idle -= 1;
        }
    }

    /// Performs a step; `None` if it was submitted to AIO.
    fn run(&self, step: &QueuedStep) -> Option<StepOutcome> {
        if let Some((submitter, request)) = step.submission {
            let request = request.signalling(self.event.as_raw_fd());
            // SAFETY: the context lives until nothing is unfinished, the memory by the contract of `Workers::submit`.
            if unsafe { submitter.submit(request) }.is_ok() {
                return None;
            }
        }
        // SAFETY: what the call points to is valid by the contract of `Workers::submit`.
        Some(StepOutcome { slot: step.slot, result: unsafe { step.call.run() } })
    }

    /// Records that a step is finished.
    fn complete(&self, outcome: Option<StepOutcome>) {
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
                assert!(workers.submit(slot, &file, &IoStep::SyncData).is_none());
                let free = IoStep::Deallocate { at: 0, len: 4096 };
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
