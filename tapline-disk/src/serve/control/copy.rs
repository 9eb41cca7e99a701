//! `snapshot` by reflink: a file that shares every block with the disk's own, as of one moment. The disk continues in
//! its file, and there is no chain.
//!
//! The file system makes the copy while the disk is quiesced. The copy is synced and renamed afterwards, while the
//! guest continues ([`plan::copy`]): it exists completely or not at all.

use std::os::fd::AsFd;

use control::answer::{self, Answer};
use control::ask::Method;
use control::{FormatName, ImageName, Kind};
use disk::Image;
use rustix::io::Errno;

use super::child::NewFile;
use super::driver::Driver;
use super::work::Work;
use crate::files::Files;
use crate::process::failure::Failure;

/// A copy under way.
#[derive(Debug)]
pub struct Copy {
    to: ImageName,
    driver: Driver,
}

/// Whether the disk can be copied to `to` by reflink, as far as can be seen without trying.
pub fn reflink_possible(to: &ImageName, work: &Work<'_>) -> bool {
    let raw = work.image(0).is_ok_and(|image| matches!(image, Image::Raw(_)));
    let file = work.file(0).is_ok_and(|(_, file)| file.device_len().is_none());
    raw && file && to.format == FormatName::Raw
}

impl Copy {
    /// Begins.
    pub fn begin(to: ImageName, work: &mut Work<'_>) -> Result<Copy, Failure> {
        if !reflink_possible(&to, work) {
            let what = "only a raw image in a file can be copied by reflink, to another raw file";
            return Err(Failure::of(Kind::Unsupported, what).advise("omit the method, or set it to 'chain'"));
        }
        work.must_be_writable()?;
        Ok(Copy { driver: Driver::making(&to, plan::copy()), to })
    }

    /// Goes on; the answer but for the pause, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let answer = answer::Snapshot {
            method: Method::Reflink,
            copy: Some(self.to.to_string()),
            leaf: work.name(0)?.to_string(),
            parent: None,
            layers: work.names(),
            took: None,
            pause: None,
        };
        Ok(Some(answer.into()))
    }
}

/// The new file, on a file system that has shown, if it could be tried, that it can share blocks of the old one's.
pub fn make(files: &Files, from: &ImageName, to: &ImageName) -> Result<NewFile, Failure> {
    let new = NewFile::create(files, to)?;
    // The disk's own file is left alone: sharing its blocks holds up what is written to it.
    let sample = files.sample(from.path());
    match sample.map_err(|error| Failure::failed(format!("test a reflink copy of {from}"), &error))? {
        Some(sample) => share(&sample, new, "copy the disk"),
        None => Ok(new),
    }
}

/// Has the new file share all blocks of another.
pub fn share(from: &impl AsFd, mut to: NewFile, tried: &str) -> Result<NewFile, Failure> {
    let why = match rustix::fs::ioctl_ficlone(to.file_mut().as_fd(), from) {
        Ok(()) => return Ok(to),
        Err(Errno::XDEV) => "they are on different file systems, and blocks can only be shared within one",
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => {
            "their file system cannot share blocks between files (XFS and btrfs can)"
        }
        Err(errno) => return Err(Failure::failed(tried, &errno.into())),
    };
    let refusal = Failure::of(Kind::Unsupported, format!("cannot {tried} by reflink: {why}"));
    Err(refusal.advise("snapshot to vhd:PATH or qcow2:PATH, which creates a chain"))
}
