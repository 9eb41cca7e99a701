//! Lays out a new VHD file.
//!
//! Dynamic and differencing images are written as the Xen tools write them (creator `tap`, version 1.3, with a
//! batmap), so that XenServer, XCP-ng and QEMU take the virtual size from the size and not from the geometry.

use zerocopy::byteorder::big_endian::U16;
use zerocopy::{FromZeros, IntoBytes};

use super::layout::{
    BATMAP_COOKIE, BATMAP_VERSION, EPOCH, FEATURES, FOOTER_COOKIE, HEADER_COOKIE, RawBatmapHeader, RawFooter,
    RawHeader, RawLocator, SECTOR, VERSION, checksum, chs,
};
use super::survey::{BLOCK_MAX, BLOCK_MIN, LEN_MAX, index};
use crate::{Creation, ImageError, ImageErrorKind, MetaWrite};

/// What a differencing image records of its parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The parent's identity; all zero if the parent is raw.
    pub uuid: [u8; 16],
    /// When the parent was last changed, in seconds since 1970.
    pub modified: u64,
    /// Its path as seen from the new image's directory.
    pub relative: String,
    /// Its absolute path.
    pub absolute: String,
}

/// What kind of image to make.
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
    /// What kind.
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
        let writes = vec![MetaWrite { at: spec.len, bytes: footer.as_bytes().to_vec() }];
        return Ok(Creation { len: spec.len.saturating_add(SECTOR), writes });
    }
    let block_size = u64::from(spec.block_size);
    if !block_size.is_power_of_two() || !(BLOCK_MIN..=BLOCK_MAX).contains(&block_size) {
        return limits(format!("a block size of {block_size} bytes is not a power of two from 512 KiB to 16 MiB"));
    }
    sparse(spec, block_size)
}

/// Footer copy, header, locators, table, batmap, footer.
fn sparse(spec: &Spec, block_size: u64) -> Result<Creation, ImageError> {
    const HEADER_AT: u64 = 512;
    const LOCATORS_AT: u64 = 1536;
    let mut writes = Vec::new();
    let mut header = RawHeader::new_zeroed();
    let mut end = LOCATORS_AT;
    if let Kind::Differencing(parent) = &spec.kind {
        end = locate_parent(&mut header, parent, LOCATORS_AT, &mut writes)?;
    }
    let blocks = spec.len.div_ceil(block_size);
    let table_at = end.next_multiple_of(4096);
    let table_len = blocks.saturating_mul(4).next_multiple_of(SECTOR);
    header.cookie = HEADER_COOKIE;
    header.data_offset = u64::MAX.into();
    header.table_offset = table_at.into();
    header.version = VERSION.into();
    header.max_table_entries = u32::try_from(blocks).unwrap_or(u32::MAX).into();
    header.block_size = spec.block_size.into();
    writes.push(MetaWrite { at: HEADER_AT, bytes: header.sealed().as_bytes().to_vec() });
    writes.push(MetaWrite { at: table_at, bytes: vec![0xff; index(table_len)] });
    let batmap_at = table_at.saturating_add(table_len);
    let batmap = batmap(batmap_at, blocks, &mut writes);
    let disk_type = if spec.kind == Kind::Dynamic { 3 } else { 4 };
    let footer = footer(spec, HEADER_AT, disk_type);
    writes.push(MetaWrite { at: 0, bytes: footer.as_bytes().to_vec() });
    writes.push(MetaWrite { at: batmap, bytes: footer.as_bytes().to_vec() });
    Ok(Creation { len: batmap.saturating_add(SECTOR), writes })
}

/// An empty batmap with its header at `at`; where it ends.
fn batmap(at: u64, blocks: u64, writes: &mut Vec<MetaWrite>) -> u64 {
    let map_at = at.saturating_add(SECTOR);
    let bits = vec![0; index(blocks.div_ceil(8).next_multiple_of(SECTOR))];
    let len = u64::try_from(bits.len()).unwrap_or(u64::MAX);
    let mut header = RawBatmapHeader::new_zeroed();
    header.cookie = BATMAP_COOKIE;
    header.offset = map_at.into();
    header.size = u32::try_from(len / SECTOR).unwrap_or(u32::MAX).into();
    header.version = BATMAP_VERSION.into();
    header.checksum = checksum(&bits).into();
    writes.push(MetaWrite { at, bytes: header.as_bytes().to_vec() });
    writes.push(MetaWrite { at: map_at, bytes: bits });
    map_at.saturating_add(len)
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
    footer.original_size = spec.len.into();
    footer.current_size = spec.len.into();
    footer.cylinders = cylinders.into();
    footer.heads = heads;
    footer.sectors = sectors;
    footer.disk_type = disk_type.into();
    footer.uuid = spec.uuid;
    footer.sealed()
}

/// Seconds since 1970 as seconds since 2000, which is what VHD counts.
fn vhd_time(unix: u64) -> u32 {
    u32::try_from(unix.saturating_sub(EPOCH)).unwrap_or(u32::MAX)
}

/// Records the parent: by name in the header, and by path in three locators; where these end.
fn locate_parent(
    header: &mut RawHeader,
    parent: &Parent,
    at: u64,
    writes: &mut Vec<MetaWrite>,
) -> Result<u64, ImageError> {
    header.parent_uuid = parent.uuid;
    header.parent_timestamp = vhd_time(parent.modified).into();
    let name = parent.relative.rsplit('/').next().unwrap_or_default();
    for (unit, place) in name.encode_utf16().zip(&mut header.parent_name) {
        *place = U16::new(unit);
    }
    let windows = |path: &str| path.replace('/', "\\").encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let relative =
        if parent.relative.starts_with('.') { parent.relative.clone() } else { format!("./{}", parent.relative) };
    let paths = [
        (*b"MACX", format!("file://{}", parent.absolute).into_bytes()),
        (*b"W2ku", windows(&parent.absolute)),
        (*b"W2ru", windows(&relative)),
    ];
    let mut end = at;
    for ((code, bytes), locator) in paths.into_iter().zip(&mut header.locators) {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        if len > 8192 {
            let what = format!("the parent's path of {len} bytes is too long for a parent locator");
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let space = len.next_multiple_of(512);
        *locator = RawLocator {
            code,
            data_space: space.into(),
            data_len: len.into(),
            reserved: 0.into(),
            data_offset: end.into(),
        };
        let mut bytes = bytes;
        bytes.resize(index(u64::from(space)), 0);
        writes.push(MetaWrite { at: end, bytes });
        end = end.saturating_add(u64::from(space));
    }
    Ok(end)
}
