//! The Linux AIO engine: for machines where io_uring is forbidden, and for files on which io_uring would need a thread
//! for every transfer.
//!
//! Pushed requests go to the kernel in one `io_submit`; completions are read from the ring that the kernel shares.
//! Transfers that would complete inside `io_submit` (tmpfs) are done by plain calls, which cost less. What AIO cannot
//! do is also done inline in `reap`: deallocation and the write of an unaligned file end always, syncs on kernels
//! before 4.18.
//!
//! **One wait.** Watched descriptors are in an inner epoll. With no request in flight the thread sleeps in
//! `epoll_wait`. Otherwise it sleeps in `io_getevents`, with an `IOCB_CMD_POLL` on the epoll as one more request. That
//! poll completes at its first event; `armed` says whether it is in the kernel. While it is, its completion in the
//! shared ring reports ready descriptors, so checking for them costs no system call.
//!
//! Invariant: requests in flight are in the slab and in `iocbs`, neither of which moves. The context is dropped first,
//! and dropping it waits for them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};
use rustix::fs::FallocateFlags;

use crate::aio_context::{AioContext, AioEvent, FDSYNC, Iocb, POLL};
use crate::call::Call;
use crate::engine::slots;
use crate::engine_error::sysctl;
use crate::epoll::Epoll;
use crate::file_table::FileTable;
use crate::flight::{IoConstraints, IoStep};
use crate::flight_slab::{FlightSlab, Settled, Slot};
use crate::{Cache, EngineError, ImageFile};

/// Reaps that find completions do not check the epoll. After this many, the poll is added to the next batch, so that a
/// storm of completions does not delay a request at the control socket for long.
const REAPS_WITHOUT_POLL_MAX: u32 = 16;

/// An engine over Linux AIO.
pub struct Aio {
    /// First, so that it is dropped first: its drop waits for the requests in flight.
    context: AioContext,
    flights: FlightSlab,
    /// One for each slot, then one for the poll on the epoll.
    iocbs: Box<[Iocb]>,
    /// The index of the poll, which also serves as its slot number.
    poll_slot: Slot,
    files: FileTable,
    queue: VecDeque<Slot>,
    /// Slots of the requests for the next `io_submit`, and scratch space for their addresses.
    batch: Vec<Slot>,
    addresses: Vec<*mut Iocb>,
    in_kernel: usize,
    epoll: Epoll,
    armed: bool,
    reaps_without_poll: u32,
    ready: Vec<u64>,
    /// The kernel has no IOCB_CMD_FDSYNC for these files.
    sync_inline: bool,
    /// The maximum duration of the next sleep.
    sleep_limit: Option<Duration>,
}

impl Aio {
    /// An engine for up to `depth` concurrent operations on `files`, numbered from 0, all open with O_DIRECT.
    pub fn open(files: Vec<ImageFile>, depth: usize) -> Result<Aio, EngineError> {
        let slots = slots(depth)?;
        files.iter().try_for_each(check_direct)?;
        let files = FileTable::new(files)?;
        let epoll = Epoll::new().map_err(|cause| EngineError::failed("create an epoll", cause))?;
        let requests = slots + 1;
        let context = AioContext::new(requests).map_err(|cause| refused(cause, requests))?;
        let mut aio = Aio {
            context,
            flights: FlightSlab::new(slots),
            iocbs: vec![Iocb::default(); depth + 1].into_boxed_slice(),
            poll_slot: slots,
            files,
            queue: VecDeque::with_capacity(depth),
            batch: Vec::with_capacity(depth + 1),
            addresses: Vec::with_capacity(depth + 1),
            in_kernel: 0,
            epoll,
            armed: false,
            reaps_without_poll: 0,
            ready: Vec::new(),
            sync_inline: false,
            sleep_limit: None,
        };
        aio.arm_first()?;
        Ok(aio)
    }

    /// Arms the poll for the first time, and checks for completions: this shows whether the kernel supports and permits
    /// both.
    fn arm_first(&mut self) -> Result<(), EngineError> {
        let forbidden = |errno| matches!(errno, libc::EPERM | libc::EACCES | libc::ENOSYS);
        let mut done = Vec::new();
        self.arm(&mut done).map_err(|failed| match failed.errno {
            libc::EINVAL => EngineError::AioMissing { missing: "IOCB_CMD_POLL (Linux 4.18)" },
            errno if forbidden(errno) => EngineError::AioForbidden { call: "io_submit" },
            errno => EngineError::failed(failed.what, io::Error::from_raw_os_error(errno)),
        })?;
        self.sleep_limit = Some(Duration::ZERO);
        let harvested = self.harvest(true, &mut done);
        self.sleep_limit = None;
        harvested.map(drop).map_err(|failed| match failed.errno {
            errno if forbidden(errno) => EngineError::AioForbidden { call: "io_getevents" },
            errno => EngineError::failed(failed.what, io::Error::from_raw_os_error(errno)),
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
        self.ready.retain(|&ready| ready != key);
        self.epoll.watch(fd, write, key)
    }

    /// Stops reporting `key`.
    pub fn forget(&mut self, key: u64) {
        if self.epoll.forget(key) {
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
        check_direct(&file)?;
        let id = self.files.free_id()?;
        self.files.put(id, Some(file));
        Ok(id)
    }

    /// Registers a file under an id chosen by another engine, replacing the file that has this id.
    pub(crate) fn put(&mut self, id: FileId, file: ImageFile) -> Result<(), EngineError> {
        check_direct(&file)?;
        self.files.put(id, Some(file));
        Ok(())
    }

    /// Replaces the handle of a file; see [`crate::Engine::replace`].
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        check_direct(&file)?;
        self.files.check_replacement(id, &file)?;
        self.files.put(id, Some(file)).ok_or(EngineError::NoSuchFile(id))
    }

    /// Removes a file that has nothing in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.flights.uses(id) {
            return Err(EngineError::FileBusy(id));
        }
        self.files.put(id, None).ok_or(EngineError::NoSuchFile(id))
    }

    /// Submits everything queued; what AIO cannot do is done inline.
    fn submit(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.batch.clear();
        self.files.begin_batch();
        for _ in 0..self.queue.len() {
            let Some(slot) = self.queue.pop_front() else { break };
            match self.prepare(slot) {
                Some(result) => self.settle(slot, result, done),
                None => self.in_kernel += 1,
            }
        }
        if !self.armed && self.reaps_without_poll >= REAPS_WITHOUT_POLL_MAX {
            self.queue_poll();
        }
        self.submit_batch(done)
    }

    /// Adds the next step of `slot` to the batch, or performs it and returns the result.
    fn prepare(&mut self, slot: Slot) -> Option<i32> {
        if self.files.refuses(self.flights.transfer(slot)) {
            return Some(-libc::EIO);
        }
        let (file, step) = self.flights.step(slot);
        let Some(file) = self.files.get(file) else { unreachable!("`push` has checked that the file exists") };
        let (fd, data) = (file.as_fd().as_raw_fd(), u64::from(slot));
        let iocb = match step {
            IoStep::Read { .. } | IoStep::Write { .. } if file.is_in_memory() => {
                // SAFETY: the file is open; the parts and the memory stay in the slab (`flight_slab`) during the call.
                return Some(unsafe { Call::of(fd, &step).run() });
            }
            IoStep::Read { at, parts, .. } => Iocb::read(at, parts, fd, data),
            IoStep::Write { at, parts } => Iocb::write(at, parts, fd, data),
            // SAFETY: the file is open; the parts and the memory stay in the slab (`flight_slab`) during the call.
            IoStep::WriteCached { .. } => return Some(unsafe { Call::of(fd, &step).run() }),
            IoStep::SyncData if self.sync_inline => return Some(errno_of(rustix::fs::fdatasync(file))),
            IoStep::SyncData => Iocb::new(FDSYNC, fd, data),
            IoStep::Deallocate { at, len } => {
                let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                return Some(errno_of(rustix::fs::fallocate(file, mode, at, len)));
            }
        };
        self.add_to_batch(slot, iocb);
        None
    }

    fn add_to_batch(&mut self, slot: Slot, iocb: Iocb) {
        match usize::try_from(slot).ok().and_then(|slot| self.iocbs.get_mut(slot)) {
            Some(place) => *place = iocb,
            None => unreachable!("there is a request for every slot"),
        }
        self.batch.push(slot);
    }

    fn queue_poll(&mut self) {
        let mut iocb = Iocb::new(POLL, self.epoll.as_fd().as_raw_fd(), u64::from(self.poll_slot));
        // linux/aio_abi.h: the events go into the field for the buffer's address.
        iocb.buf = u64::from(libc::POLLIN.unsigned_abs());
        self.add_to_batch(self.poll_slot, iocb);
        self.armed = true;
    }

    /// Calls `io_submit` until each request of the batch is in the kernel, was refused, or must wait for completions of
    /// others.
    fn submit_batch(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let batch = std::mem::take(&mut self.batch);
        let mut left = batch.as_slice();
        while let [first, others @ ..] = left {
            self.addresses.clear();
            let base = self.iocbs.as_mut_ptr();
            // Each is an index into `iocbs`, as `add_to_batch` has checked.
            self.addresses.extend(left.iter().map(|&slot| base.wrapping_add(usize::try_from(slot).unwrap_or(0))));
            // SAFETY: the addresses are those of requests; what these point to stays in the slab until their
            // completions have been taken.
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
            self.requeue(slot);
        }
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    /// Queues a request again that the kernel cannot accept now.
    fn requeue(&mut self, slot: Slot) {
        if slot == self.poll_slot {
            self.armed = false;
            return;
        }
        self.in_kernel -= 1;
        self.queue.push_front(slot);
    }

    /// Handles a request that the kernel rejected.
    fn refused(&mut self, slot: Slot, errno: i32, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if slot == self.poll_slot {
            self.armed = false;
            return Err(EngineFailed { what: "wait for descriptors through Linux AIO", errno });
        }
        if errno == libc::EINVAL && matches!(self.flights.step(slot).1, IoStep::SyncData) {
            self.sync_inline = true;
            self.requeue(slot);
            return Ok(());
        }
        self.in_kernel -= 1;
        self.settle(slot, -errno, done);
        Ok(())
    }

    fn settle(&mut self, slot: Slot, result: i32, done: &mut Vec<FileDone>) {
        match self.flights.settle(slot, result, done) {
            Settled::Resubmit => self.queue.push_back(slot),
            Settled::Done => self.files.note_written(done.last()),
        }
    }

    /// Processes available completions, after sleeping for one if `sleep`; checks the epoll if its poll completed.
    /// Returns `false` if a signal or the sleep limit came first.
    fn harvest(&mut self, sleep: bool, done: &mut Vec<FileDone>) -> Result<bool, EngineFailed> {
        let was_armed = self.armed;
        let (flights, queue, files) = (&mut self.flights, &mut self.queue, &self.files);
        let (armed, in_kernel, poll_slot) = (&mut self.armed, &mut self.in_kernel, self.poll_slot);
        let take = |event: AioEvent| {
            let Ok(slot) = Slot::try_from(event.data) else { unreachable!("a request's data is its slot") };
            if slot == poll_slot {
                *armed = false;
                return;
            }
            *in_kernel -= 1;
            let result = i32::try_from(event.res).unwrap_or(i32::MAX);
            match flights.settle(slot, result, done) {
                Settled::Resubmit => queue.push_back(slot),
                Settled::Done => files.note_written(done.last()),
            }
        };
        let harvested = if sleep { self.context.wait(self.sleep_limit, take) } else { self.context.harvest(take) };
        let uninterrupted = match harvested {
            Ok(()) => !sleep || self.sleep_limit.is_none(),
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => false,
            Err(cause) => return Err(failed("io_getevents", &cause)),
        };
        if was_armed && !self.armed {
            self.poll_epoll(false)?;
        }
        Ok(uninterrupted)
    }

    /// Collects ready descriptors from the epoll, after sleeping for one if `sleep`. Returns `false` if there is none.
    fn poll_epoll(&mut self, sleep: bool) -> Result<bool, EngineFailed> {
        self.reaps_without_poll = 0;
        let most = if sleep { self.sleep_limit } else { Some(Duration::ZERO) };
        self.epoll.wait(most, &mut self.ready).map_err(|cause| failed("epoll_wait", &cause))
    }

    /// Arms the poll if it is not armed; processes an event that is already there.
    fn arm(&mut self, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if self.armed {
            return Ok(());
        }
        self.queue_poll();
        self.submit_batch(done)?;
        self.harvest(false, done).map(drop)
    }

    /// Sleeps until a completion or a watched descriptor is ready. Returns `false` if a signal or the sleep limit came
    /// first.
    fn sleep(&mut self, before: usize, done: &mut Vec<FileDone>) -> Result<bool, EngineFailed> {
        if self.in_kernel == 0 {
            return self.poll_epoll(true);
        }
        self.arm(done)?;
        let has_work = done.len() > before || !self.ready.is_empty() || !self.queue.is_empty();
        match has_work || !self.armed {
            true => Ok(true),
            false => self.harvest(true, done),
        }
    }

    /// Submits queued work and collects results.
    #[inline(never)]
    fn submit_and_reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        loop {
            self.submit(done)?;
            self.harvest(false, done)?;
            if done.len() > before || !self.ready.is_empty() {
                self.reaps_without_poll += 1;
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
}

impl Io for Aio {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let terms = self.files.get(op.file).map(IoConstraints::of);
        let Some(terms) = terms else { unreachable!("an operation on file {}, which does not exist", op.file.0) };
        let slot = self.flights.submit(op, terms)?;
        self.queue.push_back(slot);
        Ok(())
    }

    /// Also returns when a watched descriptor is ready, and early when a signal was handled.
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let reaped = self.submit_and_reap(until, done);
        self.sleep_limit = None;
        reaped
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
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
        Some(libc::EPERM | libc::EACCES) => EngineError::AioForbidden { call: "io_setup" },
        _ => EngineError::failed("set up Linux AIO", cause),
    }
}

fn failed(what: &'static str, cause: &io::Error) -> EngineFailed {
    EngineFailed { what, errno: cause.raw_os_error().unwrap_or(libc::EIO) }
}

fn errno_of(result: rustix::io::Result<()>) -> i32 {
    result.map_or_else(|errno| -errno.raw_os_error(), |()| 0)
}

#[cfg(test)]
mod test {
    use disk::{Action, OpId};
    use memory::Segments;
    use rustix::event::{EventfdFlags, eventfd};
    use tempfile::TempDir;

    use super::*;
    use crate::OpenOptions;

    /// An engine on storage that completes every request at once.
    fn engine(depth: usize) -> (Aio, TempDir) {
        let (mut aio, directory) = engine_on_tmpfs(depth);
        let mut file = aio.remove(FileId(0)).unwrap();
        file.forget_memory();
        assert_eq!(aio.add(file).unwrap(), FileId(0));
        (aio, directory)
    }

    fn engine_on_tmpfs(depth: usize) -> (Aio, TempDir) {
        let directory = TempDir::new_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [1; 1 << 20]).unwrap();
        let file = ImageFile::open(&path, OpenOptions { write: true, cache: Cache::None, lock: true }).unwrap();
        (Aio::open(vec![file], depth).unwrap(), directory)
    }

    fn push_read(aio: &mut Aio) {
        let action = Action::Read { at: FileOffset(0), into: Segments::zeroed(4096) };
        aio.push(FileOp { id: OpId(0), file: FileId(0), action }).unwrap();
    }

    /// The loop of a disk at queue depth 1: sleep for a kick, read, reply. Besides the sleep there is one system call.
    #[test]
    fn a_request_costs_one_io_submit() {
        let (mut aio, _directory) = engine(8);
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
        assert!(aio.context.submits <= 101, "extra requests were submitted");
    }

    #[test]
    fn a_batch_costs_one_io_submit() {
        let (mut aio, _directory) = engine(32);
        let before = aio.context.submits;
        (0..32).for_each(|_| push_read(&mut aio));
        let mut done = Vec::new();
        aio.reap(Until::Any, &mut done).unwrap();
        assert_eq!((done.len(), aio.context.submits - before), (32, 1));
    }

    #[test]
    fn transfers_on_tmpfs_are_not_submitted() {
        let (mut aio, _directory) = engine_on_tmpfs(8);
        let before = aio.context.submits;
        let write = Action::Write { at: FileOffset(512), from: Segments::copy_of(&[7; 4096]) };
        aio.push(FileOp { id: OpId(0), file: FileId(0), action: write }).unwrap();
        let mut done = Vec::new();
        aio.reap(Until::Any, &mut done).unwrap();
        // Across the end of the file, in two parts.
        let into = Segments::joined(vec![Segments::zeroed(512), Segments::zeroed(1024)]);
        let read = Action::Read { at: FileOffset((1 << 20) - 512), into: into.clone() };
        aio.push(FileOp { id: OpId(1), file: FileId(0), action: read }).unwrap();
        push_read(&mut aio);
        while done.len() < 3 {
            aio.reap(Until::Any, &mut done).unwrap();
        }
        assert!(done.iter().all(|done| done.result == Ok(())), "{done:?}");
        assert_eq!(into.to_vec(), [[1; 512], [0; 512], [0; 512]].concat());
        // The read across the end takes a second call, and completes last.
        let Action::Read { into, .. } = &done[1].op.action else { panic!("{done:?}") };
        assert_eq!(into.to_vec(), [vec![1; 512], vec![7; 4096 - 512]].concat());
        assert_eq!(aio.context.submits, before);
    }

    /// Once the poll is armed, an idle check costs no system call at all.
    #[test]
    fn checking_an_idle_engine_submits_nothing() {
        let (mut aio, _directory) = engine_on_tmpfs(1);
        let before = aio.context.submits;
        (0..100).for_each(|_| aio.reap(Until::Now, &mut Vec::new()).unwrap());
        assert_eq!(aio.context.submits, before);
    }

    /// `in_kernel` is set to count a request that never completes.
    #[test]
    fn a_watched_descriptor_wakes_the_engine_while_a_request_hangs() {
        let (mut aio, _directory) = engine_on_tmpfs(1);
        let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let remote = event.try_clone().unwrap();
        aio.watch(event.as_fd(), false, 7).unwrap();
        aio.in_kernel = 1;
        let (received, next) = std::sync::mpsc::channel();
        let signaller = std::thread::spawn(move || {
            for () in next {
                rustix::io::write(&remote, &1u64.to_ne_bytes()).unwrap();
            }
        });
        for _ in 0..500 {
            received.send(()).unwrap();
            let mut ready = Vec::new();
            while ready.is_empty() {
                aio.reap(Until::Any, &mut Vec::new()).unwrap();
                aio.take_ready(&mut ready);
            }
            assert_eq!(ready, [7]);
        }
        drop(received);
        signaller.join().unwrap();
    }

    /// Kernels before 4.18, and rings with an unknown layout, are served by the slower calls.
    #[test]
    fn the_fallback_calls_work() {
        let (mut aio, _directory) = engine(8);
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
    fn an_exhausted_aio_limit_is_named_in_the_error() {
        let refused = refused(io::Error::from_raw_os_error(libc::EAGAIN), 257);
        let text = refused.to_string();
        assert!(text.contains("fs.aio-max-nr") && text.contains("257"), "{text}");
        assert_eq!(refused.other(), Some(crate::EngineKind::Uring), "{text}");
    }
}
