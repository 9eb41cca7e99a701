//! The storage for a disk of one file beside the guest's, whose operations it tells from that one's by their numbers.

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Until};

use crate::io::SimIo;

/// The numbers begin here: above all of the guest's disk and of what splits and merges, below those of aligners and of
/// data files.
const ASIDE: u64 = 1 << 61;

/// The file, of which the disk beside thinks that it is file 0.
pub(super) struct Aside<'a> {
    pub io: &'a mut SimIo,
    pub file: FileId,
}

/// Whether an operation is of a disk beside the guest's.
pub(super) fn is_aside(op: &FileOp) -> bool {
    op.id.0 >= ASIDE
}

/// What has ended, as the disk beside knows it.
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
