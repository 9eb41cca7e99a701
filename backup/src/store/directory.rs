//! A store in a directory: local, or a mount of NFS or SMB.
//!
//! An object is written under a temporary name in `tmp/`, synced, and given its name by a hard link, which no file
//! system and no server lets replace anything; where there are none, by a rename that does not replace. Not over SMB:
//! its client looks whether the name is free, and the server then replaces. Then the directory is synced. Knows nothing
//! of what objects contain. A directory or an object that another process has created is seen before it is durable, so
//! neither is taken for durable because it exists.
//!
//! Invariants: the root is held open, so a mount that goes away is an error and never another directory. A temporary
//! name is random and used once. A temporary file that someone removes costs its writer a second attempt and nothing
//! else, so no proof of a writer's death is needed to remove one.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{self, AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{ObjectStore, StoreError, StoreErrorKind};
use crate::id::Id;
use crate::name::{Name, prefix};

/// Attempts under new temporary names: each failure means that another process removed ours.
const ATTEMPTS: u32 = 8;

/// A store in a directory.
#[derive(Debug)]
pub struct Directory {
    root: OwnedFd,
    /// Directories that are known to be durable in their parents.
    durable: Mutex<HashSet<String>>,
}

/// Result of an attempt to give a temporary file its name.
enum Named {
    Done,
    /// The temporary file is gone: removed by another, or renamed by a call whose answer was lost.
    Gone,
}

impl Directory {
    /// Opens an existing directory. Nothing is written.
    pub fn open(path: &Path) -> Result<Directory, StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = retried(|| fs::open(path, flags, Mode::empty()))
            .map_err(|errno| failure("open the directory", &path.display().to_string(), errno))?;
        Ok(Directory { root, durable: Mutex::default() })
    }

    fn open_object(&self, attempt: &'static str, name: &Name) -> Result<File, StoreError> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        retried(|| fs::openat(&self.root, name.as_str(), flags, Mode::empty()))
            .map(File::from)
            .map_err(|errno| failure(attempt, name.as_str(), errno))
    }

    /// Creates the directories of a name, each durable in its parent.
    fn make_parents(&self, name: &Name) -> Result<(), StoreError> {
        let text = name.as_str();
        for (at, _) in text.match_indices('/') {
            let directory = text.get(..at).unwrap_or_default();
            match retried(|| fs::mkdirat(&self.root, directory, Mode::from_raw_mode(0o755))) {
                Err(Errno::EXIST) if self.durable().contains(directory) => {}
                Ok(()) | Err(Errno::EXIST) => {
                    self.sync_parent(directory)?;
                    self.durable().insert(directory.to_owned());
                }
                Err(errno) => return Err(failure("create the directory", directory, errno)),
            }
        }
        Ok(())
    }

    fn durable(&self) -> MutexGuard<'_, HashSet<String>> {
        self.durable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sync_parent(&self, name: &str) -> Result<(), StoreError> {
        let parent = name.rsplit_once('/').map_or(".", |(parent, _)| parent);
        self.sync_directory(parent).map(|_| ())
    }

    /// Syncs a directory, and returns it.
    fn sync_directory(&self, directory: &str) -> Result<OwnedFd, StoreError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = retried(|| fs::openat(&self.root, directory, flags, Mode::empty()));
        opened
            .and_then(|opened| fs::fsync(opened.as_fd()).map(|()| opened))
            .map_err(|errno| failure("sync the directory", directory, errno))
    }

    /// Syncs a directory and those in it.
    fn sync_below(&self, directory: &str) -> Result<(), StoreError> {
        let opened = match self.sync_directory(directory) {
            Err(error) if super::is_missing(&error) => return Ok(()),
            opened => opened?,
        };
        let failed = |errno| failure("list", directory, errno);
        for entry in Dir::read_from(&opened).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.file_name().to_str().ok().map(|file| format!("{directory}/{file}"));
            let Some(name) = path.as_deref().and_then(Name::parse) else { continue };
            // NFS may not say what an entry is.
            if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) && self.is_directory(&name)? {
                self.sync_below(name.as_str())?;
            }
        }
        Ok(())
    }

    fn is_directory(&self, name: &Name) -> Result<bool, StoreError> {
        match fs::statat(&self.root, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(failure("list", name.as_str(), errno)),
        }
    }

    /// Writes and syncs a temporary file.
    fn write_temporary(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o640);
        let file = retried(|| fs::openat(&self.root, name.as_str(), flags, mode));
        let mut file = File::from(file.map_err(|errno| failure("create", name.as_str(), errno))?);
        // Over NFS and SMB the lack of space may surface only at the sync.
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        written.map_err(|error| io_failure("write", name.as_str(), error))
    }

    /// Gives a temporary file its name, without replacing.
    fn give_name(&self, temporary: &Name, name: &Name) -> Result<Named, StoreError> {
        let (from, to) = (temporary.as_str(), name.as_str());
        let named = match self.link(from, to) {
            Err(Errno::OPNOTSUPP) if !self.is_smb()? => self.rename(from, to),
            other => other,
        };
        match named {
            Ok(()) => Ok(Named::Done),
            Err(Errno::NOENT) => Ok(Named::Gone),
            Err(errno) => Err(failure("create", to, errno)),
        }
    }

    fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        match retried(|| fs::linkat(&self.root, from, &self.root, to, AtFlags::empty())) {
            Ok(()) => {}
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::MLINK) => {
                return Err(Errno::OPNOTSUPP);
            }
            Err(errno) => return Err(errno),
        }
        // The object has its name. A temporary name that stays is removed by a later prune.
        match retried(|| fs::unlinkat(&self.root, from, AtFlags::empty())) {
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        match retried(|| fs::renameat_with(&self.root, from, &self.root, to, RenameFlags::NOREPLACE)) {
            Err(Errno::INVAL | Errno::NOSYS) => Err(Errno::OPNOTSUPP),
            renamed => renamed,
        }
    }

    /// Whether the directory is on a mount of SMB.
    fn is_smb(&self) -> Result<bool, StoreError> {
        let kind = retried(|| fs::fstatfs(&self.root)).map_err(|errno| failure("examine", ".", errno))?.f_type;
        // SMB_SUPER_MAGIC, CIFS_SUPER_MAGIC, SMB2_SUPER_MAGIC (linux/magic.h).
        Ok([0x517b, 0xff53_4d42_i64, 0xfe53_4d42].contains(&(kind & 0xffff_ffff)))
    }

    fn is_ours(&self, name: &Name, bytes: &[u8]) -> Result<bool, StoreError> {
        match super::get_all(self, name) {
            Ok(found) => Ok(found == bytes),
            Err(error) if super::is_missing(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn list_below(&self, directory: &str, found: &mut Vec<(Name, u64)>) -> Result<(), StoreError> {
        let failed = |errno| failure("list", directory, errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = match retried(|| fs::openat(&self.root, directory, flags, Mode::empty())) {
            Ok(opened) => opened,
            // Directories are created by the first object in them.
            Err(Errno::NOENT) => return Ok(()),
            Err(errno) => return Err(failed(errno)),
        };
        for entry in Dir::read_from(&opened).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = entry.file_name().to_str().ok().map(|file| format!("{directory}/{file}"));
            let Some(name) = path.as_deref().and_then(Name::parse) else { continue };
            let stat = match fs::statat(&self.root, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => stat,
                Err(Errno::NOENT) => continue,
                Err(errno) => return Err(failure("list", name.as_str(), errno)),
            };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => self.list_below(name.as_str(), found)?,
                FileType::RegularFile => found.push((name, u64::try_from(stat.st_size).unwrap_or(0))),
                _ => {}
            }
        }
        Ok(())
    }
}

impl ObjectStore for Directory {
    fn put(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError> {
        self.make_parents(name)?;
        for _ in 0..ATTEMPTS {
            let temporary = Name::temporary(Id::random());
            self.make_parents(&temporary)?;
            let named = self.write_temporary(&temporary, bytes).and_then(|()| self.give_name(&temporary, name));
            let is_done = match named {
                Ok(Named::Done) => true,
                Ok(Named::Gone) => self.is_ours(name, bytes)?,
                Err(error) => {
                    // What cannot be removed now is removed by a later prune.
                    match fs::unlinkat(&self.root, temporary.as_str(), AtFlags::empty()) {
                        Ok(()) | Err(_) => return Err(error),
                    }
                }
            };
            if is_done {
                return self.sync_parent(name.as_str());
            }
        }
        let cause = io::Error::other("its temporary file was removed each time");
        Err(StoreError::new(StoreErrorKind::Io, "create", name.as_str(), Some(cause)))
    }

    fn get(&self, name: &Name, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let failed = |error| io_failure("read", name.as_str(), error);
        let file = self.open_object("read", name)?;
        let end = range.end.min(file.metadata().map_err(failed)?.len());
        let too_large = |_| failed(io::Error::from(io::ErrorKind::FileTooLarge));
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(range.start)).map_err(too_large)?];
        file.read_exact_at(&mut bytes, range.start).map_err(failed)?;
        Ok(bytes)
    }

    fn size(&self, name: &Name) -> Result<u64, StoreError> {
        // Opening checks with the server, where a look at attributes may be answered from a cache.
        let file = self.open_object("find", name)?;
        file.metadata().map(|metadata| metadata.len()).map_err(|error| io_failure("find", name.as_str(), error))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, StoreError> {
        let mut found = Vec::new();
        self.list_below(prefix.trim_end_matches('/'), &mut found)?;
        found.sort();
        Ok(found)
    }

    fn delete(&self, name: &Name) -> Result<(), StoreError> {
        match retried(|| fs::unlinkat(&self.root, name.as_str(), AtFlags::empty())) {
            // A temporary file that comes back after a crash is removed again.
            Ok(()) if name.as_str().starts_with(prefix::TEMPORARY) => Ok(()),
            Ok(()) => self.sync_parent(name.as_str()),
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failure("delete", name.as_str(), errno)),
        }
    }

    fn settle(&self, prefix: &str) -> Result<(), StoreError> {
        self.sync_directory(".")?;
        self.sync_below(prefix.trim_end_matches('/'))
    }
}

/// Repeats a call that a signal interrupted, and once one whose handle a file server does not know any more: the second
/// call looks the name up again.
fn retried<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    let mut is_stale = false;
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::STALE) if !is_stale => is_stale = true,
            result => return result,
        }
    }
}

fn failure(attempt: &'static str, name: &str, errno: Errno) -> StoreError {
    let kind = match errno {
        Errno::EXIST => StoreErrorKind::Exists,
        Errno::NOENT => StoreErrorKind::NotFound,
        Errno::NOSPC | Errno::DQUOT => StoreErrorKind::NoSpace,
        Errno::OPNOTSUPP => StoreErrorKind::Unsuitable,
        Errno::STALE
        | Errno::NODEV
        | Errno::NXIO
        | Errno::NOTCONN
        | Errno::CONNRESET
        | Errno::CONNABORTED
        | Errno::HOSTDOWN
        | Errno::HOSTUNREACH
        | Errno::NETUNREACH
        | Errno::TIMEDOUT
        | Errno::SHUTDOWN => StoreErrorKind::Vanished,
        _ => StoreErrorKind::Io,
    };
    StoreError::new(kind, attempt, name, Some(errno.into()))
}

fn io_failure(attempt: &'static str, name: &str, error: io::Error) -> StoreError {
    match Errno::from_io_error(&error) {
        Some(errno) => failure(attempt, name, errno),
        None => StoreError::new(StoreErrorKind::Io, attempt, name, Some(error)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn store() -> (tempfile::TempDir, Directory) {
        let place = tempfile::tempdir().unwrap();
        let store = Directory::open(place.path()).unwrap();
        (place, store)
    }

    #[test]
    fn an_object_is_created_once_and_keeps_its_first_bytes() {
        let (place, store) = store();
        let name = Name::pack(Id::random());
        store.put(&name, b"first").unwrap();
        assert_eq!(store.put(&name, b"second").unwrap_err().kind, StoreErrorKind::Exists);
        assert_eq!(store.get(&name, 1..3).unwrap(), b"ir");
        assert_eq!(store.get(&name, 3..99).unwrap(), b"st");
        assert_eq!(store.get(&name, 50..99).unwrap(), b"");
        assert_eq!(store.size(&name).unwrap(), 5);
        assert_eq!(store.list(prefix::PACKS).unwrap(), [(name.clone(), 5)]);
        assert_eq!(std::fs::read_dir(place.path().join("tmp")).unwrap().count(), 0, "a temporary file was left");
        store.delete(&name).unwrap();
        store.delete(&name).unwrap();
        assert_eq!(store.size(&name).unwrap_err().kind, StoreErrorKind::NotFound);
    }

    #[test]
    fn where_renames_replace_a_hard_link_does_not() {
        let (place, store) = store();
        std::fs::write(place.path().join("from"), b"new").unwrap();
        std::fs::write(place.path().join("to"), b"old").unwrap();
        assert_eq!(store.link("from", "to"), Err(Errno::EXIST));
        store.link("from", "other").unwrap();
        assert_eq!(std::fs::read(place.path().join("other")).unwrap(), b"new");
        assert!(!place.path().join("from").exists());
    }

    #[test]
    fn files_of_others_are_not_listed_and_links_are_not_followed() {
        let (place, store) = store();
        std::fs::create_dir(place.path().join("log")).unwrap();
        for other in [".nfs000012", "README.TXT", "lost+found"] {
            std::fs::write(place.path().join("log").join(other), b"x").unwrap();
        }
        std::os::unix::fs::symlink("/etc/passwd", place.path().join("log/1")).unwrap();
        assert_eq!(store.list(prefix::LOG).unwrap(), []);
        assert!(store.get(&Name::parse("log/1").unwrap(), 0..9).is_err());
    }

    #[test]
    fn a_removed_temporary_file_is_an_attempt_more() {
        let (_place, store) = store();
        let (gone, name) = (Name::temporary(Id::random()), Name::backup(Id::random()));
        store.make_parents(&gone).unwrap();
        store.make_parents(&name).unwrap();
        assert!(matches!(store.give_name(&gone, &name), Ok(Named::Gone)));
        assert!(!store.is_ours(&name, b"mine").unwrap());
        // The answer of a rename was lost: the name has our bytes.
        store.put(&name, b"mine").unwrap();
        assert!(matches!(store.give_name(&gone, &name), Ok(Named::Gone)));
        assert!(store.is_ours(&name, b"mine").unwrap());
    }

    #[test]
    fn two_writers_of_one_name_have_one_winner() {
        let (_place, store) = store();
        for round in 0..50 {
            let name = Name::log(Id::from_bytes([0; 16]), round);
            let won = std::thread::scope(|scope| {
                let writers = [b"a", b"b"].map(|bytes| scope.spawn(|| store.put(&name, bytes).is_ok()));
                writers.map(|writer| usize::from(writer.join().unwrap())).iter().sum::<usize>()
            });
            assert_eq!(won, 1);
        }
    }
}
