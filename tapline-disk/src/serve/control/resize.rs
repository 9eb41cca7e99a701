//! `resize`: enlarges the disk and notifies its guest ([`plan::resize`]).
//!
//! A raw file, or a data file, is extended first; other formats grow by a change of their metadata. The answer follows
//! when the new size is durable. If the image has grown and cannot be made durable, the guest is not notified; an
//! extended raw file stays so, with zeroes beyond the disk's end.

use control::Kind;
use control::answer::{self, Answer};
use plan::Step;

use super::driver::Driver;
use super::work::Work;
use crate::image::libvhd::MovedMetadata;
use crate::image::plan_layers;
use crate::process::failure::Failure;

/// A resize in progress.
#[derive(Debug)]
pub struct Resize {
    driver: Driver,
    /// The layers with their metadata behind their blocks at the beginning.
    behind: MovedMetadata,
}

impl Resize {
    /// Checks the request and starts the resize.
    pub fn begin(size: u64, work: &mut Work<'_>) -> Result<Resize, Failure> {
        work.must_be_writable()?;
        let (len, block) = (work.geometry.len, u64::from(work.geometry.block));
        let cannot = |what: String, advice: String| Err(Failure::of(Kind::Unsupported, what).advise(advice));
        if size < len {
            let what = format!("cannot shrink the disk from {len} bytes to {size}: data beyond that would be lost");
            return cannot(what, "copy the data to a smaller disk from inside the guest".into());
        }
        if size % block != 0 {
            let what = format!("{size} bytes is not a multiple of the block size, {block} bytes");
            let next = size.checked_next_multiple_of(block).unwrap_or(len);
            return cannot(what, format!("the next possible size is {next} bytes"));
        }
        let plan = plan_layers::resize(&work.chain()?, size)?;
        Ok(Resize { driver: Driver::new(plan), behind: work.behind() })
    }

    /// Advances the resize; returns the answer at its end, still without the pause.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        let ended = self.driver.advance(work).map_err(|refusal| match self.driver.failed_at() {
            Some(Step::MakeDurable) => may_still_grow(refusal),
            _ => refusal,
        });
        if !ended? {
            return Ok(None);
        }
        work.behind().log_new_since(&self.behind);
        Ok(Some(answer::Resize { size: work.geometry.len, pause: None }.into()))
    }
}

/// Adds to a failure that a later flush may still make the growth durable.
fn may_still_grow(refusal: Failure) -> Failure {
    let what = "the guest still sees the old size; if the image has become durable, the disk has the new size when it is next \
         started";
    refusal.advise(format!("fix the storage and retry: {what}"))
}
