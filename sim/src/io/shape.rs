//! Splitting and merging of transfers, between the disk and the rest of the engine, with planted bugs.
//!
//! Without a planted bug, it passes completions through unchanged.

use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};

use super::{SimIo, Storage};
use crate::planted::Planted;

/// Flag in the ids of operations that are pieces of split or parts of merged ones.
const OURS: u64 = 1 << 60;
/// Flag in the ids of pieces whose operation was answered without them.
const GHOST: u64 = 1 << 59;

/// A planted bug in splitting and merging.
#[derive(Default)]
pub(super) struct Misshapen {
    bug: Option<Planted>,
}

impl Misshapen {
    /// Plants a bug if it belongs here.
    pub fn plant(&mut self, bug: Option<Planted>) {
        self.bug = bug.filter(|bug| matches!(bug, Planted::SplitAnsweredEarly | Planted::FailedPartHidden));
    }

    /// The completions that are reported for this one; `None` if they were reported before.
    pub fn settle(&mut self, ended: FileDone, storage: &mut Storage) -> Option<Vec<FileDone>> {
        let id = ended.op.id.0;
        if self.bug.is_none() || id & OURS == 0 || id >= OURS << 1 {
            return Some(vec![ended]);
        }
        if id & GHOST != 0 {
            return None;
        }
        let is_write = matches!(ended.op.action, Action::Write { .. });
        match self.bug {
            Some(Planted::FailedPartHidden) if is_write => Some(vec![FileDone { op: ended.op, result: Ok(()) }]),
            Some(Planted::SplitAnsweredEarly) if is_write => {
                let mut all = vec![ended];
                for other in storage.pending.iter_mut().filter(|other| other.op.id.0 == id) {
                    all.push(FileDone { op: other.op.clone(), result: Ok(()) });
                    other.op.id = OpId(id | GHOST);
                }
                Some(all)
            }
            _ => Some(vec![ended]),
        }
    }
}

impl SimIo {
    /// Submits operations held back; returns whether the storage has something to do.
    pub(super) fn submit(&mut self) -> bool {
        if let Some(mut shape) = self.shape.take() {
            shape.retry(&mut Whole(self));
            shape.submit(&mut Whole(self));
            // A queue that was full has room now.
            shape.retry(&mut Whole(self));
            self.shape = Some(shape);
        }
        !self.storage.pending.is_empty()
    }

    /// The disk's own operations that end with these.
    pub(super) fn settle_shaped(&mut self, ended: Vec<FileDone>) -> Vec<FileDone> {
        let Some(mut shape) = self.shape.take() else { return ended };
        let mut done = Vec::new();
        ended.into_iter().for_each(|one| shape.settle(one, &mut Whole(self), &mut done));
        shape.retry(&mut Whole(self));
        self.shape = Some(shape);
        done
    }

    /// Submits an operation that is neither split nor merged further.
    pub(super) fn push_whole(&mut self, op: FileOp) -> Result<(), FileOp> {
        let forgets = self.forgets_data && matches!(op.action, Action::SyncData);
        let (data_files, mut below) = self.parts();
        if forgets { below.push(op) } else { data_files.push(op, &mut below) }
    }
}

/// All layers below splitting and merging.
pub(super) struct Whole<'a>(pub &'a mut SimIo);

impl Io for Whole<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.0.push_whole(op)
    }

    fn reap(&mut self, _: Until, _: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        unreachable!("a run finishes operations one by one")
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.0.allocated(file, at, len)
    }
}
