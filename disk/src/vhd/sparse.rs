//! The blocks of a dynamic or differencing image: table, bitmaps, reservations, rounds.
//!
//! Knows nothing about requests or files. Keeps: a reader never sees a place whose data is not written, and a
//! round speaks only of what was committed when it was sealed.

mod forget;
mod generation;
mod round;

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use rustc_hash::FxHashMap;
use zerocopy::IntoBytes;

use super::bitmap::Bitmap;
use super::layout::{Block, FileSector, RawFooter, RawHeader, SECTOR, UNUSED};
use super::pending::{Pending, Write};
use super::space::Space;
use super::survey::{Batmap, DiskType, Survey, bitmap_len, index};
use crate::format::{Access, Tail};
use crate::size::{in_32_bits, on_disk};
use crate::{DiskOffset, FileOffset, FileRange, Records, Span};
pub use generation::room_in_front;
use generation::{Change, floor};
use round::{FIRST, Round, TABLE};

use crate::format::{Committed, Discarded, Mapping, MetaBlock, MetaWrite, Reserved, Ticket, Wait};

/// Table entries in a sector.
const ENTRIES: u32 = 128;
/// Bitmaps kept though nothing is to be written of them: at 512 bytes each 1 MiB, enough for the partly written
/// blocks of 4 GiB of disk.
const BITMAPS_WRITABLE: usize = 2048;
/// Bitmaps kept of a layer that is only read. Once folded into the map of the chain they are not needed again; a disk
/// folds sixteen chunks at once, each of at most four blocks, and this is four times that.
const BITMAPS_READ_ONLY: usize = 256;

/// A bitmap in memory.
#[derive(Debug)]
struct Cached {
    bitmap: Bitmap,
    /// Changed since the last seal.
    dirty: bool,
    /// In the round under way: a reload could find the old bytes.
    sealed: bool,
    /// Its number in the order of arrival.
    arrival: u64,
}

/// Blocks and where they are.
#[derive(Debug)]
pub struct Sparse {
    parent: bool,
    block_len: u64,
    /// Of a bitmap in the file.
    bitmap_len: u64,
    disk_len: u64,
    header: RawHeader,
    header_at: FileOffset,
    table_at: FileOffset,
    table: Vec<FileSector>,
    /// Entries that the table in the file has.
    room: u32,
    /// Entries whose blocks lie over something else, or outside of the file; none in an image that can be written to.
    damaged: BTreeSet<FileSector>,
    /// Blocks with every sector written, one bit each: their bitmap need not be looked at.
    full: Vec<u64>,
    bitmaps: FxHashMap<Block, Cached>,
    /// The order in which bitmaps came (block and number), for choosing which to forget.
    arrivals: VecDeque<(Block, u64)>,
    last_arrival: u64,
    bitmaps_max: usize,
    /// Bitmaps requested with [`Wait::Load`], by their offset in the file.
    loading: FxHashMap<FileOffset, Block>,
    pending: Pending,
    space: Space,
    pub(super) footer: RawFooter,
    pub(super) batmap: Option<Batmap>,
    dirty_bitmaps: BTreeSet<Block>,
    /// By sector of the table.
    dirty_table: BTreeSet<u32>,
    pub(super) dirty_batmap: bool,
    /// In its first sector only.
    dirty_header: bool,
    pub(super) dirty_footer: bool,
    /// The copy of the footer at the start of the file.
    pub(super) dirty_copy: bool,
    /// Whether that copy was found missing, and is so still.
    pub(super) copy_lost: bool,
    /// A generation of metadata still to be written.
    pub(super) change: Option<Change>,
    /// Where metadata stands that a footer in the file may still lead to.
    held: Vec<Range<FileOffset>>,
    /// Slots freed since the last seal.
    forgotten: Vec<FileSector>,
    pub(super) round: Round,
    records: Records,
}

impl Sparse {
    /// # Panics
    /// If the survey has no tables.
    pub fn new(survey: Survey, access: Access, tail: Tail) -> Sparse {
        // What is open for reading only has nothing to write, not even a repair.
        let writable = access == Access::ReadWrite;
        let Some(tables) = survey.tables else { unreachable!("a sparse image has tables") };
        let block_len = u64::from(tables.header.block_size.get());
        let bitmap_len = bitmap_len(block_len);
        let disk_len = survey.footer.current_size.get();
        let zero_tail = tail == Tail::Zeroes;
        // With damaged entries nothing is placed anywhere, and the space they seem to leave free can be large.
        let occupied = tables.occupied().map(|(range, _)| range).filter(|_| survey.damaged.is_empty());
        let floor = floor(&tables);
        let space = Space::new(bitmap_len, block_len, occupied, survey.file_len, zero_tail, floor);
        let full = full_blocks(tables.batmap.as_ref(), tables.bat.len());
        let unsound = tables.batmap.as_ref().is_some_and(|batmap| !batmap.sound);
        let mut sparse = Sparse {
            parent: survey.disk_type == DiskType::Differencing,
            block_len,
            bitmap_len,
            disk_len,
            header: tables.header,
            header_at: FileOffset(survey.footer.data_offset.get()),
            table_at: FileOffset(tables.header.table_offset.get()),
            table: tables.bat,
            room: tables.room,
            damaged: survey.damaged,
            full,
            bitmaps: FxHashMap::default(),
            arrivals: VecDeque::new(),
            last_arrival: 0,
            bitmaps_max: if access == Access::ReadOnly { BITMAPS_READ_ONLY } else { BITMAPS_WRITABLE },
            loading: FxHashMap::default(),
            pending: Pending::default(),
            space,
            footer: survey.footer,
            batmap: tables.batmap,
            dirty_bitmaps: BTreeSet::new(),
            dirty_table: BTreeSet::new(),
            dirty_batmap: unsound && writable,
            dirty_header: false,
            dirty_footer: survey.end.1 && writable,
            dirty_copy: survey.copy_stale && writable,
            copy_lost: survey.copy_stale,
            change: None,
            held: Vec::new(),
            forgotten: Vec::new(),
            round: Round::default(),
            records: Records::default(),
        };
        if writable {
            sparse.mend_locators();
        }
        sparse
    }

    /// The writes that restore redundant metadata and correct locators, in the order of a round.
    pub fn mending(survey: Survey, tail: Tail) -> Vec<Vec<MetaWrite>> {
        Sparse::new(survey, Access::ReadWrite, tail).seal()
    }

    pub fn allocated(&self) -> u64 {
        let blocks = self.table.iter().filter(|&&sector| sector != UNUSED).count();
        on_disk(blocks) * self.block_len
    }

    pub fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let (block, from) = self.locate(span.at);
        let len = span.len.min(self.block_len - from);
        let sector = self.entry(block);
        if sector == UNUSED {
            return Ok(Mapping::Parent { len: self.unused_run(block, span) });
        }
        if self.damaged.contains(&sector) {
            return Ok(Mapping::Damaged { at: self.entry_at(block), raw: sector.0.into(), len });
        }
        let at = self.space.block_at(sector) + from;
        if self.is_full(block) {
            return Ok(Mapping::Data { at, len });
        }
        let (set, run) = self.bitmap(block, sector)?.run(sectors(from), sectors(len));
        let len = u64::from(run) * SECTOR;
        Ok(if set { Mapping::Data { at, len } } else { Mapping::Parent { len } })
    }

    pub fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        let (block, from) = self.locate(span.at);
        let len = span.len.min(self.block_len - from);
        let write = Write { block, from: sectors(from), count: sectors(len) };
        let sector = self.entry(block);
        let (slot, changes) = if sector != UNUSED {
            let written = self.is_full(block) || self.bitmap(block, sector)?.all(write.from, write.count);
            (sector, !written)
        } else {
            let space = &mut self.space;
            (self.pending.slot(block, || space.take())?.sector, true)
        };
        let ticket = changes.then(|| self.pending.begin(write));
        Ok(Reserved { at: self.space.block_at(slot) + from, len, ticket, fill: None })
    }

    pub fn commit(&mut self, ticket: Ticket) -> Option<Committed> {
        let write = self.pending.end(ticket);
        let mut span = self.span_of(write);
        if let Some(slot) = self.pending.claim(write.block) {
            // The first write to a new block: from now on the block is there. In space that reads as zero, the sectors
            // that were never written are what they should be already.
            let whole = slot.clean && !self.parent;
            let count = sectors(self.block_len);
            // Another program's batmap may call a block full that is not even there.
            self.set_not_full(write.block);
            self.keep(write.block, Bitmap::filled(count, index(self.bitmap_len), whole), true);
            self.set_entry(write.block, slot.sector);
            let bitmap_at = slot.sector.start();
            self.records.fill(FIRST, bitmap_at, self.bitmap_len, if whole { 0xff } else { 0 });
            if self.space.footer_moves() {
                self.dirty_footer = true;
                self.records.bytes(FIRST, self.space.end(), self.footer.as_bytes());
            }
            if whole {
                self.set_full(write.block);
                span = self.span_of(Write { block: write.block, from: 0, count });
            }
        }
        self.set_bits(write);
        let from = span.at % self.block_len;
        let at = self.space.block_at(self.entry(write.block)) + from;
        Some(Committed { span, at })
    }

    pub fn abandon(&mut self, ticket: Ticket) {
        let write = self.pending.end(ticket);
        if let Some(slot) = self.pending.drop_if_idle(write.block) {
            self.space.give_back(slot.sector);
        }
    }

    pub fn discard(&mut self, span: Span) -> Result<Discarded, Wait> {
        let (block, from) = self.locate(span.at);
        let len = span.len.min(self.block_len - from);
        let sector = self.entry(block);
        if sector == UNUSED {
            return Ok(Discarded::Nothing { len: self.unused_run(block, span) });
        }
        let at = self.space.block_at(sector) + from;
        let whole = from == 0 && (len == self.block_len || span.at + len == DiskOffset(self.disk_len));
        if whole && !self.parent {
            let bitmap_at = sector.start();
            if self.loading.contains_key(&bitmap_at) {
                // Somebody reads the bitmap. Should that take very long, the place might have another block by then,
                // whose bitmap the old bytes would be taken for.
                return Err(self.wait_for(bitmap_at));
            }
            self.free(block, sector);
            return Ok(Discarded::Freed { at, len, size: self.block_len });
        }
        if self.is_full(block) {
            return Ok(Discarded::Kept { at, len });
        }
        let (set, run) = self.bitmap(block, sector)?.run(sectors(from), sectors(len));
        let len = u64::from(run) * SECTOR;
        Ok(if set { Discarded::Kept { at, len } } else { Discarded::Nothing { len } })
    }

    pub fn released(&mut self, at: FileOffset, clean: bool) {
        let sector = u32::try_from((at - self.bitmap_len) / SECTOR).map_or(UNUSED, FileSector);
        self.space.released(sector, clean);
    }

    pub fn reclaim(&mut self) -> Option<FileRange> {
        self.space.next_leaked().map(|sector| FileRange { at: self.space.block_at(sector), len: self.block_len })
    }

    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) {
        let Some(index) = self.loading.remove(&block.at) else { return };
        let still_there = self.entry(index).start() == block.at;
        if still_there && !self.bitmaps.contains_key(&index) {
            let bitmap = Bitmap::from_bytes(sectors(self.block_len), bytes);
            if bitmap.is_full() {
                self.set_full(index);
            } else {
                self.keep(index, bitmap, false);
            }
        }
    }

    /// Forgets the bitmaps that are in the file as they are here, and will not be changed by a write under way.
    pub fn drop_caches(&mut self) {
        self.bitmaps.retain(|&block, cached| cached.dirty || cached.sealed || self.pending.busy(block));
        self.bitmaps.shrink_to_fit();
        let kept = &self.bitmaps;
        self.arrivals.retain(|(block, arrival)| kept.get(block).is_some_and(|cached| cached.arrival == *arrival));
        self.arrivals.shrink_to_fit();
    }

    /// The block of a byte of the disk, and the byte's place in the block.
    fn locate(&self, at: DiskOffset) -> (Block, u64) {
        let Ok(block) = u32::try_from(at / self.block_len) else { unreachable!("no disk is as large as 2^32 blocks") };
        (Block(block), at % self.block_len)
    }

    /// Where on the disk a block begins.
    fn start_of(&self, block: Block) -> DiskOffset {
        DiskOffset(u64::from(block.0) * self.block_len)
    }

    fn entry(&self, block: Block) -> FileSector {
        self.table.get(index(block.0.into())).copied().unwrap_or(UNUSED)
    }

    fn set_entry(&mut self, block: Block, sector: FileSector) {
        if let Some(entry) = self.table.get_mut(index(block.0.into())) {
            *entry = sector;
            self.dirty_table.insert(block.0 / ENTRIES);
            let at = self.entry_at(block);
            self.records.bytes(TABLE, at, &sector.0.to_be_bytes());
        }
    }

    /// Where in the file the table entry of a block stands.
    fn entry_at(&self, block: Block) -> FileOffset {
        self.table_at + u64::from(block.0) * 4
    }

    /// The changes that are to be logged.
    pub fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    /// Logs the bitmap of a block as it is now.
    fn log_bitmap(&mut self, block: Block, sector: FileSector) {
        let Some(cached) = self.bitmaps.get(&block) else { return };
        let (at, bytes) = (sector.start(), cached.bitmap.as_bytes());
        match bytes.first().copied().filter(|&first| bytes.iter().all(|&byte| byte == first)) {
            Some(byte) => self.records.fill(FIRST, at, self.bitmap_len, byte),
            None => self.records.bytes(FIRST, at, bytes),
        }
    }

    /// Bytes from the start of `span`, which lies in the unused block `block`, up to the next used one.
    fn unused_run(&self, block: Block, span: Span) -> u64 {
        let mut end = self.start_of(block) + self.block_len;
        while end < span.end() && self.entry(self.locate(end).0) == UNUSED {
            end += self.block_len;
        }
        end.min(span.end()) - span.at
    }

    /// The bytes of the disk that a write covers; the last block may reach behind the disk's end.
    fn span_of(&self, write: Write) -> Span {
        let at = self.start_of(write.block) + u64::from(write.from) * SECTOR;
        let len = (u64::from(write.count) * SECTOR).min(self.disk_len - at.0);
        Span { at, len }
    }

    fn is_full(&self, block: Block) -> bool {
        self.full.get(index(u64::from(block.0 / 64))).is_some_and(|word| word & (1 << (block.0 % 64)) != 0)
    }

    fn set_full(&mut self, block: Block) {
        if let Some(word) = self.full.get_mut(index(u64::from(block.0 / 64))) {
            *word |= 1 << (block.0 % 64);
        }
    }

    /// The bitmap of a used block.
    fn bitmap(&mut self, block: Block, sector: FileSector) -> Result<&Bitmap, Wait> {
        match self.bitmaps.get(&block) {
            Some(cached) => Ok(&cached.bitmap),
            None => {
                let at = sector.start();
                self.loading.insert(at, block);
                Err(self.wait_for(at))
            }
        }
    }

    fn wait_for(&self, at: FileOffset) -> Wait {
        Wait::Load(MetaBlock { at, len: in_32_bits(self.bitmap_len, "BLOCK_MAX") })
    }

    fn keep(&mut self, block: Block, bitmap: Bitmap, dirty: bool) {
        self.last_arrival = self.last_arrival.wrapping_add(1);
        let arrival = self.last_arrival;
        self.bitmaps.insert(block, Cached { bitmap, dirty, sealed: false, arrival });
        self.arrivals.push_back((block, arrival));
        if dirty {
            self.dirty_bitmaps.insert(block);
        }
        // Each turn looks at one old bitmap more than came, so that the cache shrinks back when it can.
        for _ in 0..2 {
            if self.arrivals.len() <= self.bitmaps_max {
                break;
            }
            let Some(oldest) = self.arrivals.pop_front() else { break };
            let (candidate, arrival) = oldest;
            // A block that was freed and allocated again has a later arrival; the old one no longer counts.
            match self.bitmaps.get(&candidate).filter(|cached| cached.arrival == arrival) {
                Some(cached) if cached.dirty || cached.sealed => self.arrivals.push_back(oldest),
                // A write under way will set bits in it; the newest is what somebody waits for.
                Some(_) if candidate == block || self.pending.busy(candidate) => self.arrivals.push_back(oldest),
                Some(_) => drop(self.bitmaps.remove(&candidate)),
                None => {}
            }
        }
    }

    fn set_bits(&mut self, write: Write) {
        let Some(cached) = self.bitmaps.get_mut(&write.block) else {
            // Forgotten since the reservation: then the block has become full, and there is nothing to set.
            debug_assert!(self.is_full(write.block), "a bitmap with writes under way was forgotten");
            return;
        };
        if cached.bitmap.set(write.from, write.count) {
            cached.dirty = true;
            let full = cached.bitmap.is_full();
            // The bytes in which its bits are.
            let (first, last) = (write.from / 8, (write.from + write.count - 1) / 8);
            let bytes = cached.bitmap.as_bytes().get(index(first.into())..=index(last.into())).unwrap_or_default();
            let at = self.table.get(index(write.block.0.into())).copied().unwrap_or(UNUSED).start() + u64::from(first);
            self.records.bytes(FIRST, at, bytes);
            self.dirty_bitmaps.insert(write.block);
            if full {
                self.set_full(write.block);
            }
        }
    }

    /// Takes a block out of the table, whose content is of no use any more.
    fn free(&mut self, block: Block, sector: FileSector) {
        self.unlist(block);
        self.space.free(sector);
        self.forgotten.push(sector);
    }

    /// Takes a block out of the table.
    fn unlist(&mut self, block: Block) {
        self.set_entry(block, UNUSED);
        self.set_not_full(block);
        self.bitmaps.remove(&block);
        self.dirty_bitmaps.remove(&block);
    }

    /// Takes the block out of the full ones, in the batmap too: with the table, a round writes the batmap first.
    fn set_not_full(&mut self, block: Block) {
        if let Some(word) = self.full.get_mut(index(u64::from(block.0 / 64))) {
            *word &= !(1 << (block.0 % 64));
        }
        let Some(batmap) = &mut self.batmap else { return };
        let (number, bit) = (u64::from(block.0 / 8), 0x80 >> (block.0 % 8));
        if let Some(byte) = batmap.bits.get_mut(index(number)).filter(|byte| **byte & bit != 0) {
            *byte &= !bit;
            self.dirty_batmap = true;
            // Its checksum is not logged: a batmap without the right one is not trusted, and is rebuilt.
            self.records.bytes(FIRST, FileOffset(batmap.header.offset.get()) + number, &[*byte]);
        }
    }

    fn table_sector(&self, sector: u32) -> MetaWrite {
        let first = sector * ENTRIES;
        let entries = (first..first + ENTRIES).map(|block| self.entry(Block(block)).0);
        let at = self.table_at + u64::from(sector) * SECTOR;
        MetaWrite { at, bytes: entries.flat_map(u32::to_be_bytes).collect() }
    }
}

/// Bytes as sectors; callers pass a block at most.
fn sectors(len: u64) -> u32 {
    in_32_bits(len / SECTOR, "BLOCK_MAX")
}

/// The batmap's blocks, in words.
fn full_blocks(batmap: Option<&Batmap>, blocks: usize) -> Vec<u64> {
    let mut full = vec![0; blocks.div_ceil(64)];
    let bytes = batmap.map(|batmap| batmap.bits.as_slice()).unwrap_or_default();
    for (word, bytes) in full.iter_mut().zip(bytes.chunks(8)) {
        // Most significant bit first in a byte, least significant byte first in a word.
        *word = bytes.iter().rev().fold(0, |word, byte| (word << 8) | u64::from(byte.reverse_bits()));
    }
    full
}
