//! Writes that do not begin and end with blocks, as NBD clients may ask for them.
//!
//! Knows when to read and when to write; [`crate::unaligned`] knows the memory. First the blocks at the ends are read,
//! of which the request changes a part, then whole blocks are written. Nothing may overlap those blocks from the first
//! read to the last write: another write to the rest of such a block would be undone. After a failed read nothing is
//! written.

use memory::Segments;

use super::Disk;
use crate::format::Format;
use crate::unaligned::{self, Unaligned};
use crate::{Io, Operation, Request, Span};

impl<F: Format> Disk<F> {
    /// Continues such a request from `rest` on.
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
}

/// The blocks of a request that it changes as a whole.
fn middle(unaligned: &Unaligned, request: &Request) -> Span {
    let span = request.span();
    let (at, end) = unaligned.edges().fold((span.at, span.end()), |(at, end), edge| {
        (if edge.at == span.at { edge.end() } else { at }, if edge.end() == span.end() { edge.at } else { end })
    });
    // If one block is both ends, nothing is in the middle.
    Span { at, len: end.saturating_sub(at) }
}

/// The memory for `span` of such a request: of the blocks that were read, or of what is written.
pub(super) fn memory(unaligned: &Unaligned, request: &Request, edges_read: bool, span: Span) -> Segments {
    if edges_read && matches!(request.operation(), Operation::Patch { .. }) {
        return unaligned::cut(request.memory(), request.span(), span);
    }
    let Some(memory) = unaligned.edge_memory(span, edges_read) else { unreachable!("{span:?} is in no end block") };
    memory
}
