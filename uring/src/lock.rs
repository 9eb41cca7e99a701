//! The lock of an image file: one writer, or any number of readers.
//!
//! It is an open-file-description lock (fcntl(2), F_OFD_SETLK) over the whole file, on the very description that
//! I/O goes through. The kernel therefore keeps the lock of a killed process until the last request which that
//! process had in flight is over, so that nobody opens an image into which old writes still fall. That takes a
//! moment, for which [`acquire`] has patience. Whole-file locks also exclude QEMU, which locks single bytes.
//!
//! On SMB it is flock(2), which the kernel's client asks of the server in the same way. An OFD lock it would give up there as soon as any
//! descriptor of the description is closed, and go on to show it here. And a server lays one lock upon the other where it should turn
//! it into that: what is held is given up first, so that between a writer's lock and a reader's there is a moment without.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::Held;

/// How often, and how long apart, a conflicting lock is tried again: a second, in which the I/O of a process that
/// was just killed ends on any healthy storage.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// Why there is no lock.
pub(crate) enum NotLocked {
    /// Somebody else has one.
    Conflict(Held),
    /// The file system failed.
    Failed(io::Error),
}

/// Locks `file` for `wanted`.
pub(crate) fn acquire(file: BorrowedFd<'_>, wanted: Held) -> Result<(), NotLocked> {
    let kind = match wanted {
        Held::Reading => libc::F_RDLCK,
        Held::Writing => libc::F_WRLCK,
    };
    for _ in 1..ATTEMPTS {
        match set(file, kind) {
            Ok(()) => return Ok(()),
            Err(error) if is_conflict(&error) => std::thread::sleep(PAUSE),
            Err(error) => return Err(NotLocked::Failed(error)),
        }
    }
    set(file, kind).map_err(|error| match is_conflict(&error) {
        true => NotLocked::Conflict(holder(file, kind)),
        false => NotLocked::Failed(error),
    })
}

/// Gives the lock up.
pub(crate) fn release(file: BorrowedFd<'_>) -> io::Result<()> {
    set(file, libc::F_UNLCK)
}

fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    // SAFETY: a C struct of integers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Both constants are 0, 1 or 2; a start and a length of zero stand for the whole file.
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    lock
}

/// Whether a file lies on an SMB server: CIFS_SUPER_MAGIC and SMB2_SUPER_MAGIC of linux/magic.h.
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

/// What the one who is in our way does. Who has gone in the meantime is taken for a writer.
fn holder(file: BorrowedFd<'_>, kind: libc::c_int) -> Held {
    let mut lock = whole_file(kind);
    // SAFETY: the kernel reads and writes the struct during the call only.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    match result == 0 && libc::c_int::from(lock.l_type) == libc::F_RDLCK {
        true => Held::Reading,
        false => Held::Writing,
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn on_smb_a_lock_becomes_another_and_excludes_like_any() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let one = File::create(&path).unwrap();
        let other = File::open(&path).unwrap();
        let refused = |file: &File, kind| is_conflict(&set_on_smb(file.as_fd(), kind).unwrap_err());
        set_on_smb(one.as_fd(), libc::F_WRLCK).unwrap();
        assert!(refused(&other, libc::F_RDLCK));
        // Another descriptor of the description goes, and the lock does not.
        drop(one.try_clone().unwrap());
        assert!(refused(&other, libc::F_RDLCK));
        set_on_smb(one.as_fd(), libc::F_RDLCK).unwrap();
        set_on_smb(other.as_fd(), libc::F_RDLCK).unwrap();
        assert!(refused(&one, libc::F_WRLCK));
        set_on_smb(other.as_fd(), libc::F_UNLCK).unwrap();
        set_on_smb(one.as_fd(), libc::F_WRLCK).unwrap();
    }
}
