//! Recognizes and changes the metadata that a VHD is about to write.

use disk::{FileOffset, MetaWrite};

use super::Open;
use crate::sector::SECTOR;
use crate::theme::BLOCK;

/// Sizes in bytes of a bitmap and of a block in the simulator.
pub(super) const BITMAP_LEN: u64 = 512;
pub(super) const BLOCK_LEN: u64 = BLOCK * SECTOR;

/// Changes the bits of the sectors of `parts` in a bitmap to be written.
pub(super) fn bits_of<'a>(write: &mut MetaWrite, parts: impl Iterator<Item = &'a Open>, change: impl Fn(&mut u8, u8)) {
    let at = write.at;
    for part in parts.filter(|part| part.base == at + BITMAP_LEN) {
        let from = part.span.at % BLOCK_LEN / SECTOR;
        for sector in from..from + part.span.len / SECTOR {
            let byte = usize::try_from(sector / 8).ok().and_then(|at| write.bytes.get_mut(at));
            byte.into_iter().for_each(|byte| change(byte, 0x80 >> (sector % 8)));
        }
    }
}

/// Whether a write is a footer: it and a header begin with a cookie, the first sector of a block allocation table with
/// an entry.
pub(super) fn is_footer(write: &MetaWrite) -> bool {
    write.bytes.starts_with(b"conectix")
}

/// The footers at the end of the file.
pub(super) fn footers(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| is_footer(write) && write.at.0 != 0)
}

/// The bitmaps, each immediately before a block, which begins at a multiple of 4 KiB.
pub(super) fn bitmaps(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| (write.at + BITMAP_LEN) % 4096 == 0 && !is_footer(write))
}

/// Whether a write is a header that will be moved to where the next footer points.
fn is_header(write: &MetaWrite) -> bool {
    write.bytes.starts_with(b"cxsparse") && write.bytes.len() == 1024
}

/// Writes a header that is meant for another place over the first one as well.
pub(super) fn header_in_place(batches: &mut [Vec<MetaWrite>]) {
    for batch in batches {
        let header = batch.iter().find(|write| is_header(write)).cloned();
        batch.extend(header.map(|header| MetaWrite { at: FileOffset(SECTOR), ..header }));
    }
}

/// Moves a header after the footers that point to it.
pub(super) fn header_last(batches: &mut Vec<Vec<MetaWrite>>) {
    let mut headers = Vec::new();
    for batch in batches.iter_mut() {
        let (found, rest) = std::mem::take(batch).into_iter().partition(is_header);
        (headers, *batch) = ([headers, found].concat(), rest);
    }
    batches.push(headers);
    batches.retain(|batch| !batch.is_empty());
}
