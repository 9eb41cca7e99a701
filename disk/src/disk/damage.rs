//! What damaged metadata a request has met, so that people can be told why it failed.
//!
//! Knows nothing of what the metadata should have been. Keeps the last of it only, until it is asked for.

use super::Disk;
use crate::fold::{Fold, GRAIN};
use crate::format::{Format, Place};
use crate::{FileId, Span};

/// Bytes of the disk that are not to be had, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file whose metadata makes no sense.
    pub file: FileId,
    /// The bytes, as far as they were asked for.
    pub span: Span,
    /// Offset in the file of what makes no sense.
    pub at: u64,
    /// What stands there.
    pub raw: u64,
}

impl<F: Format> Disk<F> {
    /// The damage that failed a request for `span`, if that was not asked for yet. It may lie beside the bytes that
    /// were asked for: what is written around them has to be read.
    pub fn take_damage(&mut self, span: Span) -> Option<Damage> {
        let grain = Fold::grain_of(span.at);
        let near = Span { at: grain.at, len: span.end().saturating_sub(grain.at).next_multiple_of(GRAIN) };
        self.damage.take_if(|damage| damage.span.overlaps(near))
    }

    /// The first bytes of `span` are not to be had: metadata of `file` makes no sense.
    pub(super) fn met_damage(&mut self, file: FileId, span: Span) {
        let place = self.format_of(file).map(|format| format.map(span));
        if let Some(Ok(Place::Damaged { at, raw, len })) = place {
            self.damage = Some(Damage { file, span: Span { at: span.at, len: len.min(span.len) }, at, raw });
        }
    }
}
