//! The dirty log of a migration: a bitmap in memory of the front-end, in which the back-end marks pages that it has
//! written to.
//!
//! It knows nothing about the writes themselves. Invariants: the log was checked against its file when it was mapped,
//! as regions of guest memory are; a bit is set after the page was written; nothing outside of the log is accessed. If
//! a page has no bit, the front-end is disconnected before the write is announced, as a migration would lose it.
//!
//! Specification: QEMU, docs/interop/vhost-user.rst, "Migration".

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use disk::size::on_disk;
use memory::{GuestAddr, Mapping, Segments, Shared};
use rustix::fs::{FileType, fstat};

use super::kill_point;
use super::message::LogInfo;

/// Bytes of guest memory per bit, regardless of the guest's own page size.
const LOG_PAGE: u64 = 4096;
const PAGE: u64 = 4096;

/// Why a log is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// Empty, or it wraps around.
    #[error("it has {len} bytes at offset {offset:#x} of its file")]
    Range {
        /// Its length.
        len: u64,
        /// Its offset in the file.
        offset: u64,
    },
    /// Accessing the end of it would raise SIGBUS.
    #[error("its file has {file_len} bytes and needs {needed}")]
    FileTooShort {
        /// The file's size.
        file_len: u64,
        /// The end of the log in the file.
        needed: u64,
    },
    /// The file is not shared memory.
    #[error("its file is not memory")]
    NotMemory,
    /// A system call failed.
    #[error("it cannot be mapped")]
    Failed(#[source] std::io::Error),
}

/// A page that was written to has no bit in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unlogged(pub GuestAddr);

/// One log. It is never changed, only replaced.
pub struct DirtyLog {
    bytes: Shared,
    /// The first byte of the log in the mapping, which begins at a page boundary.
    start: u64,
    /// The length of the log in bytes.
    len: u64,
    /// Its description and file, for a successor process.
    description: (LogInfo, OwnedFd),
}

impl DirtyLog {
    /// Maps a log after checking it against its file. A later truncation of the file is the front-end's fault, as with
    /// guest memory.
    pub fn of(info: &LogInfo, file: OwnedFd) -> Result<DirtyLog, LogError> {
        let LogInfo { len, offset } = *info;
        let range = || LogError::Range { len, offset };
        let needed = offset.checked_add(len).filter(|_| len > 0).ok_or_else(range)?;
        let stat = fstat(&file).map_err(|errno| LogError::Failed(errno.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(LogError::NotMemory);
        }
        let file_len = u64::try_from(stat.st_size).unwrap_or(0);
        if needed > file_len {
            return Err(LogError::FileTooShort { file_len, needed });
        }
        let start = offset % PAGE;
        let mapped = len.checked_add(start).and_then(|len| usize::try_from(len).ok()).ok_or_else(range)?;
        let at = offset.checked_sub(start).ok_or_else(range)?;
        let mapping = Mapping::of_file(file.as_fd(), at, mapped).map_err(LogError::Failed)?;
        Ok(DirtyLog { bytes: Shared::of(mapping), start, len, description: (*info, file) })
    }

    /// The log as described by the front-end, and its file.
    pub fn description(&self) -> (&LogInfo, &OwnedFd) {
        (&self.description.0, &self.description.1)
    }

    /// Marks `len` bytes at `addr` as written.
    #[inline]
    pub fn mark(&self, addr: GuestAddr, len: u64) -> Result<(), Unlogged> {
        let Some(more) = len.checked_sub(1) else { return Ok(()) };
        let last = addr.0.checked_add(more).ok_or(Unlogged(addr))? / LOG_PAGE;
        let mut page = addr.0 / LOG_PAGE;
        while page <= last {
            // Up to eight pages at a time: the bits of one byte.
            let end = last.min(page | 7);
            let bits = (page..=end).fold(0u8, |bits, page| bits | 1 << (page % 8));
            self.set(page / 8, bits).ok_or(Unlogged(addr))?;
            page = end.saturating_add(1);
        }
        Ok(())
    }

    /// Sets bits in byte `index` of the log; `None` if the log has no such byte.
    fn set(&self, index: u64, bits: u8) -> Option<()> {
        let at = self.start.checked_add(index).filter(|_| index < self.len)?;
        if kill_point::is_alive() { self.bytes.or_u8(usize::try_from(at).ok()?, bits) } else { Some(()) }
    }

    /// Marks the memory of a request as written.
    pub fn mark_memory(&self, memory: &Segments) -> Result<(), Unlogged> {
        for (addr, len) in memory.guest_ranges() {
            // All memory of our requests is guest memory and has an address.
            let addr = addr.ok_or(Unlogged(GuestAddr(u64::MAX)))?;
            self.mark(addr, len)?;
        }
        Ok(())
    }
}

/// The log of writes to a used ring.
#[derive(Clone)]
pub struct UsedLog {
    /// The log in use.
    pub log: Arc<DirtyLog>,
    /// The guest address under which the used ring is logged, according to the front-end.
    pub at: u64,
}

impl UsedLog {
    /// Marks `len` bytes at offset `at` of the used ring as written.
    #[inline]
    pub fn mark(&self, at: usize, len: usize) -> Result<(), Unlogged> {
        let at = self.at.checked_add(on_disk(at)).ok_or(Unlogged(GuestAddr(self.at)))?;
        self.log.mark(GuestAddr(at), on_disk(len))
    }
}

#[cfg(test)]
mod test {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{dup, pread};

    use super::*;

    fn file(len: u64) -> OwnedFd {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        file
    }

    fn refused(len: u64, offset: u64, file: OwnedFd) -> LogError {
        DirtyLog::of(&LogInfo { len, offset }, file).err().unwrap()
    }

    #[test]
    fn a_log_longer_than_its_file_is_refused() {
        assert!(matches!(refused(4097, 0, file(4096)), LogError::FileTooShort { file_len: 4096, needed: 4097 }));
        assert!(matches!(refused(1, 4096, file(4096)), LogError::FileTooShort { .. }));
        assert!(matches!(refused(u64::MAX, 0, file(4096)), LogError::FileTooShort { .. }));
    }

    #[test]
    fn a_log_that_is_empty_or_wraps_around_is_refused() {
        assert!(matches!(refused(0, 0, file(4096)), LogError::Range { .. }));
        assert!(matches!(refused(2, u64::MAX, file(4096)), LogError::Range { .. }));
    }

    #[test]
    fn a_log_that_is_not_memory_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(refused(8, 0, pipe), LogError::NotMemory));
    }

    #[test]
    fn only_the_bits_of_written_pages_are_set() {
        let shared = file(8192);
        let log = DirtyLog::of(&LogInfo { len: 3, offset: 4099 }, dup(&shared).unwrap()).unwrap();
        log.mark(GuestAddr(4095), 2).unwrap();
        log.mark(GuestAddr(7 * 4096 + 1), 9 * 4096).unwrap();
        log.mark(GuestAddr(23 * 4096), 1).unwrap();
        log.mark(GuestAddr(20 * 4096), 0).unwrap();
        let mut bytes = [0; 8];
        pread(&shared, &mut bytes, 4096).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0b1000_0011, 0xff, 0b1000_0001, 0, 0]);
    }

    #[test]
    fn marking_a_page_beyond_the_log_fails_and_writes_nothing_there() {
        let shared = file(8192);
        let log = DirtyLog::of(&LogInfo { len: 1, offset: 0 }, dup(&shared).unwrap()).unwrap();
        let behind = GuestAddr(8 * 4096);
        assert_eq!(log.mark(behind, 1), Err(Unlogged(behind)));
        assert_eq!(log.mark(GuestAddr(7 * 4096), 4097), Err(Unlogged(GuestAddr(7 * 4096))));
        assert_eq!(log.mark(GuestAddr(u64::MAX), 2), Err(Unlogged(GuestAddr(u64::MAX))));
        assert!(log.mark(GuestAddr(u64::MAX), 1).is_err());
        let used = UsedLog { log: Arc::new(log), at: u64::MAX - 1 };
        assert!(used.mark(2, 1).is_err() && used.mark(0, 1).is_err());
        let mut bytes = [0; 8192];
        pread(&shared, &mut bytes, 0).unwrap();
        assert!(bytes[1..].iter().all(|&byte| byte == 0));
    }
}
