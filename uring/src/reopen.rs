//! Reopens a file with other access: with write access, or without it.
//!
//! The file is opened through its own descriptor, so that it does not matter if its name was changed or replaced; or
//! through a new description handed over by a process that may open it. A data file is reopened separately, and the
//! reopened file has none attached. Invariant: at every moment one of the two descriptions holds a lock that excludes
//! writers, so no other process can lock the file in between.

use std::fs::{File, Metadata, OpenOptions as SystemOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use crate::lock;
use crate::{AccessMode, Cache, FileOpenError, ImageFile, OpenOptions};

impl ImageFile {
    /// A second handle of the same description, with the same access and the same lock, for another thread.
    pub fn try_clone(&self) -> Result<ImageFile, FileOpenError> {
        let file = self.as_file().try_clone();
        let file = file.map_err(|cause| FileOpenError::failed("duplicate the descriptor of", self.path(), cause))?;
        let cloned = self.with_file(file, self.options());
        match self.data_file() {
            Some(data) => Ok(cloned.with_data_file(data.try_clone()?)),
            None => Ok(cloned),
        }
    }

    /// Downgrades this writer's lock to a reader's, and takes a reader's lock on `from`, from which this was reopened.
    pub fn return_lock(self, from: &ImageFile) -> Result<(), FileOpenError> {
        if self.options().lock {
            self.lock_as(AccessMode::Reading)?;
            from.lock_as(AccessMode::Reading)?;
        }
        Ok(())
    }

    /// Reopens the file with write access and a writer's lock. On success this description is unlocked, and should be
    /// dropped. Fails while another description reads the file; this one then keeps its lock.
    pub fn reopen_writable(&self) -> Result<ImageFile, FileOpenError> {
        self.upgrade_to(self.reopen(true)?)
    }

    /// As [`ImageFile::reopen_writable`], with a description that another process has opened for writing.
    pub fn reopen_writable_as(&self, handed: OwnedFd) -> Result<ImageFile, FileOpenError> {
        self.upgrade_to(self.adopt_fd(handed, true)?)
    }

    /// Reopens the file for reading only, so that others may read it too. No write may be in flight.
    pub fn reopen_read_only(&self) -> Result<ImageFile, FileOpenError> {
        self.downgrade_to(self.reopen(false)?)
    }

    /// As [`ImageFile::reopen_read_only`], with a description that another process has opened for reading.
    pub fn reopen_read_only_as(&self, handed: OwnedFd) -> Result<ImageFile, FileOpenError> {
        self.downgrade_to(self.adopt_fd(handed, false)?)
    }

    fn upgrade_to(&self, opened: ImageFile) -> Result<ImageFile, FileOpenError> {
        if !opened.options().lock {
            return Ok(opened);
        }
        // Both are readers: no writer can lock the file while one replaces the other.
        opened.lock_as(AccessMode::Reading)?;
        lock::release(self.as_fd()).map_err(|cause| FileOpenError::failed("unlock", self.path(), cause))?;
        match opened.lock_as(AccessMode::Writing) {
            Ok(()) => Ok(opened),
            Err(refused) => {
                self.lock_as(AccessMode::Reading)?;
                Err(refused)
            }
        }
    }

    fn downgrade_to(&self, opened: ImageFile) -> Result<ImageFile, FileOpenError> {
        if opened.options().lock {
            // A writer's lock becomes a reader's without a gap (fcntl(2)).
            self.lock_as(AccessMode::Reading)?;
            opened.lock_as(AccessMode::Reading)?;
        }
        Ok(opened)
    }

    fn reopen(&self, write: bool) -> Result<ImageFile, FileOpenError> {
        let options = OpenOptions { write, ..self.options() };
        let wanted = if write { AccessMode::Writing } else { AccessMode::Reading };
        let direct = if options.cache == Cache::None { libc::O_DIRECT } else { 0 };
        let through = format!("/proc/self/fd/{}", self.as_fd().as_raw_fd());
        let file = SystemOptions::new().read(true).write(write).custom_flags(direct).open(through);
        let file = file.map_err(|cause| FileOpenError::refused("open again", self.path(), wanted, cause))?;
        Ok(self.with_file(file, options))
    }

    /// Adopts a handed-over description if it is of this file. It is not locked yet.
    fn adopt_fd(&self, handed: OwnedFd, write: bool) -> Result<ImageFile, FileOpenError> {
        let options = OpenOptions { write, ..self.options() };
        let opened = ImageFile::from_fd(handed, self.path(), OpenOptions { lock: false, ..options })?;
        let failed = |cause| FileOpenError::failed("examine", self.path(), cause);
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino(), metadata.rdev());
        match identity(opened.metadata().map_err(failed)?) == identity(self.metadata().map_err(failed)?) {
            true => Ok(self.with_file(opened.as_file().try_clone().map_err(failed)?, options)),
            false => Err(FileOpenError::AnotherFile { path: self.path().to_owned() }),
        }
    }

    fn lock_as(&self, wanted: AccessMode) -> Result<(), FileOpenError> {
        lock::acquire(self.as_fd(), wanted).map_err(|why| FileOpenError::not_locked(self.path(), wanted, why))
    }

    /// Wraps another description of this file, which has the same alignment and length.
    fn with_file(&self, file: File, options: OpenOptions) -> ImageFile {
        let path = self.path().to_owned();
        ImageFile::from_parts(file, path, options, self.alignment(), self.device_len()).known_as(self)
    }
}

#[cfg(test)]
mod test {
    use disk::FileOffset;

    use super::*;

    const WRITER: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    const READER: OpenOptions = OpenOptions { write: false, ..WRITER };

    fn image(directory: &tempfile::TempDir) -> std::path::PathBuf {
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 4096]).unwrap();
        path
    }

    #[test]
    fn a_downgraded_writer_admits_readers_but_no_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let writer = ImageFile::open(&path, WRITER).unwrap();
        let mut reader = writer.reopen_read_only().unwrap();
        drop(writer);
        assert!(reader.write_at(FileOffset(0), &[1]).is_err());
        assert!(ImageFile::open(&path, READER).is_ok());
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: AccessMode::Reading, .. })));
    }

    #[test]
    fn an_only_reader_can_become_a_writer_and_excludes_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let mut writer = reader.reopen_writable().unwrap();
        writer.write_at(FileOffset(0), &[1]).unwrap();
        assert!(matches!(ImageFile::open(&path, READER), Err(FileOpenError::InUse { held: AccessMode::Writing, .. })));
    }

    #[test]
    fn a_shared_file_cannot_be_upgraded() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let other = ImageFile::open(&path, READER).unwrap();
        assert!(matches!(reader.reopen_writable(), Err(FileOpenError::InUse { held: AccessMode::Reading, .. })));
        drop(other);
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: AccessMode::Reading, .. })));
    }

    #[test]
    fn reopening_ignores_a_name_that_now_refers_to_another_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        std::fs::write(&path, "another").unwrap();
        let mut writer = reader.reopen_writable().unwrap();
        writer.write_at(FileOffset(0), &[9]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"another");
        assert_eq!(std::fs::read(directory.path().join("moved")).unwrap()[0], 9);
    }

    fn handed(path: &std::path::Path, write: bool) -> OwnedFd {
        File::options().read(true).write(write).open(path).unwrap().into()
    }

    #[test]
    fn a_handed_over_descriptor_upgrades_and_downgrades_access() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let mut writer = reader.reopen_writable_as(handed(&path, true)).unwrap();
        writer.write_at(FileOffset(0), &[1]).unwrap();
        assert!(matches!(ImageFile::open(&path, READER), Err(FileOpenError::InUse { held: AccessMode::Writing, .. })));
        let mut lowered = writer.reopen_read_only_as(handed(&path, false)).unwrap();
        drop((reader, writer));
        assert!(lowered.write_at(FileOffset(0), &[1]).is_err());
        assert!(ImageFile::open(&path, READER).is_ok());
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: AccessMode::Reading, .. })));
    }

    #[test]
    fn another_file_or_a_read_only_descriptor_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let other = directory.path().join("other");
        std::fs::write(&other, [8; 4096]).unwrap();
        let reader = ImageFile::open(&path, READER).unwrap();
        let refused = reader.reopen_writable_as(handed(&other, true));
        assert!(matches!(refused, Err(FileOpenError::AnotherFile { .. })), "{refused:?}");
        let refused = reader.reopen_writable_as(handed(&path, false));
        assert!(matches!(refused, Err(FileOpenError::NotHanded { .. })), "{refused:?}");
        // The reader still has its lock.
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: AccessMode::Reading, .. })));
    }
}
