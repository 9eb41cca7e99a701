//! Parses the header of a virtio-blk request and the ranges of a discard: bytes from the driver, read once.
//!
//! It knows nothing about rings. Offsets and lengths are not checked here; [`disk::Request::new`] checks them against
//! the disk.
//!
//! Specification: virtio 1.2, 5.2.6 "Device Operation".

use disk::{DiskOffset, Span, Status};
use memory::GuestAddr;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::table::MemoryTable;

/// virtio-blk counts in sectors of 512 bytes, regardless of the block size.
pub const SECTOR: u64 = 512;
/// The size of the serial number returned by VIRTIO_BLK_T_GET_ID.
pub const ID_LEN: usize = 20;
/// The maximum number of ranges in one discard or write-zeroes request: Linux merges up to this number of discards.
pub const MAX_RANGES: u16 = 16;
/// The maximum number of sectors in one range: 2 GiB, a common limit.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;

/// virtio 1.2, 5.2.6: the three values of the status byte.
pub const S_OK: u8 = 0;
pub const S_IOERR: u8 = 1;
pub const S_UNSUPP: u8 = 2;

const UNMAP: u32 = 1;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
}

#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout)]
struct RawHeader {
    kind: U32,
    reserved: U32,
    sector: U64,
}
const _: () = assert!(size_of::<RawHeader>() == 16);

#[repr(C)]
#[derive(FromBytes, Immutable, KnownLayout)]
struct RawRange {
    sector: U64,
    sectors: U32,
    flags: U32,
}
const _: () = assert!(size_of::<RawRange>() == 16);

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: RequestKind,
    pub at: DiskOffset,
}

impl Header {
    /// Parses a header; the error is the status to return.
    pub fn parse(bytes: [u8; 16]) -> Result<Header, u8> {
        let raw: RawHeader = zerocopy::transmute!(bytes);
        let kind = match raw.kind.get() {
            0 => RequestKind::Read,
            1 => RequestKind::Write,
            4 => RequestKind::Flush,
            8 => RequestKind::GetId,
            11 => RequestKind::Discard,
            13 => RequestKind::WriteZeroes,
            _ => return Err(S_UNSUPP),
        };
        let at = raw.sector.get().checked_mul(SECTOR).ok_or(S_IOERR)?;
        Ok(Header { kind, at: DiskOffset(at) })
    }
}

/// One range of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub span: Span,
    /// Write-zeroes only: space may be deallocated.
    pub unmap: bool,
}

impl Range {
    /// Parses a range; the error is the status to return.
    pub fn parse(bytes: [u8; 16], kind: RequestKind) -> Result<Range, u8> {
        let raw: RawRange = zerocopy::transmute!(bytes);
        let flags = raw.flags.get();
        // virtio 1.2, 5.2.6.2: unknown flags, and "unmap" of a discard, are unsupported.
        let known = if kind == RequestKind::WriteZeroes { UNMAP } else { 0 };
        if flags & !known != 0 {
            return Err(S_UNSUPP);
        }
        if raw.sectors.get() > MAX_RANGE_SECTORS {
            return Err(S_IOERR);
        }
        let at = raw.sector.get().checked_mul(SECTOR).ok_or(S_IOERR)?;
        let len = u64::from(raw.sectors.get()).checked_mul(SECTOR).ok_or(S_IOERR)?;
        Ok(Range { span: Span { at: DiskOffset(at), len }, unmap: flags & UNMAP != 0 })
    }
}

/// Consumes the first 16 bytes of a list of parts, which may be split in any way (virtio 1.2, 2.7.4.1: the device must
/// not assume an arrangement). `None` if there are fewer bytes, or they are not in guest memory.
#[inline]
pub fn take_16(table: &MemoryTable, parts: &mut [(GuestAddr, u32)]) -> Option<[u8; 16]> {
    let (addr, len) = parts.iter_mut().find(|(_, len)| *len > 0)?;
    if *len < 16 {
        return take_16_split(table, parts);
    }
    let number = table.read_u128(*addr)?;
    skip(addr, len, 16)?;
    Some(number.to_le_bytes())
}

/// As [`take_16`], for bytes that are split over several parts.
#[cold]
fn take_16_split(table: &MemoryTable, parts: &mut [(GuestAddr, u32)]) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    for (addr, len) in parts.iter_mut().filter(|(_, len)| *len > 0) {
        while *len > 0 && filled < bytes.len() {
            let [byte] = table.read::<1>(*addr)?;
            *bytes.get_mut(filled)? = byte;
            filled = filled.checked_add(1)?;
            skip(addr, len, 1)?;
        }
        if filled == bytes.len() {
            return Some(bytes);
        }
    }
    None
}

fn skip(addr: &mut GuestAddr, len: &mut u32, count: u32) -> Option<()> {
    *addr = GuestAddr(addr.0.checked_add(u64::from(count))?);
    *len = len.checked_sub(count)?;
    Some(())
}

/// The status byte for a status.
pub fn status_byte(status: Status) -> u8 {
    match status {
        Status::Done => S_OK,
        Status::Failed | Status::NoSpace | Status::Refused => S_IOERR,
        Status::Unsupported => S_UNSUPP,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn header(kind: u32, sector: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&sector.to_le_bytes());
        bytes
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&sector.to_le_bytes());
        bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
        bytes[12..].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn a_header_has_a_type_and_an_offset() {
        assert_eq!(Header::parse(header(1, 3)), Ok(Header { kind: RequestKind::Write, at: DiskOffset(1536) }));
        assert_eq!(Header::parse(header(2, 0)), Err(S_UNSUPP));
        assert_eq!(Header::parse(header(0x8000_0000, 0)), Err(S_UNSUPP));
        assert_eq!(Header::parse(header(0, u64::MAX / 512 + 1)), Err(S_IOERR));
    }

    #[test]
    fn the_flags_and_limits_of_a_range_are_checked() {
        let parsed = Range::parse(range(8, 16, 1), RequestKind::WriteZeroes);
        assert_eq!(parsed, Ok(Range { span: Span { at: DiskOffset(4096), len: 8192 }, unmap: true }));
        assert_eq!(Range::parse(range(8, 16, 1), RequestKind::Discard), Err(S_UNSUPP));
        assert_eq!(Range::parse(range(8, 16, 2), RequestKind::WriteZeroes), Err(S_UNSUPP));
        assert_eq!(Range::parse(range(0, MAX_RANGE_SECTORS + 1, 0), RequestKind::Discard), Err(S_IOERR));
        assert_eq!(Range::parse(range(u64::MAX, 1, 0), RequestKind::Discard), Err(S_IOERR));
    }

    #[test]
    fn each_status_maps_to_its_byte() {
        assert_eq!(status_byte(Status::Done), 0);
        assert_eq!(status_byte(Status::NoSpace), 1);
        assert_eq!(status_byte(Status::Unsupported), 2);
    }
}
