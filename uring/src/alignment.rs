//! The alignment that a file requires for I/O: queried from the kernel, never assumed.

use std::os::fd::BorrowedFd;

use memory::{PAGE, Segments};
use rustix::fs::{AtFlags, StatxFlags};

/// The required alignment of direct I/O: addresses, offsets and lengths must be multiples of these powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of memory addresses.
    pub memory: usize,
    /// Of offsets in the file, and of the length of each memory segment.
    pub offset: usize,
}

/// `TMPFS_MAGIC` of linux/magic.h.
pub(crate) const TMPFS: i64 = 0x0102_1994;

/// `XFS_SUPER_MAGIC` of linux/magic.h.
const XFS: i64 = 0x5846_5342;

/// The sector size of storage that reports nothing else.
const SECTOR: usize = 512;

/// 64 KiB is the largest block size of any Linux file system.
const OFFSET_MAX: usize = 64 << 10;

impl Alignment {
    /// No requirements: the page cache accepts anything.
    pub(crate) const NONE: Alignment = Alignment { memory: 1, offset: 1 };

    /// The alignment that `file`, open with O_DIRECT, requires; fails with the reason if we do not support it.
    pub(crate) fn of_direct(file: BorrowedFd<'_>, block_device: bool) -> Result<Alignment, String> {
        let found = match Alignment::query_statx(file)? {
            Some(alignment) => alignment,
            None if block_device => Alignment::query_sector_size(file)?,
            None => Alignment::probe(file),
        };
        let supported = found.memory.is_power_of_two()
            && found.memory <= PAGE
            && found.offset.is_power_of_two()
            && found.offset <= OFFSET_MAX;
        match supported {
            true => Ok(found),
            false => Err(format!(
                "it requires an alignment of {} bytes in memory, {} in the file",
                found.memory, found.offset
            )),
        }
    }

    /// statx(2), STATX_DIOALIGN: since Linux 6.1 on ext4, XFS, f2fs; on block devices since 6.11. Both values zero
    /// means that this file has no direct I/O, although it could be opened with the flag.
    ///
    /// For a file that has ever shared blocks, XFS (since Linux 6.14) reports whole blocks as the alignment of writes,
    /// and does smaller ones through the page cache (`xfs_report_dioalign`). Smaller writes do work, and a disk must
    /// not change its sector size because it was reflinked: on XFS the alignment of reads is used.
    fn query_statx(file: BorrowedFd<'_>) -> Result<Option<Alignment>, String> {
        let wanted = StatxFlags::DIOALIGN | StatxFlags::from_bits_retain(libc::STATX_DIO_READ_ALIGN);
        let result = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted);
        let Some(found) = result.ok().filter(|found| found.stx_mask & StatxFlags::DIOALIGN.bits() != 0) else {
            return Ok(None);
        };
        let number = |value: u32| usize::try_from(value).unwrap_or(usize::MAX);
        match (number(found.stx_dio_mem_align), number(found.stx_dio_offset_align)) {
            (0, _) | (_, 0) => Err("its file system does not support it on this file".to_owned()),
            (memory, offset) => {
                let read = number(found.stx_dio_read_offset_align);
                let offset = if read > 0 && is_on(file, XFS) { offset.min(read) } else { offset };
                Ok(Some(Alignment { memory, offset }))
            }
        }
    }

    /// BLKSSZGET: a device's logical block size is the largest alignment that memory or offsets can need.
    fn query_sector_size(device: BorrowedFd<'_>) -> Result<Alignment, String> {
        let block = rustix::fs::ioctl_blksszget(device)
            .map_err(|errno| format!("cannot query the device's block size (errno {})", errno.raw_os_error()))?;
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        Ok(Alignment { memory: block, offset: block })
    }

    /// For kernels and file systems that do not report an alignment: a sector, unless a read of a sector is refused and
    /// a read of a page is not. tmpfs copies, and accepts anything.
    fn probe(file: BorrowedFd<'_>) -> Alignment {
        let sector = Alignment { memory: SECTOR, offset: SECTOR };
        let page = Alignment { memory: PAGE, offset: PAGE };
        match is_on(file, TMPFS) || accepts_read(file, SECTOR) || !accepts_read(file, PAGE) {
            true => sector,
            false => page,
        }
    }

    /// Returns true if `memory` can be passed to the kernel unchanged.
    pub(crate) fn admits(self, memory: &Segments) -> bool {
        self == Alignment::NONE
            || memory.parts().iter().all(|part| {
                // Masks: the compiler does not know that both are powers of two, and a division would cost as much as
                // all the rest.
                part.base().addr() & self.memory.wrapping_sub(1) == 0 && part.len() & self.offset.wrapping_sub(1) == 0
            })
    }
}

/// Returns true if the file is on a file system of this type.
pub(crate) fn is_on(file: BorrowedFd<'_>, magic: i64) -> bool {
    #[allow(clippy::useless_conversion, reason = "the type of f_type depends on the architecture and the C library")]
    rustix::fs::fstatfs(file).is_ok_and(|found| i64::try_from(found.f_type) == Ok(magic))
}

/// Returns true if a read of `len` bytes at offset `len` succeeds, into memory aligned to `len` and no more.
fn accepts_read(file: BorrowedFd<'_>, len: usize) -> bool {
    let buffer = memory::Buffer::zeroed(2 * PAGE);
    let target = buffer.base().wrapping_add(len.min(PAGE));
    let Ok(at) = libc::off_t::try_from(len) else { return false };
    // SAFETY: `len` is at most a page, and the buffer has a page after `target`; it lives until the end.
    let count = unsafe { libc::pread(std::os::fd::AsRawFd::as_raw_fd(&file), target.cast(), len, at) };
    count >= 0
}
