//! VMDK, of which the kinds are read that are one file: `monolithicSparse` and `streamOptimized`.
//!
//! Sections are those of VMware's "Virtual Disk Format 5.0". A disk is cut into grains, of which a grain table says
//! where they are; the grain directory says where the tables are, and is in memory. Numbers are little-endian, places
//! are sectors.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_PARSE_ZLIB_HEADER, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{self as inflate, DecompressorOxide};
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::pages::Pages;
use super::{SECTOR, check_len, corrupt, read, stored, unsupported};
use crate::format::{Corrupt, Mapping, MetaBlock, Wait};
use crate::size::{in_memory, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind, Source, Span};

/// Storage of 4 KiB sectors is read in such pieces.
const PAGE: u64 = 4096;
/// "Hosted Sparse Extents": the first bytes of the header.
pub const MAGIC: [u8; 4] = *b"KDMV";
/// The entries of a grain table: the format knows no other number.
const TABLE_ENTRIES: u64 = 512;
/// Grains have 64 KiB. 1 MiB is more than any program writes, and what a compressed one may take of memory.
const GRAIN_MAX: u64 = 1 << 20;
/// Bytes of a grain directory: 2 TiB in the smallest grains, 64 TiB in the usual ones.
const DIRECTORY_MAX: u64 = 8 << 20;
/// Bytes at the end of a file in which its footer is looked for.
const PADDING_MAX: u64 = 1 << 20;
/// Bytes of a descriptor: programs leave 10 KiB for it.
const DESCRIPTOR_MAX: u64 = 1 << 20;
/// The place of a grain directory that only the footer at the end of the file knows.
const AT_END: u64 = u64::MAX;

/// Entries of grain tables may say that a grain is zero.
const FLAG_ZERO_GRAINS: u32 = 1 << 2;
/// Grains are compressed.
const FLAG_COMPRESSED: u32 = 1 << 16;
/// Grains and tables have markers in front of them.
const FLAG_MARKERS: u32 = 1 << 17;
/// The table entry of a grain that reads as zero.
const ZERO_GRAIN: u32 = 1;
const DEFLATE: u16 = 1;

/// "SparseExtentHeader".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
struct RawHeader {
    magic: [u8; 4],
    version: U32,
    flags: U32,
    capacity: U64,
    grain: U64,
    descriptor_at: U64,
    descriptor_len: U64,
    table_entries: U32,
    redundant_directory_at: U64,
    directory_at: U64,
    overhead: U64,
    unclean: u8,
    line_ends: [u8; 4],
    compression: U16,
    padding: [u8; 433],
}

const _: () = assert!(size_of::<RawHeader>() == 512);

/// In front of a compressed grain: "Grain Marker".
const MARKER: usize = 12;

/// The type of the image, from its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `monolithicSparse`.
    MonolithicSparse,
    /// `streamOptimized`.
    StreamOptimized,
}

impl Kind {
    /// The word of the descriptor.
    pub fn word(self) -> &'static str {
        match self {
            Kind::MonolithicSparse => "monolithicSparse",
            Kind::StreamOptimized => "streamOptimized",
        }
    }
}

/// A VMDK image, open for reading.
#[derive(Debug)]
pub struct Vmdk {
    kind: Kind,
    len: u64,
    /// Bytes of a grain.
    grain: u64,
    compressed: bool,
    zero_grains: bool,
    directory: Vec<u32>,
    file_len: u64,
    tables: Pages,
}

impl Vmdk {
    /// Reads the metadata of a file.
    pub fn open(source: &mut dyn Source) -> Result<Vmdk, ImageError> {
        let header = header(source)?;
        let len = check_len(12, header.capacity.get().checked_mul(SECTOR))?;
        let Some(grain) = header.grain.get().checked_mul(SECTOR).filter(|grain| (PAGE..=GRAIN_MAX).contains(grain))
        else {
            return corrupt(20, "the size of a grain is not from 4 KiB to 1 MiB");
        };
        if !grain.is_power_of_two() {
            return corrupt(20, "the size of a grain is not a power of two");
        }
        if u64::from(header.table_entries.get()) != TABLE_ENTRIES {
            return corrupt(44, "a grain table has not 512 entries");
        }
        let flags = header.flags.get();
        let compressed = flags & FLAG_COMPRESSED != 0;
        if compressed && (header.compression.get() != DEFLATE || flags & FLAG_MARKERS == 0) {
            return unsupported("the image is compressed in a way that is not known");
        }
        let kind = descriptor(source, &header)?;
        let entries = len.div_ceil(grain * TABLE_ENTRIES);
        if entries * 4 > DIRECTORY_MAX {
            return corrupt(12, "the disk has too many grains for its size");
        }
        let Some(directory_at) = header.directory_at.get().checked_mul(SECTOR) else {
            return corrupt(56, "the grain directory is behind the end of the file");
        };
        let directory = read(source, directory_at, in_memory(entries * 4), "grain directory")?;
        let directory = directory.chunks_exact(4).map(|entry| le32(entry, 0)).collect();
        Ok(Vmdk {
            kind,
            len,
            grain,
            compressed,
            zero_grains: flags & FLAG_ZERO_GRAINS != 0,
            directory,
            file_len: source.len(),
            tables: Pages::default(),
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

    /// The type of the image, from its descriptor.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Bytes of a grain.
    pub fn grain(&self) -> u64 {
        self.grain
    }

    /// Where the first bytes of `span` live.
    pub fn map(&mut self, span: Span) -> Result<Mapping, Wait> {
        let (number, from) = (span.at.0 / self.grain, span.at.0 % self.grain);
        let (table, entry) = (number / TABLE_ENTRIES, number % TABLE_ENTRIES);
        // All of the span whose grains have their entries in this table.
        let len = span.len.min((TABLE_ENTRIES - entry) * self.grain - from);
        let sector = self.directory.get(in_memory(table)).copied().unwrap_or_default();
        let at = u64::from(sector) * SECTOR;
        if sector == 0 {
            return Ok(Mapping::Parent { len });
        }
        if at.saturating_add(TABLE_ENTRIES * 4) > self.file_len {
            return Ok(Mapping::Missing { at: FileOffset(at), has: self.file_len, len });
        }
        let grains = self.tables.get(MetaBlock { at: FileOffset(at), len: 2048 })?;
        let entry_of = |number: u64| le32(grains, in_memory(number * 4));
        let first = self.grain_at(entry_of(entry));
        let mut count = 1;
        while count * self.grain < from + len && self.goes_on(first, count, self.grain_at(entry_of(entry + count))) {
            count += 1;
        }
        let len = len.min(count * self.grain - from);
        Ok(match first {
            Grain::None => Mapping::Parent { len },
            Grain::Zero => Mapping::Zero { len },
            Grain::At(at) if self.compressed => {
                let next = if entry + 1 < TABLE_ENTRIES { u64::from(entry_of(entry + 1)) * SECTOR } else { 0 };
                self.compressed(at, next, from, len)
            }
            Grain::At(grain) => stored(grain + from, len, self.file_len),
        })
    }

    /// Decodes a table entry.
    fn grain_at(&self, entry: u32) -> Grain {
        let at = u64::from(entry) * SECTOR;
        match entry {
            0 => Grain::None,
            ZERO_GRAIN if self.zero_grains => Grain::Zero,
            _ => Grain::At(at),
        }
    }

    /// Whether the grain `count` behind `first` is found in one piece with it.
    fn goes_on(&self, first: Grain, count: u64, next: Grain) -> bool {
        match (first, next) {
            (Grain::None, Grain::None) | (Grain::Zero, Grain::Zero) => true,
            (Grain::At(at), Grain::At(next)) => !self.compressed && next == at + count * self.grain,
            _ => false,
        }
    }

    /// A compressed grain: how long it is stands in front of it, so more is read. `next`: where another grain begins.
    fn compressed(&self, at: u64, next: u64, skip: u64, len: u64) -> Mapping {
        let len = len.min(self.grain - skip);
        if at + on_disk(MARKER) >= self.file_len {
            return Mapping::Missing { at: FileOffset(at), has: self.file_len, len };
        }
        // Deflate makes nothing larger by more than a few bytes in each 16 KiB.
        let most = at + on_disk(MARKER) + self.grain + self.grain / 256 + 64;
        let end = if next > at { most.min(next) } else { most };
        let end = end.min(self.file_len).next_multiple_of(PAGE);
        let begin = FileOffset(at).align_down(PAGE);
        Mapping::Compressed { at: begin, size: end - begin.0, lead: at - begin.0, skip, len }
    }

    /// The grain that `bytes` begin with.
    pub fn decompress(&self, bytes: &[u8]) -> Result<Vec<u8>, Corrupt> {
        let garbled = Corrupt { at: FileOffset(0) };
        let size = in_memory(le32(bytes.get(..MARKER).ok_or(garbled)?, 8).into());
        let stream = bytes.get(MARKER..).and_then(|rest| rest.get(..size)).ok_or(garbled)?;
        let mut grain = vec![0; in_memory(self.grain)];
        let mut state = Box::<DecompressorOxide>::default();
        let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_PARSE_ZLIB_HEADER;
        let (status, _, written) = inflate::decompress(&mut state, stream, &mut grain, 0, flags);
        if status != TINFLStatus::Done {
            return Err(garbled);
        }
        // The last grain of a disk may end with the disk.
        grain.truncate(written);
        Ok(grain)
    }

    /// A table that was waited for.
    pub fn load(&mut self, block: MetaBlock, bytes: &[u8]) {
        self.tables.load(block, bytes);
    }

    /// Forgets tables.
    pub fn drop_caches(&mut self) {
        self.tables.clear();
    }
}

/// The state of a grain, from its table entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grain {
    /// It has no place.
    None,
    /// It is zero.
    Zero,
    /// In the file.
    At(u64),
}

/// The header: that at the end of the file, where the first one says so.
fn header(source: &mut dyn Source) -> Result<RawHeader, ImageError> {
    let wrong = |what: &str| Err(ImageError::at(ImageErrorKind::WrongFormat, FileOffset(0), what));
    let there = in_memory(source.len().min(SECTOR));
    let first = read(source, 0, there, "header")?;
    if !first.starts_with(&MAGIC) {
        return wrong("the file does not begin like a VMDK");
    }
    let Ok(header) = RawHeader::read_from_bytes(&first) else { return wrong("the file is too short for a VMDK") };
    check_version(&header)?;
    if header.directory_at.get() != AT_END {
        return Ok(header);
    }
    let (at, last) = footer(source)?;
    match RawHeader::read_from_bytes(&last) {
        Ok(footer) if footer.magic == MAGIC && footer.directory_at.get() != AT_END => {
            check_version(&footer)?;
            // The descriptor is at the beginning; some footers do not name it.
            Ok(RawHeader { descriptor_at: header.descriptor_at, descriptor_len: header.descriptor_len, ..footer })
        }
        _ => corrupt(at, "the footer is missing: the file was not copied whole"),
    }
}

/// "Stream-Optimized Compressed Sparse Extents": footer marker, footer, end-of-stream marker, which is zero. What some
/// programs pad a file with is zero as well: the footer is the last sector that is not.
fn footer(source: &mut dyn Source) -> Result<(u64, Vec<u8>), ImageError> {
    let end = source.len() / SECTOR * SECTOR;
    let first = end.saturating_sub(PADDING_MAX);
    let bytes = read(source, first, in_memory(end - first), "footer")?;
    let sectors = bytes.chunks_exact(in_memory(SECTOR));
    match sectors.enumerate().rfind(|(_, sector)| sector.iter().any(|&byte| byte != 0)) {
        Some((number, last)) => Ok((first + on_disk(number) * SECTOR, last.to_vec())),
        None => corrupt(first, "the footer is missing: the file ends in zeroes"),
    }
}

fn check_version(header: &RawHeader) -> Result<(), ImageError> {
    match header.version.get() {
        1..=3 => Ok(()),
        other => unsupported(format!("the image is of VMDK version {other}; versions 1 to 3 are known")),
    }
}

/// Reads the type of the image from its descriptor; an error if images of that type cannot be read.
fn descriptor(source: &mut dyn Source, header: &RawHeader) -> Result<Kind, ImageError> {
    let (at, len) = (header.descriptor_at.get(), header.descriptor_len.get());
    if at == 0 || len == 0 {
        return one_of_several();
    }
    let (Some(at), Some(len)) = (at.checked_mul(SECTOR), len.checked_mul(SECTOR).filter(|&len| len <= DESCRIPTOR_MAX))
    else {
        return corrupt(28, "the descriptor is too large");
    };
    let text = read(source, at, in_memory(len), "descriptor")?;
    let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    if text.trim().is_empty() {
        return one_of_several();
    }
    let value = |name: &str| {
        let of = |line: &str| {
            let (key, value) = line.split_once('=')?;
            key.trim().eq_ignore_ascii_case(name).then(|| value.trim().trim_matches('"').to_owned())
        };
        text.lines().find_map(of).unwrap_or_default()
    };
    let (parent, hint) = (value("parentCID"), value("parentFileNameHint"));
    if !parent.is_empty() && !parent.eq_ignore_ascii_case("ffffffff") {
        return unsupported(match hint.is_empty() {
            false => format!(
                "the image is a snapshot on top of '{}': merge them first, in its own hypervisor, or with \
                 `qemu-img convert -f vmdk -O qcow2 FILE NEW` in a directory that has both files",
                hint.escape_debug()
            ),
            true => format!(
                "its parentCID, {}, is that of a snapshot, but it names no other file: if you know that there is none, \
                 `qemu-img convert -f vmdk -O qcow2 FILE NEW` reads it as it is",
                parent.escape_debug()
            ),
        });
    }
    let kinds = [Kind::MonolithicSparse, Kind::StreamOptimized];
    match value("createType").as_str() {
        // Markers stand in front of the grains of a stream only.
        "" if header.flags.get() & FLAG_MARKERS != 0 => Ok(Kind::StreamOptimized),
        "" => Ok(Kind::MonolithicSparse),
        word => kinds.into_iter().find(|kind| kind.word().eq_ignore_ascii_case(word)).map_or_else(
            || {
                unsupported(format!(
                    "the image is of the kind '{}'; those that are read are monolithicSparse and streamOptimized: \
                     `qemu-img convert -f vmdk -O qcow2 FILE NEW` may read it",
                    word.escape_debug()
                ))
            },
            Ok,
        ),
    }
}

/// Only the descriptor, which is in another file, says what the others are.
fn one_of_several<T>() -> Result<T, ImageError> {
    unsupported(
        "the file is one of several of an image: give the descriptor, a text file, to \
         `qemu-img convert -f vmdk -O qcow2 DESCRIPTOR NEW`",
    )
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    let four = at.checked_add(4).and_then(|end| bytes.get(at..end)).and_then(|four| four.try_into().ok());
    four.map_or(0, u32::from_le_bytes)
}
