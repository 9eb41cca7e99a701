//! An image file, open and locked: a regular file or a block device.
//!
//! It knows how its bytes must be addressed ([`ImageFile::alignment`]) and nothing about what they mean.
//! Invariant: a file opened with [`Cache::None`] bypasses the page cache, or was not opened at all.

use std::fs::{File, Metadata, OpenOptions as SystemOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use disk::Allocation;
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::lock::{self, NotLocked};
use crate::{Alignment, FileOpenError, Held};

/// Where the bytes of a file are kept between us and the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Nowhere: O_DIRECT.
    None,
    /// In the page cache, until a sync.
    Writeback,
}

/// How to open an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Also for writing.
    pub write: bool,
    /// The page cache, or none.
    pub cache: Cache,
    /// Take the lock: exclusive for writers, shared for readers. Only what is known to be locked already, or looks
    /// at an image in use at its own risk, goes without.
    pub lock: bool,
}

impl OpenOptions {
    fn wanted(self) -> Held {
        match self.write {
            true => Held::Writing,
            false => Held::Reading,
        }
    }
}

/// An open image file.
#[derive(Debug)]
pub struct ImageFile {
    /// Shared with the engine's threads that are at work on it.
    file: Arc<File>,
    path: PathBuf,
    options: OpenOptions,
    alignment: Alignment,
    /// The length of a block device, which is not in its inode.
    device_len: Option<u64>,
    /// Where an image keeps its data that does so in a file of its own; open in the same way.
    data: Option<Box<ImageFile>>,
}

impl ImageFile {
    /// Opens the file or block device at `path`.
    pub fn open(path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let wanted = options.wanted();
        let refused = |cause| FileOpenError::refused("open", path, wanted, cause);
        // Looked at before it is opened: opening a FIFO waits for a peer, opening a tape rewinds it.
        check_kind(path, &std::fs::metadata(path).map_err(refused)?)?;
        let direct = if options.cache == Cache::None { libc::O_DIRECT } else { 0 };
        let file =
            SystemOptions::new().read(true).write(options.write).custom_flags(direct).open(path).map_err(|cause| {
                match cause.raw_os_error() {
                    Some(libc::EINVAL) if direct != 0 => direct_refused(path, "its file system does not support it"),
                    _ => refused(cause),
                }
            })?;
        ImageFile::adopt(file, path, options)
    }

    /// Takes over a file that somebody else has opened, and calls `path`. Its description is shared with whoever has handed
    /// it over: O_DIRECT is set or cleared on it, and the lock is its lock.
    pub fn of_descriptor(file: OwnedFd, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let file = File::from(file);
        check_mode(&file, path, options.wanted())?;
        set_cache(&file, path, options.cache)?;
        ImageFile::adopt(file, path, options)
    }

    /// Creates an empty file at `path`, where nothing may exist, and opens it. Its name is durable only after
    /// [`sync_directory`].
    pub fn create_new(path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let file = SystemOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o644)
            .open(path)
            .map_err(|cause| FileOpenError::refused("create", path, Held::Writing, cause))?;
        // O_DIRECT is set afterwards: open(2) with O_CREAT leaves a file behind even where it refuses the flag.
        let options = OpenOptions { write: true, ..options };
        set_cache(&file, path, options.cache).and_then(|()| ImageFile::adopt(file, path, options)).inspect_err(|_| {
            // What failed is told; a file that cannot be removed either is empty and ours.
            drop(std::fs::remove_file(path));
        })
    }

    /// Learns what must be known of a file that has just been opened, and locks it.
    fn adopt(file: File, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let metadata = file.metadata().map_err(|cause| FileOpenError::failed("examine", path, cause))?;
        check_kind(path, &metadata)?;
        let block_device = metadata.file_type().is_block_device();
        let device_len = match block_device {
            true => Some(device_len(&file).map_err(|cause| FileOpenError::failed("find the size of", path, cause))?),
            false => None,
        };
        let alignment = match options.cache {
            Cache::None => Alignment::of_direct(file.as_fd(), block_device).map_err(|why| direct_refused(path, why))?,
            Cache::Writeback => Alignment::NONE,
        };
        let opened = ImageFile::of_parts(file, path.to_owned(), options, alignment, device_len);
        if options.lock {
            opened.lock()?;
        }
        Ok(opened)
    }

    /// A file of which everything is known already.
    pub(crate) fn of_parts(
        file: File,
        path: PathBuf,
        options: OpenOptions,
        alignment: Alignment,
        device_len: Option<u64>,
    ) -> ImageFile {
        forgo_access_time(&file);
        ImageFile { file: Arc::new(file), path, options, alignment, device_len, data: None }
    }

    /// This file, of an image that has its data in that one.
    pub fn with_data_file(self, data: ImageFile) -> ImageFile {
        ImageFile { data: Some(Box::new(data)), ..self }
    }

    /// The data file, if there is one.
    pub fn data_file(&self) -> Option<&ImageFile> {
        self.data.as_deref()
    }

    /// The same, to be changed.
    pub fn data_file_mut(&mut self) -> Option<&mut ImageFile> {
        self.data.as_deref_mut()
    }

    /// The file and its data file, if there is one.
    pub fn all_files(&self) -> impl Iterator<Item = &ImageFile> {
        std::iter::once(self).chain(self.data_file())
    }

    fn lock(&self) -> Result<(), FileOpenError> {
        let wanted = self.options.wanted();
        lock::acquire(self.file.as_fd(), wanted).map_err(|why| match why {
            NotLocked::Conflict(held) => FileOpenError::InUse { path: self.path.clone(), wanted, held },
            NotLocked::Failed(cause) => FileOpenError::failed("lock", &self.path, cause),
        })
    }

    /// The path as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The options it was opened with.
    pub fn options(&self) -> OpenOptions {
        self.options
    }

    /// What offsets, lengths and memory of direct I/O must be multiples of. One byte in writeback mode. The engines
    /// see to the memory; offsets and lengths are the caller's.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// The length of a block device; `None` for a file, which grows.
    pub fn device_len(&self) -> Option<u64> {
        self.device_len
    }

    /// The length in bytes, now.
    pub(crate) fn current_len(&self) -> io::Result<u64> {
        match self.device_len {
            Some(len) => Ok(len),
            None => self.file.metadata().map(|metadata| metadata.size()),
        }
    }

    /// What the file system knows of the file, wherever its name leads by now.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Another descriptor of the same description.
    pub fn try_clone_descriptor(&self) -> Result<OwnedFd, FileOpenError> {
        let cloned = self.file.try_clone().map(OwnedFd::from);
        cloned.map_err(|cause| FileOpenError::failed("duplicate the descriptor of", &self.path, cause))
    }

    pub(crate) fn as_file(&self) -> &File {
        &self.file
    }

    /// The file, to be kept open beyond this.
    pub(crate) fn share(&self) -> Arc<File> {
        self.file.clone()
    }

    /// What the file system holds at `at`; see [`disk::Io::allocated`].
    pub fn allocated(&self, at: u64, len: u64) -> Allocation {
        match rustix::fs::seek(&*self.file, SeekFrom::Data(at)) {
            Ok(data) if data > at => Allocation::Hole(len.min(data.saturating_sub(at))),
            Ok(_) => match rustix::fs::seek(&*self.file, SeekFrom::Hole(at)) {
                Ok(hole) if hole > at => Allocation::Data(len.min(hole.saturating_sub(at))),
                _ => Allocation::Data(len),
            },
            // lseek(2): no data from here to the end, or already behind it.
            Err(Errno::NXIO) => Allocation::Hole(len),
            Err(_) => Allocation::Data(len),
        }
    }

    /// Whether every transfer on this file would go by a thread with io_uring, because the file system cannot do I/O
    /// without blocking its caller (tmpfs). Linux AIO is the faster engine then.
    pub fn uring_needs_workers(&self) -> bool {
        let buffer = memory::Buffer::zeroed(memory::PAGE);
        // SAFETY: the page was allocated above, is initialised, and nobody else knows of it until it is dropped.
        let page = unsafe { std::slice::from_raw_parts_mut(buffer.base(), buffer.capacity()) };
        let read = rustix::io::preadv2(&*self.file, &mut [io::IoSliceMut::new(page)], 0, ReadWriteFlags::NOWAIT);
        // preadv2(2): a file without non-blocking I/O refuses the flag; one with it answers EAGAIN, or reads.
        read == Err(Errno::OPNOTSUPP)
    }
}

impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes durable that `path` exists: syncs the directory it is in.
pub fn sync_directory(path: &Path) -> Result<(), FileOpenError> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let failed = |cause: io::Error| FileOpenError::failed("sync the directory", parent, cause);
    File::open(parent).and_then(|directory| directory.sync_all()).map_err(failed)
}

fn direct_refused(path: &Path, why: impl Into<String>) -> FileOpenError {
    FileOpenError::DirectRefused { path: path.to_owned(), why: why.into() }
}

fn check_kind(path: &Path, metadata: &Metadata) -> Result<(), FileOpenError> {
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    let found = match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a character device",
    };
    Err(FileOpenError::NotAnImage { path: path.to_owned(), found })
}

/// Whether a description that was handed over can do what is wanted of it, and nothing that would surprise.
fn check_mode(file: &File, path: &Path, wanted: Held) -> Result<(), FileOpenError> {
    match (open_for(file), wanted) {
        (Some(Held::Writing), _) | (Some(Held::Reading), Held::Reading) => Ok(()),
        _ => Err(FileOpenError::NotHanded { path: path.to_owned(), wanted }),
    }
}

/// What a description was opened for. `None`: for something that no image can be used with.
pub fn open_for(file: impl AsFd) -> Option<Held> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    match flags & OFlags::RWMODE {
        // pwrite(2): with O_APPEND the offset does not count.
        _ if flags.intersects(OFlags::PATH | OFlags::APPEND) => None,
        OFlags::RDWR => Some(Held::Writing),
        OFlags::RDONLY => Some(Held::Reading),
        _ => None,
    }
}

/// Sets or clears O_DIRECT on an open description.
fn set_cache(file: &File, path: &Path, cache: Cache) -> Result<(), FileOpenError> {
    let flags = rustix::fs::fcntl_getfl(file).map_err(|cause| FileOpenError::failed("examine", path, cause))?;
    let wanted = match cache {
        Cache::None => flags | OFlags::DIRECT,
        Cache::Writeback => flags - OFlags::DIRECT,
    };
    if wanted == flags {
        return Ok(());
    }
    rustix::fs::fcntl_setfl(file, wanted).map_err(|cause| match cause {
        Errno::INVAL => direct_refused(path, "its file system does not support it"),
        cause => FileOpenError::failed("set O_DIRECT on", path, cause),
    })
}

/// Nobody asks when a disk was last read, and for each read the kernel would look at the clock and at the inode. Only the
/// owner of a file may say so (EPERM); for others it is as it was.
fn forgo_access_time(file: &File) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(file) {
        rustix::fs::fcntl_setfl(file, flags | OFlags::NOATIME).ok();
    }
}

/// `_IOR(0x12, 114, size_t)` of linux/fs.h: the length of a block device in bytes.
const BLKGETSIZE64: libc::c_ulong = libc::_IOR::<usize>(0x12, 114);

fn device_len(device: &File) -> io::Result<u64> {
    let mut len: u64 = 0;
    // SAFETY: the kernel writes one u64 during the call.
    match unsafe { libc::ioctl(device.as_raw_fd(), BLKGETSIZE64, &raw mut len) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(len),
    }
}
