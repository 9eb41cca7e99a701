//! Which places of a VHD file are free for a block.
//!
//! A place ("slot") is a sector bitmap and the block behind it, so laid out that the block begins at a multiple of 4
//! KiB. Behind the last slot stands the footer; since a slot begins with padding that is never used, the next slot
//! never lies over that footer, and an old footer never lies over a block.
//!
//! Invariant: a slot is handed out only when no durable metadata refers to it. A slot freed is therefore kept
//! back until the metadata that freed it is durable *and* its old content has been deallocated, or is known
//! not to have been ("unclean"). Where a power loss must find the old content, deallocating waits for the metadata.
//!
//! Metadata that was read at open need not be durable: a process that was killed may have left it in a cache. Slots
//! between others are leaked then, and the disk syncs before it deallocates the first of them. Behind the last one
//! there is nothing of which durable metadata could speak where the file ends there; on a device there may be a block
//! that the killed process has just freed. So nothing is placed there before a round has ended ([`Space::prove`]).

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use super::layout::{FileSector, SECTOR, UNUSED};
use crate::FileOffset;
use crate::format::Wait;

/// Blocks begin at a multiple of this many bytes: what storage and O_DIRECT like best.
pub const BLOCK_ALIGN: u64 = 4096;

/// A place for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First sector of the bitmap: what the block allocation table records.
    pub sector: FileSector,
    /// Whether bitmap and block read as zero.
    pub clean: bool,
}

/// How far a slot on its way back to the free ones has come.
#[derive(Clone, Copy, Debug, Default)]
struct Returning {
    /// Whether durable metadata no longer refers to it.
    forgotten: bool,
    /// Whether it reads as zero, once that is known.
    clean: Option<bool>,
    /// Whether no caller is deallocating it: it waits until it is handed out as leaked.
    idle: bool,
}

/// The free space of one file.
#[derive(Debug)]
pub struct Space {
    bitmap_len: u64,
    block_len: u64,
    /// Behind everything that is in use or was; the footer of a file belongs there.
    end: FileOffset,
    /// Where the footer of a device belongs, at its end, and nothing else.
    limit: Option<FileOffset>,
    /// Bytes in front of the limit that are kept for metadata.
    kept: u64,
    /// No slot begins in front of this: the room is for metadata, which libvhd accepts nowhere else (decision 0029).
    floor: FileOffset,
    /// Whether bytes behind `end` read as zero.
    zero_tail: bool,
    /// Whether no durable metadata speaks of what is behind `end`.
    proven: bool,
    /// Clean ones at the back, where they are taken from.
    free: VecDeque<Slot>,
    /// By sector. A trim of a large disk makes it large.
    returning: HashMap<FileSector, Returning>,
    /// Slots of unknown content that nothing refers to, still to be deallocated.
    leaked: VecDeque<FileSector>,
}

impl Space {
    /// The free space of a file in which metadata and blocks are `occupied` (ascending), and which is `file_len` bytes
    /// long. What is in no use below `file_len` is leaked: left by a crash. In front of `floor` nothing is ever placed.
    pub fn new(
        bitmap_len: u64,
        block_len: u64,
        occupied: impl IntoIterator<Item = Range<FileOffset>>,
        file_len: u64,
        zero_tail: bool,
        floor: FileOffset,
    ) -> Space {
        let mut space = Space {
            bitmap_len,
            block_len,
            end: FileOffset(0),
            kept: 0,
            limit: (!zero_tail).then(|| FileOffset(file_len - SECTOR).align_down(SECTOR)),
            floor,
            zero_tail,
            proven: zero_tail,
            free: VecDeque::new(),
            returning: HashMap::new(),
            leaked: VecDeque::new(),
        };
        for range in occupied {
            space.leaked_until(range.start);
            space.end = space.end.max(range.end);
        }
        // A file that ends in its footer has nothing behind its last block. Where the tail is rubbish anyway,
        // more of it makes no difference.
        if zero_tail && FileOffset(file_len) > space.end + SECTOR {
            space.leaked_until(FileOffset(file_len));
            space.end = FileOffset(file_len).align_up(SECTOR);
        }
        space
    }

    /// Takes the slots that fit between `end` and `limit` for leaked.
    fn leaked_until(&mut self, limit: FileOffset) {
        while let Some(sector) = self.next_sector() {
            let behind = self.behind(sector);
            if behind > limit {
                return;
            }
            self.leaked.push_back(sector);
            self.end = behind;
        }
    }

    /// The first slot behind `end` and the footer there.
    fn next_sector(&self) -> Option<FileSector> {
        let first = self.end.checked_add(SECTOR)?.max(self.floor);
        let block_at = first.checked_add(self.bitmap_len)?.checked_align_up(BLOCK_ALIGN)?;
        let sector = FileSector(u32::try_from(block_at.0.checked_sub(self.bitmap_len)? / SECTOR).ok()?);
        // The table has 32 bits for a sector, and one value of them means "unused".
        (sector != UNUSED && u32::try_from(self.behind(sector) / SECTOR).is_ok()).then_some(sector)
    }

    fn behind(&self, sector: FileSector) -> FileOffset {
        self.block_at(sector) + self.block_len
    }

    /// Offset in the file of the block of a slot.
    pub fn block_at(&self, sector: FileSector) -> FileOffset {
        sector.start() + self.bitmap_len
    }

    /// Behind everything that is in use or was.
    pub fn end(&self) -> FileOffset {
        self.end
    }

    /// Where the footer belongs; nowhere on a device on which a block lies at its end.
    pub fn footer_at(&self) -> Option<FileOffset> {
        self.limit.map_or(Some(self.end), |limit| (self.end <= limit).then_some(limit))
    }

    /// Whether the footer goes where the last block ends, and so moves with each that comes.
    pub fn footer_moves(&self) -> bool {
        self.limit.is_none()
    }

    /// Where nothing may be placed any more.
    pub fn limit(&self) -> FileOffset {
        self.limit.unwrap_or(FileOffset(u64::MAX))
    }

    /// All that was read at open is durable.
    pub fn prove(&mut self) {
        self.proven = true;
    }

    /// A free slot; clean ones first. No space when the file cannot grow any more.
    pub fn take(&mut self) -> Result<Slot, Wait> {
        if let Some(slot) = self.free.pop_back() {
            return Ok(slot);
        }
        let fits = |sector: &FileSector| self.behind(*sector) + self.kept <= self.limit();
        let sector = self.next_sector().filter(fits).ok_or(Wait::NoSpace)?;
        if !self.proven {
            return Err(Wait::Round);
        }
        self.end = self.behind(sector);
        Ok(Slot { sector, clean: self.zero_tail })
    }

    /// Reserves room for pieces of metadata of these lengths behind everything else, replacing the last reservation.
    /// Returns whether there is enough room.
    pub fn keep_room(&mut self, lens: &[u64]) -> bool {
        let end = lens.iter().fold(self.end, |end, len| room_behind(end) + *len);
        let fits = end <= self.limit();
        if fits {
            // What comes between may end elsewhere in a unit.
            self.kept = end - self.end + BLOCK_ALIGN;
        }
        fits
    }

    /// Keeps none any more.
    pub fn give_room_back(&mut self) {
        self.kept = 0;
    }

    /// Room for `len` bytes of metadata, behind everything else.
    pub fn take_room(&mut self, len: u64) -> FileOffset {
        // The footer in force stands at the end of what was there so far.
        let at = room_behind(self.end);
        self.end = at + len;
        at
    }

    /// Where a slot begins and ends.
    pub fn range(&self, sector: FileSector) -> Range<FileOffset> {
        sector.start()..self.behind(sector)
    }

    /// The slots that hold no block: free, leaked or on their way there.
    pub fn idle(&self) -> impl Iterator<Item = FileSector> + '_ {
        let free = self.free.iter().map(|slot| slot.sector);
        free.chain(self.leaked.iter().copied()).chain(self.returning.keys().copied())
    }

    /// Gives a slot up that durable metadata refers to.
    pub fn free(&mut self, sector: FileSector) {
        self.returning.insert(sector, Returning::default());
    }

    /// Leaves a slot that durable metadata refers to, and whose content must outlive that: it becomes leaked when it
    /// has been [`forgotten`](Space::forgotten).
    pub fn leave(&mut self, sector: FileSector) {
        self.returning.insert(sector, Returning { idle: true, ..Returning::default() });
    }

    /// Gives a slot back that nothing has ever referred to, after a failed write to it.
    pub fn give_back(&mut self, sector: FileSector) {
        self.leaked.push_back(sector);
    }

    /// The durable metadata no longer refers to the slot.
    pub fn forgotten(&mut self, sector: FileSector) {
        match self.returning.get_mut(&sector) {
            Some(slot) if slot.idle => {
                self.returning.remove(&sector);
                self.leaked.push_back(sector);
            }
            Some(slot) => slot.forgotten = true,
            None => {}
        }
        self.collect(sector);
    }

    /// The slot reads as zero now, or it does not.
    pub fn released(&mut self, sector: FileSector, clean: bool) {
        if let Some(slot) = self.returning.get_mut(&sector) {
            slot.clean = Some(clean);
        }
        self.collect(sector);
    }

    /// The next leaked slot. It is free when it has been [`released`](Space::released).
    pub fn next_leaked(&mut self) -> Option<FileSector> {
        let sector = self.leaked.pop_front()?;
        self.returning.insert(sector, Returning { forgotten: true, ..Returning::default() });
        Some(sector)
    }

    /// Frees the slot if it has come back.
    fn collect(&mut self, sector: FileSector) {
        let Some(&Returning { forgotten: true, clean: Some(clean), .. }) = self.returning.get(&sector) else { return };
        self.returning.remove(&sector);
        let slot = Slot { sector, clean };
        if clean { self.free.push_back(slot) } else { self.free.push_front(slot) }
    }
}

/// Where metadata may begin behind what ends at `end`.
fn room_behind(end: FileOffset) -> FileOffset {
    (end + SECTOR).align_up(BLOCK_ALIGN)
}

#[cfg(test)]
mod test {
    use super::*;

    const BLOCK: u64 = 2 << 20;
    /// The range in use in front of the blocks.
    const METADATA: Range<FileOffset> = FileOffset(0)..FileOffset(8192);

    #[test]
    fn blocks_are_aligned_and_a_footer_fits_between() {
        for bitmap_len in [512, 1024, 2048, 4096] {
            let mut space = Space::new(bitmap_len, BLOCK, std::iter::once(METADATA), 8704, true, FileOffset(0));
            for _ in 0..3 {
                let footer = space.end();
                let slot = space.take().unwrap();
                assert_eq!(space.block_at(slot.sector) % 4096, 0);
                assert!(slot.sector.start() >= footer + SECTOR);
            }
        }
    }

    #[test]
    fn a_slot_freed_comes_back_only_when_forgotten_and_released() {
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), 8704, true, FileOffset(0));
        let slot = space.take().unwrap();
        space.free(slot.sector);
        space.released(slot.sector, true);
        assert_ne!(space.take().unwrap().sector, slot.sector);
        space.forgotten(slot.sector);
        assert_eq!(space.take(), Ok(slot));
    }

    #[test]
    fn a_slot_left_behind_is_leaked_only_when_forgotten() {
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), 8704, true, FileOffset(0));
        let slot = space.take().unwrap();
        space.leave(slot.sector);
        assert_eq!(space.next_leaked(), None, "a power loss would bring it back");
        space.forgotten(slot.sector);
        assert_eq!(space.next_leaked(), Some(slot.sector));
        assert_ne!(space.take().unwrap().sector, slot.sector);
        space.released(slot.sector, true);
        assert_eq!(space.take(), Ok(slot));
    }

    #[test]
    fn what_a_crash_left_is_leaked() {
        let mut fresh = Space::new(512, BLOCK, std::iter::once(METADATA), 8704, true, FileOffset(0));
        let (first, second, third) = (fresh.take().unwrap(), fresh.take().unwrap(), fresh.take().unwrap());
        let (len, second_range) = (fresh.end(), fresh.range(second.sector));
        let mut space = Space::new(512, BLOCK, [METADATA, second_range], len.0, true, FileOffset(0));
        assert_eq!(space.next_leaked(), Some(first.sector));
        assert_eq!(space.next_leaked(), Some(third.sector));
        assert_eq!(space.next_leaked(), None);
        assert!(space.take().unwrap().sector > third.sector);
        space.released(first.sector, true);
        assert_eq!(space.take(), Ok(Slot { sector: first.sector, clean: true }));
    }

    #[test]
    fn room_for_metadata_is_given_to_no_block_and_is_not_leaked() {
        let floor = FileOffset(5 << 20);
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), 8704, true, floor);
        assert_eq!(space.end(), FileOffset(8192), "the footer stays where it is until there is a block");
        let first = space.take().unwrap();
        assert_eq!(first.sector.start(), floor + 4096 - 512);
        let block = space.range(first.sector);
        let mut space = Space::new(512, BLOCK, [METADATA, block.clone()], block.end.0, true, floor);
        assert_eq!(space.next_leaked(), None);
        assert_eq!(space.take().unwrap().sector.start(), block.end + 4096 - 512);
    }

    #[test]
    fn behind_the_last_block_of_a_device_nothing_is_placed_before_what_was_read_is_durable() {
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), 1 << 30, false, FileOffset(0));
        assert_eq!(space.take(), Err(Wait::Round));
        assert_eq!(space.end(), FileOffset(8192));
        space.prove();
        assert_eq!(space.take().map(|slot| space.range(slot.sector).start >= FileOffset(8192 + SECTOR)), Ok(true));
    }

    #[test]
    fn a_device_ends_in_its_footer_and_nothing_is_placed_over_that() {
        let end = 8192 + 2 * (BLOCK + 4096);
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), end, false, FileOffset(0));
        space.prove();
        let first = space.take().unwrap();
        assert_eq!(
            (space.footer_at(), space.range(first.sector).start > FileOffset(8192)),
            (Some(FileOffset(end - SECTOR)), true)
        );
        assert_eq!(space.take(), Err(Wait::NoSpace), "the second would lie over the footer");
        assert!(space.keep_room(&[3000]) && !space.keep_room(&[BLOCK]));
        let mut space = Space::new(512, BLOCK, std::iter::once(METADATA), end, false, FileOffset(0));
        space.prove();
        assert!(!space.keep_room(&[3 * BLOCK]));
        assert!(space.take().is_ok(), "room that is not there is not kept");
        let full = Space::new(512, BLOCK, std::iter::once(METADATA), 8192, false, FileOffset(0));
        assert_eq!(full.footer_at(), None);
    }

    #[test]
    fn the_table_runs_out_at_two_tebibytes() {
        let mut space = Space::new(
            512,
            BLOCK,
            std::iter::once(FileOffset(0)..FileOffset((1 << 41) - BLOCK)),
            0,
            true,
            FileOffset(0),
        );
        assert_eq!(space.take(), Err(Wait::NoSpace));
    }
}
