//! The I/O engine, chosen by name when the disk is opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use device::Preset;
use disk::{
    Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Shape, ShapeCounts, ShapePolicy, Until,
};
use memory::Buffer;

use crate::below::Below;
use crate::{EngineError, ImageFile};

/// The maximum number of concurrent operations: an io_uring has at most 32768 entries, and no storage needs half of
/// them.
pub const DEPTH_MAX: u32 = 8192;

/// The kind of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
    /// None: operations end at once, with nothing done.
    Null,
    /// None: operations end when a device of this kind would be done, with nothing done.
    Model(Preset),
}

impl EngineKind {
    /// Whether nothing is stored.
    pub fn stores_nothing(self) -> bool {
        matches!(self, EngineKind::Null | EngineKind::Model(_))
    }
}

/// An I/O engine. It belongs to the thread that opened it.
pub struct Engine {
    below: Below,
    /// Present only if transfers are split or merged.
    shape: Option<Box<Shape>>,
    /// What earlier ones of those have done.
    shaped: ShapeCounts,
}

impl Engine {
    /// Opens an engine of this kind, with no fallback, for `depth` concurrent operations on `files` (leaf first).
    pub fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Engine, EngineError> {
        let below = Below::open(kind, files, depth)?;
        Ok(Engine { below, shape: None, shaped: ShapeCounts::default() })
    }

    /// The kind of this engine.
    pub fn kind(&self) -> EngineKind {
        self.below.kind()
    }

    /// Splits and merges transfers by this policy from now on; what was pushed before ends as it began.
    pub fn set_shape(&mut self, policy: ShapePolicy) {
        match &mut self.shape {
            Some(shape) => shape.set_policy(policy),
            None if policy.is_none() => {}
            None => self.shape = Some(Box::new(Shape::new(policy))),
        }
    }

    /// How transfers are split and merged.
    pub fn shape(&self) -> ShapePolicy {
        self.shape.as_ref().map_or_else(ShapePolicy::default, |shape| shape.policy())
    }

    /// Whether transfers are split or merged, or were a moment ago.
    #[inline]
    pub fn shapes(&self) -> bool {
        self.shape.is_some()
    }

    /// What was split and merged so far.
    pub fn shape_counts(&self) -> ShapeCounts {
        let here = self.shape.as_ref().map_or_else(ShapeCounts::default, |shape| shape.counts());
        self.shaped.plus(here)
    }

    /// Without a policy there is nothing to be passed on the way to the backend, as soon as nothing is left in it.
    fn drop_idle_shape(&mut self) {
        if let Some(shape) = self.shape.take_if(|shape| shape.policy().is_none() && shape.is_idle()) {
            self.shaped = self.shaped.plus(shape.counts());
        }
    }

    /// Starts one more lane: a thread that does transfers for this one ([`crate::lanes`]). One that turns out not to be
    /// possible here is let go of, and [`Engine::take_lane_trouble`] says why.
    pub fn start_lane(&mut self) -> Result<(), EngineError> {
        self.below.start_lane()
    }

    /// Waits until each lane takes operations, or cannot; from then on they get all that they can do, also what this
    /// thread would do faster itself. For tests, which want to see lanes at work.
    pub fn prefer_lanes(&mut self) {
        self.below.prefer_lanes()
    }

    /// Ends one lane, as soon as it has nothing in flight.
    pub fn end_lane(&mut self) {
        self.below.end_lane()
    }

    /// The number of lanes, without those that are about to end.
    pub fn lane_count(&self) -> usize {
        self.below.lane_count()
    }

    /// How many operations each lane has got since it was started.
    pub fn lane_operations(&self) -> Vec<u64> {
        self.below.lane_operations()
    }

    /// The processor time that lanes have used, of those that are there.
    pub fn lane_time(&self) -> Duration {
        self.below.lane_time()
    }

    /// Why a lane was let go of, if that was not asked for.
    pub fn take_lane_trouble(&mut self) -> Option<String> {
        self.below.take_lane_trouble()
    }

    /// Has lanes that are started from now on fail at some step.
    #[cfg(test)]
    pub(crate) fn set_lane_faults(&mut self, faults: crate::lanes::Faults) {
        self.below.set_lane_faults(faults)
    }

    /// Waits until each lane takes operations, or cannot.
    #[cfg(test)]
    pub(crate) fn wait_for_lanes(&mut self) {
        self.below.wait_for_lanes()
    }

    /// Whether operations take the long way.
    #[cfg(test)]
    pub(crate) fn has_adapters(&self) -> bool {
        self.below.has_adapters()
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): immediately if it is ready
    /// now, then at each new event (edge triggered: an eventfd need not be read at all). There may be spurious reports,
    /// but none is missed. Watching a key again replaces the old watch. One key is the engine's own, and refused.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        self.below.watch(fd, write, key)
    }

    /// Stops reporting `key`.
    pub fn forget(&mut self, key: u64) {
        self.below.forget(key)
    }

    /// Moves the keys reported since the last call into `into`, without duplicates.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        self.below.take_ready(into)
    }

    /// The open file with this id.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        self.below.file(id)
    }

    /// Registers a buffer that much I/O will go through, if the engine supports that. I/O through unregistered buffers
    /// also works, but is slower.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        self.below.register_memory(buffer)
    }

    /// Unregisters a buffer.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        self.below.forget_memory(buffer)
    }

    /// Registers a file, and its data file if it has one; returns its id.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        self.below.add(file)
    }

    /// Replaces the handle of a file, and of its data file: read-only becomes writable, or the reverse. Operations in
    /// flight finish on the old handle, which is returned; later ones use the new one. The caller must drop write
    /// access only when no write is in flight.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        self.below.replace(id, file)
    }

    /// Tells the engine that a file has grown by other means than this engine.
    pub fn file_grew(&mut self, id: FileId) {
        self.below.file_grew(id)
    }

    /// The next sleep takes no longer than this; it may end with nothing.
    pub fn limit_sleep(&mut self, most: Duration) {
        self.below.limit_sleep(most)
    }

    /// Removes a file that has nothing in flight, and its data file. Its id may be reused.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.shape.as_ref().is_some_and(|shape| shape.uses(id)) {
            return Err(EngineError::FileBusy(id));
        }
        self.below.remove(id)
    }
}

impl Io for Engine {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match &mut self.shape {
            None => self.below.push(op),
            Some(shape) => shape.push(op, &mut self.below),
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match &mut self.shape {
            None => self.below.reap(until, done),
            Some(shape) => {
                let reaped = shape.reap(until, &mut self.below, done);
                self.drop_idle_shape();
                reaped
            }
        }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.below.allocated(file, at, len)
    }
}

/// The number of slots for the requested depth.
pub(crate) fn slots(depth: usize) -> Result<u32, EngineError> {
    let slots = u32::try_from(depth).ok().filter(|slots| (1..=DEPTH_MAX).contains(slots));
    slots.ok_or(EngineError::Depth { depth, max: DEPTH_MAX })
}
