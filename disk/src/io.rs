//! File I/O by submission and completion: the only way anything reaches a disk.
//!
//! An engine executes [`FileOp`]s on the files of one chain. A file keeps its number for as long as it is open,
//! wherever in the chain it stands. What an operation points into belongs to it until it comes back, whatever its
//! outcome.

use memory::Segments;

use crate::FileOffset;
use crate::size::{in_memory, on_disk};

/// A file of the chain. When a chain is opened its files are numbered from the leaf (0) down; a leaf that is put on top
/// later has a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u8);

/// The disk's own name for an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// One operation on one file.
#[derive(Clone, Debug)]
pub struct FileOp {
    /// Handed back with the outcome.
    pub id: OpId,
    /// The file.
    pub file: FileId,
    /// The operation on the file.
    pub action: Action,
}

/// An operation on a file. Offsets and lengths are in bytes. Formats and guests keep to sectors of 512; where a file's
/// alignment is larger, [`crate::Aligner`] sees to it.
#[derive(Clone, Debug)]
pub enum Action {
    /// Fill the memory from the file. Bytes behind the end of the file read as zero.
    Read {
        /// Offset in the file.
        at: FileOffset,
        /// Where the bytes go.
        into: Segments,
    },
    /// Write the memory to the file, which grows as needed.
    Write {
        /// Offset in the file.
        at: FileOffset,
        /// Where the bytes come from.
        from: Segments,
    },
    /// Make every write and deallocation that has *completed* so far survive power loss, and the file's length
    /// with them (`fdatasync`).
    SyncData,
    /// Free the space of a range inside the file, whose length does not change; it reads as zero afterwards.
    /// `Unsupported` where the storage cannot promise that, at all or of this range: a block device frees whole
    /// blocks of its own only.
    Deallocate {
        /// Offset in the file.
        at: FileOffset,
        /// Number of bytes.
        len: u64,
    },
}

/// A finished operation.
#[derive(Debug)]
pub struct FileDone {
    /// The operation as it was pushed, memory included.
    pub op: FileOp,
    /// Complete success, or why not. A failed write may have reached any part of its range.
    pub result: Result<(), FileError>,
}

/// Why a file operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// ENOSPC, EDQUOT, EFBIG.
    #[error("no space left")]
    NoSpace,
    /// The storage cannot do this at all.
    #[error("not supported by the storage")]
    Unsupported,
    /// Anything else, by its errno.
    #[error("I/O error (errno {0})")]
    Failed(i32),
}

/// How long [`Io::reap`] may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// Not at all.
    Now,
    /// Until there is at least one completion (or another event that the engine waits for).
    Any,
}

/// The engine itself broke; nothing more will come of it.
#[derive(Debug, thiserror::Error)]
#[error("the I/O engine failed: {what} (errno {errno})")]
pub struct EngineFailed {
    /// The call that failed.
    pub what: &'static str,
    /// Its error number.
    pub errno: i32,
}

/// The allocation of a file at some offset, from the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Data (or the file system cannot tell), for this many bytes.
    Data(u64),
    /// A hole, which reads as zero, for this many bytes.
    Hole(u64),
}

/// An I/O engine: operations on files in, completions out.
pub trait Io {
    /// Queues `op`, or hands it back when full: backpressure, never an I/O error, never a drop.
    // Handing an operation back by value is the point of the signature, whatever its size.
    #[allow(clippy::result_large_err)]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp>;

    /// Submits what is queued; moves finished operations, memory included, into `done`.
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed>;

    /// Queries the allocation at `at`; the answer covers at most `len` bytes. Quick: looks only at the file system's
    /// own tables. For reports of allocation, never for reading.
    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation;
}

/// A plain synchronous read: what opening, checking and describing an image need. Not for the data path.
pub trait Source {
    /// The length of the file in bytes.
    fn len(&self) -> u64;

    /// Fills `bytes` from offset `at`. Any alignment. Reading past the end is an error.
    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault>;

    /// Whether there is a data file too, for an image that keeps its data in one.
    fn has_data_file(&self) -> bool {
        false
    }

    /// Whether the file is empty.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A synchronous read failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadFault {
    /// The range lies behind the end of the file.
    #[error("the file ends before offset {0}")]
    PastEnd(FileOffset),
    /// The storage failed, with this errno.
    #[error("the storage failed (errno {0})")]
    Failed(i32),
}

impl Source for &[u8] {
    fn len(&self) -> u64 {
        on_disk((**self).len())
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(on_disk(bytes.len()));
        match self.get(in_memory(at.0)..in_memory(end.0)) {
            Some(found) => {
                bytes.copy_from_slice(found);
                Ok(())
            }
            None => Err(ReadFault::PastEnd(end)),
        }
    }
}
