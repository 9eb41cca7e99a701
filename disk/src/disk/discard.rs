//! Discards, writes of zeroes, and reports of what is allocated.

use super::Disk;
use super::chain::Obstacle;
use super::fill::zeroes;
use super::layer::Missing;
use super::ops::Op;
use super::queue::Parked;
use crate::chain_map::Location;
use crate::format::{Discarded, Format, Mapping, Reserved, Ticket};
use crate::{
    Action, Allocation, Extent, ExtentKind, FileDone, FileError, FileId, FileOffset, FileRange, Io, Span, Status,
};

/// Extents in one answer: enough for any client, and little enough to keep while it is in flight.
const EXTENTS_MAX: usize = 4096;

/// Zeroes written by one operation: a raw image has space for everything at once, but an operation should end soon, and
/// the kernel limits its list of buffers.
const ZEROES_MAX: u64 = 2 << 20;

/// The largest logical block of any device, of which storage may be unable to free a part.
const FREED_WHOLE: u64 = 4096;

/// The outcome for the first bytes of a span that were to be freed.
enum Freed {
    /// This many read as zero, or may hold anything.
    Done(u64),
    /// The layer of this file has none of this many allocated.
    Absent(FileId, u64),
}

impl<F: Format> Disk<F> {
    /// Discards a request from `rest` on.
    pub(super) fn discard<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        self.clear(number, rest, Self::discard_first, io);
    }

    /// Makes a request zero from `rest` on.
    pub(super) fn write_zeroes<I: Io>(&mut self, number: u32, rest: Span, free: bool, io: &mut I) {
        let first = if free { Self::zero_by_freeing } else { Self::zero_by_writing };
        self.clear(number, rest, first, io);
    }

    /// Frees `rest` from its beginning to its end, as many bytes at a time as `first` does.
    fn clear<I: Io>(
        &mut self,
        number: u32,
        rest: Span,
        first: impl Fn(&mut Self, u32, Span, &mut I) -> Result<u64, Obstacle>,
        io: &mut I,
    ) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.tail_from(at);
            if self.active.is_postponed(number, left) || self.is_throttled(number, left) {
                return;
            }
            match first(self, number, left, io) {
                Ok(len) => at += len,
                Err(obstacle) => return self.wait_for(number, left, obstacle, io),
            }
        }
    }

    /// Discards the first bytes of `span`. Returns how many.
    fn discard_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        match self.free_first(number, span, Op::Trim { number }, io)? {
            Freed::Done(len) | Freed::Absent(_, len) => Ok(len),
        }
    }

    /// Frees the first bytes of `span` in the layer that a write to them goes to. The content of what stays allocated
    /// there is deallocated by `kept`.
    fn free_first<I: Io>(&mut self, number: u32, span: Span, kept: Op, io: &mut I) -> Result<Freed, Obstacle> {
        let (file, span) = self.route_write(span)?;
        if let Some(len) = self.nothing_to_hide(file, span)? {
            return Ok(Freed::Done(len));
        }
        let len = match self.chain.ask(file, |format| format.discard(span))? {
            Discarded::Freed { at: place, len, size } => {
                self.map.known_mut().overlay(Span { at: span.at, len }, Location::Zero);
                let op = Op::Release { number: Some(number), at: place };
                self.deallocate(number, op, file, FileRange { at: place, len: size }, io);
                len
            }
            Discarded::Kept { at: place, len } => {
                self.deallocate(number, kept, file, FileRange { at: place, len }, io);
                len
            }
            Discarded::Hidden { len } => {
                self.map.known_mut().overlay(Span { at: span.at, len }, Location::Zero);
                len
            }
            Discarded::Nothing { len } => return Ok(Freed::Absent(file, len)),
        };
        Ok(Freed::Done(len))
    }

    /// How many of the first bytes of `span` the layer of `file` has not allocated, where the layers below have nothing
    /// to hide either. The format is not called then, or trimming an empty clone would fill its tables. Ends where a
    /// format could free something, so that the rest still reaches it whole.
    fn nothing_to_hide(&mut self, file: FileId, span: Span) -> Result<Option<u64>, Obstacle> {
        // A layer without a parent has nothing to hide. A format that must load metadata to answer is called to discard
        // instead: it loads the same block for that, and next time it is there.
        let absent = if self.layers().len() > 1 { Some(self.chain.format_of(file).map(span)) } else { None };
        let Some(Ok(Mapping::Parent { len })) = absent else { return Ok(None) };
        let (Location::Zero, run) = self.map.resolve(span.at, &mut self.chain).map_err(Obstacle::Chunk)? else {
            return Ok(None);
        };
        let len = self.map.coalesce(span.at, Location::Zero, run.min(len).min(span.len), len.min(span.len));
        if len == span.len {
            return Ok(Some(len));
        }
        let granularity = u64::from(self.geometry().discard.max(1));
        let end = (span.at + len).align_down(granularity);
        Ok(end.checked_sub(span.at).filter(|&len| len > 0))
    }

    /// Makes the first bytes of `span` zero with as little space as possible. Returns how many.
    fn zero_by_freeing<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        match self.free_first(number, span, Op::Zero { number, ticket: None }, io)? {
            Freed::Done(len) => Ok(len),
            // What the parent shows there must be hidden.
            Freed::Absent(file, len) => match self.map.resolve(span.at, &mut self.chain).map_err(Obstacle::Chunk)? {
                (Location::Zero, run) => Ok(run.min(len)),
                (
                    Location::Data { .. }
                    | Location::Compressed { .. }
                    | Location::Shared { .. }
                    | Location::Damaged { .. },
                    run,
                ) => self.zero_by_hiding(number, file, Span { at: span.at, len: run.min(len) }, io),
            },
        }
    }

    /// Allocates the first bytes of `span`, which live in a parent, in `file`, so that they read as zero. Returns how
    /// many. What a copy on write must write around the zeroes is written with them.
    fn zero_by_hiding<I: Io>(&mut self, number: u32, file: FileId, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let span = Span { at: span.at, len: span.len.min(ZEROES_MAX) };
        let reserved = self.reserve(file, span)?;
        let Reserved { at: place, len, ticket, fill } = reserved;
        if fill.is_some() {
            self.write_reserved(number, span.at, (file, reserved), zeroes(len), io);
        } else {
            let op = Op::Zero { number, ticket };
            self.deallocate(number, op, file, FileRange { at: place, len }, io);
        }
        Ok(len)
    }

    /// Writes zeroes to the first bytes of `span`, which thereby are allocated. Returns how many.
    fn zero_by_writing<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let (file, reserved) = self.reserve_somewhere(Span { at: span.at, len: span.len.min(ZEROES_MAX) })?;
        self.write_reserved(number, span.at, (file, reserved), zeroes(reserved.len), io);
        Ok(reserved.len)
    }

    /// The content of what stays allocated was deallocated.
    pub(super) fn trimmed<I: Io>(&mut self, number: u32, done: FileDone, io: &mut I) {
        let file = done.op.file;
        self.chain.of(file).touched();
        let result = match (done.result, done.op.action) {
            (Err(FileError::Unsupported), Action::Deallocate { at, len }) => {
                if let Some(inside) = freed_whole(FileRange { at, len }) {
                    self.deallocate(number, Op::Trim { number }, file, inside, io);
                }
                // A discard is advice: storage that cannot deallocate has not failed.
                Ok(())
            }
            (result, _) => result,
        };
        self.part_ended(number, Status::of(result));
    }

    /// Deallocates a range of a file.
    fn deallocate<I: Io>(&mut self, number: u32, op: Op, file: FileId, range: FileRange, io: &mut I) {
        self.push_part(number, op, file, Action::Deallocate { at: range.at, len: range.len }, io);
    }

    /// Bytes of a file were deallocated that are to be zero.
    pub(super) fn zeroed<I: Io>(&mut self, number: u32, ticket: Option<Ticket>, done: FileDone, io: &mut I) {
        let file = done.op.file;
        match (done.result, done.op.action) {
            (Err(FileError::Unsupported), Action::Deallocate { .. }) if self.is_to_be_fast(number) => {
                self.active.fail(number, Status::Unsupported);
                self.transferred(number, file, ticket, true, Err(FileError::Unsupported), io);
            }
            (Err(FileError::Unsupported), Action::Deallocate { at, len }) => {
                let inside = if ticket.is_none() { freed_whole(FileRange { at, len }) } else { None };
                if let Some(inside) = inside {
                    return self.zero_edges(number, file, (FileRange { at, len }, inside), io);
                }
                let op = Op::Transfer { number, ticket };
                self.active.waiting.wait_begun(number);
                self.ops.push(op, file, Action::Write { at, from: zeroes(len) }, io);
            }
            (result, _) => self.transferred(number, file, ticket, true, result, io),
        }
    }

    /// Whether the request wants zeroes only if they need not be written (NBD fast zero).
    fn is_to_be_fast(&self, number: u32) -> bool {
        self.active.get(number).request.fast
    }

    /// Makes a range of a file zero in place, of which the storage can free only `inside`: writes the rest.
    fn zero_edges<I: Io>(&mut self, number: u32, file: FileId, (range, inside): (FileRange, FileRange), io: &mut I) {
        self.chain.of(file).touched();
        self.deallocate(number, Op::Zero { number, ticket: None }, file, inside, io);
        let edges = [(range.at, inside.at), (inside.end(), range.end())];
        for (at, end) in edges.into_iter().filter(|(at, end)| at < end) {
            let from = zeroes(end - at);
            self.push_part(number, Op::Transfer { number, ticket: None }, file, Action::Write { at, from }, io);
        }
        self.part_ended(number, Status::Done);
    }

    /// Freed or leaked space was deallocated, or could not be.
    pub(super) fn released<I: Io>(
        &mut self,
        number: Option<u32>,
        file: FileId,
        at: FileOffset,
        result: Result<(), FileError>,
        io: &mut I,
    ) {
        self.chain.of(file).touched();
        self.chain.format_of(file).released(at, result.is_ok());
        match number {
            // The guest's data is gone either way.
            Some(number) => self.part_ended(number, Status::Done),
            None => self.reclaimed(file, io),
        }
    }

    /// Reports from `rest` on how a request is allocated.
    pub(super) fn report_extents<I: Io>(&mut self, number: u32, rest: Span, depths: bool, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let rest = rest.tail_from(at);
            let extent = match self.extent(rest, depths, io) {
                Ok(extent) => extent,
                Err(missing) => return self.park_for_chunk(Parked::Request { number, rest }, missing, io),
            };
            let extents = self.active.get_mut(number).request.extents_mut();
            let full = extents.len() == EXTENTS_MAX;
            match extents.last_mut() {
                Some(last) if (last.kind, last.depth) == (extent.kind, extent.depth) => last.len += extent.len,
                _ if full => return,
                _ => extents.push(extent),
            }
            at += extent.len.max(1);
        }
    }

    /// How the first bytes of `span` are allocated.
    fn extent<I: Io>(&mut self, span: Span, depths: bool, io: &mut I) -> Result<Extent, Missing> {
        let (place, len) = self.map.resolve(span.at, &mut self.chain)?;
        let len = len.min(span.len);
        let (len, depth) = if depths { self.chain.provider(Span { at: span.at, len })? } else { (len, 0) };
        let (kind, known) = match place {
            Location::Zero => (ExtentKind::Hole, len),
            Location::Data { file, at } | Location::Shared { file, at } => match io.allocated(file, at, len) {
                Allocation::Data(known) => (ExtentKind::Data, known),
                Allocation::Hole(known) => (ExtentKind::Hole, known),
            },
            // A compressed cluster has no blocks of its own that could be holes.
            Location::Compressed { .. } | Location::Damaged { .. } => (ExtentKind::Data, len),
        };
        Ok(Extent { len: len.min(known), kind, depth })
    }
}

/// The part of a range that storage with large blocks can free, after it has refused the whole range. `None` where
/// there is none, or where large blocks cannot be the reason.
fn freed_whole(range: FileRange) -> Option<FileRange> {
    let at = range.at.checked_align_up(FREED_WHOLE)?;
    let end = range.end().align_down(FREED_WHOLE);
    let inside = FileRange { at, len: end.checked_sub(at)? };
    (inside.len > 0 && inside != range).then_some(inside)
}
