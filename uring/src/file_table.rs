//! The files of an engine, by id.
//!
//! The only system call it makes on them reads their lengths. Invariant: an id refers to one file from
//! [`FileTable::put`] until that file is removed, and is reused only after that.

use disk::{Action, FileDone, FileId};

use crate::{EngineError, ImageFile};

/// The maximum number of files at once: a chain of the maximum length, and a few temporary ones.
pub const FILES_MAX: usize = 64;

/// A fixed table of file slots.
#[derive(Debug, Default)]
pub(crate) struct FileTable {
    slots: Vec<Option<ImageFile>>,
    /// The files whose lengths were checked in this batch, one bit each.
    checked: u64,
    /// The files that were found truncated.
    truncated: u64,
}

impl FileTable {
    /// Creates a table in which `files` get the ids from 0.
    pub(crate) fn new(files: Vec<ImageFile>) -> Result<FileTable, EngineError> {
        let mut slots: Vec<Option<ImageFile>> = files.into_iter().map(Some).collect();
        if slots.len() > FILES_MAX {
            return Err(EngineError::TooManyFiles);
        }
        slots.resize_with(FILES_MAX, || None);
        Ok(FileTable { slots, checked: 0, truncated: 0 })
    }

    /// Starts a new batch: the length of each file is checked again at its first write.
    #[inline]
    pub(crate) fn begin_batch(&mut self) {
        self.checked = 0;
    }

    /// Returns true for a write to a file that another program has truncated: it would hide the loss.
    #[inline]
    pub(crate) fn refuses(&mut self, (id, is_write): (FileId, bool)) -> bool {
        let bit = 1 << id.0;
        if is_write && self.checked & bit == 0 {
            self.checked |= bit;
            let is_truncated = self.get(id).is_some_and(ImageFile::is_cut_short);
            self.truncated = if is_truncated { self.truncated | bit } else { self.truncated & !bit };
        }
        is_write && self.truncated & bit != 0
    }

    /// Records the length that a file has at least after a successful write.
    #[inline]
    pub(crate) fn note_written(&self, done: Option<&FileDone>) {
        let Some(FileDone { op, result: Ok(()) }) = done else { return };
        let Action::Write { at, from } = &op.action else { return };
        if let Some(file) = self.get(op.file) {
            file.reaches(at.0.saturating_add(u64::try_from(from.len()).unwrap_or(u64::MAX)));
        }
    }

    /// All files in the table.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FileId, &ImageFile)> {
        (0..).map(FileId).zip(&self.slots).filter_map(|(id, slot)| Some((id, slot.as_ref()?)))
    }

    pub(crate) fn get(&self, id: FileId) -> Option<&ImageFile> {
        self.slots.get(usize::from(id.0))?.as_ref()
    }

    /// The lowest unused id.
    pub(crate) fn free_id(&self) -> Result<FileId, EngineError> {
        let free = (0..).map(FileId).zip(&self.slots).find(|(_, slot)| slot.is_none());
        free.map(|(id, _)| id).ok_or(EngineError::TooManyFiles)
    }

    /// Stores `file` at `id` and returns the previous file.
    pub(crate) fn put(&mut self, id: FileId, file: Option<ImageFile>) -> Option<ImageFile> {
        let slot = self.slots.get_mut(usize::from(id.0))?;
        std::mem::replace(slot, file)
    }

    /// Checks that `file` may replace the one at `id`: operations in flight rely on its alignment and size.
    pub(crate) fn check_replacement(&self, id: FileId, file: &ImageFile) -> Result<(), EngineError> {
        let old = self.get(id).ok_or(EngineError::NoSuchFile(id))?;
        let same = old.alignment() == file.alignment() && old.device_len() == file.device_len();
        if same { Ok(()) } else { Err(EngineError::Mismatch(id)) }
    }
}
