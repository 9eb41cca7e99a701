//! Checks that the catalogue's file is still where it was opened: writes to a file that was removed, or is on an
//! unmounted file system, would be lost.

use std::fs;
use std::path::{Path, PathBuf};

use api::{Code, Problem};

use crate::driver::FileNumbers;

/// A file that is open, and its path.
#[derive(Debug)]
pub struct FileLocation {
    path: PathBuf,
    numbers: FileNumbers,
}

impl FileLocation {
    /// Records the location of the file that was just opened at a path.
    pub fn of(path: &Path) -> Result<FileLocation, Problem> {
        let numbers = numbers(path).map_err(|error| Problem::failed(format_args!("examine {}", path.display()), error));
        Ok(FileLocation { path: path.to_owned(), numbers: numbers? })
    }

    /// Refuses if the file is missing or replaced. This may be temporary, until its file system is mounted again.
    pub fn must_be_there(&self) -> Result<(), Problem> {
        if numbers(&self.path).ok() == Some(self.numbers) {
            return Ok(());
        }
        let what = format!(
            "the catalogue is no longer at {}: it was removed or replaced, or its file system was unmounted",
            self.path.display()
        );
        Err(Problem::new(Code::Failed, what).advise(
            "nothing was changed, and disks keep running. Mount its file system again and retry; if the file was \
             removed, stop taplined and see docs/recover.md",
        ))
    }
}

fn numbers(path: &Path) -> std::io::Result<FileNumbers> {
    fs::metadata(path).map(FileNumbers::from)
}
