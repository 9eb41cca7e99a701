//! What a ring entry asks for.
//!
//! Knows nothing of rings and grants. Invariant: a [`Transfer`] names at most as many pages as were offered, and each of its
//! pieces lies in a page; whether its span lies on the disk is for [`disk::Request`] to say.
//!
//! Specification: Xen's public header io/blkif.h. Sectors are 512 bytes there, whatever `sector-size` says.

use disk::{Geometry, Operation, Span, Status};
use smallvec::SmallVec;
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
pub type Pieces = SmallVec<[Piece; SEGMENTS_DIRECT]>;

/// An entry that was looked at.
#[derive(Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Handed back with the answer.
    pub id: u64,
    /// Likewise; of an indirect request the operation that it stands for.
    pub operation: u8,
    /// What is to be done, or the status to answer with.
    pub ask: Result<Ask, i16>,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Ask {
    /// Make durable what was written.
    Flush,
    /// Everything before it is to be done first and durable, and nothing after it begun: a barrier without data.
    Barrier,
    /// Give up space.
    Discard(Span),
    /// Move data.
    Transfer(Transfer),
}

/// Data that are to be moved.
#[derive(Debug, PartialEq, Eq)]
pub struct Transfer {
    /// The first byte on the disk.
    pub at: u64,
    /// Which way, and what else.
    pub kind: Kind,
    /// Where in the guest's pages.
    pub memory: Memory,
}

/// Which way data are to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
    /// To the disk, and durable when answered, with everything before it.
    Durable,
    /// The same, and nothing else is under way meanwhile.
    Barrier,
}

/// Where data are in the guest's pages.
#[derive(Debug, PartialEq, Eq)]
pub enum Memory {
    /// Here.
    Direct(Pieces),
    /// As that many descriptors in this page say.
    Indirect {
        /// The page with the descriptors.
        page: GrantRef,
        /// How many there are.
        count: u16,
    },
}

impl Kind {
    /// Whether data go to the disk.
    pub fn is_write(self) -> bool {
        self != Kind::Read
    }

    /// In the words of the disk.
    pub fn operation(self) -> Operation {
        match self {
            Kind::Read => Operation::Read,
            Kind::Write => Operation::Write { durable: false },
            Kind::Durable | Kind::Barrier => Operation::Write { durable: true },
        }
    }
}

impl Memory {
    /// Bytes at most.
    pub fn len_max(&self) -> usize {
        let pages = match self {
            Memory::Direct(pieces) => pieces.len(),
            Memory::Indirect { count, .. } => usize::from(*count),
        };
        pages.saturating_mul(xen::PAGE)
    }
}

impl Parsed {
    /// Looks at an entry. Indirect requests have `segments_max` segments at most; zero where they were not offered.
    pub fn of(entry: &Entry, segments_max: u16, geometry: &Geometry) -> Parsed {
        let outer = entry.operation();
        let operation = if outer == INDIRECT { entry.second() } else { outer };
        let ask = match outer {
            INDIRECT if segments_max == 0 => Err(UNSUPPORTED),
            INDIRECT => indirect(entry, operation, segments_max),
            DISCARD => discard(entry, geometry),
            _ => direct(entry, operation),
        };
        let writes = |ask: &Ask| match ask {
            Ask::Transfer(transfer) => transfer.kind.is_write(),
            Ask::Discard(_) => true,
            Ask::Flush | Ask::Barrier => false,
        };
        let ask = ask.and_then(|ask| if geometry.read_only && writes(&ask) { Err(ERROR) } else { Ok(ask) });
        Parsed { id: entry.id(), operation, ask }
    }

    /// Whether it waits for all before it, and all after it for it.
    pub fn is_barrier(&self) -> bool {
        matches!(self.ask, Ok(Ask::Barrier | Ask::Transfer(Transfer { kind: Kind::Barrier, .. })))
    }
}

/// A request with its segments in the entry.
fn direct(entry: &Entry, operation: u8) -> Result<Ask, i16> {
    let kind = kind_of(operation)?;
    let count = usize::from(entry.second());
    if count == 0 {
        return match operation {
            FLUSH_DISKCACHE => Ok(Ask::Flush),
            WRITE_BARRIER => Ok(Ask::Barrier),
            _ => Err(ERROR),
        };
    }
    if count > SEGMENTS_DIRECT {
        return Err(ERROR);
    }
    let pieces = pieces(entry.segments().get(..count * SEGMENT_LEN).unwrap_or_default())?;
    Ok(Ask::Transfer(Transfer { at: place(entry)?, kind, memory: Memory::Direct(pieces) }))
}

/// A request with its segments in a page of their own.
fn indirect(entry: &Entry, operation: u8, segments_max: u16) -> Result<Ask, i16> {
    // The header: only reads and writes can be indirect.
    let kind = kind_of(operation).ok().filter(|kind| matches!(kind, Kind::Read | Kind::Write)).ok_or(UNSUPPORTED)?;
    let count = entry.indirect_count();
    if count == 0 || count > segments_max {
        return Err(ERROR);
    }
    let memory = Memory::Indirect { page: GrantRef(entry.indirect_page()), count };
    Ok(Ask::Transfer(Transfer { at: place(entry)?, kind, memory }))
}

fn discard(entry: &Entry, geometry: &Geometry) -> Result<Ask, i16> {
    if entry.second() & SECURE != 0 {
        return Err(UNSUPPORTED);
    }
    let len = entry.sector_count().checked_mul(SECTOR).filter(|&len| len > 0).ok_or(ERROR)?;
    let span = Span { at: place(entry)?, len };
    let inside = span.at.checked_add(len).is_some_and(|end| end <= geometry.len);
    if inside { Ok(Ask::Discard(span)) } else { Err(ERROR) }
}

fn kind_of(operation: u8) -> Result<Kind, i16> {
    match operation {
        READ => Ok(Kind::Read),
        WRITE => Ok(Kind::Write),
        WRITE_BARRIER => Ok(Kind::Barrier),
        // Linux sends what it wants to be on the storage at once as a flush with data.
        FLUSH_DISKCACHE => Ok(Kind::Durable),
        _ => Err(UNSUPPORTED),
    }
}

fn place(entry: &Entry) -> Result<u64, i16> {
    entry.sector().checked_mul(SECTOR).ok_or(ERROR)
}

/// The pieces that descriptors name, each from its first to its last sector.
pub fn pieces(descriptors: &[u8]) -> Result<Pieces, i16> {
    descriptors.chunks_exact(SEGMENT_LEN).map(|bytes| piece(bytes).ok_or(ERROR)).collect()
}

fn piece(bytes: &[u8]) -> Option<Piece> {
    let &[a, b, c, d, first, last, ..] = bytes else { return None };
    let sectors = last.checked_sub(first)?.checked_add(1)?;
    // A page has eight sectors.
    if last >= 8 {
        return None;
    }
    let page = GrantRef(u32::from_le_bytes([a, b, c, d]));
    Some(Piece { page, from: u16::from(first).checked_mul(512)?, len: u16::from(sectors).checked_mul(512)? })
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
    use super::super::abi::{ENTRY_MAX, X86_64};
    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

    fn entry(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Entry {
        let mut bytes = [0; ENTRY_MAX];
        (bytes[0], bytes[1]) = (operation, second);
        bytes[16..24].copy_from_slice(&sector.to_le_bytes());
        for (index, &(page, first, last)) in segments.iter().enumerate() {
            let at = 24 + 8 * index;
            bytes[at..at + 4].copy_from_slice(&page.to_le_bytes());
            (bytes[at + 4], bytes[at + 5]) = (first, last);
        }
        Entry::new(&X86_64, bytes)
    }

    fn ask(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Result<Ask, i16> {
        Parsed::of(&entry(operation, second, sector, segments), 256, &GEOMETRY).ask
    }

    #[test]
    fn segments_are_cut_by_sectors() {
        let pieces = smallvec::smallvec![
            Piece { page: GrantRef(9), from: 512, len: 1024 },
            Piece { page: GrantRef(10), from: 0, len: 4096 }
        ];
        let transfer = Transfer { at: 4096, kind: Kind::Read, memory: Memory::Direct(pieces) };
        assert_eq!(ask(READ, 2, 8, &[(9, 1, 2), (10, 0, 7)]), Ok(Ask::Transfer(transfer)));
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
        assert_eq!(asked(0, 8, 16), Ok(Ask::Discard(Span { at: 4096, len: 8192 })));
        assert_eq!(asked(SECURE, 8, 16), Err(UNSUPPORTED));
        assert_eq!(asked(0, 8, 2048), Err(ERROR));
        assert_eq!(asked(0, 8, 0), Err(ERROR));
    }

    #[test]
    fn a_disk_to_be_read_only_is_read_only() {
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        for operation in [WRITE, WRITE_BARRIER, DISCARD] {
            let parsed = Parsed::of(&entry(operation, 1, 0, &[(9, 0, 7)]), 256, &read_only);
            assert!(matches!(parsed.ask, Err(ERROR | UNSUPPORTED)), "{operation}");
        }
        let parsed = Parsed::of(&entry(FLUSH_DISKCACHE, 0, 0, &[]), 256, &read_only);
        assert_eq!(parsed.ask, Ok(Ask::Flush));
    }
}
