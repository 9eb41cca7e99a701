//! Writes parts of sectors by reading and writing whole ones, as two planted bugs do.
//!
//! Unused without such a bug.

use disk::{DiskOffset, Operation, Request, Span, Status, Token};
use memory::Segments;

use super::Run;
use crate::planted::Planted;
use crate::saboteur::SabotagedIo;
use crate::sector::{PART, PARTS, SECTOR};
use crate::workload::Parts;

/// Flag in the token of a read of the sectors around the write with that number.
const AROUND: u64 = 1 << 62;

/// A partial write that waits for the surrounding data.
#[derive(Debug)]
pub(super) struct Around {
    sectors: Span,
    memory: Segments,
    durable: bool,
}

impl Run {
    /// Begins a partial write as the bug does; returns false without such a bug.
    pub(super) fn writes_around(&mut self, number: u64, parts: Parts, bytes: &Segments, durable: bool) -> bool {
        let bug = self.bug.filter(|bug| matches!(bug, Planted::UnguardedPatch | Planted::EarlyPatchRead));
        let (Some(bug), true) = (bug, parts.at % PARTS != 0 || parts.count % PARTS != 0) else { return false };
        let whole = parts.sectors();
        let sectors = Span { at: DiskOffset(whole.at * SECTOR), len: whole.count * SECTOR };
        let around = Segments::zeroed(size(sectors.len));
        let front = size(DiskOffset(parts.at * PART) - sectors.at);
        let back = front + bytes.len();
        let pieces = vec![around.slice(0, front), bytes.clone(), around.slice(back, size(sectors.len) - back)];
        let memory = Segments::joined(pieces);
        self.ask(Operation::Read, sectors, around, AROUND | number);
        if bug == Planted::EarlyPatchRead {
            // Overlapping requests are ordered: it waits for the read as for everything before it.
            self.ask(Operation::Patch { durable }, sectors, memory, number);
        } else {
            self.around.insert(number, Around { sectors, memory, durable });
        }
        true
    }

    /// Handles the response to such a read: the write begins, unless the read has failed.
    pub(super) fn read_around(&mut self, token: u64, status: Status) -> Option<(u64, Status)> {
        if token & AROUND == 0 {
            return Some((token, status));
        }
        let number = token & !AROUND;
        let Around { sectors, memory, durable } = self.around.remove(&number)?;
        if status != Status::Done {
            return Some((number, status));
        }
        self.ask(Operation::Write { durable }, sectors, memory, number);
        None
    }

    fn ask(&mut self, operation: Operation, span: Span, memory: Segments, token: u64) {
        match Request::new(operation, span, memory, Token(token), &self.disk.geometry()) {
            Ok(request) => self.disk.submit(request, &mut SabotagedIo { io: &mut self.io, plot: &self.plot }),
            Err(status) => panic!("the disk has no {span:?}: {status:?}"),
        }
    }
}

fn size(len: u64) -> usize {
    usize::try_from(len).unwrap_or(0)
}
