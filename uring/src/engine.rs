//! The engine that was chosen, by name, when the disk was opened.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOp, Io, Until};
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
pub enum Engine {
    /// Over io_uring.
    Uring(Box<Uring>),
    /// Over Linux AIO.
    Aio(Box<Aio>),
}

impl Engine {
    /// Opens an engine of this kind, and no other, for `depth` operations at once on `files` (leaf first).
    pub fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Engine, EngineError> {
        match kind {
            EngineKind::Uring => Uring::open(files, depth).map(|uring| Engine::Uring(Box::new(uring))),
            EngineKind::Aio => Aio::open(files, depth).map(|aio| Engine::Aio(Box::new(aio))),
        }
    }

    /// Which it is.
    pub fn kind(&self) -> EngineKind {
        match self {
            Engine::Uring(_) => EngineKind::Uring,
            Engine::Aio(_) => EngineKind::Aio,
        }
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): at once if it is so now,
    /// then at each new event (edge triggered: an eventfd need not be read at all). A report may come once too often,
    /// never once too seldom. Watching a key again replaces it.
    pub fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        match self {
            Engine::Uring(uring) => uring.watch(fd, write, key),
            Engine::Aio(aio) => aio.watch(fd, write, key),
        }
    }

    /// No more reports for `key`.
    pub fn forget(&mut self, key: u64) {
        match self {
            Engine::Uring(uring) => uring.forget(key),
            Engine::Aio(aio) => aio.forget(key),
        }
    }

    /// Moves the keys reported since the last call into `into`, each once.
    pub fn take_ready(&mut self, into: &mut Vec<u64>) {
        match self {
            Engine::Uring(uring) => uring.take_ready(into),
            Engine::Aio(aio) => aio.take_ready(into),
        }
    }

    /// A file it works on.
    pub fn file(&self, id: FileId) -> Option<&ImageFile> {
        match self {
            Engine::Uring(uring) => uring.file(id),
            Engine::Aio(aio) => aio.file(id),
        }
    }

    /// Makes ready for a buffer that much I/O will go through, where the engine has a way to. Without it the same is done, at a
    /// higher price.
    pub fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        match self {
            Engine::Uring(uring) => uring.register_memory(buffer),
            Engine::Aio(_) => Ok(()),
        }
    }

    /// Little will go through it from now on.
    pub fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        match self {
            Engine::Uring(uring) => uring.forget_memory(buffer),
            Engine::Aio(_) => Ok(()),
        }
    }

    /// One file more, under the number that is answered.
    pub fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        match self {
            Engine::Uring(uring) => uring.add(file),
            Engine::Aio(aio) => aio.add(file),
        }
    }

    /// Another way to the same file: read-only becomes writable, or the reverse. Operations in flight end by the old
    /// one, which is answered, and those pushed from now on go by the new one. To take the right to write away is for
    /// the caller to do only when nothing is being written.
    pub fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        match self {
            Engine::Uring(uring) => uring.replace(id, file),
            Engine::Aio(aio) => aio.replace(id, file),
        }
    }

    /// Lets go of a file on which nothing is in flight. Its number may stand for another one from now on.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        match self {
            Engine::Uring(uring) => uring.remove(id),
            Engine::Aio(aio) => aio.remove(id),
        }
    }
}

impl Io for Engine {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match self {
            Engine::Uring(uring) => uring.push(op),
            Engine::Aio(aio) => aio.push(op),
        }
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        match self {
            Engine::Uring(uring) => uring.reap(until, done),
            Engine::Aio(aio) => aio.reap(until, done),
        }
    }

    fn allocated(&mut self, file: FileId, at: u64, len: u64) -> Allocation {
        match self {
            Engine::Uring(uring) => uring.allocated(file, at, len),
            Engine::Aio(aio) => aio.allocated(file, at, len),
        }
    }
}

/// The number of slots for a depth that was asked for.
pub(crate) fn slots(depth: usize) -> Result<u32, EngineError> {
    let slots = u32::try_from(depth).ok().filter(|slots| (1..=DEPTH_MAX).contains(slots));
    slots.ok_or(EngineError::Depth { depth, max: DEPTH_MAX })
}
