//! Copy on write: the bytes around a write that must be written with it.
//!
//! Knows nothing of why a cluster is allocated. Keeps: such a write is one file operation, pushed only after everything
//! around it has been read; until it has ended, readers find the old mapping.
//!
//! Let C be what a reservation covers with its fill. Nothing else can change C between the reservation and its end, so
//! what was read for the fill is what a reader would find up to the commit, and the commit loses nothing:
//!
//! 1. *Writes and writes of zeroes to C* come to `reserve` in `write`. The map says of no byte of C that it lives in
//!    the file that is written: a format never calls `Data` what it would not overwrite in place, and requires no fill
//!    around that. So they reach the format, which says `Busy` for C until the ticket has ended.
//! 2. *A discard of all of C* overlaps the write, so one of the two waits for the other. *A discard of a part of C*,
//!    next to the write, cannot take the part away: a format frees clusters only as a whole (`Nothing`, or `Busy`).
//!    Where it says `Nothing` and zeroes are to be written, rule 1 holds. A part that already reads as zero needs
//!    nothing, and the fill writes zeroes there.
//! 3. *A round* in between seals what was committed, and this is not: after a power loss C has its old mapping.
//! 4. *The place that is read* does not change either. Only a merge writes to a parent, and it waits for all that
//!    overlaps the chunk; C does not leave the chunks of its write. A compressed cluster of the written file itself is
//!    freed by this very commit at the earliest.
//! 5. *An abandoned ticket* leaves the old mapping as it was. Requests that waited for it reserve again and get a fill
//!    of their own: nothing that was read for one reservation is ever used for another.
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
use crate::format::{Fill, Reserved, Ticket};
use crate::size::{in_memory, on_disk};
use crate::slab::Slab;
use crate::{DiskOffset, FileId, FileOffset, Span, Status};

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

    /// Begins a fill. Returns its number, and whether it has its memory; if not, [`Fills::next`] names it later.
    pub fn begin(&mut self, filling: Filling) -> (u32, bool) {
        let bytes = filling.bytes();
        let fill = self.fillings.insert(filling);
        (fill, self.budget.take(fill, bytes))
    }

    /// A fill under way.
    pub fn get(&mut self, fill: u32) -> &mut Filling {
        let Some(filling) = self.fillings.get_mut(fill) else { unreachable!("fill {fill} has ended") };
        filling
    }

    /// Ends a fill of which no read is under way any more and that has all it needs, or has failed. Its memory is taken
    /// until [`Fills::give_back`].
    pub fn take_ended(&mut self, fill: u32) -> Option<Filling> {
        let filling = self.get(fill);
        let complete = filling.next >= filling.whole.end();
        if filling.pending > 0 || (filling.status == Status::Done && !complete) {
            return None;
        }
        self.fillings.remove(fill)
    }

    /// Gives the memory of a fill back, whose write has ended or never began.
    pub fn give_back(&mut self, bytes: u64) {
        self.budget.give_back(bytes);
    }
}

/// A write that waits for the bytes around it.
#[derive(Debug)]
pub(super) struct Filling {
    /// Its request, of which this is a part.
    pub number: u32,
    pub ticket: Option<Ticket>,
    /// Where all of it goes.
    pub file: FileId,
    pub place: FileOffset,
    /// The bytes of the disk that are written with it, its own among them.
    whole: Span,
    /// The bytes of the write itself, and their new content.
    own: Span,
    from: Segments,
    /// The memory to be written, up to `next`.
    parts: Vec<Segments>,
    next: DiskOffset,
    /// Reads under way, and one more while metadata is loaded.
    pending: u32,
    pub status: Status,
    /// It is a copy of a merge, and has no bytes of its own.
    pub is_copy: bool,
    /// The buffer of a copy: one, since it may be gathered from very many parts.
    room: Option<Segments>,
}

/// The source of the next part of a fill.
pub(super) enum FillPart {
    /// The write itself.
    Own,
    /// Bytes behind the end of the disk.
    Beyond(u64),
    /// Bytes to be read.
    Copy(Span),
}

impl Filling {
    /// A write of `from` to a reservation for the bytes from `at` on. Without `from` it is a copy of what the layers of
    /// a merge show there.
    pub fn new(number: u32, file: FileId, at: DiskOffset, reserved: Reserved, from: Option<Segments>) -> Filling {
        let Reserved { at: place, len, ticket, fill } = reserved;
        let Fill { before, after } = fill.unwrap_or(Fill { before: 0, after: 0 });
        assert!(before <= at.0 && before <= place.0, "a fill begins in front of the disk or of the file");
        let whole = Span { at: at - before, len: before + len + after };
        let (is_copy, own) = match from {
            Some(_) => (false, Span { at, len }),
            None => (true, Span { at: whole.end(), len: 0 }),
        };
        Filling {
            number,
            ticket,
            file,
            place: place - before,
            whole,
            own,
            from: from.unwrap_or_default(),
            parts: Vec::new(),
            next: whole.at,
            pending: 0,
            status: Status::Done,
            is_copy,
            room: None,
        }
    }

    /// Bytes of memory that it takes from the budget.
    pub fn bytes(&self) -> u64 {
        self.whole.len - self.own.len
    }

    /// The next part, on a disk of `disk_len` bytes. `None` if the fill is complete or has failed.
    pub fn next_part(&mut self, disk_len: u64) -> Option<FillPart> {
        if self.status != Status::Done || self.next >= self.whole.end() {
            return None;
        }
        let until = match self.next {
            next if next == self.own.at => return Some(FillPart::Own),
            next if next < self.own.at => self.own.at,
            _ => self.whole.end(),
        };
        let len = until - self.next;
        let inside = disk_len.saturating_sub(self.next.0).min(len);
        match (len, inside) {
            (0, _) => None,
            (_, 0) => Some(FillPart::Beyond(len)),
            _ => Some(FillPart::Copy(Span { at: self.next, len: inside })),
        }
    }

    /// Adds the bytes of the write itself.
    pub fn append_own(&mut self) {
        self.append(self.from.clone());
    }

    /// Adds what is known to be there.
    pub fn append(&mut self, part: Segments) {
        self.next += on_disk(part.len());
        if !self.is_copy {
            self.parts.push(part);
        }
    }

    /// Adds `len` bytes that are to be read, to the memory that is returned.
    pub fn append_room(&mut self, len: u64) -> Segments {
        let room = self.memory(len);
        self.append(room.clone());
        room
    }

    /// Counts a read, or a load of metadata.
    pub fn read_begun(&mut self) {
        self.pending += 1;
    }

    /// Counts a read or a load that has ended with `status`.
    pub fn read_ended(&mut self, status: Status) {
        self.pending -= 1;
        self.fail(status);
    }

    /// Records that it has failed.
    pub fn fail(&mut self, status: Status) {
        if self.status == Status::Done {
            self.status = status;
        }
    }

    /// All that is to be written.
    pub fn into_content(self) -> Segments {
        match self.room {
            Some(room) => room,
            None if self.is_copy => zeroes(self.whole.len),
            None => Segments::joined(self.parts),
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

/// Memory of `len` zeroes, to be written.
pub(super) fn zeroes(len: u64) -> Segments {
    Segments::zeroes(in_memory(len))
}

#[cfg(test)]
mod test {
    use super::*;

    const DISK: u64 = 8192;

    /// A write of 512 bytes at 6144, in the cluster from 4096 to 12288, which reaches behind the end of the disk.
    fn write() -> Filling {
        let fill = Some(Fill { before: 2048, after: 5632 });
        let reserved = Reserved { at: FileOffset(1 << 20), len: 512, ticket: Some(Ticket(1)), fill };
        Filling::new(7, FileId(0), DiskOffset(6144), reserved, Some(Segments::copy_of(&[9; 512])))
    }

    #[test]
    fn a_fill_ends_when_all_around_its_write_was_read() {
        let mut fills = Fills::new(1 << 20);
        let (fill, begun) = fills.begin(write());
        assert!(begun);
        let mut lens = Vec::new();
        while let Some(part) = fills.get(fill).next_part(DISK) {
            let filling = fills.get(fill);
            match part {
                FillPart::Own => filling.append_own(),
                FillPart::Beyond(len) => filling.append(zeroes(len)),
                FillPart::Copy(span) => {
                    filling.append_room(span.len).copy_from(&vec![1; in_memory(span.len)]);
                    filling.read_begun();
                    lens.push((span.at.0, span.len));
                }
            }
        }
        assert_eq!(lens, [(4096, 2048), (6656, 1536)]);
        fills.get(fill).read_ended(Status::Done);
        assert!(fills.take_ended(fill).is_none(), "a read is under way");
        fills.get(fill).read_ended(Status::Done);
        let ended = fills.take_ended(fill).unwrap();
        assert_eq!((ended.place.0, ended.bytes()), ((1 << 20) - 2048, 2048 + 5632));
        fills.give_back(ended.bytes());
        let expected = [vec![1; 2048], vec![9; 512], vec![1; 1536], vec![0; 4096]].concat();
        assert_eq!(ended.into_content().to_vec(), expected);
        assert!(fills.is_empty());
    }

    #[test]
    fn a_fill_that_has_failed_ends_with_its_last_read() {
        let mut fills = Fills::new(1 << 20);
        let (fill, _) = fills.begin(write());
        (0..2).for_each(|_| fills.get(fill).read_begun());
        fills.get(fill).read_ended(Status::Failed);
        assert!(fills.get(fill).next_part(DISK).is_none() && fills.take_ended(fill).is_none());
        fills.get(fill).read_ended(Status::Done);
        assert_eq!(fills.take_ended(fill).unwrap().status, Status::Failed);
    }

    #[test]
    fn a_fill_waits_for_its_memory() {
        let mut fills = Fills::new(2048 + 5632);
        let (first, begun) = fills.begin(write());
        assert!(begun);
        let (second, begun) = fills.begin(write());
        assert!(!begun && fills.next().is_none());
        fills.get(first).fail(Status::Failed);
        let bytes = fills.take_ended(first).unwrap().bytes();
        fills.give_back(bytes);
        assert_eq!(fills.next(), Some(second));
    }
}
