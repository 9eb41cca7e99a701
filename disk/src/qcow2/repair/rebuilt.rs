//! Rebuilt refcounts: a table and blocks behind everything that is in use, for when those of the image cannot be
//! repaired in place.
//!
//! Knows nothing of the header, which is to name the new table once all of this is durable. The old table and blocks
//! are counted as free, unless references cannot be made out: then nothing is. Where something refers to what a file
//! that was cut short has lost, nothing is laid out: it would read as refcounts, or seem to be there again.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::qcow2::check::Survey;
use crate::qcow2::cluster::HostCluster;
use crate::qcow2::layout::{REFCOUNT_TABLE_BYTES_MAX, index, length, set_entry};
use crate::size::in_32_bits;
use crate::{FileOffset, ImageError, ImageErrorKind, MetaWrite, Source};

/// A new refcount table with its blocks.
pub struct RebuiltRefcounts {
    /// Offset of the table in the file.
    pub table_at: FileOffset,
    /// Its clusters.
    pub table_clusters: u32,
    /// Table and blocks.
    pub writes: Vec<MetaWrite>,
}

/// Which clusters the table and the blocks take.
struct Plan {
    start: HostCluster,
    table_clusters: u64,
    /// Numbers of the blocks, in the order in which they stand behind the table.
    blocks: BTreeSet<u64>,
}

/// Lays out new refcounts, if there is a place for them. `sound`: what nothing refers to is free.
pub fn lay_out(
    source: &mut dyn Source,
    survey: &mut Survey,
    sound: bool,
) -> Result<Option<RebuiltRefcounts>, ImageError> {
    // Behind the old table and blocks too: they are in use until the header names the new ones.
    let used = survey.ledger.end();
    let start = if sound { used } else { used.max(survey.shape.end()) };
    if sound {
        for &range in &survey.refcounts.taken {
            survey.shape.clusters_of(range).for_each(|cluster| survey.ledger.discount(cluster));
        }
    }
    let plan = Plan::of(survey, start, sound)?;
    if survey.beyond.is_some_and(|cluster| cluster < plan.taken().end) {
        return Ok(None);
    }
    let cluster = survey.shape.cluster;
    let mut table = vec![0; index(plan.table_clusters.saturating_mul(cluster))];
    let mut writes = Vec::new();
    for (number, place) in plan.blocks.iter().copied().zip(plan.first_block().0..) {
        let at = survey.shape.offset_of(HostCluster(place));
        set_entry(&mut table, index(number), at.0);
        writes.push(MetaWrite { at, bytes: block(source, survey, number, plan.taken(), sound)? });
    }
    let table_at = survey.shape.offset_of(plan.start);
    writes.push(MetaWrite { at: table_at, bytes: table });
    let table_clusters = in_32_bits(plan.table_clusters, "REFCOUNT_TABLE_BYTES_MAX");
    Ok(Some(RebuiltRefcounts { table_at, table_clusters, writes }))
}

impl Plan {
    /// Table and blocks also count themselves, so that there may be more of both than what is in use now needs.
    fn of(survey: &Survey, start: HostCluster, sound: bool) -> Result<Plan, ImageError> {
        let per_block = survey.refcounts.width.in_block(survey.shape.cluster);
        let mut blocks = BTreeSet::new();
        let mut next = HostCluster(0);
        while let Some(cluster) = survey.ledger.next_in_use(next) {
            let number = cluster.0 / per_block;
            blocks.insert(number);
            next = HostCluster(number.saturating_add(1).saturating_mul(per_block));
        }
        if !sound {
            let there = (0..).zip(&survey.refcounts.blocks).filter(|&(_, &at)| at.0 != 0);
            blocks.extend(there.map(|(number, _)| number));
        }
        let mut plan = Plan { start, table_clusters: 1, blocks };
        loop {
            let taken = plan.taken();
            let before = (plan.table_clusters, plan.blocks.len());
            plan.blocks.extend(taken.start.0 / per_block..=taken.end.0.saturating_sub(1) / per_block);
            let entries = plan.blocks.last().map_or(0, |&last| last.saturating_add(1));
            let table_len = entries.saturating_mul(8);
            plan.table_clusters = table_len.div_ceil(survey.shape.cluster).max(1);
            if table_len > REFCOUNT_TABLE_BYTES_MAX {
                let what = "the file is too long for a new refcount table";
                return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
            }
            if before == (plan.table_clusters, plan.blocks.len()) {
                return Ok(plan);
            }
        }
    }

    fn first_block(&self) -> HostCluster {
        HostCluster(self.start.0.saturating_add(self.table_clusters))
    }

    /// The clusters that the table and the blocks take.
    fn taken(&self) -> Range<HostCluster> {
        self.start..HostCluster(self.first_block().0.saturating_add(length(self.blocks.len())))
    }
}

/// The refcounts of a block: what is counted, with what the old block says where that is not to be freed.
fn block(
    source: &mut dyn Source,
    survey: &Survey,
    number: u64,
    taken: Range<HostCluster>,
    sound: bool,
) -> Result<Vec<u8>, ImageError> {
    let width = survey.refcounts.width;
    let mut bytes = survey.shape.piece();
    if !sound {
        survey.refcounts.read_block(source, number, &mut bytes)?;
    }
    let per_block = width.in_block(survey.shape.cluster);
    let first = number.saturating_mul(per_block);
    for (place, cluster) in (0..).zip((first..first.saturating_add(per_block)).map(HostCluster)) {
        let counted = if taken.contains(&cluster) { 1 } else { survey.ledger.references(cluster) };
        let kept = width.get(&bytes, place);
        width.set(&mut bytes, place, counted.max(kept).min(width.max()));
    }
    Ok(bytes)
}
