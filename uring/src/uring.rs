//! The io_uring engine: one thread, one ring, one wait.
//!
//! It passes steps of `flight` to the kernel and results back, and watches descriptors through the same ring. It has no
//! timer: when idle, its thread sleeps in one `io_uring_enter` without a timeout, and no other thread exists.
//!
//! **io-wq is never used.** The kernel would pass requests that block to worker threads that it adds to the process,
//! the last of which never ends and wakes every five seconds (Linux 6.1 to 6.18). So transfers are submitted with
//! RWF_NOWAIT, and refused ones go to our own threads (`workers`), as syncs and deallocations always do. Reads through
//! the page cache do not have the flag on file systems where io_uring waits for pages without a thread.
//!
//! Invariant: `in_kernel` counts the slots whose request the kernel has or will get from the ring. While it is not
//! zero, or a thread is processing a step, the slab is not freed: dropping the engine waits, or leaks the slab if
//! waiting fails.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use memory::Buffer;

use crate::engine::slots;
use crate::file_table::{FILES_MAX, FileTable};
use crate::flight::IoConstraints;
use crate::flight_slab::{FlightSlab, Settled, Slot};
use crate::nowait_backoff::NowaitBackoff;
use crate::polls::{PollId, Polls};
use crate::registered_buffers::RegisteredBuffers;
use crate::workers::{StepOutcome, Workers};
use crate::{EngineError, ImageFile, ring, sqe};

/// User data: a slot, or with this bit the id of a watch.
const POLL: u64 = 1 << 63;

/// User data of requests whose result is ignored.
const IGNORED: u64 = u64::MAX;

/// User data of the poll on the workers' event.
const WORKERS: u64 = u64::MAX - 1;

/// A ring has an entry for each operation, but at least this many, for changes of watches. A full ring is not an error:
/// it is submitted and filled again.
const ENTRIES_MIN: u32 = 16;

/// POLLIN as io_uring encodes it.
const READABLE: u32 = libc::EPOLLIN.unsigned_abs();

/// An empty slot in the kernel's file table (io_uring_register(2), "sparse").
const NO_FILE: RawFd = -1;

/// A change of a watch to be submitted.
#[derive(Clone, Copy)]
enum WatchChange {
    Arm(PollId),
    Disarm(PollId),
    /// Arms the poll on the workers' event.
    ArmWorkers,
}

/// The maximum number of completions taken at a time. Storage may complete many at once; the first are answered while
/// the peer, and then the storage, have nothing to do.
const COMPLETIONS: usize = 8;

/// An engine over io_uring. It belongs to the thread that opened it.
pub struct Uring {
    ring: IoUring,
    files: FileTable,
    in_flight: FlightSlab,
    registered: RegisteredBuffers,
    /// Steps to be submitted to the ring, or to a worker if the ring does not do them.
    steps: VecDeque<Slot>,
    /// Steps for a worker: those that the ring does not do or has refused.
    blocking: VecDeque<Slot>,
    changes: VecDeque<WatchChange>,
    in_kernel: usize,
    workers: Workers,
    nowait_backoff: NowaitBackoff,
    polls: Polls,
    ready: Vec<u64>,
    /// The maximum duration of the next sleep.
    sleep_limit: Option<Duration>,
    /// Scratch space.
    outcomes: Vec<StepOutcome>,
    /// The kernel accepts submissions of one thread only (SINGLE_ISSUER).
    not_send: PhantomData<*const ()>,
}

impl Uring {
    /// An engine for up to `depth` concurrent operations on `files`, numbered from 0.
    pub fn open(files: Vec<ImageFile>, depth: usize) -> Result<Uring, EngineError> {
        let slots = slots(depth)?;
        let files = FileTable::new(files)?;
        let mut fds = [NO_FILE; FILES_MAX];
        for (place, (_, file)) in fds.iter_mut().zip(files.iter()) {
            *place = file.as_fd().as_raw_fd();
        }
        let ring = ring::open(slots.max(ENTRIES_MIN).next_power_of_two(), &fds)?;
        let workers = Workers::new(depth).map_err(|cause| EngineError::failed("create an eventfd", cause))?;
        Ok(Uring {
            ring,
            files,
            in_flight: FlightSlab::new(slots),
            registered: RegisteredBuffers::default(),
            steps: VecDeque::with_capacity(depth),
            blocking: VecDeque::new(),
            changes: VecDeque::from([WatchChange::ArmWorkers]),
            in_kernel: 0,
            workers,
            nowait_backoff: NowaitBackoff::new(),
            polls: Polls::default(),
            ready: Vec::new(),
            sleep_limit: None,
            outcomes: Vec::new(),
            not_send: PhantomData,
        })
    }

    /// Limits the next sleep in [`Io::reap`], which then may return with no completion.
    pub fn limit_sleep(&mut self, most: Duration) {
        self.sleep_limit = Some(most);
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): immediately if it is ready
    /// now, then at each new event (edge triggered: an eventfd need not be read at all). There may be spurious reports,
    /// but none is missed. Watching a key again replaces the old watch.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.forget(key);
        let id = self.polls.add(fd, write, key);
        self.changes.push_back(WatchChange::Arm(id));
        Ok(())
    }

    /// Stops reporting `key`.
    pub fn forget(&mut self, key: u64) {
        if let Some(id) = self.polls.remove(key) {
            self.changes.push_back(WatchChange::Disarm(id));
            self.ready.retain(|&ready| ready != key);
        }
    }

    /// Moves the keys reported since the last call into `into`, without duplicates.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.ready);
    }

    /// Discards a pending report of `key`.
    pub(crate) fn ignore_ready(&mut self, key: u64) {
        self.ready.retain(|&ready| ready != key);
    }

    /// The open file with this id.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        self.files.get(id)
    }

    /// Registers a file; returns its id.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let id = self.files.free_id()?;
        self.register(id, file.as_fd().as_raw_fd())?;
        self.files.put(id, Some(file));
        Ok(id)
    }

    /// Registers a file under an id chosen by another engine, replacing the file that has this id.
    pub(crate) fn put(&mut self, id: FileId, file: ImageFile) -> Result<(), EngineError> {
        self.register(id, file.as_fd().as_raw_fd())?;
        self.files.put(id, Some(file));
        Ok(())
    }

    /// Replaces the handle of a file; see [`crate::Engine::replace`]. The kernel keeps the old one for requests in
    /// flight.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        self.files.check_replacement(id, &file)?;
        self.register(id, file.as_fd().as_raw_fd())?;
        self.files.put(id, Some(file)).ok_or(EngineError::NoSuchFile(id))
    }

    /// Removes a file that has nothing in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.in_flight.uses(id) {
            return Err(EngineError::FileBusy(id));
        }
        if self.files.get(id).is_none() {
            return Err(EngineError::NoSuchFile(id));
        }
        self.register(id, NO_FILE)?;
        self.files.put(id, None).ok_or(EngineError::NoSuchFile(id))
    }

    /// Registers a buffer with the kernel, so that transfers need not look up its pages. The buffer is kept until it is
    /// unregistered, or as long as the engine.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        let registered = self.registered.add(&self.ring, buffer);
        registered.map_err(|cause| EngineError::failed("register memory with io_uring", cause))
    }

    /// Unregisters a buffer.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        let removed = self.registered.remove(&self.ring, buffer);
        removed.map_err(|cause| EngineError::failed("unregister memory from io_uring", cause))
    }

    /// The registered buffers.
    pub(crate) fn registered(&self) -> Vec<Arc<Buffer>> {
        self.registered.all()
    }

    /// Updates a slot of the kernel's own file table.
    fn register(&mut self, id: FileId, fd: RawFd) -> Result<(), EngineError> {
        self.nowait_backoff.reset(id);
        let changed = self.ring.submitter().register_files_update(u32::from(id.0), &[fd]);
        changed.map(drop).map_err(|cause| EngineError::failed("update the file table of the io_uring", cause))
    }

    /// Moves queued work into the ring, or to the workers.
    fn fill(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.files.begin_batch();
        while !self.nothing_queued() {
            let had_room = self.fill_ring();
            while let Some(slot) = self.blocking.pop_front() {
                self.submit_to_worker(slot, done);
            }
            if !had_room {
                self.enter(0)?;
                if self.ring.submission().is_full() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Fills the ring. Returns true if there was room for all steps and changes.
    fn fill_ring(&mut self) -> bool {
        let mut entries = self.ring.submission();
        let mut room = entries.capacity() - entries.len();
        while room > 0 {
            let entry = if let Some(slot) = self.steps.pop_front() {
                let transfer = self.in_flight.transfer(slot);
                let entry = match self.files.refuses(transfer)
                    || self.nowait_backoff.is_active() && !self.nowait_backoff.should_try(transfer)
                {
                    true => None,
                    false => sqe::build(&self.in_flight, slot, &self.registered),
                };
                match entry {
                    Some(_) => self.in_kernel += 1,
                    None => self.blocking.push_back(slot),
                }
                entry
            } else if let Some(change) = self.changes.pop_front() {
                watch_entry(change, &self.polls, &self.workers)
            } else {
                return true;
            };
            let Some(entry) = entry else { continue };
            // SAFETY: the parts and the memory of a step stay in the slab until its completion has been taken out of
            // the ring (`flight_slab`), and the slab outlives the ring's use of them (`drop`). Polls have no memory.
            let pushed = unsafe { entries.push(&entry) };
            if pushed.is_err() {
                unreachable!("there was room");
            }
            room -= 1;
        }
        self.steps.is_empty() && self.changes.is_empty()
    }

    /// Passes the step of `slot` to a worker.
    fn submit_to_worker(&mut self, slot: Slot, done: &mut Vec<FileDone>) {
        if self.files.refuses(self.in_flight.transfer(slot)) {
            return self.settle(slot, -libc::EIO, done);
        }
        let (file, step) = self.in_flight.step(slot);
        let Some(file) = self.files.get(file) else { unreachable!("a file in use is not removed") };
        // SAFETY: the parts and the memory of a step stay in the slab until its result has been taken (`flight_slab`),
        // and the slab outlives the workers' use of them (`drop`).
        let result = unsafe { self.workers.submit(slot, file, &step) };
        if let Some(result) = result {
            self.settle(slot, result, done);
        }
    }

    fn settle(&mut self, slot: Slot, result: i32, done: &mut Vec<FileDone>) {
        match self.in_flight.settle(slot, result, done) {
            Settled::Resubmit => self.steps.push_back(slot),
            Settled::Done => self.files.note_written(done.last()),
        }
    }

    /// Collects the results of the workers.
    fn reap_workers(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if !self.workers.are_busy() {
            return Ok(());
        }
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let taken = self.workers.drain(&mut outcomes);
        for outcome in outcomes.drain(..) {
            self.settle(outcome.slot, outcome.result, done);
        }
        self.outcomes = outcomes;
        taken.map_err(|cause| EngineFailed { what: "io_getevents", errno: cause.raw_os_error().unwrap_or(libc::EIO) })
    }

    /// Returns true if there is nothing to do: the common case for callers that poll often.
    #[inline]
    fn is_idle(&mut self) -> bool {
        if !self.nothing_queued() || self.workers.are_busy() {
            return false;
        }
        let entries = self.ring.submission();
        let idle = entries.is_empty() && !entries.taskrun() && !entries.cq_overflow();
        drop(entries);
        idle && self.ring.completion().is_empty()
    }

    /// Submits queued work and collects results.
    #[inline(never)]
    fn submit_and_reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        loop {
            self.fill(done)?;
            let sleep = until == Until::Any && done.len() == before && self.prepare_to_sleep();
            let uninterrupted = self.enter(usize::from(sleep))?;
            self.harvest(done);
            self.reap_workers(done)?;
            if until == Until::Now || done.len() > before || !self.ready.is_empty() || !uninterrupted {
                return Ok(());
            }
        }
    }

    /// Returns true if nothing is waiting for an entry in the ring, or for a worker.
    fn nothing_queued(&self) -> bool {
        self.steps.is_empty() && self.changes.is_empty() && self.blocking.is_empty()
    }

    /// Submits the ring, and sleeps until there are `want` completions. Makes no system call if there is nothing to
    /// submit, to wait for, or to fetch. Returns `false` if a signal or the sleep limit came first.
    fn enter(&mut self, want: usize) -> Result<bool, EngineFailed> {
        let submission = self.ring.submission();
        let pending = count_of(submission.len());
        let idle = pending == 0 && !submission.taskrun() && !submission.cq_overflow();
        drop(submission);
        if want == 0 && idle {
            return Ok(true);
        }
        // Requests that complete immediately are fetched by the same call.
        let flags = EnterFlags::GETEVENTS.bits();
        let submitter = self.ring.submitter();
        let limit = self.sleep_limit.filter(|_| want > 0);
        let entered = match limit {
            None => {
                // SAFETY: entries were pushed with what they point to kept alive (`fill`); there is no argument.
                unsafe { submitter.enter::<libc::sigset_t>(pending, count_of(want), flags, None) }
            }
            Some(limit) => {
                let limit = Timespec::from(limit);
                let arguments = SubmitArgs::new().timespec(&limit);
                let flags = flags | EnterFlags::EXT_ARG.bits();
                // SAFETY: as above; the argument lives as long as the call, and the flag says what it is.
                unsafe { submitter.enter(pending, count_of(want), flags, Some(&arguments)) }
            }
        };
        match entered {
            // The number of submitted entries does not show whether the sleep timed out.
            Ok(_) => Ok(limit.is_none()),
            Err(cause) => match cause.raw_os_error() {
                Some(libc::EINTR | libc::ETIME) => Ok(false),
                // Too many completions not yet taken, or no memory for requests at the moment: take some, try again.
                Some(libc::EBUSY | libc::EAGAIN) => Ok(true),
                errno => Err(EngineFailed { what: "io_uring_enter", errno: errno.unwrap_or(libc::EIO) }),
            },
        }
    }

    /// Returns true if nothing is ready, so that the thread may sleep. From now on the workers wake the ring.
    fn prepare_to_sleep(&mut self) -> bool {
        let empty = self.ready.is_empty() && self.ring.completion().is_empty();
        empty && (!self.workers.are_busy() || self.workers.prepare_to_sleep())
    }

    /// Processes up to [`COMPLETIONS`] completions of the ring. The rest stay there for the next call.
    fn harvest(&mut self, done: &mut Vec<FileDone>) {
        for completion in self.ring.completion().take(COMPLETIONS) {
            let (name, result) = (completion.user_data(), completion.result());
            if name == IGNORED {
                continue;
            }
            if name == WORKERS {
                // Their results are collected in any case.
                if !cqueue::more(completion.flags()) {
                    self.changes.push_back(WatchChange::ArmWorkers);
                }
                continue;
            }
            if name & POLL != 0 {
                let id = name & !POLL;
                let Some(fired) = self.polls.fired(id, result, cqueue::more(completion.flags())) else { continue };
                if !self.ready.contains(&fired.key) {
                    self.ready.push(fired.key);
                }
                if fired.ended {
                    self.changes.push_back(WatchChange::Arm(id));
                }
                continue;
            }
            let Ok(slot) = Slot::try_from(name) else { unreachable!("user data is a slot, or has the watch bit") };
            self.in_kernel -= 1;
            if let Some(errno) = nowait_errno(result) {
                self.nowait_backoff.record_refusal(self.in_flight.transfer(slot), errno);
                self.blocking.push_back(slot);
                continue;
            }
            if self.nowait_backoff.is_active() {
                self.nowait_backoff.record_success(self.in_flight.transfer(slot));
            }
            match self.in_flight.settle(slot, result, done) {
                Settled::Resubmit => self.steps.push_back(slot),
                Settled::Done => self.files.note_written(done.last()),
            }
        }
    }
}

/// The entry for a change, unless the watch was removed meanwhile.
fn watch_entry(change: WatchChange, polls: &Polls, workers: &Workers) -> Option<squeue::Entry> {
    match change {
        WatchChange::Arm(id) => polls.get(id).map(|(fd, events)| poll(fd, events).user_data(POLL | id)),
        // Not PollRemove: that does not remove a poll for which an event is just being delivered.
        WatchChange::Disarm(id) => Some(opcode::AsyncCancel::new(POLL | id).build().user_data(IGNORED)),
        WatchChange::ArmWorkers => Some(poll(workers.event().as_raw_fd(), READABLE).user_data(WORKERS)),
    }
}

/// The errno, if the result may mean that the kernel cannot do a transfer without blocking. These errnos have other
/// causes as well; a worker retries the transfer and gets the actual error.
fn nowait_errno(result: i32) -> Option<i32> {
    if result >= 0 {
        return None;
    }
    let errno = -result;
    matches!(errno, libc::EAGAIN | libc::EOPNOTSUPP | libc::EINVAL).then_some(errno)
}

fn poll(fd: RawFd, events: u32) -> squeue::Entry {
    opcode::PollAdd::new(Fd(fd), events).multi(true).build()
}

fn count_of(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl Io for Uring {
    #[inline(always)]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let constraints = self.files.get(op.file).map(IoConstraints::of);
        let Some(constraints) = constraints else {
            unreachable!("an operation on file {}, which does not exist", op.file.0)
        };
        let slot = self.in_flight.submit(op, constraints)?;
        self.steps.push_back(slot);
        Ok(())
    }

    /// Also returns when a watched descriptor is ready, and early when a signal was handled.
    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match until == Until::Now && self.is_idle() {
            true => Ok(()),
            false => {
                let reaped = self.submit_and_reap(until, done);
                self.sleep_limit = None;
                reaped
            }
        }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.files.get(file).map_or(Allocation::Data(len), |file| file.allocated(at, len))
    }
}

impl Drop for Uring {
    /// Waits for requests in the kernel, and closes the files. Operations not yet submitted are discarded.
    fn drop(&mut self) {
        let mut completed = Vec::new();
        self.steps.clear();
        self.changes.clear();
        while self.in_kernel > 0 {
            if self.enter(1).is_err() {
                // The kernel may still write into the slab: it is leaked, and the files stay locked.
                std::mem::forget(std::mem::replace(&mut self.in_flight, FlightSlab::new(0)));
                std::mem::forget(std::mem::take(&mut self.files));
                return;
            }
            self.harvest(&mut completed);
        }
        while let Some(slot) = self.blocking.pop_front() {
            self.submit_to_worker(slot, &mut completed);
        }
        self.workers.finish();
        // The kernel tears down a closed ring asynchronously. The files, and with them their locks and devices, should
        // be free when this returns; if unregistering fails they are freed a moment later. An interrupted call is
        // retried.
        let interrupted = |cause: io::Error| cause.kind() == io::ErrorKind::Interrupted;
        while self.ring.submitter().unregister_files().is_err_and(interrupted) {}
    }
}
