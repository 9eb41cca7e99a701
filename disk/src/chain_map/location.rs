//! Where bytes of the disk live.

use crate::{FileId, FileOffset, Span};

/// Bytes of a chunk: the block of most VHDs.
pub const CHUNK: u64 = 2 << 20;
/// The unit of everything in the map.
pub const SECTOR: u64 = 512;
/// Where a run of bytes lives, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Nowhere: zero.
    Zero,
    /// In a file.
    Data {
        /// The file.
        file: FileId,
        /// Offset in it.
        at: FileOffset,
    },
    /// In a file, where others may refer to it too: never overwritten.
    Shared {
        /// The file.
        file: FileId,
        /// Offset in it.
        at: FileOffset,
    },
    /// Lost: metadata of this file makes no sense.
    Damaged {
        /// The file.
        file: FileId,
    },
    /// In a compressed cluster of a file; its format knows which.
    Compressed {
        /// The file.
        file: FileId,
    },
}

impl Location {
    /// Whether the bytes stand in this file as they are.
    pub fn is_in(self, file: FileId) -> bool {
        matches!(self, Location::Data { file: place, .. } if place == file)
    }

    /// The place `by` bytes further on.
    // Each lookup for a request on the fast path ends with it: with the check for overflow it would be a call.
    #[inline(always)]
    pub fn advanced(self, by: u64) -> Location {
        match self {
            Location::Zero | Location::Compressed { .. } | Location::Damaged { .. } => self,
            Location::Shared { file, at } => Location::Shared { file, at: at + by },
            Location::Data { file, at } => Location::Data { file, at: at + by },
        }
    }
}

/// Bytes of the disk that live in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The bytes.
    pub span: Span,
    /// Where the first of them lives.
    pub place: Location,
}

/// Appends a run, or extends the last one if the new run continues it.
pub fn append(runs: &mut Vec<Run>, new: Run) {
    match runs.last_mut() {
        Some(last) if last.place.advanced(last.span.len) == new.place => {
            last.span.len += new.span.len;
        }
        _ => runs.push(new),
    }
}
