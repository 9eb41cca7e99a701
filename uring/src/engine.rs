//! The I/O engine, chosen by name when the disk is opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use device::Preset;
use disk::{
    Aligner, Allocation, DataFiles, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Shape, ShapeCounts,
    ShapePolicy, Until,
};
use memory::Buffer;

use crate::{Aio, EngineError, ImageFile, Modelled, Null, Uring};

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

/// The backend and what adapts it to files.
struct Below {
    backend: Backend,
    /// Present only if a file's minimum I/O unit is larger than a sector, or an image has a data file.
    adapters: Option<Box<Adapters>>,
}

/// Adapters between the disk and the backend.
#[derive(Default)]
struct Adapters {
    data_files: DataFiles,
    aligner: Aligner,
}

/// The backend that passes operations to the kernel.
enum Backend {
    /// Over io_uring.
    Uring(Box<Uring>),
    /// Over Linux AIO.
    Aio(Box<Aio>),
    /// To nowhere.
    Null(Box<Null>),
    /// There too, in the time of a device.
    Model(Box<Modelled>),
}

/// The unit in which formats and guests address files.
const SECTOR: usize = 512;

impl Engine {
    /// Opens an engine of this kind, with no fallback, for `depth` concurrent operations on `files` (leaf first).
    pub fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Engine, EngineError> {
        let data: Vec<Option<ImageFile>> = files.iter().map(clone_data_file).collect::<Result<_, EngineError>>()?;
        let units: Vec<Option<IoUnit>> = files.iter().map(IoUnit::of).collect();
        let backend = match kind {
            EngineKind::Uring => Uring::open(files, depth).map(|uring| Backend::Uring(Box::new(uring)))?,
            EngineKind::Aio => Aio::open(files, depth).map(|aio| Backend::Aio(Box::new(aio)))?,
            EngineKind::Null => Null::open(files, depth).map(|null| Backend::Null(Box::new(null)))?,
            EngineKind::Model(preset) => {
                Modelled::open(preset, files, depth).map(|model| Backend::Model(Box::new(model)))?
            }
        };
        let below = Below { backend, adapters: None };
        let mut engine = Engine { below, shape: None, shaped: ShapeCounts::default() };
        for (id, unit) in (0..).map(FileId).zip(units) {
            engine.align(id, unit);
        }
        for (image, data) in (0..).map(FileId).zip(data) {
            engine.add_data_file(image, data)?;
        }
        Ok(engine)
    }

    /// The kind of this engine.
    pub fn kind(&self) -> EngineKind {
        match &self.below.backend {
            Backend::Uring(_) => EngineKind::Uring,
            Backend::Aio(_) => EngineKind::Aio,
            Backend::Null(_) => EngineKind::Null,
            Backend::Model(model) => EngineKind::Model(model.preset()),
        }
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

    /// Enables or disables sub-unit I/O for a file whose storage cannot do it natively.
    fn align(&mut self, id: FileId, unit: Option<IoUnit>) {
        match unit {
            Some(IoUnit { len, end }) => self.below.adapters.get_or_insert_default().aligner.add(id, len, end),
            None => self.below.adapters.iter_mut().for_each(|adapters| adapters.aligner.remove(id)),
        }
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): immediately if it is ready
    /// now, then at each new event (edge triggered: an eventfd need not be read at all). There may be spurious reports,
    /// but none is missed. Watching a key again replaces the old watch.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.watch(fd, write, key),
            Backend::Aio(aio) => aio.watch(fd, write, key),
            Backend::Null(null) => null.wait.watch(fd, write, key),
            Backend::Model(model) => model.wait.watch(fd, write, key),
        }
    }

    /// Stops reporting `key`.
    pub fn forget(&mut self, key: u64) {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.forget(key),
            Backend::Aio(aio) => aio.forget(key),
            Backend::Null(null) => null.wait.forget(key),
            Backend::Model(model) => model.wait.forget(key),
        }
    }

    /// Moves the keys reported since the last call into `into`, without duplicates.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.take_ready(into),
            Backend::Aio(aio) => aio.take_ready(into),
            Backend::Null(null) => null.wait.take_ready(into),
            Backend::Model(model) => model.wait.take_ready(into),
        }
    }

    /// The open file with this id.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        match &self.below.backend {
            Backend::Uring(uring) => uring.file(id),
            Backend::Aio(aio) => aio.file(id),
            Backend::Null(null) => null.wait.file(id),
            Backend::Model(model) => model.wait.file(id),
        }
    }

    /// Registers a buffer that much I/O will go through, if the engine supports that. I/O through unregistered buffers
    /// also works, but is slower.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.register_memory(buffer),
            Backend::Aio(_) | Backend::Null(_) | Backend::Model(_) => Ok(()),
        }
    }

    /// Unregisters a buffer.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.forget_memory(buffer),
            Backend::Aio(_) | Backend::Null(_) | Backend::Model(_) => Ok(()),
        }
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
            self.below.adapters.get_or_insert_default().data_files.add(image, data);
        }
        Ok(())
    }

    fn add_one(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let unit = IoUnit::of(&file);
        let id = match &mut self.below.backend {
            Backend::Uring(uring) => uring.add(file),
            Backend::Aio(aio) => aio.add(file),
            Backend::Null(null) => null.wait.add(file),
            Backend::Model(model) => model.wait.add(file),
        }?;
        self.align(id, unit);
        Ok(id)
    }

    fn data_file_of(&self, id: FileId) -> Option<FileId> {
        self.below.adapters.as_ref()?.data_files.of(id)
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
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.replace(id, file),
            Backend::Aio(aio) => aio.replace(id, file),
            Backend::Null(null) => null.wait.replace(id, file),
            Backend::Model(model) => model.wait.replace(id, file),
        }
    }

    /// Tells the engine that a file has grown by other means than this engine.
    pub fn file_grew(&mut self, id: FileId) {
        for id in [Some(id), self.data_file_of(id)].into_iter().flatten() {
            let unit = self.file(id).and_then(IoUnit::of);
            self.align(id, unit);
        }
    }

    /// The next sleep takes no longer than this; it may end with nothing.
    pub fn limit_sleep(&mut self, most: Duration) {
        match &mut self.below.backend {
            Backend::Uring(uring) => uring.limit_sleep(most),
            Backend::Aio(aio) => aio.limit_sleep(most),
            Backend::Null(null) => null.wait.limit_sleep(most),
            Backend::Model(model) => model.limit_sleep(most),
        }
    }

    /// Removes a file that has nothing in flight, and its data file. Its id may be reused.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let data = self.data_file_of(id);
        let is_busy = |adapters: &Adapters| {
            adapters.data_files.uses(id) || [Some(id), data].into_iter().flatten().any(|id| adapters.aligner.uses(id))
        };
        let is_shaped = self.shape.as_ref().is_some_and(|shape| shape.uses(id));
        if is_shaped || self.below.adapters.as_deref().is_some_and(is_busy) {
            return Err(EngineError::FileBusy(id));
        }
        if let Some(data) = data {
            self.remove_one(data)?;
            if let Some(adapters) = &mut self.below.adapters {
                adapters.data_files.remove(id);
            }
        }
        self.remove_one(id)
    }

    fn remove_one(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let removed = match &mut self.below.backend {
            Backend::Uring(uring) => uring.remove(id),
            Backend::Aio(aio) => aio.remove(id),
            Backend::Null(null) => null.remove(id),
            Backend::Model(model) => model.remove(id),
        }?;
        self.align(id, None);
        Ok(removed)
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

impl Io for Below {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match &mut self.adapters {
            None => self.backend.push(op),
            Some(adapters) => {
                let Adapters { data_files, aligner } = &mut **adapters;
                data_files.push(op, &mut AlignedBackend { aligner, backend: &mut self.backend })
            }
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match &mut self.adapters {
            None => self.backend.reap(until, done),
            Some(adapters) => {
                let Adapters { data_files, aligner } = &mut **adapters;
                data_files.reap(until, &mut AlignedBackend { aligner, backend: &mut self.backend }, done)
            }
        }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        match &mut self.adapters {
            None => self.backend.allocated(file, at, len),
            Some(adapters) => adapters.data_files.allocated(file, at, len, &mut self.backend),
        }
    }
}

/// The backend with the aligner in front of it.
struct AlignedBackend<'a> {
    aligner: &'a mut Aligner,
    backend: &'a mut Backend,
}

impl Io for AlignedBackend<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.aligner.push(op, self.backend)
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.aligner.reap(until, self.backend, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.backend.allocated(file, at, len)
    }
}

/// The engine's own handle of an image's data file, if it has one.
fn clone_data_file(image: &ImageFile) -> Result<Option<ImageFile>, EngineError> {
    image.data_file().map(ImageFile::try_clone).transpose().map_err(EngineError::File)
}

/// The minimum I/O unit of a file.
#[derive(Clone, Copy)]
struct IoUnit {
    len: u64,
    /// The length of a file that may end inside a unit.
    end: Option<u64>,
}

impl IoUnit {
    /// `None` if the file accepts single sectors.
    fn of(file: &ImageFile) -> Option<IoUnit> {
        let len = file.alignment().offset;
        let end = match file.device_len() {
            Some(_) => None,
            None => Some(disk::Source::len(file)),
        };
        (len > SECTOR).then(|| IoUnit { len: u64::try_from(len).unwrap_or(u64::MAX), end })
    }
}

impl Io for Backend {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match self {
            Backend::Uring(uring) => uring.push(op),
            Backend::Aio(aio) => aio.push(op),
            Backend::Null(null) => null.push(op),
            Backend::Model(model) => model.push(op),
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match self {
            Backend::Uring(uring) => uring.reap(until, done),
            Backend::Aio(aio) => aio.reap(until, done),
            Backend::Null(null) => null.reap(until, done),
            Backend::Model(model) => model.reap(until, done),
        }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        match self {
            Backend::Uring(uring) => uring.allocated(file, at, len),
            Backend::Aio(aio) => aio.allocated(file, at, len),
            Backend::Null(null) => null.allocated(file, at, len),
            Backend::Model(model) => model.allocated(file, at, len),
        }
    }
}

/// The number of slots for the requested depth.
pub(crate) fn slots(depth: usize) -> Result<u32, EngineError> {
    let slots = u32::try_from(depth).ok().filter(|slots| (1..=DEPTH_MAX).contains(slots));
    slots.ok_or(EngineError::Depth { depth, max: DEPTH_MAX })
}
