//! Damaged metadata that requests have met, so that the reason why a request failed can be reported.
//!
//! Knows nothing of what should have been there. Keeps the latest, as many as the requests in flight can meet, until
//! the caller takes them.

use std::collections::VecDeque;

use crate::chain_map::{CHUNK, ChainMap};
use crate::format::Mapping;
use crate::{FileId, FileOffset, Span};

/// Bytes of the disk that cannot be read, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file that is damaged.
    pub file: FileId,
    /// The unreadable bytes, clipped to those that a request wanted.
    pub span: Span,
    /// Offset in the file of the damaged metadata, or of the bytes that are missing.
    pub at: FileOffset,
    /// The kind of damage found there.
    pub what: Damaged,
}

/// The damaged metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damaged {
    /// A table entry with this value.
    Entry(u64),
    /// A compressed cluster that cannot be decompressed.
    Compressed,
    /// The file has this many bytes, and should have more.
    Missing(u64),
}

/// Damage that is kept: a client may have this number of requests in flight that all fail on one entry.
const KEPT_MAX: usize = 64;

/// Damage that was met and not taken yet.
#[derive(Debug, Default)]
pub(super) struct MetDamage(VecDeque<Damage>);

impl MetDamage {
    /// The damage that failed a request for `span`. It may lie outside of `span`: what surrounds a write has to be
    /// read.
    pub fn take(&mut self, span: Span) -> Option<Damage> {
        let chunk = ChainMap::chunk_of(span.at);
        let near = Span { at: chunk.at, len: (span.end() - chunk.at).next_multiple_of(CHUNK) };
        let found = self.0.iter().position(|damage| damage.span.overlaps(near))?;
        self.0.remove(found)
    }

    /// Records that the first bytes of `span`, which `file` says are at `place`, cannot be read.
    pub fn add(&mut self, file: FileId, span: Span, place: Mapping) {
        let (at, what, len) = match place {
            Mapping::Damaged { at, raw, len } => (at, Damaged::Entry(raw), len),
            Mapping::Missing { at, has, len } => (at, Damaged::Missing(has), len),
            Mapping::Compressed { at, lead, len, .. } => (at + lead, Damaged::Compressed, len),
            // It was overwritten meanwhile.
            Mapping::Data { .. } | Mapping::Shared { .. } | Mapping::Zero { .. } | Mapping::Parent { .. } => return,
        };
        if self.0.len() >= KEPT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Damage { file, span: Span { at: span.at, len: len.min(span.len) }, at, what });
    }
}
