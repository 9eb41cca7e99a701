//! The layout of ring entries, for each kind of front end.
//!
//! It knows nothing about the meaning of the fields. The layouts differ because compilers for 32-bit x86 align 64-bit
//! numbers to four bytes. Invariant: an [`Entry`] is a private copy, which the front end cannot change.
//!
//! Specification: Xen's public header io/blkif.h, `struct blkif_request` and its variants.

use memory::{Shared, Window};

use super::kill_point::kill_point;

/// The number of segments that fit into an entry itself (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const SEGMENTS_DIRECT: usize = 11;

/// The size of one segment, in an entry and in an indirect page (`struct blkif_request_segment`).
pub const SEGMENT_LEN: usize = 8;

/// The size of the header before the first entry of a ring (io/ring.h, `DEFINE_RING_TYPES`).
pub const HEADER_LEN: usize = 64;

/// The size of an entry on 64-bit x86.
const WIDE_LEN: usize = 112;
/// The size of an entry on 32-bit x86.
const NARROW_LEN: usize = 108;

/// The alignment of 64-bit numbers by the compiler, and so the offset of `id`. In both layouts it is followed by
/// `sector_number` and the segments, of 64 bits each. In place of the first segment a discard has its `nr_sectors`, and
/// an indirect request its `handle`, two unused bytes, and the first of its `indirect_grefs`.
const WIDE: usize = 8;
const NARROW: usize = 4;

// The sizes that result from io/blkif.h: the last segment ends where the entry does.
const _: () = assert!(WIDE + 16 + SEGMENTS_DIRECT * SEGMENT_LEN == WIDE_LEN);
const _: () = assert!(NARROW + 16 + SEGMENTS_DIRECT * SEGMENT_LEN == NARROW_LEN);

/// The compiler's layout of a front end.
#[derive(Debug, PartialEq, Eq)]
pub struct EntryLayout {
    wide: bool,
}

/// The layout of 64-bit x86, which is the native one.
pub static X86_64: EntryLayout = EntryLayout { wide: true };

/// The layout of 32-bit x86.
pub static X86_32: EntryLayout = EntryLayout { wide: false };

impl EntryLayout {
    /// The layout named by a front end's key `protocol`; `None` if it is unknown.
    pub fn of(protocol: Option<&str>) -> Option<&'static EntryLayout> {
        match protocol {
            // io/blkif.h: the default is the native layout.
            None | Some("" | "x86_64-abi" | "arm-abi") => Some(&X86_64),
            Some("x86_32-abi") => Some(&X86_32),
            Some(_) => None,
        }
    }

    /// The size of an entry.
    pub fn entry_len(&self) -> usize {
        if self.wide { WIDE_LEN } else { NARROW_LEN }
    }

    /// The number of entries in a ring of this size: the largest power of two that fits (io/ring.h, `__RING_SIZE`).
    /// A ring has at most 16 pages ([`super::RING_ORDER_MAX`]).
    pub fn slots(&self, ring_len: usize) -> u16 {
        let fit = ring_len.saturating_sub(HEADER_LEN) / self.entry_len();
        fit.checked_ilog2().map_or(0, |order| 1 << order)
    }

    /// The offset of a slot's entry in its ring.
    pub fn offset_of(&self, slot: u16) -> usize {
        usize::from(slot) * self.entry_len() + HEADER_LEN
    }

    /// Copies the entry in a slot out of its ring, up to the length in its own length field. Each byte is read once.
    #[inline(always)]
    pub fn read(&self, ring: &Shared, slot: u16, entry: &mut Entry) -> Option<()> {
        let at = self.offset_of(slot);
        match self.wide {
            true => entry.read(ring.window::<WIDE_LEN, WIDE>(at)?),
            false => entry.read(ring.window::<NARROW_LEN, NARROW>(at)?),
        }
    }

    /// Writes an entry into another slot of its ring.
    pub fn write(&self, ring: &Shared, slot: u16, entry: &Entry) -> Option<()> {
        let at = self.offset_of(slot);
        match self.wide {
            true => entry.write(ring.window::<WIDE_LEN, WIDE>(at)?),
            false => entry.write(ring.window::<NARROW_LEN, NARROW>(at)?),
        }
    }

    /// Writes a response into a slot (`struct blkif_response`): its `id`, then the rest. For a 32-bit front end the
    /// rest is four bytes shorter, and the bytes after it are unused.
    #[inline]
    pub fn respond(&self, ring: &Shared, slot: u16, id: u64, result: u64) -> Option<()> {
        let at = self.offset_of(slot);
        kill_point();
        if self.wide {
            let response = ring.window::<16, WIDE>(at)?;
            response.store_u64(0, id)?;
            kill_point();
            return response.store_u64(8, result);
        }
        let response = ring.window::<16, NARROW>(at)?;
        response.store_u64(0, id)?;
        kill_point();
        response.store_u64(8, result)
    }
}

/// The maximum number of 64-bit words of an entry: its `id`, its `sector_number`, and its segments.
const WORDS_MAX: usize = 2 + SEGMENTS_DIRECT;

/// The number of words that every request has; most have no more.
const WORDS_MIN: usize = 3;

/// One entry, copied out of the ring. It is reused, and only the words of the new entry are written.
#[derive(Default)]
pub struct Entry {
    operation: u8,
    second: u8,
    third: u16,
    words: [u64; WORDS_MAX],
    /// The number of words copied. The others belong to an earlier entry.
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
        kill_point();
        to.store_u32(0, u32::from_le_bytes([self.operation, self.second, low, high]))?;
        for (index, &word) in self.words.iter().take(self.count).enumerate() {
            kill_point();
            to.store_u64(ALIGN + 8 * index, word)?;
        }
        Some(())
    }

    /// The field `operation`.
    pub fn operation(&self) -> u8 {
        self.operation
    }

    /// The field `nr_segments`; of a discard its `flag`; of an indirect request its `indirect_op`.
    pub fn second(&self) -> u8 {
        self.second
    }

    /// The field `nr_segments` of an indirect request.
    pub fn indirect_count(&self) -> u16 {
        self.third
    }

    /// The field `id`.
    pub fn id(&self) -> u64 {
        let [id, ..] = self.words;
        id
    }

    /// The field `sector_number`.
    pub fn sector(&self) -> u64 {
        let [_, sector, ..] = self.words;
        sector
    }

    /// The field `nr_sectors` of a discard.
    pub fn sector_count(&self) -> u64 {
        let [_, _, count, ..] = self.words;
        count
    }

    /// The first of `indirect_grefs`: the only one, as the segments offered fit into one page.
    pub fn indirect_page(&self) -> u32 {
        let [_, _, first, ..] = self.words;
        let [_, _, _, _, a, b, c, d] = first.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// The raw segments, by the entry's own count; `None` if that is more than fit.
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
    fn the_number_of_slots_is_the_largest_power_of_two_that_fits() {
        for (pages, slots) in [(1, 32), (2, 64), (4, 128), (8, 256), (16, 512)] {
            assert_eq!(X86_64.slots(pages * 4096), slots, "{pages} pages");
            assert_eq!(X86_32.slots(pages * 4096), slots, "{pages} pages");
        }
        assert_eq!(X86_64.slots(0), 0);
    }

    /// An entry with numbered bytes and this many segments, and the ring that contains it.
    fn numbered(layout: &EntryLayout, segments: u8) -> (Shared, Entry) {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let byte = |offset: usize| if offset == 1 { segments } else { u8::try_from(offset).unwrap() };
        for offset in 0..layout.entry_len() {
            ring.write(layout.offset_of(1) + offset, [byte(offset)]).unwrap();
        }
        let mut entry = Entry { words: [u64::MAX; WORDS_MAX], ..Entry::default() };
        layout.read(&ring, 1, &mut entry).unwrap();
        (ring, entry)
    }

    #[test]
    fn fields_are_at_the_specified_offsets() {
        let number =
            |offset: u8| u64::from_le_bytes(std::array::from_fn(|index| offset + u8::try_from(index).unwrap()));
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
    fn an_entry_is_read_up_to_its_length_and_written_unchanged() {
        for layout in [&X86_64, &X86_32] {
            for (count, read) in [(0, 1), (1, 1), (2, 2), (11, 11), (12, 11), (255, 11)] {
                let (ring, entry) = numbered(layout, count);
                assert_eq!(entry.count, 2 + read, "{count}");
                layout.write(&ring, 3, &entry).unwrap();
                let id = if layout.wide { WIDE } else { NARROW };
                let end = id + 16 + 8 * read;
                let byte = |slot: u16, offset: usize| ring.read::<1>(layout.offset_of(slot) + offset).unwrap();
                // The bytes between the head and `id` are unused.
                let used = (0..4).chain(id..end);
                assert!(used.into_iter().all(|offset| byte(3, offset) == byte(1, offset)), "{count}");
                assert!((end..layout.entry_len()).all(|offset| byte(3, offset) == [0]), "{count}");
                assert_eq!(byte(4, 0), [0], "the next slot is untouched");
            }
        }
    }

    #[test]
    fn an_entry_outside_its_ring_is_none() {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let mut entry = Entry::default();
        assert_eq!([35, 36, u16::MAX].map(|slot| X86_64.read(&ring, slot, &mut entry)), [Some(()), None, None]);
    }
}
