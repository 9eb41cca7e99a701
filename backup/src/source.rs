//! The disk that is backed up, and the place to which one is restored: what the caller implements.
//!
//! Knows nothing about targets. A source must not change while it is read: it is a snapshot.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// A part of a disk, which follows the part before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub len: u64,
    /// Whether it reads as zeroes, without having to be read.
    pub is_zero: bool,
}

/// A disk at one moment.
pub trait Source: Sync {
    /// The size in bytes. May be zero and need not be a multiple of anything.
    fn len(&self) -> u64;

    /// Whether the disk has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The parts of a range, in order and without gaps: which have data, and which are zero.
    fn extents(&self, range: Range<u64>) -> io::Result<Vec<Extent>>;

    /// Fills `buffer` from `at`.
    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()>;
}

/// Where a disk is restored to. Calls come in ascending order and without gaps.
pub trait Sink {
    /// Writes data.
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes a range read as zeroes. A new sparse file needs to do nothing.
    fn zero(&mut self, at: u64, len: u64) -> io::Result<()>;
}

/// A raw image file, whose holes are not read.
#[derive(Debug)]
pub struct RawFile {
    file: File,
    len: u64,
}

impl RawFile {
    /// A file that must not be written to while it is used.
    pub fn new(file: File) -> io::Result<RawFile> {
        let len = file.metadata()?.len();
        Ok(RawFile { file, len })
    }

    /// The next offset of data (or of a hole) at or behind `at`.
    fn seek(&self, to: SeekFrom) -> io::Result<Option<u64>> {
        match rustix::fs::seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Source for RawFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn extents(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let data = self.seek(SeekFrom::Data(at))?.unwrap_or(range.end).min(range.end);
            if data > at {
                extents.push(Extent { len: data - at, is_zero: true });
            }
            if data < range.end {
                let hole = self.seek(SeekFrom::Hole(data))?.unwrap_or(range.end).clamp(data + 1, range.end);
                extents.push(Extent { len: hole - data, is_zero: false });
                at = hole;
            } else {
                at = data;
            }
        }
        Ok(extents)
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, at)
    }
}
