//! Copies of a disk's file that share its blocks: what the file system does for a `snapshot` by reflink.

use std::os::fd::AsFd;

use control::{ImageName, Kind};
use rustix::io::Errno;
use uring::ImageFile;

use super::child::Unnamed;
use crate::files::Files;
use crate::process::failure::Failure;

/// The new file, on a file system that has shown, if it could be tried, that it can share blocks of the old one's.
pub fn make(files: &Files, from: &ImageName, to: &ImageName) -> Result<(Unnamed, ImageFile), Failure> {
    let unnamed = Unnamed::create(files, to.path())?;
    let file = unnamed.file()?;
    // The disk's own file is left alone: sharing its blocks holds up what is written to it.
    let sample = files.sample(from.path());
    if let Some(sample) = sample.map_err(|error| Failure::failed(format!("test a reflink copy of {from}"), &error))? {
        share(&sample, &file, "copy the disk")?;
    }
    Ok((unnamed, file))
}

/// Has one file share all blocks of another.
pub fn share(from: &impl AsFd, to: &ImageFile, tried: &str) -> Result<(), Failure> {
    let why = match rustix::fs::ioctl_ficlone(to.as_fd(), from) {
        Ok(()) => return Ok(()),
        Err(Errno::XDEV) => "they are on different file systems, and blocks can only be shared within one",
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => {
            "their file system cannot share blocks between files (XFS and btrfs can)"
        }
        Err(errno) => return Err(Failure::failed(tried, &errno.into())),
    };
    let refusal = Failure::of(Kind::Unsupported, format!("cannot {tried} by reflink: {why}"));
    Err(refusal.advise("snapshot to vhd:PATH or qcow2:PATH, which creates a chain"))
}
