//! How long a file is known to be, to notice that another program cuts it off.
//!
//! Nothing of ours makes an image shorter but [`ImageFile::set_len`]. So a file that is shorter than it was when it was
//! opened, or than one of our writes has made it, has lost its end to another program. What is read there would be
//! zeroes, and a write behind the new end would turn the lost part into a hole that nothing tells from zeroes: both
//! are errors. A cut in the instant between the look and the write is not seen.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::ImageFile;

/// The length below which a file never falls; a clone is of the same file. None at first.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownLen(Arc<AtomicU64>);

impl KnownLen {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The file reaches this far.
    #[inline]
    pub(crate) fn reaches(&self, len: u64) {
        if len > self.get() {
            self.0.fetch_max(len, Ordering::Relaxed);
        }
    }

    /// The file was given this length.
    pub(crate) fn set(&self, len: u64) {
        self.0.store(len, Ordering::Relaxed);
    }
}

impl ImageFile {
    /// Whether another program has cut off a part of the file. A block device is never cut off.
    pub fn is_cut_short(&self) -> bool {
        let known = self.known_len().get();
        if known == 0 || self.device_len().is_some() {
            return false;
        }
        // What the client of a network file system has cached must do, unless it looks bad.
        let cached = statx(self, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE);
        cached.is_ok_and(|found| found.stx_size < known) && self.current_len().is_ok_and(|len| len < known)
    }
}

#[cfg(test)]
mod test {
    use disk::{Allocation, FileOffset};

    use crate::{Cache, ImageFile, OpenOptions};

    #[test]
    fn only_another_program_cuts_a_file_short() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 4096]).unwrap();
        let mut image =
            ImageFile::open(&path, OpenOptions { write: true, cache: Cache::Writeback, lock: true }).unwrap();
        let other = std::fs::File::options().write(true).open(&path).unwrap();
        assert!(!image.is_cut_short());
        image.write_at(FileOffset(4096), &[7]).unwrap();
        other.set_len(4096).unwrap();
        assert!(image.is_cut_short());
        assert_eq!(image.allocated(FileOffset(4096), 1), Allocation::Data(1));
        other.set_len(4097).unwrap();
        assert!(!image.is_cut_short());
        image.set_len(100).unwrap();
        assert!(!image.is_cut_short());
    }
}
