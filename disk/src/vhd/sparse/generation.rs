//! Another parent, or a larger table: the metadata that a footer leads to is written again, next to the old.
//!
//! Knows nothing about blocks' content. Keeps: at every moment each footer in the file leads to a complete image.
//!
//! # Order
//!
//! The header has two sectors under one checksum, so it is never changed in place, but for the first of them alone.
//!
//! 1. Batch one: the new header, its locators, the new table as a whole with its batmap behind it, all of it in space
//!    that nothing durable refers to; and the bitmaps of this round. *Reopened here:* the old header and table.
//! 2. Batch two: the footer at the end, which makes the file long enough for the new blocks that the new table refers
//!    to. *Reopened here:* as the copy says, which leads to the old header; the other is written again. Since the copy
//!    counts, what is found does not change when the file grows over the footer at its end.
//! 3. Batch three: the copy of the footer, one sector that leads to the old header or to the new one. Both are
//!    complete.
//! 4. Batch four: sectors of the table, if it has stayed where it was.
//! 5. Settled: the old header's room can be used for the next. Room of an old table becomes leaked space when the image
//!    is opened again, as far as it is large enough for a block.
//!
//! When the round fails, it is not known where the copy leads. Then the room of both generations is held, and the next
//! round writes a third.
//!
//! libvhd accepts metadata in front of the first block only. So room is left there when the first block gets its place
//! ([`floor`]), for the table of the largest disk and for another header. In images of other programs there may be
//! none: then metadata goes behind the last block, since otherwise a disk could not grow nor a merge end, and the user
//! is informed ([`Sparse::is_behind_blocks`], decision 0029).

use std::ops::Range;

use zerocopy::FromZeros;
use zerocopy::IntoBytes;

use super::super::create::batmap_len;
use super::super::layout::{RawBatmapHeader, SECTOR, UNUSED};
use super::super::parent::{Locators, Parent};
use super::super::survey::{Batmap, DiskType, LEN_MAX, Tables, batmap_writes, index, locator_extent};
use super::{ENTRIES, Sparse};
use crate::format::MetaWrite;
use crate::size::{in_32_bits, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind};

/// Bytes of a header.
const HEADER: u64 = 1024;
/// A table is written in pieces of this many sectors.
const PIECE: u32 = 2048;
/// The one size of blocks that libvhd reads: of a table with smaller ones it reads a part, larger ones it refuses.
pub const LIBVHD_BLOCK: u64 = 2 << 20;
/// For a header, and for paths as long as most are: what a change of the parent needs in front of the first block.
const NEXT_HEADER: u64 = 4096;

/// Where the room for metadata ends in front of the first block: behind it blocks get their places. It has space for
/// another header and, unless the table is as large as any, for one that is, with its batmap.
pub fn floor(tables: &Tables) -> FileOffset {
    let first = tables.used.first().map_or(FileOffset(u64::MAX), |sector| sector.start());
    let in_front = tables.extents.iter().filter(|extent| extent.start < first).map(|extent| extent.end);
    let (block_len, blocks) = (tables.header.block_size.get().into(), tables.header.max_table_entries.get().into());
    in_front.max().unwrap_or_default() + room_in_front(block_len, blocks)
}

/// Bytes of that room in an image of `blocks` blocks of this length.
pub fn room_in_front(block_len: u64, blocks: u64) -> u64 {
    let entries = LEN_MAX / LIBVHD_BLOCK;
    match block_len == LIBVHD_BLOCK {
        true if blocks < entries => table_space(entries, true) + NEXT_HEADER,
        true => NEXT_HEADER,
        false => 0,
    }
}

/// Bytes of a table of this number of entries, with a batmap behind it or without.
fn table_space(entries: u64, batmap: bool) -> u64 {
    let map = if batmap { SECTOR + on_disk(batmap_len(entries)) } else { 0 };
    (entries * 4).next_multiple_of(SECTOR) + map
}

/// The differences between the metadata of the next footer and those of the one in force.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Other paths of the parent; `None`: the same.
    locators: Option<Locators>,
    /// The number of entries of another table; `None`: the same table.
    entries: Option<u32>,
}

impl Change {
    /// Bytes of the paths that it brings.
    fn locators_len(&self) -> u64 {
        self.locators.as_ref().map_or(0, Locators::len)
    }

    /// This change on top of `older`: fields that it does not set are taken from there.
    pub fn over(self, older: Change) -> Change {
        Change { locators: self.locators.or(older.locators), entries: self.entries.or(older.entries) }
    }
}

impl Sparse {
    /// Puts the image on another parent, or on none.
    pub fn relink(&mut self, parent: Option<&Parent>) -> Result<(), ImageError> {
        let locators = parent.map(Parent::locators).transpose()?.unwrap_or_default();
        let entries = self.change.as_ref().and_then(|change| change.entries);
        self.keep_room(&Change { locators: Some(locators.clone()), entries })?;
        self.records.leave_out();
        self.name_parent(parent);
        self.change.get_or_insert_default().locators = Some(locators);
        let disk_type = if parent.is_some() { DiskType::Differencing } else { DiskType::Dynamic };
        self.parent = parent.is_some();
        self.footer.disk_type = disk_type.number().into();
        self.footer = self.footer.sealed();
        Ok(())
    }

    /// Gives the parent another identity or time, where its paths stay the same: that is in the first sector of the
    /// header, which is changed in place.
    pub fn rename_parent(&mut self, parent: &Parent) {
        self.name_parent(Some(parent));
        self.dirty_header = true;
        self.records.leave_out();
    }

    fn name_parent(&mut self, parent: Option<&Parent>) {
        let header = &mut self.header;
        header.parent_uuid = [0; 16];
        header.parent_timestamp = 0.into();
        header.parent_name = FromZeros::new_zeroed();
        if let Some(parent) = parent {
            parent.name_in(header);
        }
    }

    /// Gives misspelt codes of locators the right letters, with the next round, where there is room for another header:
    /// codes and checksum are in two sectors of it.
    pub fn mend_locators(&mut self) {
        if self.header.is_misspelt() && self.rooms_in_front(&[HEADER]).is_some() {
            self.header.spell_right();
            self.change.get_or_insert_default();
        }
    }

    /// Whether metadata stands behind a block, as of the last round that was sealed.
    pub fn is_behind_blocks(&self) -> bool {
        let blocks = self.table.iter().filter(|&&sector| sector != UNUSED);
        let first = blocks.min().map_or(FileOffset(u64::MAX), |sector| sector.start());
        self.extents().iter().any(|extent| extent.start > first)
    }

    /// Makes the disk larger.
    pub fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        let blocks = len.div_ceil(self.block_len);
        let narrow = self.batmap.as_ref().is_some_and(|batmap| batmap.bits.len() < index(blocks.div_ceil(8)));
        let entries = (blocks > u64::from(self.room) || narrow).then(|| self.entries_for(blocks));
        if entries.is_some() {
            let locators = self.change.as_ref().and_then(|change| change.locators.clone());
            self.keep_room(&Change { locators, entries })?;
        }
        self.records.leave_out();
        self.table.resize(index(blocks), UNUSED);
        self.full.resize(index(blocks.div_ceil(64)), 0);
        self.disk_len = len;
        self.footer.resize(len);
        self.footer = self.footer.sealed();
        (self.dirty_footer, self.dirty_copy) = (true, true);
        if entries.is_some() {
            self.change.get_or_insert_default().entries = entries;
        }
        Ok(())
    }

    /// Keeps room on a device for what is to be laid out.
    fn keep_room(&mut self, change: &Change) -> Result<(), ImageError> {
        let header = HEADER + change.locators_len();
        let table = change.entries.map(|entries| table_space(entries.into(), self.batmap.is_some()));
        let lens: Vec<u64> = table.into_iter().chain([header]).collect();
        if self.space.keep_room(&lens) || self.rooms_in_front(&lens).is_some() {
            return Ok(());
        }
        let what = "there is no room left on the device for a larger table or another header";
        Err(ImageError::new(ImageErrorKind::OutOfLimits, what))
    }

    /// Entries of a table for `blocks` blocks, with some to spare, so that a disk that grows by little each time does
    /// not leave a table behind each time: enough for the largest disk where there is room for that, else an eighth
    /// more.
    fn entries_for(&self, blocks: u64) -> u32 {
        let eighth_more = (blocks + blocks / 8).next_multiple_of(ENTRIES.into());
        let header = HEADER + self.change.as_ref().map_or(0, Change::locators_len);
        let fits =
            |entries: &u64| self.rooms_in_front(&[table_space(*entries, self.batmap.is_some()), header]).is_some();
        let all = (self.block_len == LIBVHD_BLOCK).then_some(LEN_MAX / LIBVHD_BLOCK);
        let in_front = all.into_iter().chain([eighth_more, blocks.next_multiple_of(ENTRIES.into())]).find(fits);
        in_32_bits(in_front.unwrap_or(eighth_more), "LEN_MAX")
    }

    /// Lays out the requested generation, if any, and returns the writes of its metadata. From here on the footer leads
    /// to it.
    pub fn lay_out(&mut self) -> Option<Vec<MetaWrite>> {
        let change = self.change.take()?;
        self.space.give_room_back();
        let mut held = self.extents();
        self.held.append(&mut held);
        let mut writes = Vec::new();
        // The table first: it needs the most room.
        if let Some(entries) = change.entries {
            writes.append(&mut self.move_table(entries));
        }
        let len = HEADER + change.locators_len();
        let at = self.find_room(len);
        self.held.push(at..at + len);
        if let Some(locators) = &change.locators {
            writes.append(&mut locators.place(&mut self.header, at + HEADER));
        }
        self.header_at = at;
        self.header = self.header.sealed();
        writes.push(MetaWrite { at, bytes: self.header.as_bytes().to_vec() });
        self.footer.data_offset = at.0.into();
        self.footer = self.footer.sealed();
        (self.dirty_footer, self.dirty_copy, self.dirty_header) = (true, true, false);
        self.round.change = Some(change);
        Some(writes)
    }

    /// A new table with all that is in it now, and a batmap behind it.
    fn move_table(&mut self, entries: u32) -> Vec<MetaWrite> {
        let table_len = (u64::from(entries) * 4).next_multiple_of(SECTOR);
        let map_len = self.batmap.as_ref().map_or(0, |_| batmap_len(entries.into()));
        let space = table_space(entries.into(), self.batmap.is_some());
        let at = self.find_room(space);
        self.held.push(at..at + space);
        self.table_at = at;
        self.room = entries;
        self.header.table_offset = at.0.into();
        self.header.max_table_entries = entries.into();
        self.dirty_table.clear();
        let sectors = in_32_bits(table_len / SECTOR, "LEN_MAX");
        let pieces = (0..sectors).step_by(index(PIECE.into()));
        let mut writes: Vec<MetaWrite> = pieces
            .map(|first| {
                let piece = first..(first + PIECE).min(sectors);
                let at = at + u64::from(first) * SECTOR;
                MetaWrite { at, bytes: piece.flat_map(|sector| self.table_sector(sector).bytes).collect() }
            })
            .collect();
        if let Some(batmap) = self.batmap.take() {
            let mut bits = batmap.bits;
            bits.resize(map_len, 0);
            let header_at = at + table_len;
            let header = RawBatmapHeader {
                offset: (header_at + SECTOR).0.into(),
                size: in_32_bits(on_disk(map_len) / SECTOR, "LEN_MAX").into(),
                ..batmap.header
            };
            writes.append(&mut batmap_writes(&header, header_at, &bits));
            self.batmap = Some(Batmap { header, header_at, bits, sound: true });
            self.dirty_batmap = false;
        }
        writes
    }

    /// Where the metadata in force stands.
    fn extents(&self) -> Vec<Range<FileOffset>> {
        let of = |at: FileOffset, len: u64| at..at + len;
        let table_len = (u64::from(self.header.max_table_entries.get()) * 4).next_multiple_of(SECTOR);
        let mut extents = vec![of(FileOffset(0), SECTOR), of(self.header_at, HEADER), of(self.table_at, table_len)];
        extents.extend(self.header.locators.iter().filter_map(locator_extent));
        if let Some(batmap) = &self.batmap {
            extents.push(of(batmap.header_at, SECTOR));
            extents.push(of(FileOffset(batmap.header.offset.get()), on_disk(batmap.bits.len())));
        }
        extents
    }

    /// Room for metadata: in front of the first block, else behind the last.
    fn find_room(&mut self, len: u64) -> FileOffset {
        match self.rooms_in_front(&[len]).as_deref() {
            Some([at]) if *at < self.space.end() => *at,
            // Without a block, that is in front of those to come.
            _ => self.space.take_room(len),
        }
    }

    /// Room for pieces of metadata of these lengths in front of the first block, for all of them or for none.
    fn rooms_in_front(&self, lens: &[u64]) -> Option<Vec<FileOffset>> {
        // The footer at the end may stand in a gap before blocks that came later. While it is the only one, it stays.
        if self.copy_lost {
            return None;
        }
        let blocks = self.table.iter().copied().filter(|&sector| sector != UNUSED);
        let slots = blocks.chain(self.pending.slots()).chain(self.space.idle());
        let first_block = slots.map(|sector| self.space.range(sector).start).min();
        // Without a block all of the file is in front, but for the footer at its end.
        let limit = first_block.unwrap_or(FileOffset(u64::MAX)).min(self.space.limit());
        let mut taken = self.extents();
        taken.extend(self.held.iter().cloned());
        if first_block.is_none() && self.space.footer_moves() {
            taken.push(self.space.end()..self.space.end() + SECTOR);
        }
        lens.iter()
            .map(|&len| {
                let at = first_gap(&mut taken, len).filter(|&at| at + len <= limit)?;
                taken.push(at..at + len);
                Some(at)
            })
            .collect()
    }
}

/// Where the first `len` bytes are that nothing has taken.
fn first_gap(taken: &mut [Range<FileOffset>], len: u64) -> Option<FileOffset> {
    taken.sort_unstable_by_key(|range| range.start);
    let mut floor = FileOffset(0);
    for range in taken {
        if range.start >= floor + len {
            return Some(floor);
        }
        floor = floor.max(range.end.align_up(SECTOR));
    }
    Some(floor)
}
