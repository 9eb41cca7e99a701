//! State of a request that does not begin and end at block boundaries: the memory of the blocks at its ends, of which
//! it covers a part only.
//!
//! Knows spans and memory, and nothing of how they are read or written. Keeps: the bytes of an end block that were not
//! requested come from the block as it was read and from nowhere else.

use memory::Segments;

use crate::size::in_memory;
use crate::{DiskOffset, Span};

/// A request that was widened to whole blocks.
#[derive(Debug)]
pub(crate) struct Unaligned {
    /// The requested bytes.
    pub asked: Span,
    /// The blocks at the ends of a write, of which the request changes a part.
    edges: Vec<Edge>,
}

/// A block of which a write changes a part.
#[derive(Debug)]
struct Edge {
    block: Span,
    /// All of it as it was.
    before: Segments,
    /// All of it as it is to be: partly the memory of `before`, partly that of the request.
    after: Segments,
}

/// `span`, which does not overflow, widened to whole blocks.
pub(crate) fn outside(span: Span, block: u64) -> Option<Span> {
    let at = span.at.align_down(block);
    let end = span.end().checked_align_up(block)?;
    Some(Span { at, len: end.checked_sub(at)? })
}

/// The whole blocks in `span`; none of them, at its beginning, if there are none.
pub(crate) fn inside(span: Span, block: u64) -> Option<Span> {
    let at = span.at.checked_align_up(block)?;
    let end = span.end().align_down(block);
    match end.checked_sub(at) {
        Some(len) => Some(Span { at, len }),
        None => Some(Span { at: span.at.align_down(block), len: 0 }),
    }
}

impl Unaligned {
    /// A read of `asked` into `memory`: with it the memory of `outside`.
    pub fn read(asked: Span, outside: Span, memory: Segments) -> (Unaligned, Segments) {
        let front = Segments::zeroed(in_memory(asked.at - outside.at));
        let back = Segments::zeroed(in_memory(outside.end() - asked.end()));
        (Unaligned { asked, edges: Vec::new() }, Segments::joined(vec![front, memory, back]))
    }

    /// One of `asked` that has no memory and changes nothing.
    pub fn question(asked: Span) -> Unaligned {
        Unaligned { asked, edges: Vec::new() }
    }

    /// A write of `asked` from `memory`: with it the memory of `outside`.
    pub fn write(asked: Span, outside: Span, memory: Segments, block: u64) -> (Unaligned, Segments) {
        let part = |span: Span| cut(&memory, asked, span);
        let edges = edges(asked, outside, block, part);
        let joined = {
            let around = |at: DiskOffset, end: DiskOffset| {
                let span = Span { at, len: end - at };
                let edge = edges.iter().find(|edge| edge.block.intersection(span) == Some(span));
                edge.map(|edge| cut(&edge.before, edge.block, span))
            };
            let (front, back) = (around(outside.at, asked.at), around(asked.end(), outside.end()));
            Segments::joined([front, Some(memory.clone()), back].into_iter().flatten().collect())
        };
        (Unaligned { asked, edges }, joined)
    }

    /// Zeroes in `asked`.
    pub fn zeroes(asked: Span, outside: Span, block: u64) -> Unaligned {
        Unaligned { asked, edges: edges(asked, outside, block, |span| Segments::zeroes(in_memory(span.len))) }
    }

    /// Whether blocks must be read before anything is written.
    pub fn has_edges(&self) -> bool {
        !self.edges.is_empty()
    }

    /// The blocks that must be read first.
    pub fn edges(&self) -> impl Iterator<Item = Span> + '_ {
        self.edges.iter().map(|edge| edge.block)
    }

    /// Memory for bytes of a block at an end: for what was there, or with what is to be there.
    pub fn edge_memory(&self, span: Span, written: bool) -> Option<Segments> {
        let edge = self.edges.iter().find(|edge| edge.block.intersection(span) == Some(span))?;
        Some(cut(if written { &edge.after } else { &edge.before }, edge.block, span))
    }
}

/// The blocks of which `asked` covers a part; `new` has the bytes of the request.
fn edges(asked: Span, outside: Span, block: u64, new: impl Fn(Span) -> Segments) -> Vec<Edge> {
    let first = Span { at: outside.at, len: block };
    let last = Span { at: DiskOffset(outside.end().0.saturating_sub(block)), len: block };
    let partly = |block: &Span| asked.intersection(*block) != Some(*block);
    let blocks = if first == last { vec![first] } else { vec![first, last] };
    let edge = |block: Span| {
        let inside = asked.intersection(block)?;
        let before = Segments::zeroed(in_memory(block.len));
        let part = |at: DiskOffset, end: DiskOffset| cut(&before, block, Span { at, len: end - at });
        let pieces = vec![part(block.at, inside.at), new(inside), part(inside.end(), block.end())];
        Some(Edge { block, after: Segments::joined(pieces), before })
    };
    blocks.into_iter().filter(partly).filter_map(edge).collect()
}

/// The bytes of `part` of the memory of `whole`.
pub(crate) fn cut(memory: &Segments, whole: Span, part: Span) -> Segments {
    memory.slice(in_memory(part.at - whole.at), in_memory(part.len))
}

#[cfg(test)]
mod test {
    use super::*;

    const fn span(at: u64, len: u64) -> Span {
        Span { at: DiskOffset(at), len }
    }

    #[test]
    fn spans_are_widened_and_narrowed_to_blocks() {
        assert_eq!(outside(span(511, 2), 512), Some(span(0, 1024)));
        assert_eq!(outside(span(512, 512), 512), Some(span(512, 512)));
        assert_eq!(inside(span(511, 1026), 512), Some(span(512, 1024)));
        assert_eq!(inside(span(513, 500), 512), Some(span(512, 0)));
        assert_eq!(outside(span(u64::MAX - 1, 1), 512), None);
    }

    #[test]
    fn a_write_takes_what_surrounds_it_from_the_blocks_at_its_ends() {
        let memory = Segments::copy_of(&[9; 600]);
        let (unaligned, joined) = Unaligned::write(span(500, 600), span(0, 1536), memory, 512);
        assert_eq!(unaligned.edges().collect::<Vec<_>>(), [span(0, 512), span(1024, 512)]);
        for (edge, byte) in [(span(0, 512), 1), (span(1024, 512), 2)] {
            unaligned.edge_memory(edge, false).unwrap().copy_from(&[byte; 512]);
        }
        let expected = [vec![1; 500], vec![9; 600], vec![2; 436]].concat();
        assert_eq!(joined.to_vec(), expected);
        assert_eq!(unaligned.edge_memory(span(0, 512), true).unwrap().to_vec(), expected[..512]);
        assert_eq!(unaligned.edge_memory(span(1024, 512), true).unwrap().to_vec(), expected[1024..]);
        assert!(unaligned.edge_memory(span(512, 512), true).is_none());
    }

    #[test]
    fn a_write_in_the_middle_of_a_block_has_one_edge() {
        let (unaligned, joined) = Unaligned::write(span(100, 1), span(0, 512), Segments::copy_of(&[9]), 512);
        assert_eq!(unaligned.edges().collect::<Vec<_>>(), [span(0, 512)]);
        unaligned.edge_memory(span(0, 512), false).unwrap().copy_from(&[1; 512]);
        assert_eq!(joined.to_vec(), [vec![1; 100], vec![9], vec![1; 411]].concat());
    }

    #[test]
    fn an_end_that_is_a_blocks_end_is_not_read() {
        let unaligned = Unaligned::zeroes(span(512, 600), span(512, 1024), 512);
        assert_eq!(unaligned.edges().collect::<Vec<_>>(), [span(1024, 512)]);
    }
}
