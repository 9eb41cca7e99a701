//! A step of an operation as a system call, for whichever thread makes it.
//!
//! Invariant: the addresses in a call are handed to the kernel and looked at by nobody here.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::fs::OFlags;

use crate::flight::Step;

/// FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// What to do with which file.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    fd: RawFd,
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    Read { at: libc::off_t, parts: *const libc::iovec, count: libc::c_int },
    Write { at: libc::off_t, parts: *const libc::iovec, count: libc::c_int },
    WriteCached { at: libc::off_t, parts: *const libc::iovec, count: libc::c_int },
    SyncData,
    Deallocate { at: libc::off_t, len: libc::off_t },
}

// SAFETY: addresses may go to another thread; that they are valid where they are used is the contract of `run`.
unsafe impl Send for Call {}

impl Call {
    /// The call for a step.
    pub(crate) fn of(fd: RawFd, step: &Step<'_>) -> Call {
        let offset = |at: u64| libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        // At most 1024.
        let count = |parts: usize| libc::c_int::try_from(parts).unwrap_or(libc::c_int::MAX);
        let what = match *step {
            Step::Read { at, parts } => {
                What::Read { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            Step::Write { at, parts } => {
                What::Write { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            Step::WriteCached { at, parts } => {
                What::WriteCached { at: offset(at), parts: parts.as_ptr().cast(), count: count(parts.len()) }
            }
            Step::SyncData => What::SyncData,
            Step::Deallocate { at, len } => What::Deallocate { at: offset(at), len: offset(len) },
        };
        Call { fd, what }
    }

    /// Makes it, however long it takes: a count, or an errno as a negative number.
    ///
    /// # Safety
    /// The file is open, and the list of parts and the memory that it names are valid.
    pub(crate) unsafe fn run(&self) -> i32 {
        // SAFETY: the contract of this function.
        let result = unsafe {
            match self.what {
                What::Read { at, parts, count } => libc::preadv(self.fd, parts, count, at),
                What::Write { at, parts, count } => libc::pwritev(self.fd, parts, count, at),
                What::WriteCached { at, parts, count } => {
                    let write = || match libc::pwritev(self.fd, parts, count, at) {
                        -1 => Err(io::Error::last_os_error()),
                        count => Ok(count),
                    };
                    match through_cache(BorrowedFd::borrow_raw(self.fd), write) {
                        Ok(count) => count,
                        Err(cause) => return cause.raw_os_error().unwrap_or(libc::EIO).saturating_neg(),
                    }
                }
                What::SyncData => status(libc::fdatasync(self.fd)),
                What::Deallocate { at, len } => status(libc::fallocate(self.fd, PUNCH, at, len)),
            }
        };
        match result {
            -1 => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO).saturating_neg(),
            count => i32::try_from(count).unwrap_or(i32::MAX),
        }
    }
}

/// Calls `write` while the description of `file` is one without O_DIRECT. There is no other way through the page cache
/// for who may not open the file: the descriptions of a disk were handed to it. That nothing else goes by the same
/// description meanwhile is the caller's affair.
pub(crate) fn through_cache<T>(file: BorrowedFd<'_>, write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    rustix::fs::fcntl_setfl(file, flags - OFlags::DIRECT)?;
    let answer = write();
    // Were it refused, all that follows would be kept in memory in silence.
    rustix::fs::fcntl_setfl(file, flags)?;
    answer
}

/// The answer of a call that moves nothing, as that of one which does: 0, or -1.
fn status(answer: libc::c_int) -> isize {
    isize::try_from(answer).unwrap_or(-1)
}
