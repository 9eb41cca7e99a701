//! Whether the catalogue's file is where it was opened: whoever writes into one that has no name any more, or that lies
//! on a file system which was taken away, writes what nobody will find.

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
    /// Of the file that was just opened at a path.
    pub fn of(path: &Path) -> Result<FileLocation, Problem> {
        let numbers = numbers(path).map_err(|error| Problem::failed(format_args!("examine {}", path.display()), error));
        Ok(FileLocation { path: path.to_owned(), numbers: numbers? })
    }

    /// Refuses if there is another file there now, or none. It may come back: its file system is mounted again.
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
