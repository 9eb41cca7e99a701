//! What executes the operations of an engine or of one of its lanes: io_uring or Linux AIO; for measurements, nothing.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};
use memory::Buffer;

use crate::{Aio, EngineError, EngineKind, ImageFile, Modelled, Null, Uring};

/// Executes operations. It belongs to the thread that opened it.
pub(crate) enum Backend {
    Uring(Box<Uring>),
    Aio(Box<Aio>),
    Null(Box<Null>),
    Model(Box<Modelled>),
}

impl Backend {
    /// Opens a backend for `depth` concurrent operations on `files`, numbered from 0.
    pub(crate) fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Backend, EngineError> {
        match kind {
            EngineKind::Uring => Uring::open(files, depth).map(|uring| Backend::Uring(Box::new(uring))),
            EngineKind::Aio => Aio::open(files, depth).map(|aio| Backend::Aio(Box::new(aio))),
            EngineKind::Null => Null::open(files, depth).map(|null| Backend::Null(Box::new(null))),
            EngineKind::Model(preset) => {
                Modelled::open(preset, files, depth).map(|model| Backend::Model(Box::new(model)))
            }
        }
    }

    pub(crate) fn kind(&self) -> EngineKind {
        match self {
            Backend::Uring(_) => EngineKind::Uring,
            Backend::Aio(_) => EngineKind::Aio,
            Backend::Null(_) => EngineKind::Null,
            Backend::Model(model) => EngineKind::Model(model.preset()),
        }
    }

    /// As [`crate::Engine::watch`].
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        match self {
            Backend::Uring(uring) => uring.watch(fd, write, key),
            Backend::Aio(aio) => aio.watch(fd, write, key),
            Backend::Null(null) => null.wait.watch(fd, write, key),
            Backend::Model(model) => model.wait.watch(fd, write, key),
        }
    }

    /// As [`crate::Engine::forget`].
    pub(crate) fn forget(&mut self, key: u64) {
        match self {
            Backend::Uring(uring) => uring.forget(key),
            Backend::Aio(aio) => aio.forget(key),
            Backend::Null(null) => null.wait.forget(key),
            Backend::Model(model) => model.wait.forget(key),
        }
    }

    /// As [`crate::Engine::take_ready`].
    pub(crate) fn take_ready(&mut self, into: &mut Vec<u64>) {
        match self {
            Backend::Uring(uring) => uring.take_ready(into),
            Backend::Aio(aio) => aio.take_ready(into),
            Backend::Null(null) => null.wait.take_ready(into),
            Backend::Model(model) => model.wait.take_ready(into),
        }
    }

    /// Discards a pending report of `key`.
    pub(crate) fn ignore_ready(&mut self, key: u64) {
        match self {
            Backend::Uring(uring) => uring.ignore_ready(key),
            Backend::Aio(aio) => aio.ignore_ready(key),
            Backend::Null(null) => null.wait.ignore_ready(key),
            Backend::Model(model) => model.wait.ignore_ready(key),
        }
    }

    /// As [`crate::Engine::limit_sleep`].
    pub(crate) fn limit_sleep(&mut self, most: Duration) {
        match self {
            Backend::Uring(uring) => uring.limit_sleep(most),
            Backend::Aio(aio) => aio.limit_sleep(most),
            Backend::Null(null) => null.wait.limit_sleep(most),
            Backend::Model(model) => model.limit_sleep(most),
        }
    }

    /// The open file with this id.
    pub(crate) fn file(&self, id: FileId) -> Option<&ImageFile> {
        match self {
            Backend::Uring(uring) => uring.file(id),
            Backend::Aio(aio) => aio.file(id),
            Backend::Null(null) => null.wait.file(id),
            Backend::Model(model) => model.wait.file(id),
        }
    }

    /// Registers a file; returns its id.
    pub(crate) fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        match self {
            Backend::Uring(uring) => uring.add(file),
            Backend::Aio(aio) => aio.add(file),
            Backend::Null(null) => null.wait.add(file),
            Backend::Model(model) => model.wait.add(file),
        }
    }

    /// Registers a file under an id chosen by another backend, replacing the file that has this id.
    pub(crate) fn put(&mut self, id: FileId, file: ImageFile) -> Result<(), EngineError> {
        match self {
            Backend::Uring(uring) => uring.put(id, file),
            Backend::Aio(aio) => aio.put(id, file),
            Backend::Null(null) => null.wait.put(id, file),
            Backend::Model(model) => model.wait.put(id, file),
        }
    }

    /// Replaces the handle of a file; see [`crate::Engine::replace`].
    pub(crate) fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        match self {
            Backend::Uring(uring) => uring.replace(id, file),
            Backend::Aio(aio) => aio.replace(id, file),
            Backend::Null(null) => null.wait.replace(id, file),
            Backend::Model(model) => model.wait.replace(id, file),
        }
    }

    /// Removes a file that has nothing in flight.
    pub(crate) fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        match self {
            Backend::Uring(uring) => uring.remove(id),
            Backend::Aio(aio) => aio.remove(id),
            Backend::Null(null) => null.remove(id),
            Backend::Model(model) => model.remove(id),
        }
    }

    /// As [`crate::Engine::register_memory`].
    pub(crate) fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        match self {
            Backend::Uring(uring) => uring.register_memory(buffer),
            Backend::Aio(_) | Backend::Null(_) | Backend::Model(_) => Ok(()),
        }
    }

    /// Unregisters a buffer.
    pub(crate) fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        match self {
            Backend::Uring(uring) => uring.forget_memory(buffer),
            Backend::Aio(_) | Backend::Null(_) | Backend::Model(_) => Ok(()),
        }
    }

    /// The registered buffers.
    pub(crate) fn registered(&self) -> Vec<Arc<Buffer>> {
        match self {
            Backend::Uring(uring) => uring.registered(),
            Backend::Aio(_) | Backend::Null(_) | Backend::Model(_) => Vec::new(),
        }
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
