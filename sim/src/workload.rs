//! The requests of a simulated guest: short programs that can be written on a command line.
//!
//! Sectors are the unit. `w8+2` writes two sectors from sector 8 on, `W8+2` the same durably (FUA), `z`/`Z` write
//! zeroes, `k`/`K` the same without freeing space, `d` discards, `r` reads, `f` flushes. Parts of sectors, four each,
//! are the unit of `p`/`P`, which write, of `q`/`Q`, which write zeroes, and of `s`, which reads: `p33+2` writes two
//! parts from the second of sector 8 on. Verbs on the chain are words: `snapshot`, `merge` (of the leaf into its
//! parent), `merge-below` (of the parent into its own), `merge-all`, `cancel`, `grow`, `clone` (of the leaf's parent,
//! for another disk), `copy` (of a raw leaf); and, while the guest is quiet, `rebase` (onto another raw file), `relink`
//! (onto one that shows the same), `flatten` and `revert` (to the leaf's parent).
//!
//! Requests are cut off at the end of the disk. There are sectors after the initial end once the disk has grown.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use disk::Operation;

use crate::random::Random;
use crate::sector::PARTS;

/// A request of the guest, or a verb.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Write.
    Write(Sectors, Durable),
    /// Write zeroes, freeing space.
    Zero(Sectors, Durable),
    /// Write zeroes without freeing space; may allocate some.
    ZeroKept(Sectors, Durable),
    /// Discard.
    Discard(Sectors),
    /// Read, and compare with what is legal.
    Read(Sectors),
    /// Write parts of sectors.
    Patch(Parts, Durable),
    /// Write zeroes to parts of sectors, freeing space.
    ZeroParts(Parts, Durable),
    /// Read parts of sectors, and compare with what is legal.
    ReadParts(Parts),
    /// Flush.
    Flush,
    /// A verb on the chain.
    Chain(Step),
}

/// A verb of an administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Takes a snapshot: the leaf becomes a parent, a new file the leaf.
    Snapshot,
    /// Merges the leaf into its parent.
    Merge,
    /// Merges the leaf's parent into its own.
    MergeBelow,
    /// Merges all layers into the lowest.
    MergeAll,
    /// Cancels the merge in progress, if any.
    Cancel,
    /// Grows the disk.
    Grow,
    /// Moves the leaf onto another parent, without a guest.
    Rebase,
    /// Removes the leaf's parent, without a guest.
    Flatten,
    /// Moves the leaf onto another parent with the same content, without a guest.
    Relink,
    /// Creates another child of the leaf's parent, for another disk.
    Clone,
    /// Reverts the disk to the leaf's parent, without a guest.
    Revert,
    /// Copies the raw leaf by sharing its blocks.
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
    /// The layers that it merges in a chain of this length: the first source, and the target.
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

    /// Whether it changes the leaf's parent.
    pub fn is_move(self) -> bool {
        matches!(self, Step::Rebase | Step::Flatten | Step::Relink)
    }

    /// Whether it writes to layers below the leaf or removes some: chains that share them become invalid.
    pub fn changes_layers(self) -> bool {
        self.is_move() || matches!(self, Step::Merge | Step::MergeBelow | Step::MergeAll)
    }
}

/// A run of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sectors {
    /// The first sector.
    pub at: u64,
    /// Number of sectors.
    pub count: u64,
}

/// A run of parts of sectors, [`PARTS`] in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Parts {
    /// The first part, counted from the beginning of the disk.
    pub at: u64,
    /// Number of parts.
    pub count: u64,
}

/// When a write becomes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Durable {
    /// With the next flush.
    ByFlush,
    /// Before its response (FUA).
    AtOnce,
}

impl Sectors {
    /// Converts it to a range of sectors.
    pub fn range(self) -> Range<u64> {
        self.at..self.at + self.count
    }
}

impl Parts {
    /// All parts of some sectors.
    pub fn of(sectors: Sectors) -> Parts {
        Parts { at: sectors.at * PARTS, count: sectors.count * PARTS }
    }

    /// Converts it to a range of parts.
    pub fn range(self) -> Range<u64> {
        self.at..self.at + self.count
    }

    /// The sectors that contain these parts.
    pub fn sectors(self) -> Sectors {
        let at = self.at / PARTS;
        Sectors { at, count: self.range().end.div_ceil(PARTS) - at }
    }

    fn within(self, disk: u64) -> Parts {
        Parts { count: self.count.min((disk * PARTS).saturating_sub(self.at)), ..self }
    }
}

impl Op {
    /// The sectors that it touches, in whole or in part.
    pub fn sectors(self) -> Sectors {
        match self {
            Op::Write(sectors, _) | Op::Zero(sectors, _) | Op::ZeroKept(sectors, _) => sectors,
            Op::Discard(sectors) | Op::Read(sectors) => sectors,
            Op::Patch(parts, _) | Op::ZeroParts(parts, _) | Op::ReadParts(parts) => parts.sectors(),
            Op::Flush | Op::Chain(_) => Sectors { at: 0, count: 0 },
        }
    }

    /// The parts of sectors that it touches.
    pub fn parts(self) -> Parts {
        match self {
            Op::Patch(parts, _) | Op::ZeroParts(parts, _) | Op::ReadParts(parts) => parts,
            _ => Parts::of(self.sectors()),
        }
    }

    /// The request to the disk; `None` for a verb.
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

    /// Whether it is within a disk of this size in sectors.
    pub fn is_inside(self, disk: u64) -> bool {
        let Sectors { at, count } = self.sectors();
        let some = count > 0 || matches!(self, Op::Flush | Op::Chain(_));
        some && at.checked_add(count).is_some_and(|end| end <= disk)
    }

    /// The request cut off at the end of a disk of this size; `None` if it is completely after that.
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

    /// The request with fewer parts: it begins or ends within a sector.
    fn in_parts(self, random: &mut Random) -> Op {
        let Parts { at, count } = self.parts();
        let (before, after) = match count {
            0 => (0, 0),
            _ => (random.below(PARTS), random.below(PARTS)),
        };
        // At least one part of a single sector is left.
        let before = before.min(count.saturating_sub(1));
        let parts = Parts { at: at + before, count: (count - before).saturating_sub(after).max(1) };
        match self {
            Op::Write(_, durable) => Op::Patch(parts, durable),
            Op::Zero(_, durable) => Op::ZeroParts(parts, durable),
            Op::Read(_) => Op::ReadParts(parts),
            other => other,
        }
    }

    /// Whether it changes the leaf's parent.
    pub fn is_move(self) -> bool {
        matches!(self, Op::Chain(step) if step.is_move())
    }

    /// Whether it is a verb that is explored without other verbs, to save time.
    pub fn is_alone(self) -> bool {
        matches!(self, Op::Chain(step) if step.is_offline() || step == Step::Clone)
    }

    /// Whether its response promises that earlier writes, or this one, survive.
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

/// An error: the word is not an operation.
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

/// Changes half of the requests that support parts so that they begin or end within sectors.
pub fn in_parts(ops: Vec<Op>, random: &mut Random) -> Vec<Op> {
    ops.into_iter().map(|op| if random.below(2) == 0 { op } else { op.in_parts(random) }).collect()
}

/// Parses operations separated by spaces.
pub fn parse(text: &str) -> Result<Vec<Op>, NotAnOp> {
    text.split_whitespace().map(str::parse).collect()
}

/// Formats operations as accepted by [`parse`].
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
