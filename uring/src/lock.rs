//! The lock of an image file: one writer, or any number of readers.
//!
//! It is an open-file-description lock (fcntl(2), F_OFD_SETLK) over the whole file, on the same description that I/O
//! uses. The kernel therefore keeps the lock of a killed process until its last request in flight has ended, so that no
//! one opens an image that old writes may still reach. That takes a moment, so [`acquire`] retries. Whole-file locks
//! also exclude QEMU, which locks single bytes.
//!
//! On SMB it is flock(2), which the kernel's client requests from the server in the same way. There, the client would
//! drop an OFD lock as soon as any descriptor of the description is closed, yet still report it locally. And a server
//! stacks a new lock on top of the old one instead of converting it: the old lock is released first, so converting
//! between a writer's and a reader's lock leaves a brief gap.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::AccessMode;

/// How many times, and at what interval, a conflicting lock is retried: for a second, within which the I/O of a process
/// that was just killed ends on any healthy storage.
const ATTEMPTS: u32 = 50;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Why the lock was not acquired.
pub(crate) enum NotLocked {
    /// Another description holds a conflicting lock.
    Conflict(AccessMode),
    /// The system call failed.
    Failed(io::Error),
}

/// Locks `file` for `wanted`.
pub(crate) fn acquire(file: BorrowedFd<'_>, wanted: AccessMode) -> Result<(), NotLocked> {
    let kind = match wanted {
        AccessMode::Reading => libc::F_RDLCK,
        AccessMode::Writing => libc::F_WRLCK,
    };
    for _ in 1..ATTEMPTS {
        match set(file, kind) {
            Ok(()) => return Ok(()),
            Err(error) if is_conflict(&error) => std::thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(NotLocked::Failed(error)),
        }
    }
    set(file, kind).map_err(|error| match is_conflict(&error) {
        true => NotLocked::Conflict(holder(file, kind)),
        false => NotLocked::Failed(error),
    })
}

/// Releases the lock.
pub(crate) fn release(file: BorrowedFd<'_>) -> io::Result<()> {
    set(file, libc::F_UNLCK)
}

fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    // SAFETY: a C struct of integers, for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Both constants are 0, 1 or 2; a start and a length of zero mean the whole file.
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    lock
}

/// Whether a file is on an SMB server: CIFS_SUPER_MAGIC and SMB2_SUPER_MAGIC of linux/magic.h.
fn is_on_smb(file: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|stat| matches!(stat.f_type, 0xff53_4d42 | 0xfe53_4d42))
}

fn set_on_smb(file: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    rustix::fs::flock(file, FlockOperation::Unlock)?;
    match kind {
        libc::F_RDLCK => rustix::fs::flock(file, FlockOperation::NonBlockingLockShared)?,
        libc::F_WRLCK => rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive)?,
        _ => {}
    }
    Ok(())
}

fn set(file: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<()> {
    if is_on_smb(file) {
        return set_on_smb(file, kind);
    }
    let lock = whole_file(kind);
    // SAFETY: the kernel reads the struct during the call only.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// The access of the conflicting holder. One that has gone in the meantime is taken for a writer.
fn holder(file: BorrowedFd<'_>, kind: libc::c_int) -> AccessMode {
    let mut lock = whole_file(kind);
    // SAFETY: the kernel reads and writes the struct during the call only.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    match result == 0 && libc::c_int::from(lock.l_type) == libc::F_RDLCK {
        true => AccessMode::Reading,
        false => AccessMode::Writing,
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn on_smb_a_lock_can_be_converted_and_excludes_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let one = File::create(&path).unwrap();
        let other = File::open(&path).unwrap();
        let refused = |file: &File, kind| is_conflict(&set_on_smb(file.as_fd(), kind).unwrap_err());
        set_on_smb(one.as_fd(), libc::F_WRLCK).unwrap();
        assert!(refused(&other, libc::F_RDLCK));
        // Another descriptor of the description is closed; the lock stays.
        drop(one.try_clone().unwrap());
        assert!(refused(&other, libc::F_RDLCK));
        set_on_smb(one.as_fd(), libc::F_RDLCK).unwrap();
        set_on_smb(other.as_fd(), libc::F_RDLCK).unwrap();
        assert!(refused(&one, libc::F_WRLCK));
        set_on_smb(other.as_fd(), libc::F_UNLCK).unwrap();
        set_on_smb(one.as_fd(), libc::F_WRLCK).unwrap();
    }
}
