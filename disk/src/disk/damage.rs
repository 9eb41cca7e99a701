//! What damage a request has met, so that people can be told why it failed.
//!
//! Knows nothing of what should have been there. Keeps what was met last, as much as the requests in flight can meet,
//! until it is asked for.

use super::Disk;
use crate::chain_map::{CHUNK, ChainMap};
use crate::format::{Format, Mapping};
use crate::{FileId, Span};

/// Bytes of the disk that are not to be had, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file that is damaged.
    pub file: FileId,
    /// The bytes, as far as they were asked for.
    pub span: Span,
    /// Offset in the file of what makes no sense.
    pub at: u64,
    /// What is there.
    pub what: Damaged,
}

/// What makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damaged {
    /// An entry of a table, which is this.
    Entry(u64),
    /// A compressed cluster, which does not decompress to one.
    Packed,
}

/// Damage that is kept: a client may have so many requests in flight that all fail of one entry.
const KEPT_MAX: usize = 64;

impl<F: Format> Disk<F> {
    /// The damage that failed a request for `span`, if that was not asked for yet. It may lie beside the bytes that
    /// were asked for: what is written around them has to be read.
    pub fn take_damage(&mut self, span: Span) -> Option<Damage> {
        let chunk = ChainMap::chunk_of(span.at);
        let near = Span { at: chunk.at, len: (span.end() - chunk.at).next_multiple_of(CHUNK) };
        let found = self.damage.iter().position(|damage| damage.span.overlaps(near))?;
        self.damage.remove(found)
    }

    /// The first bytes of `span` are not to be had: `file` is damaged.
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
