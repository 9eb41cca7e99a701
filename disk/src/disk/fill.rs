//! Copy on write: the bytes around a write that must be written with it.
//!
//! Knows nothing of why a cluster is allocated. Keeps: such a write is one file operation, pushed only after everything
//! around it has been read; until it has ended, readers find the old mapping.
//!
//! Let C be what a reservation covers with its fill. Nothing else can change C between the reservation and its end, so
//! what was read for the fill is what a reader would find up to the commit, and the commit loses nothing:
//!
//! 1. *Writes and writes of zeroes to C* come to [`Disk::reserve`]. The map says of no byte of C that it lives in the
//!    file that is written: a format never calls `Data` what it would not overwrite in place, and asks for no fill
//!    around that. So they reach the format, which says `Busy` for C until the ticket has ended.
//! 2. *A discard of all of C* overlaps the write, so one of the two waits for the other. *A discard of a part of C*,
//!    next to the write, cannot take the part away: a format frees clusters only as a whole (`Nothing`, or `Busy`).
//!    Where it says `Nothing` and zeroes are to be written, rule 1 holds. A part that already reads as zero needs
//!    nothing, and the fill writes zeroes there.
//! 3. *A round* in between seals what was committed, and this is not: after a power loss C has its old mapping.
//! 4. *The place that is read* does not change either. Only a merge writes to a parent, and it waits for all that
//!    overlaps the chunk; C does not leave the chunks of its write. A compressed cluster of the written file itself is
//!    freed by this very commit at the earliest.
//! 5. *An abandoned ticket* leaves the old mapping as it was. Those who waited for it reserve anew and get a fill of
//!    their own: nothing that was read for one reservation is ever used for another.
//!
//! There is no deadlock: a fill waits for reads and metadata only, never for a ticket or a request; and, before it
//! begins, for bytes of the budget. Takers keep their bytes until their write has ended, and wait for no other taker:
//! compressed clusters have a budget of their own, and their readers wait for the storage alone. A fill takes all bytes
//! around its write, even where these are zero or cached.
//!
//! The guest's bytes are not copied into the fill's buffer: as entries of a list they cost the kernel nothing and are
//! the same for any cluster size, and the engine copies where alignment requires it, as for any other write.

use memory::Segments;

use super::budget::Budget;
use super::compressed::{Cluster, Reader};
use super::{Disk, Op, Parked};
use crate::chain_map::Location;
use crate::format::{Fill, Format, Reserved, Ticket};
use crate::size::{in_memory, on_disk};
use crate::slab::Slab;
use crate::{Action, FileDone, FileId, Io, Span, Status};

/// Writes that wait for the bytes around them, and the memory that those and the copies of merges may take.
#[derive(Debug)]
pub(super) struct Fills {
    fillings: Slab<Filling>,
    budget: Budget<u32>,
}

impl Fills {
    pub fn new(bytes_max: u64) -> Fills {
        Fills { fillings: Slab::with_capacity(0), budget: Budget::new(bytes_max) }
    }

    /// The next fill that has waited for memory and has it now.
    pub fn next(&mut self) -> Option<u32> {
        self.budget.next()
    }

    /// Bytes of memory that fills have taken.
    #[cfg(test)]
    pub fn bytes(&self) -> u64 {
        self.budget.taken()
    }

    /// Whether there is no fill and no memory is taken.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.fillings.len() == 0 && self.budget.is_whole()
    }

    fn get(&self, fill: u32) -> &Filling {
        let Some(filling) = self.fillings.get(fill) else { unreachable!("fill {fill} has ended") };
        filling
    }

    fn get_mut(&mut self, fill: u32) -> &mut Filling {
        let Some(filling) = self.fillings.get_mut(fill) else { unreachable!("fill {fill} has ended") };
        filling
    }
}

/// A write that waits for the bytes around it.
#[derive(Debug)]
pub(super) struct Filling {
    /// Its request, of which this is a part.
    number: u32,
    ticket: Option<Ticket>,
    /// Where all of it goes.
    file: FileId,
    at: u64,
    /// The bytes of the disk that are written with it, its own among them.
    whole: Span,
    /// The bytes of the write itself, and their new content.
    own: Span,
    from: Segments,
    /// What is to be written, up to `next`.
    parts: Vec<Segments>,
    next: u64,
    /// Reads under way, and one more while metadata is loaded.
    pending: u32,
    status: Status,
    /// It is a copy of a merge, and has no bytes of its own.
    is_copy: bool,
    /// The buffer of a copy: one, since it may be gathered from very many parts.
    room: Option<Segments>,
}

/// What the next part of a fill is made of.
enum FillPart {
    /// The write itself.
    Own,
    /// Bytes behind the end of the disk.
    Beyond(u64),
    /// Bytes to be read.
    Copy(Span),
}

impl Filling {
    /// A copy of what the layers of a merge show, to a reservation for the bytes from `at` on.
    pub fn of_copy(number: u32, file: FileId, at: u64, reserved: Reserved) -> Filling {
        let Reserved { at: place, len, ticket, fill } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        let whole = Span { at: at - before, len: before + len + after };
        Filling {
            number,
            ticket,
            file,
            at: place - before,
            whole,
            own: Span { at: whole.end(), len: 0 },
            from: Segments::empty(),
            parts: Vec::new(),
            next: whole.at,
            pending: 0,
            status: Status::Done,
            is_copy: true,
            room: None,
        }
    }

    /// Bytes of memory that it takes from the budget.
    fn bytes(&self) -> u64 {
        self.whole.len - self.own.len
    }

    fn next_part(&self, disk_len: u64) -> Option<FillPart> {
        if self.next >= self.whole.end() {
            return None;
        }
        let until = match self.next {
            next if next == self.own.at => return Some(FillPart::Own),
            next if next < self.own.at => self.own.at,
            _ => self.whole.end(),
        };
        let len = until - self.next;
        let inside = disk_len.saturating_sub(self.next).min(len);
        match (len, inside) {
            (0, _) => None,
            (_, 0) => Some(FillPart::Beyond(len)),
            _ => Some(FillPart::Copy(Span { at: self.next, len: inside })),
        }
    }

    fn append(&mut self, part: Segments) {
        self.next += on_disk(part.len());
        if !self.is_copy {
            self.parts.push(part);
        }
    }

    /// Memory for the next `len` bytes.
    fn memory(&mut self, len: u64) -> Segments {
        if self.is_copy && self.room.is_none() {
            self.room = Some(Segments::zeroed(in_memory(self.whole.len)));
        }
        match &self.room {
            Some(room) => room.slice(in_memory(self.next - self.whole.at), in_memory(len)),
            None => Segments::zeroed(in_memory(len)),
        }
    }
}

impl<F: Format> Disk<F> {
    /// Writes `from` to a reservation for the bytes from `at` on, together with what is to be written around it.
    pub(super) fn write_reserved<I: Io>(
        &mut self,
        number: u32,
        at: u64,
        (file, reserved): (FileId, Reserved),
        from: Segments,
        io: &mut I,
    ) {
        let Reserved { at: place, len, ticket, fill } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        if before == 0 && after == 0 {
            let op = Op::Transfer { number, ticket };
            return self.push_part(number, op, file, Action::Write { at: place, from }, io);
        }
        assert!(before <= at && before <= place, "a fill begins in front of the disk or of the file");
        let own = Span { at, len };
        let whole = Span { at: at - before, len: before + len + after };
        self.part_begun(number);
        let filling = Filling {
            number,
            ticket,
            file,
            at: place - before,
            whole,
            own,
            from,
            parts: Vec::new(),
            next: whole.at,
            pending: 0,
            status: Status::Done,
            is_copy: false,
            room: None,
        };
        self.begin_filling(filling, io);
    }

    /// Begins a fill, or has it wait for memory. The write counts as a part of its request already.
    pub(super) fn begin_filling<I: Io>(&mut self, filling: Filling, io: &mut I) {
        let bytes = filling.bytes();
        let fill = self.fills.fillings.insert(filling);
        if self.fills.budget.take(fill, bytes) {
            self.go_on_filling(fill, io);
        }
    }

    /// Reads the bytes around a write, as far as their mappings are known. Ends the fill when it has them all.
    pub(super) fn go_on_filling<I: Io>(&mut self, fill: u32, io: &mut I) {
        let is_copy = self.fills.get(fill).is_copy;
        let disk_len = self.merge.as_ref().filter(|_| is_copy).map_or(self.geometry.len, |merge| merge.len);
        loop {
            let filling = self.fills.get_mut(fill);
            if filling.status != Status::Done {
                break;
            }
            match filling.next_part(disk_len) {
                None => break,
                Some(FillPart::Own) => filling.append(filling.from.clone()),
                Some(FillPart::Beyond(len)) => filling.append(zeroes(len)),
                Some(FillPart::Copy(span)) => {
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
        let copied = if is_copy { self.resolve_copy(span.at) } else { None };
        let (place, len) = match copied.map_or_else(|| self.resolve(span.at), Ok) {
            Ok((place, len)) if is_copy => (place, len.min(span.len)),
            Ok((place, len)) => (place, self.coalesce(span.at, place, len.min(span.len), span.len)),
            Err(missing) => {
                self.begun(fill);
                self.park_for_map(Parked::Fill { fill, at: span.at }, missing, io);
                return false;
            }
        };
        match place {
            Location::Zero => self.append_part(fill, zeroes(len)),
            Location::Damaged { file } => {
                self.met_damage(file, Span { at: span.at, len });
                self.fail_filling(fill, Status::Failed);
            }
            Location::Data { file, at } | Location::Shared { file, at } => {
                let into = self.append_room(fill, len);
                self.begun(fill);
                self.push(Op::Fill { fill }, file, Action::Read { at, into }, io);
            }
            Location::Compressed { file } => match self.compressed_place(file, Span { at: span.at, len }) {
                Ok(Some(cluster)) => self.copy_compressed(fill, span.at, cluster, io),
                Ok(None) => self.fail_filling(fill, Status::Failed),
                Err(missing) => {
                    self.begun(fill);
                    self.park_for_map(Parked::Fill { fill, at: span.at }, missing, io);
                    return false;
                }
            },
        }
        true
    }

    fn copy_compressed<I: Io>(&mut self, fill: u32, at: u64, cluster: Cluster, io: &mut I) {
        let into = self.append_room(fill, cluster.len);
        match self.read_compressed(cluster, Span { at, len: cluster.len }, into, Reader::Fill(fill), io) {
            None => self.begun(fill),
            Some(Status::Done) => {}
            Some(status) => self.fail_filling(fill, status),
        }
    }

    /// Memory for the next `len` bytes.
    fn append_room(&mut self, fill: u32, len: u64) -> Segments {
        let room = self.fills.get_mut(fill).memory(len);
        self.append_part(fill, room.clone());
        room
    }

    fn append_part(&mut self, fill: u32, part: Segments) {
        self.fills.get_mut(fill).append(part);
    }

    fn begun(&mut self, fill: u32) {
        self.fills.get_mut(fill).pending += 1;
    }

    fn fail_filling(&mut self, fill: u32, status: Status) {
        let filling = self.fills.get_mut(fill);
        if filling.status == Status::Done {
            filling.status = status;
        }
    }

    /// Ends a write together with the bytes around it.
    pub(super) fn filled<I: Io>(
        &mut self,
        number: u32,
        ticket: Option<Ticket>,
        bytes: u64,
        done: FileDone,
        io: &mut I,
    ) {
        self.fills.budget.give_back(bytes);
        self.transferred(number, done.op.file, ticket, true, done.result, io);
    }

    /// Ends a read for a fill.
    pub(super) fn fill_read<I: Io>(&mut self, fill: u32, status: Status, io: &mut I) {
        self.ended(fill, status);
        self.end_filling(fill, io);
    }

    /// Resumes a fill whose metadata was loaded.
    pub(super) fn resume_fill<I: Io>(&mut self, fill: u32, io: &mut I) {
        self.ended(fill, Status::Done);
        self.go_on_filling(fill, io);
    }

    fn ended(&mut self, fill: u32, status: Status) {
        self.fills.get_mut(fill).pending -= 1;
        if status != Status::Done {
            self.fail_filling(fill, status);
        }
    }

    /// Begins the write when everything for it has been read, or abandons the reservation if a read has failed; either
    /// way only when no read is under way any more.
    fn end_filling<I: Io>(&mut self, fill: u32, io: &mut I) {
        let filling = self.fills.get(fill);
        let complete = filling.next >= filling.whole.end();
        if filling.pending > 0 || (filling.status == Status::Done && !complete) {
            return;
        }
        let Some(filling) = self.fills.fillings.remove(fill) else { unreachable!("fill {fill} has ended") };
        let bytes = filling.bytes();
        let Filling { number, ticket, file, at, whole, parts, room, is_copy, .. } = filling;
        let status = if self.broken { Status::Refused } else { filling.status };
        if status == Status::Done {
            let from = match room {
                Some(room) => room,
                None if is_copy => zeroes(whole.len),
                None => Segments::joined(parts),
            };
            return self.push(Op::Filled { number, ticket, bytes }, file, Action::Write { at, from }, io);
        }
        self.fills.budget.give_back(bytes);
        if let Some(ticket) = ticket {
            self.finish_reservation(file, ticket, false, io);
        }
        self.part_ended(number, status);
    }
}

/// So many zeroes, to be written.
pub(super) fn zeroes(len: u64) -> Segments {
    Segments::zeroes(in_memory(len))
}
