//! The engine that was chosen, by name, when the disk was opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use disk::{Aligner, Allocation, DataFiles, EngineFailed, FileDone, FileId, FileOp, Io, Until};
use memory::Buffer;

use crate::{Aio, EngineError, ImageFile, Uring};

/// The most operations at once: a ring of io_uring has at most 32768 places, and no storage wants half of them.
pub const DEPTH_MAX: u32 = 8192;

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
}

/// One of the engines. It belongs to the thread that opened it.
pub struct Engine {
    carrier: Carrier,
    /// Where a file takes nothing smaller than units larger than a sector, or an image has a data file; else nothing is
    /// done for them.
    adapters: Option<Box<Adapters>>,
}

/// What stands between the disk and the carrier.
#[derive(Default)]
struct Adapters {
    data_files: DataFiles,
    aligner: Aligner,
}

/// What carries operations to the kernel.
enum Carrier {
    /// Over io_uring.
    Uring(Box<Uring>),
    /// Over Linux AIO.
    Aio(Box<Aio>),
}

/// What formats and guests address files by.
const SECTOR: usize = 512;

impl Engine {
    /// Opens an engine of this kind, and no other, for `depth` operations at once on `files` (leaf first).
    pub fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Engine, EngineError> {
        let data: Vec<Option<ImageFile>> = files.iter().map(own_data).collect::<Result<_, EngineError>>()?;
        let units: Vec<Option<Unit>> = files.iter().map(Unit::of).collect();
        let carrier = match kind {
            EngineKind::Uring => Uring::open(files, depth).map(|uring| Carrier::Uring(Box::new(uring)))?,
            EngineKind::Aio => Aio::open(files, depth).map(|aio| Carrier::Aio(Box::new(aio)))?,
        };
        let mut engine = Engine { carrier, adapters: None };
        for (id, unit) in (0..).map(FileId).zip(units) {
            engine.align(id, unit);
        }
        for (image, data) in (0..).map(FileId).zip(data) {
            engine.add_data(image, data)?;
        }
        Ok(engine)
    }

    /// Which it is.
    pub fn kind(&self) -> EngineKind {
        match self.carrier {
            Carrier::Uring(_) => EngineKind::Uring,
            Carrier::Aio(_) => EngineKind::Aio,
        }
    }

    /// Has what is smaller than a unit of a file served, if its storage does not do that.
    fn align(&mut self, id: FileId, unit: Option<Unit>) {
        match unit {
            Some(Unit { len, end }) => self.adapters.get_or_insert_default().aligner.add(id, len, end),
            None => self.adapters.iter_mut().for_each(|adapters| adapters.aligner.remove(id)),
        }
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): at once if it is so now,
    /// then at each new event (edge triggered: an eventfd need not be read at all). A report may come once too often,
    /// never once too seldom. Watching a key again replaces it.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.watch(fd, write, key),
            Carrier::Aio(aio) => aio.watch(fd, write, key),
        }
    }

    /// No more reports for `key`.
    pub fn forget(&mut self, key: u64) {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.forget(key),
            Carrier::Aio(aio) => aio.forget(key),
        }
    }

    /// Moves the keys reported since the last call into `into`, each once.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.take_ready(into),
            Carrier::Aio(aio) => aio.take_ready(into),
        }
    }

    /// A file it works on.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        match &self.carrier {
            Carrier::Uring(uring) => uring.file(id),
            Carrier::Aio(aio) => aio.file(id),
        }
    }

    /// Makes ready for a buffer that much I/O will go through, where the engine has a way to. Without it the same is
    /// done, at a higher price.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.register_memory(buffer),
            Carrier::Aio(_) => Ok(()),
        }
    }

    /// Little will go through it from now on.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.forget_memory(buffer),
            Carrier::Aio(_) => Ok(()),
        }
    }

    /// One file more, with its data file if it has one, under the number that is answered.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let data = own_data(&file)?;
        let id = self.add_one(file)?;
        match self.add_data(id, data) {
            Ok(()) => Ok(id),
            Err(error) => {
                self.remove(id)?;
                Err(error)
            }
        }
    }

    fn add_data(&mut self, image: FileId, data: Option<ImageFile>) -> Result<(), EngineError> {
        if let Some(data) = data {
            let data = self.add_one(data)?;
            self.adapters.get_or_insert_default().data_files.add(image, data);
        }
        Ok(())
    }

    fn add_one(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let unit = Unit::of(&file);
        let id = match &mut self.carrier {
            Carrier::Uring(uring) => uring.add(file),
            Carrier::Aio(aio) => aio.add(file),
        }?;
        self.align(id, unit);
        Ok(id)
    }

    fn data_of(&self, id: FileId) -> Option<FileId> {
        self.adapters.as_ref()?.data_files.of(id)
    }

    /// Another way to the same file, and to its data file: read-only becomes writable, or the reverse. Operations in
    /// flight end by the old one, which is answered, and those pushed from now on go by the new one. To take the right
    /// to write away is for the caller to do only when nothing is being written.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        let data = own_data(&file)?;
        let old = self.replace_one(id, file)?;
        let (Some(number), Some(data)) = (self.data_of(id), data) else { return Ok(old) };
        match self.replace_one(number, data) {
            Ok(_) => Ok(old),
            Err(error) => {
                self.replace_one(id, old)?;
                Err(error)
            }
        }
    }

    fn replace_one(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        match &mut self.carrier {
            Carrier::Uring(uring) => uring.replace(id, file),
            Carrier::Aio(aio) => aio.replace(id, file),
        }
    }

    /// Somebody has made a file longer, by another way than this engine.
    pub fn lengthened(&mut self, id: FileId) {
        for id in [Some(id), self.data_of(id)].into_iter().flatten() {
            let unit = self.file(id).and_then(Unit::of);
            self.align(id, unit);
        }
    }

    /// Lets go of a file, and its data file, on which nothing is in flight. Its number may stand for another one from
    /// now on.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let data = self.data_of(id);
        let is_busy = |adapters: &Adapters| {
            adapters.data_files.uses(id) || [Some(id), data].into_iter().flatten().any(|id| adapters.aligner.uses(id))
        };
        if self.adapters.as_deref().is_some_and(is_busy) {
            return Err(EngineError::FileBusy(id));
        }
        if let Some(data) = data {
            self.remove_one(data)?;
            if let Some(adapters) = &mut self.adapters {
                adapters.data_files.remove(id);
            }
        }
        self.remove_one(id)
    }

    fn remove_one(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let removed = match &mut self.carrier {
            Carrier::Uring(uring) => uring.remove(id),
            Carrier::Aio(aio) => aio.remove(id),
        }?;
        self.align(id, None);
        Ok(removed)
    }
}

impl Io for Engine {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match &mut self.adapters {
            None => self.carrier.push(op),
            Some(adapters) => {
                let Adapters { data_files, aligner } = &mut **adapters;
                data_files.push(op, &mut Aligned { aligner, carrier: &mut self.carrier })
            }
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match &mut self.adapters {
            None => self.carrier.reap(until, done),
            Some(adapters) => {
                let Adapters { data_files, aligner } = &mut **adapters;
                data_files.reap(until, &mut Aligned { aligner, carrier: &mut self.carrier }, done)
            }
        }
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        match &mut self.adapters {
            None => self.carrier.allocated(file, at, len),
            Some(adapters) => adapters.data_files.allocated(file, at, len, &mut self.carrier),
        }
    }
}

/// The carrier with the aligner in front of it.
struct Aligned<'a> {
    aligner: &'a mut Aligner,
    carrier: &'a mut Carrier,
}

impl Io for Aligned<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.aligner.push(op, self.carrier)
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.aligner.reap(until, self.carrier, done)
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        self.carrier.allocated(file, at, len)
    }
}

/// A handle of an image's data file, if it has one, for the engine alone.
fn own_data(image: &ImageFile) -> Result<Option<ImageFile>, EngineError> {
    image.data_file().map(ImageFile::try_clone).transpose().map_err(EngineError::File)
}

/// What a file takes nothing smaller than.
#[derive(Clone, Copy)]
struct Unit {
    len: u64,
    /// Where a file ends that may end inside a unit.
    end: Option<u64>,
}

impl Unit {
    /// `None`: it takes sectors.
    fn of(file: &ImageFile) -> Option<Unit> {
        let len = file.alignment().offset;
        let end = match file.device_len() {
            Some(_) => None,
            None => Some(disk::Source::len(file)),
        };
        (len > SECTOR).then(|| Unit { len: u64::try_from(len).unwrap_or(u64::MAX), end })
    }
}

impl Io for Carrier {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match self {
            Carrier::Uring(uring) => uring.push(op),
            Carrier::Aio(aio) => aio.push(op),
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match self {
            Carrier::Uring(uring) => uring.reap(until, done),
            Carrier::Aio(aio) => aio.reap(until, done),
        }
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        match self {
            Carrier::Uring(uring) => uring.allocated(file, at, len),
            Carrier::Aio(aio) => aio.allocated(file, at, len),
        }
    }
}

/// The number of slots for a depth that was asked for.
pub(crate) fn slots(depth: usize) -> Result<u32, EngineError> {
    let slots = u32::try_from(depth).ok().filter(|slots| (1..=DEPTH_MAX).contains(slots));
    slots.ok_or(EngineError::Depth { depth, max: DEPTH_MAX })
}
