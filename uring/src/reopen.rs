//! Another way to a file that is open already: with the right to write, or without it.
//!
//! The file is found through its own descriptor, so that a name which has changed hands meanwhile does not matter; or
//! somebody who may open it has handed the other description over.
//! A data file is opened again by itself, and what is opened here has none.
//! Invariant: at every moment one of the two descriptions holds a lock that keeps writers out, so nobody slips in
//! between.

use std::fs::{File, Metadata, OpenOptions as SystemOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use crate::lock::{self, NotLocked};
use crate::{Cache, FileOpenError, Held, ImageFile, OpenOptions};

impl ImageFile {
    /// A second handle of the same description, with the same rights and the same lock: for another thread.
    pub fn try_clone(&self) -> Result<ImageFile, FileOpenError> {
        let file = self.as_file().try_clone();
        let file = file.map_err(|cause| FileOpenError::failed("duplicate the descriptor of", self.path(), cause))?;
        let cloned = self.with_file(file, self.options());
        match self.data_file() {
            Some(data) => Ok(cloned.with_data_file(data.try_clone()?)),
            None => Ok(cloned),
        }
    }

    /// Gives the lock of a writer back to `from`, from which this was opened again, and which has that of a reader
    /// then.
    pub fn give_back(self, from: &ImageFile) -> Result<(), FileOpenError> {
        if self.options().lock {
            self.lock_as(Held::Reading)?;
            from.lock_as(Held::Reading)?;
        }
        Ok(())
    }

    /// The same file with the right to write and the lock of a writer. Refused while anybody else reads it; this
    /// description, which is to be dropped afterwards, then has its lock back.
    pub fn reopen_writable(&self) -> Result<ImageFile, FileOpenError> {
        self.raise_to(self.open_again(true)?)
    }

    /// The same with a description of this file that was opened for writing elsewhere.
    pub fn reopen_writable_as(&self, handed: OwnedFd) -> Result<ImageFile, FileOpenError> {
        self.raise_to(self.take_over(handed, true)?)
    }

    /// The same file for reading only, and others may read it too from now on. Nothing is being written to it.
    pub fn reopen_read_only(&self) -> Result<ImageFile, FileOpenError> {
        self.lower_to(self.open_again(false)?)
    }

    /// The same with a description of this file that was opened for reading elsewhere.
    pub fn reopen_read_only_as(&self, handed: OwnedFd) -> Result<ImageFile, FileOpenError> {
        self.lower_to(self.take_over(handed, false)?)
    }

    fn raise_to(&self, opened: ImageFile) -> Result<ImageFile, FileOpenError> {
        if !opened.options().lock {
            return Ok(opened);
        }
        // Readers both: no writer can come while the one gives way to the other.
        opened.lock_as(Held::Reading)?;
        lock::release(self.as_fd()).map_err(|cause| FileOpenError::failed("unlock", self.path(), cause))?;
        match opened.lock_as(Held::Writing) {
            Ok(()) => Ok(opened),
            Err(refused) => {
                self.lock_as(Held::Reading)?;
                Err(refused)
            }
        }
    }

    fn lower_to(&self, opened: ImageFile) -> Result<ImageFile, FileOpenError> {
        if opened.options().lock {
            // The lock of a writer becomes that of a reader without a gap (fcntl(2)).
            self.lock_as(Held::Reading)?;
            opened.lock_as(Held::Reading)?;
        }
        Ok(opened)
    }

    fn open_again(&self, write: bool) -> Result<ImageFile, FileOpenError> {
        let options = OpenOptions { write, ..self.options() };
        let wanted = if write { Held::Writing } else { Held::Reading };
        let direct = if options.cache == Cache::None { libc::O_DIRECT } else { 0 };
        let through = format!("/proc/self/fd/{}", self.as_fd().as_raw_fd());
        let file = SystemOptions::new().read(true).write(write).custom_flags(direct).open(through);
        let file = file.map_err(|cause| FileOpenError::refused("open again", self.path(), wanted, cause))?;
        Ok(self.with_file(file, options))
    }

    /// A description that was handed over, if it is one of this very file. Its lock is not asked for yet.
    fn take_over(&self, handed: OwnedFd, write: bool) -> Result<ImageFile, FileOpenError> {
        let options = OpenOptions { write, ..self.options() };
        let opened = ImageFile::of_descriptor(handed, self.path(), OpenOptions { lock: false, ..options })?;
        let failed = |cause| FileOpenError::failed("examine", self.path(), cause);
        let identity = |metadata: Metadata| (metadata.dev(), metadata.ino(), metadata.rdev());
        match identity(opened.metadata().map_err(failed)?) == identity(self.metadata().map_err(failed)?) {
            true => Ok(self.with_file(opened.as_file().try_clone().map_err(failed)?, options)),
            false => Err(FileOpenError::AnotherFile { path: self.path().to_owned() }),
        }
    }

    fn lock_as(&self, wanted: Held) -> Result<(), FileOpenError> {
        lock::acquire(self.as_fd(), wanted).map_err(|why| match why {
            NotLocked::Conflict(held) => FileOpenError::InUse { path: self.path().to_owned(), wanted, held },
            NotLocked::Failed(cause) => FileOpenError::failed("lock", self.path(), cause),
        })
    }

    /// What is known of this file holds for another description of it.
    fn with_file(&self, file: File, options: OpenOptions) -> ImageFile {
        ImageFile::of_parts(file, self.path().to_owned(), options, self.alignment(), self.device_len())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const WRITER: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    const READER: OpenOptions = OpenOptions { write: false, ..WRITER };

    fn image(directory: &tempfile::TempDir) -> std::path::PathBuf {
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 4096]).unwrap();
        path
    }

    #[test]
    fn a_writer_that_becomes_a_reader_lets_readers_in_and_no_writer() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let writer = ImageFile::open(&path, WRITER).unwrap();
        let mut reader = writer.reopen_read_only().unwrap();
        drop(writer);
        assert!(reader.write_at(0, &[1]).is_err());
        assert!(ImageFile::open(&path, READER).is_ok());
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: Held::Reading, .. })));
    }

    #[test]
    fn the_only_reader_may_become_a_writer_and_nobody_else_is_let_in() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let mut writer = reader.reopen_writable().unwrap();
        writer.write_at(0, &[1]).unwrap();
        assert!(matches!(ImageFile::open(&path, READER), Err(FileOpenError::InUse { held: Held::Writing, .. })));
    }

    #[test]
    fn a_shared_file_stays_one_for_reading() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let other = ImageFile::open(&path, READER).unwrap();
        assert!(matches!(reader.reopen_writable(), Err(FileOpenError::InUse { held: Held::Reading, .. })));
        drop(other);
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: Held::Reading, .. })));
    }

    #[test]
    fn a_name_that_stands_for_another_file_now_does_not_mislead() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        std::fs::write(&path, "another").unwrap();
        let mut writer = reader.reopen_writable().unwrap();
        writer.write_at(0, &[9]).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"another");
        assert_eq!(std::fs::read(directory.path().join("moved")).unwrap()[0], 9);
    }

    fn handed(path: &std::path::Path, write: bool) -> OwnedFd {
        File::options().read(true).write(write).open(path).unwrap().into()
    }

    #[test]
    fn what_is_handed_takes_the_place_of_what_is_open_in_both_directions() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let reader = ImageFile::open(&path, READER).unwrap();
        let mut writer = reader.reopen_writable_as(handed(&path, true)).unwrap();
        writer.write_at(0, &[1]).unwrap();
        assert!(matches!(ImageFile::open(&path, READER), Err(FileOpenError::InUse { held: Held::Writing, .. })));
        let mut lowered = writer.reopen_read_only_as(handed(&path, false)).unwrap();
        drop((reader, writer));
        assert!(lowered.write_at(0, &[1]).is_err());
        assert!(ImageFile::open(&path, READER).is_ok());
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: Held::Reading, .. })));
    }

    #[test]
    fn another_file_and_a_description_that_cannot_write_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = image(&directory);
        let other = directory.path().join("other");
        std::fs::write(&other, [8; 4096]).unwrap();
        let reader = ImageFile::open(&path, READER).unwrap();
        let refused = reader.reopen_writable_as(handed(&other, true));
        assert!(matches!(refused, Err(FileOpenError::AnotherFile { .. })), "{refused:?}");
        let refused = reader.reopen_writable_as(handed(&path, false));
        assert!(matches!(refused, Err(FileOpenError::NotHanded { .. })), "{refused:?}");
        // It has its lock still.
        assert!(matches!(ImageFile::open(&path, WRITER), Err(FileOpenError::InUse { held: Held::Reading, .. })));
    }
}
