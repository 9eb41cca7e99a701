//! The io_uring engine: one thread, one ring, one wait.
//!
//! It carries steps of `flight` to the kernel and results back, and watches descriptors through the same ring. It has
//! no timer: idle, its thread sleeps in one `io_uring_enter` without a timeout, and there is no other.
//!
//! **Nothing is left to io-wq.** What the kernel cannot do without blocking it would give to worker threads that it adds to
//! the process, the last of which never ends and wakes every five seconds (Linux 6.1 to 6.18). So transfers are offered
//! with RWF_NOWAIT, and what is refused goes to threads of ours (`workers`), as syncs and deallocations do at once.
//!
//! Invariant: `in_kernel` counts the slots whose request the kernel has or will get from the ring. While it is not
//! zero, or a step is with a thread, the slab is not freed: dropping the engine waits, or leaks the slab where waiting is
//! refused.

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOp, Io, Until};
use io_uring::types::Fd;
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use memory::Buffer;

use crate::engine::slots;
use crate::file_table::{FILES_MAX, FileTable};
use crate::flight::Terms;
use crate::flights::{Flights, Settled, Slot};
use crate::nowait::Nowait;
use crate::polls::{PollId, Polls};
use crate::registered::Registered;
use crate::workers::{Outcome, Workers};
use crate::{EngineError, ImageFile, entry, ring};

/// User data: a slot, or with this bit the number of a watch.
const POLL: u64 = 1 << 63;

/// User data of requests whose result says nothing.
const IGNORED: u64 = u64::MAX;

/// User data of the poll on the event of the threads.
const WORKERS: u64 = u64::MAX - 1;

/// A ring has a place for each operation, and at least these, for watches that come and go. A full ring is no
/// obstacle: it is submitted and filled again.
const ENTRIES_MIN: u32 = 16;

/// POLLIN as a poll of the ring has it.
const READABLE: u32 = libc::EPOLLIN.unsigned_abs();

/// A place without a file in the kernel's table (io_uring_register(2), "sparse").
const NOTHING: RawFd = -1;

/// What becomes of a watch.
#[derive(Clone, Copy)]
enum Change {
    Arm(PollId),
    Disarm(PollId),
    /// That of the threads' event.
    ArmWorkers,
}

/// An engine over io_uring. It belongs to the thread that opened it.
pub struct Uring {
    ring: IoUring,
    files: FileTable,
    flights: Flights,
    registered: Registered,
    /// For the ring, or else for a thread.
    steps: VecDeque<Slot>,
    /// For a thread: the ring does not do these, or has refused them.
    blocking: VecDeque<Slot>,
    changes: VecDeque<Change>,
    in_kernel: usize,
    workers: Workers,
    nowait: Nowait,
    polls: Polls,
    ready: Vec<u64>,
    /// Scratch.
    outcomes: Vec<Outcome>,
    /// The kernel accepts submissions of one thread only (SINGLE_ISSUER).
    one_thread: PhantomData<*const ()>,
}

impl Uring {
    /// An engine for `depth` operations at once on `files`, numbered from 0.
    pub fn open(files: Vec<ImageFile>, depth: usize) -> Result<Uring, EngineError> {
        let slots = slots(depth)?;
        let files = FileTable::new(files)?;
        let mut fds = [NOTHING; FILES_MAX];
        for (place, (_, file)) in fds.iter_mut().zip(files.iter()) {
            *place = file.as_fd().as_raw_fd();
        }
        let ring = ring::open(slots.max(ENTRIES_MIN).next_power_of_two(), &fds)?;
        let workers = Workers::new(depth).map_err(|cause| EngineError::failed("create an eventfd", cause))?;
        Ok(Uring {
            ring,
            files,
            flights: Flights::new(slots),
            registered: Registered::default(),
            steps: VecDeque::with_capacity(depth),
            blocking: VecDeque::new(),
            changes: VecDeque::from([Change::ArmWorkers]),
            in_kernel: 0,
            workers,
            nowait: Nowait::new(),
            polls: Polls::default(),
            ready: Vec::new(),
            outcomes: Vec::new(),
            one_thread: PhantomData,
        })
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): at once if it is so now,
    /// then at each new event (edge triggered: an eventfd need not be read at all). A report may come once too often,
    /// never once too seldom. Watching a key again replaces it.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.forget(key);
        let id = self.polls.add(fd, write, key);
        self.changes.push_back(Change::Arm(id));
        Ok(())
    }

    /// No more reports for `key`.
    pub fn forget(&mut self, key: u64) {
        if let Some(id) = self.polls.remove(key) {
            self.changes.push_back(Change::Disarm(id));
            self.ready.retain(|&ready| ready != key);
        }
    }

    /// Moves the keys reported since the last call into `into`, each once.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.ready);
    }

    /// A file it works on.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        self.files.get(id)
    }

    /// One file more, under the number that is answered.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let id = self.files.vacancy()?;
        self.register(id, file.as_fd().as_raw_fd())?;
        self.files.put(id, Some(file));
        Ok(id)
    }

    /// Another way to the same file; see [`crate::Engine::replace`]. The kernel keeps the old one for the requests that
    /// it has.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        self.files.check_replacement(id, &file)?;
        self.register(id, file.as_fd().as_raw_fd())?;
        self.files.put(id, Some(file)).ok_or(EngineError::NoSuchFile(id))
    }

    /// Lets go of a file on which nothing is in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.flights.uses(id) {
            return Err(EngineError::FileBusy(id));
        }
        if self.files.get(id).is_none() {
            return Err(EngineError::NoSuchFile(id));
        }
        self.register(id, NOTHING)?;
        self.files.put(id, None).ok_or(EngineError::NoSuchFile(id))
    }

    /// Has the kernel keep the pages of a buffer at hand: reads into it and writes from it need not look them up. The buffer
    /// is kept until it is to be forgotten, or as long as the engine.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        let registered = self.registered.add(&self.ring, buffer);
        registered.map_err(|cause| EngineError::failed("register memory with io_uring", cause))
    }

    /// Lets go of such a buffer.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        let removed = self.registered.remove(&self.ring, buffer);
        removed.map_err(|cause| EngineError::failed("take memory from io_uring", cause))
    }

    /// Changes a place of the kernel's own table of files.
    fn register(&mut self, id: FileId, fd: RawFd) -> Result<(), EngineError> {
        self.nowait.forget(id);
        let changed = self.ring.submitter().register_files_update(u32::from(id.0), &[fd]);
        changed.map(drop).map_err(|cause| EngineError::failed("change the files of the io_uring", cause))
    }

    /// Moves what is queued into the ring, or to the threads.
    fn fill(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        while !self.is_filled() {
            let had_room = self.fill_ring();
            while let Some(slot) = self.blocking.pop_front() {
                self.hand_over(slot, done);
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

    /// Moves what is for the ring into it. Whether there was room.
    fn fill_ring(&mut self) -> bool {
        let mut entries = self.ring.submission();
        let mut room = entries.capacity().saturating_sub(entries.len());
        while room > 0 {
            let entry = if let Some(slot) = self.steps.pop_front() {
                let entry = match self.nowait.has_learned() && !self.nowait.offers(self.flights.transfer(slot)) {
                    true => None,
                    false => entry::of(&self.flights, slot, &self.registered),
                };
                match entry {
                    Some(_) => self.in_kernel = self.in_kernel.saturating_add(1),
                    None => self.blocking.push_back(slot),
                }
                entry
            } else if let Some(change) = self.changes.pop_front() {
                watch_entry(change, &self.polls, &self.workers)
            } else {
                return true;
            };
            let Some(entry) = entry else { continue };
            // SAFETY: the parts and the memory of a step lie in the slab until its completion was taken out of the
            // ring (`flights`), and the slab outlives the ring's use of them (`drop`). Polls have no memory.
            let pushed = unsafe { entries.push(&entry) };
            if pushed.is_err() {
                unreachable!("there was room");
            }
            room = room.saturating_sub(1);
        }
        self.steps.is_empty() && self.changes.is_empty()
    }

    /// Has a thread do the step of `slot`.
    fn hand_over(&mut self, slot: Slot, done: &mut Vec<FileDone>) {
        let (file, step) = self.flights.step(slot);
        let Some(file) = self.files.get(file) else { unreachable!("a file in use is not removed") };
        // SAFETY: the parts and the memory of a step lie in the slab until its result was taken (`flights`), and the slab
        // outlives the threads' use of them (`drop`).
        let result = unsafe { self.workers.give(slot, file, &step) };
        if let Some(result) = result {
            self.settle(slot, result, done);
        }
    }

    fn settle(&mut self, slot: Slot, result: i32, done: &mut Vec<FileDone>) {
        if self.flights.settle(slot, result, done) == Settled::Again {
            self.steps.push_back(slot);
        }
    }

    /// Takes what the threads have done.
    fn collect(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if !self.workers.are_at_work() {
            return Ok(());
        }
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let taken = self.workers.take(&mut outcomes);
        for outcome in outcomes.drain(..) {
            self.settle(outcome.slot, outcome.result, done);
        }
        self.outcomes = outcomes;
        taken.map_err(|cause| EngineFailed { what: "io_getevents", errno: cause.raw_os_error().unwrap_or(libc::EIO) })
    }

    /// Whether there is nothing to do: the common case for who looks often.
    #[inline]
    fn is_quiet(&mut self) -> bool {
        if !self.is_filled() || self.workers.are_at_work() {
            return false;
        }
        let entries = self.ring.submission();
        let quiet = entries.is_empty() && !entries.taskrun() && !entries.cq_overflow();
        drop(entries);
        quiet && self.ring.completion().is_empty()
    }

    /// Submits what is queued, and takes what has come.
    #[inline(never)]
    fn turn(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        loop {
            self.fill(done)?;
            let sleep = until == Until::Any && done.len() == before && self.may_sleep();
            let undisturbed = self.enter(usize::from(sleep))?;
            self.harvest(done);
            self.collect(done)?;
            if until == Until::Now || done.len() > before || !self.ready.is_empty() || !undisturbed {
                return Ok(());
            }
        }
    }

    /// Whether nothing waits for a place in the ring, or for a thread.
    fn is_filled(&self) -> bool {
        self.steps.is_empty() && self.changes.is_empty() && self.blocking.is_empty()
    }

    /// Submits the ring, and sleeps until there are `want` completions. Without a system call where there is nothing
    /// to submit, to wait for, or to fetch. `false`: a signal came first.
    fn enter(&mut self, want: usize) -> Result<bool, EngineFailed> {
        let submission = self.ring.submission();
        let pending = count_of(submission.len());
        let idle = pending == 0 && !submission.taskrun() && !submission.cq_overflow();
        drop(submission);
        if want == 0 && idle {
            return Ok(true);
        }
        // What completes at once is fetched by the same call.
        let flags = EnterFlags::GETEVENTS.bits();
        let submitter = self.ring.submitter();
        // SAFETY: entries were pushed with what they point into kept (`fill`); there is no argument.
        let entered = unsafe { submitter.enter::<libc::sigset_t>(pending, count_of(want), flags, None) };
        match entered {
            Ok(_) => Ok(true),
            Err(cause) => match cause.raw_os_error() {
                Some(libc::EINTR) => Ok(false),
                // Too many completions not yet taken, or no memory for requests just now: take some, try again.
                Some(libc::EBUSY | libc::EAGAIN) => Ok(true),
                errno => Err(EngineFailed { what: "io_uring_enter", errno: errno.unwrap_or(libc::EIO) }),
            },
        }
    }

    /// Whether nothing has come yet. The threads wake the ring from now on.
    fn may_sleep(&mut self) -> bool {
        let empty = self.ready.is_empty() && self.ring.completion().is_empty();
        empty && (!self.workers.are_at_work() || self.workers.may_sleep())
    }

    /// Takes what the ring holds.
    fn harvest(&mut self, done: &mut Vec<FileDone>) {
        for completion in self.ring.completion() {
            let (name, result) = (completion.user_data(), completion.result());
            if name == IGNORED {
                continue;
            }
            if name == WORKERS {
                // What they have done is taken in any case.
                if !cqueue::more(completion.flags()) {
                    self.changes.push_back(Change::ArmWorkers);
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
                    self.changes.push_back(Change::Arm(id));
                }
                continue;
            }
            let Ok(slot) = Slot::try_from(name) else { unreachable!("user data is a slot, or has the bit of a watch") };
            self.in_kernel = self.in_kernel.saturating_sub(1);
            if let Some(errno) = refusal(result) {
                self.nowait.refused(self.flights.transfer(slot), errno);
                self.blocking.push_back(slot);
                continue;
            }
            if self.nowait.has_learned() {
                self.nowait.accepted(self.flights.transfer(slot));
            }
            if self.flights.settle(slot, result, done) == Settled::Again {
                self.steps.push_back(slot);
            }
        }
    }
}

/// The entry for a change, unless the watch was removed meanwhile.
fn watch_entry(change: Change, polls: &Polls, workers: &Workers) -> Option<squeue::Entry> {
    match change {
        Change::Arm(id) => polls.get(id).map(|(fd, events)| poll(fd, events).user_data(POLL | id)),
        // Not PollRemove: that leaves a poll as it is which is just being told of an event.
        Change::Disarm(id) => Some(opcode::AsyncCancel::new(POLL | id).build().user_data(IGNORED)),
        Change::ArmWorkers => Some(poll(workers.event().as_raw_fd(), READABLE).user_data(WORKERS)),
    }
}

/// Why the kernel does not do a transfer without blocking, if that is what a result says. Some of these have other causes
/// as well, which the thread that tries again will find.
fn refusal(result: i32) -> Option<i32> {
    if result >= 0 {
        return None;
    }
    let errno = result.saturating_neg();
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
        let terms = self.files.get(op.file).map(Terms::of);
        let Some(terms) = terms else { unreachable!("an operation on file {}, which does not exist", op.file.0) };
        let slot = self.flights.board(op, terms)?;
        self.steps.push_back(slot);
        Ok(())
    }

    /// Returns also when a watched descriptor is ready, and early when a signal was handled.
    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match until == Until::Now && self.is_quiet() {
            true => Ok(()),
            false => self.turn(until, done),
        }
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        self.files.get(file).map_or(Allocation::Data(len), |file| file.allocated(at, len))
    }
}

impl Drop for Uring {
    /// Waits for what the kernel has, and frees the files; what the kernel has not seen yet is dropped unseen.
    fn drop(&mut self) {
        let mut ended = Vec::new();
        self.steps.clear();
        self.changes.clear();
        while self.in_kernel > 0 {
            if self.enter(1).is_err() {
                // The kernel may still write into the slab: it stays for ever, and the files stay locked.
                std::mem::forget(std::mem::replace(&mut self.flights, Flights::new(0)));
                std::mem::forget(std::mem::take(&mut self.files));
                return;
            }
            self.harvest(&mut ended);
        }
        while let Some(slot) = self.blocking.pop_front() {
            self.hand_over(slot, &mut ended);
        }
        self.workers.finish();
        // The kernel takes a closed ring apart in its own time. The files, and with them their locks and devices,
        // are to be free when this returns; if that is refused they are so a moment later. A signal is no refusal.
        let interrupted = |cause: io::Error| cause.kind() == io::ErrorKind::Interrupted;
        while self.ring.submitter().unregister_files().is_err_and(interrupted) {}
    }
}
