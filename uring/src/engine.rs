//! The I/O engine of a disk: a backend, chosen by name when the disk is opened, and the stages in front of it.
//!
//! An operation passes the stages in this order, and its completion passes them in reverse: splitting and merging
//! (`shape`), images with a data file (`data_files`), storage with large sectors (`aligner`), exports of NBD servers
//! (`remotes`), more threads (`lanes`).
//! Most disks need none of them. The engine knows no policy: callers decide on shapes and lanes.
//!
//! Invariants: a file has one id in the backend and in all lanes; a stage exists only from its first use on, so that
//! without stages an operation goes straight to the backend.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use device::Preset;
use disk::{
    Aligner, Allocation, DataFiles, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Shape, ShapeCounts,
    ShapePolicy, Source, Until,
};
use memory::Buffer;

use crate::backend::Backend;
use crate::lanes::{BELL, Lanes};
use crate::remotes::{Elsewhere, Pushed, Remotes};
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
    /// No I/O: operations succeed at once.
    Null,
    /// No I/O: operations succeed after the time that a device of this kind would take.
    Model(Preset),
}

impl EngineKind {
    /// Returns true for the engines that do no I/O.
    pub fn stores_nothing(self) -> bool {
        matches!(self, EngineKind::Null | EngineKind::Model(_))
    }
}

/// The unit in which formats and guests address files.
const SECTOR: usize = 512;

/// An I/O engine. It belongs to the thread that opened it.
pub struct Engine {
    backend: Backend,
    /// Present only if transfers are split or merged.
    shape: Option<Box<Shape>>,
    /// Present only if an image has, or had, a data file.
    data_files: Option<Box<DataFiles>>,
    /// Present only if the minimum I/O unit of a file is, or was, larger than a sector.
    aligner: Option<Box<Aligner>>,
    /// Present only if a file is, or was, an export of an NBD server.
    remotes: Option<Box<Remotes>>,
    /// Present only while there are lanes, or threads of ended lanes.
    lanes: Option<Box<Lanes>>,
    /// Totals of shapes that were dropped.
    shaped: ShapeCounts,
}

impl Engine {
    /// Opens an engine of this kind for `depth` concurrent operations on `files` (leaf first). There is no fallback to
    /// another kind.
    pub fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Engine, EngineError> {
        let data: Vec<Option<ImageFile>> = files.iter().map(clone_data_file).collect::<Result<_, EngineError>>()?;
        let backend = Backend::open(kind, files, depth)?;
        let shaped = ShapeCounts::default();
        let (shape, data_files, aligner) = Default::default();
        let mut engine = Engine { backend, shape, data_files, aligner, remotes: None, lanes: None, shaped };
        for (image, data) in (0..).map(FileId).zip(data) {
            engine.align(image);
            engine.add_remote(image)?;
            engine.add_data_file(image, data)?;
        }
        Ok(engine)
    }

    /// The kind of this engine.
    pub fn kind(&self) -> EngineKind {
        self.backend.kind()
    }

    /// Splits and merges transfers by this policy from now on. Operations in flight keep the old policy.
    pub fn set_shape(&mut self, policy: ShapePolicy) {
        match &mut self.shape {
            Some(shape) => shape.set_policy(policy),
            None if policy.is_none() => {}
            None => self.shape = Some(Box::new(Shape::new(policy))),
        }
    }

    /// The policy by which transfers are split and merged.
    pub fn shape(&self) -> ShapePolicy {
        self.shape.as_ref().map_or_else(ShapePolicy::default, |shape| shape.policy())
    }

    /// Returns true while transfers are split or merged, or while operations of an earlier policy are in flight.
    #[inline]
    pub fn shapes(&self) -> bool {
        self.shape.is_some()
    }

    /// The numbers of transfers split and merged since the engine was opened.
    pub fn shape_counts(&self) -> ShapeCounts {
        let here = self.shape.as_ref().map_or_else(ShapeCounts::default, |shape| shape.counts());
        self.shaped.plus(here)
    }

    /// Starts one more lane: a thread that does transfers for this one ([`crate::lanes`]). A lane that cannot open its
    /// engine is ended later, and [`Engine::take_lane_trouble`] returns the reason.
    pub fn start_lane(&mut self) -> Result<(), EngineError> {
        if self.kind().stores_nothing() {
            return Err(EngineError::NoLanes);
        }
        let (lanes, backend) = self.insert_lanes()?;
        lanes.start(backend)
    }

    /// Returns the lanes, creating them if needed, and the owner's backend.
    pub(crate) fn insert_lanes(&mut self) -> Result<(&mut Lanes, &Backend), EngineError> {
        let Engine { lanes, backend, .. } = self;
        let lanes = match lanes {
            Some(lanes) => lanes,
            none => none.insert(Box::new(Lanes::new(backend)?)),
        };
        Ok((lanes, backend))
    }

    /// Waits until each lane accepts operations or has failed. From then on lanes get every transfer, even those that
    /// this thread would do faster itself. For tests of lanes.
    pub fn prefer_lanes(&mut self) {
        if let Some(lanes) = &mut self.lanes {
            lanes.wait_until_begun();
            lanes.prefer();
        }
    }

    /// Ends one lane once it has nothing in flight. Does not wait for that.
    pub fn end_lane(&mut self) {
        if let Some(lanes) = &mut self.lanes {
            lanes.end_one();
        }
    }

    /// The number of lanes, not counting those that are ending.
    pub fn lane_count(&self) -> usize {
        self.lanes.as_ref().map_or(0, |lanes| lanes.count())
    }

    /// The number of operations passed to each lane since its start.
    pub fn lane_operations(&self) -> Vec<u64> {
        self.lanes.as_ref().map_or_else(Vec::new, |lanes| lanes.operations())
    }

    /// The CPU time used by the lanes that have not ended yet.
    pub fn lane_time(&self) -> Duration {
        self.lanes.as_ref().map_or(Duration::ZERO, |lanes| lanes.time())
    }

    /// Returns why a lane has failed, once for each lane that was ended without [`Engine::end_lane`].
    pub fn take_lane_trouble(&mut self) -> Option<String> {
        self.lanes.as_mut()?.take_failure()
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): immediately if it is ready
    /// now, then at each new event (edge triggered: an eventfd need not be read at all). There may be spurious reports,
    /// but none is missed. Watching a key again replaces the old watch.
    ///
    /// # Panics
    /// The engine uses the keys from `u64::MAX - 63` to `u64::MAX - 31` itself.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        assert!(key != BELL && !Remotes::owns(key), "this key is the engine's own");
        self.backend.watch(fd, write, key)
    }

    /// Stops reporting `key`.
    pub fn forget(&mut self, key: u64) {
        self.backend.forget(key)
    }

    /// Moves the keys reported since the last call into `into`, without duplicates.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        self.backend.take_ready(into)
    }

    /// Limits the next sleep in [`Io::reap`], which then may return with no completion.
    pub fn limit_sleep(&mut self, most: Duration) {
        match &mut self.remotes {
            Some(remotes) => remotes.sleep_limit = Some(most),
            None => self.backend.limit_sleep(most),
        }
    }

    /// Registers a buffer, if the engine supports that. I/O through unregistered buffers also works, but is slower.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        self.backend.register_memory(buffer.clone())?;
        self.lanes.iter_mut().for_each(|lanes| lanes.register_memory(&buffer));
        Ok(())
    }

    /// Unregisters a buffer.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        self.lanes.iter_mut().for_each(|lanes| lanes.forget_memory(buffer));
        self.backend.forget_memory(buffer)
    }

    /// The open file with this id.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        self.backend.file(id)
    }

    /// How long NBD servers of its files are away: the longest time, `None` if all are connected.
    pub fn away(&self) -> Option<Duration> {
        self.remotes.as_ref()?.away()
    }

    /// Registers a file, and its data file if it has one; returns its id.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let data = clone_data_file(&file)?;
        let id = self.add_one(file)?;
        match self.add_data_file(id, data) {
            Ok(()) => Ok(id),
            Err(error) => {
                self.remove(id)?;
                Err(error)
            }
        }
    }

    fn add_data_file(&mut self, image: FileId, data: Option<ImageFile>) -> Result<(), EngineError> {
        if let Some(data) = data {
            let data = self.add_one(data)?;
            self.data_files.get_or_insert_default().add(image, data);
        }
        Ok(())
    }

    fn add_one(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let id = self.backend.add(file)?;
        self.update_lanes(id);
        self.align(id);
        self.add_remote(id)?;
        Ok(id)
    }

    /// Adds the file to the stage of exports if it is one.
    fn add_remote(&mut self, id: FileId) -> Result<(), EngineError> {
        match self.backend.file(id).and_then(Elsewhere::of) {
            Some(elsewhere) => self.remotes.get_or_insert_default().add(id, elsewhere),
            None => Ok(()),
        }
    }

    /// Replaces the handle of a file, and of its data file: read-only becomes writable, or the reverse. Operations in
    /// flight finish on the old handle, which is returned; later ones use the new one. The caller must drop write
    /// access only when no write is in flight.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        let data = clone_data_file(&file)?;
        let old = self.replace_one(id, file)?;
        let (Some(number), Some(data)) = (self.data_file_of(id), data) else { return Ok(old) };
        match self.replace_one(number, data) {
            Ok(_) => Ok(old),
            Err(error) => {
                self.replace_one(id, old)?;
                Err(error)
            }
        }
    }

    fn replace_one(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        let old = self.backend.replace(id, file)?;
        self.update_lanes(id);
        Ok(old)
    }

    /// Makes the engine read the length of a file that has grown by other means than this engine.
    pub fn file_grew(&mut self, id: FileId) {
        self.align(id);
        self.data_file_of(id).into_iter().for_each(|data| self.align(data));
    }

    /// Removes a file that has nothing in flight, and its data file. Its id may be reused.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let data = self.data_file_of(id);
        if [Some(id), data].into_iter().flatten().any(|id| self.is_in_stage(id)) {
            return Err(EngineError::FileBusy(id));
        }
        if let Some(data) = data {
            self.remove_one(data)?;
            self.data_files.iter_mut().for_each(|data_files| data_files.remove(id));
        }
        self.remove_one(id)
    }

    fn remove_one(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let removed = self.backend.remove(id)?;
        if let Some(remotes) = &mut self.remotes {
            remotes.remove(id, &mut self.backend);
        }
        self.lanes.iter_mut().for_each(|lanes| lanes.remove(id));
        self.align(id);
        Ok(removed)
    }

    fn data_file_of(&self, id: FileId) -> Option<FileId> {
        self.data_files.as_ref()?.of(id)
    }

    /// Gives the lanes the file that the backend has under this id.
    fn update_lanes(&mut self, id: FileId) {
        if let (Some(lanes), Some(file)) = (&mut self.lanes, self.backend.file(id)) {
            lanes.put(id, file);
        }
    }

    /// Adds the backend's file to the aligner if its storage does not accept single sectors, or removes it there.
    fn align(&mut self, id: FileId) {
        let file = self.backend.file(id).filter(|file| file.alignment().offset > SECTOR);
        if let Some(file) = file {
            let unit = u64::try_from(file.alignment().offset).unwrap_or(u64::MAX);
            // A device ends at a unit boundary.
            let len = file.device_len().is_none().then(|| file.len());
            self.aligner.get_or_insert_default().add(id, unit, len);
        } else if let Some(aligner) = &mut self.aligner {
            aligner.remove(id);
        }
    }

    /// Returns true if a stage has an operation on this file, which the backend may not have yet.
    fn is_in_stage(&self, id: FileId) -> bool {
        self.shape.as_ref().is_some_and(|shape| shape.uses(id))
            || self.data_files.as_ref().is_some_and(|data_files| data_files.uses(id))
            || self.aligner.as_ref().is_some_and(|aligner| aligner.uses(id))
            || self.remotes.as_ref().is_some_and(|remotes| remotes.uses(id))
            || self.lanes.as_ref().is_some_and(|lanes| lanes.uses(id))
    }

    /// Returns true if operations pass any stage on their way to the backend.
    #[inline]
    pub(crate) fn has_stages(&self) -> bool {
        self.shape.is_some()
            || self.data_files.is_some()
            || self.aligner.is_some()
            || self.remotes.is_some()
            || self.lanes.is_some()
    }

    /// [`Io::push`] through the stages in their order. Each is taken out of the engine while it works, so that what it
    /// pushes passes only the stages after it. Out of line, to keep the path without stages short.
    #[inline(never)]
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    fn push_staged(&mut self, op: FileOp) -> Result<(), FileOp> {
        if let Some(mut shape) = self.shape.take() {
            let pushed = shape.push(op, self);
            self.shape = Some(shape);
            return pushed;
        }
        if let Some(mut data_files) = self.data_files.take() {
            let pushed = data_files.push(op, self);
            self.data_files = Some(data_files);
            return pushed;
        }
        if let Some(mut aligner) = self.aligner.take() {
            let pushed = aligner.push(op, self);
            self.aligner = Some(aligner);
            return pushed;
        }
        let op = match &self.remotes {
            None => op,
            Some(remotes) => match remotes.push(op) {
                Pushed::Accepted => return Ok(()),
                Pushed::Full(op) => return Err(op),
                Pushed::NotRemote(op) => op,
            },
        };
        match &mut self.lanes {
            Some(lanes) => lanes.push(op, &mut self.backend),
            None => self.backend.push(op),
        }
    }

    /// [`Io::reap`] through the stages, as in [`Engine::push_staged`]. Drops a stage that is idle and no longer wanted:
    /// a shape without a policy, and lanes that have all ended.
    #[inline(never)]
    fn reap_staged(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if let Some(mut shape) = self.shape.take() {
            let reaped = shape.reap(until, self, done);
            match shape.policy().is_none() && shape.is_idle() {
                true => self.shaped = self.shaped.plus(shape.counts()),
                false => self.shape = Some(shape),
            }
            return reaped;
        }
        if let Some(mut data_files) = self.data_files.take() {
            let reaped = data_files.reap(until, self, done);
            self.data_files = Some(data_files);
            return reaped;
        }
        if let Some(mut aligner) = self.aligner.take() {
            let reaped = aligner.reap(until, self, done);
            self.aligner = Some(aligner);
            return reaped;
        }
        if let Some(mut remotes) = self.remotes.take() {
            let until = remotes.before_sleep(until, &mut self.backend, done);
            let reaped = until.and_then(|until| self.reap(until, done));
            let moved = reaped.and_then(|()| remotes.after_sleep(&mut self.backend, done));
            self.remotes = Some(remotes);
            return moved;
        }
        let Some(lanes) = &mut self.lanes else { return self.backend.reap(until, done) };
        lanes.reap(until, &mut self.backend, done)?;
        if lanes.have_ended() {
            self.lanes = None;
            self.backend.forget(BELL);
        }
        Ok(())
    }
}

impl Io for Engine {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.has_stages() { self.push_staged(op) } else { self.backend.push(op) }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if self.has_stages() { self.reap_staged(until, done) } else { self.backend.reap(until, done) }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        if let Some(found) = self.remotes.as_ref().and_then(|remotes| remotes.allocated(file, at, len)) {
            return found;
        }
        match &mut self.data_files {
            None => self.backend.allocated(file, at, len),
            Some(data_files) => data_files.allocated(file, at, len, &mut self.backend),
        }
    }
}

/// The engine's own handle of an image's data file, if it has one.
fn clone_data_file(image: &ImageFile) -> Result<Option<ImageFile>, EngineError> {
    image.data_file().map(ImageFile::try_clone).transpose().map_err(EngineError::File)
}

/// The number of slots for the requested depth.
pub(crate) fn slots(depth: usize) -> Result<u32, EngineError> {
    let slots = u32::try_from(depth).ok().filter(|slots| (1..=DEPTH_MAX).contains(slots));
    slots.ok_or(EngineError::Depth { depth, max: DEPTH_MAX })
}
