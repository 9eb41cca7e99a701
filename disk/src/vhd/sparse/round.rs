//! The writes of a round, their order, and how they are settled. The order is argued in [`super::super`].

use std::collections::BTreeSet;

use zerocopy::IntoBytes;

use super::super::layout::{Block, FileSector, checksum};
use super::super::survey::batmap_writes;
use super::Sparse;
use super::generation::Change;
use crate::FileOffset;
use crate::format::MetaWrite;

/// The batch of a round in which bitmaps, batmap and footer are written, for the redo log.
pub const FIRST: u8 = 0;
/// The batch of the table.
pub const TABLE: u8 = 1;

/// The changes that the round under way makes durable.
#[derive(Debug, Default)]
pub struct Round {
    bitmaps: Vec<Block>,
    table: BTreeSet<u32>,
    forgotten: Vec<FileSector>,
    header: bool,
    footer: bool,
    pub(in super::super) copy: bool,
    pub(in super::super) batmap: bool,
    /// The generation that it leads to.
    pub(in super::super) change: Option<Change>,
}

impl Sparse {
    pub fn dirty(&self) -> usize {
        let single = [self.dirty_batmap, self.dirty_footer, self.dirty_copy, self.dirty_header, self.change.is_some()];
        let single = single.into_iter().filter(|&dirty| dirty).count();
        let blocks = self.dirty_bitmaps.len() + self.dirty_table.len() + single;
        blocks + self.forgotten.len()
    }

    pub fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        let mut first = self.seal_bitmaps();
        let generation = self.lay_out();
        self.round.batmap = std::mem::take(&mut self.dirty_batmap);
        if let Some(batmap) = self.batmap.as_mut().filter(|_| self.round.batmap) {
            batmap.header.checksum = checksum(&batmap.bits).into();
            first.extend(batmap_writes(&batmap.header, batmap.header_at, &batmap.bits));
        }
        self.round.header = std::mem::take(&mut self.dirty_header);
        if self.round.header {
            self.header = self.header.sealed();
            let sector = self.header.as_bytes().iter().take(512).copied().collect();
            first.push(MetaWrite { at: self.header_at, bytes: sector });
        }
        let (mut copy, mut footer): (Vec<_>, Vec<_>) =
            self.seal_footers().into_iter().partition(|write| write.at.0 == 0);
        let apart = generation.is_some();
        first.extend(generation.into_iter().flatten());
        if !apart {
            first.append(&mut copy);
            first.append(&mut footer);
        }
        self.round.table = std::mem::take(&mut self.dirty_table);
        let table: Vec<MetaWrite> = self.round.table.iter().map(|&sector| self.table_sector(sector)).collect();
        self.round.forgotten.append(&mut self.forgotten);
        [first, footer, copy, table].into_iter().filter(|batch| !batch.is_empty()).collect()
    }

    fn seal_bitmaps(&mut self) -> Vec<MetaWrite> {
        let mut writes = Vec::new();
        for block in std::mem::take(&mut self.dirty_bitmaps) {
            let at = self.entry(block).start();
            if let Some(cached) = self.bitmaps.get_mut(&block) {
                writes.push(MetaWrite { at, bytes: cached.bitmap.as_bytes().to_vec() });
                (cached.dirty, cached.sealed) = (false, true);
                self.round.bitmaps.push(block);
            }
        }
        writes
    }

    fn seal_footers(&mut self) -> Vec<MetaWrite> {
        self.round.footer = std::mem::take(&mut self.dirty_footer);
        self.round.copy = std::mem::take(&mut self.dirty_copy);
        let places = [(self.round.copy, Some(FileOffset(0))), (self.round.footer, self.space.footer_at())];
        let footer = |at| MetaWrite { at, bytes: self.footer.as_bytes().to_vec() };
        places.into_iter().filter(|&(dirty, _)| dirty).filter_map(|(_, at)| at.map(footer)).collect()
    }

    pub fn settled(&mut self, durable: bool) {
        let round = std::mem::take(&mut self.round);
        for block in round.bitmaps {
            if let Some(cached) = self.bitmaps.get_mut(&block) {
                cached.sealed = false;
                if !durable {
                    cached.dirty = true;
                    self.dirty_bitmaps.insert(block);
                } else if !cached.dirty && cached.bitmap.is_full() {
                    self.bitmaps.remove(&block);
                }
            }
        }
        if durable {
            self.space.prove();
            round.forgotten.into_iter().for_each(|sector| self.space.forgotten(sector));
            self.copy_lost &= !round.copy;
            if round.change.is_some() {
                self.held.clear();
            }
            return;
        }
        self.forgotten.extend(round.forgotten);
        self.dirty_table.extend(round.table);
        self.dirty_header |= round.header;
        self.dirty_footer |= round.footer;
        self.dirty_copy |= round.copy;
        self.dirty_batmap |= round.batmap;
        if let Some(older) = round.change {
            self.change = Some(self.change.take().unwrap_or_default().over(older));
        }
    }
}
