//! Persistent dirty bitmaps ("Bitmaps extension"): the clusters of their directory, their tables and their bits.
//!
//! Knows nothing of what the bits say. Bitmaps whose autoclear bit is cleared no longer count: nothing refers to what
//! they hold.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use super::ledger::Role;
use super::shape::{Table, read_entries, read_padded};
use super::walk::Walk;
use crate::qcow2::bitmaps::{IN_USE, RawBitmap, split_entry};
use crate::qcow2::layout::{OFFSET_MASK, index};
use crate::{FileOffset, ImageError, Source};

/// Bytes of the directory, at most: 65535 bitmaps of a kilobyte each.
const DIRECTORY_MAX: u64 = 64 << 20;
/// Entries of all bitmaps' tables, at most: what QEMU takes for one, 1 GiB. A sparse file could have any number of
/// them.
const ENTRIES_MAX: u64 = 0x0800_0000;
/// Flags of a bitmap that QEMU takes: [`IN_USE`], and whether it is to be kept up to date.
const FLAGS: u32 = IN_USE | 2;
/// The only type there is.
const TRACKING: u8 = 1;
/// Bytes of the disk to a bit, as powers of two.
const GRANULARITIES: RangeInclusive<u8> = 9..=31;
/// Bytes of a name.
const NAME_LENS: RangeInclusive<u16> = 1..=1023;
/// Bits of a table entry that must be zero.
const RESERVED: u64 = 0xff00_0000_0000_01fe;
/// Bit of a table entry without a place: all ones.
const ALL_ONES: u64 = 1;

/// Counts what bitmaps refer to.
pub fn walk(walk: &mut Walk<'_>, source: &mut dyn Source) -> Result<(), ImageError> {
    let Some((bitmaps, true)) = walk.shape.bitmaps() else { return Ok(()) };
    let (start, len) = (FileOffset(bitmaps.directory_at.get()), bitmaps.directory_len.get());
    let is_there = walk.shape.is_aligned(start) && start.0 != 0 && (1..=DIRECTORY_MAX).contains(&len);
    if !is_there || bitmaps.reserved.get() != 0 || bitmaps.count.get() == 0 {
        walk.damage(start, "the header extension about bitmaps makes no sense");
        return Ok(());
    }
    walk.refer_alone(start, len, "the directory of bitmaps")?;
    let mut directory = vec![0; index(len)];
    read_padded(source, start, &mut directory)?;
    let mut rest = directory.as_slice();
    let mut entries: u64 = 0;
    let mut names = BTreeSet::new();
    for _ in 0..bitmaps.count.get() {
        let Some((bitmap, name, next)) = split_entry(rest) else {
            walk.damage(start, "the directory of bitmaps ends before its last entry");
            return Ok(());
        };
        rest = next;
        let place = Table { at: FileOffset(bitmap.table_at.get()), entries: bitmap.table_entries.get().into() };
        if !is_sensible(walk, &bitmap) {
            walk.damage(start, "the directory of bitmaps has an entry that makes no sense");
        }
        if !names.insert(name) {
            walk.damage(start, "two bitmaps have the same name");
        }
        entries = entries.saturating_add(place.entries);
        if !walk.shape.is_aligned(place.at) || entries > ENTRIES_MAX {
            walk.damage(place.at, "the table of a bitmap cannot be there, or is too large");
            return Ok(());
        }
        table(walk, source, place)?;
    }
    if !rest.is_empty() {
        walk.damage(start, "the directory of bitmaps continues behind its last entry");
    }
    Ok(())
}

/// Whether an entry is one that QEMU takes; it does not open an image with another.
fn is_sensible(walk: &Walk<'_>, bitmap: &RawBitmap) -> bool {
    // Words of 64 bits, which fill clusters.
    let bits = walk.shape.header.raw.len.get().div_ceil(1 << bitmap.granularity.min(63));
    let clusters = bits.div_ceil(64).saturating_mul(8).div_ceil(walk.shape.cluster);
    bitmap.flags.get() & !FLAGS == 0
        && bitmap.kind == TRACKING
        && GRANULARITIES.contains(&bitmap.granularity)
        && NAME_LENS.contains(&bitmap.name_len.get())
        && bitmap.extra_len.get() == 0
        && bitmap.table_at.get() != 0
        && bitmap.table_entries.get() != 0
        && (bitmap.flags.get() & IN_USE != 0 || clusters == bitmap.table_entries.get().into())
}

fn table(walk: &mut Walk<'_>, source: &mut dyn Source, table: Table) -> Result<(), ImageError> {
    walk.refer_alone(table.at, table.len(), "the table of a bitmap")?;
    let mut first = 0;
    while let Some(entries) = read_entries(source, table, first)? {
        for (index, bits) in (first..).zip(entries) {
            let at = FileOffset(bits & OFFSET_MASK);
            if bits & RESERVED != 0 || (at.0 != 0 && (bits & ALL_ONES != 0 || !walk.shape.is_aligned(at))) {
                walk.damage(table.entry_at(index), format!("the entry {bits:#x} of a bitmap's table makes no sense"));
            } else if at.0 != 0 {
                walk.refer(at, walk.shape.cluster, Role::Other, "a bitmap")?;
            }
        }
        first = first.saturating_add(Table::PIECE);
    }
    Ok(())
}
