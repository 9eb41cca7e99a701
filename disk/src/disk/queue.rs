//! What waits, and what can go on.
//!
//! Nothing calls back into the disk. Who finds that something can go on puts it into the queue of [`Ready`], from which
//! one loop takes it; so nothing begins while something else is half done.

use crate::format::{MetaBlock, Wait};
use crate::{FileId, Span};

/// What waits for metadata, or for the end of another write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Parked {
    /// The rest of a request.
    Request { number: u32, rest: Span },
    /// A fill, from this byte of the disk on.
    Fill { fill: u32, at: u64 },
}

impl Parked {
    /// The byte of the disk whose mapping is not known.
    pub fn at(self) -> u64 {
        match self {
            Parked::Request { rest, .. } => rest.at,
            Parked::Fill { at, .. } => at,
        }
    }
}

/// What can go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ready {
    /// A request, from here on. This counts as one of its parts.
    Request { number: u32, rest: Span },
    /// A fill whose metadata was loaded.
    Fill { fill: u32 },
    /// What waited for metadata around this byte has gone on: the load of its chunk may be over.
    Loaded { at: u64 },
}

/// Metadata to be loaded, by file.
pub(super) type Missing = Vec<(FileId, MetaBlock)>;

/// Why something cannot be done yet, or at all.
pub(super) enum Obstacle {
    /// The layer of this file has refused for now, or for good.
    Layer(FileId, Wait),
    /// The map needs this metadata.
    Chunk(Missing),
    /// The layer has changes of its last process that are not durable yet.
    Owed,
}
