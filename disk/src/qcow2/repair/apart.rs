//! Clusters of the disk that lie where a structure of the image is, each given a place of its own: what is there now is
//! what the disk shows.
//!
//! Knows nothing of refcounts. The copies stand behind all that is referred to; nothing refers to them before the
//! entries do, which is the step behind the one that counts them.

use crate::qcow2::check::Survey;
use crate::qcow2::check::shape::{entries, read_padded};
use crate::qcow2::entry::Entry;
use crate::qcow2::layout::{OFFSET_MASK, index, length, set_entry};
use crate::{ImageError, MetaWrite, ReadFault, Source};

/// Bytes of copies at most: one such cluster is an accident, very many are an attack.
const COPIES_MAX: u64 = 64 << 20;

/// Clusters that are taken apart from what they lie upon.
#[derive(Default)]
pub struct Apart {
    /// What the clusters hold, at their new places.
    pub copies: Vec<MetaWrite>,
    /// The tables that lead there, a sector or more each.
    pub entries: Vec<MetaWrite>,
}

impl Apart {
    /// Finds them. None, unless something was found to lie upon a structure, and all that is referred to is in the
    /// file.
    pub fn find(source: &mut dyn Source, survey: &Survey) -> Result<Apart, ImageError> {
        let mut apart = Apart::default();
        if !survey.overlapped || survey.beyond.is_some() {
            return Ok(apart);
        }
        let shape = &survey.shape;
        let mut next = survey.ledger.end().max(shape.clusters());
        let mut l1 = vec![0; index(shape.l1.len())];
        read_padded(source, shape.l1.at, &mut l1)?;
        let mut table = shape.piece();
        let mut tables: Vec<u64> = entries(&l1).map(|bits| bits & OFFSET_MASK).filter(|&at| at != 0).collect();
        tables.sort_unstable();
        tables.dedup();
        for table_at in tables.into_iter().filter(|&at| shape.is_aligned(at) && at < shape.file_len) {
            read_padded(source, table_at, &mut table)?;
            let mut moved = table.clone();
            for (number, bits) in (0..).zip(entries(&table)) {
                let Entry::Data { at, .. } = Entry::decode(bits, shape.cluster_bits) else { continue };
                if !shape.is_aligned(at) || !survey.is_structure(shape.cluster_of(at)) {
                    continue;
                }
                if length(apart.copies.len()).saturating_add(1).saturating_mul(shape.cluster) > COPIES_MAX {
                    return Ok(Apart::default());
                }
                let mut bytes = shape.piece();
                read_padded(source, at, &mut bytes)?;
                let place = shape.offset_of(next);
                next = next.saturating_add(1);
                apart.copies.push(MetaWrite { at: place, bytes });
                set_entry(&mut moved, number, Entry::Data { at: place, copied: false }.encode());
            }
            apart.entries.extend(super::changes(table_at, &table, &moved));
        }
        Ok(apart)
    }
}

/// A file as it is once these are written.
pub struct Written<'a> {
    source: &'a mut dyn Source,
    writes: Vec<&'a MetaWrite>,
}

impl<'a> Written<'a> {
    /// The file with all of it.
    pub fn new(source: &'a mut dyn Source, apart: &'a Apart) -> Written<'a> {
        Written { source, writes: apart.copies.iter().chain(&apart.entries).collect() }
    }
}

impl Source for Written<'_> {
    fn len(&self) -> u64 {
        let end = |write: &&MetaWrite| write.at.saturating_add(length(write.bytes.len()));
        self.writes.iter().map(end).max().unwrap_or(0).max(self.source.len())
    }

    fn read_at(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(length(bytes.len()));
        if end > self.len() {
            return Err(ReadFault::PastEnd(end));
        }
        let inside = index(self.source.len().saturating_sub(at)).min(bytes.len());
        let (there, behind) = bytes.split_at_mut(inside);
        if !there.is_empty() {
            self.source.read_at(at, there)?;
        }
        behind.fill(0);
        for write in &self.writes {
            let (from, to) = (write.at.max(at), write.at.saturating_add(length(write.bytes.len())).min(end));
            if from < to {
                let new = write.bytes.get(index(from - write.at)..index(to - write.at)).unwrap_or_default();
                if let Some(old) = bytes.get_mut(index(from - at)..index(to - at)) {
                    old.copy_from_slice(new);
                }
            }
        }
        Ok(())
    }
}
