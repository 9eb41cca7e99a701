//! The memory table: the regions of guest memory that a front-end has shared, with fast access to small items in them.
//!
//! It knows nothing about rings or requests. Invariants: every region was checked against its file when it was mapped;
//! a table is never changed, only replaced, so that requests in flight keep their memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use memory::{GuestAddr, GuestMemory, Mapping, Region, Segments, Shared};
use rustix::fs::{FileType, fstat, fstatfs};

use super::message::RegionInfo;

/// The maximum number of regions in a table: KVM's original number of memory slots, which no machine exceeds.
pub const MAX_REGIONS: u16 = 509;

/// `f_type` of hugetlbfs, whose files can only be mapped in whole huge pages.
const HUGETLBFS: u64 = 0x9584_58f6;
const PAGE: u64 = 4096;

/// Why a region or a table was refused.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// An empty range, or one that wraps around.
    #[error("invalid region of {len} bytes at {guest:#x} (offset {offset:#x} of its file)")]
    Range {
        /// Its address in the guest.
        guest: u64,
        /// Its length.
        len: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// Accessing the end of it would raise SIGBUS.
    #[error("the file of the region at {guest:#x} has {file_len} bytes and needs {needed}")]
    FileTooShort {
        /// Its address in the guest.
        guest: u64,
        /// The file's size.
        file_len: u64,
        /// The end of the region in the file.
        needed: u64,
    },
    /// The file is not shared memory.
    #[error("the file of the region at {guest:#x} is not memory")]
    NotMemory {
        /// Its address in the guest.
        guest: u64,
    },
    /// A system call failed.
    #[error("cannot map the region at {guest:#x}")]
    Map {
        /// Its address in the guest.
        guest: u64,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Two regions claim the same guest memory.
    #[error("regions of guest memory overlap")]
    Overlap,
    /// More than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} regions")]
    TooMany,
    /// A region to be removed does not exist.
    #[error("there is no region at {guest:#x}")]
    NotFound {
        /// The address in the guest.
        guest: u64,
    },
}

/// One memory table.
#[derive(Default)]
pub struct MemoryTable {
    memory: Arc<GuestMemory>,
    /// A view of each region, for accesses that end within the call.
    views: Vec<RegionView>,
    /// The regions as described by the front-end, and their files, for a successor process.
    descriptions: Vec<(RegionInfo, Arc<OwnedFd>)>,
}

struct RegionView {
    guest: u64,
    bytes: Shared,
}

impl MemoryTable {
    /// A table of exactly these regions.
    pub fn of(regions: Vec<(RegionInfo, OwnedFd)>) -> Result<MemoryTable, RegionError> {
        let mapped: Result<Vec<Region>, RegionError> = regions.iter().map(|(info, file)| map(info, file)).collect();
        MemoryTable::new(mapped?, regions.into_iter().map(|(info, file)| (info, Arc::new(file))).collect())
    }

    /// The table with an additional region.
    pub fn with(&self, info: &RegionInfo, file: OwnedFd) -> Result<MemoryTable, RegionError> {
        let mut regions: Vec<Region> = self.memory.regions().iter().map(share).collect();
        regions.push(map(info, &file)?);
        let mut descriptions = self.descriptions.clone();
        descriptions.push((*info, Arc::new(file)));
        MemoryTable::new(regions, descriptions)
    }

    /// The table without the region of that address and size.
    pub fn without(&self, info: &RegionInfo) -> Result<MemoryTable, RegionError> {
        let is_it =
            |region: &&Region| region.guest.0 == info.guest && region.len == info.len && region.peer == info.peer;
        let left: Vec<Region> = self.memory.regions().iter().filter(|region| !is_it(region)).map(share).collect();
        if left.len() == self.memory.regions().len() {
            return Err(RegionError::NotFound { guest: info.guest });
        }
        let is_other = |(descriptions, _): &&(RegionInfo, Arc<OwnedFd>)| {
            descriptions.guest != info.guest || descriptions.len != info.len || descriptions.peer != info.peer
        };
        MemoryTable::new(left, self.descriptions.iter().filter(is_other).cloned().collect())
    }

    /// The regions as described by the front-end, and their files.
    pub fn descriptions(&self) -> &[(RegionInfo, Arc<OwnedFd>)] {
        &self.descriptions
    }

    fn new(regions: Vec<Region>, descriptions: Vec<(RegionInfo, Arc<OwnedFd>)>) -> Result<MemoryTable, RegionError> {
        if regions.len() > usize::from(MAX_REGIONS) {
            return Err(RegionError::TooMany);
        }
        let memory = Arc::new(GuestMemory::new(regions).ok_or(RegionError::Overlap)?);
        let view = |region: &Region| {
            let bytes = memory.shared(region.guest, usize::try_from(region.len).ok()?)?;
            Some(RegionView { guest: region.guest.0, bytes })
        };
        let views = memory.regions().iter().filter_map(view).collect();
        Ok(MemoryTable { memory, views, descriptions })
    }

    /// A ring at an address of the front-end's process.
    pub fn ring(&self, peer: u64, len: usize) -> Option<Shared> {
        self.memory.shared(self.memory.guest_addr(peer)?, len)
    }

    /// The memory of a request.
    pub fn segments(&self, ranges: impl IntoIterator<Item = (GuestAddr, u32)>) -> Option<Segments> {
        self.memory.segments(ranges)
    }

    /// Reads `N` bytes, each once.
    pub fn read<const N: usize>(&self, addr: GuestAddr) -> Option<[u8; N]> {
        match self.view(addr).and_then(|(view, at)| view.read(at)) {
            Some(bytes) => Some(bytes),
            None => self.read_across(addr),
        }
    }

    /// Reads bytes that may cross from one region into the next; `None` if they are not in guest memory.
    #[cold]
    fn read_across<const N: usize>(&self, addr: GuestAddr) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.segments([(addr, u32::try_from(N).ok()?)])?.copy_to(&mut bytes);
        Some(bytes)
    }

    /// Reads sixteen bytes, each once, as one little-endian number.
    #[inline]
    pub fn read_u128(&self, addr: GuestAddr) -> Option<u128> {
        match self.view(addr).and_then(|(view, at)| view.read_u128(at)) {
            Some(value) => Some(value),
            None => self.read_across(addr).map(u128::from_le_bytes),
        }
    }

    /// Prefetches the cache line at an address, if it is guest memory.
    #[inline]
    pub fn prefetch(&self, addr: GuestAddr) {
        if let Some((view, at)) = self.view(addr) {
            view.prefetch(at);
        }
    }

    /// Writes one byte; `None` if it is not guest memory.
    pub fn write_byte(&self, addr: GuestAddr, byte: u8) -> Option<()> {
        self.view(addr).and_then(|(view, at)| view.write(at, [byte]))
    }

    /// Returns true if the byte is guest memory.
    pub fn has(&self, addr: GuestAddr) -> bool {
        self.view(addr).is_some()
    }

    fn view(&self, addr: GuestAddr) -> Option<(&Shared, usize)> {
        // There are few regions, and nearly all requests are in the largest of them: a scan beats a search.
        self.views.iter().find_map(|view| {
            let at = usize::try_from(addr.0.checked_sub(view.guest)?).ok()?;
            (at < view.bytes.len()).then_some((&view.bytes, at))
        })
    }
}

/// A copy of the region for another table, sharing the mapping.
fn share(region: &Region) -> Region {
    Region { mapping: region.mapping.clone(), ..*region }
}

/// Maps a region after checking it against its file. A later truncation of the file is the front-end's fault.
fn map(info: &RegionInfo, file: &OwnedFd) -> Result<Region, RegionError> {
    let guest = info.guest;
    let range = || RegionError::Range { guest, len: info.len, offset: info.offset };
    let end = info.offset.checked_add(info.len).filter(|_| info.len > 0).ok_or_else(range)?;
    info.guest.checked_add(info.len).and(info.peer.checked_add(info.len)).ok_or_else(range)?;

    let failed = |errno: rustix::io::Errno| RegionError::Map { guest, source: errno.into() };
    let stat = fstat(file).map_err(failed)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let file_len = u64::try_from(stat.st_size).unwrap_or(0);
            if end > file_len {
                return Err(RegionError::FileTooShort { guest, file_len, needed: end });
            }
        }
        // A DAX device: its size is not known here, and mapping past its end fails.
        FileType::CharacterDevice => {}
        _ => return Err(RegionError::NotMemory { guest }),
    }
    let align = match fstatfs(file) {
        Ok(found) if u64::try_from(found.f_type) == Ok(HUGETLBFS) => u64::try_from(stat.st_blksize).unwrap_or(PAGE),
        _ => PAGE,
    };
    let start = info.offset.checked_sub(info.offset.checked_rem(align).unwrap_or(0)).ok_or_else(range)?;
    let mapped_end = end.checked_next_multiple_of(align).ok_or_else(range)?;
    let len = mapped_end.checked_sub(start).and_then(|len| usize::try_from(len).ok()).ok_or_else(range)?;
    let mapping = Mapping::of_file(std::os::fd::AsFd::as_fd(file), start, len)
        .map_err(|source| RegionError::Map { guest, source })?;
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
        let refused = MemoryTable::of(vec![(info(0, 8193, 0), file(8192))]);
        assert!(matches!(refused.err(), Some(RegionError::FileTooShort { file_len: 8192, needed: 8193, .. })));
        let refused = MemoryTable::of(vec![(info(0, 4096, 8192), file(8192))]);
        assert!(matches!(refused.err(), Some(RegionError::FileTooShort { .. })));
    }

    #[test]
    fn a_region_that_wraps_around_is_refused() {
        assert!(matches!(MemoryTable::of(vec![(info(0, 0, 0), file(4096))]).err(), Some(RegionError::Range { .. })));
        let wraps = RegionInfo { guest: 0, len: 4096, peer: 0, offset: u64::MAX };
        assert!(matches!(MemoryTable::of(vec![(wraps, file(4096))]).err(), Some(RegionError::Range { .. })));
        let wraps = RegionInfo { guest: 0, len: 4096, peer: u64::MAX, offset: 0 };
        assert!(matches!(MemoryTable::of(vec![(wraps, file(4096))]).err(), Some(RegionError::Range { .. })));
    }

    #[test]
    fn a_file_that_is_not_memory_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(MemoryTable::of(vec![(info(0, 4096, 0), pipe)]).err(), Some(RegionError::NotMemory { .. })));
    }

    #[test]
    fn regions_are_added_and_removed_by_address() {
        let table = MemoryTable::of(vec![(info(0, 4096, 0), file(4096))]).unwrap();
        assert!(matches!(table.with(&info(4095, 4096, 0), file(4096)).err(), Some(RegionError::Overlap)));
        let table = table.with(&info(4096, 4096, 100), file(8192)).unwrap();
        assert!(table.has(GuestAddr(8191)));
        assert!(matches!(table.without(&info(1, 4096, 0)).err(), Some(RegionError::NotFound { guest: 1 })));
        let table = table.without(&info(0, 4096, 0)).unwrap();
        assert!(!table.has(GuestAddr(0)));
        assert!(table.has(GuestAddr(4096)));
    }

    #[test]
    fn a_region_starts_at_its_offset_in_the_file() {
        let shared = file(12288);
        let copy = rustix::io::dup(&shared).unwrap();
        let table = MemoryTable::of(vec![(info(0, 4096, 5000), shared), (info(8192, 8192, 4096), copy)]).unwrap();
        table.write_byte(GuestAddr(0), 7).unwrap();
        assert_eq!(table.read::<1>(GuestAddr(8192 + 904)), Some([7]));
    }

    #[test]
    fn a_read_may_cross_regions() {
        let table = MemoryTable::of(vec![(info(0, 4096, 0), file(4096)), (info(4096, 4096, 0), file(4096))]).unwrap();
        table.write_byte(GuestAddr(4095), 1).unwrap();
        table.write_byte(GuestAddr(4096), 2).unwrap();
        assert_eq!(table.read::<4>(GuestAddr(4094)), Some([0, 1, 2, 0]));
        assert_eq!(table.read::<4>(GuestAddr(8190)), None);
        assert_eq!(table.read_u128(GuestAddr(4088)), Some(0x0201 << 56));
        assert_eq!((table.read_u128(GuestAddr(8176)), table.read_u128(GuestAddr(8177))), (Some(0), None));
    }
}
