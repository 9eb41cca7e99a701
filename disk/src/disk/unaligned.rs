//! Writes that do not begin and end with blocks, as peers of NBD may ask for them.
//!
//! Knows when what is read, and when what is written; [`crate::unaligned`] knows the memory. Such a request is done in two
//! stages: first the blocks are read of which it changes a part, then whole blocks are written. It is one that nothing
//! may overlap, block by block, from the first read to the last write: else a write to the rest of such a block, which
//! came between, would be undone. After a read that has failed nothing is written.

use memory::Segments;

use super::Disk;
use crate::format::Format;
use crate::unaligned::{self, Unaligned};
use crate::{Io, Operation, Request, Span, Status};

impl<F: Format> Disk<F> {
    /// Goes on with one from `rest` on.
    pub(super) fn run_unaligned<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let active = self.active.get(number);
        let (operation, edges_read) = (active.request.operation(), active.edges_read);
        let Some(unaligned) = active.request.unaligned() else { unreachable!("request {number} is whole blocks") };
        let edges: Vec<Span> = unaligned.edges().filter_map(|edge| edge.intersection(rest)).collect();
        match operation {
            _ if !edges_read => edges.into_iter().for_each(|edge| self.read(number, edge, io)),
            Operation::WriteZeroes { free, .. } => {
                let inside = middle(unaligned, &active.request).intersection(rest);
                if let Some(inside) = inside {
                    self.write_zeroes(number, inside, free, io);
                }
                edges.into_iter().for_each(|edge| self.write(number, edge, io));
            }
            _ => self.write(number, rest, io),
        }
    }

    /// Whether nothing of such a request is under way because what is around it has just been read, all of it.
    pub(super) fn edges_read(&mut self, number: u32) -> bool {
        let active = self.active.get_mut(number);
        let is_next = !active.edges_read && active.status == Status::Done;
        active.edges_read |= is_next;
        is_next
    }

    /// Writes what is to be written.
    pub(super) fn write_unaligned<I: Io>(&mut self, number: u32, io: &mut I) {
        let span = self.active.get(number).request.span();
        self.part_begun(number);
        self.run(number, span, io);
        self.part_ended(number, Status::Done, io);
    }
}

/// The blocks of a request that it changes as a whole.
fn middle(unaligned: &Unaligned, request: &Request) -> Span {
    let span = request.span();
    let (at, end) = unaligned.edges().fold((span.at, span.end()), |(at, end), edge| {
        (if edge.at == span.at { edge.end() } else { at }, if edge.end() == span.end() { edge.at } else { end })
    });
    // Where one block is both ends, the end comes in front.
    Span { at, len: end.saturating_sub(at) }
}

/// The memory for `span` of such a request, in the stage in which it is.
pub(super) fn memory(unaligned: &Unaligned, request: &Request, edges_read: bool, span: Span) -> Segments {
    if edges_read && matches!(request.operation(), Operation::Patch { .. }) {
        return unaligned::cut(request.memory(), request.span(), span);
    }
    let Some(memory) = unaligned.edge_memory(span, edges_read) else { unreachable!("{span:?} is in no end block") };
    memory
}
