//! Refcounts: how many references each cluster of the file has ("Host cluster management").
//!
//! The refcount table is in memory, the blocks in a bounded cache. Knows nothing of who refers to what. Keeps: what is
//! written before the entries of a round has none of its clusters freed ("raised": counts too high are a leak, counts
//! too low are damage), and what is written after them has.

use std::collections::{BTreeSet, HashMap};

use super::batch::{COUNTS, COUNTS_TABLE, LOWERED};
use super::cluster::HostCluster;
use super::layout::{entry, index, length, set_entry};
use super::slices::Slices;
use crate::format::{MetaWrite, Wait};
use crate::{FileOffset, Records};

/// Bytes of refcount blocks that are kept: those of 64 GiB of file with clusters of 64 KiB.
pub const BUDGET: u64 = 2 << 20;

/// What happens to freed clusters when the change is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The disk deallocates them at once and tells.
    Released,
    /// They are leaked.
    Leaked,
    /// Others refer to them.
    InUse,
}

/// Clusters of the file that have lost a reference each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The first.
    pub first: HostCluster,
    /// How many.
    pub count: u64,
    /// What happens to them then.
    pub fate: Fate,
}

/// The state of the refcount block of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cover {
    /// A refcount, in the slice at this offset of the file.
    Counted(FileOffset),
    /// The refcount table has no block for it.
    NoBlock,
    /// The refcount table is too short.
    NoTable,
}

/// The writes of refcounts in a round.
#[derive(Debug, Default)]
pub struct Changes {
    /// Blocks and slices in front of everything else.
    pub raised: Vec<MetaWrite>,
    /// The refcount table, which refers to them.
    pub table: Vec<MetaWrite>,
    /// Slices behind everything else.
    pub lowered: Vec<MetaWrite>,
}

/// The refcounts of one image.
#[derive(Debug)]
pub struct Counts {
    /// Bits of a refcount, as a power of two.
    order: u32,
    /// Bytes of a cluster, as a power of two.
    bits: u32,
    table: Vec<u64>,
    table_at: FileOffset,
    slices: Slices,
    /// Slices with counts that have become higher, lower since the last seal.
    raised: BTreeSet<FileOffset>,
    lowered: BTreeSet<FileOffset>,
    losses: Vec<Loss>,
    /// By slice of the table.
    dirty_table: BTreeSet<u64>,
    sealed: Sealed,
    records: Records,
}

/// The changes that the round under way makes durable.
#[derive(Debug, Default)]
struct Sealed {
    raised: BTreeSet<FileOffset>,
    lowered: BTreeSet<FileOffset>,
    losses: Vec<Loss>,
    table: BTreeSet<u64>,
}

impl Counts {
    /// Refcounts of 2^`order` bits, of clusters of 2^`bits` bytes, whose table stands at `table_at`.
    pub fn new(order: u32, bits: u32, table: Vec<u64>, table_at: FileOffset) -> Counts {
        Counts {
            order,
            bits,
            table,
            table_at,
            slices: Slices::new(1 << bits, BUDGET),
            raised: BTreeSet::new(),
            lowered: BTreeSet::new(),
            losses: Vec::new(),
            dirty_table: BTreeSet::new(),
            sealed: Sealed::default(),
            records: Records::default(),
        }
    }

    /// The cache, for pins and loads.
    pub fn slices(&mut self) -> &mut Slices {
        &mut self.slices
    }

    /// Clusters that one block counts.
    pub fn per_block(&self) -> u64 {
        (8u64 << self.bits) >> self.order
    }

    /// Clusters that one slice counts.
    pub fn per_slice(&self) -> u64 {
        (self.slices.size() * 8) >> self.order
    }

    /// Entries of the table, and where it stands.
    pub fn table(&self) -> (u64, FileOffset) {
        (length(self.table.len()), self.table_at)
    }

    /// Clusters of the refcount blocks.
    pub fn blocks(&self) -> impl Iterator<Item = HostCluster> {
        self.numbered_blocks().map(|(_, at)| HostCluster::of(at, self.bits))
    }

    /// Numbers and places of the refcount blocks.
    pub fn numbered_blocks(&self) -> impl Iterator<Item = (u64, FileOffset)> {
        (0u64..).zip(&self.table).filter(|&(_, &at)| at != 0).map(|(number, &at)| (number, FileOffset(at)))
    }

    /// The number of the block that counts a cluster, or would.
    pub fn block_of(&self, cluster: HostCluster) -> u64 {
        cluster.0 / self.per_block()
    }

    /// The first cluster that the block of this number counts, or would.
    pub fn first_of(&self, number: u64) -> HostCluster {
        HostCluster(number * self.per_block())
    }

    /// The first cluster that the slice behind the one of `cluster` counts.
    pub fn behind_slice(&self, cluster: HostCluster) -> HostCluster {
        HostCluster((cluster.0 / self.per_slice() + 1) * self.per_slice())
    }

    /// The number of a cluster among those that its slice counts.
    fn within(&self, cluster: HostCluster) -> u64 {
        cluster.0 % self.per_slice()
    }

    /// The state of the refcount block of a cluster.
    pub fn cover(&self, cluster: HostCluster) -> Cover {
        match self.table.get(index(self.block_of(cluster))) {
            None => Cover::NoTable,
            Some(0) => Cover::NoBlock,
            Some(&block) => {
                let slice = cluster.0 % self.per_block() / self.per_slice();
                Cover::Counted(FileOffset(block) + slice * self.slices.size())
            }
        }
    }

    /// See to it that the refcounts of clusters are here, which must have some, or ask for them. Says in which slices.
    pub fn need(&mut self, first: HostCluster, count: u64) -> Result<Vec<FileOffset>, Wait> {
        let mut slices = Vec::new();
        let mut cluster = first;
        while cluster < first + count {
            if let Cover::Counted(at) = self.cover(cluster) {
                self.slices.need(at)?;
                slices.push(at);
            }
            cluster = self.behind_slice(cluster);
        }
        Ok(slices)
    }

    /// Whether two clusters are counted in the same slice.
    pub fn is_near(&self, one: HostCluster, other: HostCluster) -> bool {
        one.0 / self.per_slice() == other.0 / self.per_slice()
    }

    /// The refcount of a cluster whose slice is here; zero where there is no block.
    pub fn get(&self, cluster: HostCluster) -> u64 {
        match self.cover(cluster) {
            Cover::Counted(at) => get(self.slices.bytes(at).unwrap_or_default(), self.order, self.within(cluster)),
            Cover::NoBlock | Cover::NoTable => 0,
        }
    }

    /// A cluster has its first reference.
    pub fn raise(&mut self, cluster: HostCluster) {
        self.set(cluster, 1, COUNTS);
        if let Cover::Counted(at) = self.cover(cluster) {
            self.raised.insert(at);
        }
    }

    /// Clusters lose a reference each.
    pub fn lose(&mut self, loss: Loss) {
        for cluster in loss.first.run(loss.count) {
            let count = self.get(cluster);
            debug_assert!(count > 0, "cluster {cluster} has no reference to lose");
            // It is a number from the file.
            self.set(cluster, count.saturating_sub(1), LOWERED);
            if let Cover::Counted(at) = self.cover(cluster) {
                self.lowered.insert(at);
            }
        }
        self.losses.push(loss);
    }

    /// The changes that are to be logged.
    pub fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    /// Changes a refcount, which `batch` of a round writes.
    fn set(&mut self, cluster: HostCluster, count: u64, batch: u8) {
        let Cover::Counted(at) = self.cover(cluster) else { return };
        let within = self.within(cluster);
        debug_assert!(self.slices.bytes(at).is_some(), "a refcount is changed in a slice that is not here");
        let Some(bytes) = self.slices.change(at) else { return };
        set(bytes, self.order, within, count);
        self.log(at, within, count, batch);
    }

    /// Logs the refcount of a cluster to which an entry in the log refers, and which had its reference before. Should a
    /// later round give it up behind a gap in the log, the next process writes that entry again.
    pub fn log_again(&mut self, cluster: HostCluster) {
        if let Cover::Counted(at) = self.cover(cluster) {
            self.log(at, self.within(cluster), self.get(cluster), COUNTS);
        }
    }

    /// Logs a refcount of the slice at `at`.
    fn log(&mut self, at: FileOffset, within: u64, count: u64, batch: u8) {
        let Some(width) = 1u64.checked_shl(self.order).and_then(|bits| bits.checked_div(8)).filter(|&width| width > 0)
        else {
            // Others in the same byte may belong to another batch.
            return self.records.leave_out();
        };
        let raw = count.to_be_bytes();
        let raw = raw.get(8usize - index(width)..).unwrap_or_default();
        self.records.bytes(batch, at + within * width, raw);
    }

    /// Makes a cluster the block that counts it.
    pub fn add_block(&mut self, cluster: HostCluster) {
        let number = self.block_of(cluster);
        if number < length(self.table.len()) {
            self.place_block(number, cluster);
            self.count_table(cluster, 1);
        }
    }

    /// Logs that the block of this number is at `at` now, and empty.
    fn log_block(&mut self, number: u64, at: FileOffset) {
        self.records.fill(COUNTS, at, 1 << self.bits, 0);
        self.records.bytes(COUNTS_TABLE, self.table_at + number * 8, &at.0.to_be_bytes());
    }

    /// Makes the table `entries` long and has it begin with `cluster`. All of it is written by the next round.
    pub fn move_table(&mut self, entries: u64, cluster: HostCluster) {
        self.records.leave_out();
        self.table.resize(index(entries), 0);
        self.table_at = cluster.start(self.bits);
        self.dirty_table = (0..(entries * 8).div_ceil(self.slices.size())).collect();
    }

    /// Makes a cluster the block of this number.
    pub fn place_block(&mut self, number: u64, cluster: HostCluster) {
        let at = cluster.start(self.bits);
        if let Some(entry) = self.table.get_mut(index(number)) {
            *entry = at.0;
            self.slices.begin_table(at);
            self.dirty_table.insert(number * 8 / self.slices.size());
            self.log_block(number, at);
        }
    }

    /// Clusters of tables have their reference; the blocks that count them are here or fresh.
    pub fn count_table(&mut self, first: HostCluster, count: u64) {
        for cluster in first.run(count) {
            if self.need(cluster, 1).is_ok() {
                self.raise(cluster);
            }
        }
    }

    /// Pieces that a round would write, and places freed.
    pub fn dirty(&self) -> usize {
        self.slices.dirty() + self.dirty_table.len() + self.losses.len()
    }

    /// Begins a round.
    pub fn seal(&mut self) -> Changes {
        self.sealed = Sealed {
            raised: std::mem::take(&mut self.raised),
            lowered: std::mem::take(&mut self.lowered),
            losses: std::mem::take(&mut self.losses),
            table: std::mem::take(&mut self.dirty_table),
        };
        let lost = self.lost();
        let mut changes = Changes::default();
        let sealed = self.slices.seal();
        for mut write in sealed.slices {
            if self.sealed.lowered.contains(&write.at) {
                changes.lowered.push(write.clone());
            }
            if self.sealed.raised.contains(&write.at) {
                self.give_back(&mut write, &lost);
                changes.raised.push(write);
            }
        }
        for mut block in sealed.fresh {
            let end = block.at + (1 << self.bits);
            for &at in self.sealed.lowered.range(block.at..end) {
                let from = index(at - block.at);
                let bytes = block.bytes.get(from..from + index(self.slices.size())).unwrap_or_default();
                changes.lowered.push(MetaWrite { at, bytes: bytes.to_vec() });
            }
            self.give_back(&mut block, &lost);
            changes.raised.push(block);
        }
        changes.table = self.sealed.table.iter().map(|&slice| self.table_slice(slice)).collect();
        changes
    }

    /// The clusters that lose a reference in this round, by the slice that counts them.
    fn lost(&self) -> HashMap<FileOffset, Vec<u64>> {
        let mut lost: HashMap<FileOffset, Vec<u64>> = HashMap::new();
        for loss in &self.sealed.losses {
            for cluster in loss.first.run(loss.count) {
                if let Cover::Counted(at) = self.cover(cluster) {
                    lost.entry(at).or_default().push(self.within(cluster));
                }
            }
        }
        lost
    }

    /// Turns the newest counts of slices into those before any of this round was freed.
    fn give_back(&self, write: &mut MetaWrite, lost: &HashMap<FileOffset, Vec<u64>>) {
        let mut at = write.at;
        for bytes in write.bytes.chunks_mut(index(self.slices.size())) {
            for &within in lost.get(&at).into_iter().flatten() {
                let count = get(bytes, self.order, within);
                set(bytes, self.order, within, count.saturating_add(1));
            }
            at += self.slices.size();
        }
    }

    fn table_slice(&self, slice: u64) -> MetaWrite {
        let at = slice * self.slices.size();
        let entries = index(self.slices.size() / 8);
        let first = index(at / 8);
        let values = (0..entries).map(|by| self.table.get(first + by).copied().unwrap_or(0));
        MetaWrite { at: self.table_at + at, bytes: values.flat_map(u64::to_be_bytes).collect() }
    }

    /// Ends a round; if it is durable, with what it has freed.
    pub fn settled(&mut self, durable: bool) -> Vec<Loss> {
        self.slices.settled(durable);
        let sealed = std::mem::take(&mut self.sealed);
        if durable {
            return sealed.losses;
        }
        self.raised.extend(sealed.raised);
        self.lowered.extend(sealed.lowered);
        self.losses.extend(sealed.losses);
        self.dirty_table.extend(sealed.table);
        Vec::new()
    }
}

/// Refcount `number` of a block ("Refcount block entry"): those of less than a byte begin at the least significant bit.
fn get(bytes: &[u8], order: u32, number: u64) -> u64 {
    let number = index(number);
    match order {
        0..=2 => {
            let per_byte = 8usize >> order;
            let byte = bytes.get(number / per_byte).copied().unwrap_or(0);
            let shift = (number % per_byte) << order;
            u64::from((byte >> shift) & mask(order))
        }
        6 => entry(bytes, number),
        _ => {
            let width = 1usize << (order - 3);
            let at = number * width;
            let found = bytes.get(at..at + width).unwrap_or_default();
            found.iter().fold(0, |count, &byte| (count << 8) | u64::from(byte))
        }
    }
}

fn set(bytes: &mut [u8], order: u32, number: u64, count: u64) {
    let number = index(number);
    match order {
        0..=2 => {
            let per_byte = 8usize >> order;
            let shift = (number % per_byte) << order;
            let [.., low] = count.to_be_bytes();
            if let Some(byte) = bytes.get_mut(number / per_byte) {
                *byte = (*byte & !(mask(order) << shift)) | ((low & mask(order)) << shift);
            }
        }
        6 => set_entry(bytes, number, count),
        _ => {
            let width = 1usize << (order - 3);
            let at = number * width;
            let all = count.to_be_bytes();
            let low = all.get(8usize - width..).unwrap_or_default();
            if let Some(place) = bytes.get_mut(at..at + width) {
                place.copy_from_slice(low);
            }
        }
    }
}

/// The bits of a refcount of less than a byte.
fn mask(order: u32) -> u8 {
    match order {
        0 => 1,
        1 => 3,
        _ => 15,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn refcounts_of_every_width_read_back() {
        for order in 0..=6 {
            let mut bytes = vec![0; 64];
            let count = |number: u64| number % 2;
            (0..8).for_each(|number| set(&mut bytes, order, number, count(number)));
            (0..8).for_each(|number| assert_eq!(get(&bytes, order, number), count(number), "{order}"));
        }
        let mut bytes = vec![0; 8];
        set(&mut bytes, 4, 1, 0x0102);
        assert_eq!(bytes, [0, 0, 1, 2, 0, 0, 0, 0]);
        set(&mut bytes, 1, 5, 2);
        assert_eq!(bytes[1], 0b1000);
    }

    #[test]
    fn what_is_freed_is_written_last() {
        let mut counts = Counts::new(4, 16, vec![65536], FileOffset(131_072));
        assert!(counts.need(HostCluster(0), 10).is_err());
        let mut block = vec![0; 4096];
        (0..5).for_each(|number| set(&mut block, 4, number, 1));
        counts.slices().loaded(FileOffset(65536), &block);
        counts.need(HostCluster(0), 10).unwrap();
        counts.raise(HostCluster(7));
        counts.lose(Loss { first: HostCluster(3), count: 2, fate: Fate::Leaked });
        let changes = counts.seal();
        let of = |write: &MetaWrite| (0..8).map(|number| get(&write.bytes, 4, number)).collect::<Vec<u64>>();
        assert_eq!(of(&changes.raised[0]), [1, 1, 1, 1, 1, 0, 0, 1]);
        assert_eq!(of(&changes.lowered[0]), [1, 1, 1, 0, 0, 0, 0, 1]);
        assert_eq!(counts.settled(false), []);
        let again = counts.seal();
        assert_eq!(of(&again.raised[0]), [1, 1, 1, 1, 1, 0, 0, 1]);
        assert_eq!(counts.settled(true).len(), 1);
        assert_eq!(counts.dirty(), 0);
    }
}
