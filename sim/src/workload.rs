//! What a simulated guest asks for: short programs that can be written on a command line.
//!
//! Sectors are the unit. `w8+2` writes two sectors from sector 8 on, `W8+2` the same durably (FUA), `z`/`Z` write
//! zeroes, `k`/`K` the same without freeing space, `d` discards, `r` reads, `f` flushes. Parts of sectors, four each,
//! are the unit of `p`/`P`, which write, of `q`/`Q`, which write zeroes, and of `s`, which reads: `p33+2` writes two
//! parts from the second of sector 8 on. What is done to the chain meanwhile is a word: `snapshot`, `merge` (of the
//! leaf into its parent), `merge-below` (of the parent into its own), `merge-all`, `cancel`, `grow`, `clone` (of the
//! leaf's parent, for another disk), `copy` (of a raw leaf); and, while the guest is quiet, `rebase` (onto another raw
//! file), `relink` (onto one that shows the same), `flatten` and `revert` (to the leaf's parent).
//!
//! A guest asks for no more than its disk has: of a request that reaches behind the end only what lies before it is
//! asked for. Behind where the end was at first there is something once the disk has grown.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use disk::Operation;

use crate::random::Random;
use crate::sector::PARTS;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Write.
    Write(Sectors, Durable),
    /// Write zeroes, freeing space.
    Zero(Sectors, Durable),
    /// Write zeroes that keep their space, or get some.
    ZeroKept(Sectors, Durable),
    /// Discard.
    Discard(Sectors),
    /// Read, and compare with what is legal.
    Read(Sectors),
    /// Write parts of sectors.
    Patch(Parts, Durable),
    /// Write zeroes to parts of sectors, freeing space.
    ZeroParts(Parts, Durable),
    /// Read parts of sectors, and compare.
    ReadParts(Parts),
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
    /// The merge under way, if any, is cancelled.
    Cancel,
    /// The disk becomes larger.
    Grow,
    /// The leaf gets another parent, without a guest.
    Rebase,
    /// The leaf gets no parent, without a guest.
    Flatten,
    /// The leaf gets another parent that shows the same, without a guest.
    Relink,
    /// The leaf's parent gets another child, for another disk.
    Clone,
    /// The disk becomes what the leaf's parent shows, without a guest.
    Revert,
    /// The leaf, which is raw, is copied by sharing its blocks.
    Copy,
}

const STEPS: [(Step, &str); 12] = [
    (Step::Snapshot, "snapshot"),
    (Step::Merge, "merge"),
    (Step::MergeBelow, "merge-below"),
    (Step::MergeAll, "merge-all"),
    (Step::Cancel, "cancel"),
    (Step::Grow, "grow"),
    (Step::Rebase, "rebase"),
    (Step::Flatten, "flatten"),
    (Step::Relink, "relink"),
    (Step::Clone, "clone"),
    (Step::Revert, "revert"),
    (Step::Copy, "copy"),
];

impl Step {
    /// Which layers it merges, of so many: the first of the sources, and the target.
    pub fn merged(self, layers: usize) -> Option<(usize, usize)> {
        let (from, into) = match self {
            Step::Merge => (0, 1),
            Step::MergeBelow => (1, 2),
            Step::MergeAll => (0, layers.checked_sub(1)?),
            Step::Snapshot | Step::Cancel | Step::Grow | Step::Clone | Step::Revert => return None,
            Step::Copy | Step::Rebase | Step::Flatten | Step::Relink => return None,
        };
        (from < into && into < layers).then_some((from, into))
    }

    /// Whether it is done while no guest uses the disk.
    pub fn is_offline(self) -> bool {
        self.is_move() || self == Step::Revert
    }

    /// Whether the leaf gets another parent, or none.
    pub fn is_move(self) -> bool {
        matches!(self, Step::Rebase | Step::Flatten | Step::Relink)
    }

    /// Whether layers below the leaf are written to, or are gone in the end: a chain that shares them is done with.
    pub fn changes_layers(self) -> bool {
        self.is_move() || matches!(self, Step::Merge | Step::MergeBelow | Step::MergeAll)
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

/// A run of parts of sectors, [`PARTS`] in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// The first, counted from the disk's first.
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

impl Parts {
    /// All parts of some sectors.
    pub fn of(sectors: Sectors) -> Parts {
        Parts { at: sectors.at * PARTS, count: sectors.count * PARTS }
    }

    /// As a range.
    pub fn range(self) -> Range<u64> {
        self.at..self.at + self.count
    }

    /// The sectors of which they are parts.
    pub fn sectors(self) -> Sectors {
        let at = self.at / PARTS;
        Sectors { at, count: self.range().end.div_ceil(PARTS) - at }
    }

    fn within(self, disk: u64) -> Parts {
        Parts { count: self.count.min((disk * PARTS).saturating_sub(self.at)), ..self }
    }
}

impl Op {
    /// The sectors that it is about, or about parts of.
    pub fn sectors(self) -> Sectors {
        match self {
            Op::Write(sectors, _) | Op::Zero(sectors, _) | Op::ZeroKept(sectors, _) => sectors,
            Op::Discard(sectors) | Op::Read(sectors) => sectors,
            Op::Patch(parts, _) | Op::ZeroParts(parts, _) | Op::ReadParts(parts) => parts.sectors(),
            Op::Flush | Op::Chain(_) => Sectors { at: 0, count: 0 },
        }
    }

    /// The parts of sectors that it is about.
    pub fn parts(self) -> Parts {
        match self {
            Op::Patch(parts, _) | Op::ZeroParts(parts, _) | Op::ReadParts(parts) => parts,
            _ => Parts::of(self.sectors()),
        }
    }

    /// What it asks of the disk, if it is a guest's.
    pub fn operation(self) -> Option<Operation> {
        Some(match self {
            Op::Write(_, durable) | Op::Patch(_, durable) => Operation::Write { durable: durable == Durable::AtOnce },
            Op::Zero(_, durable) | Op::ZeroParts(_, durable) => {
                Operation::WriteZeroes { free: true, durable: durable == Durable::AtOnce }
            }
            Op::ZeroKept(_, durable) => Operation::WriteZeroes { free: false, durable: durable == Durable::AtOnce },
            Op::Discard(_) => Operation::Discard,
            Op::Read(_) | Op::ReadParts(_) => Operation::Read,
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
            Op::ZeroKept(_, durable) => Op::ZeroKept(sectors, durable),
            Op::Discard(_) => Op::Discard(sectors),
            Op::Read(_) => Op::Read(sectors),
            Op::Patch(parts, durable) => Op::Patch(parts.within(disk), durable),
            Op::ZeroParts(parts, durable) => Op::ZeroParts(parts.within(disk), durable),
            Op::ReadParts(parts) => Op::ReadParts(parts.within(disk)),
            Op::Flush | Op::Chain(_) => self,
        })
    }

    /// The same about fewer parts: it begins or ends within a sector.
    fn in_parts(self, random: &mut Random) -> Op {
        let Parts { at, count } = self.parts();
        let (before, after) = match count {
            0 => (0, 0),
            _ => (random.below(PARTS), random.below(PARTS)),
        };
        // One part is left of a single sector at least.
        let before = before.min(count.saturating_sub(1));
        let parts = Parts { at: at + before, count: (count - before).saturating_sub(after).max(1) };
        match self {
            Op::Write(_, durable) => Op::Patch(parts, durable),
            Op::Zero(_, durable) => Op::ZeroParts(parts, durable),
            Op::Read(_) => Op::ReadParts(parts),
            other => other,
        }
    }

    /// Whether it gives the leaf another parent, or none.
    pub fn is_move(self) -> bool {
        matches!(self, Op::Chain(step) if step.is_move())
    }

    /// Whether it is a step that is explored with no other one beside it, for its time.
    pub fn is_alone(self) -> bool {
        matches!(self, Op::Chain(step) if step.is_offline() || step == Step::Clone)
    }

    /// Whether an answer promises that what was answered before, or this write, survives.
    pub fn is_durable(self) -> bool {
        match self {
            Op::Write(_, durable) | Op::Zero(_, durable) | Op::ZeroKept(_, durable) => durable == Durable::AtOnce,
            Op::Patch(_, durable) | Op::ZeroParts(_, durable) => durable == Durable::AtOnce,
            Op::Discard(_) | Op::Read(_) | Op::ReadParts(_) | Op::Chain(_) => false,
            Op::Flush => true,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self {
            Op::Write(_, Durable::ByFlush) => 'w',
            Op::Write(_, Durable::AtOnce) => 'W',
            Op::Zero(_, Durable::ByFlush) => 'z',
            Op::Zero(_, Durable::AtOnce) => 'Z',
            Op::ZeroKept(_, Durable::ByFlush) => 'k',
            Op::ZeroKept(_, Durable::AtOnce) => 'K',
            Op::Discard(_) => 'd',
            Op::Read(_) => 'r',
            Op::Patch(_, Durable::ByFlush) => 'p',
            Op::Patch(_, Durable::AtOnce) => 'P',
            Op::ZeroParts(_, Durable::ByFlush) => 'q',
            Op::ZeroParts(_, Durable::AtOnce) => 'Q',
            Op::ReadParts(_) => 's',
            Op::Flush => return f.write_str("f"),
            Op::Chain(step) => {
                return f.write_str(STEPS.iter().find(|(other, _)| other == step).map_or("", |(_, name)| name));
            }
        };
        let (at, count) = match self {
            Op::Patch(parts, _) | Op::ZeroParts(parts, _) | Op::ReadParts(parts) => (parts.at, parts.count),
            _ => (self.sectors().at, self.sectors().count),
        };
        write!(f, "{letter}{at}+{count}")
    }
}

/// A word that is not an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an operation; they look like w8+2, W8+2, z0+8, Z0+8, k0+8, K0+8, d0+1024, r0+8, p33+2, P33+2, q1+2, Q1+2, s1+6, f, snapshot, merge, cancel, grow, clone, copy, rebase, relink, flatten and revert"
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
        let parts = Parts { at: sectors.at, count: sectors.count };
        match letter {
            'w' => Ok(Op::Write(sectors, Durable::ByFlush)),
            'W' => Ok(Op::Write(sectors, Durable::AtOnce)),
            'z' => Ok(Op::Zero(sectors, Durable::ByFlush)),
            'Z' => Ok(Op::Zero(sectors, Durable::AtOnce)),
            'k' => Ok(Op::ZeroKept(sectors, Durable::ByFlush)),
            'K' => Ok(Op::ZeroKept(sectors, Durable::AtOnce)),
            'd' => Ok(Op::Discard(sectors)),
            'r' => Ok(Op::Read(sectors)),
            'p' => Ok(Op::Patch(parts, Durable::ByFlush)),
            'P' => Ok(Op::Patch(parts, Durable::AtOnce)),
            'q' => Ok(Op::ZeroParts(parts, Durable::ByFlush)),
            'Q' => Ok(Op::ZeroParts(parts, Durable::AtOnce)),
            's' => Ok(Op::ReadParts(parts)),
            _ => Err(wrong()),
        }
    }
}

/// The same for a guest that does not care where sectors begin: of half of the requests that can be about parts, the
/// first sector and the last are asked for in part.
pub fn in_parts(ops: Vec<Op>, random: &mut Random) -> Vec<Op> {
    ops.into_iter().map(|op| if random.below(2) == 0 { op } else { op.in_parts(random) }).collect()
}

/// Operations as text, separated by spaces.
pub fn parse(text: &str) -> Result<Vec<Op>, NotAnOp> {
    text.split_whitespace().map(str::parse).collect()
}

/// Operations as text, which [`parse`] takes back.
pub fn text(ops: &[Op]) -> String {
    ops.iter().map(Op::to_string).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::theme::Theme;

    #[test]
    fn a_workload_survives_being_written_down() {
        let ops = Theme::Chain.random(&mut Random::new(7), 100);
        assert_eq!(parse(&text(&ops)), Ok(ops.clone()));
        let ops = in_parts(ops, &mut Random::new(7));
        assert_eq!(parse(&text(&ops)), Ok(ops));
        assert_eq!(parse("w1+"), Err(NotAnOp("w1+".into())));
    }

    #[test]
    fn only_what_the_disk_has_is_asked_for() {
        let ops = |text| parse(text).unwrap();
        assert_eq!(ops("w8+4")[0].within(10), Some(ops("w8+2")[0]));
        assert_eq!(ops("w10+4")[0].within(10), None);
        assert_eq!(ops("f")[0].within(10), Some(Op::Flush));
        assert_eq!((ops("p38+9")[0].within(10), ops("p40+1")[0].within(10)), (Some(ops("p38+2")[0]), None));
    }

    #[test]
    fn parts_lie_in_the_sectors_that_were_asked_for() {
        let ops = Theme::Image.random(&mut Random::new(1), 1000);
        let in_parts = in_parts(ops.clone(), &mut Random::new(2));
        let inside = |(whole, op): (&Op, &Op)| {
            let (whole, parts) = (whole.parts().range(), op.parts().range());
            whole.start <= parts.start && parts.end <= whole.end && parts.is_empty() == whole.is_empty()
        };
        assert!(ops.iter().zip(&in_parts).all(inside));
        assert!(in_parts.iter().filter(|op| matches!(op, Op::Patch(..))).count() > 100);
    }
}
