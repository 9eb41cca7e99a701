//! A larger disk: another size in the header, and room for it in the L1 table.
//!
//! Knows nothing of requests. Keeps: until the header is written the old L1 table is the image's, and stays as it was.

use super::Qcow2;
use super::allocator::Allocator;
use super::cluster::HostCluster;
use super::counts::Cover;
use super::layout::{L1_BYTES_MAX, LEN_MAX, SECTOR};
use crate::size::in_32_bits;
use crate::{ImageError, ImageErrorKind};

impl Qcow2 {
    /// Makes the disk `len` bytes long.
    pub(super) fn grow_to(&mut self, len: u64) -> Result<(), ImageError> {
        let limits = |what: String| Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        if len < self.geometry.len || len % SECTOR != 0 {
            return limits(format!("a disk of {} bytes cannot be made {len} bytes long", self.geometry.len));
        }
        let cluster = self.clusters.size();
        let entries = len.div_ceil(self.clusters.tables.format().reach());
        if len > LEN_MAX || entries * 8 > L1_BYTES_MAX {
            return limits(format!(
                "a virtual size of {len} bytes is beyond what clusters of {cluster} bytes can hold"
            ));
        }
        if len > self.geometry.len {
            self.check_growth()?;
        }
        let Some(allocator) = &mut self.clusters.allocator else {
            return Err(ImageError::new(ImageErrorKind::Unsupported, "the image is only read"));
        };
        let (old_entries, old_at) = self.clusters.tables.l1();
        if entries > old_entries {
            let clusters = |entries: u64| (entries * 8).div_ceil(cluster);
            let at = if clusters(entries) == clusters(old_entries) && old_entries > 0 {
                old_at
            } else {
                let first = place_table(allocator, clusters(entries))?;
                if old_entries > 0 {
                    allocator.old_tables.push((HostCluster::of(old_at, allocator.bits), clusters(old_entries)));
                }
                first.start(allocator.bits)
            };
            self.clusters.tables.grow(entries, at);
            self.head.header.raw.l1_at = at.0.into();
            self.head.header.raw.l1_entries = in_32_bits(entries, "L1_BYTES_MAX").into();
        }
        self.head.header.raw.len = len.into();
        self.head.changed();
        self.records.leave_out();
        self.clusters.len = len;
        self.geometry.len = len;
        Ok(())
    }
}

impl Qcow2 {
    /// Refuses what would change an internal snapshot with the disk, or bring to light what stands behind the disk's
    /// end.
    fn check_growth(&self) -> Result<(), ImageError> {
        let unsupported = |what| Err(ImageError::new(ImageErrorKind::Unsupported, what));
        // QEMU refuses that of version 2, in which no snapshot need say how large its disk is.
        let old = self.info.version < 3 && self.info.snapshots > 0;
        if old || self.clusters.pinned {
            return unsupported(
                "the image has internal snapshots that do not say how large their disk is, as those of version 2: \
                 delete them, or `image convert` the disk",
            );
        }
        if self.clusters.tables.reach_behind(self.clusters.len.div_ceil(self.clusters.size())) {
            return unsupported(
                "the image keeps something behind the end of its disk, as the state of a machine in a snapshot: \
                 `image convert` the disk",
            );
        }
        Ok(())
    }
}

/// Clusters for a table at the end of the file. Nothing can be loaded here: where the refcounts of the end are not at
/// hand, the table stands where a new block of them begins, and what is in between is free.
fn place_table(allocator: &mut Allocator, count: u64) -> Result<HostCluster, ImageError> {
    let no_space = || ImageError::new(ImageErrorKind::OutOfLimits, "there is no room for a larger L1 table");
    let per_block = allocator.counts.per_block();
    let mut first = allocator.space.end();
    let at_hand = allocator.counts.need(first, count).is_ok()
        && (!allocator.space.is_in_stale_tail(first) || allocator.is_trusted(first) == Ok(true))
        && first.run(count).all(|cluster| {
            matches!(allocator.counts.cover(cluster), Cover::Counted(_)) && allocator.counts.get(cluster) == 0
        });
    if !at_hand {
        while allocator.counts.cover(first) != Cover::NoBlock {
            first = allocator.counts.first_of(allocator.counts.block_of(first) + 1);
            if allocator.counts.cover(first) == Cover::NoTable {
                return Err(no_space());
            }
        }
        // Each block counts itself and what follows it.
        let blocks = (count + (per_block - 2)) / (per_block - 1).max(1);
        let number = allocator.counts.block_of(first);
        let numbers = number..number + blocks;
        if numbers.clone().any(|number| allocator.counts.cover(allocator.counts.first_of(number)) != Cover::NoBlock) {
            return Err(no_space());
        }
        take(allocator, first, count + blocks).ok_or_else(no_space)?;
        for (number, by) in numbers.zip(0u64..) {
            allocator.counts.place_block(number, first + by);
        }
        allocator.counts.count_table(first, count + blocks);
        return Ok(first + blocks);
    }
    take(allocator, first, count).ok_or_else(no_space)?;
    allocator.counts.count_table(first, count);
    Ok(first)
}

fn take(allocator: &mut Allocator, first: HostCluster, count: u64) -> Option<()> {
    let skipped = first.checked_sub(allocator.space.end())?;
    allocator.space.peek_end(skipped + count)?;
    allocator.space.take(first, count);
    Some(())
}
