//! A shared mapping of a file or of anonymous memory.

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::PAGE;
use crate::shrinking::Registered;

/// How a file is mapped: what is written is seen by all who map it, and nothing is set aside for it beforehand.
const SHARED: MapFlags = MapFlags::SHARED.union(MapFlags::NORESERVE);

/// Bytes mapped shared, readable and writable unless made otherwise, until dropped.
///
/// A peer that shrinks the file behind a mapping makes later accesses raise SIGBUS. That ends this process,
/// which serves that peer's disk and nothing else; unless it was mapped by [`Mapping::of_shrinking_file`].
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    shrinking: Option<Registered>,
}

// SAFETY: the mapping belongs to this value alone and is accessed by copies and atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method hands out a reference to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of `file` from `offset` on.
    pub fn of_file(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, SHARED, file, offset)? };
        Mapping::at(base.cast(), len)
    }

    /// Maps the first `len` bytes of a file that others may make shorter. There are zeroes that belong to no file in
    /// the place of all of them as soon as one is accessed that the file does not have.
    pub fn of_shrinking_file(file: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let mut mapping = Mapping::of_file(file, 0, len)?;
        let registered = Registered::new(mapping.base(), len)?;
        mapping.shrinking = Some(registered);
        Ok(mapping)
    }

    /// Whether the file was made shorter, and these bytes are no longer its.
    pub fn is_lost(&self) -> bool {
        self.shrinking.as_ref().is_some_and(Registered::is_lost)
    }

    /// Maps `len` bytes of `file` from `offset` on, to be read only: a write there is a fault.
    pub fn of_file_to_read(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<Mapping> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, SHARED, file, offset)? };
        Mapping::at(base.cast(), len)
    }

    /// Maps one page of `file` at each of `offsets` contiguously, in that order; a page may occur more than once.
    /// Read-only, unless `writable`.
    pub fn of_pages(file: BorrowedFd<'_>, offsets: &[u64], writable: bool) -> io::Result<Mapping> {
        let len = offsets.len().checked_mul(PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE)? };
        // From here on dropping it unmaps all of it, with the pages that were put there.
        let room = Mapping::at(base.cast(), len)?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        for (page, &offset) in offsets.iter().enumerate() {
            let place = room.base().wrapping_add(page * PAGE);
            // SAFETY: replaces a page of `room`, which is ours and has no pointers into it yet.
            unsafe { mmap(place.cast(), PAGE, protection, SHARED | MapFlags::FIXED, file, offset)? };
        }
        Ok(room)
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
            Some(base) => Ok(Mapping { base, len, shrinking: None }),
            None => Err(io::Error::other("mmap answered with a null address")),
        }
    }

    /// The first byte.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length of the mapping in bytes.
    #[allow(clippy::len_without_is_empty, reason = "mmap refuses an empty mapping")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.shrinking = None;
        // SAFETY: mapped by the constructor alone; every pointer into it is held together with this value.
        let result = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(result.is_ok(), "munmap of our own mapping failed");
    }
}

#[cfg(test)]
mod test {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{pread, pwrite};

    use super::*;

    #[test]
    fn pages_lie_in_the_order_named_and_are_the_files() {
        let file = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 3 * 4096).unwrap();
        pwrite(&file, b"two", 2 * 4096).unwrap();
        pwrite(&file, b"nil", 0).unwrap();
        let mapping = Mapping::of_pages(file.as_fd(), &[2 * 4096, 0, 2 * 4096], true).unwrap();
        assert_eq!(mapping.len(), 3 * 4096);
        let at = |page: usize| {
            // SAFETY: three bytes in a page of the mapping, which has no writer at this time.
            unsafe { mapping.base().wrapping_add(page * 4096).cast::<[u8; 3]>().read_volatile() }
        };
        assert_eq!([at(0), at(1), at(2)], [*b"two", *b"nil", *b"two"]);
        // SAFETY: three bytes in the last page of the mapping.
        unsafe { mapping.base().wrapping_add(2 * 4096).cast::<[u8; 3]>().write_volatile(*b"new") };
        let mut bytes = [0; 3];
        pread(&file, &mut bytes, 2 * 4096).unwrap();
        assert_eq!((&bytes, at(0)), (b"new", *b"new"));
    }

    #[test]
    fn a_file_that_is_made_shorter_leaves_zeroes_and_others_are_not_touched() {
        let make = || {
            let file = memfd_create("page", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, 2 * 4096).unwrap();
            pwrite(&file, b"here", 4096).unwrap();
            file
        };
        let (cut, whole) = (make(), make());
        let mapped = [&cut, &whole].map(|file| Mapping::of_shrinking_file(file.as_fd(), 2 * 4096).unwrap());
        let at = |mapping: &Mapping| {
            // SAFETY: four bytes of a mapping, which has no writer at this time.
            unsafe { mapping.base().wrapping_add(4096).cast::<[u8; 4]>().read_volatile() }
        };
        assert_eq!(mapped.each_ref().map(at), [*b"here"; 2]);
        ftruncate(&cut, 0).unwrap();
        for _ in 0..2 {
            assert_eq!(mapped.each_ref().map(at), [[0; 4], *b"here"]);
        }
        assert_eq!(mapped.each_ref().map(Mapping::is_lost), [true, false]);
        // SAFETY: a byte of a mapping.
        unsafe { mapped[0].base().write_volatile(7) };
        drop(mapped);
        // The oldest of many is found as well.
        let many: Vec<Mapping> =
            (0..300).map(|_| Mapping::of_shrinking_file(whole.as_fd(), 2 * 4096).unwrap()).collect();
        ftruncate(&whole, 4096).unwrap();
        assert_eq!(at(&many[0]), [0; 4]);
        let lost: Vec<usize> = (0..many.len()).filter(|&number| many[number].is_lost()).collect();
        assert_eq!(lost, [0]);
    }

    #[test]
    fn no_pages_are_no_mapping() {
        let file = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        assert!(Mapping::of_pages(file.as_fd(), &[], true).is_err());
    }
}
