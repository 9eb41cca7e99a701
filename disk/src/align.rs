//! Accesses to files whose storage takes whole units only, larger than the 512-byte sectors that formats and guests
//! have: O_DIRECT on storage with sectors of 4096 bytes.
//!
//! Knows nothing of requests and formats. It stands between the disk and the engine for the files that are registered
//! with it; operations on other files bypass it. Operations that begin and end at unit boundaries are passed on
//! unchanged. Of the others, a piece inside a unit is read by reading the unit, and written in three steps:
//! 1. the unit is read;
//! 2. the piece is copied over it in memory;
//! 3. the unit is written, and after that the operation answered.
//!
//! A power loss before 3 or in it finds the unit as it was or as it will be, since storage writes one whole or not at
//! all: that is the assumption of decision 0004 for its sectors. So the bytes around the piece lose nothing that was
//! flushed. A sync that the disk requests after the answer is submitted after 3 has completed, and covers it.
//!
//! Between 1 and 3 nothing else that changes the unit is under way, or what it wrote would be undone.
//!
//! **The end of a file.** A file may end inside a unit, as a VHD does: its footer takes the last 512 bytes. Direct
//! writes cannot end there. A write to that unit is the only kind of piece that is passed on as a piece, and the engine
//! writes it through the page cache. Nothing else is in flight on the file then: direct and cached I/O to one page at
//! the same time fail.
//!
//! Invariants: every operation comes back exactly once; of two changes of one unit, of which one is in three steps, one
//! ends before the other begins; an operation waits only for those that came before it, so that each has its turn.

use std::collections::{BTreeMap, VecDeque};

use memory::Segments;

use crate::FileOffset;
use crate::backlog::Backlog;
use crate::io::{Action, EngineFailed, FileDone, FileError, FileId, FileOp, Io, OpId, Until};
use crate::size::{in_memory, on_disk};
use crate::slab::Slab;

/// Marks the names of operations that were made here; the disk's own do not have it.
const OURS: u64 = 1 << 63;

/// More pieces than this are not kept: what comes then is handed back until some have ended. A disk has fewer requests.
const HELD_MAX: usize = 4096;

/// Has storage that takes whole units serve pieces of them.
#[derive(Debug, Default)]
pub struct Aligner {
    files: BTreeMap<FileId, Storage>,
    cuts: Slab<Cut>,
    active: Slab<Active>,
    /// In the order in which they came.
    waiting: VecDeque<Piece>,
    /// For which the engine had no room.
    refused: Backlog,
    /// Scratch.
    done: Vec<FileDone>,
}

/// The storage of a file.
#[derive(Clone, Copy, Debug)]
struct Storage {
    /// A power of two.
    unit: u64,
    /// The file reaches as far, or further: what has failed may have made it longer. `None`: it ends where a unit does,
    /// as devices do.
    end: Option<FileOffset>,
}

/// An operation that is done in pieces.
#[derive(Debug)]
struct Cut {
    op: FileOp,
    left: usize,
    result: Result<(), FileError>,
}

/// The operation that a piece belongs to.
#[derive(Clone, Copy, Debug)]
enum Owner {
    /// It is the whole of the operation of this name.
    Whole(OpId),
    Cut(u32),
}

#[derive(Debug)]
enum What {
    /// An operation that is passed on unchanged.
    Pass(Action),
    /// A piece of a unit, read with the whole unit.
    Read { into: Segments },
    /// A piece of a unit, written by read, copy and write.
    Write { from: Segments },
}

/// Kinds of access to a unit, of which some exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// Changes nothing.
    Looks,
    /// Changes in one step.
    Writes,
    /// Changes in three.
    Merges,
    /// Is to be alone on its file.
    Alone,
}

/// The whole units of a file that an operation occupies.
#[derive(Clone, Copy, Debug)]
struct Claim {
    file: FileId,
    at: FileOffset,
    end: FileOffset,
    manner: Manner,
}

#[derive(Debug)]
struct Piece {
    file: FileId,
    at: FileOffset,
    len: u64,
    what: What,
    owner: Owner,
}

/// A piece that is under way.
#[derive(Debug)]
struct Active {
    claim: Claim,
    owner: Owner,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The last.
    Last,
    /// The unit is read, of which `into` is a piece.
    Reading { piece: Segments, into: Segments },
    /// The same, to be written with a piece of it changed.
    Merging { unit: Segments, piece: Segments, from: Segments },
}

impl Claim {
    fn forbids(&self, other: &Claim) -> bool {
        if self.file != other.file {
            return false;
        }
        let overlap = self.at < other.end && other.at < self.end;
        match (self.manner, other.manner) {
            (Manner::Alone, _) | (_, Manner::Alone) => true,
            (Manner::Merges, Manner::Writes | Manner::Merges) | (Manner::Writes, Manner::Merges) => overlap,
            _ => false,
        }
    }
}

impl Aligner {
    /// From now on, operations on `file` are cut to units of `unit` bytes, a power of two. `len` is that of a
    /// file that may end anywhere; `None`: it ends where a unit does, and does not grow.
    pub fn add(&mut self, file: FileId, unit: u64, len: Option<u64>) {
        assert!(unit.is_power_of_two(), "a unit of {unit} bytes");
        self.files.insert(file, Storage { unit, end: len.map(FileOffset) });
    }

    /// Nothing will come for `file`, unless it is added again.
    pub fn remove(&mut self, file: FileId) {
        self.files.remove(&file);
    }

    /// Whether something on `file` is under way or waits.
    pub fn uses(&self, file: FileId) -> bool {
        self.active.iter().any(|active| active.claim.file == file)
            || self.waiting.iter().any(|piece| piece.file == file)
    }

    /// As [`Io::push`].
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub fn push(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        let Some(Storage { unit, .. }) = self.files.get(&op.file).copied() else { return io.push(op) };
        self.retry(io);
        let held = self.active.len() + self.waiting.len();
        if !self.refused.is_empty() || held >= HELD_MAX {
            return Err(op);
        }
        match cut(&op, unit) {
            None => self.push_whole(op, io),
            Some(pieces) => {
                let file = op.file;
                let number = self.cuts.insert(Cut { op, left: pieces.len(), result: Ok(()) });
                for (at, what) in pieces {
                    let len = what.len();
                    self.begin(Piece { file, at, len, what, owner: Owner::Cut(number) }, io);
                }
                Ok(())
            }
        }
    }

    #[allow(clippy::result_large_err, reason = "as above")]
    fn push_whole(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        let FileOp { id, file, action } = op;
        let (at, len) = match &action {
            Action::Read { at, into: memory } | Action::Write { at, from: memory } => (*at, on_disk(memory.len())),
            Action::Deallocate { at, len } => (*at, *len),
            Action::SyncData => (FileOffset(0), 0),
        };
        self.begin(Piece { file, at, len, what: What::Pass(action), owner: Owner::Whole(id) }, io);
        // The engine has no room: neither have we.
        let Some(back) = self.refused.take_last() else { return Ok(()) };
        number_of(back.id).and_then(|number| self.active.remove(number));
        Err(FileOp { id, ..back })
    }

    /// Pushes what the engine had no room for.
    pub fn retry(&mut self, io: &mut impl Io) {
        self.refused.retry(io);
    }

    /// As [`Io::reap`]: it may return with nothing, when steps have ended but no operation.
    pub fn reap(&mut self, until: Until, io: &mut impl Io, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.retry(io);
        let mut ended = std::mem::take(&mut self.done);
        let reaped = io.reap(until, &mut ended);
        ended.drain(..).for_each(|one| self.settle(one, io, done));
        self.done = ended;
        reaped
    }

    /// Takes what the engine has finished; an operation that has ended goes to `done`.
    pub fn settle(&mut self, ended: FileDone, io: &mut impl Io, done: &mut Vec<FileDone>) {
        let FileDone { op, result } = ended;
        let active = number_of(op.id).and_then(|number| Some((number, self.active.get_mut(number)?)));
        let Some((number, active)) = active else {
            done.push(FileDone { op, result });
            return;
        };
        match std::mem::replace(&mut active.step, Step::Last) {
            Step::Merging { unit, piece, from } if result.is_ok() => {
                copy(&from, &piece);
                let action = Action::Write { at: active.claim.at, from: unit };
                self.submit(FileOp { action, ..op }, io);
                return;
            }
            Step::Reading { piece, into } if result.is_ok() => copy(&piece, &into),
            Step::Merging { .. } | Step::Reading { .. } | Step::Last => {}
        }
        if let (Some(end), Ok(())) = (end_of(&op.action), result) {
            if let Some(Storage { end: Some(known), .. }) = self.files.get_mut(&op.file) {
                *known = end.max(*known);
            }
        }
        if let Some(active) = self.active.remove(number) {
            self.end(active.owner, op, result, done);
        }
        self.retry(io);
        self.wake(io);
    }

    /// A piece has ended.
    fn end(&mut self, owner: Owner, op: FileOp, result: Result<(), FileError>, done: &mut Vec<FileDone>) {
        let number = match owner {
            Owner::Whole(id) => {
                done.push(FileDone { op: FileOp { id, ..op }, result });
                return;
            }
            Owner::Cut(number) => number,
        };
        let Some(cut) = self.cuts.get_mut(number) else { unreachable!("operation {number} has ended") };
        cut.left -= 1;
        cut.result = cut.result.and(result);
        if cut.left == 0 {
            done.extend(self.cuts.remove(number).map(|Cut { op, result, .. }| FileDone { op, result }));
        }
    }

    /// The units that a piece occupies at present.
    fn claim(&self, piece: &Piece) -> Claim {
        let Piece { file, at, len, .. } = *piece;
        let storage = self.files.get(&file).copied().unwrap_or(Storage { unit: 1, end: None });
        let from = at.align_down(storage.unit);
        let end = (at + len).align_up(storage.unit);
        let manner = match &piece.what {
            What::Read { .. } | What::Pass(Action::Read { .. } | Action::SyncData) => Manner::Looks,
            What::Pass(Action::Write { .. } | Action::Deallocate { .. }) => Manner::Writes,
            What::Write { .. } if storage.end.is_some_and(|known| known < end) => Manner::Alone,
            What::Write { .. } => Manner::Merges,
        };
        Claim { file, at: from, end, manner }
    }

    /// Begins a piece, now or when what is in its way has ended.
    fn begin(&mut self, piece: Piece, io: &mut impl Io) {
        let claim = self.claim(&piece);
        let waits = self.waiting.iter().any(|before| self.claim(before).forbids(&claim)) || self.is_in_the_way(&claim);
        match waits {
            true => self.waiting.push_back(piece),
            false => self.start(piece, claim, io),
        }
    }

    fn is_in_the_way(&self, claim: &Claim) -> bool {
        self.active.iter().any(|active| active.claim.forbids(claim))
    }

    /// Begins what nothing is in the way of any more; the rest keeps its order.
    fn wake(&mut self, io: &mut impl Io) {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().for_each(|piece| self.begin(piece, io));
    }

    fn start(&mut self, piece: Piece, claim: Claim, io: &mut impl Io) {
        let Piece { file, at, what, owner, .. } = piece;
        let inside = |unit: &Segments, len: usize| unit.slice(in_memory(at - claim.at), len);
        let whole = || Segments::zeroed(in_memory(claim.end - claim.at));
        let (action, step) = match what {
            What::Pass(action) => (action, Step::Last),
            What::Read { into } => {
                let unit = whole();
                let piece = inside(&unit, into.len());
                (Action::Read { at: claim.at, into: unit }, Step::Reading { piece, into })
            }
            What::Write { from } if claim.manner == Manner::Alone => (Action::Write { at, from }, Step::Last),
            What::Write { from } => {
                let unit = whole();
                let piece = inside(&unit, from.len());
                (Action::Read { at: claim.at, into: unit.clone() }, Step::Merging { unit, piece, from })
            }
        };
        let number = self.active.insert(Active { claim, owner, step });
        self.submit(FileOp { id: OpId(OURS | u64::from(number)), file, action }, io);
    }

    fn submit(&mut self, op: FileOp, io: &mut impl Io) {
        self.refused.add(op);
        self.retry(io);
    }
}

impl What {
    fn len(&self) -> u64 {
        match self {
            What::Pass(Action::Read { into: memory, .. } | Action::Write { from: memory, .. })
            | What::Read { into: memory }
            | What::Write { from: memory } => on_disk(memory.len()),
            What::Pass(_) => 0,
        }
    }
}

/// The pieces of a transfer that does not keep to units: at most one in front of the first whole unit, the whole ones,
/// and at most one behind them.
fn cut(op: &FileOp, unit: u64) -> Option<Vec<(FileOffset, What)>> {
    let (at, memory, is_write) = match &op.action {
        Action::Read { at, into } => (*at, into, false),
        Action::Write { at, from } => (*at, from, true),
        // Its storage does what it can of a range, or says that it cannot.
        Action::Deallocate { .. } | Action::SyncData => return None,
    };
    let len = on_disk(memory.len());
    if at % unit == 0 && len % unit == 0 {
        return None;
    }
    let end = at + len;
    let (head, down) = (at.align_up(unit).min(end), end.align_down(unit));
    let mut pieces = Vec::new();
    let mut add = |from: FileOffset, to: FileOffset| {
        if from >= to {
            return;
        }
        let memory = memory.slice(in_memory(from - at), in_memory(to - from));
        let whole = from % unit == 0 && to % unit == 0;
        pieces.push((
            from,
            match (whole, is_write) {
                (true, true) => What::Pass(Action::Write { at: from, from: memory }),
                (true, false) => What::Pass(Action::Read { at: from, into: memory }),
                (false, true) => What::Write { from: memory },
                (false, false) => What::Read { into: memory },
            },
        ));
    };
    add(at, head);
    add(head, down);
    add(head.max(down), end);
    Some(pieces)
}

/// Where what was written ends.
fn end_of(action: &Action) -> Option<FileOffset> {
    match action {
        Action::Write { at, from } => Some(*at + on_disk(from.len())),
        Action::Read { .. } | Action::SyncData | Action::Deallocate { .. } => None,
    }
}

fn number_of(id: OpId) -> Option<u32> {
    id.0.checked_sub(OURS).and_then(|number| u32::try_from(number).ok())
}

fn copy(from: &Segments, into: &Segments) {
    into.copy_from(&from.to_vec());
}

#[cfg(test)]
mod test;
