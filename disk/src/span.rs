//! Ranges of bytes of a disk, and its size.

use crate::DiskOffset;

/// Bytes `at..at + len` of a virtual disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Offset of the first byte.
    pub at: DiskOffset,
    /// Number of bytes.
    pub len: u64,
}

impl Span {
    /// The offset behind the last byte. A span that has been checked against a geometry cannot overflow.
    pub fn end(self) -> DiskOffset {
        self.at.saturating_add(self.len)
    }

    /// The rest of the span from byte `at` of the disk on, which is in it or its end.
    pub fn tail_from(self, at: DiskOffset) -> Span {
        assert!(self.at <= at && at <= self.end(), "byte {at} is not in {self:?}");
        Span { at, len: self.end() - at }
    }

    /// Whether the two have a byte in common.
    pub fn overlaps(self, other: Span) -> bool {
        self.at < other.end() && other.at < self.end() && self.len > 0 && other.len > 0
    }

    /// The bytes that both have, if any.
    pub fn intersection(self, other: Span) -> Option<Span> {
        let at = self.at.max(other.at);
        let len = self.end().min(other.end()).checked_sub(at)?;
        (len > 0).then_some(Span { at, len })
    }
}

/// Size and limits of a disk as its guest sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Virtual size in bytes; a multiple of `block`.
    pub len: u64,
    /// Logical block size in bytes: every offset and length is a multiple of it. 512 or 4096.
    pub block: u32,
    /// Bytes below which a write costs the storage a read as well; a multiple of `block`.
    pub physical_block: u32,
    /// Bytes that a discard should cover and be aligned to in order to free space.
    pub discard: u32,
    /// Cylinders, heads, sectors, where the format records them.
    pub chs: Option<(u16, u8, u8)>,
    /// Writes, discards and write-zeroes are refused.
    pub read_only: bool,
}
