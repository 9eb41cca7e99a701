//! The directory of an attached repository: files are opened, created, shared and removed in it, by name.
//!
//! Invariants: a name never leads out of the directory, through a link or otherwise; creations and removals survive a
//! power loss.

use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use api::{AbsolutePath, Code, Problem};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    handle: File,
    path: AbsolutePath,
    /// The number of its file system's device (`st_dev`): it is read while the storage is known to respond.
    device: u64,
    /// The lock on the repository, which lasts as long as anybody has the directory.
    lock: Option<File>,
}

/// A name in a directory, and what has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name. Invalid UTF-8 is shown as U+FFFD; such a name never belongs to an image.
    pub name: String,
    /// Whether it is a regular file.
    pub file: bool,
    /// Its physical size in bytes.
    pub physical: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Owned by neither root nor the daemon's user.
    pub foreign: bool,
    /// It was written to in the last seconds.
    pub fresh: bool,
    /// Device and inode number: names of one file have the same ones.
    pub numbers: FileNumbers,
}

/// The identity of a file, independent of its names: device and inode number. They are given out again when the file
/// is gone, so they prove something only of files that exist at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileNumbers {
    /// The file system.
    pub device: u64,
    /// The file.
    pub inode: u64,
}

impl FileNumbers {
    /// Of an open file.
    pub fn of(file: &File) -> std::io::Result<FileNumbers> {
        Ok(FileNumbers::from(file.metadata()?))
    }
}

impl From<Metadata> for FileNumbers {
    fn from(metadata: Metadata) -> FileNumbers {
        FileNumbers { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Seconds after the last write until a file counts as complete.
const FRESH: i64 = 10;

/// The extended attribute of an image whose changed blocks a process records.
const MARK: &str = "user.tapline.changes";

/// The file that is locked while a repository is attached.
pub const LOCK: &str = ".tapline-sr.lock";

/// How large a file system is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// All of it.
    pub size: u64,
    /// Space used by all.
    pub used: u64,
    /// Space that can still be written.
    pub available: u64,
}

/// The suffix of an unfinished file's name.
pub const UNFINISHED: &str = ".unfinished";

impl Directory {
    /// Opens the directory at `path`.
    pub fn open(path: &AbsolutePath) -> Result<Directory, Problem> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = rustix::fs::open(path.as_path(), flags, Mode::empty());
        let handle = handle.map_err(|errno| open_failed(&format!("open the directory {path}"), errno))?;
        let handle = File::from(handle);
        let device = handle.metadata().map_err(|error| Problem::failed(format_args!("look at {path}"), error))?.dev();
        Ok(Directory { handle, path: path.clone(), device, lock: None })
    }

    /// The path by which the directory was opened.
    pub fn path(&self) -> &Path {
        self.path.as_path()
    }

    /// The number of the device that its file system is on, as `st_dev` has it.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// The open directory, to determine its file system ([`super::filesystem`]).
    pub(super) fn handle(&self) -> &File {
        &self.handle
    }

    /// The file whose lock it has.
    pub(super) fn lock_file(&self) -> Option<&File> {
        self.lock.as_ref()
    }

    /// Locks the repository for as long as this directory is in use; over NFS and SMB the server holds the lock.
    /// Read-only users cannot disturb anybody, and only lock an existing lock file.
    pub fn lock(&mut self, read_only: bool) -> Result<(), Problem> {
        let tried = format!("lock {}", self.path().join(LOCK).display());
        let (access, operation) = match read_only {
            true => (OFlags::RDONLY, FlockOperation::NonBlockingLockShared),
            false => (OFlags::RDWR | OFlags::CREATE, FlockOperation::NonBlockingLockExclusive),
        };
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.handle, LOCK, flags, Mode::from_raw_mode(0o600)) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) if read_only => return Ok(()),
            Err(errno) => return Err(open_failed(&tried, errno)),
        };
        match patient_lock(&file, operation) {
            Ok(()) => self.lock = Some(file),
            Err(Errno::WOULDBLOCK | Errno::ACCESS) => {
                let what =
                    format!("the repository at {} is already attached, by another taplined or by this one", self.path);
                return Err(Problem::new(Code::InUse, what).advise("detach it there first"));
            }
            Err(errno) => return Err(Problem::failed(tried, errno)),
        }
        Ok(())
    }

    /// The names in it, and what has them.
    pub fn entries(&self) -> Result<Vec<Entry>, Problem> {
        let tried = || format!("list {}", self.path);
        let failed = |errno: Errno| Problem::failed(tried(), errno);
        let mut entries = Vec::new();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
        let own = [0, rustix::process::geteuid().as_raw()];
        for entry in rustix::fs::Dir::read_from(&self.handle).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            if [&b"."[..], b".."].contains(&name.to_bytes()) {
                continue;
            }
            match rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => entries.push(Entry {
                    name: name.to_string_lossy().into_owned(),
                    file: FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
                    physical: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
                    len: u64::try_from(stat.st_size).unwrap_or(0),
                    foreign: !own.contains(&stat.st_uid),
                    fresh: now.saturating_sub(stat.st_mtime) < FRESH,
                    numbers: FileNumbers { device: stat.st_dev, inode: stat.st_ino },
                }),
                // It has disappeared in the meantime.
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(entries)
    }

    /// The contents of a small file, if it exists; a file longer than `max` is refused.
    pub fn read_file(&self, name: &str, max: usize) -> Result<Option<Vec<u8>>, Problem> {
        let file = match self.open_image(name, false) {
            Err(problem) if problem.code == Code::NotFound => return Ok(None),
            opened => opened?,
        };
        let tried = || format!("read {}", self.path().join(name).display());
        let mut bytes = Vec::new();
        let limit = u64::try_from(max).unwrap_or(u64::MAX).saturating_add(1);
        file.take(limit).read_to_end(&mut bytes).map_err(|error| Problem::failed(tried(), error))?;
        match bytes.len() > max {
            true => Err(Problem::failed(tried(), format_args!("it is larger than {max} bytes"))),
            false => Ok(Some(bytes)),
        }
    }

    /// Creates a small file, completely or not at all; fails if the name is taken.
    pub fn write_file(&self, name: &str, bytes: &[u8]) -> Result<(), Problem> {
        let tried = format!("write {}", self.path().join(name).display());
        self.finish(name, &tried, |file| {
            file.write_all(bytes)
                .map_err(|error| open_failed(&tried, Errno::from_io_error(&error).unwrap_or(Errno::IO)))
        })
    }

    /// Opens an image to hand it to a disk process: a regular file, and no link to one. One that is opened for writing
    /// loses the mark of its map of changed blocks, since what is written will not be recorded (decision 0065).
    pub fn open_image(&self, name: &str, write: bool) -> Result<File, Problem> {
        let file = self.open_marked(name, write)?;
        if write {
            end_map(&file)
                .map_err(|errno| open_failed(&format!("open {}", self.path().join(name).display()), errno))?;
        }
        Ok(file)
    }

    /// The same, of a file that keeps its mark: nothing is written, or the process records all changes.
    pub fn open_marked(&self, name: &str, write: bool) -> Result<File, Problem> {
        let tried = format!("open {}", self.path().join(name).display());
        check_name(name).map_err(|why| Problem::failed(&tried, why))?;
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        // A FIFO or a device that has taken the place of the file must not keep us waiting.
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.handle, name, flags, Mode::empty());
        let file = File::from(opened.map_err(|errno| open_failed(&tried, errno))?);
        let metadata = file.metadata().map_err(|error| Problem::failed(&tried, error))?;
        if !metadata.is_file() {
            return Err(Problem::failed(tried, "it is not a regular file"));
        }
        Ok(file)
    }

    /// Keeps the file with this name in existence, whatever happens to the name, and so its numbers from being given
    /// to another file. Neither locks nor reads it.
    pub fn hold(&self, name: &str) -> Result<File, Problem> {
        let tried = || format!("hold {}", self.path().join(name).display());
        let held =
            rustix::fs::openat(&self.handle, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
        held.map(File::from).map_err(|errno| open_failed(&tried(), errno))
    }

    /// Creates an empty file, which must not exist.
    pub fn create_image(&self, name: &str) -> Result<File, Problem> {
        let tried = format!("create {}", self.path().join(name).display());
        check_name(name).map_err(|why| Problem::failed(&tried, why))?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&self.handle, name, flags, Mode::from_raw_mode(0o640));
        let file = File::from(made.map_err(|errno| open_failed(&tried, errno))?);
        self.sync(&tried)?;
        Ok(file)
    }

    /// Makes `to` share all blocks of `from`, completely or not at all. Nothing may be writing to `from`.
    pub fn share_image(&self, from: &str, to: &str) -> Result<(), Problem> {
        let tried = format!("copy {} to {to} by sharing its blocks", self.path().join(from).display());
        let source = self.open_image(from, false)?;
        self.finish(to, &tried, |target| {
            rustix::fs::ioctl_ficlone(target, &source).map_err(|errno| open_failed(&tried, errno))
        })
    }

    /// Creates a file under a temporary name, and renames it when its contents are durable.
    fn finish(
        &self,
        name: &str,
        tried: &str,
        fill: impl FnOnce(&mut File) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let beside = format!("{name}{UNFINISHED}");
        self.remove_image(&beside)?;
        let mut target = self.create_image(&beside)?;
        let filled = fill(&mut target);
        let filled = filled.and_then(|()| target.sync_all().map_err(|error| file_failed(tried, &error)));
        let named = filled.and_then(|()| self.name(&beside, name, tried));
        if let Err(problem) = named {
            self.remove_image(&beside)?;
            return Err(problem);
        }
        self.sync(tried)
    }

    /// Gives a file another name, if that is free.
    fn name(&self, from: &str, to: &str, tried: &str) -> Result<(), Problem> {
        let here = &self.handle;
        let named = match rustix::fs::renameat_with(here, from, here, to, RenameFlags::NOREPLACE) {
            // NFS cannot: a second name and then none of the first come to the same.
            Err(Errno::INVAL) => rustix::fs::linkat(here, from, here, to, AtFlags::empty())
                .and_then(|()| rustix::fs::unlinkat(here, from, AtFlags::empty())),
            named => named,
        };
        named.map_err(|errno| open_failed(tried, errno))
    }

    /// Removes a file; that it is not there is as good.
    pub fn remove_image(&self, name: &str) -> Result<(), Problem> {
        let tried = format!("remove {}", self.path().join(name).display());
        check_name(name).map_err(|why| Problem::failed(&tried, why))?;
        match rustix::fs::unlinkat(&self.handle, name, AtFlags::empty()) {
            Ok(()) => self.sync(&tried),
            Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(open_failed(&tried, errno)),
        }
    }

    /// Removes a file, unless some process has it locked, as everybody has who reads or writes an image.
    pub fn remove_unused(&self, name: &str) -> Result<(), Problem> {
        let file = match self.open_marked(name, true) {
            Ok(file) => file,
            Err(problem) if problem.code == Code::NotFound => return Ok(()),
            Err(problem) => return Err(problem),
        };
        // The kernel closes the files of a killed process a moment after its end.
        if is_held(patiently(|| rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive))) {
            let what = format!("{} was not removed: a process is using it", self.path().join(name).display());
            return Err(
                Problem::new(Code::InUse, what).advise("find out which process has it open with lslocks or fuser")
            );
        }
        self.remove_image(name)
    }

    /// Refuses a file to which some process may write.
    pub fn must_not_be_written(&self, name: &str) -> Result<(), Problem> {
        let file = match self.open_image(name, false) {
            Err(problem) if problem.code == Code::NotFound => return Ok(()),
            opened => opened?,
        };
        // The kernel closes the files of a killed process a moment after its end.
        if !is_held(patiently(|| rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockShared))) {
            return Ok(());
        }
        let what = format!("a process has {} open for writing", self.path().join(name).display());
        let advice = "find out which with lslocks or fuser; it may be a disk still running on another host";
        Err(Problem::new(Code::InUse, what).advise(advice))
    }

    /// The physical size of a file in bytes.
    pub fn physical(&self, name: &str) -> Result<u64, Problem> {
        let file = self.open_image(name, false)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| Problem::failed(format_args!("examine {name}"), errno))?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512))
    }

    /// Whether a file is missing, or has no bytes.
    pub fn is_empty(&self, name: &str) -> Result<bool, Problem> {
        match rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(true),
            stat => Ok(stat.map_err(|errno| open_failed(&format!("examine {name}"), errno))?.st_size == 0),
        }
    }

    /// Whether an open file is the one that has this name here. If a file system renumbers its files on each mount,
    /// only existence can be checked.
    pub fn is_it(&self, name: &str, open: FileNumbers) -> Result<bool, Problem> {
        let there = match rustix::fs::statat(&self.handle, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            stat => stat.map_err(|errno| Problem::failed(format_args!("examine {name}"), errno))?,
        };
        Ok(match &*super::filesystem::kind(&self.handle)? {
            kind if kind.starts_with("nfs") => there.st_ino == open.inode,
            kind if super::same_file::renumbers(kind) => true,
            _ => (there.st_dev, there.st_ino) == (open.device, open.inode),
        })
    }

    /// Refuses, with the code `state`, if its path leads elsewhere now: it was removed, or something was mounted or
    /// unmounted.
    pub fn still_there(&self) -> Result<(), Problem> {
        let failed = |errno: Errno| match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::STALE => self.gone(),
            _ => Problem::failed(format_args!("examine {}", self.path), errno),
        };
        let open = rustix::fs::fstat(&self.handle).map_err(failed)?;
        let there = rustix::fs::stat(self.path.as_path()).map_err(failed)?;
        match (open.st_dev, open.st_ino) == (there.st_dev, there.st_ino) {
            true => Ok(()),
            false => Err(self.gone()),
        }
    }

    fn gone(&self) -> Problem {
        Problem::new(Code::State, format!("{} is not the directory that was attached", self.path))
            .advise("mount the right file system there")
    }

    /// How large the file system is, and how much of it is left.
    pub fn capacity(&self) -> Result<Capacity, Problem> {
        let tried = || format!("read the free space of {}", self.path.as_str());
        let stat = rustix::fs::fstatvfs(&self.handle).map_err(|errno| Problem::failed(tried(), errno))?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Capacity {
            size: bytes(stat.f_blocks),
            used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
            // Blocks reserved for root do not count: disk processes are not root.
            available: bytes(stat.f_bavail),
        })
    }

    /// Makes the directory's entries durable.
    pub(super) fn sync(&self, tried: &str) -> Result<(), Problem> {
        self.handle.sync_all().map_err(|error| file_failed(tried, &error))
    }
}

/// How many times a lock that is about to be released is tried.
const LOOKS: usize = 10;
const BETWEEN_LOOKS: Duration = Duration::from_millis(20);

/// A process that is just being started has our files open, including recently released locks, until it executes
/// another program: it is given time for that. An SMB server refuses a conflicting lock as if permission were missing.
fn patient_lock(file: &File, operation: FlockOperation) -> Result<(), Errno> {
    patiently(|| rustix::fs::flock(file, operation))
}

/// Tries a lock for a moment.
fn patiently(lock: impl Fn() -> Result<(), Errno>) -> Result<(), Errno> {
    for _ in 0..LOOKS {
        match lock() {
            held if is_held(held) => std::thread::sleep(BETWEEN_LOOKS),
            locked => return locked,
        }
    }
    lock()
}

/// Whether a lock was refused because of a conflict.
fn is_held(locked: Result<(), Errno>) -> bool {
    matches!(locked, Err(Errno::WOULDBLOCK | Errno::ACCESS))
}

/// Whether a process has a file locked, as all readers and writers of images do. This takes the lock for a moment, on a
/// file that must be open for writing.
pub fn is_used(file: &File) -> bool {
    // Open file description locks of other processes conflict with this one (fcntl(2)). Where they are not supported,
    // this cannot be determined.
    is_held(rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingLockExclusive))
}

/// The problem of a failed operation on a file of a repository.
pub fn file_failed(tried: &str, error: &std::io::Error) -> Problem {
    open_failed(tried, Errno::from_io_error(error).unwrap_or(Errno::IO))
}

pub(super) fn open_failed(tried: &str, errno: Errno) -> Problem {
    let code = match errno {
        Errno::NOSPC | Errno::DQUOT => Code::NoSpace,
        Errno::ROFS => Code::ReadOnly,
        Errno::EXIST => Code::Exists,
        Errno::NOENT => Code::NotFound,
        Errno::NAMETOOLONG | Errno::NOTDIR | Errno::LOOP => Code::Invalid,
        Errno::OPNOTSUPP | Errno::XDEV => Code::Unsupported,
        _ => Code::Failed,
    };
    let problem = Problem::new(code, format!("cannot {tried}: {errno}"));
    match errno {
        Errno::ACCESS | Errno::PERM => {
            problem.advise("give this daemon's user write access; on an NFS server, export it with no_root_squash")
        }
        Errno::NOSPC => problem.advise("free space on its file system; if there is some, no inodes are free (df -i)"),
        Errno::DQUOT => problem.advise("a quota is used up: raise it, or remove files of this daemon's user"),
        _ => problem,
    }
}

/// A name in the directory and nowhere else.
fn check_name(name: &str) -> Result<(), &'static str> {
    match name {
        "" | "." | ".." => Err("that is not a file name"),
        name if name.contains(['/', '\0']) => Err("the name is a path to another directory"),
        _ => Ok(()),
    }
}

/// Removes the mark of a map of changed blocks, durably, before anything is written without it.
pub fn end_map(image: &File) -> Result<(), Errno> {
    match rustix::fs::fremovexattr(image, MARK) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        removed => removed.and_then(|()| rustix::fs::fsync(image)),
    }
}

#[cfg(test)]
mod test {
    use std::io::Write;

    use super::*;

    fn directory() -> (tempfile::TempDir, Directory) {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().to_str().unwrap().parse().unwrap();
        (room, Directory::open(&path).unwrap())
    }

    #[test]
    fn a_name_never_leads_out() {
        let (room, directory) = directory();
        std::fs::write(room.path().join("a"), "x").unwrap();
        std::os::unix::fs::symlink("a", room.path().join("link")).unwrap();
        for name in ["", ".", "..", "../a", "/etc/passwd", "a/b"] {
            assert!(directory.open_image(name, false).is_err(), "{name:?}");
            assert!(directory.create_image(name).is_err(), "{name:?}");
            assert!(directory.remove_image(name).is_err(), "{name:?}");
        }
        assert!(directory.open_image("a", true).is_ok());
        assert!(directory.open_image("link", false).is_err());
    }

    #[test]
    fn an_image_that_is_opened_for_writing_loses_the_mark_of_its_map() {
        let (room, directory) = directory();
        let file = File::create(room.path().join("a")).unwrap();
        let is_marked = || rustix::fs::fgetxattr(&file, MARK, &mut [0u8; 8][..]).is_ok();
        match rustix::fs::fsetxattr(&file, MARK, b"1", rustix::fs::XattrFlags::empty()) {
            Err(Errno::OPNOTSUPP) => return,
            set => set.unwrap(),
        }
        directory.open_image("a", false).unwrap();
        assert!(is_marked());
        for _ in 0..2 {
            directory.open_image("a", true).unwrap();
            assert!(!is_marked());
        }
    }

    #[test]
    fn a_path_that_cannot_be_a_directory_is_no_failure_of_ours() {
        let (room, _) = directory();
        std::fs::write(room.path().join("file"), "").unwrap();
        let code = |name: &str| {
            let path = room.path().join(name).to_str().unwrap().parse().unwrap();
            Directory::open(&path).unwrap_err().code
        };
        assert_eq!(code("none"), Code::NotFound);
        assert_eq!([code("file"), code("file/a"), code(&"a".repeat(256))], [Code::Invalid; 3]);
    }

    #[test]
    fn a_source_that_is_not_a_regular_file_is_refused_without_blocking() {
        let (room, directory) = directory();
        rustix::fs::mkfifoat(rustix::fs::CWD, room.path().join("fifo"), Mode::RWXU).unwrap();
        std::fs::create_dir(room.path().join("dir")).unwrap();
        assert!(directory.open_image("fifo", false).unwrap_err().detail.contains("regular"));
        assert!(directory.open_image("dir", false).is_err());
    }

    #[test]
    fn nothing_is_overwritten_and_removing_twice_is_as_good_as_once() {
        let (_room, directory) = directory();
        directory.create_image("a").unwrap().write_all(b"1").unwrap();
        assert_eq!(directory.create_image("a").unwrap_err().code, Code::Exists);
        directory.remove_image("a").unwrap();
        directory.remove_image("a").unwrap();
        assert_eq!(directory.open_image("a", false).unwrap_err().code, Code::NotFound);
    }
}
