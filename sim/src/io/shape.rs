//! What splits and merges, between the disk and the rest of the engine, and what is planted there.
//!
//! With no bug chosen nothing is done to what the honest one is told.

use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};

use super::{SimIo, Storage};
use crate::planted::Planted;

/// Marks the names of operations that are pieces or parts of others.
const OURS: u64 = 1 << 60;
/// Marks pieces whose operation was answered without them.
const GHOST: u64 = 1 << 59;

/// What does less than it says.
#[derive(Default)]
pub(super) struct Misshapen {
    bug: Option<Planted>,
}

impl Misshapen {
    /// Plants a bug, if it is one of these.
    pub fn plant(&mut self, bug: Option<Planted>) {
        self.bug = bug.filter(|bug| matches!(bug, Planted::SplitAnsweredEarly | Planted::FailedPartHidden));
    }

    /// What the rest of the engine is told has ended with this; `None` for what was told before.
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
    /// Has go on what is held back. Whether the storage has something to do.
    pub(super) fn submit(&mut self) -> bool {
        if let Some(mut shape) = self.shape.take() {
            shape.retry(&mut Whole(self));
            shape.submit(&mut Whole(self));
            // An engine that was full once has room now.
            shape.retry(&mut Whole(self));
            self.shape = Some(shape);
        }
        !self.storage.pending.is_empty()
    }

    /// What has ended of the disk's own operations with these.
    pub(super) fn settle_shaped(&mut self, ended: Vec<FileDone>) -> Vec<FileDone> {
        let Some(mut shape) = self.shape.take() else { return ended };
        let mut done = Vec::new();
        ended.into_iter().for_each(|one| shape.settle(one, &mut Whole(self), &mut done));
        shape.retry(&mut Whole(self));
        self.shape = Some(shape);
        done
    }

    /// Pushes an operation that is what it will be.
    pub(super) fn push_whole(&mut self, op: FileOp) -> Result<(), FileOp> {
        let forgets = self.forgets_data && matches!(op.action, Action::SyncData);
        let (data_files, mut below) = self.parts();
        if forgets { below.push(op) } else { data_files.push(op, &mut below) }
    }
}

/// All below what splits and merges.
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
