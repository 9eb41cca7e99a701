//! The new file of a verb.

use disk::FileId;

use crate::oracle::Oracle;

/// A new file and its layers.
pub(super) struct NewFile {
    pub(super) file: FileId,
    /// The layers below it.
    pub(super) below: Vec<FileId>,
    /// The content that a copy must have.
    pub(super) copied: Option<Oracle>,
    pub(super) is_named_durably: bool,
}

impl NewFile {
    pub(super) fn make_name_durable(&mut self) {
        self.is_named_durably = true;
    }

    pub(super) fn chain(&self) -> Vec<FileId> {
        [&[self.file], self.below.as_slice()].concat()
    }
}
