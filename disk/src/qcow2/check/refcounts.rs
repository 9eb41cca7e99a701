//! The refcounts that an image keeps ("Host cluster management"), and their comparison with the references there are.
//!
//! Knows nothing of where references come from. The blocks pass through one at a time; of the table, 8 MiB at most,
//! the places are kept.

use super::Findings;
use super::ledger::Ledger;
use super::shape::{Shape, Table, read_entries, read_padded};
use super::walk::Walk;
use crate::qcow2::cluster::{HostCluster, run};
use crate::qcow2::layout::{index, length};
use crate::{FileOffset, FileRange, ImageError, Severity, Source};

/// Bits of a refcount table entry that must be zero.
const RESERVED: u64 = 0x1ff;

/// How wide a refcount is: `1 << order` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width(u32);

impl Width {
    /// Of an order between 0 and 6.
    pub fn of_order(order: u32) -> Width {
        Width(order.min(6))
    }

    /// The largest refcount.
    pub fn max(self) -> u64 {
        u64::MAX >> (64 - (1 << self.0))
    }

    /// Number of refcounts in a block of `len` bytes.
    pub fn in_block(self, len: u64) -> u64 {
        len * 8 >> self.0
    }

    /// A refcount of a block.
    pub fn get(self, block: &[u8], number: u64) -> u64 {
        if self.0 < 3 {
            let (byte, shift) = self.within_byte(number);
            return block.get(byte).map_or(0, |&byte| u64::from(byte) >> shift & self.max());
        }
        let bytes = block.get(self.bytes(number)).unwrap_or_default();
        bytes.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }

    /// Changes a refcount of a block.
    pub fn set(self, block: &mut [u8], number: u64, value: u64) {
        if self.0 < 3 {
            let (at, shift) = self.within_byte(number);
            let [.., value] = (value & self.max()).to_be_bytes();
            let [.., mask] = self.max().to_be_bytes();
            if let Some(byte) = block.get_mut(at) {
                *byte = *byte & !(mask << shift) | value << shift;
            }
        } else if let Some(bytes) = block.get_mut(self.bytes(number)) {
            let value = value.to_be_bytes();
            let len = bytes.len();
            bytes.copy_from_slice(value.get(8 - len..).unwrap_or_default());
        }
    }

    /// "Refcount block entry": of those that share a byte, the first has the lowest bits.
    fn within_byte(self, number: u64) -> (usize, u64) {
        let bit = number << self.0;
        (index(bit / 8), bit % 8)
    }

    fn bytes(self, number: u64) -> std::ops::Range<usize> {
        let len = 1 << (self.0 - 3);
        let at = index(number) * len;
        at..at + len
    }
}

/// Where an image keeps its refcounts.
#[derive(Debug)]
pub struct Refcounts {
    /// How wide they are.
    pub width: Width,
    /// The place of each block, up to the last; zero where there is none that can be read.
    pub blocks: Vec<FileOffset>,
    /// The space that the refcounts themselves take.
    pub taken: Vec<FileRange>,
    /// The table or a block cannot be repaired in place.
    pub replace: bool,
}

impl Refcounts {
    /// Reads the table, and counts it and its blocks.
    pub(super) fn read(source: &mut dyn Source, walk: &mut Walk<'_>) -> Result<Refcounts, ImageError> {
        let shape = walk.shape;
        let width = Width::of_order(shape.header.raw.refcount_order.get());
        let mut refcounts = Refcounts { width, blocks: Vec::new(), taken: Vec::new(), replace: false };
        let table = match &shape.refcounts {
            Ok(table) => *table,
            Err(why) => {
                walk.findings.add(Severity::Repairable, why.at.unwrap_or_default(), why.what.clone());
                refcounts.replace = true;
                return Ok(refcounts);
            }
        };
        if walk.refer_replaceable(table.at, table.len(), "the refcount table")? {
            refcounts.taken.push(FileRange { at: table.at, len: table.len() });
        } else {
            refcounts.replace = true;
        }
        let mut first = 0;
        while let Some(entries) = read_entries(source, table, first)? {
            for (number, bits) in (first..).zip(entries).filter(|&(_, bits)| bits != 0) {
                refcounts.block(walk, table.entry_at(number), number, bits)?;
            }
            first = first.saturating_add(Table::PIECE);
        }
        let taken = refcounts.taken.iter();
        let mut clusters = taken.flat_map(|&range| shape.clusters_of(range));
        refcounts.replace |= clusters.any(|cluster| walk.ledger.references(cluster) > 1);
        Ok(refcounts)
    }

    /// The entry at byte `at` of the table.
    fn block(&mut self, walk: &mut Walk<'_>, at: FileOffset, number: u64, bits: u64) -> Result<(), ImageError> {
        let place = FileOffset(bits);
        if bits & RESERVED != 0 || !walk.shape.is_aligned(place) {
            let what = format!("the refcount table entry {bits:#x} is not the place of a block");
            walk.findings.add(Severity::Repairable, at, what);
            self.replace = true;
        } else if walk.ledger.references(walk.shape.cluster_of(place)) > 0 {
            // Not taken for what it claims to be: it would be read as often as the table has entries.
            walk.findings.add(Severity::Repairable, at, "something else is where a block of refcounts is");
            self.replace = true;
        } else if walk.refer_replaceable(place, walk.shape.cluster, "a block of refcounts")? {
            self.blocks.resize(index(number), FileOffset(0));
            self.blocks.push(place);
            self.taken.push(FileRange { at: place, len: walk.shape.cluster });
        } else {
            self.replace = true;
        }
        Ok(())
    }

    /// The next block, from `number` on, that is there or should be: a sparse file may have room for any number of
    /// others.
    pub fn next_block(&self, ledger: &Ledger, per_block: u64, number: u64) -> Option<u64> {
        if number < length(self.blocks.len()) {
            return Some(number);
        }
        ledger.next_in_use(HostCluster(number.saturating_mul(per_block))).map(|cluster| cluster.0 / per_block)
    }

    /// Reads a block; false, and all zeroes, where there is none.
    pub fn read_block(&self, source: &mut dyn Source, number: u64, block: &mut [u8]) -> Result<bool, ImageError> {
        block.fill(0);
        match self.blocks.get(index(number)) {
            None | Some(FileOffset(0)) => Ok(false),
            Some(&at) => read_padded(source, at, block).map(|()| true),
        }
    }
}

/// The result of comparing refcounts with references.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Compared {
    /// Clusters that two places of the disk have though the image does not say so.
    pub(super) shared: u64,
    /// A cluster has more references than a refcount can say.
    pub(super) too_many: bool,
}

/// Compares the refcounts with the references.
pub(super) fn compare(
    source: &mut dyn Source,
    shape: &Shape,
    refcounts: &mut Refcounts,
    ledger: &mut Ledger,
    findings: &mut Findings,
) -> Result<Compared, ImageError> {
    let per_block = refcounts.width.in_block(shape.cluster);
    let end = shape.end().max(ledger.end());
    let mut wrong = Run::default();
    let mut compared = Compared::default();
    let mut block = shape.piece();
    let mut next = 0;
    while let Some(number) = refcounts.next_block(ledger, per_block, next) {
        next = number + 1;
        let first = HostCluster(number.saturating_mul(per_block));
        let there = refcounts.read_block(source, number, &mut block)?;
        if block.iter().all(|&byte| byte == 0)
            && ledger.next_in_use(first).is_none_or(|used| used.0 / per_block > number)
        {
            continue;
        }
        for (place, cluster) in (0..).zip(run(first..end.min(HostCluster(first.0.saturating_add(per_block))))) {
            let kept = refcounts.width.get(&block, place);
            let counted = ledger.references(cluster);
            if kept == 1 {
                ledger.set_single(cluster);
            }
            if kept < counted {
                refcounts.replace |= !there;
                if ledger.is_shared(cluster) {
                    compared.shared += 1;
                    let what = "two places of the disk have the same cluster: one of them reads the other's content";
                    findings.add(Severity::Damage, shape.offset_of(cluster), what);
                }
            }
            if counted > refcounts.width.max() || counted == Ledger::COUNT_MAX {
                compared.too_many = true;
                let what = format!("the cluster is referred to {counted} times, more than can be counted");
                findings.add(Severity::Damage, shape.offset_of(cluster), what);
            }
            wrong.take(shape, findings, cluster, kept, counted);
        }
    }
    wrong.end(shape, findings);
    Ok(compared)
}

/// Neighbours that are wrong in the same way, reported as one problem.
#[derive(Default)]
struct Run {
    first: HostCluster,
    clusters: u64,
    kept: u64,
    counted: u64,
}

impl Run {
    fn take(&mut self, shape: &Shape, findings: &mut Findings, cluster: HostCluster, kept: u64, counted: u64) {
        let next = self.clusters > 0 && self.first + self.clusters == cluster;
        if next && self.kept == kept && self.counted == counted {
            self.clusters += 1;
            return;
        }
        self.end(shape, findings);
        if kept != counted {
            *self = Run { first: cluster, clusters: 1, kept, counted };
        }
    }

    fn end(&mut self, shape: &Shape, findings: &mut Findings) {
        let Run { first, clusters, kept, counted } = std::mem::take(self);
        let number = if clusters == 1 { "1 cluster".to_owned() } else { format!("{clusters} clusters") };
        let (severity, what) = match (clusters, kept > counted) {
            (0, _) => return,
            (_, true) => (Severity::Leak, format!("{number} with refcount {kept} and {counted} references")),
            (_, false) => (Severity::Repairable, format!("{number} with refcount {kept} but {counted} references")),
        };
        findings.add(severity, shape.offset_of(first), what);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// Scope: all seven widths, each place of a block of 16 bytes.
    #[test]
    fn a_refcount_of_any_width_is_set_without_its_neighbours() {
        for width in (0..=6).map(Width::of_order) {
            for place in 0..width.in_block(16) {
                let mut block = [0; 16];
                width.set(&mut block, place, width.max());
                let found: Vec<u64> = (0..width.in_block(16)).map(|place| width.get(&block, place)).collect();
                let expected = (0..width.in_block(16)).map(|other| if other == place { width.max() } else { 0 });
                assert_eq!(found, expected.collect::<Vec<_>>(), "{width:?} at {place}");
                width.set(&mut block, place, 0);
                assert_eq!(block, [0; 16]);
            }
        }
    }

    #[test]
    fn the_first_of_a_byte_has_the_lowest_bits() {
        assert_eq!((0..4).map(|place| Width(1).get(&[0b11_10_01_00], place)).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(Width(4).get(&[0, 0, 1, 2], 1), 0x102);
    }
}
