//! A new file of a verb, and what the verb knows of it.

use disk::FileId;

use crate::oracle::Oracle;

/// A new file.
pub(super) struct New {
    pub(super) file: FileId,
    /// The layers on which it stands.
    pub(super) below: Vec<FileId>,
    /// What a copy is to show.
    pub(super) copied: Option<Oracle>,
    pub(super) is_named_durably: bool,
}

impl New {
    pub(super) fn make_name_durable(&mut self) {
        self.is_named_durably = true;
    }

    pub(super) fn chain(&self) -> Vec<FileId> {
        [&[self.file], self.below.as_slice()].concat()
    }
}
