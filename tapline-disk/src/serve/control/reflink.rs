//! Copies of a disk's file that share its blocks, made by the file system for a `snapshot` by reflink.

use std::os::fd::AsFd;

use control::{ImageName, Kind};

use super::child::NewFile;
use crate::files::Files;
use crate::image::reflink::{self, NotShared};
use crate::process::failure::Failure;

/// Creates the new file, and if possible tests that its file system can share blocks of the old one.
pub fn make(files: &Files, from: &ImageName, to: &ImageName) -> Result<NewFile, Failure> {
    let new = NewFile::create(files, to)?;
    // The test does not use the disk's own file, because sharing its blocks would delay writes to it.
    let sample = files.sample(from.path());
    match sample.map_err(|error| Failure::failed(format!("test a reflink copy of {from}"), &error))? {
        Some(sample) => share(&sample, new, "copy the disk"),
        None => Ok(new),
    }
}

/// Makes the new file share all blocks of another.
pub fn share(from: &impl AsFd, mut to: NewFile, tried: &str) -> Result<NewFile, Failure> {
    match reflink::share(from, to.file_mut()) {
        Ok(()) => Ok(to),
        Err(NotShared::Unsupported(why)) => {
            let refusal = Failure::of(Kind::Unsupported, format!("cannot {tried} by reflink: {why}"));
            Err(refusal.advise("snapshot to vhd:PATH or qcow2:PATH, which creates a chain"))
        }
        Err(NotShared::Failed(error)) => Err(Failure::failed(tried, &error)),
    }
}
