//! Requests of the client: those in flight and those that wait, in the order in which they must take effect.
//!
//! It knows nothing about bytes on the wire. Invariant, which makes sending again safe: of two requests that overlap,
//! one of which writes, the later one is not sent before the earlier one has been answered. So no two in flight
//! overlap, and whatever is sent again after a lost connection comes before all that was to follow it.

use std::collections::VecDeque;
use std::sync::Arc;

use disk::FileError;
use memory::Segments;
use memory::size::in_memory;

use super::INVALID;
use super::planted::Planted;
use super::ranges::Ranges;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Zero,
    Flush,
    Status,
}

impl Kind {
    /// Whether it changes the export.
    pub(super) fn changes(self) -> bool {
        matches!(self, Kind::Write | Kind::Zero)
    }
}

/// Whose request it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// A part of the operation with this key.
    Op(u64),
    /// Repeats the kept write with this number.
    Replay(u64),
    /// A flush of our own, to make room for more kept writes.
    Room,
    /// The question about allocation with this number.
    Allocation(u64),
    /// Compares a block of the sample.
    Sample,
}

/// An extent as the server describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Described {
    /// Its length in bytes.
    pub len: u64,
    /// Whether it reads as zeroes without being transferred, in the context `base:allocation`.
    pub zero: bool,
    /// The flags of another context, such as bit 0 for changed parts in `qemu:dirty-bitmap:`.
    pub flags: u32,
}

/// A request in flight, on the current connection.
#[derive(Debug, Default)]
pub(super) struct Sent {
    pub(super) cookie: u64,
    /// A flush covers the kept writes with smaller numbers.
    pub(super) covers: u64,
    /// The same of blocks of the sample.
    pub(super) covers_sample: u64,
    /// The data of a read that has arrived.
    pub(super) arrived: Ranges,
    /// The first error of a structured reply.
    pub(super) error: Option<FileError>,
    pub(super) described: Vec<Described>,
}

/// A request: an operation, or a part of a large one.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) owner: Owner,
    pub(super) kind: Kind,
    pub(super) at: u64,
    pub(super) len: u64,
    /// Where a read goes, or a write comes from.
    pub(super) memory: Segments,
    /// The bytes of a write, copied when it is first sent: a guest may change its memory, but what is sent again must
    /// be what was sent before.
    pub(super) bytes: Option<Arc<[u8]>>,
    pub(super) sent: Option<Sent>,
}

impl Piece {
    pub(super) fn new(owner: Owner, kind: Kind, at: u64, len: u64) -> Piece {
        Piece { owner, kind, at, len, memory: Segments::empty(), bytes: None, sent: None }
    }
}

/// All requests that are not answered.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    pub(super) list: VecDeque<Piece>,
    pub(super) planted: Option<Planted>,
}

impl Pieces {
    /// The number of requests of operations, in flight and waiting.
    pub(super) fn of_operations(&self) -> usize {
        self.list.iter().filter(|piece| matches!(piece.owner, Owner::Op(_))).count()
    }

    /// The bytes of writes in flight, each of which is kept when it has been answered.
    pub(super) fn writing(&self) -> u64 {
        let sent = self.list.iter().filter(|piece| piece.sent.is_some() && matches!(piece.owner, Owner::Op(_)));
        sent.filter(|piece| piece.kind == Kind::Write).map(|piece| piece.len).sum()
    }

    /// The request in flight with this cookie.
    pub(super) fn find(&self, cookie: u64) -> Option<usize> {
        let by_order = self.planted == Some(Planted::MatchedByOrder);
        self.list.iter().position(|piece| piece.sent.as_ref().is_some_and(|sent| by_order || sent.cookie == cookie))
    }

    /// Makes everything in flight wait for the next connection. Its own requests are dropped: [`super::Client`] adds
    /// them again as needed.
    pub(super) fn take_back(&mut self) {
        self.list.retain(|piece| !matches!(piece.owner, Owner::Replay(_) | Owner::Room | Owner::Sample));
        if self.planted == Some(Planted::ResentBehindNewer) {
            let sent = self.list.iter().position(|piece| piece.sent.is_some());
            if let Some(piece) = sent.and_then(|index| self.list.remove(index)) {
                self.list.push_back(piece);
            }
        }
        self.list.iter_mut().for_each(|piece| piece.sent = None);
    }
}

/// Cuts a range into requests of at most `most` bytes, each a multiple of `unit`.
pub(super) fn cut(
    owner: Owner,
    kind: Kind,
    (at, len): (u64, u64),
    memory: &Segments,
    (most, unit): (u64, u64),
) -> Result<Vec<Piece>, FileError> {
    if at % unit != 0 || len % unit != 0 {
        return Err(INVALID);
    }
    let parts = (0..len.div_ceil(most)).map(|n| {
        let (from, part) = (n * most, most.min(len - n * most));
        let memory = if memory.is_empty() { Segments::empty() } else { memory.slice(in_memory(from), in_memory(part)) };
        Piece { memory, ..Piece::new(owner, kind, at + from, part) }
    });
    Ok(parts.collect())
}
