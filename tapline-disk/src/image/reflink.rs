//! Copies a file by sharing its blocks, on file systems that support it (XFS, btrfs).
//!
//! The copy is created under a temporary name, synced, and renamed; each of these is a step of [`plan::copy`], so the
//! copy exists completely or not at all. There is never a fallback to a real copy.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;

use control::ImageName;
use rustix::io::Errno;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::process::failure::Failure;
use crate::process::log::say;

/// Why two files cannot share blocks.
pub enum NotShared {
    /// The file systems do not support it, for this reason.
    Unsupported(&'static str),
    /// The attempt failed.
    Failed(io::Error),
}

/// Makes `to` share all blocks of `from`.
pub fn share(from: &impl AsFd, to: &impl AsFd) -> Result<(), NotShared> {
    rustix::fs::ioctl_ficlone(to, from).map_err(|errno| match errno {
        Errno::XDEV => {
            NotShared::Unsupported("they are on different file systems, and blocks can only be shared within one")
        }
        Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS => {
            NotShared::Unsupported("their file system cannot share blocks between files (XFS and btrfs can)")
        }
        errno => NotShared::Failed(errno.into()),
    })
}

/// A copy, which is removed when it is dropped unless its name is durable.
pub struct Copy<'a> {
    files: &'a Files,
    from: &'a ImageName,
    to: &'a ImageName,
    /// The current path.
    path: PathBuf,
    file: ImageFile,
    kept: bool,
}

impl<'a> Copy<'a> {
    /// Creates an empty file for `to`, which must not exist.
    pub fn create(files: &'a Files, from: &'a ImageName, to: &'a ImageName) -> Result<Copy<'a>, Failure> {
        if files.is_taken(to.path()) {
            let why = format!("{} already exists", to.path().display());
            return Err(Failure::new(tried(from, to), why).advise("choose another name"));
        }
        let path = files.temporary_path(to.path())?;
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let file = files.create_new(&path, options).map_err(Failure::said)?;
        Ok(Copy { files, from, to, path, file, kept: false })
    }

    /// Shares all blocks of the image, which is open as `file`. It must not be written to meanwhile: the caller holds
    /// its lock.
    pub fn share(&mut self, file: &ImageFile) -> Result<(), Failure> {
        let file = File::open(file.path()).map_err(|error| self.failed(error))?;
        share(&file, &self.file).map_err(|error| match error {
            NotShared::Unsupported(why) => Failure::new(tried(self.from, self.to), why)
                .advise("create a child instead (--to qcow2:PATH or --to vhd:PATH), or a copy (tapline image convert)"),
            NotShared::Failed(error) => self.failed(error),
        })
    }

    /// Makes the contents durable.
    pub fn sync(&mut self) -> Result<(), Failure> {
        self.file.sync().map_err(|error| self.failed(error))
    }

    /// Renames the copy to its final name.
    pub fn give_name(&mut self) -> Result<(), Failure> {
        // This never replaces a file that was created meanwhile.
        self.files.name_new(&self.path, self.to.path()).map_err(Failure::said)?;
        self.path = self.to.path().to_owned();
        Ok(())
    }

    /// Makes the final name durable; the copy is then kept.
    pub fn sync_name(&mut self) -> Result<(), Failure> {
        self.files.sync_directory(&self.path).map_err(Failure::said)?;
        self.kept = true;
        Ok(())
    }

    fn failed(&self, error: io::Error) -> Failure {
        Failure::new(tried(self.from, self.to), error)
    }
}

fn tried(from: &ImageName, to: &ImageName) -> String {
    format!("create {to} from {from}")
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Err(error) = self.files.remove_new(&self.path) {
            say(format_args!("the unfinished copy {} could not be removed: {error}", self.path.display()));
        }
    }
}
