//! VHDX, of which fixed and dynamic images are read: those without a parent.
//!
//! Sections are those of Microsoft's specification \[MS-VHDX\]. A disk is cut into payload blocks; the block allocation
//! table (BAT) says of each where it is. Numbers are little-endian.
//!
//! Changes of metadata go through a log ([`log`]). An image whose log holds an entry was not closed, and is refused:
//! what is in the tables is not what its writer had written.

mod log;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::pages::Pages;
use super::{check_len, corrupt, read, stored, unsupported};
use crate::crc32c::crc32c;
use crate::format::{Mapping, MetaBlock, Wait};
use crate::size::{in_memory, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind, Source, Span};

const MIB: u64 = 1 << 20;
/// 2.2.1, "File Type Identifier".
pub const SIGNATURE: [u8; 8] = *b"vhdxfile";
/// 2.2: where the two headers and the two region tables are.
const HEADERS: [u64; 2] = [64 << 10, 128 << 10];
const REGION_TABLES: [u64; 2] = [192 << 10, 256 << 10];
const HEADER_LEN: usize = 4096;
const REGION_TABLE_LEN: usize = 64 << 10;
const METADATA_TABLE_LEN: usize = 64 << 10;
/// 2.2.3.1, 2.6.1.1: entries of either table.
const ENTRIES_MAX: u32 = 2047;
/// The BAT is read in such pieces.
const PAGE: u64 = 4096;
/// 2.5: the number of sectors for which a sector bitmap block has a bit. Its entry stands behind those of the payload
/// blocks with these sectors.
const BITMAP_SECTORS: u64 = 1 << 23;

const BAT: [u8; 16] = guid(0x2dc2_7766, 0xf623, 0x4200, *b"\x9d\x64\x11\x5e\x9b\xfd\x4a\x08");
const METADATA: [u8; 16] = guid(0x8b7c_a206, 0x4790, 0x4b9a, *b"\xb8\xfe\x57\x5f\x05\x0f\x88\x6e");
const FILE_PARAMETERS: [u8; 16] = guid(0xcaa1_6737, 0xfa36, 0x4d43, *b"\xb3\xb6\x33\xf0\xaa\x44\xe7\x6b");
const DISK_SIZE: [u8; 16] = guid(0x2fa5_4224, 0xcd1b, 0x4876, *b"\xb2\x11\x5d\xbe\xd8\x3b\xf4\xb8");
const DISK_ID: [u8; 16] = guid(0xbeca_12ab, 0xb2e6, 0x4523, *b"\x93\xef\xc3\x09\xe0\x00\xc7\x46");
const LOGICAL_SECTOR: [u8; 16] = guid(0x8141_bf1d, 0xa96f, 0x4709, *b"\xba\x47\xf2\x33\xa8\xfa\xab\x5f");
const PHYSICAL_SECTOR: [u8; 16] = guid(0xcda3_48c7, 0x445d, 0x4471, *b"\x9c\xc9\xe9\x88\x52\x51\xc5\x56");
const PARENT_LOCATOR: [u8; 16] = guid(0xa8d3_5f2d, 0xb30b, 0x454d, *b"\xab\xf7\xd3\xd8\x48\x34\xab\x0c");

/// 2.6.2.1: whether blocks stay allocated, as in a fixed image; whether there is a parent.
const LEAVE_ALLOCATED: u32 = 1;
const HAS_PARENT: u32 = 2;
/// 2.6.1.2: the item must be understood.
const ITEM_REQUIRED: u32 = 4;

/// 2.5.1.1, "Payload BAT Entry States".
const NOT_PRESENT: u64 = 0;
const UNDEFINED: u64 = 1;
const ZERO: u64 = 2;
const UNMAPPED: u64 = 3;
/// The same in files of an earlier draft.
const UNMAPPED_EARLY: u64 = 5;
const FULLY_PRESENT: u64 = 6;

/// 2.2.2, "Headers", the part that is not reserved.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
struct RawHeader {
    signature: [u8; 4],
    checksum: U32,
    sequence: U64,
    file_write: [u8; 16],
    data_write: [u8; 16],
    log: [u8; 16],
    log_version: U16,
    version: U16,
    log_len: U32,
    log_at: U64,
}

/// 2.2.3.2, "Region Table Entry".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
struct RawRegion {
    guid: [u8; 16],
    at: U64,
    len: U32,
    required: U32,
}

/// 2.6.1.2, "Metadata Table Entry".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
struct RawItem {
    guid: [u8; 16],
    at: U32,
    len: U32,
    flags: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<RawHeader>() == 80 && size_of::<RawRegion>() == 32 && size_of::<RawItem>() == 32);

/// A GUID as it stands in a file.
const fn guid(one: u32, two: u16, three: u16, four: [u8; 8]) -> [u8; 16] {
    let ([a, b, c, d], [e, f], [g, h]) = (one.to_le_bytes(), two.to_le_bytes(), three.to_le_bytes());
    let [i, j, k, l, m, n, o, p] = four;
    [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p]
}

/// A VHDX image, open for reading.
#[derive(Debug)]
pub struct Vhdx {
    len: u64,
    block: u64,
    fixed: bool,
    logical_sector: u64,
    /// Payload blocks between two entries of sector bitmap blocks.
    ratio: u64,
    bat_at: u64,
    file_len: u64,
    bat: Pages,
}

impl Vhdx {
    /// Reads the metadata of a file.
    pub fn open(source: &mut dyn Source) -> Result<Vhdx, ImageError> {
        let there = in_memory(source.len()).min(SIGNATURE.len());
        let first = read(source, 0, there, "first sector")?;
        if first != SIGNATURE {
            return Err(ImageError::at(
                ImageErrorKind::WrongFormat,
                FileOffset(0),
                "the file does not begin like a VHDX",
            ));
        }
        let header = current_header(source)?;
        check_header(source, &header)?;
        let regions = regions(source)?;
        let items = Items::read(source, regions.metadata)?;
        let (block, flags) = items.file_parameters(source)?;
        let len = items.number(source, DISK_SIZE, 8, "disk's size")?;
        let len = check_len(items.at(DISK_SIZE), Some(len))?;
        let logical_sector = items.number(source, LOGICAL_SECTOR, 4, "size of a sector")?;
        if !matches!(logical_sector, 512 | 4096) || len % logical_sector != 0 {
            return corrupt(items.at(LOGICAL_SECTOR), "the disk is not a whole number of sectors of 512 or 4096 bytes");
        }
        let ratio = BITMAP_SECTORS * logical_sector / block;
        let blocks = len.div_ceil(block);
        let entries = blocks + (blocks - 1) / ratio;
        if entries * 8 > regions.bat.len.get().into() {
            return corrupt(regions.bat.at.get(), "the block allocation table is too short for the disk");
        }
        Ok(Vhdx {
            len,
            block,
            fixed: flags & LEAVE_ALLOCATED != 0,
            logical_sector,
            ratio,
            bat_at: regions.bat.at.get(),
            file_len: source.len(),
            bat: Pages::default(),
        })
    }

    /// Bytes of the disk.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: a disk has sectors.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Bytes of a block.
    pub fn block(&self) -> u64 {
        self.block
    }

    /// Whether all blocks keep their places.
    pub fn is_fixed(&self) -> bool {
        self.fixed
    }

    /// Bytes of a sector, as its guest has them.
    pub fn logical_sector(&self) -> u64 {
        self.logical_sector
    }

    /// Where the first bytes of `span` live.
    pub fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let (number, from) = (span.at.0 / self.block, span.at.0 % self.block);
        let first = self.entry(number)?;
        let at = FileOffset(self.entry_at(number));
        let kind = self.kind(first);
        let mut count = 1;
        while count * self.block < from + span.len {
            // The next call loads what is not here yet.
            let Ok(next) = self.entry(number + count) else { break };
            let goes_on = match (kind, self.kind(next)) {
                (Block::Zero, Block::Zero) => true,
                (Block::At(at), Block::At(next)) => next == at + count * self.block,
                _ => false,
            };
            if !goes_on {
                break;
            }
            count += 1;
        }
        let len = span.len.min(count * self.block - from);
        Ok(match kind {
            Block::Zero => Mapping::Zero { len },
            Block::At(at) => stored(at + from, len, self.file_len),
            Block::Nowhere => Mapping::Damaged { at, raw: first, len },
        })
    }

    /// Where the entry of a payload block is: in front of it are those of other blocks and of their bitmaps.
    fn entry_at(&self, number: u64) -> u64 {
        self.bat_at + (number + number / self.ratio) * 8
    }

    fn entry(&self, number: u64) -> Result<u64, Wait> {
        let at = self.entry_at(number);
        let page = FileOffset(at).align_down(PAGE);
        let bytes = self.bat.get(MetaBlock { at: page, len: 4096 })?;
        Ok(le64(bytes, in_memory(at - page.0)))
    }

    /// Decodes a BAT entry.
    fn kind(&self, entry: u64) -> Block {
        // 2.5.1: three bits of state, and above twenty bits a place in units of 1 MiB.
        let at = entry >> 20 << 20;
        match entry & 7 {
            NOT_PRESENT | UNDEFINED | ZERO | UNMAPPED | UNMAPPED_EARLY => Block::Zero,
            FULLY_PRESENT if at >= MIB => Block::At(at),
            _ => Block::Nowhere,
        }
    }

    /// A page that was waited for.
    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) {
        self.bat.load(block, bytes);
    }

    /// Drops cached pages of the BAT.
    pub fn drop_caches(&mut self) {
        self.bat.clear();
    }
}

/// The state of a block, from its BAT entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Zero,
    At(u64),
    /// In the first MiB, or in a state that there is not.
    Nowhere,
}

/// 2.2.2: the sound one with the higher sequence number.
fn current_header(source: &mut dyn Source) -> Result<RawHeader, ImageError> {
    let mut found: Option<RawHeader> = None;
    for at in HEADERS {
        let bytes = read(source, at, HEADER_LEN, "header")?;
        let Ok((header, _)) = RawHeader::read_from_prefix(&bytes) else { continue };
        let newer = found.is_none_or(|other| header.sequence.get() > other.sequence.get());
        if header.signature == *b"head" && newer && is_sound(&bytes) {
            found = Some(header);
        }
    }
    found.map_or_else(|| corrupt(HEADERS[0], "neither of the two headers is sound"), Ok)
}

fn check_header(source: &mut dyn Source, header: &RawHeader) -> Result<(), ImageError> {
    if header.version.get() != 1 {
        return unsupported(format!("the image is of VHDX version {}; version 1 is known", header.version));
    }
    if header.log == [0; 16] || !log::holds_entry(source, header)? {
        return Ok(());
    }
    unsupported(
        "the image was not closed, and its log holds changes: open it once in its own hypervisor, or have \
         `qemu-img check -f vhdx -r all FILE` replay the log",
    )
}

/// The regions that are needed.
struct Regions {
    bat: RawRegion,
    metadata: RawRegion,
}

/// 2.2.3: the two tables are the same; the first sound one is taken.
fn regions(source: &mut dyn Source) -> Result<Regions, ImageError> {
    let [one, other] = REGION_TABLES;
    let mut table = read(source, one, REGION_TABLE_LEN, "region table")?;
    if !table.starts_with(b"regi") || !is_sound(&table) {
        table = read(source, other, REGION_TABLE_LEN, "region table")?;
    }
    if !table.starts_with(b"regi") || !is_sound(&table) {
        return corrupt(one, "neither of the two region tables is sound");
    }
    let count = le32(&table, 8);
    if count > ENTRIES_MAX {
        return corrupt(one + 8, "the region table has more entries than there is room for");
    }
    let (mut bat, mut metadata) = (None, None);
    for number in 0..in_memory(count.into()) {
        let entry = table.get(16 + number * 32..).and_then(|rest| RawRegion::read_from_prefix(rest).ok());
        let Some((region, _)) = entry else { return corrupt(one, "the region table is cut off") };
        check_region(source, &region, one)?;
        match region.guid {
            BAT => bat = Some(region),
            METADATA => metadata = Some(region),
            _ if region.required.get() & 1 != 0 => return unsupported("the image has a region that is not known"),
            _ => {}
        }
    }
    match (bat, metadata) {
        (Some(bat), Some(metadata)) => Ok(Regions { bat, metadata }),
        _ => corrupt(one, "the image has no block allocation table or no metadata"),
    }
}

/// 2.2.3.2: regions are whole MiB behind the first.
fn check_region(source: &dyn Source, region: &RawRegion, table: u64) -> Result<(), ImageError> {
    let (at, len) = (region.at.get(), u64::from(region.len.get()));
    let Some(end) = at.checked_add(len).filter(|_| at >= MIB && at % MIB == 0 && len > 0 && len % MIB == 0) else {
        return corrupt(table, "a region is not where it can be");
    };
    let has = source.len();
    if end > has {
        return corrupt(at, format!("a region is at bytes {at} to {end}, but the file has {has}: it was cut off"));
    }
    Ok(())
}

/// 2.6: the metadata items.
struct Items {
    items: Vec<RawItem>,
    region: RawRegion,
}

impl Items {
    fn read(source: &mut dyn Source, region: RawRegion) -> Result<Items, ImageError> {
        let at = region.at.get();
        let table = read(source, at, METADATA_TABLE_LEN, "metadata table")?;
        let count = le32(&table, 8) >> 16;
        if !table.starts_with(b"metadata") || count > ENTRIES_MAX {
            return corrupt(at, "the metadata table is damaged");
        }
        let entries = table.get(32..).unwrap_or_default().chunks_exact(32).take(in_memory(count.into()));
        let items: Vec<RawItem> = entries.filter_map(|entry| RawItem::read_from_bytes(entry).ok()).collect();
        let known = [FILE_PARAMETERS, DISK_SIZE, DISK_ID, LOGICAL_SECTOR, PHYSICAL_SECTOR, PARENT_LOCATOR];
        if items.iter().any(|item| item.flags.get() & ITEM_REQUIRED != 0 && !known.contains(&item.guid)) {
            return unsupported("the image has metadata that is not known and must be");
        }
        Ok(Items { items, region })
    }

    /// Where an item is in the file, for messages.
    fn at(&self, guid: [u8; 16]) -> u64 {
        let item = self.items.iter().find(|item| item.guid == guid);
        self.region.at.get() + item.map_or(0, |item| item.at.get().into())
    }

    /// The number in an item of `len` bytes.
    fn number(&self, source: &mut dyn Source, guid: [u8; 16], len: usize, what: &str) -> Result<u64, ImageError> {
        let Some(item) = self.items.iter().find(|item| item.guid == guid) else {
            return corrupt(self.region.at.get(), format!("the metadata lacks the {what}"));
        };
        let (from, region) = (u64::from(item.at.get()), u64::from(self.region.len.get()));
        let inside = from >= on_disk(METADATA_TABLE_LEN) && from + on_disk(len) <= region;
        if !inside || in_memory(item.len.get().into()) < len {
            return corrupt(self.region.at.get(), format!("the {what} is not where it can be"));
        }
        let mut bytes = read(source, self.region.at.get() + from, len, what)?;
        bytes.resize(8, 0);
        Ok(le64(&bytes, 0))
    }

    /// The size of a block, and the flags.
    fn file_parameters(&self, source: &mut dyn Source) -> Result<(u64, u32), ImageError> {
        let both = self.number(source, FILE_PARAMETERS, 8, "size of a block")?;
        let [a, b, c, d, e, f, g, h] = both.to_le_bytes();
        let (block, flags) = (u64::from(u32::from_le_bytes([a, b, c, d])), u32::from_le_bytes([e, f, g, h]));
        if !block.is_power_of_two() || !(MIB..=256 * MIB).contains(&block) {
            return corrupt(
                self.at(FILE_PARAMETERS),
                "the size of a block is not a power of two from 1 MiB to 256 MiB",
            );
        }
        if flags & HAS_PARENT != 0 {
            return unsupported(
                "the image is a differencing one, on top of a parent: merge them first in its own hypervisor \
                 (Merge-VHD), and convert the result",
            );
        }
        Ok((block, flags))
    }
}

/// Whether the CRC-32C behind the signature is right, which is made with itself as zero.
fn is_sound(bytes: &[u8]) -> bool {
    let zeroed = bytes.iter().enumerate().map(|(at, &byte)| if (4..8).contains(&at) { 0 } else { byte });
    crc32c(zeroed) == le32(bytes, 4)
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    let four = at.checked_add(4).and_then(|end| bytes.get(at..end)).and_then(|four| four.try_into().ok());
    four.map_or(0, u32::from_le_bytes)
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    let eight = at.checked_add(8).and_then(|end| bytes.get(at..end)).and_then(|eight| eight.try_into().ok());
    eight.map_or(0, u64::from_le_bytes)
}
