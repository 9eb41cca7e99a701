//! Discards, writes of zeroes, and reports of what is allocated.

use super::fill::zeroes;
use super::{Disk, Obstacle, Op, Parked, status_of};
use crate::fold::Where;
use crate::format::{Discarded, Format, Reserved, Ticket, Wait};
use crate::{Action, Allocation, Extent, ExtentKind, FileDone, FileError, FileId, Io, Span, Status};

/// Extents in one answer: what a client can do something with, and little enough to be kept while it is in flight.
const EXTENTS_MAX: usize = 4096;

/// A raw image has room for everything at once; one operation should still end in good time, and be a list of parts
/// that the kernel takes.
const ZEROES_MAX: u64 = 2 << 20;

impl<F: Format> Disk<F> {
    pub(super) fn discard<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = Span { at, len: rest.end().saturating_sub(at) };
            if self.is_postponed(number, left) {
                return;
            }
            let (file, discarded) = match self.discard_somewhere(left) {
                Ok(found) => found,
                Err(obstacle) => return self.wait_for(number, left, obstacle, io),
            };
            let len = match discarded {
                Discarded::Freed { at, len, size } => {
                    self.give_up(number, file, (Span { at: left.at, len }, at), size, io);
                    len
                }
                Discarded::Kept { at, len } => {
                    self.push_piece(number, Op::Trim { number }, file, Action::Deallocate { at, len }, io);
                    len
                }
                Discarded::Hidden { len } => {
                    self.fold.overlay(Span { at: left.at, len }, Where::Zero);
                    len
                }
                Discarded::Nothing { len } => len,
            };
            at = at.saturating_add(len);
        }
    }

    /// Gives up the first bytes of `span`, in the layer that takes a write to them.
    fn discard_somewhere(&mut self, span: Span) -> Result<(FileId, Discarded), Obstacle> {
        let (file, span) = self.writes_go_to(span)?;
        let discarded = self.format_of(file).map_or(Err(Wait::NoSpace), |format| format.discard(span));
        Ok((file, discarded.map_err(|wait| Obstacle::Layer(file, wait))?))
    }

    pub(super) fn write_zeroes<I: Io>(&mut self, number: u32, rest: Span, free: bool, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = Span { at, len: rest.end().saturating_sub(at) };
            if self.is_postponed(number, left) {
                return;
            }
            let done =
                if free { self.zero_by_freeing(number, left, io) } else { self.zero_by_writing(number, left, io) };
            match done {
                Ok(len) => at = at.saturating_add(len),
                Err(obstacle) => return self.wait_for(number, left, obstacle, io),
            }
        }
    }

    /// Makes the first bytes of `span` zero with as little space as possible; how many.
    fn zero_by_freeing<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let (file, discarded) = self.discard_somewhere(span)?;
        match discarded {
            Discarded::Freed { at, len, size } => {
                self.give_up(number, file, (Span { at: span.at, len }, at), size, io);
                Ok(len)
            }
            Discarded::Kept { at, len } => {
                let op = Op::Zero { number, ticket: None };
                self.push_piece(number, op, file, Action::Deallocate { at, len }, io);
                Ok(len)
            }
            Discarded::Hidden { len } => {
                self.fold.overlay(Span { at: span.at, len }, Where::Zero);
                Ok(len)
            }
            // Nothing in this layer. What a parent shows there is to be hidden.
            Discarded::Nothing { len } => match self.resolve(span.at).map_err(Obstacle::Grain)? {
                (Where::Zero, run) => Ok(run.min(len)),
                (Where::Data { .. } | Where::Packed { .. }, run) => {
                    self.zero_by_hiding(number, file, Span { at: span.at, len: run.min(len) }, io)
                }
            },
        }
    }

    /// Gives the first bytes of `span`, which live in a parent, a place in `file` that reads as zero; how many. What
    /// has to be written anyway, around the zeroes, is written with them.
    fn zero_by_hiding<I: Io>(&mut self, number: u32, file: FileId, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let span = Span { at: span.at, len: span.len.min(ZEROES_MAX) };
        let reserved = self.reserve(file, span).map_err(|wait| Obstacle::Layer(file, wait))?;
        let Reserved { at, len, ticket, fill } = reserved;
        if fill.is_some() {
            self.write_reserved(number, span.at, (file, reserved), zeroes(len), io);
        } else {
            let op = Op::Zero { number, ticket };
            self.push_piece(number, op, file, Action::Deallocate { at, len }, io);
        }
        Ok(len)
    }

    /// Writes zeroes to the first bytes of `span`, which thereby have space; how many.
    fn zero_by_writing<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Obstacle> {
        let (file, reserved) = self.reserve_somewhere(Span { at: span.at, len: span.len.min(ZEROES_MAX) })?;
        self.write_reserved(number, span.at, (file, reserved), zeroes(reserved.len), io);
        Ok(reserved.len)
    }

    /// The format has freed `span`, which lived in the `size` bytes of the file at `at`.
    fn give_up<I: Io>(&mut self, number: u32, file: FileId, (span, at): (Span, u64), size: u64, io: &mut I) {
        self.fold.overlay(span, Where::Zero);
        let op = Op::Release { number: Some(number), at };
        self.push_piece(number, op, file, Action::Deallocate { at, len: size }, io);
    }

    pub(super) fn trimmed<I: Io>(&mut self, number: u32, file: FileId, result: Result<(), FileError>, io: &mut I) {
        self.touched(file);
        // A discard is advice: storage that cannot deallocate has not failed.
        let result = if result == Err(FileError::Unsupported) { Ok(()) } else { result };
        self.piece_ended(number, status_of(result), io);
    }

    pub(super) fn zeroed<I: Io>(&mut self, number: u32, ticket: Option<Ticket>, done: FileDone, io: &mut I) {
        let file = done.op.file;
        match (done.result, done.op.action) {
            (Err(FileError::Unsupported), Action::Deallocate { at, len }) => {
                let op = Op::Transfer { number, ticket };
                self.push(op, file, Action::Write { at, from: zeroes(len) }, io);
            }
            (result, _) => self.transferred(number, file, ticket, true, result, io),
        }
    }

    pub(super) fn released<I: Io>(
        &mut self,
        number: Option<u32>,
        file: FileId,
        at: u64,
        result: Result<(), FileError>,
        io: &mut I,
    ) {
        self.touched(file);
        if let Some(format) = self.format_of(file) {
            format.released(at, result.is_ok());
        }
        match number {
            // The place is no longer the guest's, whatever became of its content.
            Some(number) => self.piece_ended(number, Status::Done, io),
            None => self.reclaimed(file, io),
        }
    }

    pub(super) fn report_extents<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.end().saturating_sub(at);
            let extent = match self.resolve(at) {
                Ok((Where::Zero, len)) => Extent { len: len.min(left), kind: ExtentKind::Hole },
                Ok((Where::Data { file, at }, len)) => match io.allocated(file, at, len.min(left)) {
                    Allocation::Data(len) => Extent { len: len.min(left), kind: ExtentKind::Data },
                    Allocation::Hole(len) => Extent { len: len.min(left), kind: ExtentKind::Hole },
                },
                // What is packed has no place of its own that could have holes.
                Ok((Where::Packed { .. }, len)) => Extent { len: len.min(left), kind: ExtentKind::Data },
                Err(missing) => {
                    let rest = Span { at, len: left };
                    return self.park_for_grain(Parked::Request { number, rest }, missing, io);
                }
            };
            let Some(active) = self.active.get_mut(number) else { return };
            let extents = &mut active.request.extents;
            let full = extents.len() == EXTENTS_MAX;
            match extents.last_mut() {
                Some(last) if last.kind == extent.kind => last.len = last.len.saturating_add(extent.len),
                _ if full => return,
                _ => extents.push(extent),
            }
            at = at.saturating_add(extent.len.max(1));
        }
    }
}
