//! What stands in the metadata that a VHD is about to write, and how to change it.

use disk::{FileOffset, MetaWrite};

use super::Open;
use crate::sector::SECTOR;
use crate::theme::BLOCK;

/// The bytes of a bitmap of the blocks that the simulator uses, and of a block.
pub(super) const BITMAP_LEN: u64 = 512;
pub(super) const BLOCK_LEN: u64 = BLOCK * SECTOR;

/// Changes the bits of the sectors of `parts` in a bitmap that is about to be written.
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

/// The first sector of a block allocation table begins with an entry, of a header or footer with a cookie.
pub(super) fn is_footer(write: &MetaWrite) -> bool {
    write.bytes.starts_with(b"conectix")
}

/// The footers at the end of the file among the writes.
pub(super) fn footers(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| is_footer(write) && write.at.0 != 0)
}

/// The bitmaps: what stands right in front of a block, which begins at a multiple of 4 KiB.
pub(super) fn bitmaps(batches: &mut [Vec<MetaWrite>]) -> impl Iterator<Item = &mut MetaWrite> {
    batches.iter_mut().flatten().filter(|write| (write.at + BITMAP_LEN) % 4096 == 0 && !is_footer(write))
}

/// A whole header, which goes where the next footer leads to.
fn is_header(write: &MetaWrite) -> bool {
    write.bytes.starts_with(b"cxsparse") && write.bytes.len() == 1024
}

/// Has a header that goes elsewhere written over the first one as well.
pub(super) fn header_in_place(batches: &mut [Vec<MetaWrite>]) {
    for batch in batches {
        let header = batch.iter().find(|write| is_header(write)).cloned();
        batch.extend(header.map(|header| MetaWrite { at: FileOffset(SECTOR), ..header }));
    }
}

/// Has a header written when the footers lead to it.
pub(super) fn header_last(batches: &mut Vec<Vec<MetaWrite>>) {
    let mut headers = Vec::new();
    for batch in batches.iter_mut() {
        let (found, rest) = std::mem::take(batch).into_iter().partition(is_header);
        (headers, *batch) = ([headers, found].concat(), rest);
    }
    batches.push(headers);
    batches.retain(|batch| !batch.is_empty());
}
