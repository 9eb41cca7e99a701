//! An L2 entry: what it says of its cluster ("L2 table entry").
//!
//! Knows nothing of tables. Keeps: what [`check`] has let through has a place inside the limit, at a cluster of its own.

use super::layout::{COMPRESSED, COPIED, OFFSET_MASK, SECTOR, ZERO};

/// What an L2 entry says of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// In the parent, or zero if there is none.
    Unallocated,
    /// Zero.
    Zero,
    /// Zero, and has a place in the file that holds something else.
    ZeroAllocated {
        /// Offset in the file.
        at: u64,
        /// Nothing else refers to that place.
        copied: bool,
    },
    /// In the file.
    Data {
        /// Offset in the file.
        at: u64,
        /// Nothing else refers to that place: it may be written to.
        copied: bool,
    },
    /// In the file, compressed.
    Packed {
        /// Where the compressed bytes begin.
        at: u64,
        /// Behind the last sector that they reach into.
        end: u64,
    },
}

impl Entry {
    /// Reads an entry of an image with clusters of 2^`bits` bytes.
    pub fn decode(raw: u64, bits: u32) -> Entry {
        if raw & COMPRESSED != 0 {
            // "Compressed Clusters Descriptor": an offset of `x` bits, above it the additional sectors.
            let x = 70u32.saturating_sub(bits);
            let at = raw & (1u64 << x).saturating_sub(1);
            let sectors = ((raw & !(COPIED | COMPRESSED)) >> x).saturating_add(1);
            return Entry::Packed { at, end: (at / SECTOR).saturating_add(sectors).saturating_mul(SECTOR) };
        }
        match (raw & OFFSET_MASK, raw & ZERO != 0) {
            (0, false) => Entry::Unallocated,
            (0, true) => Entry::Zero,
            (at, true) => Entry::ZeroAllocated { at, copied: raw & COPIED != 0 },
            (at, false) => Entry::Data { at, copied: raw & COPIED != 0 },
        }
    }

    /// Where in the file it has a place, or begins to have one.
    pub fn place(self) -> Option<u64> {
        match self {
            Entry::Data { at, .. } | Entry::ZeroAllocated { at, .. } | Entry::Packed { at, .. } => Some(at),
            Entry::Unallocated | Entry::Zero => None,
        }
    }

    /// The entry as it stands in a table.
    pub fn encode(self) -> u64 {
        match self {
            Entry::Unallocated => 0,
            Entry::Zero => ZERO,
            Entry::ZeroAllocated { at, copied } => at | if copied { COPIED } else { 0 } | ZERO,
            Entry::Data { at, copied } => at | if copied { COPIED } else { 0 },
            Entry::Packed { .. } => unreachable!("nothing is written compressed"),
        }
    }
}

/// Whether an entry makes sense in an image of clusters of 2^`bits` bytes where nothing lies at or behind `limit`.
/// `zeroes`: version 2 does not know clusters that read as zero. A mark "copied" that is missing, or where none
/// belongs, makes no entry unsound: it costs time.
pub fn is_sound(raw: u64, bits: u32, limit: u64, zeroes: bool) -> bool {
    /// Bits of the entry of a standard cluster that are neither flag nor offset, the zero flag apart.
    const RESERVED: u64 = !(COPIED | COMPRESSED | OFFSET_MASK | ZERO);
    match Entry::decode(raw, bits) {
        Entry::Packed { at, end } => at > 0 && at < limit && end.saturating_sub(SECTOR) < limit,
        Entry::Unallocated => raw & RESERVED == 0,
        Entry::Zero => raw & RESERVED == 0 && zeroes,
        Entry::ZeroAllocated { at, .. } | Entry::Data { at, .. } => {
            raw & RESERVED == 0 && at % (1 << bits) == 0 && at < limit && (zeroes || raw & ZERO == 0)
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_compressed_cluster_reaches_to_the_end_of_its_last_sector() {
        // 64 KiB: x is 54. From byte 327 680 + 100, one additional sector.
        let raw = COMPRESSED | (1 << 54) | 327_780;
        assert_eq!(Entry::decode(raw, 16), Entry::Packed { at: 327_780, end: 327_680 + 1024 });
    }

    #[test]
    fn what_is_written_reads_back() {
        let data = |copied| Entry::Data { at: 1 << 40, copied };
        let zero = |copied| Entry::ZeroAllocated { at: 65536, copied };
        for entry in [Entry::Unallocated, Entry::Zero, data(true), data(false), zero(true), zero(false)] {
            assert_eq!(Entry::decode(entry.encode(), 16), entry);
            assert!(is_sound(entry.encode(), 16, 1 << 50, true));
        }
    }

    #[test]
    fn reserved_bits_and_strange_places_are_not_sound() {
        let at = 3 << 16;
        assert!(is_sound(at | COPIED, 16, 4 << 16, true));
        assert!(!is_sound(at | COPIED, 16, 3 << 16, true), "behind the end");
        assert!(!is_sound(at | COPIED | 2, 16, 4 << 16, true), "a reserved bit");
        assert!(!is_sound((at + 512) | COPIED, 16, 4 << 16, true), "between clusters");
        assert!(is_sound(at, 16, 4 << 16, true), "shared");
        assert!(is_sound(at | ZERO, 16, 4 << 16, true) && !is_sound(at | ZERO, 16, 4 << 16, false), "version 2");
    }
}
