//! What waits, and what can go on.
//!
//! Nothing calls back into the disk. Who finds that something can go on puts it into the queue of [`Ready`], from which
//! one loop takes it; so nothing begins while something else is half done.

use crate::{DiskOffset, Span};

/// What waits for metadata, for the end of another write, or for a round.
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

/// What can go on.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ready {
    /// It need not wait any more.
    Parked(Parked),
    /// What waited for metadata around this byte has gone on: the load of its chunk may be over.
    Loaded { at: DiskOffset },
}
