//! Purposes of file operations: the request that waits for one, and what its result shows about the file.
//!
//! Knows nothing of how an operation is done. Invariant: an operation is for one request at most.

use super::Disk;
use super::ops::Op;
use super::queue::Parked;
use crate::format::Format;
use crate::size::on_disk;
use crate::{Action, FileDone};

impl<F: Format> Disk<F> {
    /// The request that waits for an operation, if it is for one only.
    pub(super) fn request_of(&mut self, op: &Op) -> Option<u32> {
        match op {
            Op::Transfer { number, .. } | Op::Filled { number, .. } | Op::Zero { number, .. } | Op::Trim { number } => {
                Some(*number)
            }
            Op::Release { number, .. } => *number,
            Op::Fill { fill } => Some(self.fills.get(*fill).number),
            Op::ReadCompressed { .. } | Op::Load { .. } | Op::Meta | Op::Stamp | Op::Sync | Op::ReclaimSync { .. } => {
                None
            }
            Op::MapWrite | Op::MapSync => None,
        }
    }

    /// The request that something parked is a part of.
    pub(super) fn request_of_parked(&mut self, parked: Parked) -> u32 {
        match parked {
            Parked::Request { number, .. } => number,
            Parked::Fill { fill, .. } => self.fills.get(fill).number,
        }
    }

    /// Records how far the file reaches, if an operation has written to a place that records of the redo log may refer
    /// to.
    pub(super) fn note_reach(&mut self, op: &Op, done: &FileDone) {
        let is_placed = matches!(op, Op::Transfer { ticket: Some(_), .. } | Op::Filled { .. });
        if let (true, Action::Write { at, from }, Ok(())) = (is_placed, &done.op.action, done.result) {
            self.chain.of(done.op.file).reaches(*at + on_disk(from.len()));
        }
    }
}
