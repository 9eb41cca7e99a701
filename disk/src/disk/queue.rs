//! Work that waits, and work that can continue.
//!
//! Nothing calls back into the disk. Code that finds work which can continue puts it into the queue of [`Ready`], from
//! which one loop takes it; so nothing begins while something else is half done.

use crate::{DiskOffset, Span};

/// An operation that waits for metadata, for the end of another write, or for a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parked {
    /// The rest of a request. It counts as one of its parts.
    Request { number: u32, rest: Span },
    /// A fill, from this byte of the disk on. It counts as one of its reads.
    Fill { fill: u32, at: DiskOffset },
}

impl Parked {
    /// The byte of the disk whose mapping is not known.
    pub fn at(self) -> DiskOffset {
        match self {
            Parked::Request { rest, .. } => rest.at,
            Parked::Fill { at, .. } => at,
        }
    }
}

/// Work that can continue.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ready {
    /// It need not wait any more.
    Parked(Parked),
    /// An operation that waited for metadata around this byte has continued: the load of its chunk may be over.
    Loaded { at: DiskOffset },
}
