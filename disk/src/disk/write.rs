//! Writes: those in place, those that allocate, and those with bytes around them to be written too (`fill`).
//!
//! Keeps: readers see a new place only after its bytes were written; a reservation is committed or abandoned once, and
//! requests that waited for it continue then.

use memory::Segments;

use super::Disk;
use super::chain::Obstacle;
use super::compressed::{Cluster, Reader};
use super::fill::{FillPart, Filling, zeroes};
use super::ops::Op;
use super::queue::Parked;
use crate::chain_map::{ChainMap, Location};
use crate::format::{Format, Reserved, Ticket, Wait};
use crate::{Action, DiskOffset, FileDone, FileError, FileId, Io, Span, Status};

impl<F: Format> Disk<F> {
    /// Writes a request from `rest` on.
    pub(super) fn write<I: Io>(&mut self, number: u32, rest: Span, io: &mut I) {
        let mut at = rest.at;
        while at < rest.end() {
            let left = rest.tail_from(at);
            let (file, reserved) = match self.reserve_somewhere(left) {
                Ok(found) => found,
                Err(obstacle) => return self.wait_for(number, left, obstacle, io),
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

    /// The file that a write to the first bytes of `span` goes to, and which these are.
    pub(super) fn route_write(&mut self, span: Span) -> Result<(FileId, Span), Obstacle> {
        self.routing.route(span, &mut self.chain, &self.active).map_err(|missing| {
            // While the chunk is not in the map, loads for it count as loads of the map.
            self.map.forget(ChainMap::chunk_of(span.at).at);
            Obstacle::Chunk(missing)
        })
    }

    /// Reserves space in the layer of `file` for the first bytes of `span`. What already lives there is overwritten in
    /// place, without asking the format.
    pub(super) fn reserve(&mut self, file: FileId, span: Span) -> Result<Reserved, Obstacle> {
        let known = self.map.lookup(span.at).filter(|&(place, _)| place.is_in(file));
        if let Some((place @ Location::Data { at, .. }, len)) = known {
            let len = self.map.coalesce(span.at, place, len.min(span.len), span.len);
            return Ok(Reserved { at, len, ticket: None, fill: None });
        }
        let reserved = self.chain.ask(file, |format| format.reserve(span))?;
        if reserved.ticket.is_none() && file == self.chain.leaf() && self.routing.is_to_leaf() {
            self.map.written_in_place(span.at, &mut self.chain);
        }
        Ok(reserved)
    }

    /// Writes `from` to a reservation for the bytes from `at` of the disk on, together with what is to be written
    /// around it.
    pub(super) fn write_reserved<I: Io>(
        &mut self,
        number: u32,
        at: DiskOffset,
        (file, reserved): (FileId, Reserved),
        from: Segments,
        io: &mut I,
    ) {
        self.active.part_begun(number);
        if reserved.fill.is_none_or(|fill| fill.before == 0 && fill.after == 0) {
            self.active.waiting.wait_begun(number);
            let op = Op::Transfer { number, ticket: reserved.ticket };
            return self.ops.push(op, file, Action::Write { at: reserved.at, from }, io);
        }
        self.begin_filling(Filling::new(number, file, at, reserved, Some(from)), io);
    }

    /// Begins a fill, or has it wait for memory. The write counts as a part of its request already.
    pub(super) fn begin_filling<I: Io>(&mut self, filling: Filling, io: &mut I) {
        let (fill, begun) = self.fills.begin(filling);
        if begun {
            self.go_on_filling(fill, io);
        }
    }

    /// Reads the bytes around a write, as far as their mappings are known. Ends the fill when it has them all.
    pub(super) fn go_on_filling<I: Io>(&mut self, fill: u32, io: &mut I) {
        let is_copy = self.fills.get(fill).is_copy;
        let disk_len = self.merge.as_ref().filter(|_| is_copy).map_or(self.geometry().len, |merge| merge.len());
        while let Some(part) = self.fills.get(fill).next_part(disk_len) {
            match part {
                FillPart::Own => self.fills.get(fill).append_own(),
                FillPart::Beyond(len) => self.fills.get(fill).append(zeroes(len)),
                FillPart::Copy(span) => {
                    if !self.copy_part(fill, span, io) {
                        return;
                    }
                }
            }
        }
        self.end_filling(fill, io);
    }

    /// Copies the first bytes of `span`. Returns whether it could; if not, it waits for metadata.
    fn copy_part<I: Io>(&mut self, fill: u32, span: Span, io: &mut I) -> bool {
        let is_copy = self.fills.get(fill).is_copy;
        let copied = if is_copy { self.merge_mut().lookup(span.at) } else { None };
        let (place, len) = match copied.map_or_else(|| self.map.resolve(span.at, &mut self.chain), Ok) {
            Ok((place, len)) if is_copy => (place, len.min(span.len)),
            Ok((place, len)) => (place, self.map.coalesce(span.at, place, len.min(span.len), span.len)),
            Err(missing) => {
                self.park_for_chunk(Parked::Fill { fill, at: span.at }, missing, io);
                return false;
            }
        };
        match place {
            Location::Zero => self.fills.get(fill).append(zeroes(len)),
            Location::Damaged { file } => {
                self.met_damage(file, Span { at: span.at, len });
                self.fills.get(fill).fail(Status::Failed);
            }
            Location::Data { file, at: place } | Location::Shared { file, at: place } => {
                let filling = self.fills.get(fill);
                let into = filling.append_room(len);
                filling.read_begun();
                let number = filling.number;
                self.active.waiting.wait_begun(number);
                self.ops.push(Op::Fill { fill }, file, Action::Read { at: place, into }, io);
            }
            Location::Compressed { file } => match self.compressed_place(file, Span { at: span.at, len }) {
                Ok(Some(cluster)) => self.copy_compressed(fill, span.at, cluster, io),
                Ok(None) => self.fills.get(fill).fail(Status::Failed),
                Err(missing) => {
                    self.park_for_chunk(Parked::Fill { fill, at: span.at }, missing, io);
                    return false;
                }
            },
        }
        true
    }

    fn copy_compressed<I: Io>(&mut self, fill: u32, at: DiskOffset, cluster: Cluster, io: &mut I) {
        let span = Span { at, len: cluster.len };
        let into = self.fills.get(fill).append_room(span.len);
        match self.read_compressed(cluster, span, into, Reader::Fill(fill), io) {
            None => {
                let filling = self.fills.get(fill);
                filling.read_begun();
                let number = filling.number;
                self.active.waiting.wait_begun(number);
            }
            Some(status) => self.fills.get(fill).fail(status),
        }
    }

    /// Resumes a fill whose metadata was loaded.
    pub(super) fn resume_fill<I: Io>(&mut self, fill: u32, io: &mut I) {
        self.fills.get(fill).read_ended(Status::Done);
        self.go_on_filling(fill, io);
    }

    /// Ends a read for a fill.
    pub(super) fn fill_read<I: Io>(&mut self, fill: u32, status: Status, io: &mut I) {
        self.fills.get(fill).read_ended(status);
        self.end_filling(fill, io);
    }

    /// Begins the write when everything for it has been read, or abandons the reservation if a read has failed; either
    /// way only when no read is under way any more.
    fn end_filling<I: Io>(&mut self, fill: u32, io: &mut I) {
        let Some(filling) = self.fills.take_ended(fill) else { return };
        let (number, ticket, bytes) = (filling.number, filling.ticket, filling.bytes());
        let status = if self.chain.is_broken() { Status::Refused } else { filling.status };
        if status == Status::Done {
            let file = filling.file;
            let write = Action::Write { at: filling.place, from: filling.into_content() };
            self.active.waiting.wait_begun(number);
            return self.ops.push(Op::Filled { number, ticket, bytes }, file, write, io);
        }
        self.fills.give_back(bytes);
        if let Some(ticket) = ticket {
            self.finish_reservation(filling.file, ticket, false, io);
        }
        self.part_ended(number, status);
    }

    /// A write together with the bytes around it has ended.
    pub(super) fn filled<I: Io>(
        &mut self,
        number: u32,
        ticket: Option<Ticket>,
        bytes: u64,
        done: FileDone,
        io: &mut I,
    ) {
        self.fills.give_back(bytes);
        self.transferred(number, done.op.file, ticket, true, done.result, io);
    }

    /// A part of a request has ended that was one operation.
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
            self.chain.of(file).touched();
        }
        if wrote && result == Err(FileError::NoSpace) {
            self.retry_without_merge(number, file);
        }
        if let Some(ticket) = ticket {
            self.finish_reservation(file, ticket, result.is_ok(), io);
        }
        self.part_ended(number, Status::of(result));
    }

    /// Commits or abandons a reservation. Requests that waited for it continue.
    fn finish_reservation<I: Io>(&mut self, file: FileId, ticket: Ticket, ok: bool, io: &mut I) {
        self.chain.may_change();
        let is_leaf = file == self.chain.leaf();
        let format = self.chain.format_of(file);
        if ok {
            if let Some(placed) = format.commit(ticket) {
                self.routing.publish(file, is_leaf, placed, self.map.known_mut());
                self.compressed.moved(file, placed.span);
            }
        } else {
            format.abandon(ticket);
            self.reclaim_more(io);
        }
        for parked in self.busy.remove(&(file, ticket)).unwrap_or_default() {
            self.go_on_soon(parked);
        }
    }

    /// Parks the rest of a request until the obstacle is gone, or fails it.
    pub(super) fn wait_for<I: Io>(&mut self, number: u32, rest: Span, obstacle: Obstacle, io: &mut I) {
        let parked = Parked::Request { number, rest };
        match obstacle {
            Obstacle::Chunk(missing) => self.park_for_chunk(parked, missing, io),
            Obstacle::Layer(file, Wait::Load(block)) => self.park_for_block(parked, file, block, io),
            Obstacle::Owed | Obstacle::Layer(_, Wait::Round) => {
                self.set_aside(parked);
                self.rounds.park(parked);
            }
            Obstacle::Layer(file, Wait::Busy(ticket)) => {
                self.set_aside(parked);
                self.busy.entry((file, ticket)).or_default().push(parked);
            }
            Obstacle::Layer(file, Wait::Damaged(_)) => {
                self.met_damage(file, rest);
                self.active.fail(number, Status::Failed);
            }
            Obstacle::Layer(file, Wait::NoSpace) => {
                self.retry_without_merge(number, file);
                self.active.get_mut(number).request.at_limit = true;
                self.active.fail(number, Status::NoSpace);
            }
        }
    }
}
