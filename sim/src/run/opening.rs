//! How a chain is opened, after another process or none: which files for writing, and which through their logs.
//!
//! Knows nothing of what is in them. Keeps: who only reads opens nothing for writing.

use disk::{Access, FileId};

use crate::logs::Logs;

/// How a chain is opened.
#[derive(Clone, Copy)]
pub enum Opening<'a> {
    /// The leaf for writing, and those below it that their last process has left something to be written to.
    Served {
        /// By the numbers of their files.
        unsettled: &'a [FileId],
        /// Whether they are only read, as a planted bug has it.
        only_read: bool,
    },
    /// Through the logs of all, by somebody who only reads; `blind`: without, as a planted bug has it.
    ToRead {
        /// Whether nobody looks into the logs.
        blind: bool,
    },
}

impl Opening<'_> {
    /// The leaf for writing, on parents of which nothing is left.
    pub const ALONE: Opening<'static> = Opening::Served { unsettled: &[], only_read: false };

    pub fn access(self, file: FileId, depth: usize) -> Access {
        match self {
            Opening::Served { unsettled, only_read } if depth == 0 || (unsettled.contains(&file) && !only_read) => {
                Access::ReadWrite
            }
            Opening::Served { .. } | Opening::ToRead { .. } => Access::ReadOnly,
        }
    }

    /// Whether a file is opened through its log. That of one that is only read below others has something to say where
    /// a sync of it has failed.
    pub fn reads_log(self, file: FileId, access: Access, logs: &Logs) -> bool {
        match self {
            Opening::Served { unsettled, .. } => {
                access == Access::ReadWrite || logs.has_failed(file) || unsettled.contains(&file)
            }
            Opening::ToRead { blind } => !blind && logs.is_left(file),
        }
    }
}
