//! A copy of a file that shares its blocks, on file systems that support it (XFS, btrfs).
//!
//! The copy is created under a temporary name, synced, and renamed: it exists completely or not at all. There is never
//! a fallback to a real copy.

use std::fs::File;
use std::os::fd::AsFd;

use control::ImageName;
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::beside;
use crate::process::failure::Failure;
use crate::process::log::say;

/// Creates `to`, which must not exist, from `from`, which must not be written in the meantime: the caller holds its
/// lock.
pub fn clone(from: &ImageName, file: &ImageFile, to: &ImageName) -> Result<(), Failure> {
    let tried = || format!("create {to} from {from}");
    if to.path().symlink_metadata().is_ok() {
        return Err(
            Failure::new(tried(), format!("{} already exists", to.path().display())).advise("choose another name")
        );
    }
    let beside = beside(to.path())?;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let mut made = ImageFile::create_new(&beside, options).map_err(Failure::said)?;
    let named = share(file, &mut made, &tried).and_then(|()| {
        // Never over a file that has come in the meantime.
        let renamed = rustix::fs::renameat_with(CWD, &beside, CWD, to.path(), RenameFlags::NOREPLACE);
        renamed.map_err(|error| Failure::new(tried(), std::io::Error::from(error)))
    });
    if named.is_err() {
        if let Err(error) = std::fs::remove_file(&beside) {
            say(format_args!("the unfinished copy {} could not be removed: {error}", beside.display()));
        }
    }
    named?;
    uring::sync_directory(to.path()).map_err(Failure::said)
}

fn share(from: &ImageFile, made: &mut ImageFile, tried: &dyn Fn() -> String) -> Result<(), Failure> {
    let file = File::open(from.path()).map_err(|error| Failure::new(tried(), error))?;
    match rustix::fs::ioctl_ficlone(made.as_fd(), &file) {
        Ok(()) => made.sync().map_err(|error| Failure::new(tried(), error)),
        Err(error @ (Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::XDEV | Errno::NOSYS)) => {
            let why = match error {
                Errno::XDEV => "they are on different file systems, and blocks can only be shared within one",
                _ => "their file system cannot share blocks between files (XFS and btrfs can)",
            };
            Err(Failure::new(tried(), why)
                .advise("create a child instead (--to qcow2:PATH or --to vhd:PATH), or a copy (tapline image convert)"))
        }
        Err(error) => Err(Failure::new(tried(), std::io::Error::from(error))),
    }
}
