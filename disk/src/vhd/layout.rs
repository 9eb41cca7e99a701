//! The structures of a VHD file, byte for byte: "Virtual Hard Disk Image Format Specification" 1.0 (Microsoft,
//! 2006), and the batmap that the Xen tools keep behind the block allocation table. All numbers are big-endian.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::offset::number;
use crate::{FileOffset, Stamp};

/// Bytes in a sector: the unit of every offset in the block allocation table.
pub const SECTOR: u64 = 512;
number! {
    /// A block of the disk, by its number.
    Block(u32)
}

number! {
    /// A sector of the file, by its number. Of a block the table records that of its bitmap, which is in front of it.
    FileSector(u32)
}

impl FileSector {
    /// Where it begins.
    #[inline(always)]
    pub fn start(self) -> FileOffset {
        FileOffset(u64::from(self.0) * SECTOR)
    }
}

/// The table entry of a block that has no place in the file.
pub const UNUSED: FileSector = FileSector(u32::MAX);
/// First bytes of a footer.
pub const FOOTER_COOKIE: [u8; 8] = *b"conectix";
/// First bytes of the header of a dynamic or differencing image.
pub const HEADER_COOKIE: [u8; 8] = *b"cxsparse";
/// First bytes of a batmap header.
pub const BATMAP_COOKIE: [u8; 8] = *b"tdbatmap";
/// The platform code of a path as a file URL: "Mac OS X", as the specification spells it.
pub const FILE_URL: [u8; 4] = *b"MacX";
/// The code that Tapline wrote in its place until it was compared with libvhd, which refuses a header with a code that
/// it does not know. Read as [`FILE_URL`], and corrected by the next writer of the image.
pub const MISSPELT_FILE_URL: [u8; 4] = *b"MACX";
/// The only version of footer and header.
pub const VERSION: u32 = 0x0001_0000;
/// The bit of the features that is always set.
pub const FEATURES: u32 = 2;
/// The only version of a batmap whose checksum is of unsigned bytes.
pub const BATMAP_VERSION: u32 = 0x0001_0002;
/// The creator's operating system in images of Tapline: "Tapl". The Xen tools write zero there, and only print it.
pub const CREATOR_OS: u32 = 0x5461_706c;
/// Seconds from 1970 to 2000, where time begins for VHD.
pub const EPOCH: u64 = 946_684_800;

/// Footer: "Hard Disk Footer Format". The last 512 (in old images 511) bytes of the file; dynamic and
/// differencing images begin with a copy.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawFooter {
    pub cookie: [u8; 8],
    pub features: U32,
    pub version: U32,
    pub data_offset: U64,
    pub timestamp: U32,
    pub creator_app: [u8; 4],
    pub creator_version: U32,
    pub creator_os: U32,
    pub original_size: U64,
    pub current_size: U64,
    pub cylinders: U16,
    pub heads: u8,
    pub sectors: u8,
    pub disk_type: U32,
    pub checksum: U32,
    pub uuid: [u8; 16],
    pub saved: u8,
    /// Not in the specification: the Xen tools mark images that no VDI refers to any more.
    pub hidden: u8,
    pub reserved: [u8; 384],
    /// Reserved too: [`StampField`].
    pub stamp: [u8; 42],
}
const _: () = assert!(size_of::<RawFooter>() == 512);

/// Where a parent may be found, by one platform's idea of a path: "Parent Locator Entries".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawLocator {
    pub code: [u8; 4],
    pub data_space: U32,
    pub data_len: U32,
    pub reserved: U32,
    pub data_offset: U64,
}
const _: () = assert!(size_of::<RawLocator>() == 24);

/// Header: "Dynamic Disk Header Format".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawHeader {
    pub cookie: [u8; 8],
    pub data_offset: U64,
    pub table_offset: U64,
    pub version: U32,
    pub max_table_entries: U32,
    pub block_size: U32,
    pub checksum: U32,
    pub parent_uuid: [u8; 16],
    pub parent_timestamp: U32,
    pub reserved: U32,
    pub parent_name: [U16; 256],
    pub locators: [RawLocator; 8],
    pub reserved_end: [u8; 256],
}
const _: () = assert!(size_of::<RawHeader>() == 1024);

/// The sector in front of the batmap, right behind the block allocation table (libvhd; not in the specification).
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawBatmapHeader {
    pub cookie: [u8; 8],
    /// Bytes from the start of the file.
    pub offset: U64,
    /// Sectors.
    pub size: U32,
    pub version: U32,
    /// Of the map alone.
    pub checksum: U32,
    pub marker: u8,
    /// Not zero: the image is encrypted with a key of this hash.
    pub key_cookie: u8,
    pub key_nonce: [u8; 32],
    pub key_hash: [u8; 32],
    pub reserved: [u8; 376],
    /// Reserved too: [`StampField`].
    pub stamp: [u8; 42],
}
const _: () = assert!(size_of::<RawBatmapHeader>() == 512);

/// Room for a [`Stamp`], in reserved bytes: of the batmap's header, which no program looks at; where there is none, of
/// the copy of the footer. `vhd-util check` demands zeroes there, so they are removed when a process ends.
pub type StampField = [u8; 42];

/// In front of a stamp.
const STAMP_COOKIE: [u8; 18] = *b"tapline log stamp\0";

/// A field that holds this stamp.
pub fn stamp_field(stamp: Stamp) -> StampField {
    let mut field = [0; 42];
    let bytes = STAMP_COOKIE.into_iter().chain(stamp.to_bytes());
    field.iter_mut().zip(bytes).for_each(|(place, byte)| *place = byte);
    field
}

/// The stamp in a field, if it holds one.
pub fn stamp_in(field: &StampField) -> Option<Stamp> {
    Stamp::from_bytes(field.strip_prefix(&STAMP_COOKIE)?)
}

/// The one's complement of the sum of all bytes, which every structure carries of itself.
pub fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(0u32, |sum, &byte| sum.wrapping_add(u32::from(byte)))
}

impl RawFooter {
    /// Whether it is that of a fixed image.
    pub fn is_fixed(&self) -> bool {
        self.disk_type.get() == 2
    }

    /// Gives the disk a size, and the geometry that goes with it.
    pub fn resize(&mut self, len: u64) {
        let (cylinders, heads, sectors) = chs(len);
        self.current_size = len.into();
        self.cylinders = cylinders.into();
        (self.heads, self.sectors) = (heads, sectors);
    }

    /// Without a stamp.
    pub fn unstamped(mut self) -> RawFooter {
        if stamp_in(&self.stamp).is_some() {
            self.stamp = [0; 42];
            self = self.sealed();
        }
        self
    }

    /// The checksum that the footer should carry.
    pub fn sum(&self) -> u32 {
        checksum(RawFooter { checksum: U32::ZERO, ..*self }.as_bytes())
    }

    /// With the checksum filled in.
    pub fn sealed(mut self) -> RawFooter {
        self.checksum = U32::new(self.sum());
        self
    }
}

impl RawHeader {
    /// The checksum that the header should carry.
    pub fn sum(&self) -> u32 {
        checksum(RawHeader { checksum: U32::ZERO, ..*self }.as_bytes())
    }

    /// Whether a locator has the code that libvhd does not know.
    pub fn is_misspelt(&self) -> bool {
        self.locators.iter().any(|locator| locator.code == MISSPELT_FILE_URL)
    }

    /// Gives such locators the right one.
    pub fn spell_right(&mut self) {
        let misspelt = self.locators.iter_mut().filter(|locator| locator.code == MISSPELT_FILE_URL);
        misspelt.for_each(|locator| locator.code = FILE_URL);
    }

    /// With the checksum filled in.
    pub fn sealed(mut self) -> RawHeader {
        self.checksum = U32::new(self.sum());
        self
    }
}

/// Cylinders, heads and sectors of a disk of `len` bytes: appendix "CHS Calculation".
pub fn chs(len: u64) -> (u16, u8, u8) {
    const LARGEST: u64 = 65535 * 16 * 255;
    let total = (len / SECTOR).min(LARGEST);
    let (heads, sectors) = if total >= 65535 * 16 * 63 {
        (16, 255)
    } else {
        let tracks = total / 17;
        match u8::try_from(tracks.div_ceil(1024).max(4)) {
            Ok(heads @ ..=16) if tracks < u64::from(heads) * 1024 => (heads, 17),
            _ if total / 31 < 16 * 1024 => (16, 31),
            _ => (16, 63),
        }
    };
    let Ok(cylinders) = u16::try_from(total / u64::from(sectors) / u64::from(heads)) else {
        unreachable!("a disk of LARGEST sectors has 65535 cylinders, and others have few of them in few heads")
    };
    (cylinders, heads, sectors)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn geometry_is_what_other_programs_compute() {
        // As written by `qemu-img create -f vpc -o force_size` for these sizes.
        assert_eq!(chs(10 << 30), (20805, 16, 63));
        assert_eq!(chs(4 << 30), (8322, 16, 63));
        assert_eq!(chs(1 << 20), (30, 4, 17));
        assert_eq!(chs(2040 << 30), (65535, 16, 255));
    }

    #[test]
    fn a_checksum_leaves_itself_out() {
        let footer: RawFooter = zerocopy::FromZeros::new_zeroed();
        assert_eq!(footer.sealed().sum(), footer.sum());
        assert_eq!(footer.sum(), u32::MAX);
    }
}
