//! Parses the request in a ring entry.
//!
//! It knows nothing about rings and grants. Invariant: a request has at most the offered number of segments, and each
//! of its ranges is within a page; [`disk::Request`] checks that its span is within the disk. Ranges are written once,
//! directly into the caller's memory.
//!
//! Specification: Xen's public header io/blkif.h. Sectors are 512 bytes there, regardless of `sector-size`.

use std::ops::Deref;

use disk::{DiskOffset, Geometry, Span, Status};
use xen::{GrantRef, PageRange};

use super::abi::{Entry, SEGMENT_LEN, SEGMENTS_DIRECT};

/// The maximum number of segments of an indirect request: 1 MiB of pages. Their descriptors fit into half a page.
pub const SEGMENTS_MAX: u16 = 256;

/// The number of indirect ranges up to which a request keeps its allocation: the default maximum of Linux's front end.
/// They are 256 bytes, or 128 KiB for all requests of the largest ring.
const INDIRECT_KEPT: usize = 32;

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

/// Ranges of a guest's pages, in order. Those of a direct request need no allocation.
pub struct PageRanges {
    direct: [PageRange; SEGMENTS_DIRECT],
    /// The number of ranges in `direct`.
    count: usize,
    /// The total length in bytes.
    len: usize,
    /// All ranges of an indirect request; empty for others.
    indirect: Vec<PageRange>,
}

impl Default for PageRanges {
    fn default() -> PageRanges {
        let direct = [PageRange { page: GrantRef(0), from: 0, len: 0 }; SEGMENTS_DIRECT];
        PageRanges { direct, count: 0, len: 0, indirect: Vec::new() }
    }
}

impl Deref for PageRanges {
    type Target = [PageRange];

    #[inline]
    fn deref(&self) -> &[PageRange] {
        if self.indirect.is_empty() { self.direct.get(..self.count).unwrap_or_default() } else { &self.indirect }
    }
}

impl PageRanges {
    /// The total length in bytes.
    pub fn bytes(&self) -> usize {
        self.len
    }

    /// Removes all ranges, and frees a large allocation for indirect ones, of which a ring could keep a megabyte.
    #[inline]
    pub fn clear(&mut self) {
        (self.count, self.len) = (0, 0);
        if self.indirect.capacity() > INDIRECT_KEPT {
            self.indirect = Vec::new();
        }
        self.indirect.clear();
    }

    /// Parses the segments of a direct request, at most [`SEGMENTS_DIRECT`].
    #[inline]
    fn parse_direct(&mut self, segments: &[u64]) -> Result<(), i16> {
        self.clear();
        let mut len = 0;
        for (place, &segment) in self.direct.iter_mut().zip(segments) {
            *place = range(segment).ok_or(ERROR)?;
            len += usize::from(place.len);
        }
        (self.count, self.len) = (segments.len(), len);
        Ok(())
    }

    /// Parses the descriptors of an indirect request.
    pub fn parse_indirect(&mut self, descriptors: &[u8]) -> Result<(), i16> {
        self.clear();
        self.indirect.reserve_exact(descriptors.len() / SEGMENT_LEN);
        let segments = descriptors.chunks_exact(SEGMENT_LEN).filter_map(|bytes| bytes.first_chunk());
        for &segment in segments {
            let range = range(u64::from_le_bytes(segment)).ok_or(ERROR)?;
            self.indirect.push(range);
            self.len += usize::from(range.len);
        }
        Ok(())
    }
}

/// The range of a segment, given by its first and last sector in the page. `None` if it is invalid: a page has eight
/// sectors.
#[inline]
fn range(segment: u64) -> Option<PageRange> {
    let [a, b, c, d, first, last, ..] = segment.to_le_bytes();
    if first > last || last >= 8 {
        return None;
    }
    // Less than eight, as checked above: the mask shows the compiler that there is no overflow.
    let (before, more) = (u16::from(first) & 7, u16::from(last.saturating_sub(first)) & 7);
    Some(PageRange { page: GrantRef(u32::from_le_bytes([a, b, c, d])), from: before * 512, len: (more + 1) * 512 })
}

/// A parsed entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// The front end's id, repeated in the response.
    pub id: u64,
    /// The front end's operation, repeated in the response; of an indirect request, its `indirect_op`.
    pub opcode: u8,
    /// The operation, or the status to respond with.
    pub operation: Result<Operation, i16>,
    /// The span on the disk. The length of a transfer is that of its ranges.
    pub span: Span,
    /// The descriptors of an indirect request.
    pub descriptors: Option<Descriptors>,
}

/// An operation requested through a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
    /// A write that makes its data and earlier writes durable.
    WriteDurable,
    /// A durable write during which no other request is in progress.
    WriteBarrier,
    Flush,
    /// A flush during which no other request is in progress.
    Barrier,
    Discard,
}

/// The descriptors of an indirect request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The page that contains them.
    pub page: GrantRef,
    /// The number of descriptors.
    pub count: u16,
}

impl Operation {
    /// Returns true if it transfers data.
    pub fn has_data(self) -> bool {
        matches!(self, Operation::Read | Operation::Write | Operation::WriteDurable | Operation::WriteBarrier)
    }

    /// Returns true if it changes the disk.
    pub fn is_write(self) -> bool {
        matches!(self, Operation::Write | Operation::WriteDurable | Operation::WriteBarrier | Operation::Discard)
    }

    /// Returns true if it waits for all requests before it, and all after it wait for it.
    pub fn is_barrier(self) -> bool {
        matches!(self, Operation::WriteBarrier | Operation::Barrier)
    }

    /// The corresponding disk operation.
    pub fn operation(self) -> disk::Operation {
        match self {
            Operation::Read => disk::Operation::Read,
            Operation::Write => disk::Operation::Write { durable: false },
            Operation::WriteDurable | Operation::WriteBarrier => disk::Operation::Write { durable: true },
            Operation::Flush | Operation::Barrier => disk::Operation::Flush,
            Operation::Discard => disk::Operation::Discard,
        }
    }
}

impl Parsed {
    /// A placeholder before an entry is parsed.
    pub fn empty() -> Parsed {
        Parsed {
            id: 0,
            opcode: 0,
            operation: Err(UNSUPPORTED),
            span: Span { at: DiskOffset(0), len: 0 },
            descriptors: None,
        }
    }

    /// Parses an entry, and the segments in it into `ranges`. Indirect requests may have up to `segments_max` segments;
    /// zero if they were not offered.
    #[inline]
    pub fn parse(&mut self, entry: &Entry, segments_max: u16, geometry: &Geometry, ranges: &mut PageRanges) {
        (self.id, self.opcode, self.descriptors) = (entry.id(), entry.operation(), None);
        self.span = Span { at: DiskOffset(0), len: 0 };
        self.operation = match self.opcode {
            INDIRECT => self.indirect(entry, segments_max),
            DISCARD => self.discard(entry, geometry),
            _ => self.direct(entry, ranges),
        };
        if geometry.read_only && self.operation.is_ok_and(Operation::is_write) {
            self.operation = Err(ERROR);
        }
    }

    /// Parses a request with its segments in the entry.
    #[inline]
    fn direct(&mut self, entry: &Entry, ranges: &mut PageRanges) -> Result<Operation, i16> {
        let operation = transfer(self.opcode)?;
        if entry.second() == 0 {
            return match self.opcode {
                FLUSH_DISKCACHE => Ok(Operation::Flush),
                WRITE_BARRIER => Ok(Operation::Barrier),
                _ => Err(ERROR),
            };
        }
        ranges.parse_direct(entry.segments().ok_or(ERROR)?)?;
        self.span.at = offset(entry)?;
        Ok(operation)
    }

    /// Parses a request with its segments in a separate page.
    fn indirect(&mut self, entry: &Entry, segments_max: u16) -> Result<Operation, i16> {
        self.opcode = entry.second();
        if segments_max == 0 {
            return Err(UNSUPPORTED);
        }
        // io/blkif.h: only reads and writes can be indirect.
        let operation = transfer(self.opcode)
            .ok()
            .filter(|operation| matches!(operation, Operation::Read | Operation::Write))
            .ok_or(UNSUPPORTED)?;
        let count = entry.indirect_count();
        if count == 0 || count > segments_max {
            return Err(ERROR);
        }
        self.descriptors = Some(Descriptors { page: GrantRef(entry.indirect_page()), count });
        self.span.at = offset(entry)?;
        Ok(operation)
    }

    fn discard(&mut self, entry: &Entry, geometry: &Geometry) -> Result<Operation, i16> {
        if entry.second() & SECURE != 0 {
            return Err(UNSUPPORTED);
        }
        let len = entry.sector_count().checked_mul(SECTOR).filter(|&len| len > 0).ok_or(ERROR)?;
        self.span = Span { at: offset(entry)?, len };
        let inside = self.span.at.checked_add(len).is_some_and(|end| end.0 <= geometry.len);
        if inside { Ok(Operation::Discard) } else { Err(ERROR) }
    }
}

/// The operation of a request that transfers data.
#[inline]
fn transfer(operation: u8) -> Result<Operation, i16> {
    match operation {
        READ => Ok(Operation::Read),
        WRITE => Ok(Operation::Write),
        WRITE_BARRIER => Ok(Operation::WriteBarrier),
        // Linux sends a forced (FUA) write as a flush with data.
        FLUSH_DISKCACHE => Ok(Operation::WriteDurable),
        _ => Err(UNSUPPORTED),
    }
}

fn offset(entry: &Entry) -> Result<DiskOffset, i16> {
    entry.sector().checked_mul(SECTOR).map(DiskOffset).ok_or(ERROR)
}

/// The status of the response to an operation of the front end.
pub fn status(status: Status, operation: u8) -> i16 {
    match status {
        Status::Done => OKAY,
        // Missing support is reported as such only for operations that a front end does not need.
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

    const CUT: [PageRange; 2] =
        [PageRange { page: GrantRef(9), from: 512, len: 1024 }, PageRange { page: GrantRef(10), from: 0, len: 4096 }];

    fn entry(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Entry {
        let ring = Shared::of(Mapping::anonymous(4096).unwrap());
        let at = X86_64.offset_of(0);
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

    fn parsed(entry: &Entry, geometry: &Geometry, ranges: &mut PageRanges) -> Parsed {
        // Earlier contents are removed.
        let descriptors = Some(Descriptors { page: GrantRef(1), count: 1 });
        let mut parsed = Parsed { span: Span { at: DiskOffset(1), len: 1 }, descriptors, ..Parsed::empty() };
        parsed.parse(entry, 256, geometry, ranges);
        parsed
    }

    fn parse_operation(operation: u8, second: u8, sector: u64, segments: &[(u32, u8, u8)]) -> Result<Operation, i16> {
        parsed(&entry(operation, second, sector, segments), &GEOMETRY, &mut PageRanges::default()).operation
    }

    #[test]
    fn ranges_of_a_large_request_are_freed() {
        let mut ranges = PageRanges::default();
        let descriptors = [9, 0, 0, 0, 0, 7, 0, 0].repeat(usize::from(SEGMENTS_MAX));
        ranges.parse_indirect(&descriptors).unwrap();
        assert_eq!((ranges.len(), ranges.bytes()), (256, 1 << 20));
        ranges.clear();
        assert_eq!((ranges.len(), ranges.indirect.capacity()), (0, 0));
    }

    #[test]
    fn segments_become_sector_ranges() {
        let mut ranges = PageRanges::default();
        ranges.parse_indirect(&[8, 0, 0, 0, 0, 7, 0, 0]).unwrap();
        let parsed = parsed(&entry(READ, 2, 8, &[(9, 1, 2), (10, 0, 7)]), &GEOMETRY, &mut ranges);
        assert_eq!((&*ranges, ranges.bytes()), (&CUT[..], 5120), "earlier contents are removed");
        assert_eq!((parsed.operation, parsed.span.at.0, parsed.descriptors), (Ok(Operation::Read), 4096, None));
        ranges.clear();
        assert!(ranges.is_empty());
    }

    #[test]
    fn indirect_segments_become_sector_ranges() {
        let mut ranges = PageRanges::default();
        ranges.parse_direct(&[8, 8]).unwrap();
        ranges.parse_indirect(&[9, 0, 0, 0, 1, 2, 0xff, 0xff, 10, 0, 0, 0, 0, 7, 0, 0]).unwrap();
        assert_eq!((&*ranges, ranges.bytes()), (&CUT[..], 5120), "earlier contents are removed");
        assert_eq!(ranges.parse_indirect(&[9, 0, 0, 0, 0, 8, 0, 0]), Err(ERROR));
        assert_eq!((ranges.len(), ranges.bytes()), (0, 0));
    }

    #[test]
    fn invalid_requests_are_refused() {
        for (first, last) in [(3, 2), (0, 8), (8, 8), (255, 255), (0, 255)] {
            assert_eq!(parse_operation(READ, 1, 0, &[(9, first, last)]), Err(ERROR), "{first} to {last}");
        }
        assert_eq!(parse_operation(READ, 0, 0, &[]), Err(ERROR), "a read without segments");
        assert_eq!(parse_operation(WRITE, 12, 0, &[]), Err(ERROR), "more segments than fit");
        assert_eq!(
            parse_operation(WRITE, 1, u64::MAX / 256, &[(9, 0, 7)]),
            Err(ERROR),
            "an offset past the end of any disk"
        );
        assert_eq!(parse_operation(4, 1, 0, &[(9, 0, 7)]), Err(UNSUPPORTED));
        assert_eq!(parse_operation(255, 1, 0, &[(9, 0, 7)]), Err(UNSUPPORTED));
        assert_eq!(parse_operation(INDIRECT, DISCARD, 0, &[]), Err(UNSUPPORTED));
        assert_eq!(parse_operation(INDIRECT, READ, 0, &[]), Err(ERROR), "an indirect read without segments");
    }

    #[test]
    fn a_discard_must_be_within_the_disk_and_not_secure() {
        let parsed_discard = |flag, sector: u64, count: u32| parse_operation(DISCARD, flag, sector, &[(count, 0, 0)]);
        let parsed = parsed(&entry(DISCARD, 0, 8, &[(16, 0, 0)]), &GEOMETRY, &mut PageRanges::default());
        assert_eq!((parsed.operation, parsed.span), (Ok(Operation::Discard), Span { at: DiskOffset(4096), len: 8192 }));
        assert_eq!(parsed_discard(SECURE, 8, 16), Err(UNSUPPORTED));
        assert_eq!(parsed_discard(0, 8, 2048), Err(ERROR));
        assert_eq!(parsed_discard(0, 8, 0), Err(ERROR));
    }

    #[test]
    fn writes_to_a_read_only_disk_are_refused() {
        let read_only = Geometry { read_only: true, ..GEOMETRY };
        for operation in [WRITE, WRITE_BARRIER, DISCARD] {
            let parsed = parsed(&entry(operation, 1, 0, &[(9, 0, 7)]), &read_only, &mut PageRanges::default());
            assert!(matches!(parsed.operation, Err(ERROR | UNSUPPORTED)), "{operation}");
        }
        let parsed = parsed(&entry(FLUSH_DISKCACHE, 0, 0, &[]), &read_only, &mut PageRanges::default());
        assert_eq!(parsed.operation, Ok(Operation::Flush));
    }
}
