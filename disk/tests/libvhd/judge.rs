//! What libvhd (blktap's `vhd-util check`) demands of a VHD, read anew from the bytes of the file.
//!
//! Nothing here uses the code under test. Its verdicts on the samples of `libvhd.rs` were held against those of the
//! real program (docs/vhd.md). Not here: the clock (times in the future), and whether a parent's path leads to a file.

use std::io::{Read, Seek, SeekFrom};

const SECTOR: u64 = 512;
const BLOCK_SHIFT: u32 = 21;
const UNUSED: u32 = u32::MAX;

/// Why libvhd refuses an image, in its own words where it has some.
pub type Refused = String;

fn refuse<T>(why: impl Into<String>) -> Result<T, Refused> {
    Err(why.into())
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

fn number32(bytes: &[u8], at: usize) -> u32 {
    u32::try_from(number(bytes, at, 4)).unwrap()
}

/// The one's complement of the sum of all bytes but those of the sum itself.
fn sum(bytes: &[u8], at: usize) -> u32 {
    let own = at..at + 4;
    let others = bytes.iter().enumerate().filter(|(at, _)| !own.contains(at));
    !others.fold(0u32, |sum, (_, &byte)| sum.wrapping_add(byte.into()))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// A file, and where it ends.
struct File<F> {
    file: F,
    len: u64,
}

impl<F: Read + Seek> File<F> {
    fn read(&mut self, at: u64, len: u64) -> Result<Vec<u8>, Refused> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return refuse(format!("{len} bytes at {at} are behind the end of the file"));
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.file.seek(SeekFrom::Start(at)).unwrap();
        self.file.read_exact(&mut bytes).unwrap();
        Ok(bytes)
    }
}

/// Whether libvhd takes the image.
pub fn judge(mut file: impl Read + Seek) -> Result<(), Refused> {
    let len = file.seek(SeekFrom::End(0)).unwrap();
    let mut file = File { file, len };
    let footer = primary_footer(&mut file)?;
    if number32(&footer, 60) == 2 {
        return Ok(());
    }
    let copy = file.read(0, 512)?;
    check_footer(&copy).map_err(|why| format!("backup footer invalid: {why}"))?;
    if copy != footer {
        return refuse("primary and backup footers do not match");
    }
    let header = file.read(number(&footer, 16, 8), 1024)?;
    check_header(&header, file.len).map_err(|why| format!("header is invalid: {why}"))?;
    if number32(&footer, 60) == 4 {
        check_locators(&mut file, &header)?;
    } else if !is_zero(&header[40..60]) || !is_zero(&header[64..768]) {
        return refuse("differencing header is invalid: a parent of an image without");
    }
    let end = end_of_headers(&mut file, &footer, &header)?;
    let table = check_table(&mut file, &footer, &header, end)?;
    if has_batmap(&footer) { check_batmap(&mut file, &footer, &header, &table) } else { Ok(()) }
}

fn primary_footer<F: Read + Seek>(file: &mut File<F>) -> Result<Vec<u8>, Refused> {
    let short = match file.len % SECTOR {
        0 => 0,
        511 => 1,
        _ => return refuse("invalid file size"),
    };
    let at = file.len.checked_sub(SECTOR - short).ok_or("error reading primary footer")?;
    let mut footer = file.read(at, SECTOR - short)?;
    footer.resize(512, 0);
    check_footer(&footer).map_err(|why| format!("primary footer invalid: {why}"))?;
    Ok(footer)
}

fn check_footer(footer: &[u8]) -> Result<(), Refused> {
    if &footer[..8] != b"conectix" {
        return refuse("invalid cookie");
    }
    if number32(footer, 64) != sum(footer, 64) {
        return refuse("invalid checksum");
    }
    if !matches!(number32(footer, 8), 2 | 3) {
        return refuse("invalid features");
    }
    if number32(footer, 12) != 0x0001_0000 {
        return refuse("invalid file format version");
    }
    let disk_type = number32(footer, 60);
    if !matches!(disk_type, 2..=4) {
        return refuse("invalid type");
    }
    if disk_type == 2 && number(footer, 16, 8) != u64::MAX {
        return refuse("invalid data offset");
    }
    if footer[28..].starts_with(b"tap") && number32(footer, 32) > 0x0001_0003 {
        return refuse("unsupported tap creator version");
    }
    if largest_geometry(number(footer, 48, 8)) < number32(footer, 56) {
        return refuse("geometry too large");
    }
    if footer[84] > 1 || footer[85] > 1 || !is_zero(&footer[86..]) {
        return refuse("invalid 'reserved' bits");
    }
    if is_zero(&footer[68..84]) {
        return refuse("invalid (NULL) uuid");
    }
    Ok(())
}

/// Cylinders, heads and sectors of a disk, as one number.
fn largest_geometry(len: u64) -> u32 {
    let total = len.div_ceil(SECTOR).clamp(1, 65535 * 16 * 255);
    let fits = |heads: u64, sectors: u64| total / sectors < heads * 1024;
    let few = (total / 17).div_ceil(1024).max(4);
    let (heads, sectors) = match total {
        _ if total >= 65535 * 16 * 63 => (16, 255),
        _ if few <= 16 && fits(few, 17) => (few, 17),
        _ if fits(16, 31) => (16, 31),
        _ => (16, 63),
    };
    u32::try_from((total / sectors / heads) << 16 | heads << 8 | sectors).unwrap()
}

fn check_header(header: &[u8], file_len: u64) -> Result<(), Refused> {
    if &header[..8] != b"cxsparse" {
        return refuse("invalid cookie");
    }
    if number32(header, 36) != sum(header, 36) {
        return refuse("invalid checksum");
    }
    if number32(header, 24) != 0x0001_0000 || number(header, 8, 8) != u64::MAX {
        return refuse("invalid header version or data offset");
    }
    let (table, entries) = (number(header, 16, 8), number(header, 28, 4));
    if table == 0 || table % SECTOR != 0 || table + entries * 4 > file_len - SECTOR {
        return refuse("invalid table offset");
    }
    match number(header, 32, 4) {
        // Smaller ones pass its check; but then it reads a part of the table only, and coalesces as little.
        size if size != 1 << BLOCK_SHIFT => return refuse(format!("invalid header blocksize {size}")),
        _ if !is_zero(&header[60..64]) || !is_zero(&header[768..]) => return refuse("invalid reserved bits"),
        _ => {}
    }
    let codes = locators(header).map(|locator| number32(locator, 0));
    for code in codes {
        match &code.to_be_bytes() {
            b"\0\0\0\0" | b"Wi2r" | b"Wi2k" | b"W2ru" | b"W2ku" | b"Mac " | b"MacX" => {}
            _ => return refuse(format!("invalid parent locator code {code:#x}")),
        }
    }
    Ok(())
}

fn locators(header: &[u8]) -> impl Iterator<Item = &[u8]> {
    header[576..768].chunks(24)
}

/// Bytes that a locator takes: the field is in sectors by the specification, in bytes by most programs.
fn locator_space(locator: &[u8]) -> u64 {
    let space = number(locator, 4, 4);
    if space < SECTOR { space * SECTOR } else { space.next_multiple_of(SECTOR) }
}

fn check_locators<F: Read + Seek>(file: &mut File<F>, header: &[u8]) -> Result<(), Refused> {
    let units = |bytes: &[u8], decode: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|unit| decode(unit.try_into().unwrap())).collect();
        let end = units.iter().position(|&unit| unit == 0).unwrap_or(units.len());
        String::from_utf16_lossy(&units[..end])
    };
    let name = units(&header[64..576], u16::from_be_bytes);
    if !name.is_ascii() {
        return refuse("invalid parent name");
    }
    let mut seen = Vec::new();
    for locator in locators(header) {
        let code = &locator[..4];
        if is_zero(code) {
            if !is_zero(locator) {
                return refuse("non-zero locator");
            }
            continue;
        }
        let (at, len) = (number(locator, 16, 8), number(locator, 8, 4));
        if at == 0 || len == 0 || number(locator, 4, 4) == 0 || !is_zero(&locator[12..16]) {
            return refuse("invalid parent locator");
        }
        if at + locator_space(locator) > file.len - SECTOR || len > locator_space(locator) {
            return refuse("invalid parent locator: invalid size");
        }
        if seen.contains(&code) {
            return refuse("duplicate platform code in locator");
        }
        seen.push(code);
        let bytes = file.read(at, len)?;
        let path = match code {
            b"MacX" => {
                let url = String::from_utf8(bytes).map_err(|_| "error reading parent locator")?;
                url.strip_prefix("file://").ok_or("error reading parent locator")?.to_owned()
            }
            b"W2ru" | b"W2ku" => units(&bytes, u16::from_le_bytes).replace('\\', "/"),
            _ => continue,
        };
        if !path.is_ascii() {
            return refuse("error reading parent locator");
        }
        if path.rsplit('/').next() != Some(&name) {
            return refuse(format!("parent locator name ({path}) does not match header name ({name})"));
        }
    }
    if seen.is_empty() { refuse(format!("could not find parent {name}")) } else { Ok(()) }
}

fn has_batmap(footer: &[u8]) -> bool {
    footer[28..].starts_with(b"tap") && number32(footer, 32) >= 0x0001_0002
}

fn batmap_at(header: &[u8]) -> u64 {
    number(header, 16, 8) + (number(header, 28, 4) * 4).next_multiple_of(SECTOR)
}

/// The first byte behind all metadata: libvhd takes everything from there on for blocks.
fn end_of_headers<F: Read + Seek>(file: &mut File<F>, footer: &[u8], header: &[u8]) -> Result<u64, Refused> {
    let mut end = (number(footer, 16, 8) + 1024).max(batmap_at(header));
    if has_batmap(footer) {
        let batmap = file.read(batmap_at(header), 512)?;
        end = end.max(batmap_at(header) + SECTOR).max(number(&batmap, 8, 8) + number(&batmap, 16, 4) * SECTOR);
    }
    let used = locators(header).filter(|locator| !is_zero(&locator[..4]));
    Ok(used.map(|locator| number(locator, 16, 8) + locator_space(locator)).fold(end, u64::max))
}

fn check_table<F: Read + Seek>(
    file: &mut File<F>,
    footer: &[u8],
    header: &[u8],
    end: u64,
) -> Result<Vec<u32>, Refused> {
    let blocks = number(footer, 48, 8).div_ceil(1 << BLOCK_SHIFT);
    if blocks > number(header, 28, 4) {
        return refuse("VHD size exceeds BAT size");
    }
    let bytes = file.read(number(header, 16, 8), blocks * 4)?;
    let table: Vec<u32> = bytes.chunks(4).map(|entry| number32(entry, 0)).collect();
    let footer_at = file.len.next_multiple_of(SECTOR) - SECTOR;
    let len = SECTOR + (1 << BLOCK_SHIFT);
    let mut used: Vec<u64> = table.iter().filter(|&&at| at != UNUSED).map(|&at| u64::from(at) * SECTOR).collect();
    used.sort_unstable();
    if used.first().is_some_and(|&first| first < end) {
        return refuse("block clobbers headers");
    }
    if used.last().is_some_and(|&last| last + len > footer_at) {
        return refuse("block clobbers footer");
    }
    if used.windows(2).any(|pair| pair[0] + len > pair[1]) {
        return refuse("block clobbers block");
    }
    Ok(table)
}

fn check_batmap<F: Read + Seek>(
    file: &mut File<F>,
    footer: &[u8],
    header: &[u8],
    table: &[u32],
) -> Result<(), Refused> {
    let invalid = |why: &str| refuse(format!("batmap is invalid: {why}"));
    let batmap = file.read(batmap_at(header), 512)?;
    if &batmap[..8] != b"tdbatmap" || number(&batmap, 20, 4) != 0x0001_0002 {
        return invalid("invalid cookie or version");
    }
    let (at, len) = (number(&batmap, 8, 8), number(&batmap, 16, 4) * SECTOR);
    if len == 0 || len * 8 < number(header, 28, 4) {
        return invalid("batmap-BAT size mismatch");
    }
    if at == 0 || at % SECTOR != 0 || at + len > file.len - SECTOR {
        return invalid("invalid batmap offset or size");
    }
    let summed = (number(footer, 48, 8) >> (BLOCK_SHIFT + 3)).div_ceil(SECTOR).max(1) * SECTOR;
    let map = file.read(at, summed)?;
    // It leaves nothing out: the sum is not in what is summed.
    if number32(&batmap, 24) != sum(&map, map.len()) {
        return invalid("invalid checksum");
    }
    let full = |block: usize| map.get(block / 8).is_some_and(|byte| byte << (block % 8) & 0x80 != 0);
    match table.iter().enumerate().find(|&(block, &at)| at == UNUSED && full(block)) {
        Some((block, _)) => refuse(format!("batmap shows unallocated block {block} full")),
        None => Ok(()),
    }
}
