//! Damaged metadata that requests have met, so that users can be told why a request failed.
//!
//! Knows nothing of what should have been there. Keeps the latest, as many as the requests in flight can meet, until
//! the caller asks.

use super::Disk;
use crate::chain_map::{CHUNK, ChainMap};
use crate::format::{Format, Mapping};
use crate::{FileId, Span};

/// Bytes of the disk that cannot be read, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file that is damaged.
    pub file: FileId,
    /// The bytes, as far as they were asked for.
    pub span: Span,
    /// Offset in the file of the damaged metadata.
    pub at: u64,
    /// What stands there.
    pub what: Damaged,
}

/// The damaged metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damaged {
    /// A table entry with this value.
    Entry(u64),
    /// A compressed cluster that cannot be decompressed.
    Packed,
}

/// Damage that is kept: a client may have so many requests in flight that all fail on one entry.
const KEPT_MAX: usize = 64;

impl<F: Format> Disk<F> {
    /// The damage that failed a request for `span`, unless it was asked for already. It may lie outside of `span`: what
    /// surrounds a write has to be read.
    pub fn take_damage(&mut self, span: Span) -> Option<Damage> {
        let chunk = ChainMap::chunk_of(span.at);
        let near = Span { at: chunk.at, len: (span.end() - chunk.at).next_multiple_of(CHUNK) };
        let found = self.damage.iter().position(|damage| damage.span.overlaps(near))?;
        self.damage.remove(found)
    }

    /// Records that the first bytes of `span` cannot be read because `file` is damaged.
    pub(super) fn met_damage(&mut self, file: FileId, span: Span) {
        let place = self.format_of(file).map(span);
        let (at, what, len) = match place {
            Ok(Mapping::Damaged { at, raw, len }) => (at, Damaged::Entry(raw), len),
            Ok(Mapping::Compressed { at, lead, len, .. }) => (at + lead, Damaged::Packed, len),
            _ => return,
        };
        if self.damage.len() >= KEPT_MAX {
            self.damage.pop_front();
        }
        self.damage.push_back(Damage { file, span: Span { at: span.at, len: len.min(span.len) }, at, what });
    }
}
