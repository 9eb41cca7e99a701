//! The storage for an auxiliary disk with one file next to the guest's; its operations are distinguished by their ids.

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};

use crate::io::SimIo;

/// The first id: above those of the guest's disk and of splitting and merging, below those of aligners and data files.
const ASIDE: u64 = 1 << 61;

/// The file, which is file 0 of the auxiliary disk.
pub(super) struct Aside<'a> {
    pub io: &'a mut SimIo,
    pub file: FileId,
}

/// Whether an operation belongs to an auxiliary disk.
pub(super) fn is_aside(op: &FileOp) -> bool {
    op.id.0 >= ASIDE
}

/// Converts a completion to the ids of the auxiliary disk.
pub(super) fn own(FileDone { op, result }: FileDone) -> FileDone {
    FileDone { op: own_op(op), result }
}

fn own_op(op: FileOp) -> FileOp {
    FileOp { id: OpId(op.id.0 - ASIDE), file: FileId(0), ..op }
}

impl Io for Aside<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.io.push(FileOp { id: OpId(op.id.0 + ASIDE), file: self.file, ..op }).map_err(own_op)
    }

    fn reap(&mut self, _: Until, _: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        unreachable!("what has ended is settled one by one")
    }

    fn allocated(&mut self, _: FileId, at: FileOffset, len: u64) -> Allocation {
        self.io.allocated(self.file, at, len)
    }
}
