//! The themes of workloads: the sizes of their disks, their operations, and the places that they touch.
//!
//! Knows nothing about images. Invariant: a workload stays within [`Theme::reach`], and uses sectors after the old end
//! of a disk only after a growth.

use std::ops::Range;

use crate::cluster::{CLUSTER, CLUSTER_SECTORS};
use crate::random::Random;
use crate::sector::PARTS;
use crate::workload::{Durable, Op, Parts, Sectors, Step};

/// Sectors of a block. The workloads are about two whole blocks, and one that the disk's end cuts off.
pub const BLOCK: u64 = 1024;
/// Size of the simulated disks in sectors.
pub const DISK: u64 = 2 * BLOCK + BLOCK / 2;
/// Size of a disk that grows: its end cuts off a qcow2 cluster, too.
const GROWING: u64 = DISK - CLUSTER_SECTORS / 2;
/// Size of a grown disk with a qcow2 image: its L1 table no longer fits its cluster.
const GROWN: u64 = (CLUSTER / 8 + 1) * CLUSTER / 8 * CLUSTER_SECTORS;
/// Size of the disk of a chain: a whole chunk of a merge, and one that the disk's end cuts off, as well as a block and
/// a cluster.
const CHAIN: u64 = CHUNK + BLOCK / 2 - CLUSTER_SECTORS / 2;

/// Verbs that are explored without other verbs in exhaustive workloads.
const ALONE: [Step; 5] = [Step::Rebase, Step::Flatten, Step::Relink, Step::Clone, Step::Revert];

/// Maximum length of exhaustive workloads with rare operations.
const RARE_UP_TO: u32 = 2;

/// The theme of exhaustive and random workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Theme {
    /// A single image, or a child that is never merged.
    Image,
    /// An image whose disk grows.
    Growing,
    /// A chain, with verbs on it.
    Chain,
}

impl Theme {
    /// Size of its disks in sectors.
    pub fn sectors(self) -> u64 {
        match self {
            Theme::Image => DISK,
            Theme::Growing => GROWING,
            Theme::Chain => CHAIN,
        }
    }

    /// Size of its disks in sectors after they have grown.
    pub fn grown(self) -> u64 {
        match self {
            Theme::Image => DISK,
            Theme::Growing => GROWN,
            Theme::Chain => CHAIN + BLOCK,
        }
    }

    /// The ranges that workloads touch, grown or not: the initial disk with a block after it, and the last block.
    pub fn reach(self) -> [Range<u64>; 2] {
        let near = (self.sectors() + BLOCK).min(self.grown());
        [0..near, (self.grown() - BLOCK).max(near)..self.grown()]
    }

    /// The operations of exhaustive workloads.
    pub fn alphabet(self) -> Vec<Op> {
        match self {
            Theme::Image => image_alphabet(),
            Theme::Growing => growing_alphabet(),
            Theme::Chain => chain_alphabet(),
        }
    }

    /// Additional operations of short workloads: combined with one other, they reach everything new.
    pub fn rare(self) -> Vec<Op> {
        let kept = |at, count| Op::ZeroKept(Sectors { at, count }, Durable::ByFlush);
        // Within a sector of the first write; and from within its last sector to the next one.
        let within = Op::Patch(Parts { at: 1, count: 2 }, Durable::ByFlush);
        let across = |at: u64| Op::Patch(Parts { at: at * PARTS + 3, count: 6 }, Durable::AtOnce);
        match self {
            Theme::Image => vec![kept(2, 3), within, across(3), Op::Chain(Step::Copy)],
            Theme::Growing => vec![kept(2, 4), within, across(3), Op::Chain(Step::Copy)],
            Theme::Chain => {
                [vec![kept(CHUNK - 1, 2), within, across(CHUNK - 1)], ALONE.map(Op::Chain).to_vec()].concat()
            }
        }
    }

    /// All workloads of exactly `len` operations of the alphabet that belong to the theme.
    pub fn every(self, len: u32) -> impl Iterator<Item = Vec<Op>> {
        let mut letters = self.alphabet();
        if len <= RARE_UP_TO {
            letters.append(&mut self.rare());
        }
        let count = letters.len();
        let workload = move |number: usize| {
            let mut rest = number;
            let mut ops = Vec::new();
            for _ in 0..len {
                ops.push(letters[rest % count]);
                rest /= count;
            }
            ops
        };
        (0..count.pow(len)).map(workload).filter(move |ops| self.is_about(ops))
    }

    /// A chain without verbs is an image, and a disk's end only matters if it grows.
    fn is_about(self, ops: &[Op]) -> bool {
        let first_step = ops.iter().find(|op| matches!(op, Op::Chain(_)));
        let done_to = self != Theme::Chain || first_step.is_some_and(|step| *step != Op::Chain(Step::Cancel));
        let grows = ops.iter().position(|op| *op == Op::Chain(Step::Grow));
        let behind = ops.iter().position(|op| !op.is_inside(self.sectors()));
        let nowhere = ops.iter().position(|op| op.within(self.sectors()).is_none());
        let seen = match (grows, behind) {
            (None, None) => true,
            // A chain that grows and is used as before is covered by `Growing`.
            (Some(_), None) => self != Theme::Chain,
            (grows, Some(_)) => grows.is_some_and(|grows| nowhere.is_none_or(|nowhere| grows < nowhere)),
        };
        // Combinations of these verbs with others are left to random workloads, which are faster.
        let steps = ops.iter().filter(|op| matches!(op, Op::Chain(_))).count();
        done_to && seen && (steps < 2 || !ops.iter().any(|op| op.is_alone()))
    }

    /// A random workload of `len` operations, mostly in a few places so that they interact.
    pub fn random(self, random: &mut Random, len: usize) -> Vec<Op> {
        let mut disk = Extent { old: self.sectors(), new: self.sectors() };
        let mut op = || {
            let op = match self {
                Theme::Image => guest_op(random, disk),
                Theme::Growing if random.below(16) == 0 => Op::Chain(Step::Grow),
                Theme::Growing => guest_op(random, disk),
                Theme::Chain => chain_op(random, disk),
            };
            if op == Op::Chain(Step::Grow) {
                disk.new = self.grown();
            }
            op
        };
        (0..len).map(|_| op()).collect()
    }
}

fn write(at: u64, count: u64) -> Op {
    Op::Write(Sectors { at, count }, Durable::ByFlush)
}

fn discard(at: u64, count: u64) -> Op {
    Op::Discard(Sectors { at, count })
}

/// All ways to touch a block that another operation touches, the next block, and the one that the disk's end cuts off.
fn image_alphabet() -> Vec<Op> {
    let sectors = |at, count| Sectors { at, count };
    vec![
        write(0, 1),
        write(3, 2),
        write(0, 4),
        write(BLOCK, 1),
        Op::Write(sectors(BLOCK - 1, 2), Durable::AtOnce),
        Op::Flush,
        discard(0, BLOCK),
        discard(0, 8),
        Op::Zero(sectors(2 * BLOCK, BLOCK / 2), Durable::ByFlush),
        Op::Zero(sectors(2, 3), Durable::ByFlush),
        Op::Read(sectors(0, 8)),
    ]
}

/// Parts of one cluster, of two, and of two L2 tables; clusters freed and reallocated; zeroes in parts of two; a write
/// across the old end, and one to the new end, whose tables were added by the growth.
fn growing_alphabet() -> Vec<Op> {
    vec![
        Op::Write(Sectors { at: GROWING - 1, count: 2 }, Durable::AtOnce),
        write(GROWN - 2, 2),
        write(0, 1),
        write(3, 2),
        Op::Write(Sectors { at: BLOCK - 1, count: 2 }, Durable::AtOnce),
        Op::Flush,
        discard(0, 8),
        Op::Zero(Sectors { at: 2, count: 3 }, Durable::ByFlush),
        Op::Chain(Step::Grow),
    ]
}

/// Verbs, and writes where the leaf has data, where its parent has, where both have, across the border of two chunks
/// and across the old end of the disk, and a block that is freed.
fn chain_alphabet() -> Vec<Op> {
    vec![
        Op::Chain(Step::Grow),
        Op::Write(Sectors { at: CHAIN - 1, count: 2 }, Durable::AtOnce),
        Op::Chain(Step::Merge),
        Op::Chain(Step::Snapshot),
        Op::Chain(Step::Cancel),
        write(0, 3),
        Op::Write(Sectors { at: CHUNK - 1, count: 2 }, Durable::AtOnce),
        Op::Flush,
        discard(0, BLOCK),
        Op::Read(Sectors { at: 0, count: 8 }),
    ]
}

/// Size in sectors of a chunk of a merge.
pub const CHUNK: u64 = 4096;

/// The initial and the current size of a disk.
#[derive(Clone, Copy)]
struct Extent {
    old: u64,
    new: u64,
}

impl Extent {
    /// The beginning of an operation: a block or, on a grown disk, also just before the old end or the last block.
    /// block.
    fn begin(self, random: &mut Random) -> u64 {
        let blocks = self.old.div_ceil(BLOCK);
        let places = if self.new > self.old { blocks + 2 } else { blocks };
        let place = random.below(places);
        match place.checked_sub(blocks) {
            None => place * BLOCK,
            Some(0) => self.old - 6,
            Some(_) => self.new - BLOCK,
        }
    }
}

fn chain_op(random: &mut Random, disk: Extent) -> Op {
    match random.below(25) {
        0 | 1 => Op::Chain(Step::Merge),
        2 => Op::Chain(Step::MergeBelow),
        3 => Op::Chain(Step::MergeAll),
        4 | 5 => Op::Chain(Step::Snapshot),
        6 => Op::Chain(Step::Cancel),
        7 => Op::Chain(Step::Grow),
        8 => Op::Chain(ALONE[random.index(ALONE.len())]),
        _ => guest_op(random, disk),
    }
}

fn guest_op(random: &mut Random, disk: Extent) -> Op {
    let count = 1 + random.below(4);
    let block = disk.begin(random);
    let at = match random.below(6) {
        0 => random.below((disk.old + BLOCK).min(disk.new)),
        1 => (block + BLOCK).min(disk.new) - count,
        _ => block + random.below(12),
    };
    let end = if at < disk.old + BLOCK { (disk.old + BLOCK).min(disk.new) } else { disk.new };
    let sectors = Sectors { at, count: count.min(end - at) };
    let block = Sectors { at: block, count: BLOCK.min(disk.new - block) };
    let durable = if random.below(6) == 0 { Durable::AtOnce } else { Durable::ByFlush };
    match random.below(20) {
        0..=9 => Op::Write(sectors, durable),
        10..=12 => Op::Flush,
        13 | 14 => Op::Discard(block),
        15 => Op::Discard(sectors),
        16 => Op::Zero(block, durable),
        17 if random.below(2) == 0 => Op::ZeroKept(sectors, durable),
        17 => Op::Zero(sectors, durable),
        _ => Op::Read(sectors),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::workload::parse;

    #[test]
    fn random_operations_lie_inside_the_disk() {
        let ops = Theme::Image.random(&mut Random::new(1), 10_000);
        assert!(ops.iter().all(|op| op.is_inside(DISK)));
        assert!(!Op::Read(Sectors { at: u64::MAX, count: 1 }).is_inside(DISK));
    }

    #[test]
    fn sectors_after_the_old_end_are_used_once_the_disk_has_grown() {
        for theme in [Theme::Growing, Theme::Chain] {
            let ops = theme.random(&mut Random::new(1), 10_000);
            let grows = ops.iter().position(|op| *op == Op::Chain(Step::Grow)).unwrap();
            let (before, after) = ops.split_at(grows);
            let reached = |op: &Op| {
                let op = op.sectors().range();
                op.is_empty() || theme.reach().iter().any(|part| part.start <= op.start && op.end <= part.end)
            };
            assert!(before.iter().all(|op| op.is_inside(theme.sectors())));
            assert!(after.iter().any(|op| op.sectors().at >= theme.sectors()));
            assert!(after.iter().any(|op| op.sectors().range().contains(&theme.sectors())));
            assert!(ops.iter().all(reached));
        }
    }

    #[test]
    fn a_chain_grows_only_where_something_is_written_behind_its_end() {
        let about = |text: &str| Theme::Chain.is_about(&parse(text).unwrap());
        assert!(about("grow W4605+2") && about("W4605+2 grow") && about("merge f"));
        assert!(!about("grow merge f") && !about("merge W4605+2") && !about("w5000+1 grow"));
    }

    #[test]
    fn every_workload_comes_once() {
        let all: std::collections::HashSet<_> = Theme::Image.every(2).collect();
        assert_eq!(all.len(), (Theme::Image.alphabet().len() + Theme::Image.rare().len()).pow(2));
    }
}
