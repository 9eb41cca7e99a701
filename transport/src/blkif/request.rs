//! What a ring entry asks for.
//!
//! Knows nothing of rings and grants. Invariant: a request names at most as many pages as were offered, and each of its
//! pieces lies in a page; whether its span lies on the disk is for [`disk::Request`] to say. Pieces are put where the caller
//! keeps them, once.
//!
//! Specification: Xen's public header io/blkif.h. Sectors are 512 bytes there, whatever `sector-size` says.

use std::ops::Deref;

use disk::{Geometry, Operation, Span, Status};
use xen::{GrantRef, Piece};

use super::abi::{Entry, SEGMENT_LEN, SEGMENTS_DIRECT};

/// Segments that an indirect request may have: 1 MiB of pages. Their descriptors fit into half a page.
pub const SEGMENTS_MAX: u16 = 256;

/// `BLKIF_RSP_OKAY`.
pub const OKAY: i16 = 0;
/// `BLKIF_RSP_ERROR`.
pub const ERROR: i16 = -1;
/// `BLKIF_RSP_EOPNOTSUPP`.
pub const UNSUPPORTED: i16 = -2;

const READ: u8 = 0;
const WRITE: u8 = 1;
const WRITE_BARRIER: u8 = 2;
const FLUSH_DISKCACHE: u8 = 3;
const DISCARD: u8 = 5;
const INDIRECT: u8 = 6;

/// `BLKIF_DISCARD_SECURE`, in the flag of a discard.
const SECURE: u8 = 1;

const SECTOR: u64 = 512;

/// Pieces of a guest's pages, in order. Those of a direct request need no memory of their own.
pub struct Pieces {
    few: [Piece; SEGMENTS_DIRECT],
    /// How many of the few.
    count: usize,
    /// Bytes of all.
    len: usize,
    /// All of an indirect request; empty for others.
    many: Vec<Piece>,
}

impl Default for Pieces {
    fn default() -> Pieces {
        let few = [Piece { page: GrantRef(0), from: 0, len: 0 }; SEGMENTS_DIRECT];
        Pieces { few, count: 0, len: 0, many: Vec::new() }
    }
}

impl Deref for Pieces {
    type Target = [Piece];

    #[inline]
    fn deref(&self) -> &[Piece] {
        if self.many.is_empty() { self.few.get(..self.count).unwrap_or_default() } else { &self.many }
    }
}

impl Pieces {
    /// Bytes of all pieces together.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// There are none, and no memory for many: a ring of large requests would keep a megabyte of it.
    #[inline]
    pub fn clear(&mut self) {
        (self.count, self.len) = (0, 0);
        self.many = Vec::new();
    }

    /// Those of a direct request, which has no more segments than there is room for.
    #[inline]
    fn put(&mut self, segments: &[u64]) -> Result<(), i16> {
        self.clear();
        let mut len = 0;
        for (place, &segment) in self.few.iter_mut().zip(segments) {
            *place = piece(segment).ok_or(ERROR)?;
            len += usize::from(place.len);
        }
        (self.count, self.len) = (segments.len(), len);
        Ok(())
    }

    /// Those that descriptors in a page of their own name.
    pub fn put_told(&mut self, descriptors: &[u8]) -> Result<(), i16> {
        self.clear();
        self.many.reserve_exact(descriptors.len() / SEGMENT_LEN);
        let segments = descriptors.chunks_exact(SEGMENT_LEN).filter_map(|bytes| bytes.first_chunk());
        for &segment in segments {
            let piece = piece(u64::from_le_bytes(segment)).ok_or(ERROR)?;
            self.many.push(piece);
            self.len = self.len.saturating_add(usize::from(piece.len));
        }
        Ok(())
    }
}

/// The part of its page that a segment names, from its first to its last sector. `None` if that makes no sense: a page has
/// eight.
#[inline]
fn piece(segment: u64) -> Option<Piece> {
    let [a, b, c, d, first, last, ..] = segment.to_le_bytes();
    if first > last || last >= 8 {
        return None;
    }
    // Less than eight, as was just seen: so the compiler sees that nothing overflows.
    let (before, more) = (u16::from(first) & 7, u16::from(last.saturating_sub(first)) & 7);
    Some(Piece { page: GrantRef(u32::from_le_bytes([a, b, c, d])), from: before * 512, len: (more + 1) * 512 })
}

/// An entry that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Handed back with the answer.
    pub id: u64,
    /// Likewise; of an indirect request the operation that it stands for.
    pub operation: u8,
    /// What is to be done, or the status to answer with.
    pub ask: Result<Ask, i16>,
    /// Where on the disk. How long a transfer is its pieces tell.
    pub span: Span,
    /// Where the pieces of an indirect request are told.
    pub told: Option<Descriptors>,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Bring data from the disk.
    Read,
    /// Bring data to the disk.
    Write,
    /// The same, and they are durable when that is answered, with everything before it.
    WriteDurable,
    /// The same, and nothing else is under way meanwhile.
    WriteBarrier,
    /// Make durable what was written.
    Flush,
    /// Everything before it is to be done first and durable, and nothing after it begun: a barrier without data.
    Barrier,
    /// Give up space.
    Discard,
}

/// A page of descriptors, and how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The page.
    pub page: GrantRef,
    /// How many.
    pub count: u16,
}

impl Ask {
    /// Whether data go from or to the disk.
    pub fn has_data(self) -> bool {
        matches!(self, Ask::Read | Ask::Write | Ask::WriteDurable | Ask::WriteBarrier)
    }

    /// Whether the disk is changed.
    pub fn is_write(self) -> bool {
        matches!(self, Ask::Write | Ask::WriteDurable | Ask::WriteBarrier | Ask::Discard)
    }

    /// Whether it waits for all before it, and all after it for it.
    pub fn is_barrier(self) -> bool {
        matches!(self, Ask::WriteBarrier | Ask::Barrier)
    }

    /// In the words of the disk.
    pub fn operation(self) -> Operation {
        match self {
            Ask::Read => Operation::Read,
            Ask::Write => Operation::Write { durable: false },
            Ask::WriteDurable | Ask::WriteBarrier => Operation::Write { durable: true },
            Ask::Flush | Ask::Barrier => Operation::Flush,
            Ask::Discard => Operation::Discard,
        }
    }
}

impl Parsed {
    /// An entry that nobody has looked at.
    pub fn nothing() -> Parsed {
        Parsed { id: 0, operation: 0, ask: Err(UNSUPPORTED), span: Span { at: 0, len: 0 }, told: None }
    }

    /// Looks at an entry, and puts the pieces that it tells itself into `pieces`. Indirect requests have `segments_max`
    /// segments at most; zero where they were not offered.
    #[inline]
    pub fn look_at(&mut self, entry: &Entry, segments_max: u16, geometry: &Geometry, pieces: &mut Pieces) {
        (self.id, self.operation, self.told) = (entry.id(), entry.operation(), None);
        self.span = Span { at: 0, len: 0 };
        self.ask = match self.operation {
            INDIRECT => self.indirect(entry, segments_max),
            DISCARD => self.discard(entry, geometry),
            _ => self.direct(entry, pieces),
        };
        if geometry.read_only && self.ask.is_ok_and(Ask::is_write) {
            self.ask = Err(ERROR);
        }
    }

    /// A request with its segments in the entry.
    #[inline]
    fn direct(&mut self, entry: &Entry, pieces: &mut Pieces) -> Result<Ask, i16> {
        let ask = transfer(self.operation)?;
        if entry.second() == 0 {
            return match self.operation {
                FLUSH_DISKCACHE => Ok(Ask::Flush),
                WRITE_BARRIER => Ok(Ask::Barrier),
                _ => Err(ERROR),
            };
        }
        pieces.put(entry.segments().ok_or(ERROR)?)?;
        self.span.at = place(entry)?;
        Ok(ask)
    }

    /// A request with its segments in a page of their own.
    fn indirect(&mut self, entry: &Entry, segments_max: u16) -> Result<Ask, i16> {
        self.operation = entry.second();
        if segments_max == 0 {
            return Err(UNSUPPORTED);
        }
        // The header: only reads and writes can be indirect.
        let ask =
            transfer(self.operation).ok().filter(|ask| matches!(ask, Ask::Read | Ask::Write)).ok_or(UNSUPPORTED)?;
        let count = entry.indirect_count();
        if count == 0 || count > segments_max {
            return Err(ERROR);
        }
        self.told = Some(Descriptors { page: GrantRef(entry.indirect_page()), count });
        self.span.at = place(entry)?;
        Ok(ask)
    }

    fn discard(&mut self, entry: &Entry, geometry: &Geometry) -> Result<Ask, i16> {
        if entry.second() & SECURE != 0 {
            return Err(UNSUPPORTED);
        }
        let len = entry.sector_count().checked_mul(SECTOR).filter(|&len| len > 0).ok_or(ERROR)?;
        self.span = Span { at: place(entry)?, len };
        let inside = self.span.at.checked_add(len).is_some_and(|end| end <= geometry.len);
        if inside { Ok(Ask::Discard) } else { Err(ERROR) }
    }
}

/// What moves data.
#[inline]
fn transfer(operation: u8) -> Result<Ask, i16> {
    match operation {
        READ => Ok(Ask::Read),
        WRITE => Ok(Ask::Write),
        WRITE_BARRIER => Ok(Ask::WriteBarrier),
        // Linux sends what it wants to be on the storage at once as a flush with data.
        FLUSH_DISKCACHE => Ok(Ask::WriteDurable),
        _ => Err(UNSUPPORTED),
    }
}

fn place(entry: &Entry) -> Result<u64, i16> {
    entry.sector().checked_mul(SECTOR).ok_or(ERROR)
}

/// The status of an answer.
pub fn status(status: Status, operation: u8) -> i16 {
    match status {
        Status::Done => OKAY,
        // What the storage cannot do is told of what a front end can do without.
        Status::Unsupported if operation == DISCARD => UNSUPPORTED,
        Status::Failed | Status::NoSpace | Status::Refused | Status::Unsupported => ERROR,
    }
}

#[cfg(test)]
mod test {
    use memory::{Mapping, Shared};

    use super::super::abi::X86_64;
    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

    const CUT: [Piece; 2] =
        [Piece { page: GrantRef(9), from: 512, len: 1024 }, Piece { page: GrantRef(10), from: 0, len: 4096 }];

    fn entry(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Entry {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let at = X86_64.at(0);
        ring.write(at, [operation, second]).unwrap();
        ring.write(at + 16, sector.to_le_bytes()).unwrap();
        for (index, &(page, first, last)) in segments.iter().enumerate() {
            ring.write(at + 24 + 8 * index, page.to_le_bytes()).unwrap();
            ring.write(at + 24 + 8 * index + 4, [first, last]).unwrap();
        }
        let mut entry = Entry::default();
        X86_64.read(&ring, 0, &mut entry).unwrap();
        entry
    }

    fn parsed(entry: &Entry, geometry: &Geometry, pieces: &mut Pieces) -> Parsed {
        // What was there before is gone.
        let told = Some(Descriptors { page: GrantRef(1), count: 1 });
        let mut parsed = Parsed { span: Span { at: 1, len: 1 }, told, ..Parsed::nothing() };
        parsed.look_at(entry, 256, geometry, pieces);
        parsed
    }

    fn ask(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Result<Ask, i16> {
        parsed(&entry(operation, second, sector, segments), &GEOMETRY, &mut Pieces::default()).ask
    }

    #[test]
    fn pieces_of_a_large_request_leave_no_memory_behind() {
        let mut pieces = Pieces::default();
        let descriptors = [9, 0, 0, 0, 0, 7, 0, 0].repeat(usize::from(SEGMENTS_MAX));
        pieces.put_told(&descriptors).unwrap();
        assert_eq!((pieces.len(), pieces.bytes()), (256, 1 << 20));
        pieces.clear();
        assert_eq!((pieces.len(), pieces.many.capacity()), (0, 0));
    }

    #[test]
    fn segments_are_cut_by_sectors() {
        let mut pieces = Pieces::default();
        pieces.put_told(&[8, 0, 0, 0, 0, 7, 0, 0]).unwrap();
        let parsed = parsed(&entry(READ, 2, 8, &[(9, 1, 2), (10, 0, 7)]), &GEOMETRY, &mut pieces);
        assert_eq!((&*pieces, pieces.bytes()), (&CUT[..], 5120), "and what was there before is gone");
        assert_eq!((parsed.ask, parsed.span.at, parsed.told), (Ok(Ask::Read), 4096, None));
        pieces.clear();
        assert!(pieces.is_empty());
    }

    #[test]
    fn segments_in_a_page_of_their_own_are_cut_by_sectors() {
        let mut pieces = Pieces::default();
        pieces.put(&[8, 8]).unwrap();
        pieces.put_told(&[9, 0, 0, 0, 1, 2, 0xff, 0xff, 10, 0, 0, 0, 0, 7, 0, 0]).unwrap();
        assert_eq!((&*pieces, pieces.bytes()), (&CUT[..], 5120), "and what was there before is gone");
        assert_eq!(pieces.put_told(&[9, 0, 0, 0, 0, 8, 0, 0]), Err(ERROR));
        assert_eq!((pieces.len(), pieces.bytes()), (0, 0));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (first, last) in [(3, 2), (0, 8), (8, 8), (255, 255), (0, 255)] {
            assert_eq!(ask(READ, 1, 0, &[(9, first, last)]), Err(ERROR), "{first} to {last}");
        }
        assert_eq!(ask(READ, 0, 0, &[]), Err(ERROR), "a read of nothing");
        assert_eq!(ask(WRITE, 12, 0, &[]), Err(ERROR), "more segments than there is room for");
        assert_eq!(ask(WRITE, 1, u64::MAX / 256, &[(9, 0, 7)]), Err(ERROR), "a place beyond all disks");
        assert_eq!(ask(4, 1, 0, &[(9, 0, 7)]), Err(UNSUPPORTED));
        assert_eq!(ask(255, 1, 0, &[(9, 0, 7)]), Err(UNSUPPORTED));
        assert_eq!(ask(INDIRECT, DISCARD, 0, &[]), Err(UNSUPPORTED));
        assert_eq!(ask(INDIRECT, READ, 0, &[]), Err(ERROR), "an indirect read of nothing");
    }

    #[test]
    fn a_discard_lies_on_the_disk_and_is_not_secure() {
        let asked = |flag, sector: u64, count: u32| ask(DISCARD, flag, sector, &[(count, 0, 0)]);
        let parsed = parsed(&entry(DISCARD, 0, 8, &[(16, 0, 0)]), &GEOMETRY, &mut Pieces::default());
        assert_eq!((parsed.ask, parsed.span), (Ok(Ask::Discard), Span { at: 4096, len: 8192 }));
        assert_eq!(asked(SECURE, 8, 16), Err(UNSUPPORTED));
        assert_eq!(asked(0, 8, 2048), Err(ERROR));
        assert_eq!(asked(0, 8, 0), Err(ERROR));
    }

    #[test]
    fn a_disk_to_be_read_only_is_read_only() {
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        for operation in [WRITE, WRITE_BARRIER, DISCARD] {
            let parsed = parsed(&entry(operation, 1, 0, &[(9, 0, 7)]), &read_only, &mut Pieces::default());
            assert!(matches!(parsed.ask, Err(ERROR | UNSUPPORTED)), "{operation}");
        }
        let parsed = parsed(&entry(FLUSH_DISKCACHE, 0, 0, &[]), &read_only, &mut Pieces::default());
        assert_eq!(parsed.ask, Ok(Ask::Flush));
    }
}
