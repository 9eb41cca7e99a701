//! Files created while a disk runs, not used by any disk yet.
//!
//! Knows nothing about their contents or names. Nothing in such a file is durable before it is synced.

use disk::FileId;

use super::SimIo;
use crate::file::SimFile;
use crate::media::Media;

impl SimIo {
    /// Adds a writable file of which nothing is durable.
    pub fn add(&mut self, media: &Media) -> FileId {
        let id = self.storage.add(SimFile::cached(media));
        self.know(id);
        id
    }

    /// Adds the durable file of a map of changed blocks. A power loss while a sector of it is written may tear that.
    pub fn add_map(&mut self, media: &Media) -> FileId {
        let id = self.add(media);
        self.sync_now(id);
        self.storage.file_mut(id).may_tear();
        id
    }

    /// Shares the visible content of a file with a new one, as a reflink does. It is not durable in the new one.
    pub fn share(&mut self, from: FileId, to: FileId) {
        let media = self.file(from).visible().clone();
        *self.storage.file_mut(to) = SimFile::cached(&media);
    }

    /// Makes a file durable that no disk uses.
    pub fn sync_now(&mut self, file: FileId) {
        let file = self.storage.file_mut(file);
        file.synced(file.coverage(false));
    }
}
