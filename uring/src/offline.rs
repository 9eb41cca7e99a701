//! Synchronous access to an image file, at any alignment: for creating, checking and repairing images that are not
//! being served. The data path goes through an engine instead.
//!
//! With O_DIRECT the bytes pass through an aligned buffer; a write then reads what surrounds it first. Nobody else
//! may write the same image meanwhile, which the lock sees to.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use disk::{ReadFault, Source};
use memory::Buffer;
use rustix::fs::{Advice, fadvise};

use crate::call::through_cache;
use crate::{Cache, ImageFile};

/// Large enough to stream metadata at the speed of the storage, small enough to be forgotten.
const CHUNK: usize = 1 << 20;

impl Source for ImageFile {
    fn has_data_file(&self) -> bool {
        self.data_file().is_some()
    }

    fn len(&self) -> u64 {
        // fstat on an open file fails for no reason that a caller could act upon.
        self.current_len().unwrap_or(0)
    }

    fn read_at(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(as_u64(bytes.len()));
        let fault = |error: io::Error| match error.kind() {
            io::ErrorKind::UnexpectedEof => ReadFault::PastEnd(end),
            _ => ReadFault::Failed(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        if end > self.current_len().map_err(fault)? {
            return Err(ReadFault::PastEnd(end));
        }
        match self.options().cache {
            Cache::Writeback => self.as_file().read_exact_at(bytes, at).map_err(fault),
            Cache::None => self.read_aligned(at, bytes).map_err(fault),
        }
    }
}

impl ImageFile {
    /// Writes `bytes` at offset `at`. A file grows as needed, to the end of the bytes and not beyond.
    pub fn write_at(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        match self.options().cache {
            Cache::Writeback => self.as_file().write_all_at(bytes, at),
            Cache::None => self.write_aligned(at, bytes),
        }
    }

    /// Makes everything written survive power loss (`fdatasync`), in a data file too.
    pub fn sync(&mut self) -> io::Result<()> {
        self.all_files().try_for_each(|file| file.as_file().sync_data())
    }

    /// After a failed sync the page cache may show what the storage has never got, and call it clean: a later sync says
    /// nothing of it. Has reads find what the storage has; whether it takes what is still to be written.
    pub fn read_anew(&mut self) -> io::Result<()> {
        let synced = self.sync();
        for file in self.all_files() {
            fadvise(file.as_file(), 0, None, Advice::DontNeed)?;
        }
        synced
    }

    /// Gives a file this length; what is new reads as zero. A block device has the length it has.
    pub fn set_len(&mut self, len: u64) -> io::Result<()> {
        match self.device_len() {
            None => self.as_file().set_len(len),
            Some(device) if len <= device => Ok(()),
            Some(device) => {
                let what = format!("the block device has {device} bytes, {len} are needed");
                Err(io::Error::new(io::ErrorKind::StorageFull, what))
            }
        }
    }

    fn read_aligned(&self, at: u64, mut bytes: &mut [u8]) -> io::Result<()> {
        let mut at = at;
        while !bytes.is_empty() {
            let mut window = Window::around(at, bytes.len(), self.alignment().offset);
            let found = window.fill(self)?;
            let (now, later) = bytes.split_at_mut(window.take);
            if window.skip.saturating_add(window.take) > found {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            now.copy_from_slice(window.wanted());
            at = at.saturating_add(as_u64(window.take));
            bytes = later;
        }
        Ok(())
    }

    fn write_aligned(&self, at: u64, mut bytes: &[u8]) -> io::Result<()> {
        let mut at = at;
        while !bytes.is_empty() {
            let mut window = Window::around(at, bytes.len(), self.alignment().offset);
            let (now, later) = bytes.split_at(window.take);
            if window.is_exact() || self.has(&window)? {
                if !window.is_exact() {
                    window.fill(self)?;
                }
                window.wanted().copy_from_slice(now);
                let start = window.at;
                self.as_file().write_all_at(window.bytes(), start)?;
            } else {
                self.write_end(at, now)?;
            }
            at = at.saturating_add(as_u64(window.take));
            bytes = later;
        }
        Ok(())
    }

    /// Whether the file reaches as far as this window.
    fn has(&self, window: &Window) -> io::Result<bool> {
        Ok(window.at.saturating_add(as_u64(window.len)) <= self.current_len()?)
    }

    /// Writes what may end inside a block at the file's end. Direct I/O would make the file longer than it is to be,
    /// and a crash before it is cut again would leave it so: the page cache takes it as it is.
    fn write_end(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        through_cache(self.as_fd(), || self.as_file().write_all_at(bytes, at))
    }
}

/// The aligned surroundings of some bytes of a file.
struct Window {
    buffer: Arc<Buffer>,
    /// Offset in the file.
    at: u64,
    len: usize,
    /// Bytes in front of those that are wanted.
    skip: usize,
    /// Bytes that are wanted.
    take: usize,
}

impl Window {
    /// The window from which (part of) `len` bytes at `at` can be taken.
    fn around(at: u64, len: usize, align: usize) -> Window {
        // The remainder is less than `align`, which is a usize.
        let skip = usize::try_from(at % as_u64(align)).unwrap_or(0);
        let take = len.min(CHUNK.saturating_sub(skip));
        let len = skip.saturating_add(take).next_multiple_of(align);
        Window { buffer: Buffer::zeroed(len), at: at.saturating_sub(as_u64(skip)), len, skip, take }
    }

    /// Whether nothing but wanted bytes lies in it.
    fn is_exact(&self) -> bool {
        self.skip == 0 && self.take == self.len
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the buffer has at least `len` initialised bytes (`around`), and this window is its only holder;
        // the borrow of the window keeps a second slice from being made.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.base(), self.len) }
    }

    fn wanted(&mut self) -> &mut [u8] {
        let (skip, take) = (self.skip, self.take);
        let (_, rest) = self.bytes().split_at_mut(skip);
        rest.split_at_mut(take).0
    }

    /// Reads the window; answers how much of it the file has.
    fn fill(&mut self, file: &ImageFile) -> io::Result<usize> {
        let at = self.at;
        let align = file.alignment().offset;
        let mut found = 0;
        loop {
            let (_, rest) = self.bytes().split_at_mut(found);
            match file.as_file().read_at(rest, at.saturating_add(as_u64(found))) {
                Ok(0) => return Ok(found),
                Ok(count) => found = found.saturating_add(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            // Direct I/O stops between blocks only at the end of the file, where nothing more can be asked for.
            if found == self.len || found % align != 0 {
                return Ok(found);
            }
        }
    }
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
