//! Persistent dirty bitmaps of other programs ("Bitmaps extension"), which do not notice our writes.
//!
//! A writer that does not keep a bitmap up to date marks it as in use, before its first write: a reader of the
//! directory then knows that the bits are not valid, and still which bitmap owns the clusters. Knows nothing of the
//! bits. Keeps: a malformed directory is left alone.

use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::header::{Header, read};
use super::layout::{BITMAPS_VALID, EXTENSION_BITMAPS, PAGE, RawBitmaps, index, length};
use crate::format::MetaWrite;
use crate::{FileOffset, FileRange, Source};

/// Flag of a bitmap: it is being written to, or was, and its content does not count.
pub const IN_USE: u32 = 1;
/// Bytes of a directory that is marked: a thousand bitmaps with names of a kilobyte, far more than anybody has.
const DIRECTORY_MAX: u64 = 1 << 20;
/// Where in an entry its flags stand.
const FLAGS_AT: usize = 12;

/// One entry of the directory, in front of its extra data and its name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawBitmap {
    pub table_at: U64,
    pub table_entries: U32,
    pub flags: U32,
    pub kind: u8,
    pub granularity: u8,
    pub name_len: U16,
    pub extra_len: U32,
}
const _: () = assert!(size_of::<RawBitmap>() == 24);

/// An entry of the directory, its name, and what follows it.
pub fn split_entry(directory: &[u8]) -> Option<(RawBitmap, &[u8], &[u8])> {
    let (bitmap, rest) = RawBitmap::read_from_prefix(directory).ok()?;
    let name_at = index(bitmap.extra_len.get().into());
    let name = rest.get(name_at..name_at + usize::from(bitmap.name_len.get()))?;
    let tail = name_at + name.len();
    let rest = directory.get((size_of::<RawBitmap>() + tail).next_multiple_of(8)..)?;
    Some((bitmap, name, rest))
}

/// Names of the bitmaps, as far as they can be read, to be shown to users. And whether the bits of all of them are
/// valid.
pub fn names(header: &Header, source: &mut dyn Source) -> (Vec<String>, bool) {
    let mut valid = header.raw.autoclear.get() & BITMAPS_VALID != 0;
    let mut names = Vec::new();
    let found = directory(header, source);
    let mut rest = found.as_ref().and_then(|(_, bytes, len)| bytes.get(..*len)).unwrap_or_default();
    while let Some((bitmap, name, next)) = split_entry(rest) {
        names.push(String::from_utf8_lossy(name).chars().filter(|letter| !letter.is_control()).collect());
        valid &= bitmap.flags.get() & IN_USE == 0;
        rest = next;
    }
    (names, valid)
}

/// The writes that mark all bitmaps as in use. `None` if no bitmap is valid, or the directory cannot be read.
pub fn mark_in_use(header: &Header, source: &mut dyn Source) -> Option<Vec<MetaWrite>> {
    if header.raw.autoclear.get() & BITMAPS_VALID == 0 {
        return None;
    }
    let (bitmaps, mut bytes, len) = directory(header, source)?;
    let start = FileOffset(bitmaps.directory_at.get());
    let mut at = 0;
    let mut changed = false;
    for _ in 0..bitmaps.count.get() {
        let (bitmap, _, rest) = split_entry(bytes.get(at..len)?)?;
        let next = len - rest.len();
        let flags = bitmap.flags.get() | IN_USE;
        changed |= flags != bitmap.flags.get();
        let place = at + FLAGS_AT;
        bytes.get_mut(place..place + 4)?.copy_from_slice(&flags.to_be_bytes());
        at = next;
    }
    let whole = at == len && bitmaps.count.get() > 0;
    let writes = if changed { vec![MetaWrite { at: start, bytes }] } else { Vec::new() };
    whole.then_some(writes)
}

/// Where the directory of bitmaps that others believe stands, and the table of each.
pub fn places(header: &Header, source: &mut dyn Source) -> Vec<FileRange> {
    let mut places = Vec::new();
    if header.raw.autoclear.get() & BITMAPS_VALID == 0 {
        return places;
    }
    let Some((bitmaps, bytes, len)) = directory(header, source) else { return places };
    places.push(FileRange { at: FileOffset(bitmaps.directory_at.get()), len: length(len) });
    let mut rest = bytes.get(..len).unwrap_or_default();
    while let Some((bitmap, _, next)) = split_entry(rest) {
        let len = u64::from(bitmap.table_entries.get()) * 8;
        places.push(FileRange { at: FileOffset(bitmap.table_at.get()), len });
        rest = next;
    }
    places.retain(|&FileRange { at, len }| at.0 > 0 && at.0.saturating_add(len) <= source.len());
    places
}

/// The extension, the directory up to the end of its last page, and the directory's own length.
fn directory(header: &Header, source: &mut dyn Source) -> Option<(RawBitmaps, Vec<u8>, usize)> {
    let (bitmaps, _) = RawBitmaps::read_from_prefix(header.extension(EXTENSION_BITMAPS)?).ok()?;
    let (at, len) = (FileOffset(bitmaps.directory_at.get()), bitmaps.directory_len.get());
    if at.0 == 0 || at % header.cluster_size() != 0 || !(1..=DIRECTORY_MAX).contains(&len) {
        return None;
    }
    let page = PAGE.min(header.cluster_size());
    let end = at.checked_add(len.next_multiple_of(page))?.min(FileOffset(source.len()));
    let mut bytes = read(source, at, end.checked_sub(at)?, "bitmap directory").ok()?;
    let there = length(bytes.len()) >= len;
    bytes.resize(index(len.next_multiple_of(page)), 0);
    there.then_some((bitmaps, bytes, index(len)))
}
