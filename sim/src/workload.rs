//! What a simulated guest asks for: short programs that can be written on a command line.
//!
//! Sectors are the unit. `w8+2` writes two sectors from sector 8 on, `W8+2` the same durably (FUA), `z`/`Z` write
//! zeroes, `d` discards, `r` reads, `f` flushes. What is done to the chain meanwhile is a word: `snapshot`, `merge` (of
//! the leaf into its parent), `merge-below` (of the parent into its own), `merge-all`, `cancel`, `grow`.
//!
//! A guest asks for no more than its disk has: of a request that reaches behind the end only what lies before it is
//! asked for. Behind where the end was at first there is something once the disk has grown.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use disk::Operation;

use crate::qcow2::{CLUSTER, CLUSTER_SECTORS};
use crate::random::Random;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Write.
    Write(Sectors, Durable),
    /// Write zeroes, freeing space.
    Zero(Sectors, Durable),
    /// Discard.
    Discard(Sectors),
    /// Read, and compare with what is legal.
    Read(Sectors),
    /// Flush.
    Flush,
    /// Something that is done to the chain below the guest.
    Chain(Step),
}

/// What an administrator asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// The leaf becomes a parent, a new file the leaf.
    Snapshot,
    /// The leaf is merged into its parent.
    Merge,
    /// The leaf's parent is merged into its own.
    MergeBelow,
    /// All layers are merged into the lowest.
    MergeAll,
    /// The merge under way, if any, is given up.
    Cancel,
    /// The disk becomes larger.
    Grow,
}

const STEPS: [(Step, &str); 6] = [
    (Step::Snapshot, "snapshot"),
    (Step::Merge, "merge"),
    (Step::MergeBelow, "merge-below"),
    (Step::MergeAll, "merge-all"),
    (Step::Cancel, "cancel"),
    (Step::Grow, "grow"),
];

impl Step {
    /// Which layers it merges, of so many: the first of the sources, and the target.
    pub fn merged(self, layers: usize) -> Option<(usize, usize)> {
        let (from, into) = match self {
            Step::Merge => (0, 1),
            Step::MergeBelow => (1, 2),
            Step::MergeAll => (0, layers.checked_sub(1)?),
            Step::Snapshot | Step::Cancel | Step::Grow => return None,
        };
        (from < into && into < layers).then_some((from, into))
    }
}

/// A run of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sectors {
    /// The first.
    pub at: u64,
    /// How many.
    pub count: u64,
}

/// Whether a write is answered only when it survives power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Durable {
    /// Not before a flush.
    ByFlush,
    /// At once (FUA).
    AtOnce,
}

impl Sectors {
    /// As a range.
    pub fn range(self) -> Range<u64> {
        self.at..self.at + self.count
    }
}

impl Op {
    /// The sectors that it is about.
    pub fn sectors(self) -> Sectors {
        match self {
            Op::Write(sectors, _) | Op::Zero(sectors, _) | Op::Discard(sectors) | Op::Read(sectors) => sectors,
            Op::Flush | Op::Chain(_) => Sectors { at: 0, count: 0 },
        }
    }

    /// What it asks of the disk, if it is a guest's.
    pub fn operation(self) -> Option<Operation> {
        Some(match self {
            Op::Write(_, durable) => Operation::Write { durable: durable == Durable::AtOnce },
            Op::Zero(_, durable) => Operation::WriteZeroes { free: true, durable: durable == Durable::AtOnce },
            Op::Discard(_) => Operation::Discard,
            Op::Read(_) => Operation::Read,
            Op::Flush => Operation::Flush,
            Op::Chain(_) => return None,
        })
    }

    /// Whether a disk of so many sectors has those that it is about.
    pub fn is_inside(self, disk: u64) -> bool {
        let Sectors { at, count } = self.sectors();
        let some = count > 0 || matches!(self, Op::Flush | Op::Chain(_));
        some && at.checked_add(count).is_some_and(|end| end <= disk)
    }

    /// What of it a disk of so many sectors has, if anything.
    pub fn within(self, disk: u64) -> Option<Op> {
        let Sectors { at, count } = self.sectors();
        let sectors = Sectors { at, count: count.min(disk.saturating_sub(at)) };
        if count > 0 && sectors.count == 0 {
            return None;
        }
        Some(match self {
            Op::Write(_, durable) => Op::Write(sectors, durable),
            Op::Zero(_, durable) => Op::Zero(sectors, durable),
            Op::Discard(_) => Op::Discard(sectors),
            Op::Read(_) => Op::Read(sectors),
            Op::Flush | Op::Chain(_) => self,
        })
    }

    /// Whether an answer promises that what was answered before, or this write, survives.
    pub fn is_durable(self) -> bool {
        matches!(self, Op::Flush | Op::Write(_, Durable::AtOnce) | Op::Zero(_, Durable::AtOnce))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self {
            Op::Write(_, Durable::ByFlush) => 'w',
            Op::Write(_, Durable::AtOnce) => 'W',
            Op::Zero(_, Durable::ByFlush) => 'z',
            Op::Zero(_, Durable::AtOnce) => 'Z',
            Op::Discard(_) => 'd',
            Op::Read(_) => 'r',
            Op::Flush => return f.write_str("f"),
            Op::Chain(step) => {
                return f.write_str(STEPS.iter().find(|(other, _)| other == step).map_or("", |(_, name)| name));
            }
        };
        let Sectors { at, count } = self.sectors();
        write!(f, "{letter}{at}+{count}")
    }
}

/// A word that is not an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an operation; they look like w8+2, W8+2, z0+8, Z0+8, d0+1024, r0+8, f, snapshot, merge, cancel and grow"
)]
pub struct NotAnOp(pub String);

impl FromStr for Op {
    type Err = NotAnOp;

    fn from_str(text: &str) -> Result<Op, NotAnOp> {
        let wrong = || NotAnOp(text.into());
        if text == "f" {
            return Ok(Op::Flush);
        }
        if let Some((step, _)) = STEPS.iter().find(|(_, name)| *name == text) {
            return Ok(Op::Chain(*step));
        }
        let mut letters = text.chars();
        let letter = letters.next().ok_or_else(wrong)?;
        let (at, count) = letters.as_str().split_once('+').ok_or_else(wrong)?;
        let sectors = Sectors { at: at.parse().map_err(|_| wrong())?, count: count.parse().map_err(|_| wrong())? };
        match letter {
            'w' => Ok(Op::Write(sectors, Durable::ByFlush)),
            'W' => Ok(Op::Write(sectors, Durable::AtOnce)),
            'z' => Ok(Op::Zero(sectors, Durable::ByFlush)),
            'Z' => Ok(Op::Zero(sectors, Durable::AtOnce)),
            'd' => Ok(Op::Discard(sectors)),
            'r' => Ok(Op::Read(sectors)),
            _ => Err(wrong()),
        }
    }
}

/// Operations as text, separated by spaces.
pub fn parse(text: &str) -> Result<Vec<Op>, NotAnOp> {
    text.split_whitespace().map(str::parse).collect()
}

/// Operations as text, which [`parse`] takes back.
pub fn text(ops: &[Op]) -> String {
    ops.iter().map(Op::to_string).collect::<Vec<_>>().join(" ")
}

/// The blocks of 1024 sectors that the alphabet is about: two whole ones, and one that the disk's end cuts off.
pub const BLOCK: u64 = 1024;
/// Sectors of the simulated disks.
pub const DISK: u64 = 2 * BLOCK + BLOCK / 2;
/// Sectors of one that grows: its end cuts off a cluster of qcow2, too.
const GROWING: u64 = DISK - CLUSTER_SECTORS / 2;
/// Sectors of the disk of a qcow2 image that has grown: its L1 table no longer fits its cluster.
const GROWN: u64 = (CLUSTER / 8 + 1) * CLUSTER / 8 * CLUSTER_SECTORS;
/// Sectors of the disk of a chain: a whole grain of a merge, and one that the disk's end cuts off as it does a block and
/// a cluster.
const CHAIN: u64 = GRAIN + BLOCK / 2 - CLUSTER_SECTORS / 2;

/// What exhaustive and random workloads are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Theme {
    /// A single image, or a child that is never merged.
    Image,
    /// The same, and it becomes larger.
    Growing,
    /// A chain, with steps.
    Chain,
}

impl Theme {
    /// Sectors of the disks that it is about.
    pub fn sectors(self) -> u64 {
        match self {
            Theme::Image => DISK,
            Theme::Growing => GROWING,
            Theme::Chain => CHAIN,
        }
    }

    /// Sectors of the same when they have been made larger.
    pub fn grown(self) -> u64 {
        match self {
            Theme::Image => DISK,
            Theme::Growing => GROWN,
            Theme::Chain => CHAIN + BLOCK,
        }
    }

    /// Where workloads touch a disk, grown or not: what there was at first and a block behind it, and the last block.
    pub fn reach(self) -> [Range<u64>; 2] {
        let near = (self.sectors() + BLOCK).min(self.grown());
        [0..near, (self.grown() - BLOCK).max(near)..self.grown()]
    }

    /// The operations of which exhaustive workloads are made.
    pub fn alphabet(self) -> Vec<Op> {
        match self {
            Theme::Image => image_alphabet(),
            Theme::Growing => growing_alphabet(),
            Theme::Chain => chain_alphabet(),
        }
    }

    /// All workloads of exactly `len` operations of the alphabet that are about the theme.
    pub fn every(self, len: u32) -> impl Iterator<Item = Vec<Op>> {
        let letters = self.alphabet();
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

    /// Chains that nothing is done to are no other than images, and the end of a disk is where it is unless it grows.
    fn is_about(self, ops: &[Op]) -> bool {
        let first_step = ops.iter().find(|op| matches!(op, Op::Chain(_)));
        let done_to = self != Theme::Chain || first_step.is_some_and(|step| *step != Op::Chain(Step::Cancel));
        let grows = ops.iter().position(|op| *op == Op::Chain(Step::Grow));
        let behind = ops.iter().position(|op| !op.is_inside(self.sectors()));
        let nowhere = ops.iter().position(|op| op.within(self.sectors()).is_none());
        let seen = match (grows, behind) {
            (None, None) => true,
            // What a chain does that grows, and is used as before, `Growing` tells of its leaf.
            (Some(_), None) => self != Theme::Chain,
            (grows, Some(_)) => grows.is_some_and(|grows| nowhere.is_none_or(|nowhere| grows < nowhere)),
        };
        done_to && seen
    }

    /// A random workload of `len` operations, mostly in a few places so that they meet each other.
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

/// Every way to touch a block that another one is touching, the block beside it, and the one that the disk's end cuts
/// off.
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

/// Part of a cluster, of two, of two L2 tables; clusters given up and taken again; zeroes in parts of two; a write across
/// the old end, and one to the new end, whose place in the tables came with it.
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

/// Steps, and writes where the leaf has something, where its parent has, where both have, across the border of two
/// grains and across the old end of the disk, and a block that is given up.
fn chain_alphabet() -> Vec<Op> {
    vec![
        Op::Chain(Step::Grow),
        Op::Write(Sectors { at: CHAIN - 1, count: 2 }, Durable::AtOnce),
        Op::Chain(Step::Merge),
        Op::Chain(Step::Snapshot),
        Op::Chain(Step::Cancel),
        write(0, 3),
        Op::Write(Sectors { at: GRAIN - 1, count: 2 }, Durable::AtOnce),
        Op::Flush,
        discard(0, BLOCK),
        Op::Read(Sectors { at: 0, count: 8 }),
    ]
}

/// Sectors of a grain of a merge.
pub const GRAIN: u64 = 4096;

/// A disk as it was at first, and as it is.
#[derive(Clone, Copy)]
struct Extent {
    old: u64,
    new: u64,
}

impl Extent {
    /// Where something may begin: a block, or, once there is something behind, just before the old end and the last
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
    match random.below(24) {
        0 | 1 => Op::Chain(Step::Merge),
        2 => Op::Chain(Step::MergeBelow),
        3 => Op::Chain(Step::MergeAll),
        4 | 5 => Op::Chain(Step::Snapshot),
        6 => Op::Chain(Step::Cancel),
        7 => Op::Chain(Step::Grow),
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
    let sectors = Sectors { at, count: count.min(disk.new - at) };
    let block = Sectors { at: block, count: BLOCK.min(disk.new - block) };
    let durable = if random.below(6) == 0 { Durable::AtOnce } else { Durable::ByFlush };
    match random.below(20) {
        0..=9 => Op::Write(sectors, durable),
        10..=12 => Op::Flush,
        13 | 14 => Op::Discard(block),
        15 => Op::Discard(sectors),
        16 => Op::Zero(block, durable),
        17 => Op::Zero(sectors, durable),
        _ => Op::Read(sectors),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_workload_survives_being_written_down() {
        let ops = Theme::Chain.random(&mut Random::new(7), 100);
        assert_eq!(parse(&text(&ops)), Ok(ops));
        assert_eq!(parse("w1+"), Err(NotAnOp("w1+".into())));
    }

    #[test]
    fn random_operations_lie_inside_the_disk() {
        let ops = Theme::Image.random(&mut Random::new(1), 10_000);
        assert!(ops.iter().all(|op| op.is_inside(DISK)));
        assert!(!Op::Read(Sectors { at: u64::MAX, count: 1 }).is_inside(DISK));
    }

    #[test]
    fn what_lies_behind_the_old_end_is_asked_for_once_the_disk_has_grown() {
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
    fn only_what_the_disk_has_is_asked_for() {
        let ops = |text| parse(text).unwrap();
        assert_eq!(ops("w8+4")[0].within(10), Some(ops("w8+2")[0]));
        assert_eq!(ops("w10+4")[0].within(10), None);
        assert_eq!(ops("f")[0].within(10), Some(Op::Flush));
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
        assert_eq!(all.len(), Theme::Image.alphabet().len().pow(2));
    }
}
