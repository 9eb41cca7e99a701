//! Synchronous access to an image file, at any alignment: for creating, checking and repairing images that are not
//! being served. The data path uses an engine instead.
//!
//! With O_DIRECT the bytes pass through an aligned buffer; a write first reads the surrounding blocks. The lock ensures
//! that no other process writes the image meanwhile.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use disk::{Action, FileError, FileOffset, ReadFault, Source};
use memory::Buffer;
use rustix::fs::{Advice, fadvise};

use crate::call::through_cache;
use crate::{Cache, ImageFile};

/// Large enough to stream metadata at the speed of the storage, small enough not to matter.
const CHUNK: usize = 1 << 20;

impl Source for ImageFile {
    fn has_data_file(&self) -> bool {
        self.data_file().is_some()
    }

    fn len(&self) -> u64 {
        // fstat on an open file fails for no reason that a caller could act upon.
        self.current_len().unwrap_or(0)
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(as_u64(bytes.len()));
        let fault = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ReadFault::PastEnd(end),
            _ => ReadFault::Failed(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        if end.0 > self.current_len().map_err(fault)? {
            return Err(ReadFault::PastEnd(end));
        }
        if let Some(remote) = self.remote() {
            return remote.wait_to_read(at.0, bytes).map_err(|error| ReadFault::Failed(errno(error)));
        }
        if let Some(source) = self.source() {
            return source.wait_to_read(at.0, bytes).map_err(|error| ReadFault::Failed(errno(error)));
        }
        match self.options().cache {
            Cache::Writeback => self.as_file().read_exact_at(bytes, at.0).map_err(fault),
            Cache::None => self.read_aligned(at.0, bytes).map_err(fault),
        }
    }
}

impl ImageFile {
    /// Writes `bytes` at offset `at`. A file grows as needed, to the end of the bytes and no further.
    pub fn write_at(&mut self, at: FileOffset, bytes: &[u8]) -> io::Result<()> {
        if let Some(remote) = self.remote() {
            return remote.wait_to_write(at.0, bytes).map_err(|error| io::Error::from_raw_os_error(errno(error)));
        }
        if self.source().is_some() {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        match self.options().cache {
            Cache::Writeback => self.as_file().write_all_at(bytes, at.0),
            Cache::None => self.write_aligned(at.0, bytes),
        }?;
        self.reaches(at.0.saturating_add(as_u64(bytes.len())));
        Ok(())
    }

    /// Makes all writes durable (`fdatasync`), including those to a data file.
    pub fn sync(&mut self) -> io::Result<()> {
        let synced = self.all_files().try_for_each(|file| match file.remote() {
            None => file.as_file().sync_data(),
            Some(remote) => {
                remote.wait_for(Action::SyncData).map_err(|error| io::Error::from_raw_os_error(errno(error)))
            }
        });
        self.sync_failed |= synced.is_err();
        synced
    }

    /// Returns true if [`ImageFile::sync`] has ever failed: the data it should have made durable may be lost, and no
    /// later sync reports that.
    pub fn sync_has_failed(&self) -> bool {
        self.sync_failed
    }

    /// Syncs, then drops the page cache, so that reads return what is on the storage. After a failed sync the page
    /// cache may hold data that never reached the storage and consider it clean: later syncs do not report it. Fails if
    /// the sync fails.
    pub fn sync_and_drop_cache(&mut self) -> io::Result<()> {
        let synced = self.sync();
        for file in self.all_files().filter(|file| file.remote().is_none()) {
            fadvise(file.as_file(), 0, None, Advice::DontNeed)?;
        }
        synced
    }

    /// Makes a range of an export read as zeroes without transferring them; returns false if its server cannot do that,
    /// or if this is a file.
    pub fn zero_remote(&mut self, at: FileOffset, len: u64) -> io::Result<bool> {
        let Some(remote) = self.remote() else { return Ok(false) };
        match remote.wait_for(Action::Deallocate { at, len }) {
            Ok(()) => Ok(true),
            Err(FileError::Unsupported) => Ok(false),
            Err(error) => Err(io::Error::from_raw_os_error(errno(error))),
        }
    }

    /// Sets the length of a file; new bytes read as zero. The length of a block device is fixed.
    pub fn set_len(&mut self, len: u64) -> io::Result<()> {
        match self.device_len() {
            None => {
                self.as_file().set_len(len)?;
                self.known_len().set(len);
                Ok(())
            }
            Some(device) if len <= device => Ok(()),
            Some(device) => {
                let what = format!("the block device has {device} bytes; {len} are needed");
                Err(io::Error::new(io::ErrorKind::StorageFull, what))
            }
        }
    }

    fn read_aligned(&self, at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
        let mut at = at;
        while !bytes.is_empty() {
            let mut range = AlignedRange::covering(at, bytes.len(), self.alignment().offset);
            let found = range.fill(self)?;
            let (now, later) = bytes.split_at_mut(range.take);
            if range.skip + range.take > found {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            now.copy_from_slice(range.payload());
            at += as_u64(range.take);
            bytes = later;
        }
        Ok(())
    }

    fn write_aligned(&self, at: u64, mut bytes: &[u8]) -> io::Result<()> {
        let mut at = at;
        while !bytes.is_empty() {
            let mut range = AlignedRange::covering(at, bytes.len(), self.alignment().offset);
            let (now, later) = bytes.split_at(range.take);
            if range.is_exact() || self.covers(&range)? {
                if !range.is_exact() {
                    range.fill(self)?;
                }
                range.payload().copy_from_slice(now);
                let start = range.at;
                self.as_file().write_all_at(range.bytes(), start)?;
            } else {
                self.write_file_end(at, now)?;
            }
            at += as_u64(range.take);
            bytes = later;
        }
        Ok(())
    }

    /// Returns true if the file extends to the end of this range.
    fn covers(&self, range: &AlignedRange) -> io::Result<bool> {
        Ok(range.at.saturating_add(as_u64(range.len)) <= self.current_len()?)
    }

    /// Writes the last bytes of a file, which may end inside a block. Direct I/O would extend the file beyond them, and
    /// a crash before it is truncated again would leave it so: the page cache writes exact lengths.
    fn write_file_end(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        through_cache(self.as_fd(), || self.as_file().write_all_at(bytes, at))
    }
}

/// The aligned blocks that contain some bytes of a file.
struct AlignedRange {
    buffer: Arc<Buffer>,
    /// Offset in the file.
    at: u64,
    len: usize,
    /// Bytes before the requested ones.
    skip: usize,
    /// Number of requested bytes.
    take: usize,
}

impl AlignedRange {
    /// The aligned range from which `len` bytes at `at`, or the first of them, can be taken.
    fn covering(at: u64, len: usize, align: usize) -> AlignedRange {
        // The remainder is less than `align`, which is a usize.
        let skip = usize::try_from(at % as_u64(align)).unwrap_or(0);
        let take = len.min(CHUNK - skip);
        let len = (skip + take).next_multiple_of(align);
        AlignedRange { buffer: Buffer::zeroed(len), at: at - as_u64(skip), len, skip, take }
    }

    /// Returns true if the range is exactly the requested bytes.
    fn is_exact(&self) -> bool {
        self.skip == 0 && self.take == self.len
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the buffer has at least `len` initialised bytes (`covering`), and this range is its only holder; the
        // borrow of the range prevents a second slice.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.base(), self.len) }
    }

    fn payload(&mut self) -> &mut [u8] {
        let (skip, take) = (self.skip, self.take);
        let (_, rest) = self.bytes().split_at_mut(skip);
        rest.split_at_mut(take).0
    }

    /// Reads the range; returns how many bytes of it the file has.
    fn fill(&mut self, file: &ImageFile) -> io::Result<usize> {
        let at = self.at;
        let align = file.alignment().offset;
        let mut found = 0;
        loop {
            let (_, rest) = self.bytes().split_at_mut(found);
            match file.as_file().read_at(rest, at.saturating_add(as_u64(found))) {
                Ok(0) => return Ok(found),
                Ok(count) => found += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            // Direct I/O stops between blocks only at the end of the file, where nothing more can be read.
            if found == self.len || found % align != 0 {
                return Ok(found);
            }
        }
    }
}

fn errno(error: FileError) -> i32 {
    match error {
        FileError::NoSpace => libc::ENOSPC,
        FileError::Unsupported => libc::EOPNOTSUPP,
        FileError::Failed(errno) => errno,
    }
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
