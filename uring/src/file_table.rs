//! The files of an engine, by number.
//!
//! It performs no I/O. Invariant: a number stands for one file from [`FileTable::add`] to [`FileTable::remove`], and
//! is given to another one only after that.

use disk::FileId;

use crate::{EngineError, ImageFile};

/// The most files at once: a chain of the greatest length that a disk may have, and a few that come and go.
pub const FILES_MAX: usize = 64;

/// Places for files.
#[derive(Debug, Default)]
pub(crate) struct FileTable {
    places: Vec<Option<ImageFile>>,
}

impl FileTable {
    /// `files` get the numbers from 0 on.
    pub(crate) fn new(files: Vec<ImageFile>) -> Result<FileTable, EngineError> {
        let mut places: Vec<Option<ImageFile>> = files.into_iter().map(Some).collect();
        if places.len() > FILES_MAX {
            return Err(EngineError::TooManyFiles);
        }
        places.resize_with(FILES_MAX, || None);
        Ok(FileTable { places })
    }

    /// The files that there are.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (FileId, &ImageFile)> {
        (0..).map(FileId).zip(&self.places).filter_map(|(id, place)| Some((id, place.as_ref()?)))
    }

    pub(crate) fn get(&self, id: FileId) -> Option<&ImageFile> {
        self.places.get(usize::from(id.0))?.as_ref()
    }

    /// The lowest number that stands for nothing.
    pub(crate) fn vacancy(&self) -> Result<FileId, EngineError> {
        let free = (0..).map(FileId).zip(&self.places).find(|(_, place)| place.is_none());
        free.map(|(id, _)| id).ok_or(EngineError::TooManyFiles)
    }

    /// Puts `file` in the place of `id`; what was there comes out.
    pub(crate) fn put(&mut self, id: FileId, file: Option<ImageFile>) -> Option<ImageFile> {
        let place = self.places.get_mut(usize::from(id.0))?;
        std::mem::replace(place, file)
    }

    /// Whether `file` may take the place of the one at `id`: operations in flight were cut to that one's measure.
    pub(crate) fn check_replacement(&self, id: FileId, file: &ImageFile) -> Result<(), EngineError> {
        let old = self.get(id).ok_or(EngineError::NoSuchFile(id))?;
        let same = old.alignment() == file.alignment() && old.device_len() == file.device_len();
        if same { Ok(()) } else { Err(EngineError::NotTheSame(id)) }
    }
}
