//! A step of an operation as a plain system call, which any thread can make.
//!
//! Invariant: the addresses in a call are passed to the kernel and never dereferenced here.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use memory::Part;
use rustix::fs::OFlags;

use crate::flight::IoStep;

/// FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// A system call on a file.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    fd: RawFd,
    kind: CallKind,
}

#[derive(Clone, Copy)]
enum CallKind {
    /// Into one part of memory, as most are: the kernel need not copy in a list.
    ReadOne {
        at: libc::off_t,
        part: Part,
    },
    WriteOne {
        at: libc::off_t,
        part: Part,
    },
    Read {
        at: libc::off_t,
        parts: *const libc::iovec,
        count: libc::c_int,
    },
    Write {
        at: libc::off_t,
        parts: *const libc::iovec,
        count: libc::c_int,
    },
    WriteCached {
        at: libc::off_t,
        parts: *const libc::iovec,
        count: libc::c_int,
    },
    SyncData,
    Deallocate {
        at: libc::off_t,
        len: libc::off_t,
    },
}

// SAFETY: addresses may go to another thread; that they are valid where they are used is the contract of `run`.
unsafe impl Send for Call {}

impl Call {
    /// The call for a step.
    pub(crate) fn of(fd: RawFd, step: &IoStep<'_>) -> Call {
        let offset = |at: u64| libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        // At most 1024.
        let count = |parts: usize| libc::c_int::try_from(parts).unwrap_or(libc::c_int::MAX);
        let kind = match *step {
            IoStep::Read { at, parts: &[part], .. } => CallKind::ReadOne { at: offset(at), part },
            IoStep::Write { at, parts: &[part] } => CallKind::WriteOne { at: offset(at), part },
            IoStep::Read { at, parts, .. } => {
                CallKind::Read { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            IoStep::Write { at, parts } => {
                CallKind::Write { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            IoStep::WriteCached { at, parts } => {
                CallKind::WriteCached { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            IoStep::SyncData => CallKind::SyncData,
            IoStep::Deallocate { at, len } => CallKind::Deallocate { at: offset(at), len: offset(len) },
        };
        Call { fd, kind }
    }

    /// Makes the call, however long it takes; returns a count, or a negative errno.
    ///
    /// # Safety
    /// The file is open, and the list of parts and the memory that it names are valid.
    pub(crate) unsafe fn run(&self) -> i32 {
        // SAFETY: this function's contract.
        let result = unsafe {
            match self.kind {
                CallKind::ReadOne { at, part } => libc::pread(self.fd, part.base().cast(), part.len(), at),
                CallKind::WriteOne { at, part } => libc::pwrite(self.fd, part.base().cast(), part.len(), at),
                CallKind::Read { at, parts, count } => libc::preadv(self.fd, parts, count, at),
                CallKind::Write { at, parts, count } => libc::pwritev(self.fd, parts, count, at),
                CallKind::WriteCached { at, parts, count } => {
                    let write = || match libc::pwritev(self.fd, parts, count, at) {
                        -1 => Err(io::Error::last_os_error()),
                        count => Ok(count),
                    };
                    match through_cache(BorrowedFd::borrow_raw(self.fd), write) {
                        Ok(count) => count,
                        Err(cause) => return -cause.raw_os_error().unwrap_or(libc::EIO),
                    }
                }
                CallKind::SyncData => status(libc::fdatasync(self.fd)),
                CallKind::Deallocate { at, len } => status(libc::fallocate(self.fd, PUNCH, at, len)),
            }
        };
        match result {
            -1 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
            count => i32::try_from(count).unwrap_or(i32::MAX),
        }
    }
}

/// Calls `write` while O_DIRECT is cleared on the open file description of `file`. A process that may not open the file
/// has no other way through the page cache: a disk process is handed its descriptions. The caller ensures that nothing
/// else uses the same description meanwhile.
pub(crate) fn through_cache<T>(file: BorrowedFd<'_>, write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT)?;
    let answer = write();
    // If this failed, all later writes would silently go through the page cache.
    rustix::fs::fcntl_setfl(file, flags)?;
    answer
}

/// Converts the result of a call that moves no data to that of one that does: 0 or -1.
fn status(answer: libc::c_int) -> isize {
    isize::try_from(answer).unwrap_or(-1)
}
