//! Where the fields of a ring entry lie, for each kind of front end.
//!
//! Knows nothing of what they mean. The layouts differ because a compiler for 32-bit x86 aligns a 64-bit number to four
//! bytes only. Invariant: an [`Entry`] is a copy of our own, which nobody changes any more.
//!
//! Specification: Xen's public header io/blkif.h, `struct blkif_request` and those beside it.

/// Bytes of the longest entry.
pub const ENTRY_MAX: usize = 112;

/// Bytes of the shorter one.
const ENTRY_SHORT: usize = 108;

/// Segments that an entry itself has room for (`BLKIF_MAX_SEGMENTS_PER_REQUEST`).
pub const SEGMENTS_DIRECT: usize = 11;

/// Bytes of one segment, in an entry and in an indirect page (`struct blkif_request_segment`).
pub const SEGMENT_LEN: usize = 8;

/// Segments in whose place other kinds of requests have what is theirs: the length of a discard, the page of an indirect one.
const SEGMENTS_MIN: usize = 2;

/// Bytes before the first entry of a ring (io/ring.h, `DEFINE_RING_TYPES`).
pub const HEADER_LEN: usize = 64;

/// The compiler's layout of a front end.
#[derive(Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes from one entry to the next.
    pub entry_len: usize,
    /// Bytes of a response.
    pub response_len: usize,
    id: usize,
    sector: usize,
    segments: usize,
    /// Of a discard.
    sector_count: usize,
    /// Of an indirect request.
    pages: usize,
}

/// 64-bit x86, and what is native where we run.
pub static X86_64: Layout =
    Layout { entry_len: ENTRY_MAX, response_len: 16, id: 8, sector: 16, segments: 24, sector_count: 24, pages: 28 };

/// 32-bit x86.
pub static X86_32: Layout =
    Layout { entry_len: ENTRY_SHORT, response_len: 12, id: 4, sector: 12, segments: 20, sector_count: 20, pages: 24 };

// The sizes that io/blkif.h comes to: the last segment, or the last of eight pages, ends inside of the entry.
const _: () = assert!(X86_64.segments + SEGMENTS_DIRECT * SEGMENT_LEN == X86_64.entry_len);
const _: () = assert!(X86_32.segments + SEGMENTS_DIRECT * SEGMENT_LEN == X86_32.entry_len);
const _: () = assert!(X86_64.sector_count + 8 <= X86_64.segments + SEGMENTS_MIN * SEGMENT_LEN);
const _: () = assert!(X86_64.pages + 4 <= X86_64.segments + SEGMENTS_MIN * SEGMENT_LEN);
const _: () = assert!(X86_32.sector_count + 8 <= X86_32.segments + SEGMENTS_MIN * SEGMENT_LEN);
const _: () = assert!(X86_32.pages + 4 <= X86_32.segments + SEGMENTS_MIN * SEGMENT_LEN);
const _: () = assert!(X86_64.entry_len == ENTRY_MAX && X86_64.pages + 8 * 4 <= X86_64.entry_len);
const _: () = assert!(X86_32.pages + 8 * 4 <= X86_32.entry_len);

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

    /// Entries of a ring of so many bytes: the power of two that fits (io/ring.h, `__RING_SIZE`).
    pub fn slots(&self, ring_len: usize) -> u32 {
        let fit = ring_len.saturating_sub(HEADER_LEN).checked_div(self.entry_len).unwrap_or(0);
        let fit = u32::try_from(fit).unwrap_or(0);
        fit.checked_ilog2().map_or(0, |order| 1u32.checked_shl(order).unwrap_or(0))
    }

    /// Where the entry of a slot lies in its ring.
    pub fn at(&self, slot: u32) -> usize {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        slot.saturating_mul(self.entry_len).saturating_add(HEADER_LEN)
    }
}

/// The bytes of one entry, copied out of the ring.
pub struct Entry {
    layout: &'static Layout,
    bytes: [u8; ENTRY_MAX],
}

impl Entry {
    /// An entry whose bytes are those; where the layout's are fewer, the rest is not looked at.
    pub fn new(layout: &'static Layout, bytes: [u8; ENTRY_MAX]) -> Entry {
        Entry { layout, bytes }
    }

    /// The bytes, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8; ENTRY_MAX] {
        &mut self.bytes
    }

    /// The bytes before the segments, and those of as many segments as the former announce.
    pub fn parts_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        let count = usize::from(self.second()).clamp(SEGMENTS_MIN, SEGMENTS_DIRECT);
        let (head, segments) = self.bytes.split_at_mut_checked(self.layout.segments).unwrap_or_default();
        (head, segments.get_mut(..count.saturating_mul(SEGMENT_LEN)).unwrap_or_default())
    }

    /// `operation`.
    pub fn operation(&self) -> u8 {
        u8::from_le_bytes(self.take(0))
    }

    /// `nr_segments`; of a discard its `flag`; of an indirect request its `indirect_op`.
    pub fn second(&self) -> u8 {
        u8::from_le_bytes(self.take(1))
    }

    /// `nr_segments` of an indirect request.
    pub fn indirect_count(&self) -> u16 {
        u16::from_le_bytes(self.take(2))
    }

    /// `id`.
    pub fn id(&self) -> u64 {
        u64::from_le_bytes(self.take(self.layout.id))
    }

    /// `sector_number`.
    pub fn sector(&self) -> u64 {
        u64::from_le_bytes(self.take(self.layout.sector))
    }

    /// `nr_sectors` of a discard.
    pub fn sector_count(&self) -> u64 {
        u64::from_le_bytes(self.take(self.layout.sector_count))
    }

    /// The first of `indirect_grefs`, which is the only one where no more segments are allowed than it has room for.
    pub fn indirect_page(&self) -> u32 {
        u32::from_le_bytes(self.take(self.layout.pages))
    }

    /// The bytes of the segments.
    pub fn segments(&self) -> &[u8] {
        let end = self.layout.segments.saturating_add(SEGMENTS_DIRECT * SEGMENT_LEN);
        self.bytes.get(self.layout.segments..end).unwrap_or_default()
    }

    fn take<const N: usize>(&self, at: usize) -> [u8; N] {
        // Every place in a table above lies inside of the entry, as asserted there.
        self.bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()).copied().unwrap_or([0; N])
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_ring_has_the_entries_that_its_front_end_counts() {
        for (pages, slots) in [(1, 32), (2, 64), (4, 128), (8, 256), (16, 512)] {
            assert_eq!(X86_64.slots(pages * 4096), slots, "{pages} pages");
            assert_eq!(X86_32.slots(pages * 4096), slots, "{pages} pages");
        }
        assert_eq!(X86_64.slots(0), 0);
    }

    #[test]
    fn the_layouts_find_the_same_in_different_places() {
        let mut wide = [0; ENTRY_MAX];
        wide[8..16].copy_from_slice(&7u64.to_le_bytes());
        wide[16..24].copy_from_slice(&9u64.to_le_bytes());
        wide[24..32].copy_from_slice(&11u64.to_le_bytes());
        let mut narrow = [0; ENTRY_MAX];
        narrow[4..12].copy_from_slice(&7u64.to_le_bytes());
        narrow[12..20].copy_from_slice(&9u64.to_le_bytes());
        narrow[20..28].copy_from_slice(&11u64.to_le_bytes());
        for entry in [Entry::new(&X86_64, wide), Entry::new(&X86_32, narrow)] {
            assert_eq!((entry.id(), entry.sector(), entry.sector_count()), (7, 9, 11));
        }
    }
}
