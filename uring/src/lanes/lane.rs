//! The thread of one lane: it takes operations from one queue and puts their results into another.
//!
//! Without work it sleeps in its own backend, which also watches its bell: it has no timer. If its backend cannot be
//! opened, or has failed, the thread hands every operation back until it receives [`ToLane::Stop`], so no operation is
//! lost in its queue.
//!
//! Invariants: every operation received is returned once; a result is published before the owner's bell is rung, and
//! the bell is rung before this thread sleeps.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};

use disk::{EngineFailed, FileDone, FileId, FileOp, Io, Until};
use memory::Buffer;

use super::faults::Faults;
use crate::backend::Backend;
use crate::bell::Bell;
use crate::spsc::{Consumer, Producer};
use crate::thread::CpuClock;
use crate::{EngineError, EngineKind, ImageFile};

/// The key under which the bell is watched. An engine refuses it to others; no server and no disk process uses it.
pub(crate) const BELL: u64 = u64::MAX - 63;

/// The maximum number of messages taken from the queue before operations are submitted.
const BATCH: usize = 16;

/// From the owner to a lane.
pub(super) enum ToLane {
    Op(FileOp),
    /// Replied to when it has been applied.
    Change(LaneChange),
    /// All operations are done: the thread ends.
    Stop,
}

/// A change of the files or of the registered memory, which all backends of an engine share.
pub(super) enum LaneChange {
    /// Sets the file of an id.
    Put(FileId, Box<ImageFile>),
    Remove(FileId),
    Register(Arc<Buffer>),
    Forget(Arc<Buffer>),
    /// Changes nothing: the reply shows that all earlier messages were processed.
    Nothing,
}

/// From a lane to the owner.
pub(super) enum FromLane {
    Done(FileDone),
    /// An operation that was not started, because the lane has no backend.
    Returned(FileOp),
}

/// State that both threads read.
pub(super) struct LaneShared {
    /// Wakes the lane.
    pub(super) bell: Bell,
    /// Set when the lane accepts operations, or has failed to open its backend.
    pub(super) begun: OnceLock<Result<Option<CpuClock>, EngineError>>,
    /// Set when its backend has failed: operations in flight will never complete.
    pub(super) failed: OnceLock<EngineFailed>,
}

/// The parameters for opening a lane's backend.
pub(super) struct LaneStart {
    pub(super) kind: EngineKind,
    pub(super) depth: usize,
    pub(super) files: Vec<(FileId, ImageFile)>,
    pub(super) memory: Vec<Arc<Buffer>>,
}

/// A lane's ends of the queues between the two threads, and the state that they share.
pub(super) struct LaneEnds {
    pub(super) from_owner: Consumer<ToLane>,
    pub(super) to_owner: Producer<FromLane>,
    pub(super) replies: Sender<Result<(), EngineError>>,
    pub(super) shared: Arc<LaneShared>,
    /// Wakes the owner.
    pub(super) owner: Arc<Bell>,
    pub(super) faults: Faults,
}

/// A running lane, owned by its thread.
struct Lane {
    ends: LaneEnds,
    /// `None` if it could not be opened or has failed.
    backend: Option<Backend>,
    done: Vec<FileDone>,
}

impl LaneEnds {
    /// The thread's main function.
    pub(super) fn run(self, start: LaneStart) {
        let done = Vec::with_capacity(start.depth);
        let (backend, opened) = match self.open(start) {
            Ok(backend) => (Some(backend), Ok(CpuClock::of_this_thread())),
            Err(refused) => (None, Err(refused)),
        };
        if self.shared.begun.set(opened).is_err() {
            unreachable!("a lane begins once");
        }
        // The owner may have nothing else to wait for.
        self.owner.ring();
        let mut lane = Lane { ends: self, backend, done };
        while lane.run_once() {}
    }

    fn open(&self, start: LaneStart) -> Result<Backend, EngineError> {
        let LaneStart { kind, depth, files, memory } = start;
        self.check_fault("open the engine of a lane")?;
        let mut backend = Backend::open(kind, Vec::new(), depth)?;
        for (id, file) in files {
            self.check_fault("put a file into the engine of a lane")?;
            backend.put(id, file)?;
        }
        let bell = self.shared.bell.event().as_fd();
        self.check_fault("watch the bell of a lane")?;
        backend.watch(bell, false, BELL).map_err(|cause| EngineError::failed("watch the bell of a lane", cause))?;
        for buffer in memory {
            register(&mut backend, buffer);
        }
        Ok(backend)
    }

    /// Fails if a test has injected a fault here.
    fn check_fault(&self, tried: &'static str) -> Result<(), EngineError> {
        self.faults.step().map_err(|errno| EngineError::failed(tried, io::Error::from_raw_os_error(errno)))
    }
}

impl Lane {
    /// Takes operations, submits them and publishes results; sleeps if there is nothing to do. Returns false when the
    /// thread must end.
    fn run_once(&mut self) -> bool {
        let mut stops = false;
        for _ in 0..BATCH {
            match self.ends.from_owner.pop() {
                None => break,
                Some(ToLane::Op(op)) => self.push(op),
                Some(ToLane::Change(change)) => {
                    let changed = self.change(change);
                    // An owner that does not wait for the reply has ended.
                    self.ends.replies.send(changed).ok();
                }
                // Earlier operations are still submitted below: a backend discards unsubmitted ones when it is dropped.
                Some(ToLane::Stop) => stops = true,
            }
        }
        let (bell, from_owner) = (&self.ends.shared.bell, &mut self.ends.from_owner);
        let sleeps = !stops && bell.may_sleep(|| !from_owner.is_empty());
        let reaped = match &mut self.backend {
            Some(backend) => {
                let until = if sleeps { Until::Any } else { Until::Now };
                let injected = self.ends.faults.step();
                let reaped = backend.reap(until, &mut self.done);
                backend.ignore_ready(BELL);
                reaped.and(injected.map_err(|errno| EngineFailed { what: "a lane of a test", errno }))
            }
            None => {
                if sleeps {
                    bell.event().wait();
                }
                Ok(())
            }
        };
        if sleeps {
            bell.awake();
        }
        self.publish_results();
        if let Err(failed) = reaped {
            self.fail(failed);
        }
        !stops
    }

    fn push(&mut self, op: FileOp) {
        match &mut self.backend {
            // It has room: the owner respects the depth.
            Some(backend) => match backend.push(op) {
                Ok(()) => {}
                Err(op) => self.publish(FromLane::Returned(op)),
            },
            None => self.publish(FromLane::Returned(op)),
        }
    }

    fn publish_results(&mut self) {
        if self.done.is_empty() {
            return;
        }
        for done in self.done.drain(..) {
            if self.ends.to_owner.push(FromLane::Done(done)).is_err() {
                unreachable!("there is room for the result of every operation");
            }
        }
        self.ends.owner.ring();
    }

    fn publish(&mut self, result: FromLane) {
        if self.ends.to_owner.push(result).is_err() {
            unreachable!("there is room for the result of every operation");
        }
        self.ends.owner.ring();
    }

    fn fail(&mut self, failed: EngineFailed) {
        if self.ends.shared.failed.set(failed).is_ok() {
            self.ends.owner.ring();
        }
        // Dropping it waits for requests in the kernel, or leaks their memory.
        self.backend = None;
    }

    fn change(&mut self, change: LaneChange) -> Result<(), EngineError> {
        self.ends.check_fault("change the files of a lane")?;
        let Some(backend) = &mut self.backend else { return Ok(()) };
        match change {
            LaneChange::Put(id, file) => backend.put(id, *file),
            LaneChange::Remove(id) => backend.remove(id).map(drop),
            LaneChange::Register(buffer) => {
                register(backend, buffer);
                Ok(())
            }
            LaneChange::Forget(buffer) => backend.forget_memory(&buffer),
            LaneChange::Nothing => Ok(()),
        }
    }
}

/// Registers memory if possible; otherwise transfers of this lane are slower. If registering fails in the owner too,
/// the owner reports it.
fn register(backend: &mut Backend, buffer: Arc<Buffer>) {
    backend.register_memory(buffer).unwrap_or_default();
}
