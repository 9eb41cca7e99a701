//! Reads and writes.

use super::{Disk, Op, Parked, status_of};
use crate::fold::Where;
use crate::format::{Format, Reserved, Ticket, Wait};
use crate::{Action, FileError, FileId, Io, Span, Status};
use memory::Segments;

impl<F: Format> Disk<F> {
    pub(super) fn read<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.end().saturating_sub(at);
            let (place, len) = match self.resolve(at) {
                Ok((place, len)) => (place, len.min(left)),
                Err(missing) => return self.park_for_grain(number, Span { at, len: left }, missing, io),
            };
            let len = self.lengthened(at, place, len, left);
            let Some(memory) = self.memory(number, Span { at, len }) else { return };
            match place {
                Where::Zero => memory.fill_zero(),
                Where::Packed { .. } => return self.fail(number, Status::Unsupported),
                Where::Data { file, at } => {
                    let op = Op::Transfer { number, ticket: None };
                    self.push_piece(number, op, file, Action::Read { at, into: memory }, io);
                }
            }
            at = at.saturating_add(len);
        }
    }

    pub(super) fn write<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.end().saturating_sub(at);
            let reserved = match self.reserve(Span { at, len: left }) {
                Ok(reserved) => reserved,
                Err(wait) => return self.wait_for(number, Span { at, len: left }, wait, io),
            };
            let Some(from) = self.memory(number, Span { at, len: reserved.len }) else { return };
            let op = Op::Transfer { number, ticket: reserved.ticket };
            self.push_piece(number, op, self.leaf_file(), Action::Write { at: reserved.at, from }, io);
            at = at.saturating_add(reserved.len);
        }
    }

    /// Space in the leaf for the first bytes of `span`. What already lives there is overwritten in place, and
    /// the format need not be asked.
    pub(super) fn reserve(&mut self, span: Span) -> Result<Reserved, Wait> {
        let known = self.fold.lookup(span.at).filter(|&(place, _)| place.is_in(self.leaf_file()));
        if let Some((place @ Where::Data { at, .. }, len)) = known {
            let len = self.lengthened(span.at, place, len.min(span.len), span.len);
            return Ok(Reserved { at, len, ticket: None, fill: None });
        }
        self.leaf().map_or(Err(Wait::NoSpace), |leaf| leaf.reserve(span))
    }

    /// The length of a run of which `len` bytes are known, at most `left`, looking into the next grains too.
    fn lengthened(&self, at: u64, place: Where, mut len: u64, left: u64) -> u64 {
        while len < left {
            let next = self.fold.lookup(at.saturating_add(len));
            match next.filter(|&(next, _)| next == place.advanced(len)) {
                Some((_, more)) => len = len.saturating_add(more).min(left),
                None => break,
            }
        }
        len
    }

    /// The request's memory for `span`.
    fn memory(&self, number: u32, span: Span) -> Option<Segments> {
        let request = &self.active.get(number)?.request;
        let from = usize::try_from(span.at.checked_sub(request.span().at)?).ok()?;
        Some(request.memory().slice(from, usize::try_from(span.len).ok()?))
    }

    /// Records that a request has failed; it ends with its last piece.
    pub(super) fn fail(&mut self, number: u32, status: Status) {
        if let Some(active) = self.active.get_mut(number).filter(|active| active.status == Status::Done) {
            active.status = status;
        }
    }

    pub(super) fn transferred<I: Io>(
        &mut self,
        number: u32,
        file: FileId,
        ticket: Option<Ticket>,
        wrote: bool,
        result: Result<(), FileError>,
        io: &mut I,
    ) {
        // A failed write may have reached any part of its range.
        if wrote {
            self.touched(file);
        }
        if let Some(ticket) = ticket {
            self.conclude(file, ticket, result.is_ok(), io);
        }
        self.piece_ended(number, status_of(result), io);
    }

    /// Commits or abandons a reservation; those who waited for that go on.
    pub(super) fn conclude<I: Io>(&mut self, file: FileId, ticket: Ticket, ok: bool, io: &mut I) {
        let Some(format) = self.format_of(file) else { return };
        if ok {
            if let Some(placed) = format.commit(ticket) {
                self.fold.overlay(placed.span, Where::Data { file, at: placed.at });
            }
        } else {
            format.abandon(ticket);
            self.reclaim_more(io);
        }
        for Parked { number, rest } in self.busy.remove(&(file, ticket)).unwrap_or_default() {
            self.run(number, rest, io);
            self.piece_ended(number, Status::Done, io);
        }
    }
}
