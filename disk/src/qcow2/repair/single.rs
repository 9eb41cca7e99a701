//! Entries of the disk's tables that can be repaired one by one.
//!
//! An entry that reads as zero needs no place, so an impossible one is removed. Reserved bits mean nothing, and are
//! cleared where the rest of the entry is sound: it is the only one that refers to a place in the file, or refers to
//! none. Knows nothing of refcounts: they are repaired once the entries are.

use crate::qcow2::check::Survey;
use crate::qcow2::check::shape::{entries, read_padded};
use crate::qcow2::check::walk::FIRST_RESERVED;
use crate::qcow2::entry::{Entry, RawEntry};
use crate::qcow2::layout::{OFFSET_MASK, SECTOR, index, set_entry};
use crate::{FileOffset, ImageError, MetaWrite, Source};

/// The repaired entries.
#[derive(Default)]
pub struct Single {
    /// The tables with them, a sector or more each.
    pub writes: Vec<MetaWrite>,
    /// Entries that have lost a place.
    pub displaced: u64,
    /// Entries that have lost reserved bits.
    pub cleared: u64,
}

impl Single {
    /// Finds the entries that can be repaired; reads the tables, writes nothing.
    pub fn find(source: &mut dyn Source, survey: &Survey) -> Result<Single, ImageError> {
        let mut single = Single::default();
        if !survey.mendable {
            return Ok(single);
        }
        let shape = &survey.shape;
        let mut l1 = vec![0; index(shape.l1.len().next_multiple_of(SECTOR))];
        read_padded(source, shape.l1.at, &mut l1)?;
        let count = index(shape.l1.entries);
        let mut mended = l1.clone();
        for (number, bits) in entries(&l1).take(count).enumerate().filter(|&(_, bits)| bits & FIRST_RESERVED != 0) {
            if is_alone(survey, FileOffset(bits & OFFSET_MASK)) {
                set_entry(&mut mended, number, bits & !FIRST_RESERVED);
                single.cleared = single.cleared.saturating_add(1);
            }
        }
        single.writes.extend(super::changes(shape.l1.at, &l1, &mended));
        let mut tables: Vec<FileOffset> = entries(&l1).take(count).map(|bits| FileOffset(bits & OFFSET_MASK)).collect();
        tables.sort_unstable();
        tables.dedup();
        for at in tables.into_iter().filter(|&at| at.0 != 0 && shape.is_aligned(at) && at.0 < shape.file_len) {
            single.second_level(source, survey, at)?;
        }
        Ok(single)
    }

    /// The table at byte `at`.
    fn second_level(&mut self, source: &mut dyn Source, survey: &Survey, at: FileOffset) -> Result<(), ImageError> {
        let shape = &survey.shape;
        let format = shape.header.entries();
        let mut table = shape.piece();
        read_padded(source, at, &mut table)?;
        let mut mended = table.clone();
        for (word, raw) in format.entries(&table) {
            let entry = format.decode(raw);
            let reserved = raw.descriptor & shape.reserved() != 0 && !matches!(entry, Entry::Compressed { .. });
            let right = RawEntry { descriptor: raw.descriptor & !shape.reserved(), ..raw };
            if format.is_misplaced_zero(right) {
                set_entry(&mut mended, word, format.encode(Entry::Zero).descriptor);
                self.displaced = self.displaced.saturating_add(1);
            } else if reserved && entry.place().is_none_or(|place| is_alone(survey, place)) {
                set_entry(&mut mended, word, right.descriptor);
                self.cleared = self.cleared.saturating_add(1);
            }
        }
        self.writes.extend(super::changes(at, &table, &mended));
        Ok(())
    }
}

/// Whether a place is a cluster of the file, and the entry that names it the only one.
fn is_alone(survey: &Survey, at: FileOffset) -> bool {
    let shape = &survey.shape;
    let inside = at.0 != 0 && shape.is_aligned(at) && at.0 < shape.file_len;
    inside && survey.ledger.references(shape.cluster_of(at)) == 1
}
