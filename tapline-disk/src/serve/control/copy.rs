//! `snapshot` by reflink: a file that shares every block with the disk's own, as of one moment. The disk continues in
//! its file, and there is no chain.
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
