//! Sectors that live here no longer, since the parent holds the same: a merge has copied them there.
//!
//! Knows nothing about who copied them. Keeps: until a round has made it durable, a power loss finds the sectors as
//! they were, so their content stays where it is.
//!
//! # Order
//!
//! 1. In memory bits are cleared. A block left without bits leaves the table; its slot stays as it is.
//! 2. Batch one: the bitmap, and the batmap if it called the block full. *Reopened between the two:* the sectors are
//!    back, all or some of them, with the content that the parent has too. A batmap half old is not trusted.
//! 3. Batch two: the table. *Reopened before it:* a block that has left is back, with the bitmap it had in the file.
//! 4. Settled: now the slot is leaked, is deallocated in the background, and only then used again.
//!
//! A bitmap may have bits set and cleared in the same round. Bits that were set have their data under the sync in front
//! of the batches; for those that were cleared both answers are right until the round has ended. So no part of it
//! depends on another, not even the sectors of one long bitmap.

use super::super::bitmap::Bitmap;
use super::super::layout::{Block, FileSector, UNUSED};
use super::super::survey::index;
use super::{Sparse, sectors};
use crate::Span;
use crate::format::Wait;

impl Sparse {
    pub fn forget(&mut self, span: Span) -> Result<u64, Wait> {
        debug_assert!(self.parent, "what an image without parent forgets is lost");
        let (block, from) = self.locate(span.at);
        let len = span.len.min(self.block_len - from);
        let sector = self.entry(block);
        if sector == UNUSED {
            return Ok(self.unused_run(block, span));
        }
        // Bits behind the disk's end, which other programs may have set, go with the last sectors.
        let to_end = (span.at + len).0 >= self.disk_len;
        let bits_len = if to_end { self.block_len - from } else { len };
        let bitmap_at = sector.start();
        if bits_len == self.block_len && self.loading.contains_key(&bitmap_at) {
            // Somebody reads the bitmap; see `discard`.
            return Err(self.wait_for(bitmap_at));
        }
        if bits_len == self.block_len || self.clear_bits(block, sector, from, bits_len)? {
            self.leave(block, sector);
        }
        Ok(len)
    }

    /// Clears bits of a block. Whether none is left, and none is about to be set.
    fn clear_bits(&mut self, block: Block, sector: FileSector, from: u64, len: u64) -> Result<bool, Wait> {
        if self.is_full(block) && !self.bitmaps.contains_key(&block) {
            let full = Bitmap::filled(sectors(self.block_len), index(self.bitmap_len), true);
            self.keep(block, full, true);
        }
        self.bitmap(block, sector)?;
        let Some(cached) = self.bitmaps.get_mut(&block) else { return Ok(false) };
        let cleared = cached.bitmap.clear(sectors(from), sectors(len));
        let empty = cached.bitmap.is_empty();
        if cleared {
            cached.dirty = true;
            self.dirty_bitmaps.insert(block);
            self.log_bitmap(block, sector);
        }
        self.set_not_full(block);
        Ok(empty && !self.pending.busy(block))
    }

    /// Takes a block out of the table whose content must outlive the table's durable state.
    fn leave(&mut self, block: Block, sector: FileSector) {
        // A write to a sector without a bit may be under way when every other sector is forgotten, one that covers the
        // whole block may not.
        debug_assert!(!self.pending.busy(block), "a block is forgotten under a write");
        self.unlist(block);
        self.space.leave(sector);
        self.forgotten.push(sector);
    }
}
