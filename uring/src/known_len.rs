//! The length that a file is known to have, to detect that another program has truncated it.
//!
//! We shorten an image only with [`ImageFile::set_len`]. So a file that is shorter than when it was opened, or than one
//! of our writes made it, was truncated by another program. Reads of the lost part would return zeroes, and a write
//! beyond the new end would turn it into a hole, indistinguishable from zeroes: both fail instead. A truncation between
//! the check and the write is not detected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::ImageFile;

/// The minimum length of a file, 0 at first. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct KnownLen(Arc<AtomicU64>);

impl KnownLen {
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Records that the file has at least this length.
    #[inline]
    pub(crate) fn reaches(&self, len: u64) {
        if len > self.get() {
            self.0.fetch_max(len, Ordering::Relaxed);
        }
    }

    /// Records that we have set the file to this length.
    pub(crate) fn set(&self, len: u64) {
        self.0.store(len, Ordering::Relaxed);
    }
}

impl ImageFile {
    /// Returns true if another program has truncated the file. Block devices are not checked.
    pub fn is_cut_short(&self) -> bool {
        let known = self.known_len().get();
        if known == 0 || self.device_len().is_some() {
            return false;
        }
        // The length cached by a network file system's client suffices, unless it is too short.
        let cached = statx(self, c"", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE);
        cached.is_ok_and(|found| found.stx_size < known) && self.current_len().is_ok_and(|len| len < known)
    }
}

#[cfg(test)]
mod test {
    use disk::{Allocation, FileOffset};

    use crate::{Cache, ImageFile, OpenOptions};

    #[test]
    fn only_a_truncation_by_another_program_is_detected() {
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
