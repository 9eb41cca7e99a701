//! A step of an operation as a system call, for whichever thread makes it.
//!
//! Invariant: the addresses in a call are handed to the kernel and looked at by nobody here.

use std::io;
use std::os::fd::RawFd;

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

/// The answer of a call that moves nothing, as that of one which does: 0, or -1.
fn status(answer: libc::c_int) -> isize {
    isize::try_from(answer).unwrap_or(-1)
}
