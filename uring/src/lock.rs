//! The lock of an image file: one writer, or any number of readers, compatible with QEMU's image locking.
//!
//! It is an open-file-description lock (fcntl(2), F_OFD_SETLK) on the description that I/O uses. The kernel therefore
//! keeps the lock of a killed process until its last request in flight has ended, so that the image cannot be opened
//! while old writes may still reach it. That takes a moment, so [`acquire`] retries.
//!
//! A writer locks the whole file exclusively. A reader does what QEMU's readers do (docs/devel of QEMU, image locking;
//! block/file-posix.c): it holds shared locks on single bytes, 100 plus the number of each permission that it uses and
//! 200 plus the number of each that it does not share, and then tests whether another description uses what it does not
//! share, or does not share what it uses. A shared lock of the whole file belongs to a reader of an older version of
//! Tapline. Invariant: both sides take their locks first and test afterwards, so that of two that exclude each other at
//! least one is refused.
//!
//! On SMB it is flock(2), which the kernel's client requests from the server in the same way; QEMU is not detected
//! there. The client would drop an OFD lock as soon as any descriptor of the description is closed, yet still report it
//! locally. And a server stacks a new lock on top of the old one instead of converting it: the old lock is released
//! first, so converting between a writer's and a reader's lock leaves a brief gap.

mod holder;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::AccessMode;

pub(crate) use holder::Holder;

/// How many times, and at what interval, a conflicting lock is retried: for a second, within which the I/O of a process
/// that was just killed ends on any healthy storage.
const ATTEMPTS: u32 = 50;
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes of the permissions to read a consistent state, to write and to resize, locked by the descriptions that use
/// them.
const READS: libc::off_t = 100;
const WRITES: libc::off_t = 101;
const RESIZES: libc::off_t = 103;
/// Added to the byte of a permission: locked by the descriptions that do not share it.
const NOT_SHARED: libc::off_t = 100;

/// The bytes that a reader locks: it reads a consistent state, and shares neither writing nor resizing.
const OF_READER: [libc::off_t; 3] = [READS, WRITES + NOT_SHARED, RESIZES + NOT_SHARED];
/// The bytes whose locks by another description exclude a reader.
const AGAINST_READER: [libc::off_t; 3] = [WRITES, RESIZES, READS + NOT_SHARED];

/// Why the lock was not acquired.
pub(crate) enum NotLocked {
    /// Another description holds a conflicting lock.
    Conflict(Holder),
    /// The system call failed.
    Failed(io::Error),
}

/// Locks `file` for `wanted`.
pub(crate) fn acquire(file: BorrowedFd<'_>, wanted: AccessMode) -> Result<(), NotLocked> {
    for _ in 1..ATTEMPTS {
        match attempt(file, wanted) {
            Err(NotLocked::Conflict(_)) => std::thread::sleep(RETRY_INTERVAL),
            ended => return ended,
        }
    }
    attempt(file, wanted).map_err(|why| match why {
        NotLocked::Conflict(holder) => NotLocked::Conflict(holder.named(file)),
        failed => failed,
    })
}

fn attempt(file: BorrowedFd<'_>, wanted: AccessMode) -> Result<(), NotLocked> {
    let kind = match wanted {
        AccessMode::Reading => libc::F_RDLCK,
        AccessMode::Writing => libc::F_WRLCK,
    };
    let taken = match (is_on_smb(file), wanted) {
        (true, _) => set_on_smb(file, kind),
        (false, AccessMode::Reading) => set_reader(file),
        (false, AccessMode::Writing) => set(file, whole_file(kind)),
    };
    taken.map_err(|error| match is_conflict(&error) {
        true => NotLocked::Conflict(Holder::of(file, kind)),
        false => NotLocked::Failed(error),
    })?;
    if wanted == AccessMode::Writing || is_on_smb(file) {
        return Ok(());
    }
    match Holder::against_reader(file) {
        None => Ok(()),
        Some(holder) => {
            // Kept any longer, our locks would exclude others.
            release(file).map_err(NotLocked::Failed)?;
            Err(NotLocked::Conflict(holder))
        }
    }
}

/// Releases the lock.
pub(crate) fn release(file: BorrowedFd<'_>) -> io::Result<()> {
    match is_on_smb(file) {
        true => set_on_smb(file, libc::F_UNLCK),
        false => set(file, whole_file(libc::F_UNLCK)),
    }
}

fn is_conflict(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES))
}

/// A lock of `len` bytes from `start`; a length of zero means to the end of the file.
fn bytes(kind: libc::c_int, start: libc::off_t, len: libc::off_t) -> libc::flock {
    // SAFETY: a C struct of integers, for which zero is a valid value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Both constants are 0, 1 or 2.
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    (lock.l_start, lock.l_len) = (start, len);
    lock
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    bytes(kind, 0, 0)
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

/// Takes a reader's locks. A writer's lock on these bytes is converted without a gap, and the rest of it is released.
fn set_reader(file: BorrowedFd<'_>) -> io::Result<()> {
    OF_READER.iter().try_for_each(|&byte| set(file, bytes(libc::F_RDLCK, byte, 1)))?;
    let mut free = 0;
    for byte in OF_READER {
        set(file, bytes(libc::F_UNLCK, free, byte - free))?;
        free = byte + 1;
    }
    set(file, bytes(libc::F_UNLCK, free, 0))
}

fn set(file: BorrowedFd<'_>, lock: libc::flock) -> io::Result<()> {
    // SAFETY: the kernel reads the struct during the call only.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A lock of another description that conflicts with `lock`. `None` also if the file system cannot report it.
fn conflicting(file: BorrowedFd<'_>, mut lock: libc::flock) -> Option<libc::flock> {
    // SAFETY: the kernel reads and writes the struct during the call only.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    (result == 0 && libc::c_int::from(lock.l_type) != libc::F_UNLCK).then_some(lock)
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

    /// Two descriptions of one file, and the bytes that the first locks as QEMU does.
    fn pair(directory: &tempfile::TempDir, held: &[libc::off_t]) -> (File, File) {
        let path = directory.path().join("image");
        std::fs::write(&path, []).unwrap();
        let one = File::open(&path).unwrap();
        held.iter().for_each(|&byte| set(one.as_fd(), bytes(libc::F_RDLCK, byte, 1)).unwrap());
        (one, File::options().read(true).write(true).open(&path).unwrap())
    }

    fn refused(file: &File, wanted: AccessMode) -> Option<AccessMode> {
        match attempt(file.as_fd(), wanted) {
            Ok(()) => None,
            Err(NotLocked::Conflict(holder)) => Some(holder.access),
            Err(NotLocked::Failed(error)) => panic!("{error}"),
        }
    }

    #[test]
    fn a_reader_is_refused_only_by_locks_that_exclude_it() {
        let directory = tempfile::tempdir().unwrap();
        for (held, writes) in [
            (&[100, 101, 103, 201, 203][..], true),
            (&[100, 101], true),
            (&[103], true),
            (&[200], true),
            (&[100, 201, 203], false),
            (&[100, 102], false),
        ] {
            let (_one, other) = pair(&directory, held);
            assert_eq!(refused(&other, AccessMode::Reading), writes.then_some(AccessMode::Writing), "{held:?}");
            let held_by = if writes && held != [200] { AccessMode::Writing } else { AccessMode::Reading };
            assert_eq!(refused(&other, AccessMode::Writing), Some(held_by), "{held:?}");
        }
    }

    #[test]
    fn a_refused_reader_leaves_no_lock() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = pair(&directory, &[101]);
        assert!(refused(&other, AccessMode::Reading).is_some());
        assert!(conflicting(one.as_fd(), whole_file(libc::F_WRLCK)).is_none());
    }

    #[test]
    fn readers_of_older_versions_are_readers() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = pair(&directory, &[]);
        set(one.as_fd(), whole_file(libc::F_RDLCK)).unwrap();
        assert_eq!(refused(&other, AccessMode::Reading), None);
        assert_eq!(refused(&other, AccessMode::Writing), Some(AccessMode::Reading));
    }

    #[test]
    fn a_downgraded_lock_admits_our_readers_and_those_of_qemu_but_no_writer() {
        let directory = tempfile::tempdir().unwrap();
        let (_, one) = pair(&directory, &[]);
        let other = File::open(directory.path().join("image")).unwrap();
        assert_eq!(refused(&one, AccessMode::Writing), None);
        assert_eq!(refused(&one, AccessMode::Reading), None);
        assert!(AGAINST_READER.iter().all(|&byte| conflicting(other.as_fd(), bytes(libc::F_WRLCK, byte, 1)).is_none()));
        assert!(OF_READER.iter().all(|&byte| conflicting(other.as_fd(), bytes(libc::F_WRLCK, byte, 1)).is_some()));
    }
}
