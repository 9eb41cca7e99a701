//! Copies of a disk's files that are put back in their place after its process has died, as from a backup.
//!
//! Knows nothing of what is in the files. Invariant checked: the log that the process has left is of no copy from a
//! moment at which everything was in the files; what it says follows a later state.
//!
//! A copy from a moment at which something was only in the log is left out: from the file alone it cannot be told from
//! the state that the log follows (decision 0053).

use disk::FileId;

use crate::media::Media;
use crate::run::{Sight, Violation};

/// Copies kept of a run, from moments spread over it.
const COPIES: usize = 4;
/// Of so many moments at which a copy can be made, at one it is.
const EACH: usize = 3;

/// Copies of the files of one run.
#[derive(Default)]
pub struct Copies {
    copies: Vec<Vec<(FileId, Media)>>,
    moments: usize,
}

impl Copies {
    /// Copies the files, if this is a moment for it.
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

    /// Puts each copy back in place of the files as they are, and holds it against the logs.
    pub fn put_back(&self, sight: &Sight<'_>) -> Result<(), Violation> {
        // Behind a failed sync a log is of the file whatever stamp that has: the stamp may be among what was lost.
        // An empty log has nothing to be used.
        let may_be_used = |file: FileId| !sight.logs.has_failed(file) && !sight.logs.is_empty(file);
        for (file, media) in self.copies.iter().flatten().filter(|(file, _)| may_be_used(*file)) {
            if sight.logs.believes(*file, &mut media.clone()).map_err(Violation::Open)? {
                return Err(Violation::Believed(*file));
            }
        }
        Ok(())
    }
}
