//! `snapshot` by reflink: a file that shares all blocks with the disk's own at one moment. The disk continues with its
//! file, and there is no chain.
//!
//! The file system makes the copy while the disk is quiesced. The copy is synced and renamed afterwards, while the
//! guest continues ([`plan::copy`]): it exists completely or not at all.

use control::answer::{self, Answer};
use control::ask::Method;
use control::{FormatName, ImageName, Kind};
use disk::Image;

use super::driver::Driver;
use super::work::Work;
use crate::process::failure::Failure;

/// A copy in progress.
#[derive(Debug)]
pub struct Copy {
    to: ImageName,
    driver: Driver,
}

/// Returns whether the disk can be copied to `to` by reflink, as far as can be determined without trying.
pub fn reflink_possible(to: &ImageName, work: &Work<'_>) -> bool {
    let raw = work.image(0).is_ok_and(|image| matches!(image, Image::Raw(_)));
    let file = work.file(0).is_ok_and(|(_, file)| file.device_len().is_none());
    raw && file && to.format == FormatName::Raw
}

impl Copy {
    /// Checks the request and starts the copy.
    pub fn begin(to: ImageName, work: &mut Work<'_>) -> Result<Copy, Failure> {
        if !reflink_possible(&to, work) {
            let what = "only a raw image in a file can be copied by reflink, to another raw file";
            return Err(Failure::of(Kind::Unsupported, what).advise("omit the method, or set it to 'chain'"));
        }
        work.must_be_writable()?;
        Ok(Copy { driver: Driver::making(&to, plan::copy()), to })
    }

    /// Advances the copy; returns the answer at its end, still without the pause.
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
