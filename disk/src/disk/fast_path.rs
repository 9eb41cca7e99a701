//! Requests that are one operation on one file, as nearly all of them are.
//!
//! Knows when a request is of this kind, and nothing of how the others are split. Keeps: only the time differs. Such a
//! request is among the active ones with one part under way, so others wait for it, a merge finds it, and it ends as
//! they do.
//!
//! `inline(always)`, here and in what this uses, marks the path of these requests: calls would be a tenth of its
//! instructions.

use super::Disk;
use super::active::Active;
use crate::chain_map::Location;
use crate::format::Format;
use crate::{Action, FileDone, FileId, FileOffset, FileOp, Io, Operation, Request};

impl<F: Format> Disk<F> {
    /// The one place in a file where all bytes of a read or a write live, if that is known and they stay there: nothing
    /// has to be loaded, reserved or committed. Only for a request that need not wait for others.
    pub(super) fn fast_place(&self, request: &Request) -> Option<(FileId, FileOffset)> {
        let span = request.span();
        let write = match request.operation() {
            Operation::Read => false,
            // A merge of the leaf routes writes, and a broken disk refuses them.
            Operation::Write { .. } if !self.routing.is_to_leaf() || self.chain.is_broken() => return None,
            Operation::Write { .. } => true,
            _ => return None,
        };
        if span.len == 0 {
            return None;
        }
        if let Some(file) = self.chain.flat() {
            return Some((file, span.at.in_flat_file()));
        }
        match self.map.lookup(span.at)? {
            (Location::Data { file, at }, len) if len >= span.len && (!write || file == self.chain.leaf()) => {
                Some((file, at))
            }
            (Location::Shared { file, at }, len) if len >= span.len && !write => Some((file, at)),
            _ => None,
        }
    }

    /// Starts a request whose bytes live at `place`. The operation borrows its memory.
    #[inline(always)]
    pub(super) fn start_fast<I: Io>(&mut self, mut request: Request, place: (FileId, FileOffset), io: &mut I) {
        let (file, at) = place;
        let memory = request.lend();
        let action = match request.operation() {
            Operation::Read => Action::Read { at, into: memory },
            _ => Action::Write { at, from: memory },
        };
        let number = self.active.insert(Active::new(request, self.routing.epoch()));
        self.active.waiting.wait_begun(number);
        self.ops.push_request(number, file, action, io);
    }

    /// Ends a request that was one operation.
    pub(super) fn fast_ended<I: Io>(&mut self, number: u32, done: FileDone, io: &mut I) {
        let FileOp { file, action, .. } = done.op;
        let (memory, wrote) = match action {
            Action::Read { into, .. } => (into, false),
            Action::Write { from, .. } => (from, true),
            Action::SyncData | Action::Deallocate { .. } => {
                unreachable!("the engine has completed an operation that was never pushed: {:?}", done.op.id)
            }
        };
        self.active.waiting.wait_ended(number);
        self.active.get_mut(number).request.give_back(memory);
        if done.result.is_err() {
            return self.transferred(number, file, None, wrote, done.result, io);
        }
        if wrote {
            self.chain.of(file).touched();
        }
        self.quiet(number);
    }
}
