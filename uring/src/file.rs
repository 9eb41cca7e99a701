//! An image file, open and locked: a regular file or a block device.
//!
//! It knows the alignment of its I/O ([`ImageFile::alignment`]) and nothing about its contents. Invariant: a file
//! opened with [`Cache::None`] bypasses the page cache, or opening it fails.

use std::fs::{File, Metadata, OpenOptions as SystemOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use disk::{Allocation, FileOffset};
use rustix::fs::{MemfdFlags, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use crate::alignment::{TMPFS, is_on};
use crate::blocking_source::SourceFile;
use crate::known_len::KnownLen;
use crate::lock;
use crate::unique_id::unique_id;
use crate::{AccessMode, Alignment, FileOpenError, ReadSource, Remote};

/// Where file data is cached between us and the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Not cached: O_DIRECT.
    None,
    /// In the page cache, until a sync.
    Writeback,
}

/// How to open an image file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenOptions {
    /// Also open for writing.
    pub write: bool,
    /// The cache mode.
    pub cache: Cache,
    /// Take the lock: exclusive for writers, shared for readers. Omit it only if the file is known to be locked
    /// already, or to read an image in use at the caller's own risk.
    pub lock: bool,
}

impl OpenOptions {
    fn wanted(self) -> AccessMode {
        match self.write {
            true => AccessMode::Writing,
            false => AccessMode::Reading,
        }
    }
}

/// File systems whose files io_uring reads through the page cache without a worker thread: ext4 and btrfs, by their
/// numbers in linux/magic.h. Not XFS: a read there waits for writers of the file in the thread that submits it.
const WAITING: [i64; 2] = [0xef53, 0x9123_683e];

/// An open image file; a clone is the same open file.
#[derive(Clone, Debug)]
pub struct ImageFile {
    /// Shared with the engine's threads that are using it.
    file: Arc<File>,
    path: PathBuf,
    options: OpenOptions,
    alignment: Alignment,
    /// The length of a block device, which is not in its inode.
    device_len: Option<u64>,
    /// A read that meets the end of the file before this length fails. Shared by all descriptions reopened from this
    /// one.
    known_len: KnownLen,
    waits_for_pages: bool,
    is_in_memory: bool,
    /// The data file of an image that keeps its data in a separate file; open in the same mode.
    data: Option<Box<ImageFile>>,
    /// The export that this stands for: all I/O goes to its server.
    remote: Option<Remote>,
    /// The source that this stands for: all bytes are read from it.
    source: Option<SourceFile>,
    /// A sync by [`ImageFile::sync`] has failed.
    pub(crate) sync_failed: bool,
}

impl ImageFile {
    /// Opens the file or block device at `path`.
    pub fn open(path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let wanted = options.wanted();
        let refused = |cause| FileOpenError::refused("open", path, wanted, cause);
        // Checked before opening: opening a FIFO waits for a peer, opening a tape rewinds it.
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

    /// Adopts a file that another process has opened, under the name `path`. The open file description is shared with
    /// that process: O_DIRECT is set or cleared on it, and the lock is its lock.
    pub fn from_fd(file: OwnedFd, path: &Path, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
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
            .map_err(|cause| FileOpenError::refused("create", path, AccessMode::Writing, cause))?;
        // O_DIRECT is set afterwards: open(2) with O_CREAT leaves a file behind even if it refuses the flag.
        let options = OpenOptions { write: true, ..options };
        set_cache(&file, path, options.cache).and_then(|()| ImageFile::adopt(file, path, options)).inspect_err(|_| {
            // The original error is reported; a file that cannot be removed either is empty and ours.
            drop(std::fs::remove_file(path));
        })
    }

    /// Creates an anonymous file of `len` bytes in memory, a placeholder for a disk without a file. Nothing is ever
    /// written to it, so it takes no space.
    pub fn of_nothing(name: &Path, len: u64, write: bool) -> Result<ImageFile, FileOpenError> {
        let failed = |errno: Errno| FileOpenError::failed("create in memory", name, errno);
        let file = rustix::fs::memfd_create("tapline-null", MemfdFlags::CLOEXEC).map_err(failed)?;
        rustix::fs::ftruncate(&file, len).map_err(failed)?;
        let options = OpenOptions { write, cache: Cache::Writeback, lock: false };
        Ok(ImageFile::from_parts(File::from(file), name.to_owned(), options, Alignment::NONE, None))
    }

    /// A stand-in for an export of an NBD server, to which it behaves like a block device.
    pub fn of_remote(name: &Path, remote: Remote, options: OpenOptions) -> Result<ImageFile, FileOpenError> {
        let size = remote.size();
        let unit = usize::try_from(remote.unit()).unwrap_or(1);
        let stand_in = ImageFile::of_nothing(name, size, options.write)?;
        Ok(ImageFile {
            alignment: Alignment { offset: unit, ..Alignment::NONE },
            device_len: Some(size),
            remote: Some(remote),
            ..stand_in
        })
    }

    /// A stand-in for a source that is only read, with threads of its own that wait for it. It behaves like a block
    /// device.
    pub fn of_source(name: &Path, source: Arc<dyn ReadSource>) -> Result<ImageFile, FileOpenError> {
        let size = source.size();
        let options = OpenOptions { write: false, cache: Cache::Writeback, lock: false };
        let stand_in = ImageFile::of_nothing(name, size, false)?;
        let source = SourceFile::new(source).map_err(|cause| FileOpenError::failed("open", name, cause))?;
        Ok(ImageFile { options, device_len: Some(size), source: Some(source), ..stand_in })
    }

    /// The source that this stands for.
    pub(crate) fn source(&self) -> Option<&SourceFile> {
        self.source.as_ref()
    }

    /// The export that this stands for.
    pub fn remote(&self) -> Option<&Remote> {
        self.remote.as_ref()
    }

    /// Queries the properties of a newly opened file, and locks it.
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
        let opened = ImageFile::from_parts(file, path.to_owned(), options, alignment, device_len);
        if options.lock {
            opened.lock()?;
        }
        // Only under the lock: the previous user may have changed the length until it ended.
        opened.reaches(opened.current_len().map_err(|cause| FileOpenError::failed("find the size of", path, cause))?);
        Ok(opened)
    }

    /// A file whose alignment and length are already known.
    pub(crate) fn from_parts(
        file: File,
        path: PathBuf,
        options: OpenOptions,
        alignment: Alignment,
        device_len: Option<u64>,
    ) -> ImageFile {
        set_noatime(&file);
        // Block devices behave like these file systems.
        let waits_for_pages = options.cache == Cache::Writeback
            && (device_len.is_some() || WAITING.iter().any(|&magic| is_on(file.as_fd(), magic)));
        let is_in_memory = device_len.is_none() && is_on(file.as_fd(), TMPFS);
        let file = Arc::new(file);
        ImageFile {
            file,
            path,
            options,
            alignment,
            device_len,
            known_len: KnownLen::default(),
            waits_for_pages,
            is_in_memory,
            data: None,
            remote: None,
            source: None,
            sync_failed: false,
        }
    }

    /// Attaches the data file of an image.
    pub fn with_data_file(self, data: ImageFile) -> ImageFile {
        ImageFile { data: Some(Box::new(data)), ..self }
    }

    /// The data file, if there is one.
    pub fn data_file(&self) -> Option<&ImageFile> {
        self.data.as_deref()
    }

    /// The data file, mutably.
    pub fn data_file_mut(&mut self) -> Option<&mut ImageFile> {
        self.data.as_deref_mut()
    }

    /// The file and its data file, if there is one.
    pub fn all_files(&self) -> impl Iterator<Item = &ImageFile> {
        std::iter::once(self).chain(self.data_file())
    }

    fn lock(&self) -> Result<(), FileOpenError> {
        let wanted = self.options.wanted();
        lock::acquire(self.file.as_fd(), wanted).map_err(|why| FileOpenError::not_locked(&self.path, wanted, why))
    }

    /// The path as given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The options it was opened with.
    pub fn options(&self) -> OpenOptions {
        self.options
    }

    /// The required alignment of I/O: one byte in writeback mode. The engines handle memory alignment; the caller must
    /// align offsets and lengths.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// The length of a block device; `None` for a file, which can grow.
    pub fn device_len(&self) -> Option<u64> {
        self.device_len
    }

    /// Records that the file has at least this length. If it is shorter later, another program has truncated it.
    pub fn reaches(&self, len: u64) {
        self.known_len.reaches(len);
    }

    pub(crate) fn known_len(&self) -> &KnownLen {
        &self.known_len
    }

    /// Shares the known length with `other`, a description of the same file.
    pub(crate) fn known_as(self, other: &ImageFile) -> ImageFile {
        ImageFile { known_len: other.known_len.clone(), ..self }
    }

    /// The current length in bytes.
    pub(crate) fn current_len(&self) -> io::Result<u64> {
        match self.device_len {
            Some(len) => Ok(len),
            None => self.file.metadata().map(|metadata| metadata.size()),
        }
    }

    /// The current metadata of the open file, even if its name refers to another file now.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Duplicates the descriptor; both share one open file description.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, FileOpenError> {
        let cloned = self.file.try_clone().map(OwnedFd::from);
        cloned.map_err(|cause| FileOpenError::failed("duplicate the descriptor of", &self.path, cause))
    }

    pub(crate) fn as_file(&self) -> &File {
        &self.file
    }

    /// A shared handle that can outlive this value.
    pub(crate) fn share(&self) -> Arc<File> {
        self.file.clone()
    }

    /// A clone without the data file. The descriptor is closed with the last clone.
    pub(crate) fn shared(&self) -> ImageFile {
        ImageFile { data: None, ..self.clone() }
    }

    /// Whether the file system holds data or a hole at `at`; see [`disk::Io::allocated`].
    pub fn allocated(&self, at: FileOffset, len: u64) -> Allocation {
        let at = at.0;
        if let Some(remote) = &self.remote {
            return remote.allocated(at, len);
        }
        if self.source.is_some() {
            return Allocation::Data(len);
        }
        match rustix::fs::seek(&*self.file, SeekFrom::Data(at)) {
            Ok(data) if data > at => Allocation::Hole(len.min(data - at)),
            Ok(_) => match rustix::fs::seek(&*self.file, SeekFrom::Hole(at)) {
                Ok(hole) if hole > at => Allocation::Data(len.min(hole - at)),
                _ => Allocation::Data(len),
            },
            // lseek(2): no data from here to the end, or already past it. A truncated part is not a hole.
            Err(Errno::NXIO) if !self.is_cut_short() => Allocation::Hole(len),
            Err(_) => Allocation::Data(len),
        }
    }

    /// Returns true if io_uring waits without a worker thread for pages of this file that are being read into the page
    /// cache (FMODE_BUF_RASYNC, Linux 5.9 and later). No system call reports this; it follows from the file system.
    pub(crate) fn waits_for_pages(&self) -> bool {
        self.waits_for_pages
    }

    /// Returns true for tmpfs: a transfer is a copy in memory, complete when any system call that starts it returns.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Treats the file as one on storage.
    #[cfg(test)]
    pub(crate) fn forget_memory(&mut self) {
        self.is_in_memory = false;
    }

    /// Returns true if io_uring would need a worker thread for every transfer on this file, because the file system
    /// cannot do I/O without blocking its caller (tmpfs). Linux AIO is the faster engine then.
    pub fn uring_needs_workers(&self) -> bool {
        if self.remote.is_some() || self.source.is_some() {
            return false;
        }
        let buffer = memory::Buffer::zeroed(memory::PAGE);
        // SAFETY: the page was allocated above, is initialised, and has no other user until it is dropped.
        let page = unsafe { std::slice::from_raw_parts_mut(buffer.base(), buffer.capacity()) };
        let read = rustix::io::preadv2(&*self.file, &mut [io::IoSliceMut::new(page)], 0, ReadWriteFlags::NOWAIT);
        // preadv2(2): a file without non-blocking I/O refuses the flag; one with it answers EAGAIN, or reads.
        read == Err(Errno::OPNOTSUPP)
    }
}

impl ImageFile {
    /// Identifies the file within this boot of the machine; see [`unique_id`].
    pub fn unique_id(&self) -> io::Result<Vec<u8>> {
        unique_id(&self.file)
    }
}

impl AsFd for ImageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Makes the existence of `path` durable: syncs its parent directory.
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

/// Checks that a handed-over description has the wanted access mode and no surprising flags.
fn check_mode(file: &File, path: &Path, wanted: AccessMode) -> Result<(), FileOpenError> {
    match (access_mode(file), wanted) {
        (Some(AccessMode::Writing), _) | (Some(AccessMode::Reading), AccessMode::Reading) => Ok(()),
        _ => Err(FileOpenError::NotHanded { path: path.to_owned(), wanted }),
    }
}

/// The access mode of a description. `None` if it cannot be used for an image.
pub fn access_mode(file: impl AsFd) -> Option<AccessMode> {
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    match flags & OFlags::RWMODE {
        // pwrite(2): with O_APPEND the offset is ignored.
        _ if flags.intersects(OFlags::PATH | OFlags::APPEND) => None,
        OFlags::RDWR => Some(AccessMode::Writing),
        OFlags::RDONLY => Some(AccessMode::Reading),
        _ => None,
    }
}

/// Sets or clears O_DIRECT on an open file description.
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

/// Sets O_NOATIME: the access time of an image is of no use, and maintaining it costs the kernel a clock read and an
/// inode check for each read. Only the owner of a file may set it (EPERM); for others nothing changes.
fn set_noatime(file: &File) {
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
