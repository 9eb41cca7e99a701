//! Reads and writes.

use super::compressed::Reader;
use super::{Disk, Missing, Obstacle, Op, Parked, status_of, unaligned};
use crate::chain_map::Location;
use crate::format::{Format, Reserved, Ticket, Wait};
use crate::size::in_memory;
use crate::{Action, FileError, FileId, Io, Span, Status};

impl<F: Format> Disk<F> {
    pub(super) fn read<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.tail_from(at);
            match self.read_first(number, left, io) {
                Ok(0) => return self.fail(number, Status::Failed),
                Ok(len) => at += len,
                Err(missing) => {
                    return self.park_for_map(Parked::Request { number, rest: left }, missing, io);
                }
            }
        }
    }

    /// Begins to read the first bytes of `span`. Returns how many; none where they cannot be read.
    fn read_first<I: Io>(&mut self, number: u32, span: Span, io: &mut I) -> Result<u64, Missing> {
        let (place, len) = self.resolve(span.at)?;
        let span = Span { at: span.at, len: self.coalesce(span.at, place, len.min(span.len), span.len) };
        match place {
            Location::Zero => {
                self.memory(number, span).fill_zero();
            }
            Location::Damaged { file } => {
                self.met_damage(file, span);
                return Ok(0);
            }
            Location::Data { file, at } | Location::Shared { file, at } => {
                let into = self.memory(number, span);
                self.push_part(number, Op::Transfer { number, ticket: None }, file, Action::Read { at, into }, io);
            }
            Location::Compressed { file } => {
                let Some(cluster) = self.compressed_place(file, span)? else { return Ok(0) };
                let span = Span { at: span.at, len: cluster.len };
                let into = self.memory(number, span);
                match self.read_compressed(cluster, span, into, Reader::Request(number), io) {
                    None => self.part_begun(number),
                    Some(Status::Done) => {}
                    Some(_) => return Ok(0),
                }
                return Ok(span.len);
            }
        }
        Ok(span.len)
    }

    pub(super) fn write<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.end() - at;
            let rest = Span { at, len: left };
            let (file, reserved) = match self.reserve_somewhere(rest) {
                Ok(found) => found,
                Err(obstacle) => return self.wait_for(number, rest, obstacle, io),
            };
            let from = self.memory(number, Span { at, len: reserved.len });
            self.write_reserved(number, at, (file, reserved), from, io);
            at += reserved.len;
        }
    }

    /// Reserves space for the first bytes of `span`, in the layer that a write to them goes to.
    pub(super) fn reserve_somewhere(&mut self, span: Span) -> Result<(FileId, Reserved), Obstacle> {
        let (file, span) = self.route_write(span)?;
        Ok((file, self.reserve(file, span)?))
    }

    /// Reserves space in the layer of `file` for the first bytes of `span`. What already lives there is overwritten in
    /// place, without asking the format.
    pub(super) fn reserve(&mut self, file: FileId, span: Span) -> Result<Reserved, Obstacle> {
        let known = self.map.lookup(span.at).filter(|&(place, _)| place.is_in(file));
        if let Some((place @ Location::Data { at, .. }, len)) = known {
            let len = self.coalesce(span.at, place, len.min(span.len), span.len);
            return Ok(Reserved { at, len, ticket: None, fill: None });
        }
        self.ask(file, |format| format.reserve(span))
    }

    /// Asks the layer of `file` for something that it may have to wait for.
    pub(super) fn ask<T>(
        &mut self,
        file: FileId,
        question: impl FnOnce(&mut F) -> Result<T, Wait>,
    ) -> Result<T, Obstacle> {
        self.may_change();
        let layer = self.layer_of(file);
        if layer.owes() {
            return Err(Obstacle::Owed);
        }
        question(&mut layer.format).map_err(|wait| Obstacle::Layer(file, wait))
    }

    /// Extends a run of which `len` bytes are known into the following chunks, up to `left` bytes.
    pub(super) fn coalesce(&self, at: u64, place: Location, mut len: u64, left: u64) -> u64 {
        while len < left {
            let next = self.map.lookup(at + len);
            match next.filter(|&(next, _)| next == place.advanced(len)) {
                Some((_, more)) => len = (len + more).min(left),
                None => break,
            }
        }
        len
    }

    /// The request's memory for `span`, which is a part of it.
    fn memory(&self, number: u32, span: Span) -> memory::Segments {
        let active = self.active.get(number);
        let request = &active.request;
        if let Some(unaligned) = request.unaligned() {
            return unaligned::memory(unaligned, request, active.edges_read, span);
        }
        request.memory().slice(in_memory(span.at - request.span().at), in_memory(span.len))
    }

    /// Records that a request has failed. It ends with its last part.
    pub(super) fn fail(&mut self, number: u32, status: Status) {
        let active = self.active.get_mut(number);
        if active.status == Status::Done {
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
        if wrote && result == Err(FileError::NoSpace) {
            self.retry_without_merge(number, file);
        }
        if let Some(ticket) = ticket {
            self.finish_reservation(file, ticket, result.is_ok(), io);
        }
        self.part_ended(number, status_of(result));
    }

    /// Commits or abandons a reservation, and resumes those who waited for it.
    pub(super) fn finish_reservation<I: Io>(&mut self, file: FileId, ticket: Ticket, ok: bool, io: &mut I) {
        self.may_change();
        let format = self.format_of(file);
        if ok {
            if let Some(placed) = format.commit(ticket) {
                self.publish_mapping(file, placed);
                self.compressed.moved(file, placed.span);
            }
        } else {
            format.abandon(ticket);
            self.reclaim_more(io);
        }
        for parked in self.busy.remove(&(file, ticket)).unwrap_or_default() {
            self.unpark(parked);
        }
    }
}
