//! The allocator of clusters in the file, with their refcounts at hand.
//!
//! Knows nothing of the disk's clusters. Keeps: what is allocated has a refcount of zero in a slice that is here.
//!
//! A cluster that no refcount block counts has a refcount of zero too ("Host cluster management"). A writer that was
//! killed may leave many of them, and no repair finds fault with that, so they are handed out. But a block that is
//! merely lost looks the same, and one that damage has zeroed is no better: all would be free that it has counted. The
//! first sign of that is enough to leave alone whatever such a block counts or would count: a table that stands there
//! and has no reference (a range in use has some, as tables are allocated with the data; the block itself is one), or
//! an entry that refers to what has none and is met before that is handed out. So before anything that a block counts
//! is handed out, the refcounts of all tables in its range are looked at, and the entries that are at hand. Storage
//! that grows has nothing behind its end; what is allocated there needs no such proof. What the refcount table is too
//! short for is left alone: it grows at the end of the file, and then counts it.

use super::cluster::{HostCluster, run};
use super::counts::{Counts, Cover, Fate, Loss};
use super::layout::REFCOUNT_TABLE_BYTES_MAX;
use super::pending::Pending;
use super::ranges::Ranges;
use super::space::{Found, Space};
use super::tables::Tables;
use crate::format::Wait;

/// The allocation state of an image that is open for writing.
#[derive(Debug)]
pub struct Allocator {
    /// Bytes of a cluster, as a power of two.
    pub bits: u32,
    /// How often each cluster is referred to.
    pub counts: Counts,
    /// Which may be handed out.
    pub space: Space,
    /// Numbers of refcount blocks that are lost or wrong: nothing that they count is handed out.
    pub distrusted: Ranges<u64>,
    /// Clusters of tables whose refcounts were not looked at. One of zero proves that its block is wrong.
    pub unproven: Ranges<HostCluster>,
    /// Refcount blocks are missing where the file has something.
    pub gaps: bool,
    /// Writes under way.
    pub pending: Pending,
    /// Clusters of old tables, to lose their reference when their refcounts are at hand.
    pub old_tables: Vec<(HostCluster, u64)>,
    /// The refcount table has moved since this was looked at.
    pub table_moved: bool,
}

/// The allocator of an image that is written to: such an image was opened for writing.
pub fn writable(allocator: &mut Option<Allocator>) -> &mut Allocator {
    let Some(allocator) = allocator else { unreachable!("the image is open for reading only") };
    allocator
}

impl Allocator {
    /// Free clusters in one piece, at most `max`, to be given to [`Space::take`]. `tables` are those of the image.
    pub fn allocate(&mut self, max: u64, tables: &Tables) -> Result<Found, Wait> {
        loop {
            self.scan(tables)?;
            let Some(found) = self.space.peek(max) else {
                // Storage of a fixed size: what is free lies in between.
                if self.space.scan_from().is_some() {
                    continue;
                }
                return Err(Wait::NoSpace);
            };
            let cover = self.counts.cover(found.first);
            if cover != Cover::NoTable && self.space.is_in_stale_tail(found.first) && !self.is_trusted(found.first)? {
                let next = self.next_block(found.first);
                self.space.withdraw(found.first, next - found.first);
                continue;
            }
            match cover {
                Cover::NoTable => self.grow_table(found.first)?,
                Cover::NoBlock => {
                    self.space.take(found.first, 1);
                    self.counts.add_block(found.first);
                }
                Cover::Counted(_) => {
                    if let Some(free) = self.counted_free(found)? {
                        return Ok(free);
                    }
                }
            }
        }
    }

    /// The first of the clusters that have a refcount of zero indeed. Those in front are taken back.
    fn counted_free(&mut self, found: Found) -> Result<Option<Found>, Wait> {
        self.counts.need(found.first, 1)?;
        let inside = (self.counts.behind_slice(found.first) - found.first).min(found.count);
        let clusters = found.first.run(inside);
        let free = clusters.clone().take_while(|&cluster| self.counts.get(cluster) == 0).count();
        let free = super::layout::length(free);
        if free > 0 {
            return Ok(Some(Found { count: free, ..found }));
        }
        let used = clusters.take_while(|&cluster| self.counts.get(cluster) != 0).count();
        self.space.withdraw(found.first, super::layout::length(used));
        Ok(None)
    }

    /// A cluster for a table, which has its reference at once: nothing but a table will ever refer to it.
    pub fn allocate_table(&mut self, tables: &Tables) -> Result<HostCluster, Wait> {
        let found = self.allocate(1, tables)?;
        Ok(self.take_table(found))
    }

    /// The same of a cluster that was [allocated](Room::allocate) and whose refcount is here.
    pub fn take_table(&mut self, found: Found) -> HostCluster {
        self.space.take(found.first, 1);
        self.counts.raise(found.first);
        found.first
    }

    /// Whether an entry of a table may refer to a cluster ([`Space::refer`]). Where it seems to be free, or no block
    /// counts it, the block is wrong or lost.
    pub fn refer(&mut self, cluster: HostCluster) -> bool {
        let uncounted = self.gaps && self.counts.cover(cluster) == Cover::NoBlock;
        let seems_free = self.space.is_unclean(cluster) || self.space.is_in_stale_tail(cluster);
        if (uncounted || seems_free) && cluster < self.space.file_end() {
            self.distrust(cluster);
        }
        self.space.refer(cluster)
    }

    /// The cluster behind those that the block of `cluster` counts.
    fn next_block(&self, cluster: HostCluster) -> HostCluster {
        self.counts.first_of(self.counts.block_of(cluster) + 1)
    }

    /// From now on nothing is handed out that the block of `cluster` counts.
    fn distrust(&mut self, cluster: HostCluster) {
        let number = self.counts.block_of(cluster);
        self.distrusted.insert(number, 1);
        self.space.set_aside(self.counts.first_of(number), self.counts.per_block());
    }

    /// Whether what the block of `cluster` counts may be handed out, as far as the tables tell that stand there: each
    /// of them has a reference.
    pub fn is_trusted(&mut self, cluster: HostCluster) -> Result<bool, Wait> {
        let number = self.counts.block_of(cluster);
        let (first, count) = (self.counts.first_of(number), self.counts.per_block());
        while !self.distrusted.contains(number) {
            let unproven = self.unproven.within(first, count).next();
            let Some((table, _)) = unproven else { return Ok(true) };
            self.counts.need(table, 1)?;
            if self.counts.get(table) == 0 {
                self.distrust(table);
            }
            // Each is looked at once, so that few slices have to be here at the same time.
            self.unproven.remove(table, 1);
        }
        Ok(false)
    }

    /// Looks at the refcounts of one slice, if it is time for that.
    fn scan(&mut self, tables: &Tables) -> Result<(), Wait> {
        let Some(from) = self.space.scan_from() else { return Ok(()) };
        if self.counts.cover(from) == Cover::NoTable {
            self.space.scan(self.space.scan_end(), &[]);
            return Ok(());
        }
        let slice_end = self.counts.behind_slice(from);
        self.counts.need(from, 1)?;
        let end = slice_end.min(self.space.scan_end());
        let free: Vec<HostCluster> =
            run(from..end).filter(|&cluster| self.counts.get(cluster) == 0 && !self.space.is_known(cluster)).collect();
        if !free.is_empty() {
            if self.is_trusted(from)? && tables.refer_to(&free) {
                self.distrust(from);
            }
            if self.distrusted.contains(self.counts.block_of(from)) {
                self.space.scan(self.next_block(from), &[]);
                return Ok(());
            }
        }
        self.space.scan(slice_end, &free);
        Ok(())
    }

    /// Makes the refcount table longer, so that it covers `cluster`, which lies at the end of the file. The new table
    /// and the blocks that count it stand there.
    fn grow_table(&mut self, cluster: HostCluster) -> Result<(), Wait> {
        let (entries, old_at) = self.counts.table();
        let size = 1u64 << self.bits;
        let first_block = self.counts.block_of(cluster);
        let wanted = first_block + 2;
        let clusters = ((wanted + wanted / 2) * 8).div_ceil(size);
        // The blocks count themselves and the table behind them.
        let mut blocks = 1u64;
        while cluster + blocks + clusters > self.counts.first_of(first_block + blocks) {
            blocks += 1;
        }
        let all = blocks + clusters;
        if clusters * size > REFCOUNT_TABLE_BYTES_MAX.max(size) || self.space.peek_end(all) != Some(cluster) {
            return Err(Wait::NoSpace);
        }
        self.space.take(cluster, all);
        self.counts.move_table(clusters * size / 8, cluster + blocks);
        for number in 0..blocks {
            self.counts.place_block(first_block + number, cluster + number);
        }
        self.counts.count_table(cluster, all);
        self.old_tables.push((HostCluster::of(old_at, self.bits), (entries * 8).div_ceil(size)));
        self.table_moved = true;
        Ok(())
    }

    /// Clusters that a compressed cluster reaches into lose a reference each. Their refcounts are here.
    pub fn lose_compressed(&mut self, first: HostCluster, count: u64) {
        for cluster in first.run(count) {
            let fate = match self.counts.get(cluster) {
                // Damage that somebody else has done; there is nothing to give up.
                0 => continue,
                1 => Fate::Leaked,
                _ => Fate::InUse,
            };
            self.lose(cluster, 1, fate);
        }
    }

    /// A cluster that others refer to, or may, loses a reference. Its refcount is loaded. Reads of it may be in flight
    /// for the part of the disk that has lost it, so if nothing refers to it now, it is not used again before the image
    /// is opened the next time.
    pub fn lose_shared(&mut self, cluster: HostCluster) {
        match self.counts.get(cluster) {
            // Damage that somebody else has done; there is nothing to give up.
            0 => return,
            1 => self.space.hold(cluster, 1),
            _ => {}
        }
        self.lose(cluster, 1, Fate::InUse);
    }

    /// Clusters lose a reference each. Their refcounts are here.
    pub fn lose(&mut self, first: HostCluster, count: u64, fate: Fate) {
        self.unproven.remove(first, count);
        self.counts.lose(Loss { first, count, fate });
        match fate {
            Fate::Released => self.space.free(first, count),
            Fate::Leaked => self.space.hold(first, count),
            Fate::InUse => {}
        }
    }

    /// Frees clusters of old tables.
    pub fn free_old_tables(&mut self) -> Result<(), Wait> {
        while let Some(&(first, count)) = self.old_tables.last() {
            self.counts.need(first, count)?;
            self.old_tables.pop();
            self.space.used_now(first, count);
            self.lose_compressed(first, count);
        }
        Ok(())
    }
}
