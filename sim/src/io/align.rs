//! Faulty aligners in place of the disk's aligner, for storage with large units.
//!
//! Without a planted bug, everything is passed to the correct aligner.

use disk::{Action, Aligner, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};

use super::Storage;
use crate::planted::Planted;

/// Flag in the ids of operations submitted by the second aligner.
const SECOND: u64 = 1 << 62;
/// Flag in the ids of writes that were answered at submission.
const GHOST: u64 = 1 << 61;
/// Flag in the ids of an aligner's own operations.
const OURS: u64 = 1 << 63;

/// A planted bug in place of the aligner.
#[derive(Default)]
pub(super) struct Misaligned {
    bug: Option<Planted>,
    /// A second aligner, unaware of the first one's operations in flight.
    second: Aligner,
}

impl Misaligned {
    /// Plants a bug if it belongs here.
    pub fn plant(&mut self, bug: Option<Planted>) {
        self.bug = bug;
    }

    /// See [`Aligner::add`].
    pub fn add(&mut self, file: FileId, unit: u64, end: Option<u64>) {
        self.second.add(file, unit, end);
    }

    /// With the bug, every other operation goes to the second aligner.
    #[allow(clippy::result_large_err, reason = "as `Io::push`")]
    pub fn push(&mut self, op: FileOp, aligner: &mut Aligner, storage: &mut Storage) -> Result<(), FileOp> {
        match self.bug {
            Some(Planted::UnitNotAlone) if op.id.0 % 2 == 1 => self.second.push(op, &mut Marked(storage)),
            _ => aligner.push(op, storage),
        }
    }

    /// The operations that end with this one.
    pub fn settle(&mut self, ended: FileDone, aligner: &mut Aligner, storage: &mut Storage) -> Vec<FileDone> {
        let mut done = Vec::new();
        let FileDone { op, result } = ended;
        let id = op.id.0;
        if id & OURS != 0 && id & GHOST != 0 {
            return done;
        }
        if id & OURS != 0 && id & SECOND != 0 {
            let op = FileOp { id: OpId(id & !SECOND), ..op };
            self.second.settle(FileDone { op, result }, &mut Marked(storage), &mut done);
            self.second.retry(&mut Marked(storage));
            return done;
        }
        if self.bug != Some(Planted::UnitAnsweredEarly) {
            aligner.settle(FileDone { op, result }, storage, &mut done);
            return done;
        }
        let mut hasty = Hasty { storage, read: op.id, written: None };
        aligner.settle(FileDone { op, result }, &mut hasty, &mut done);
        if let Some(op) = hasty.written {
            aligner.settle(FileDone { op, result: Ok(()) }, storage, &mut done);
        }
        done
    }
}

/// The storage for the second aligner, which marks its operations.
struct Marked<'a>(&'a mut Storage);

impl Io for Marked<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let FileOp { id, file, action } = op;
        let pushed = self.0.push(FileOp { id: OpId(id.0 | SECOND), file, action });
        pushed.map_err(|back| FileOp { id, ..back })
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.0.reap(until, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.0.allocated(file, at, len)
    }
}

/// Storage on which the write of a unit that was read for it is not waited for.
struct Hasty<'a> {
    storage: &'a mut Storage,
    /// The read that has just ended.
    read: OpId,
    written: Option<FileOp>,
}

impl Io for Hasty<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if op.id != self.read || !matches!(op.action, Action::Write { .. }) {
            return self.storage.push(op);
        }
        let ghost = FileOp { id: OpId(op.id.0 | GHOST), ..op.clone() };
        match self.storage.push(ghost) {
            Ok(()) => {
                self.written = Some(op);
                Ok(())
            }
            Err(_) => Err(op),
        }
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.storage.reap(until, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.storage.allocated(file, at, len)
    }
}
