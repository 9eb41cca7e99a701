//! Files that come while a disk runs, which no disk uses yet.
//!
//! Knows nothing of what is in them, nor of names. Nothing in such a file is durable before it is synced.

use disk::FileId;

use super::SimIo;
use crate::file::SimFile;
use crate::media::Media;

impl SimIo {
    /// A new file, of which nothing is durable, that may be written to.
    pub fn add(&mut self, media: &Media) -> FileId {
        let id = self.storage.add(SimFile::cached(media));
        self.know(id);
        id
    }

    /// Has a new file share all that a reader finds in another. Nothing of that is durable in the new one.
    pub fn share(&mut self, from: FileId, to: FileId) {
        let media = self.file(from).visible().clone();
        *self.storage.file_mut(to) = SimFile::cached(&media);
    }

    /// Makes durable what is in a file that no disk uses.
    pub fn sync_now(&mut self, file: FileId) {
        let file = self.storage.file_mut(file);
        file.synced(file.coverage(false));
    }
}
