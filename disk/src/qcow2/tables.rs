//! L1 and L2 tables: what the image says of each cluster of the disk.
//!
//! The L1 table is in memory, the L2 tables in a bounded cache. Knows nothing of free space or refcounts, nor of what
//! makes an entry sound. Keeps: which entries of a slice in the cache were found to be.

use std::collections::BTreeSet;

use super::batch::{L1, L2};
use super::cluster::{GuestCluster, HostCluster, run};
use super::entry::{Entry, EntryFormat, RawEntry};
use super::layout::{COPIED, OFFSET_MASK, index, length};
use super::slices::Slices;
use crate::format::{MetaWrite, Wait};
use crate::{FileOffset, Records};

/// Bytes of L2 tables that are kept: they are about 64 GiB of disk with clusters of 64 KiB. Entries that are folded
/// into the map of the disk are not looked up again.
pub const BUDGET: u64 = 8 << 20;

/// Entries that are checked at once, when one of them is first looked at. Few: a slice has hundreds, of which a random
/// read needs one. Not too few: what is done to neighbouring clusters in one go ends where they do.
const PIECE: usize = 32;

/// Where the entry of a cluster stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spot {
    /// Offset in the file of the slice.
    pub slice: FileOffset,
    /// Number of the entry in it.
    pub index: usize,
    /// Its number in its piece of the slice.
    pub within: usize,
    /// Entries from there to the end of its piece of the slice.
    pub left: u64,
}

/// The tables of one image.
#[derive(Debug)]
pub struct Tables {
    format: EntryFormat,
    l1: Vec<u64>,
    l1_at: FileOffset,
    slices: Slices,
    /// By slice of the L1 table.
    dirty_l1: BTreeSet<u64>,
    sealed_l1: BTreeSet<u64>,
    records: Records,
}

/// The writes of tables in a round.
#[derive(Debug)]
pub struct Changes {
    /// L2 tables that nothing durable refers to, unless a round has failed since they were made.
    pub fresh: Vec<MetaWrite>,
    /// Slices of other L2 tables.
    pub l2: Vec<MetaWrite>,
    /// Slices of the L1 table.
    pub l1: Vec<MetaWrite>,
}

impl Tables {
    /// The tables of an image with such entries, whose L1 table stands at `l1_at`.
    pub fn new(format: EntryFormat, l1: Vec<u64>, l1_at: FileOffset) -> Tables {
        let slices = Slices::new(1 << format.cluster_bits, BUDGET);
        Tables {
            format,
            l1,
            l1_at,
            slices,
            dirty_l1: BTreeSet::new(),
            sealed_l1: BTreeSet::new(),
            records: Records::default(),
        }
    }

    /// The cache, for pins and loads.
    pub fn slices(&mut self) -> &mut Slices {
        &mut self.slices
    }

    /// How the entries of L2 tables stand there.
    pub fn format(&self) -> EntryFormat {
        self.format
    }

    /// Clusters that one L2 table is about, as a power of two.
    fn table_bits(&self) -> u32 {
        self.format.in_table().trailing_zeros()
    }

    /// The number of the L1 entry that is about a cluster.
    fn table_of(&self, cluster: GuestCluster) -> u64 {
        cluster.0 >> self.table_bits()
    }

    /// Clusters from `cluster` to the end of what its L1 entry is about.
    pub fn left_in_table(&self, cluster: GuestCluster) -> u64 {
        let entries = 1u64 << self.table_bits();
        entries - cluster.0 % entries
    }

    /// Whether the L1 table has an entry for a cluster.
    pub fn covers(&self, cluster: GuestCluster) -> bool {
        index(self.table_of(cluster)) < self.l1.len()
    }

    /// Whether there is an L2 table for a cluster.
    pub fn has_table(&self, cluster: GuestCluster) -> bool {
        self.l1.get(index(self.table_of(cluster))).is_some_and(|entry| entry & OFFSET_MASK != 0)
    }

    /// The L1 entry that is about a cluster: its offset in the file, and what stands there.
    pub fn first_level(&self, cluster: GuestCluster) -> (FileOffset, u64) {
        let number = self.table_of(cluster);
        let raw = self.l1.get(index(number)).copied().unwrap_or(0);
        (self.l1_at + number * 8, raw)
    }

    /// The whole L2 table at `at`, slice by slice.
    pub fn whole(&mut self, at: FileOffset) -> Result<Vec<Vec<u8>>, Wait> {
        let slices: Vec<FileOffset> = self.slices_of(at).collect();
        // All of them first: taking one in may push another one out.
        slices.iter().try_for_each(|&slice| self.slices.need(slice))?;
        Ok(slices.iter().filter_map(|&slice| self.slices.bytes(slice)).map(<[u8]>::to_vec).collect())
    }

    fn slices_of(&self, at: FileOffset) -> impl Iterator<Item = FileOffset> + use<> {
        let size = self.slices.size();
        (0..(1u64 << self.format.cluster_bits) / size).map(move |number| at + number * size)
    }

    /// Gives a cluster an L2 table of its own at offset `at` of the file, with the [content](Tables::whole) of another.
    /// It is not logged: written again, it would refer to clusters that were freed later, and are not counted.
    pub fn copy_table(&mut self, cluster: GuestCluster, at: FileOffset, content: &[Vec<u8>]) {
        self.add_table(cluster, at);
        for (slice, bytes) in self.slices_of(at).zip(content) {
            // A new table is never loaded.
            if self.slices.need(slice).is_ok() {
                if let Some(place) = self.slices.change(slice).filter(|place| place.len() == bytes.len()) {
                    place.copy_from_slice(bytes);
                }
            }
        }
        self.records.leave_out();
    }

    /// Where the entry of a cluster stands; `None` if there is no L2 table for it.
    pub fn spot(&mut self, cluster: GuestCluster) -> Result<Option<Spot>, Wait> {
        let l1 = self.l1.get(index(self.table_of(cluster))).copied().unwrap_or(0);
        let table = l1 & OFFSET_MASK;
        if table == 0 {
            return Ok(None);
        }
        let per_slice = self.slices.size() / self.format.size();
        let within = cluster.0 % (1 << self.table_bits());
        let slice = FileOffset(table) + within / per_slice * self.slices.size();
        self.slices.need(slice)?;
        let number = index(within % per_slice);
        let within = number % PIECE;
        let left = length(PIECE - within);
        Ok(Some(Spot { slice, index: number, within, left }))
    }

    /// The raw entries of the piece around `spot`, if they were not found to be sound yet.
    pub fn unchecked(&self, spot: Spot) -> Option<impl Iterator<Item = RawEntry> + '_> {
        let piece = spot.index / PIECE;
        let bytes = self.slices.unmarked(spot.slice, piece)?;
        let entries = self.format.entries(bytes).skip(piece * PIECE).take(PIECE);
        Some(entries.map(|(_, raw)| raw))
    }

    /// Whether an entry that is here refers to one of these clusters of the file, which are in order.
    pub fn refer_to(&self, clusters: &[HostCluster]) -> bool {
        let (Some(&first), Some(&last), false) = (clusters.first(), clusters.last(), self.format.external) else {
            return false;
        };
        let is_one = |raw: RawEntry| {
            let places = self.format.decode(raw).places(self.format.cluster_bits);
            let near = places.start <= last && places.end > first;
            near && run(places).any(|cluster| clusters.binary_search(&cluster).is_ok())
        };
        self.slices.all().any(|bytes| self.format.entries(bytes).any(|(_, raw)| is_one(raw)))
    }

    /// Offset in the file of the entry at `spot`.
    pub fn entry_at(&self, spot: Spot) -> FileOffset {
        spot.slice + length(spot.index) * self.format.size()
    }

    /// They are sound.
    pub fn found_sound(&mut self, spot: Spot) {
        self.slices.mark(spot.slice, spot.index / PIECE);
    }

    /// The entry `by` clusters behind the one at `spot`, in the same slice.
    pub fn entry(&self, spot: Spot, by: u64) -> Entry {
        let bytes = self.slices.bytes(spot.slice).unwrap_or_default();
        self.format.decode(self.format.read(bytes, spot.index + index(by)))
    }

    /// Changes that entry.
    pub fn set(&mut self, spot: Spot, by: u64, new: Entry) {
        debug_assert!(self.slices.bytes(spot.slice).is_some(), "an entry is changed in a slice that is not here");
        if let Some(bytes) = self.slices.change(spot.slice) {
            let spot = Spot { index: spot.index + index(by), ..spot };
            let raw = self.format.encode(new);
            self.format.write(bytes, spot.index, raw);
            self.records.bytes(L2, self.entry_at(spot), &self.format.bytes(raw));
        }
    }

    /// Gives a cluster an L2 table of its own, an empty one, at offset `at` of the file.
    pub fn add_table(&mut self, cluster: GuestCluster, at: FileOffset) {
        let number = self.table_of(cluster);
        if let Some(entry) = self.l1.get_mut(index(number)) {
            *entry = at.0 | COPIED;
            let raw = *entry;
            self.slices.begin_table(at);
            self.dirty_l1.insert(number * 8 / self.slices.size());
            self.records.fill(L2, at, 1 << self.format.cluster_bits, 0);
            self.records.bytes(L1, self.l1_at + number * 8, &raw.to_be_bytes());
        }
    }

    /// The changes that are to be logged.
    pub fn records(&mut self) -> &mut Records {
        &mut self.records
    }

    /// Makes the L1 table `entries` long and has it stand at `at`. All of it is written by the next round.
    pub fn grow(&mut self, entries: u64, at: FileOffset) {
        self.records.leave_out();
        self.l1.resize(index(entries).max(self.l1.len()), 0);
        self.l1_at = at;
        self.dirty_l1.extend(0..(entries * 8).div_ceil(self.slices.size()));
    }

    /// Entries of the L1 table, and where it stands.
    pub fn l1(&self) -> (u64, FileOffset) {
        (super::layout::length(self.l1.len()), self.l1_at)
    }

    /// Whether there is an L2 table for anything behind the first `clusters` of the disk, other than the table of the
    /// last one.
    pub fn reach_behind(&self, clusters: u64) -> bool {
        let first = clusters.div_ceil(1 << self.table_bits());
        self.l1.iter().skip(index(first)).any(|entry| entry & OFFSET_MASK != 0)
    }

    /// Offsets of the L2 tables.
    pub fn places(&self) -> impl Iterator<Item = FileOffset> {
        self.l1.iter().map(|entry| entry & OFFSET_MASK).filter(|&at| at != 0).map(FileOffset)
    }

    /// Pieces that a round would write.
    pub fn dirty(&self) -> usize {
        self.slices.dirty() + self.dirty_l1.len()
    }

    /// Begins a round.
    pub fn seal(&mut self) -> Changes {
        let changes = self.slices.seal();
        self.sealed_l1 = std::mem::take(&mut self.dirty_l1);
        let l1 = self.sealed_l1.iter().map(|&slice| self.l1_slice(slice)).collect();
        Changes { fresh: changes.fresh, l2: changes.slices, l1 }
    }

    fn l1_slice(&self, slice: u64) -> MetaWrite {
        let at = slice * self.slices.size();
        let entries = self.slices.size() / 8;
        let first = index(slice * entries);
        let values = (0..index(entries)).map(|by| self.l1.get(first + by).copied().unwrap_or(0));
        MetaWrite { at: self.l1_at + at, bytes: values.flat_map(u64::to_be_bytes).collect() }
    }

    /// Ends a round; tables that it did not make durable are dirty again.
    pub fn settled(&mut self, durable: bool) {
        self.slices.settled(durable);
        let sealed = std::mem::take(&mut self.sealed_l1);
        if !durable {
            self.dirty_l1.extend(sealed);
        }
    }
}
