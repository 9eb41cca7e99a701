//! Removal of what a killed writer has left at the end of the file, before the next one begins.
//!
//! Knows nothing about files: it says what is to be done, in order. Keeps: whatever of it is done when the power goes,
//! the same image opens.
//!
//! # Order
//!
//! 1. A sync: what was read here may be in a cache only, and blocks that are in no use by it may be in use by what is
//!    durable.
//! 2. `first` is written, and a sync: the copy of the footer, if it was missing. From here on the copy is right.
//! 3. The file gets the length `len`. *Reopened here:* by the copy.
//! 4. `last` is written, and a sync: the footer, at the end.

use zerocopy::IntoBytes;

use super::survey::Survey;
use crate::{FileOffset, ImageError, MetaWrite, Source};

/// How to make a file end behind its last block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tidy {
    /// To be written first.
    pub first: Vec<MetaWrite>,
    /// Then the length of the file.
    pub len: u64,
    /// To be written last.
    pub last: Vec<MetaWrite>,
}

/// The writes that tidy a file that no process has open. `None` if it ends as it should: not more than a block of
/// unused space, and the footer. Not for block devices, whose length is not ours. The image must be opened again
/// afterwards.
pub fn tidy(source: &mut dyn Source) -> Result<Option<Tidy>, ImageError> {
    let survey = Survey::of(source)?;
    let Some(tables) = survey.tables.as_ref().filter(|_| survey.damage().is_none()) else { return Ok(None) };
    let end = tables.occupied().map(|(range, _)| range.end).max().unwrap_or_default();
    let closed = !survey.end.1 && !survey.copy_stale;
    if closed && survey.file_len.saturating_sub(end.0) < tables.slot_len() {
        return Ok(None);
    }
    let footer = |at| vec![MetaWrite { at, bytes: survey.footer.as_bytes().to_vec() }];
    let first = if survey.copy_stale { footer(FileOffset(0)) } else { Vec::new() };
    Ok(Some(Tidy { first, len: end.0, last: footer(end) }))
}
