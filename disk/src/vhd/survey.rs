//! Reads all metadata of a VHD file and says what is wrong with it. Opening and checking both begin here.
//!
//! Everything read is hostile: sizes are bounded before memory is taken, arithmetic is checked, and a path found
//! inside is only ever shown.

mod batmap;

use std::collections::BTreeSet;
use std::ops::Range;

use zerocopy::{FromBytes, IntoBytes};

use super::layout::{
    FEATURES, FOOTER_COOKIE, FileSector, HEADER_COOKIE, RawFooter, RawHeader, RawLocator, SECTOR, UNUSED, VERSION,
};
use crate::format::Tail;
use crate::size::{in_32_bits, on_disk};
use crate::{FileOffset, ImageError, ImageErrorKind, MetaWrite, Problem, ReadFault, Severity, Source};

pub use crate::size::in_memory as index;
pub use batmap::{Batmap, batmap_writes};

/// The largest virtual size: what the Xen tools allow, a little below the 2 TiB that 32-bit sectors reach.
pub const LEN_MAX: u64 = 2040 << 30;
/// Block sizes found in the wild.
pub const BLOCK_MIN: u64 = 512 << 10;
/// See [`BLOCK_MIN`].
pub const BLOCK_MAX: u64 = 16 << 20;
/// Where in a header the locators are.
const LOCATORS_AT: u64 = 576;
/// A locator holds a path: four times the longest that Linux allows.
const LOCATOR_MAX: u32 = 16 << 10;

/// The type of a VHD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskType {
    /// All bytes are there from the beginning.
    Fixed,
    /// Blocks are allocated when first written; without a parent.
    Dynamic,
    /// Sectors that were never written are a parent's.
    Differencing,
}

impl DiskType {
    /// As the footer has it.
    pub fn number(self) -> u32 {
        match self {
            DiskType::Fixed => 2,
            DiskType::Dynamic => 3,
            DiskType::Differencing => 4,
        }
    }
}

/// A path to a parent, as one platform writes it. Shown, never followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locator {
    /// `MacX` (file URL), `W2ru` (relative Windows path), `W2ku` (absolute Windows path), or another.
    pub code: String,
    /// The path.
    pub path: String,
}

/// The metadata of a dynamic or differencing image.
#[derive(Clone, Debug)]
pub struct Tables {
    /// The header.
    pub header: RawHeader,
    /// First sector of each block's bitmap, or [`UNUSED`].
    pub bat: Vec<FileSector>,
    /// The batmap, where there is one.
    pub batmap: Option<Batmap>,
    /// The parent locators that hold something.
    pub locators: Vec<Locator>,
    /// Entries that the table has room for: those of blocks that the disk does not have are all unused.
    pub room: u32,
    /// Where metadata stands, the copy of the footer included, ascending.
    pub extents: Vec<Range<FileOffset>>,
    /// Sectors of all used blocks, ascending.
    pub used: Vec<FileSector>,
}

impl Tables {
    /// Bytes of a block and its bitmap.
    pub fn slot_len(&self) -> u64 {
        let block_size = u64::from(self.header.block_size.get());
        bitmap_len(block_size) + block_size
    }

    /// All that is in use of the file, ascending, and whether it is a block.
    pub fn occupied(&self) -> impl Iterator<Item = (Range<FileOffset>, bool)> + '_ {
        let len = self.slot_len();
        let starts = self.used.iter().map(|sector| sector.start());
        let mut blocks = starts.map(move |at| at..at.saturating_add(len)).peekable();
        let mut metadata = self.extents.iter().filter(|extent| !extent.is_empty()).cloned().peekable();
        std::iter::from_fn(move || match (blocks.peek(), metadata.peek()) {
            (Some(block), Some(other)) if block.start < other.start => blocks.next().map(|range| (range, true)),
            (_, Some(_)) => metadata.next().map(|range| (range, false)),
            _ => blocks.next().map(|range| (range, true)),
        })
    }
}

/// All metadata of a file, and what is wrong with it.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The footer in force.
    pub footer: RawFooter,
    /// Where the footer at the end stands, or would, and whether it is another.
    pub end: (FileOffset, bool),
    /// Whether the copy at the start is another.
    pub copy_stale: bool,
    /// The type, from the footer.
    pub disk_type: DiskType,
    /// For dynamic and differencing images.
    pub tables: Option<Tables>,
    /// Table entries of blocks that lie over something else, or reach behind the end of the file: the only kinds of
    /// damage with which the rest stays readable.
    pub damaged: BTreeSet<FileSector>,
    /// The problems found; with all of them the rest can be read.
    pub problems: Vec<Problem>,
    /// Writes that restore redundant metadata.
    pub repairs: Vec<MetaWrite>,
    /// Length of the file.
    pub file_len: u64,
}

/// Bytes of the bitmap of a block.
pub fn bitmap_len(block_size: u64) -> u64 {
    (block_size / SECTOR).div_ceil(8).next_multiple_of(SECTOR)
}

fn corrupt(at: FileOffset, what: impl Into<String>) -> ImageError {
    ImageError::at(ImageErrorKind::Corrupt, at, what)
}

fn read(source: &mut dyn Source, at: FileOffset, len: usize, what: &str) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; len];
    match source.read_at(at, &mut bytes) {
        Ok(()) => Ok(bytes),
        Err(ReadFault::PastEnd(_)) => Err(corrupt(at, format!("the file ends inside the {what}"))),
        Err(fault) => Err(ImageError::at(ImageErrorKind::Storage, at, format!("cannot read the {what}: {fault}"))),
    }
}

impl Survey {
    /// Reads everything of a file. An error is what makes the image unreadable as a whole.
    pub fn of(source: &mut dyn Source) -> Result<Survey, ImageError> {
        Survey::on(source, Tail::Zeroes)
    }

    /// The same of a file or a device. A device has its footer at its end, wherever the blocks end.
    pub fn on(source: &mut dyn Source, tail: Tail) -> Result<Survey, ImageError> {
        let file_len = source.len();
        let mut problems = Vec::new();
        let mut repairs = Vec::new();
        let Footers { footer, end, copy_stale } = find_footer(source, tail, &mut problems, &mut repairs)?;
        check_footer(&footer)?;
        let disk_type = match footer.disk_type.get() {
            2 => DiskType::Fixed,
            3 => DiskType::Dynamic,
            4 => DiskType::Differencing,
            other => {
                return Err(corrupt(
                    FileOffset(60),
                    format!("disk type {other} is not one of fixed (2), dynamic (3) and differencing (4)"),
                ));
            }
        };
        let (tables, damaged) = (None, BTreeSet::new());
        let mut survey = Survey { footer, end, copy_stale, disk_type, tables, damaged, problems, repairs, file_len };
        if disk_type == DiskType::Fixed {
            survey.check_fixed()?;
        } else {
            let tables = survey.read_tables(source)?;
            survey.check_blocks(&tables, tail);
            let used = tables.occupied().map(|(range, _)| range.end).max().unwrap_or_default();
            if tail == Tail::Stale && used > survey.end.0 {
                // A block lies where the footer would: the copy is all that there is.
                survey.repairs.retain(|write| write.at.0 == 0);
            }
            survey.tables = Some(tables);
        }
        Ok(survey)
    }

    /// The worst problem, if it makes the image unfit for use.
    pub fn damage(&self) -> Option<&Problem> {
        self.problems.iter().find(|problem| problem.severity == Severity::Damage)
    }

    fn check_fixed(&self) -> Result<(), ImageError> {
        let len = self.footer.current_size.get();
        if len.checked_add(SECTOR - 1).is_none_or(|needed| needed > self.file_len) {
            let file_len = self.file_len;
            return Err(corrupt(
                FileOffset(48),
                format!("a fixed disk of {len} bytes does not fit in a file of {file_len} bytes (truncated?)"),
            ));
        }
        Ok(())
    }

    fn read_tables(&mut self, source: &mut dyn Source) -> Result<Tables, ImageError> {
        let at = FileOffset(self.footer.data_offset.get());
        let header = read_header(source, at)?;
        let blocks = self.footer.current_size.get().div_ceil(u64::from(header.block_size.get()));
        let table_at = FileOffset(header.table_offset.get());
        let entries = header.max_table_entries.get();
        if u64::from(entries) < blocks {
            return Err(corrupt(
                at.saturating_add(28),
                format!("the table has {entries} entries, but the disk {blocks} blocks"),
            ));
        }
        let table_len = (u64::from(entries) * 4).next_multiple_of(SECTOR);
        let table_end = table_at.saturating_add(table_len);
        let over_header = table_at < at.saturating_add(1024) && table_end > at;
        if table_at % SECTOR != 0 || table_at.0 < SECTOR || over_header {
            let what = format!("the block allocation table cannot stand at byte {table_at}");
            return Err(corrupt(at.saturating_add(16), what));
        }
        if table_end.0 > self.file_len {
            return Err(corrupt(table_at, "the file ends inside the block allocation table (truncated?)"));
        }
        // What the largest disk would need is all that is read: a sparse file may claim a table of 16 GiB.
        let readable = u64::from(entries).min(LEN_MAX / u64::from(header.block_size.get()));
        let bytes = read(source, table_at, index(readable * 4), "block allocation table")?;
        let entry = |raw: &[u8]| raw.try_into().map_or(UNUSED, |raw| FileSector(u32::from_be_bytes(raw)));
        let mut bat: Vec<FileSector> = bytes.chunks_exact(4).map(entry).collect();
        let spare = bat.split_off(index(blocks));
        let room = if spare.iter().all(|&entry| entry == UNUSED) { readable } else { blocks };
        let room = in_32_bits(room, "LEN_MAX");
        let batmap = self.read_batmap(source, table_end, blocks)?;
        let (locators, mut extents) = read_locators(source, &header)?;
        if header.is_misspelt() {
            let what = "a parent locator has the code MACX; the format says MacX, and libvhd refuses all others";
            self.note(Severity::Repairable, at.saturating_add(LOCATORS_AT), what.into());
        }
        extents.extend([FileOffset(0)..FileOffset(SECTOR), at..at.saturating_add(1024), table_at..table_end]);
        if let Some(map) = &batmap {
            let map_at = FileOffset(map.header.offset.get());
            let len = on_disk(map.bits.len());
            let map = [map.header_at..map.header_at.saturating_add(SECTOR), map_at..map_at.saturating_add(len)];
            if map.iter().any(|part| part.start < at.saturating_add(1024) && part.end > at) {
                return Err(corrupt(table_end, "the batmap lies over the header"));
            }
            extents.extend(map);
        }
        extents.sort_unstable_by_key(|extent| (extent.start, extent.end));
        let mut used: Vec<FileSector> = bat.iter().copied().filter(|&sector| sector != UNUSED).collect();
        used.sort_unstable();
        Ok(Tables { header, bat, batmap, locators, room, extents, used })
    }

    fn check_blocks(&mut self, tables: &Tables, tail: Tail) {
        let table_at = FileOffset(tables.header.table_offset.get());
        let (mut floor, mut last_block) = (FileOffset(0), FileOffset(0)..FileOffset(0));
        for (range, is_block) in tables.occupied() {
            // Pieces of metadata may lie over each other, as locators of other programs do; a block over nothing.
            if range.start < if is_block { floor } else { last_block.end } {
                let what = format!("a block at byte {} lies over metadata or over another block", range.start);
                self.note(Severity::Damage, table_at, what);
                // All blocks are of one length: what lies over any in front of this lies over the last.
                if range.start < last_block.end {
                    self.damaged.insert(sector_of(last_block.start));
                }
                if is_block {
                    self.damaged.insert(sector_of(range.start));
                }
            } else if is_block && range.end.0 > self.file_len {
                let what = format!("a block at byte {} reaches behind the end of the file (truncated?)", range.start);
                self.note(Severity::Damage, table_at, what);
                self.damaged.insert(sector_of(range.start));
            }
            floor = range.end.max(floor);
            if is_block {
                last_block = range;
            }
        }
        let len = tables.slot_len();
        let unused = self.file_len.saturating_sub(floor.0);
        // A device is as large as it is; what is behind the last block is room for more of them.
        if unused >= len && tail == Tail::Zeroes {
            self.note(Severity::Leak, floor, format!("{unused} bytes behind the last block are not in use"));
        }
    }

    fn note(&mut self, severity: Severity, at: FileOffset, what: String) {
        // A table full of rubbish has one message, not half a million.
        if self.problems.len() < 100 {
            self.problems.push(Problem { severity, at, what });
        }
    }
}

/// The table entry of a block whose bitmap is at this byte.
fn sector_of(at: FileOffset) -> FileSector {
    let Ok(sector) = u32::try_from(at / SECTOR) else { unreachable!("a block's place was read from a table entry") };
    FileSector(sector)
}

#[allow(clippy::large_enum_variant, reason = "two of them live for the length of one function")]
enum Found {
    Sound(RawFooter),
    WrongSum,
    None,
}

fn footer_at(source: &mut dyn Source, at: FileOffset, len: usize) -> Result<Found, ImageError> {
    let mut bytes = read(source, at, len, "footer")?;
    // Images of Virtual PC before 2004 have 511 bytes: the last reserved byte, a zero, is missing.
    bytes.resize(512, 0);
    match RawFooter::read_from_bytes(&bytes) {
        Ok(footer) if footer.cookie != FOOTER_COOKIE => Ok(Found::None),
        Ok(footer) if footer.sum() == footer.checksum.get() => Ok(Found::Sound(footer)),
        Ok(_) => Ok(Found::WrongSum),
        Err(_) => Ok(Found::None),
    }
}

/// The footer in force and where else it belongs.
struct Footers {
    footer: RawFooter,
    end: (FileOffset, bool),
    copy_stale: bool,
}

/// The copy of the footer at the start of the file counts. The one at the end is as good, while it is there: it is lost
/// when the file grows behind it, so whatever is found there after a crash must not have been trusted in between. Only
/// a fixed image has no copy.
fn find_footer(
    source: &mut dyn Source,
    storage: Tail,
    problems: &mut Vec<Problem>,
    repairs: &mut Vec<MetaWrite>,
) -> Result<Footers, ImageError> {
    let len = source.len();
    if len < 512 {
        return Err(ImageError::new(
            ImageErrorKind::WrongFormat,
            format!("a file of {len} bytes is too small for a VHD"),
        ));
    }
    let copy = footer_at(source, FileOffset(0), 512)?;
    let mut tail_at = FileOffset(len.saturating_sub(512));
    let mut tail = footer_at(source, tail_at, 512)?;
    if matches!(tail, Found::None) {
        let short_at = FileOffset(len.saturating_sub(511));
        let short = footer_at(source, short_at, 511)?;
        if !matches!(short, Found::None) {
            (tail, tail_at) = (short, short_at);
        }
    }
    let mut note = |severity, at, what: &str| problems.push(Problem { severity, at, what: what.into() });
    let repair = |at, footer: &RawFooter| MetaWrite { at, bytes: footer.as_bytes().to_vec() };
    match (tail, copy) {
        (Found::Sound(tail), Found::Sound(copy)) if !tail.is_fixed() && !copy.is_fixed() && tail.uuid == copy.uuid => {
            let stale = tail.unstamped().as_bytes() != copy.unstamped().as_bytes();
            if stale {
                note(Severity::Unclosed, tail_at, "the footer at the end of the file is older than its copy");
                repairs.push(repair(tail_at, &copy));
            }
            Ok(Footers { footer: copy, end: (tail_at, stale), copy_stale: false })
        }
        (Found::Sound(footer), _) if !footer.is_fixed() => {
            note(
                Severity::Repairable,
                FileOffset(0),
                "the copy of the footer at the start of the file is missing or differs",
            );
            repairs.push(repair(FileOffset(0), &footer));
            Ok(Footers { footer, end: (tail_at, false), copy_stale: true })
        }
        (Found::Sound(footer), _) => Ok(Footers { footer, end: (tail_at, false), copy_stale: false }),
        (_, Found::Sound(copy)) if !copy.is_fixed() => {
            note(Severity::Unclosed, tail_at, "there is no footer at the end of the file, only its copy at the start");
            let at = match storage {
                Tail::Zeroes => FileOffset(len).align_up(SECTOR),
                Tail::Stale => FileOffset(len.saturating_sub(SECTOR)).align_down(SECTOR),
            };
            repairs.push(repair(at, &copy));
            Ok(Footers { footer: copy, end: (at, true), copy_stale: false })
        }
        (Found::None, Found::None | Found::Sound(_)) => {
            Err(ImageError::new(ImageErrorKind::WrongFormat, "there is no VHD footer at either end of the file"))
        }
        _ => Err(corrupt(tail_at, "no footer of the file matches its checksum")),
    }
}

fn check_footer(footer: &RawFooter) -> Result<(), ImageError> {
    let unsupported = |byte, what: String| Err(ImageError::at(ImageErrorKind::Unsupported, FileOffset(byte), what));
    if footer.version.get() != VERSION {
        return unsupported(12, format!("version {:#010x} of the format is unknown", footer.version.get()));
    }
    if footer.features.get() & FEATURES == 0 {
        return Err(corrupt(FileOffset(8), "the features of the footer lack the bit that is always set"));
    }
    if footer.creator_app.starts_with(b"tap") && footer.creator_version.get() <= 0x0000_0001 {
        return unsupported(32, "sector bitmaps of creator version 0.1 (little-endian) are not supported".into());
    }
    let len = footer.current_size.get();
    if len > LEN_MAX {
        return unsupported(48, format!("a virtual size of {len} bytes is beyond the 2040 GiB that a VHD can hold"));
    }
    if len % SECTOR != 0 || len == 0 {
        return Err(corrupt(FileOffset(48), format!("a virtual size of {len} bytes is not a number of sectors")));
    }
    Ok(())
}

fn read_header(source: &mut dyn Source, at: FileOffset) -> Result<RawHeader, ImageError> {
    if at.0 < 512 || at % SECTOR != 0 {
        return Err(corrupt(FileOffset(16), format!("the header cannot stand at byte {at}")));
    }
    let bytes = read(source, at, 1024, "header")?;
    let header = RawHeader::read_from_bytes(&bytes).map_err(|_| corrupt(at, "the file ends inside the header"))?;
    if header.cookie != HEADER_COOKIE {
        return Err(corrupt(at, "there is no header where the footer says it is"));
    }
    if header.sum() != header.checksum.get() {
        return Err(corrupt(at, "the header does not match its checksum"));
    }
    if header.version.get() != VERSION {
        let what = format!("version {:#010x} of the header is unknown", header.version.get());
        return Err(ImageError::at(ImageErrorKind::Unsupported, at.saturating_add(24), what));
    }
    let block_size = u64::from(header.block_size.get());
    if !block_size.is_power_of_two() || !(BLOCK_MIN..=BLOCK_MAX).contains(&block_size) {
        let what = format!("a block size of {block_size} bytes is not a power of two from 512 KiB to 16 MiB");
        return Err(ImageError::at(ImageErrorKind::Unsupported, at.saturating_add(32), what));
    }
    Ok(header)
}

/// The locators that hold something, and where they stand.
fn read_locators(
    source: &mut dyn Source,
    header: &RawHeader,
) -> Result<(Vec<Locator>, Vec<Range<FileOffset>>), ImageError> {
    let mut found = Vec::new();
    let mut extents = Vec::new();
    for locator in header.locators.iter().filter(|locator| holds_path(locator)) {
        let at = FileOffset(locator.data_offset.get());
        let space = locator_space(locator);
        let len = locator.data_len.get();
        if len > LOCATOR_MAX || u64::from(len) > space {
            return Err(corrupt(at, format!("a parent locator of {len} bytes does not fit in its space of {space}")));
        }
        let bytes = read(source, at, index(u64::from(len)), "parent locator")?;
        found.push(decode_locator(&locator.code, &bytes));
        extents.extend(locator_extent(locator));
    }
    Ok((found, extents))
}

fn holds_path(locator: &RawLocator) -> bool {
    locator.code != [0; 4] && locator.data_len.get() > 0
}

/// Bytes that a locator's path may take. The specification counts sectors; many programs write bytes.
fn locator_space(locator: &RawLocator) -> u64 {
    let space = u64::from(locator.data_space.get());
    if space < 512 { space * SECTOR } else { space }
}

/// Where a locator's path stands, if it holds one.
pub fn locator_extent(locator: &RawLocator) -> Option<Range<FileOffset>> {
    let at = FileOffset(locator.data_offset.get());
    let end = at.saturating_add(locator_space(locator)).checked_align_up(SECTOR).unwrap_or(FileOffset(u64::MAX));
    holds_path(locator).then_some(at..end)
}

/// A path as it is shown.
pub fn decode_locator(code: &[u8; 4], bytes: &[u8]) -> Locator {
    let utf16 = |from: fn([u8; 2]) -> u16| {
        let units = bytes.chunks_exact(2).filter_map(|unit| unit.try_into().ok().map(from));
        String::from_utf16_lossy(&units.collect::<Vec<_>>())
    };
    let path = match code {
        b"W2ru" | b"W2ku" => utf16(u16::from_le_bytes),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    };
    Locator { code: String::from_utf8_lossy(code).into_owned(), path: path.trim_end_matches('\0').into() }
}
