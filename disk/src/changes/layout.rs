//! The bytes of a map of changed blocks: the header, which stands twice, and the pages behind it.
//!
//! Knows nothing of which blocks have changed, nor of when something is written. Little-endian. Each header and each
//! page is one sector of 512 bytes with a checksum and the id of its map, so that what stood in the same place of a
//! device before is not taken for a part of it.

use zerocopy::byteorder::little_endian::{I64, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::crc32c::crc32c;
use crate::{FileOffset, MetaWrite};

/// Bytes of a header or a page: what storage writes whole or not at all.
pub const SECTOR: u64 = 512;
/// The same as a length in memory.
pub(super) const SECTOR_LEN: usize = 512;
/// Changed with the layout, and with what any field means. The first word and this one stay where they are.
pub(super) const VERSION: u32 = 1;
pub(super) const MAGIC: [u8; 8] = *b"TAPLCHGS";
/// Offsets of the two headers: in different sectors of a drive with 4096 bytes each.
pub const HEADERS_AT: [FileOffset; 2] = [FileOffset(0), FileOffset(4096)];
/// Offset of the first page.
pub const PAGES_AT: FileOffset = FileOffset(8192);
/// Regions of a page: what fits into a sector.
pub const REGIONS: usize = 60;

/// The header says that no change will be added.
pub(super) const SEALED: u32 = 1;
/// The header says that changes are missing.
pub(super) const INVALID: u32 = 2;
/// The header says in which state the image was left, by a process that has closed the map.
pub(super) const CLOSED: u32 = 4;

/// A header. The valid one with the greater sequence counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct RawHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// Of all of it, with zero here.
    pub checksum: U32,
    pub sequence: U64,
    pub id: [u8; 16],
    /// The id of the map of the interval before; zeroes for the first map.
    pub continues: [u8; 16],
    /// Bytes of the disk.
    pub len: U64,
    /// Bytes of a block.
    pub block: U32,
    pub flags: U32,
    /// The last time that a process has opened the map, drawn at random: the image has it too.
    pub session: [u8; 16],
    /// With [`CLOSED`]: when the image's file was last changed, in seconds and nanoseconds; and its bytes.
    pub changed_s: I64,
    pub changed_ns: U32,
    pub unused: U32,
    pub file_len: U64,
    pub reserved: [u8; 400],
}

/// A page: which blocks of [`REGIONS`] regions have changed, a bit each, the first one being the lowest; and in which
/// of these regions others may have.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub(super) struct RawPage {
    /// Of all of it, with zero here.
    pub checksum: U32,
    pub number: U32,
    pub id: [u8; 16],
    pub intents: U64,
    pub changed: [U64; REGIONS],
}

const _: () = assert!(size_of::<RawHeader>() == SECTOR_LEN && size_of::<RawPage>() == SECTOR_LEN);

impl RawHeader {
    /// With its checksum.
    pub fn summed(self) -> RawHeader {
        let zeroed = RawHeader { checksum: U32::ZERO, ..self };
        RawHeader { checksum: U32::new(crc32c(zeroed.as_bytes().iter().copied())), ..zeroed }
    }

    /// Whether its checksum is right.
    pub fn is_sound(&self) -> bool {
        self.summed().checksum == self.checksum
    }
}

impl RawPage {
    /// With its checksum.
    pub fn summed(self) -> RawPage {
        let zeroed = RawPage { checksum: U32::ZERO, ..self };
        RawPage { checksum: U32::new(crc32c(zeroed.as_bytes().iter().copied())), ..zeroed }
    }

    /// Whether it is this page of this map, whole.
    pub fn is_sound(&self, id: [u8; 16], number: u32) -> bool {
        self.summed().checksum == self.checksum && self.id == id && self.number.get() == number
    }
}

/// Where a page stands.
pub fn page_at(number: u32) -> FileOffset {
    PAGES_AT + u64::from(number) * SECTOR
}

/// Joins writes of neighbouring pages, which are in order, into few of at most `most` bytes.
pub(super) fn joined(pages: impl Iterator<Item = MetaWrite>, most: usize) -> Vec<MetaWrite> {
    let mut writes: Vec<MetaWrite> = Vec::new();
    for page in pages {
        match writes.last_mut() {
            Some(last) if last.at + crate::size::on_disk(last.bytes.len()) == page.at && last.bytes.len() < most => {
                last.bytes.extend(page.bytes);
            }
            _ => writes.push(page),
        }
    }
    writes
}
