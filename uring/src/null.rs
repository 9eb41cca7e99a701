//! An engine that completes every operation at once without doing it, to measure the cost of everything above an
//! engine.
//!
//! Reads leave the memory as it is, writes and deallocations are dropped, and syncs have nothing to make durable. No
//! operation makes a system call. Its thread waits for descriptors as with the io_uring engine, so that the two differ
//! only in the I/O.
//!
//! Invariant: an operation that was pushed is in `done` until the next reap hands it back, in the order of the pushes.

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};

use crate::engine::slots;
use crate::{EngineError, ImageFile, Uring};

/// An engine without I/O; see [`crate::EngineKind::Null`].
pub struct Null {
    /// Waits for watched descriptors, and holds the files by id.
    pub(crate) wait: Uring,
    done: Vec<FileDone>,
}

impl Null {
    /// An engine for up to `depth` concurrent operations on `files`, which it never touches.
    pub fn open(files: Vec<ImageFile>, depth: usize) -> Result<Null, EngineError> {
        slots(depth)?;
        // The ring holds only watches.
        Ok(Null { wait: Uring::open(files, 1)?, done: Vec::with_capacity(depth) })
    }

    /// Removes a file that has nothing in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.done.iter().any(|done| done.op.file == id) {
            return Err(EngineError::FileBusy(id));
        }
        self.wait.remove(id)
    }
}

impl Io for Null {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.done.len() == self.done.capacity() {
            return Err(op);
        }
        self.done.push(FileDone { op, result: Ok(()) });
        Ok(())
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let until = if self.done.is_empty() { until } else { Until::Now };
        done.append(&mut self.done);
        // Without events this only reads memory shared with the kernel.
        self.wait.reap(until, done)
    }

    fn allocated(&mut self, _: FileId, _: FileOffset, len: u64) -> Allocation {
        Allocation::Data(len)
    }
}
