//! A copy of a file that shares its blocks, on file systems that support it (XFS, btrfs).
//!
//! The copy is created under a temporary name, synced, and renamed, each of which is a step of [`plan::copy`]: it
//! exists completely or not at all. There is never a fallback to a real copy.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;

use control::ImageName;
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::beside;
use crate::process::failure::Failure;
use crate::process::log::say;

/// A copy that is removed again unless it gets its name durably.
pub struct Copy<'a> {
    from: &'a ImageName,
    to: &'a ImageName,
    /// Where it is.
    path: PathBuf,
    file: ImageFile,
    kept: bool,
}

impl<'a> Copy<'a> {
    /// An empty file for `to`, which must not exist.
    pub fn create(from: &'a ImageName, to: &'a ImageName) -> Result<Copy<'a>, Failure> {
        if to.path().symlink_metadata().is_ok() {
            let why = format!("{} already exists", to.path().display());
            return Err(Failure::new(tried(from, to), why).advise("choose another name"));
        }
        let path = beside(to.path())?;
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let file = ImageFile::create_new(&path, options).map_err(Failure::said)?;
        Ok(Copy { from, to, path, file, kept: false })
    }

    /// Shares all blocks of the image, which is open as `file` and must not be written in the meantime: the caller
    /// holds its lock.
    pub fn share(&mut self, file: &ImageFile) -> Result<(), Failure> {
        let file = File::open(file.path()).map_err(|error| self.failed(error))?;
        match rustix::fs::ioctl_ficlone(self.file.as_fd(), &file) {
            Ok(()) => Ok(()),
            Err(error @ (Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::XDEV | Errno::NOSYS)) => {
                let why = match error {
                    Errno::XDEV => "they are on different file systems, and blocks can only be shared within one",
                    _ => "their file system cannot share blocks between files (XFS and btrfs can)",
                };
                Err(Failure::new(tried(self.from, self.to), why).advise(
                    "create a child instead (--to qcow2:PATH or --to vhd:PATH), or a copy (tapline image convert)",
                ))
            }
            Err(error) => Err(self.failed(error.into())),
        }
    }

    /// Makes it durable.
    pub fn sync(&mut self) -> Result<(), Failure> {
        self.file.sync().map_err(|error| self.failed(error))
    }

    /// Gives it its name.
    pub fn give_name(&mut self) -> Result<(), Failure> {
        let path = self.to.path();
        // Never over a file that has come in the meantime.
        let renamed = rustix::fs::renameat_with(CWD, &self.path, CWD, path, RenameFlags::NOREPLACE);
        renamed.map_err(|error| self.failed(error.into()))?;
        self.path = path.to_owned();
        Ok(())
    }

    /// Makes durable that it has its name, under which it stays.
    pub fn sync_name(&mut self) -> Result<(), Failure> {
        uring::sync_directory(&self.path).map_err(Failure::said)?;
        self.kept = true;
        Ok(())
    }

    fn failed(&self, error: std::io::Error) -> Failure {
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
        if let Err(error) = std::fs::remove_file(&self.path) {
            say(format_args!("the unfinished copy {} could not be removed: {error}", self.path.display()));
        }
    }
}
