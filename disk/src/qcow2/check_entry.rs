//! Entries of the first- and second-level tables ("L1 table entry", "L2 table entry").
//!
//! Knows nothing of the file around them: whether a place lies in it, or is aligned, is for others to judge.

use super::layout::{COMPRESSED, OFFSET_MASK, SECTOR};

/// Bits of a first-level entry that must be zero.
pub const FIRST_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Bits of a second-level entry of an uncompressed cluster that must be zero.
pub const SECOND_RESERVED: u64 = 0x3f00_0000_0000_01fe;

/// What a second-level entry refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A compressed cluster.
    Packed {
        /// Its first byte in the file.
        at: u64,
        /// How many bytes it takes at most: up to the end of its last sector.
        len: u64,
    },
    /// An ordinary cluster, or none.
    Plain {
        /// Where it begins; zero if there is none.
        at: u64,
    },
}

impl Entry {
    /// Decodes an entry of an image with clusters of `1 << cluster_bits` bytes, between 9 and 21.
    pub fn of(bits: u64, cluster_bits: u32) -> Entry {
        if bits & COMPRESSED == 0 {
            return Entry::Plain { at: bits & OFFSET_MASK };
        }
        // "Compressed Clusters Descriptor": the number of sectors behind the first has what bits the offset leaves.
        let width = 62_u32.saturating_sub(cluster_bits.saturating_sub(8)).min(61);
        let at = bits & ((1 << width) - 1);
        let more = (bits & !COMPRESSED & (u64::MAX >> 1)) >> width;
        Entry::Packed { at, len: (more + 1).saturating_mul(SECTOR).saturating_sub(at % SECTOR) }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_compressed_entry_ends_with_its_last_sector() {
        // 64 KiB clusters: 54 bits of offset, 8 bits of sectors.
        let bits = COMPRESSED | 3 << 54 | 0x5_0123;
        assert_eq!(Entry::of(bits, 16), Entry::Packed { at: 0x5_0123, len: 4 * 512 - 0x123 });
        assert_eq!(Entry::of(COMPRESSED | 0x600, 16), Entry::Packed { at: 0x600, len: 512 });
        assert_eq!(Entry::of(u64::MAX, 9), Entry::Packed { at: (1 << 61) - 1, len: 2 * 512 - 511 });
    }

    #[test]
    fn an_ordinary_entry_is_its_offset() {
        assert_eq!(Entry::of(1 << 63 | 0x5_0000 | 1, 16), Entry::Plain { at: 0x5_0000 });
        assert_eq!(Entry::of(1, 16), Entry::Plain { at: 0 });
    }
}
