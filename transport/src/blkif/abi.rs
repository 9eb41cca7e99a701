//! Where the fields of a ring entry lie, for each kind of front end.
//!
//! Knows nothing of what they mean. The layouts differ because a compiler for 32-bit x86 aligns a 64-bit number to four
//! bytes only. Invariant: an [`Entry`] is a copy of our own, which nobody changes any more.
//!
//! Specification: Xen's public header io/blkif.h, `struct blkif_request` and those beside it.

use memory::{Shared, Window};

use super::moment::step;

/// Segments that an entry itself has room for (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const SEGMENTS_DIRECT: usize = 11;

/// Bytes of one segment, in an entry and in an indirect page (`struct blkif_request_segment`).
pub const SEGMENT_LEN: usize = 8;

/// Bytes before the first entry of a ring (io/ring.h, `DEFINE_RING_TYPES`).
pub const HEADER_LEN: usize = 64;

/// Bytes from one entry to the next.
const WIDE_LEN: usize = 112;
const NARROW_LEN: usize = 108;

/// How a compiler aligns 64-bit numbers, and so where `id` lies. Behind it are, for each, 64 bits each: `sector_number`, and
/// the segments. In place of the first of these a discard has its `nr_sectors`, and an indirect request its `handle`, two
/// bytes that mean nothing, and the first of its `indirect_grefs`.
const WIDE: usize = 8;
const NARROW: usize = 4;

// The sizes that io/blkif.h comes to: the last segment ends where the entry does.
const _: () = assert!(WIDE + 16 + SEGMENTS_DIRECT * SEGMENT_LEN == WIDE_LEN);
const _: () = assert!(NARROW + 16 + SEGMENTS_DIRECT * SEGMENT_LEN == NARROW_LEN);

/// The compiler's layout of a front end.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    wide: bool,
}

/// 64-bit x86, and what is native where we run.
pub static X86_64: Layout = Layout { wide: true };

/// 32-bit x86.
pub static X86_32: Layout = Layout { wide: false };

impl Layout {
    /// The layout that a front end's key `protocol` names. `None`: one that nobody knows.
    pub fn of(protocol: Option<&str>) -> Option<&'static Layout> {
        match protocol {
            // The header: what is not said is native.
            None | Some("" | "x86_64-abi" | "arm-abi") => Some(&X86_64),
            Some("x86_32-abi") => Some(&X86_32),
            Some(_) => None,
        }
    }

    /// Bytes from one entry to the next.
    pub fn entry_len(&self) -> usize {
        if self.wide { WIDE_LEN } else { NARROW_LEN }
    }

    /// Entries of a ring of so many bytes: the power of two that fits (io/ring.h, `__RING_SIZE`).
    pub fn slots(&self, ring_len: usize) -> u32 {
        let fit = ring_len.saturating_sub(HEADER_LEN).checked_div(self.entry_len()).unwrap_or(0);
        let fit = u32::try_from(fit).unwrap_or(0);
        fit.checked_ilog2().map_or(0, |order| 1u32.checked_shl(order).unwrap_or(0))
    }

    /// Where the entry of a slot lies in its ring.
    pub fn at(&self, slot: u32) -> usize {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        slot.saturating_mul(self.entry_len()).saturating_add(HEADER_LEN)
    }

    /// Copies the entry in a slot out of its ring, as far as it says that it goes; each byte is read once.
    #[inline(always)]
    pub fn read(&self, ring: &Shared, slot: u32, entry: &mut Entry) -> Option<()> {
        let at = self.at(slot);
        match self.wide {
            true => entry.read(ring.window::<WIDE_LEN, WIDE>(at)?),
            false => entry.read(ring.window::<NARROW_LEN, NARROW>(at)?),
        }
    }

    /// Writes an entry into another slot of its ring.
    pub fn write(&self, ring: &Shared, slot: u32, entry: &Entry) -> Option<()> {
        let at = self.at(slot);
        match self.wide {
            true => entry.write(ring.window::<WIDE_LEN, WIDE>(at)?),
            false => entry.write(ring.window::<NARROW_LEN, NARROW>(at)?),
        }
    }

    /// Writes an answer into a slot (`struct blkif_response`): its `id`, and behind it what else there is. For a 32-bit
    /// front end the latter is four bytes less, and those behind mean nothing.
    #[inline]
    pub fn respond(&self, ring: &Shared, slot: u32, id: u64, result: u64) -> Option<()> {
        let at = self.at(slot);
        step();
        if self.wide {
            let response = ring.window::<16, WIDE>(at)?;
            response.store_u64(0, id)?;
            step();
            return response.store_u64(8, result);
        }
        let response = ring.window::<16, NARROW>(at)?;
        response.store_u64(0, id)?;
        step();
        response.store_u64(8, result)
    }
}

/// 64-bit numbers of an entry: its `id`, its `sector_number` and what is in the place of its segments.
const WORDS_MAX: usize = 2 + SEGMENTS_DIRECT;

/// Those that every kind of request has, and most requests nothing else.
const WORDS_MIN: usize = 3;

/// One entry, copied out of the ring, or room for one: most of it is not touched for a short one.
#[derive(Default)]
pub struct Entry {
    operation: u8,
    second: u8,
    third: u16,
    words: [u64; WORDS_MAX],
    /// How many of them were copied. Those behind are of an entry before.
    count: usize,
}

impl Entry {
    #[inline(always)]
    fn read<const LEN: usize, const ALIGN: usize>(&mut self, from: Window<'_, LEN, ALIGN>) -> Option<()> {
        let [operation, second, low, high] = from.load_u32(0)?.to_le_bytes();
        let more = usize::from(second).clamp(1, SEGMENTS_DIRECT) - 1;
        (self.operation, self.second, self.third) = (operation, second, u16::from_le_bytes([low, high]));
        self.count = WORDS_MIN + more;
        let [id, sector, first, others @ ..] = &mut self.words;
        (*id, *sector, *first) = (from.load_u64(ALIGN)?, from.load_u64(ALIGN + 8)?, from.load_u64(ALIGN + 16)?);
        for (index, word) in others.iter_mut().take(more).enumerate() {
            *word = from.load_u64(ALIGN + 24 + 8 * index)?;
        }
        Some(())
    }

    #[inline(always)]
    fn write<const LEN: usize, const ALIGN: usize>(&self, to: Window<'_, LEN, ALIGN>) -> Option<()> {
        let [low, high] = self.third.to_le_bytes();
        step();
        to.store_u32(0, u32::from_le_bytes([self.operation, self.second, low, high]))?;
        for (index, &word) in self.words.iter().take(self.count).enumerate() {
            step();
            to.store_u64(ALIGN + 8 * index, word)?;
        }
        Some(())
    }

    /// `operation`.
    pub fn operation(&self) -> u8 {
        self.operation
    }

    /// `nr_segments`; of a discard its `flag`; of an indirect request its `indirect_op`.
    pub fn second(&self) -> u8 {
        self.second
    }

    /// `nr_segments` of an indirect request.
    pub fn indirect_count(&self) -> u16 {
        self.third
    }

    /// `id`.
    pub fn id(&self) -> u64 {
        let [id, ..] = self.words;
        id
    }

    /// `sector_number`.
    pub fn sector(&self) -> u64 {
        let [_, sector, ..] = self.words;
        sector
    }

    /// `nr_sectors` of a discard.
    pub fn sector_count(&self) -> u64 {
        let [_, _, count, ..] = self.words;
        count
    }

    /// The first of `indirect_grefs`, which is the only one where no more segments are allowed than it has room for.
    pub fn indirect_page(&self) -> u32 {
        let [_, _, first, ..] = self.words;
        let [_, _, _, _, a, b, c, d] = first.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// As many segments as it says that it has, as they lie in the ring. `None` if there is no room for as many.
    pub fn segments(&self) -> Option<&[u64]> {
        let [_, _, segments @ ..] = &self.words;
        segments.get(..usize::from(self.second))
    }
}

#[cfg(test)]
mod test {
    use memory::Mapping;

    use super::*;

    #[test]
    fn a_ring_has_the_entries_that_its_front_end_counts() {
        for (pages, slots) in [(1, 32), (2, 64), (4, 128), (8, 256), (16, 512)] {
            assert_eq!(X86_64.slots(pages * 4096), slots, "{pages} pages");
            assert_eq!(X86_32.slots(pages * 4096), slots, "{pages} pages");
        }
        assert_eq!(X86_64.slots(0), 0);
    }

    /// An entry whose bytes are numbered, with so many segments, and the ring that it lies in.
    fn numbered(layout: &Layout, segments: u8) -> (Shared, Entry) {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let byte = |at: usize| if at == 1 { segments } else { u8::try_from(at).unwrap() };
        for at in 0..layout.entry_len() {
            ring.write(layout.at(1) + at, [byte(at)]).unwrap();
        }
        let mut entry = Entry { words: [u64::MAX; WORDS_MAX], ..Entry::default() };
        layout.read(&ring, 1, &mut entry).unwrap();
        (ring, entry)
    }

    #[test]
    fn the_fields_are_found_where_the_header_has_them() {
        let number = |at: u8| u64::from_le_bytes(std::array::from_fn(|index| at + u8::try_from(index).unwrap()));
        for (layout, id, sector, segments, page) in [(&X86_64, 8, 16, 24, 28), (&X86_32, 4, 12, 20, 24)] {
            let (_, entry) = numbered(layout, 11);
            assert_eq!((entry.operation(), entry.second(), entry.indirect_count()), (0, 11, 0x0302));
            assert_eq!((entry.id(), entry.sector()), (number(id), number(sector)));
            assert_eq!(entry.sector_count(), number(segments));
            assert_eq!(entry.indirect_page().to_le_bytes(), [page, page + 1, page + 2, page + 3]);
            let all: Vec<u64> = (0..11).map(|index| number(segments + 8 * index)).collect();
            assert_eq!(entry.segments(), Some(all.as_slice()));
        }
    }

    #[test]
    fn an_entry_is_read_as_far_as_it_says_and_written_as_it_was_read() {
        for layout in [&X86_64, &X86_32] {
            for (says, read) in [(0, 1), (1, 1), (2, 2), (11, 11), (12, 11), (255, 11)] {
                let (ring, entry) = numbered(layout, says);
                assert_eq!(entry.count, 2 + read, "{says}");
                layout.write(&ring, 3, &entry).unwrap();
                let id = if layout.wide { WIDE } else { NARROW };
                let end = id + 16 + 8 * read;
                let byte = |slot: u32, at: usize| ring.read::<1>(layout.at(slot) + at).unwrap();
                // Between the head and `id` nothing means anything.
                let meant = (0..4).chain(id..end);
                assert!(meant.into_iter().all(|at| byte(3, at) == byte(1, at)), "{says}");
                assert!((end..layout.entry_len()).all(|at| byte(3, at) == [0]), "{says}");
                assert_eq!(byte(4, 0), [0], "nothing goes into the next slot");
            }
        }
    }

    #[test]
    fn an_entry_that_is_not_in_its_ring_is_none() {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let mut entry = Entry::default();
        assert_eq!([35, 36, u32::MAX].map(|slot| X86_64.read(&ring, slot, &mut entry)), [Some(()), None, None]);
    }
}
