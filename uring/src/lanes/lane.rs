//! One lane, as its thread sees it: operations come in through one queue, and results go out through another.
//!
//! When there is nothing to do it sleeps in its own backend, which also watches its bell: it has no timer. A lane whose
//! backend cannot be opened, or has failed, goes on without: it hands every operation back, until it is told to end. So
//! nothing is ever lost in its queue.
//!
//! Invariants: every operation that came in goes out once; a result is published before the owner's bell is rung, and
//! the bell before this thread sleeps.

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

/// What is watched under this key is the bell: an engine refuses it to others. No server and no disk process uses it.
pub(crate) const BELL: u64 = u64::MAX - 63;

/// Operations that are taken in before they are submitted.
const BATCH: usize = 16;

/// From the owner to a lane.
pub(super) enum ToLane {
    Op(FileOp),
    /// It is answered when it is done.
    Change(Change),
    /// Everything is done: the thread ends.
    Stop,
}

/// A change of what all backends of an engine have in common.
pub(super) enum Change {
    /// The file of an id, in place of the one before.
    Put(FileId, Box<ImageFile>),
    Remove(FileId),
    Register(Arc<Buffer>),
    Forget(Arc<Buffer>),
    /// None: it is answered when everything before it is done.
    Nothing,
}

/// From a lane to the owner.
pub(super) enum FromLane {
    Done(FileDone),
    /// The lane has no engine: it has not been begun.
    Back(FileOp),
}

/// What both threads look at.
pub(super) struct Shared {
    /// Wakes the lane.
    pub(super) bell: Bell,
    /// Set when the lane takes operations, or cannot.
    pub(super) begun: OnceLock<Result<Option<CpuClock>, EngineError>>,
    /// Its engine has failed: what was in flight will never complete.
    pub(super) failed: OnceLock<EngineFailed>,
}

/// What a lane begins with.
pub(super) struct Start {
    pub(super) kind: EngineKind,
    pub(super) depth: usize,
    pub(super) files: Vec<(FileId, ImageFile)>,
    pub(super) memory: Vec<Arc<Buffer>>,
}

/// A lane's ends of what is between the two threads.
pub(super) struct Ends {
    pub(super) from_owner: Consumer<ToLane>,
    pub(super) to_owner: Producer<FromLane>,
    pub(super) replies: Sender<Result<(), EngineError>>,
    pub(super) shared: Arc<Shared>,
    /// Wakes the owner.
    pub(super) owner: Arc<Bell>,
    pub(super) faults: Faults,
}

/// The lane.
struct Lane {
    ends: Ends,
    /// Belongs to this thread.
    backend: Option<Backend>,
    done: Vec<FileDone>,
}

impl Ends {
    /// What the thread does.
    pub(super) fn run(self, start: Start) {
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
        while lane.turn() {}
    }

    fn open(&self, start: Start) -> Result<Backend, EngineError> {
        let Start { kind, depth, files, memory } = start;
        self.may("open the engine of a lane")?;
        let mut backend = Backend::open(kind, Vec::new(), depth)?;
        for (id, file) in files {
            self.may("put a file into the engine of a lane")?;
            backend.put(id, file)?;
        }
        let bell = self.shared.bell.event().as_fd();
        self.may("watch the bell of a lane")?;
        backend.watch(bell, false, BELL).map_err(|cause| EngineError::failed("watch the bell of a lane", cause))?;
        for buffer in memory {
            register(&mut backend, buffer);
        }
        Ok(backend)
    }

    fn may(&self, tried: &'static str) -> Result<(), EngineError> {
        self.faults.step().map_err(|errno| EngineError::failed(tried, io::Error::from_raw_os_error(errno)))
    }
}

impl Lane {
    /// Takes operations in, submits them, hands results over; sleeps if there is nothing of that. Whether to go on.
    fn turn(&mut self) -> bool {
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
                // What came before it is submitted: the backend discards the rest when it is dropped.
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
        self.hand_over();
        if let Err(failed) = reaped {
            self.fail(failed);
        }
        !stops
    }

    fn push(&mut self, op: FileOp) {
        match &mut self.backend {
            // There is room: the owner keeps to the depth.
            Some(backend) => match backend.push(op) {
                Ok(()) => {}
                Err(op) => self.hand(FromLane::Back(op)),
            },
            None => self.hand(FromLane::Back(op)),
        }
    }

    /// Publishes the results that there are.
    fn hand_over(&mut self) {
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

    fn hand(&mut self, result: FromLane) {
        if self.ends.to_owner.push(result).is_err() {
            unreachable!("there is room for the result of every operation");
        }
        self.ends.owner.ring();
    }

    fn fail(&mut self, failed: EngineFailed) {
        if self.ends.shared.failed.set(failed).is_ok() {
            self.ends.owner.ring();
        }
        // It waits for what the kernel still has, or leaks it.
        self.backend = None;
    }

    fn change(&mut self, change: Change) -> Result<(), EngineError> {
        self.ends.may("change the files of a lane")?;
        let Some(backend) = &mut self.backend else { return Ok(()) };
        match change {
            Change::Put(id, file) => backend.put(id, *file),
            Change::Remove(id) => backend.remove(id).map(drop),
            Change::Register(buffer) => {
                register(backend, buffer);
                Ok(())
            }
            Change::Forget(buffer) => backend.forget_memory(&buffer),
            Change::Nothing => Ok(()),
        }
    }
}

/// Registers memory, if that can be: else transfers of this lane are slower. The owner has tried, too, and has said so
/// if it could not.
fn register(backend: &mut Backend, buffer: Arc<Buffer>) {
    backend.register_memory(buffer).unwrap_or_default();
}
