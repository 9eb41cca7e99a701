//! Lays out a new VHD file.
//!
//! Dynamic and differencing images are written as the Xen tools write them (creator `tap`, version 1.3, with a
//! batmap), so that XenServer, XCP-ng and QEMU take the virtual size from the size and not from the geometry. What
//! tells them from those is the creator's operating system, a field that none of these programs reads.

use zerocopy::{FromZeros, IntoBytes};

use super::layout::{
    BATMAP_COOKIE, BATMAP_VERSION, CREATOR_OS, FEATURES, FOOTER_COOKIE, HEADER_COOKIE, RawBatmapHeader, RawFooter,
    RawHeader, SECTOR, VERSION, checksum, chs,
};
use super::parent::{Parent, vhd_time};
use super::space::BLOCK_ALIGN;
use super::sparse::room_in_front;
use super::survey::{BLOCK_MAX, BLOCK_MIN, LEN_MAX, bitmap_len, index};
use crate::size::{in_32_bits, on_disk};
use crate::{Creation, FileOffset, ImageError, ImageErrorKind, MetaWrite};

/// The type of image to create.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All bytes from the beginning.
    Fixed,
    /// Thin.
    Dynamic,
    /// Thin, on top of a parent.
    Differencing(Parent),
}

/// A VHD to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Virtual size in bytes: whole sectors, at most 2040 GiB.
    pub len: u64,
    /// The type of the image.
    pub kind: Kind,
    /// Block size in bytes: a power of two from 512 KiB to 16 MiB. Not for fixed images.
    pub block_size: u32,
    /// The new image's identity.
    pub uuid: [u8; 16],
    /// Now, in seconds since 1970.
    pub created: u64,
}

/// Lays out the file of a new image.
pub fn create(spec: &Spec) -> Result<Creation, ImageError> {
    let limits = |what: String| Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
    if spec.len == 0 || spec.len % SECTOR != 0 {
        return limits(format!("a virtual size of {} bytes is not a whole number of 512-byte sectors", spec.len));
    }
    if spec.len > LEN_MAX {
        return limits(format!("a virtual size of {} bytes is beyond the 2040 GiB that a VHD can hold", spec.len));
    }
    if spec.kind == Kind::Fixed {
        let footer = footer(spec, u64::MAX, 2);
        let writes = vec![MetaWrite { at: FileOffset(spec.len), bytes: footer.as_bytes().to_vec() }];
        return Ok(Creation { len: spec.len + SECTOR, writes });
    }
    let block_size = u64::from(spec.block_size);
    if !block_size.is_power_of_two() || !(BLOCK_MIN..=BLOCK_MAX).contains(&block_size) {
        return limits(format!("a block size of {block_size} bytes is not a power of two from 512 KiB to 16 MiB"));
    }
    sparse(spec, block_size)
}

/// Bytes of the file of such an image when `blocks` of its blocks have been written, one after the other.
pub fn measure(spec: &Spec, blocks: u64) -> Result<u64, ImageError> {
    let empty = create(spec)?.len;
    if spec.kind == Kind::Fixed || blocks == 0 {
        return Ok(empty);
    }
    let block = u64::from(spec.block_size);
    // In front of each block are its bitmap and the sector of a footer that stood there.
    let behind = |end: u64| (end + bitmap_len(block)).next_multiple_of(BLOCK_ALIGN) + block;
    let room = room_in_front(block, spec.len.div_ceil(block));
    let first = behind((empty - SECTOR + room).max(empty));
    let others = (blocks - 1).saturating_mul(behind(first + SECTOR) - first);
    Ok(first.saturating_add(others).saturating_add(SECTOR))
}

/// Footer copy, header, locators, table, batmap, footer.
fn sparse(spec: &Spec, block_size: u64) -> Result<Creation, ImageError> {
    const HEADER_AT: FileOffset = FileOffset(512);
    const LOCATORS_AT: FileOffset = FileOffset(1536);
    const NEXT_HEADER: u64 = 1024 + 3 * 1024;
    let mut writes = Vec::new();
    let mut header = RawHeader::new_zeroed();
    let mut end = LOCATORS_AT;
    if let Kind::Differencing(parent) = &spec.kind {
        parent.name_in(&mut header);
        let locators = parent.locators()?;
        writes.extend(locators.place(&mut header, LOCATORS_AT));
        // As much again stays free, for the header and locators of another parent: they are written next to these.
        end = LOCATORS_AT + locators.len() + NEXT_HEADER;
    }
    let blocks = spec.len.div_ceil(block_size);
    let table_at = end.align_up(4096);
    let table_len = (blocks * 4).next_multiple_of(SECTOR);
    header.cookie = HEADER_COOKIE;
    header.data_offset = u64::MAX.into();
    header.table_offset = table_at.0.into();
    header.version = VERSION.into();
    header.max_table_entries = in_32_bits(blocks, "LEN_MAX").into();
    header.block_size = spec.block_size.into();
    writes.push(MetaWrite { at: HEADER_AT, bytes: header.sealed().as_bytes().to_vec() });
    writes.push(MetaWrite { at: table_at, bytes: vec![0xff; index(table_len)] });
    let batmap_at = table_at + table_len;
    let (batmap_writes, footer_at) = new_batmap(batmap_at, &vec![0; batmap_len(blocks)]);
    writes.extend(batmap_writes);
    let disk_type = if spec.kind == Kind::Dynamic { 3 } else { 4 };
    let footer = footer(spec, HEADER_AT.0, disk_type);
    writes.push(MetaWrite { at: FileOffset(0), bytes: footer.as_bytes().to_vec() });
    writes.push(MetaWrite { at: footer_at, bytes: footer.as_bytes().to_vec() });
    Ok(Creation { len: footer_at.0 + SECTOR, writes })
}

/// Bytes of a batmap for this number of blocks.
pub fn batmap_len(blocks: u64) -> usize {
    index(blocks.div_ceil(8).next_multiple_of(SECTOR))
}

/// A batmap with its header at `at`: its writes, and where it ends.
pub fn new_batmap(at: FileOffset, bits: &[u8]) -> (Vec<MetaWrite>, FileOffset) {
    let map_at = at + SECTOR;
    let len = on_disk(bits.len());
    let mut header = RawBatmapHeader::new_zeroed();
    header.cookie = BATMAP_COOKIE;
    header.offset = map_at.0.into();
    header.size = in_32_bits(len / SECTOR, "LEN_MAX").into();
    header.version = BATMAP_VERSION.into();
    header.checksum = checksum(bits).into();
    let writes =
        vec![MetaWrite { at, bytes: header.as_bytes().to_vec() }, MetaWrite { at: map_at, bytes: bits.to_vec() }];
    (writes, map_at + len)
}

fn footer(spec: &Spec, data_offset: u64, disk_type: u32) -> RawFooter {
    let (cylinders, heads, sectors) = chs(spec.len);
    let mut footer = RawFooter::new_zeroed();
    footer.cookie = FOOTER_COOKIE;
    footer.features = FEATURES.into();
    footer.version = VERSION.into();
    footer.data_offset = data_offset.into();
    footer.timestamp = vhd_time(spec.created).into();
    footer.creator_app = *b"tap\0";
    footer.creator_version = 0x0001_0003.into();
    footer.creator_os = CREATOR_OS.into();
    footer.original_size = spec.len.into();
    footer.current_size = spec.len.into();
    footer.cylinders = cylinders.into();
    footer.heads = heads;
    footer.sectors = sectors;
    footer.disk_type = disk_type.into();
    footer.uuid = spec.uuid;
    footer.sealed()
}
