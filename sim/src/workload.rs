//! What a simulated guest asks for: short programs that can be written on a command line.
//!
//! Sectors are the unit. `w8+2` writes two sectors from sector 8 on, `W8+2` the same durably (FUA), `z`/`Z` write
//! zeroes, `k`/`K` the same without freeing space, `d` discards, `r` reads, `f` flushes. What is done to the chain
//! meanwhile is a word: `snapshot`, `merge` (of the leaf into its parent), `merge-below` (of the parent into its own),
//! `merge-all`, `cancel`, `grow`.
//!
//! A guest asks for no more than its disk has: of a request that reaches behind the end only what lies before it is
//! asked for. Behind where the end was at first there is something once the disk has grown.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use disk::Operation;

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
            Op::Write(sectors, _) | Op::Zero(sectors, _) | Op::ZeroKept(sectors, _) => sectors,
            Op::Discard(sectors) | Op::Read(sectors) => sectors,
            Op::Flush | Op::Chain(_) => Sectors { at: 0, count: 0 },
        }
    }

    /// What it asks of the disk, if it is a guest's.
    pub fn operation(self) -> Option<Operation> {
        Some(match self {
            Op::Write(_, durable) => Operation::Write { durable: durable == Durable::AtOnce },
            Op::Zero(_, durable) => Operation::WriteZeroes { free: true, durable: durable == Durable::AtOnce },
            Op::ZeroKept(_, durable) => Operation::WriteZeroes { free: false, durable: durable == Durable::AtOnce },
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
            Op::ZeroKept(_, durable) => Op::ZeroKept(sectors, durable),
            Op::Discard(_) => Op::Discard(sectors),
            Op::Read(_) => Op::Read(sectors),
            Op::Flush | Op::Chain(_) => self,
        })
    }

    /// Whether an answer promises that what was answered before, or this write, survives.
    pub fn is_durable(self) -> bool {
        let (Op::Write(_, durable) | Op::Zero(_, durable) | Op::ZeroKept(_, durable)) = self else {
            return self == Op::Flush;
        };
        durable == Durable::AtOnce
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
    "'{0}' is not an operation; they look like w8+2, W8+2, z0+8, Z0+8, k0+8, K0+8, d0+1024, r0+8, f, snapshot, merge, cancel and grow"
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
            'k' => Ok(Op::ZeroKept(sectors, Durable::ByFlush)),
            'K' => Ok(Op::ZeroKept(sectors, Durable::AtOnce)),
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

#[cfg(test)]
mod test {
    use super::*;
    use crate::random::Random;
    use crate::theme::Theme;

    #[test]
    fn a_workload_survives_being_written_down() {
        let ops = Theme::Chain.random(&mut Random::new(7), 100);
        assert_eq!(parse(&text(&ops)), Ok(ops));
        assert_eq!(parse("w1+"), Err(NotAnOp("w1+".into())));
    }

    #[test]
    fn only_what_the_disk_has_is_asked_for() {
        let ops = |text| parse(text).unwrap();
        assert_eq!(ops("w8+4")[0].within(10), Some(ops("w8+2")[0]));
        assert_eq!(ops("w10+4")[0].within(10), None);
        assert_eq!(ops("f")[0].within(10), Some(Op::Flush));
    }
}
