//! A shared mapping of a file or of anonymous memory.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// Bytes mapped shared, readable and writable, until dropped.
///
/// A peer that shrinks the file behind a mapping makes later accesses raise SIGBUS. That ends this process,
/// which serves that peer's disk and nothing else.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and is accessed by copies and atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method hands out a reference to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on.
    pub fn of_file(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                offset,
            )?
        };
        Mapping::at(base.cast(), len)
    }

    /// Maps `len` zero bytes that belong to no file.
    pub fn anonymous(len: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)? };
        Mapping::at(base.cast(), len)
    }

    fn at(base: *mut u8, len: usize) -> io::Result<Mapping> {
        match NonNull::new(base) {
            Some(base) => Ok(Mapping { base, len }),
            None => Err(io::Error::other("mmap answered with a null address")),
        }
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    #[allow(clippy::len_without_is_empty, reason = "mmap refuses an empty mapping")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by the constructor and by nobody else; whoever points into it holds this value.
        let result = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping failed");
    }
}
