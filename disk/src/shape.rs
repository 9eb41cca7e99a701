//! Sizes of transfers: large ones are split, and adjacent ones merged, by a policy that was measured on the storage.
//!
//! It stands between the disk and the engine, and knows nothing of requests, formats and storage. Which policy is the
//! right one is found by `tapline calibrate` (decision 0049); without one there is no [`Shape`] at all.
//!
//! **Splitting.** A transfer larger than a piece is submitted as pieces, all of them at once, cut where offsets in the
//! file are multiples of the piece. It ends when the last of them has, and succeeds only if all do.
//!
//! **Merging.** Transfers of one kind to one file of which one begins where another ends are submitted as one, if they
//! are pushed between two reaps: nothing is held back longer. Any other operation is a barrier: transfers that came
//! before it are submitted before it, and later ones are not merged with them. A merged transfer that fails says
//! nothing about its parts: each is done again by itself. So only the parts that fail by themselves are failed.
//!
//! Why nothing is less durable: a sync covers what has completed (`Action::SyncData`), and an operation completes here
//! not before all of it has below. A part that is done again was not completed all the while.
//!
//! Invariants: every operation comes back exactly once, as it was pushed; nothing overtakes what the engine has
//! refused.

use memory::Segments;

use crate::FileOffset;
use crate::backlog::Backlog;
use crate::io::{Action, EngineFailed, FileDone, FileError, FileId, FileOp, Io, OpId, Until};
use crate::size::{in_memory, on_disk};
use crate::slab::Slab;

/// Marks the names of operations that were made here; others' marks are above ([`crate::Aligner`], `data_file`) and
/// below it (those of the disk).
const OURS: u64 = 1 << 60;

/// More operations than this are not kept: what comes then is handed back until some have ended. A disk has fewer.
const HELD_MAX: usize = 4096;

/// Memory areas of one operation: the kernel takes 1024 at once, and of more the rest would go by itself.
const AREAS_MAX: usize = 1024;

/// Runs that are looked at for a place to be merged to: as many streams of adjacent requests as one batch may have.
const RUNS_SEEN: usize = 16;

/// How the sizes of transfers are changed. By default not at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShapePolicy {
    /// Larger transfers are split into pieces of this size in bytes: a power of two, of a sector at least.
    pub split: Option<u64>,
    /// Adjacent transfers are merged up to this size in bytes.
    pub merge: Option<u64>,
}

impl ShapePolicy {
    /// Whether nothing is done.
    pub fn is_none(&self) -> bool {
        *self == ShapePolicy::default()
    }

    /// The most bytes of a merged transfer; it is not made to be split again.
    fn merge_max(&self) -> u64 {
        self.merge.map_or(0, |most| most.min(self.split.unwrap_or(u64::MAX)))
    }
}

/// Counters of split, merged and repeated operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShapeCounts {
    /// Operations that were split.
    pub splits: u64,
    /// Operations that were submitted as part of another one.
    pub merges: u64,
    /// Operations that were done again by themselves, since one that they were part of has failed.
    pub redone: u64,
}

impl ShapeCounts {
    /// The sums of both counts.
    #[must_use]
    pub fn plus(self, other: ShapeCounts) -> ShapeCounts {
        let ShapeCounts { splits, merges, redone } = other;
        ShapeCounts { splits: self.splits + splits, merges: self.merges + merges, redone: self.redone + redone }
    }
}

/// Splits and merges transfers.
#[derive(Debug, Default)]
pub struct Shape {
    policy: ShapePolicy,
    counts: ShapeCounts,
    /// Operations pushed since the last reap that may be merged, in order of arrival.
    batch: Vec<Kept>,
    runs: Vec<Run>,
    under_way: Slab<Shaped>,
    /// For which the engine had no room.
    refused: Backlog,
    /// Scratch.
    done: Vec<FileDone>,
}

/// An operation of a batch.
#[derive(Debug)]
struct Kept {
    op: Option<FileOp>,
    /// The number of the next of its run, if there is one.
    next: usize,
}

/// Operations of a batch that are submitted as one.
#[derive(Clone, Copy, Debug)]
struct Run {
    file: FileId,
    is_write: bool,
    at: FileOffset,
    end: FileOffset,
    areas: usize,
    first: usize,
    last: usize,
}

/// The operations that an operation below stands for.
#[derive(Debug)]
enum Shaped {
    /// A piece of this.
    Split { op: FileOp, left: usize, result: Result<(), FileError> },
    /// All of these.
    Merged(Vec<FileOp>),
}

/// A transfer, looked at.
struct Transfer<'a> {
    at: FileOffset,
    memory: &'a Segments,
    is_write: bool,
}

impl<'a> Transfer<'a> {
    fn of(action: &'a Action) -> Option<Transfer<'a>> {
        match action {
            Action::Read { at, into: memory } => Some(Transfer { at: *at, memory, is_write: false }),
            Action::Write { at, from: memory } => Some(Transfer { at: *at, memory, is_write: true }),
            Action::SyncData | Action::Deallocate { .. } => None,
        }
    }

    fn len(&self) -> u64 {
        on_disk(self.memory.len())
    }
}

impl Shape {
    /// By this policy.
    pub fn new(policy: ShapePolicy) -> Shape {
        let mut shape = Shape::default();
        shape.set_policy(policy);
        shape
    }

    /// The policy for operations that are pushed from now on.
    pub fn policy(&self) -> ShapePolicy {
        self.policy
    }

    /// Has another policy for what is pushed from now on.
    ///
    /// # Panics
    /// If pieces are no power of two, or smaller than a sector.
    pub fn set_policy(&mut self, policy: ShapePolicy) {
        let is_size = |bytes: u64| bytes.is_power_of_two() && bytes >= 512;
        assert!(policy.split.is_none_or(is_size), "pieces of {:?} bytes", policy.split);
        self.policy = policy;
    }

    /// The counters since the beginning.
    pub fn counts(&self) -> ShapeCounts {
        self.counts
    }

    /// Whether nothing is held back or under way in another shape.
    pub fn is_idle(&self) -> bool {
        self.batch.is_empty() && self.refused.is_empty() && self.under_way.len() == 0
    }

    /// Number of operations that were pushed and not submitted yet.
    pub fn held(&self) -> usize {
        self.batch.len() + self.refused.len()
    }

    /// Whether something on `file` is held back, or under way in another shape.
    pub fn uses(&self, file: FileId) -> bool {
        let is_of = |shaped: &Shaped| match shaped {
            Shaped::Split { op, .. } => op.file == file,
            Shaped::Merged(ops) => ops.iter().any(|op| op.file == file),
        };
        self.batch.iter().filter_map(|kept| kept.op.as_ref()).any(|op| op.file == file)
            || self.refused.uses(file)
            || self.under_way.iter().any(is_of)
    }

    /// Like [`Io::push`]; transfers that may be merged are held until [`Shape::submit`].
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub fn push(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        if !self.refused.is_empty() || self.held() + self.under_way.len() >= HELD_MAX {
            return Err(op);
        }
        let Some(transfer) = Transfer::of(&op.action) else {
            self.submit(io);
            return self.pass_on(op, io);
        };
        if self.policy.split.is_some_and(|piece| transfer.len() > piece) {
            // Behind what has come before it, since an engine that is full has room for neither.
            self.submit(io);
            return self.split(op, io);
        }
        if transfer.len() >= self.policy.merge_max() || transfer.memory.is_empty() {
            return self.pass_on(op, io);
        }
        self.keep(op);
        Ok(())
    }

    #[allow(clippy::result_large_err, reason = "as above")]
    fn pass_on(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        if self.refused.is_empty() { io.push(op) } else { Err(op) }
    }

    /// Cuts an operation into pieces; none of them is submitted if the first finds no room.
    #[allow(clippy::result_large_err, reason = "as above")]
    fn split(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        let (Some(piece), Some(transfer)) = (self.policy.split, Transfer::of(&op.action)) else { return Err(op) };
        if !self.refused.is_empty() {
            return Err(op);
        }
        let (file, at, memory, is_write) = (op.file, transfer.at, transfer.memory.clone(), transfer.is_write);
        let number = self.under_way.insert(Shaped::Split { op, left: 0, result: Ok(()) });
        let (mut from, mut left) = (0, 0);
        while from < memory.len() {
            let here = at + on_disk(from);
            let len = in_memory(piece - here % piece).min(memory.len() - from);
            let action = transfer_of(is_write, here, memory.slice(from, len));
            self.refused.push(FileOp { id: OpId(OURS | u64::from(number)), file, action }, io);
            if left == 0 && !self.refused.is_empty() {
                self.refused.take_last();
                return match self.under_way.remove(number) {
                    Some(Shaped::Split { op, .. }) => Err(op),
                    _ => unreachable!("it was put there"),
                };
            }
            left += 1;
            from += len;
        }
        if let Some(Shaped::Split { left: counted, .. }) = self.under_way.get_mut(number) {
            *counted = left;
        }
        self.counts.splits += 1;
        Ok(())
    }

    /// Keeps a transfer until the batch ends, in a run that it is adjacent to, or in one of its own.
    fn keep(&mut self, op: FileOp) {
        let Some(Transfer { at, memory, is_write }) = Transfer::of(&op.action) else { return };
        let (file, len, areas, end) =
            (op.file, on_disk(memory.len()), memory.parts().len(), at + on_disk(memory.len()));
        let (number, most) = (self.batch.len(), self.policy.merge_max());
        let fits = |run: &&mut Run| {
            let adjacent = run.end == at || run.at == end;
            let small = (run.end - run.at) + len <= most && run.areas + areas <= AREAS_MAX;
            run.file == file && run.is_write == is_write && adjacent && small
        };
        let run = self.runs.iter_mut().rev().take(RUNS_SEEN).find(fits);
        self.batch.push(Kept { op: Some(op), next: 0 });
        let Some(run) = run else {
            self.runs.push(Run { file, is_write, at, end, areas, first: number, last: number });
            return;
        };
        let (earlier, later) = if run.end == at { (run.last, number) } else { (number, run.first) };
        if run.end == at {
            (run.end, run.last) = (end, number);
        } else {
            (run.at, run.first) = (at, number);
        }
        self.batch.get_mut(earlier).into_iter().for_each(|kept| kept.next = later);
        run.areas += areas;
    }

    /// Ends the batch: submits all of it, merged.
    pub fn submit(&mut self, io: &mut impl Io) {
        if self.batch.is_empty() {
            return;
        }
        let mut runs = std::mem::take(&mut self.runs);
        for run in runs.drain(..) {
            let op = self.op_of(run);
            self.refused.push(op, io);
        }
        self.runs = runs;
        self.batch.clear();
    }

    fn op_of(&mut self, run: Run) -> FileOp {
        let mut take =
            |number: usize| match self.batch.get_mut(number).and_then(|kept| Some((kept.op.take()?, kept.next))) {
                Some(taken) => taken,
                None => unreachable!("an operation is in one run"),
            };
        let (first, mut next) = take(run.first);
        if run.first == run.last {
            return first;
        }
        let mut ops = vec![first];
        loop {
            let (op, behind) = take(next);
            ops.push(op);
            if next == run.last {
                break;
            }
            next = behind;
        }
        let memory = ops.iter().filter_map(|op| Some(Transfer::of(&op.action)?.memory.clone())).collect();
        let action = transfer_of(run.is_write, run.at, Segments::joined(memory));
        self.counts.merges += on_disk(ops.len());
        let number = self.under_way.insert(Shaped::Merged(ops));
        FileOp { id: OpId(OURS | u64::from(number)), file: run.file, action }
    }

    /// Pushes what the engine had no room for.
    pub fn retry(&mut self, io: &mut impl Io) {
        self.refused.retry(io);
    }

    /// As [`Io::reap`]: it may return with nothing, when pieces have ended but no operation.
    pub fn reap(&mut self, until: Until, io: &mut impl Io, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.retry(io);
        self.submit(io);
        let mut ended = std::mem::take(&mut self.done);
        let reaped = io.reap(until, &mut ended);
        ended.drain(..).for_each(|one| self.settle(one, io, done));
        self.done = ended;
        self.retry(io);
        reaped
    }

    /// Takes what the engine has finished; operations that have ended go to `done`.
    pub fn settle(&mut self, ended: FileDone, io: &mut impl Io, done: &mut Vec<FileDone>) {
        let FileDone { op, result } = ended;
        let shaped = number_of(op.id).and_then(|number| Some((number, self.under_way.get_mut(number)?)));
        match shaped {
            None => done.push(FileDone { op, result }),
            Some((number, Shaped::Split { left, result: all, .. })) => {
                *left -= 1;
                *all = all.and(result);
                if *left == 0 {
                    self.end_split(number, done);
                }
            }
            Some((number, Shaped::Merged(_))) => self.end_merged(number, result, io, done),
        }
    }

    fn end_split(&mut self, number: u32, done: &mut Vec<FileDone>) {
        if let Some(Shaped::Split { op, result, .. }) = self.under_way.remove(number) {
            done.push(FileDone { op, result });
        }
    }

    fn end_merged(&mut self, number: u32, result: Result<(), FileError>, io: &mut impl Io, done: &mut Vec<FileDone>) {
        let Some(Shaped::Merged(ops)) = self.under_way.remove(number) else { return };
        if result.is_ok() {
            done.extend(ops.into_iter().map(|op| FileDone { op, result }));
            return;
        }
        self.counts.redone += on_disk(ops.len());
        ops.into_iter().for_each(|op| self.refused.push(op, io));
    }
}

fn transfer_of(is_write: bool, at: FileOffset, memory: Segments) -> Action {
    if is_write { Action::Write { at, from: memory } } else { Action::Read { at, into: memory } }
}

fn number_of(id: OpId) -> Option<u32> {
    id.0.checked_sub(OURS).and_then(|number| u32::try_from(number).ok())
}

#[cfg(test)]
mod test;
