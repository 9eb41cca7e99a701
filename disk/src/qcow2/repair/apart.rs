//! Clusters of the disk that lie where a structure of the image is, each given a place of its own: what is there now is
//! what the disk shows.
//!
//! Knows nothing of refcounts. The copies stand behind all that is referred to; nothing refers to them before the
//! entries do, which is the step behind the one that counts them.

use crate::qcow2::check::Survey;
use crate::qcow2::check::shape::{entries, read_padded};
use crate::qcow2::cluster::HostCluster;
use crate::qcow2::entry::Entry;
use crate::qcow2::layout::{OFFSET_MASK, index, length, set_entry};
use crate::{FileOffset, ImageError, MetaWrite, Source};

/// Bytes of copies at most: one such cluster is an accident, very many are an attack.
const COPIES_MAX: u64 = 64 << 20;

/// Clusters that are taken apart from what they lie upon.
#[derive(Default)]
pub struct Apart {
    /// The content of the clusters, to be written at their new places.
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
        let mut next = survey.ledger.end().max(shape.end());
        let mut l1 = vec![0; index(shape.l1.len())];
        read_padded(source, shape.l1.at, &mut l1)?;
        let mut table = shape.piece();
        let tables = entries(&l1).map(|bits| FileOffset(bits & OFFSET_MASK));
        let mut tables: Vec<FileOffset> = tables.filter(|&at| at.0 != 0).collect();
        tables.sort_unstable();
        tables.dedup();
        for table_at in tables.into_iter().filter(|&at| shape.is_aligned(at) && at.0 < shape.file_len) {
            read_padded(source, table_at, &mut table)?;
            let mut moved = table.clone();
            let format = shape.header.entries();
            for (word, raw) in format.entries(&table) {
                let (Entry::Data { at, .. } | Entry::Mixed { at: Some(at), .. }) = format.decode(raw) else { continue };
                if !shape.is_aligned(at) || !survey.is_structure(shape.cluster_of(at)) {
                    continue;
                }
                if length(apart.copies.len()).saturating_add(1).saturating_mul(shape.cluster) > COPIES_MAX {
                    return Ok(Apart::default());
                }
                let mut bytes = shape.piece();
                read_padded(source, at, &mut bytes)?;
                let place = shape.offset_of(next);
                next = HostCluster(next.0.saturating_add(1));
                apart.copies.push(MetaWrite { at: place, bytes });
                set_entry(&mut moved, word, place.0);
            }
            apart.entries.extend(super::changes(table_at, &table, &moved));
        }
        Ok(apart)
    }

    /// All writes: the copies, then the entries that refer to them.
    pub fn writes(&self) -> impl Iterator<Item = &MetaWrite> {
        self.copies.iter().chain(&self.entries)
    }
}
