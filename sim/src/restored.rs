//! Copies of a disk's files that are restored after its process has died, as from a backup.
//!
//! Knows nothing about the contents. Invariant checked: the log left by the process is not applied to a copy from a
//! time at which everything was in the files, because its records follow a later state.
//!
//! Copies from a time at which something was only in the log are excluded: from the file alone they are
//! indistinguishable from the state that the log follows (decision 0053).
//! the state that the log follows (decision 0053).

use disk::FileId;

use crate::media::Media;
use crate::run::{Sight, Violation};

/// Number of copies kept in a run, taken at times spread over it.
const COPIES: usize = 4;
/// A copy is taken at one of this many possible times.
const EACH: usize = 3;

/// Copies of the files of a run.
#[derive(Default)]
pub struct Copies {
    copies: Vec<Vec<(FileId, Media)>>,
    moments: usize,
}

impl Copies {
    /// Copies the files if this is one of the chosen times.
    pub fn take(&mut self, sight: &Sight<'_>, files: &[FileId]) {
        if sight.io.pending() > 0 || files.iter().any(|file| !sight.logs.is_empty(*file)) {
            return;
        }
        if self.moments % EACH == 0 && self.copies.len() < COPIES {
            let copy = |file: &FileId| (*file, sight.io.file(*file).visible().clone());
            self.copies.push(files.iter().map(copy).collect());
        }
        self.moments += 1;
    }

    /// Replaces the files by each copy, and checks that the logs are not applied to it.
    pub fn put_back(&self, sight: &Sight<'_>) -> Result<(), Violation> {
        // After a failed sync a log belongs to the file whatever its stamp, which may be lost. An empty log is never
        // applied.
        let may_be_used = |file: FileId| !sight.logs.has_failed(file) && !sight.logs.is_empty(file);
        for (file, media) in self.copies.iter().flatten().filter(|(file, _)| may_be_used(*file)) {
            if sight.logs.would_be_applied(*file, &mut media.clone()).map_err(Violation::Open)? {
                return Err(Violation::Believed(*file));
            }
        }
        Ok(())
    }
}
