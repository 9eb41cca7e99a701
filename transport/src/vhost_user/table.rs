//! The memory table: the regions of guest memory that a front-end has shared, and quick access to small things
//! in them.
//!
//! Knows nothing about rings or requests. Invariant: every region was checked against its file when it was
//! mapped; a table is never changed, only replaced, so that requests in flight keep what they point into.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::{GuestAddr, GuestMemory, Mapping, Region, Segments, Shared};
use rustix::fs::{FileType, fstat, fstatfs};

use super::message::RegionInfo;

/// Regions in a table: as many as KVM has had memory slots, which no machine exceeds.
pub const MAX_REGIONS: usize = 509;

/// `f_type` of a file system of huge pages, whose files map in whole pages of theirs only.
const HUGETLBFS: u64 = 0x9584_58f6;
const PAGE: u64 = 4096;

/// Why a region or a table was refused.
#[derive(Debug, thiserror::Error)]
pub enum BadRegion {
    /// No bytes, or a range that wraps around.
    #[error("a region of {len} bytes at {guest:#x} (offset {offset:#x} of its file) cannot exist")]
    Range {
        /// Its address in the guest.
        guest: u64,
        /// Its bytes.
        len: u64,
        /// Its place in the file.
        offset: u64,
    },
    /// Touching the end of it would raise SIGBUS.
    #[error("the file of the region at {guest:#x} has {file_len} bytes and needs {needed}")]
    FileTooShort {
        /// Its address in the guest.
        guest: u64,
        /// The file's size.
        file_len: u64,
        /// Where the region ends in the file.
        needed: u64,
    },
    /// Not something to be mapped.
    #[error("the file of the region at {guest:#x} is not memory")]
    NotMemory {
        /// Its address in the guest.
        guest: u64,
    },
    /// The kernel refused.
    #[error("mapping the region at {guest:#x} failed")]
    Map {
        /// Its address in the guest.
        guest: u64,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Two regions claim the same guest memory.
    #[error("regions of guest memory overlap")]
    Overlap,
    /// More than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} regions")]
    TooMany,
    /// To be removed and not there.
    #[error("there is no region at {guest:#x}")]
    Absent {
        /// The address in the guest.
        guest: u64,
    },
}

/// One memory table.
#[derive(Default)]
pub struct Table {
    memory: Arc<GuestMemory>,
    /// Each region in one piece, for accesses that need no owner of their own.
    pieces: Vec<Piece>,
    /// The regions as they were told, and their files: for the process that takes the place of this one.
    told: Vec<(RegionInfo, Arc<OwnedFd>)>,
}

struct Piece {
    guest: u64,
    bytes: Shared,
}

impl Table {
    /// The table that has just these regions.
    pub fn of(regions: Vec<(RegionInfo, OwnedFd)>) -> Result<Table, BadRegion> {
        let mapped: Result<Vec<Region>, BadRegion> = regions.iter().map(|(info, file)| map(info, file)).collect();
        Table::new(mapped?, regions.into_iter().map(|(info, file)| (info, Arc::new(file))).collect())
    }

    /// The table with a region more.
    pub fn with(&self, info: &RegionInfo, file: OwnedFd) -> Result<Table, BadRegion> {
        let mut regions: Vec<Region> = self.memory.regions().iter().map(same).collect();
        regions.push(map(info, &file)?);
        let mut told = self.told.clone();
        told.push((*info, Arc::new(file)));
        Table::new(regions, told)
    }

    /// The table without the region of that address and size.
    pub fn without(&self, info: &RegionInfo) -> Result<Table, BadRegion> {
        let is_it =
            |region: &&Region| region.guest.0 == info.guest && region.len == info.len && region.peer == info.peer;
        let left: Vec<Region> = self.memory.regions().iter().filter(|region| !is_it(region)).map(same).collect();
        if left.len() == self.memory.regions().len() {
            return Err(BadRegion::Absent { guest: info.guest });
        }
        let is_other = |(told, _): &&(RegionInfo, Arc<OwnedFd>)| {
            told.guest != info.guest || told.len != info.len || told.peer != info.peer
        };
        Table::new(left, self.told.iter().filter(is_other).cloned().collect())
    }

    /// The regions as they were told, and their files.
    pub fn told(&self) -> &[(RegionInfo, Arc<OwnedFd>)] {
        &self.told
    }

    fn new(regions: Vec<Region>, told: Vec<(RegionInfo, Arc<OwnedFd>)>) -> Result<Table, BadRegion> {
        if regions.len() > MAX_REGIONS {
            return Err(BadRegion::TooMany);
        }
        let memory = Arc::new(GuestMemory::new(regions).ok_or(BadRegion::Overlap)?);
        let piece = |region: &Region| {
            let bytes = memory.shared(region.guest, usize::try_from(region.len).ok()?)?;
            Some(Piece { guest: region.guest.0, bytes })
        };
        let pieces = memory.regions().iter().filter_map(piece).collect();
        Ok(Table { memory, pieces, told })
    }

    /// A ring at an address of the front-end's process.
    pub fn ring(&self, peer: u64, len: usize) -> Option<Shared> {
        self.memory.shared(self.memory.guest_addr(peer)?, len)
    }

    /// The memory of a request.
    pub fn segments(&self, ranges: impl IntoIterator<Item = (GuestAddr, u32)>) -> Option<Segments> {
        self.memory.segments(ranges)
    }

    /// `N` bytes, each read once.
    pub fn read<const N: usize>(&self, addr: GuestAddr) -> Option<[u8; N]> {
        match self.piece(addr).and_then(|(piece, at)| piece.read(at)) {
            Some(bytes) => Some(bytes),
            None => self.read_across(addr),
        }
    }

    /// Bytes that cross from one region into the next, or lie nowhere.
    #[cold]
    fn read_across<const N: usize>(&self, addr: GuestAddr) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.segments([(addr, u32::try_from(N).ok()?)])?.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Sixteen bytes as one little-endian number, each read once.
    #[inline]
    pub fn read_u128(&self, addr: GuestAddr) -> Option<u128> {
        match self.piece(addr).and_then(|(piece, at)| piece.read_u128(at)) {
            Some(value) => Some(value),
            None => self.read_across(addr).map(u128::from_le_bytes),
        }
    }

    /// Writes one byte.
    pub fn write_byte(&self, addr: GuestAddr, byte: u8) -> Option<()> {
        self.piece(addr).and_then(|(piece, at)| piece.write(at, [byte]))
    }

    /// Whether the byte is guest memory.
    pub fn has(&self, addr: GuestAddr) -> bool {
        self.piece(addr).is_some()
    }

    fn piece(&self, addr: GuestAddr) -> Option<(&Shared, usize)> {
        // Few regions, and nearly all requests in the largest of them: a scan beats a search.
        self.pieces.iter().find_map(|piece| {
            let at = usize::try_from(addr.0.checked_sub(piece.guest)?).ok()?;
            (at < piece.bytes.len()).then_some((&piece.bytes, at))
        })
    }
}

/// A region of the next table that maps what one of this table maps.
fn same(region: &Region) -> Region {
    Region { mapping: region.mapping.clone(), ..*region }
}

/// Maps a region after comparing it with its file. A file that shrinks later is its owner's own doing.
fn map(info: &RegionInfo, file: &OwnedFd) -> Result<Region, BadRegion> {
    let guest = info.guest;
    let range = || BadRegion::Range { guest, len: info.len, offset: info.offset };
    let end = info.offset.checked_add(info.len).filter(|_| info.len > 0).ok_or_else(range)?;
    info.guest.checked_add(info.len).and(info.peer.checked_add(info.len)).ok_or_else(range)?;

    let failed = |errno: rustix::io::Errno| BadRegion::Map { guest, source: errno.into() };
    let stat = fstat(file).map_err(failed)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let file_len = u64::try_from(stat.st_size).unwrap_or(0);
            if end > file_len {
                return Err(BadRegion::FileTooShort { guest, file_len, needed: end });
            }
        }
        // A DAX device: its size is not known here, and mapping past it fails.
        FileType::CharacterDevice => {}
        _ => return Err(BadRegion::NotMemory { guest }),
    }
    let align = match fstatfs(file) {
        Ok(found) if u64::try_from(found.f_type) == Ok(HUGETLBFS) => u64::try_from(stat.st_blksize).unwrap_or(PAGE),
        _ => PAGE,
    };
    let start = info.offset.checked_sub(info.offset.checked_rem(align).unwrap_or(0)).ok_or_else(range)?;
    let mapped_end = end.checked_next_multiple_of(align).ok_or_else(range)?;
    let len = mapped_end.checked_sub(start).and_then(|len| usize::try_from(len).ok()).ok_or_else(range)?;
    let mapping = Mapping::of_file(std::os::fd::AsFd::as_fd(file), start, len)
        .map_err(|source| BadRegion::Map { guest, source })?;
    let offset = info.offset.checked_sub(start).ok_or_else(range)?;
    Ok(Region { guest: GuestAddr(guest), peer: info.peer, len: info.len, offset, mapping: Arc::new(mapping) })
}

#[cfg(test)]
mod test {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn file(len: u64) -> OwnedFd {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    }

    fn info(guest: u64, len: u64, offset: u64) -> RegionInfo {
        RegionInfo { guest, len, peer: guest + 0x1000_0000, offset }
    }

    #[test]
    fn a_region_larger_than_its_file_is_refused() {
        let refused = Table::of(vec![(info(0, 8193, 0), file(8192))]);
        assert!(matches!(refused.err(), Some(BadRegion::FileTooShort { file_len: 8192, needed: 8193, .. })));
        let refused = Table::of(vec![(info(0, 4096, 8192), file(8192))]);
        assert!(matches!(refused.err(), Some(BadRegion::FileTooShort { .. })));
    }

    #[test]
    fn a_region_that_wraps_around_is_refused() {
        assert!(matches!(Table::of(vec![(info(0, 0, 0), file(4096))]).err(), Some(BadRegion::Range { .. })));
        let wraps = RegionInfo { guest: 0, len: 4096, peer: 0, offset: u64::MAX };
        assert!(matches!(Table::of(vec![(wraps, file(4096))]).err(), Some(BadRegion::Range { .. })));
        let wraps = RegionInfo { guest: 0, len: 4096, peer: u64::MAX, offset: 0 };
        assert!(matches!(Table::of(vec![(wraps, file(4096))]).err(), Some(BadRegion::Range { .. })));
    }

    #[test]
    fn what_is_not_memory_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(Table::of(vec![(info(0, 4096, 0), pipe)]).err(), Some(BadRegion::NotMemory { .. })));
    }

    #[test]
    fn regions_come_and_go_by_address() {
        let table = Table::of(vec![(info(0, 4096, 0), file(4096))]).unwrap();
        assert!(matches!(table.with(&info(4095, 4096, 0), file(4096)).err(), Some(BadRegion::Overlap)));
        let table = table.with(&info(4096, 4096, 100), file(8192)).unwrap();
        assert!(table.has(GuestAddr(8191)));
        assert!(matches!(table.without(&info(1, 4096, 0)).err(), Some(BadRegion::Absent { guest: 1 })));
        let table = table.without(&info(0, 4096, 0)).unwrap();
        assert!(!table.has(GuestAddr(0)));
        assert!(table.has(GuestAddr(4096)));
    }

    #[test]
    fn a_region_starts_at_its_offset_of_the_file() {
        let shared = file(12288);
        let copy = rustix::io::dup(&shared).unwrap();
        let table = Table::of(vec![(info(0, 4096, 5000), shared), (info(8192, 8192, 4096), copy)]).unwrap();
        table.write_byte(GuestAddr(0), 7).unwrap();
        assert_eq!(table.read::<1>(GuestAddr(8192 + 904)), Some([7]));
    }

    #[test]
    fn a_read_may_cross_regions() {
        let table = Table::of(vec![(info(0, 4096, 0), file(4096)), (info(4096, 4096, 0), file(4096))]).unwrap();
        table.write_byte(GuestAddr(4095), 1).unwrap();
        table.write_byte(GuestAddr(4096), 2).unwrap();
        assert_eq!(table.read::<4>(GuestAddr(4094)), Some([0, 1, 2, 0]));
        assert_eq!(table.read::<4>(GuestAddr(8190)), None);
        assert_eq!(table.read_u128(GuestAddr(4088)), Some(0x0201 << 56));
        assert_eq!((table.read_u128(GuestAddr(8176)), table.read_u128(GuestAddr(8177))), (Some(0), None));
    }
}
