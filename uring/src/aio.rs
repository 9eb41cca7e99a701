//! The Linux AIO engine: for machines where io_uring is forbidden, and files on which it would need a thread for every transfer.
//!
//! Requests that were pushed go to the kernel in one `io_submit`; completions are read from the ring that the kernel
//! shares. On files whose I/O completes inside `io_submit` (tmpfs) a request thus costs that one call. What AIO cannot
//! do is done at once, inside `reap`: deallocation and the end of a file always, syncs on kernels before 4.18.
//!
//! **One wait.** Watched descriptors are in an inner epoll. With no request in flight the thread sleeps in
//! `epoll_wait`. Else it sleeps in `io_getevents`, with an `IOCB_CMD_POLL` on the epoll as one more request.
//! That poll ends with its first event; `armed` says whether it is there. While it is, its completion in the shared
//! ring tells of ready descriptors, and looking for them costs no system call.
//!
//! Invariant: requests in flight are in the slab and in `iocbs`, neither of which moves; dropping the context waits
//! for them, and it is dropped first.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOp, Io, Until};
use rustix::fs::FallocateFlags;

use crate::aio_context::{AioContext, Event, FDSYNC, Iocb, POLL};
use crate::call::Call;
use crate::engine::slots;
use crate::engine_error::sysctl;
use crate::epoll::Epoll;
use crate::file_table::FileTable;
use crate::flight::{Step, Terms};
use crate::flights::{Flights, Settled, Slot};
use crate::{Cache, EngineError, ImageFile};

/// Reaps that find completions, and so never look at the epoll, before the poll goes along with the next batch:
/// a storm of completions must not hide a knock at the control socket for long.
const UNSEEN_MAX: u32 = 16;

/// An engine over Linux AIO.
pub struct Aio {
    /// First, to be dropped first: that waits for the requests in flight.
    context: AioContext,
    flights: Flights,
    /// One for each slot, then one for the poll on the epoll.
    iocbs: Box<[Iocb]>,
    /// The place of that last one, and its name among those of slots.
    watches: Slot,
    files: FileTable,
    queue: VecDeque<Slot>,
    /// The places of the requests for the next `io_submit`, and scratch for their addresses.
    batch: Vec<Slot>,
    addresses: Vec<*mut Iocb>,
    in_kernel: usize,
    epoll: Epoll,
    armed: bool,
    unseen: u32,
    ready: Vec<u64>,
    /// The kernel has no IOCB_CMD_FDSYNC for these files.
    sync_inline: bool,
}

impl Aio {
    /// An engine for `depth` operations at once on `files`, numbered from 0, all open with O_DIRECT.
    pub fn open(files: Vec<ImageFile>, depth: usize) -> Result<Aio, EngineError> {
        let slots = slots(depth)?;
        files.iter().try_for_each(check_direct)?;
        let files = FileTable::new(files)?;
        let epoll = Epoll::new().map_err(|cause| EngineError::failed("create an epoll", cause))?;
        let requests = slots.saturating_add(1);
        let context = AioContext::new(requests).map_err(|cause| refused(cause, requests))?;
        let mut aio = Aio {
            context,
            flights: Flights::new(slots),
            iocbs: vec![Iocb::default(); depth.saturating_add(1)].into_boxed_slice(),
            watches: slots,
            files,
            queue: VecDeque::with_capacity(depth),
            batch: Vec::with_capacity(depth.saturating_add(1)),
            addresses: Vec::with_capacity(depth.saturating_add(1)),
            in_kernel: 0,
            epoll,
            armed: false,
            unseen: 0,
            ready: Vec::new(),
            sync_inline: false,
        };
        aio.arm_first()?;
        Ok(aio)
    }

    /// Arms the poll for the first time, which tells whether the kernel has it.
    fn arm_first(&mut self) -> Result<(), EngineError> {
        self.arm(&mut Vec::new()).map_err(|failed| match failed.errno {
            libc::EINVAL => EngineError::AioMissing { missing: "IOCB_CMD_POLL (Linux 4.18)" },
            errno => EngineError::failed(failed.what, io::Error::from_raw_os_error(errno)),
        })
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): at once if it is so now,
    /// then at each new event (edge triggered: an eventfd need not be read at all). A report may come once too often,
    /// never once too seldom. Watching a key again replaces it.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        self.ready.retain(|&ready| ready != key);
        self.epoll.watch(fd, write, key)
    }

    /// No more reports for `key`.
    pub fn forget(&mut self, key: u64) {
        if self.epoll.forget(key) {
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
        check_direct(&file)?;
        let id = self.files.vacancy()?;
        self.files.put(id, Some(file));
        Ok(id)
    }

    /// Another way to the same file; see [`crate::Engine::replace`].
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        check_direct(&file)?;
        self.files.check_replacement(id, &file)?;
        self.files.put(id, Some(file)).ok_or(EngineError::NoSuchFile(id))
    }

    /// Lets go of a file on which nothing is in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.flights.uses(id) {
            return Err(EngineError::FileBusy(id));
        }
        self.files.put(id, None).ok_or(EngineError::NoSuchFile(id))
    }

    /// Submits everything queued; what AIO cannot do is done here.
    fn submit(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.batch.clear();
        for _ in 0..self.queue.len() {
            let Some(slot) = self.queue.pop_front() else { break };
            match self.prepare(slot) {
                Some(result) => self.settle(slot, result, done),
                None => self.in_kernel = self.in_kernel.saturating_add(1),
            }
        }
        if !self.armed && self.unseen >= UNSEEN_MAX {
            self.queue_poll();
        }
        self.submit_batch(done)
    }

    /// Puts the next step of `slot` into the batch, or does it and answers the result.
    fn prepare(&mut self, slot: Slot) -> Option<i32> {
        let (file, step) = self.flights.step(slot);
        let Some(file) = self.files.get(file) else { unreachable!("`push` has looked the file up") };
        let (fd, data) = (file.as_fd().as_raw_fd(), u64::from(slot));
        let iocb = match step {
            Step::Read { at, parts } => Iocb::read(at, parts, fd, data),
            Step::Write { at, parts } => Iocb::write(at, parts, fd, data),
            // SAFETY: the file is open, the parts and the memory stay in the slab (`flights`) during the call.
            Step::WriteCached { .. } => return Some(unsafe { Call::of(fd, &step).run() }),
            Step::SyncData if self.sync_inline => return Some(errno_of(rustix::fs::fdatasync(file))),
            Step::SyncData => Iocb::new(FDSYNC, fd, data),
            Step::Deallocate { at, len } => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                return Some(errno_of(rustix::fs::fallocate(file, mode, at, len)));
            }
        };
        self.put(slot, iocb);
        None
    }

    /// Puts a request into the batch.
    fn put(&mut self, slot: Slot, iocb: Iocb) {
        match usize::try_from(slot).ok().and_then(|slot| self.iocbs.get_mut(slot)) {
            Some(place) => *place = iocb,
            None => unreachable!("there is a request for every slot"),
        }
        self.batch.push(slot);
    }

    fn queue_poll(&mut self) {
        let mut iocb = Iocb::new(POLL, self.epoll.as_fd().as_raw_fd(), u64::from(self.watches));
        // linux/aio_abi.h: the events go where the buffer's address would.
        iocb.buf = u64::from(libc::POLLIN.unsigned_abs());
        self.put(self.watches, iocb);
        self.armed = true;
    }

    /// `io_submit`, until each request of the batch is in the kernel, was refused, or must wait for others to end.
    fn submit_batch(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let batch = std::mem::take(&mut self.batch);
        let mut left = batch.as_slice();
        while let [first, others @ ..] = left {
            self.addresses.clear();
            let base = self.iocbs.as_mut_ptr();
            // Each is a place in `iocbs`, as `put` has checked.
            self.addresses.extend(left.iter().map(|&slot| base.wrapping_add(usize::try_from(slot).unwrap_or(0))));
            // SAFETY: the addresses are those of requests; what these point to lies in the slab until their
            // completions were taken.
            match unsafe { self.context.submit(&mut self.addresses) } {
                Ok(taken) => left = left.get(taken..).unwrap_or_default(),
                Err(cause) => match cause.raw_os_error().unwrap_or(libc::EIO) {
                    libc::EAGAIN => break,
                    libc::EINTR => {}
                    errno => {
                        left = others;
                        self.refused(*first, errno, done)?;
                    }
                },
            }
        }
        for &slot in left.iter().rev() {
            self.put_back(slot);
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    /// The kernel has no room for a request now: it is queued again.
    fn put_back(&mut self, slot: Slot) {
        if slot == self.watches {
            self.armed = false;
            return;
        }
        self.in_kernel = self.in_kernel.saturating_sub(1);
        self.queue.push_front(slot);
    }

    /// The kernel does not take a request at all.
    fn refused(&mut self, slot: Slot, errno: i32, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if slot == self.watches {
            self.armed = false;
            return Err(EngineFailed { what: "wait for descriptors through Linux AIO", errno });
        }
        if errno == libc::EINVAL && matches!(self.flights.step(slot).1, Step::SyncData) {
            self.sync_inline = true;
            self.put_back(slot);
            return Ok(());
        }
        self.in_kernel = self.in_kernel.saturating_sub(1);
        self.settle(slot, errno.saturating_neg(), done);
        Ok(())
    }

    fn settle(&mut self, slot: Slot, result: i32, done: &mut Vec<FileDone>) {
        if self.flights.settle(slot, result, done) == Settled::Again {
            self.queue.push_back(slot);
        }
    }

    /// Takes the completions that are there, after sleeping for one if `sleep`; looks at the epoll if told to. `false`:
    /// a signal came first.
    fn harvest(&mut self, sleep: bool, done: &mut Vec<FileDone>) -> Result<bool, EngineFailed> {
        let was_armed = self.armed;
        let (flights, queue) = (&mut self.flights, &mut self.queue);
        let (armed, in_kernel, watches) = (&mut self.armed, &mut self.in_kernel, self.watches);
        let take = |event: Event| {
            let Ok(slot) = Slot::try_from(event.data) else { unreachable!("requests are named by their slots") };
            if slot == watches {
                *armed = false;
                return;
            }
            *in_kernel = in_kernel.saturating_sub(1);
            let result = i32::try_from(event.res).unwrap_or(i32::MAX);
            if flights.settle(slot, result, done) == Settled::Again {
                queue.push_back(slot);
            }
        };
        let harvested = if sleep { self.context.wait(take) } else { self.context.harvest(take) };
        let undisturbed = match harvested {
            Ok(()) => true,
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => false,
            Err(cause) => return Err(failed("io_getevents", &cause)),
        };
        if was_armed && !self.armed {
            self.look(false)?;
        }
        Ok(undisturbed)
    }

    /// Asks the epoll who is ready, after sleeping for one if `sleep`. `false`: a signal came first.
    fn look(&mut self, sleep: bool) -> Result<bool, EngineFailed> {
        self.unseen = 0;
        self.epoll.wait(sleep, &mut self.ready).map_err(|cause| failed("epoll_wait", &cause))
    }

    /// Arms the poll if it is not; an event that is there already is taken at once.
    fn arm(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if self.armed {
            return Ok(());
        }
        self.queue_poll();
        self.submit_batch(done)?;
        self.harvest(false, done).map(drop)
    }

    /// Sleeps where both completions and watched descriptors are heard. `false`: a signal came first.
    fn sleep(&mut self, before: usize, done: &mut Vec<FileDone>) -> Result<bool, EngineFailed> {
        if self.in_kernel == 0 {
            return self.look(true);
        }
        self.arm(done)?;
        let stirred = done.len() > before || !self.ready.is_empty() || !self.queue.is_empty();
        match stirred || !self.armed {
            true => Ok(true),
            false => self.harvest(true, done),
        }
    }
}

impl Io for Aio {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let terms = self.files.get(op.file).map(Terms::of);
        let Some(terms) = terms else { unreachable!("an operation on file {}, which does not exist", op.file.0) };
        let slot = self.flights.board(op, terms)?;
        self.queue.push_back(slot);
        Ok(())
    }

    /// Returns also when a watched descriptor is ready, and early when a signal was handled.
    #[inline(never)]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        loop {
            self.submit(done)?;
            self.harvest(false, done)?;
            if done.len() > before || !self.ready.is_empty() {
                self.unseen = self.unseen.saturating_add(1);
                return Ok(());
            }
            if until == Until::Now {
                return self.arm(done);
            }
            if self.queue.is_empty() && !self.sleep(before, done)? {
                return Ok(());
            }
            if done.len() > before || !self.ready.is_empty() {
                return Ok(());
            }
        }
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        self.files.get(file).map_or(Allocation::Data(len), |file| file.allocated(at, len))
    }
}

fn check_direct(file: &ImageFile) -> Result<(), EngineError> {
    match file.options().cache {
        Cache::None => Ok(()),
        Cache::Writeback => Err(EngineError::AioNeedsDirect { path: file.path().to_owned() }),
    }
}

fn refused(cause: io::Error, wanted: u32) -> EngineError {
    match cause.raw_os_error() {
        Some(libc::EAGAIN) => EngineError::AioExhausted {
            wanted,
            limit: match (sysctl("/proc/sys/fs/aio-max-nr"), sysctl("/proc/sys/fs/aio-nr")) {
                (Some(limit), Some(used)) => format!(" ({limit}, {used} in use)"),
                _ => String::new(),
            },
        },
        Some(libc::ENOSYS) => EngineError::AioMissing { missing: "io_setup (CONFIG_AIO)" },
        _ => EngineError::failed("set up Linux AIO", cause),
    }
}

fn failed(what: &'static str, cause: &io::Error) -> EngineFailed {
    EngineFailed { what, errno: cause.raw_os_error().unwrap_or(libc::EIO) }
}

fn errno_of(result: rustix::io::Result<()>) -> i32 {
    result.map_or_else(|errno| errno.raw_os_error().saturating_neg(), |()| 0)
}

#[cfg(test)]
mod test {
    use disk::{Action, OpId};
    use memory::Segments;
    use rustix::event::{EventfdFlags, eventfd};
    use tempfile::TempDir;

    use super::*;
    use crate::OpenOptions;

    fn engine_on_tmpfs(depth: usize) -> (Aio, TempDir) {
        let directory = TempDir::new_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 1 << 20]).unwrap();
        let file = ImageFile::open(&path, OpenOptions { write: true, cache: Cache::None, lock: true }).unwrap();
        (Aio::open(vec![file], depth).unwrap(), directory)
    }

    fn push_read(aio: &mut Aio) {
        let action = Action::Read { at: 0, into: Segments::zeroed(4096) };
        aio.push(FileOp { id: OpId(0), file: FileId(0), action }).unwrap();
    }

    /// The loop of a disk at queue depth 1: sleep for a kick, read, answer. Besides the sleep there is one call.
    #[test]
    fn a_request_on_tmpfs_costs_one_io_submit() {
        let (mut aio, _directory) = engine_on_tmpfs(8);
        let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        aio.watch(kick.as_fd(), false, 7).unwrap();
        let (mut done, mut ready) = (Vec::new(), Vec::new());
        for round in 0..100 {
            rustix::io::write(&kick, &1u64.to_ne_bytes()).unwrap();
            while ready.is_empty() {
                aio.reap(Until::Any, &mut done).unwrap();
                aio.take_ready(&mut ready);
            }
            let before = aio.context.submits;
            push_read(&mut aio);
            aio.reap(Until::Any, &mut done).unwrap();
            assert_eq!((done.len(), aio.context.submits - before), (1, 1), "round {round}");
            done.clear();
            ready.clear();
        }
        assert!(aio.context.submits <= 101, "something else was submitted");
    }

    #[test]
    fn a_batch_costs_one_io_submit() {
        let (mut aio, _directory) = engine_on_tmpfs(32);
        let before = aio.context.submits;
        (0..32).for_each(|_| push_read(&mut aio));
        let mut done = Vec::new();
        aio.reap(Until::Any, &mut done).unwrap();
        assert_eq!((done.len(), aio.context.submits - before), (32, 1));
    }

    /// Once the poll is armed, an idle look costs no call at all.
    #[test]
    fn looking_at_an_idle_engine_submits_nothing() {
        let (mut aio, _directory) = engine_on_tmpfs(1);
        let before = aio.context.submits;
        (0..100).for_each(|_| aio.reap(Until::Now, &mut Vec::new()).unwrap());
        assert_eq!(aio.context.submits, before);
    }

    /// A request that never ends, as a watch must not depend on it.
    #[test]
    fn a_watched_descriptor_ends_a_sleep_while_a_request_hangs() {
        let (mut aio, _directory) = engine_on_tmpfs(1);
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let remote = event.try_clone().unwrap();
        aio.watch(event.as_fd(), false, 7).unwrap();
        aio.in_kernel = 1;
        let (heard, next) = std::sync::mpsc::channel();
        let signaller = std::thread::spawn(move || {
            for () in next {
                rustix::io::write(&remote, &1u64.to_ne_bytes()).unwrap();
            }
        });
        for _ in 0..500 {
            heard.send(()).unwrap();
            let mut ready = Vec::new();
            while ready.is_empty() {
                aio.reap(Until::Any, &mut Vec::new()).unwrap();
                aio.take_ready(&mut ready);
            }
            assert_eq!(ready, [7]);
        }
        drop(heard);
        signaller.join().unwrap();
    }

    /// Kernels before 4.18, and rings of a layout unknown here, are served by the slower calls.
    #[test]
    fn the_slower_ways_work_too() {
        let (mut aio, _directory) = engine_on_tmpfs(8);
        aio.sync_inline = true;
        aio.context.forget_ring();
        let mut done = Vec::new();
        push_read(&mut aio);
        aio.push(FileOp { id: OpId(1), file: FileId(0), action: Action::SyncData }).unwrap();
        while done.len() < 2 {
            aio.reap(Until::Any, &mut done).unwrap();
        }
        assert!(done.iter().all(|done| done.result == Ok(())));
    }

    #[test]
    fn an_exhausted_limit_is_named() {
        let text = refused(io::Error::from_raw_os_error(libc::EAGAIN), 257).to_string();
        assert!(text.contains("fs.aio-max-nr") && text.contains("257"), "{text}");
        assert!(text.ends_with("use --io-engine uring"), "{text}");
    }
}
