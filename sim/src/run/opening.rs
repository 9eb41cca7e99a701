//! How a chain is opened: which files for writing, and which through their logs.
//!
//! Invariant: a process that only reads opens nothing for writing.

use disk::{Access, FileId};

use crate::logs::Logs;

/// How a chain is opened.
#[derive(Clone, Copy)]
pub enum Opening<'a> {
    /// For writing: the leaf, and layers below it with pending writes of the last process.
    Served {
        /// The files of these layers.
        unsettled: &'a [FileId],
        /// Whether they are opened read-only, as a planted bug does.
        only_read: bool,
    },
    /// For reading, through the logs of all layers.
    ToRead {
        /// Whether the logs are ignored, as a planted bug does.
        blind: bool,
    },
}

impl Opening<'_> {
    /// The leaf for writing, on parents without pending writes.
    pub const ALONE: Opening<'static> = Opening::Served { unsettled: &[], only_read: false };

    pub fn access(self, file: FileId, depth: usize) -> Access {
        match self {
            Opening::Served { unsettled, only_read } if depth == 0 || (unsettled.contains(&file) && !only_read) => {
                Access::ReadWrite
            }
            Opening::Served { .. } | Opening::ToRead { .. } => Access::ReadOnly,
        }
    }

    /// Whether a file is opened through its log. A file that others read as a parent needs its log if its sync has
    /// failed.
    pub fn reads_log(self, file: FileId, access: Access, logs: &Logs) -> bool {
        match self {
            Opening::Served { unsettled, .. } => {
                access == Access::ReadWrite || logs.has_failed(file) || unsettled.contains(&file)
            }
            Opening::ToRead { blind } => !blind && logs.is_left(file),
        }
    }
}
