//! `resize`: enlarges the disk and notifies its guest ([`plan::resize`]).
//!
//! A raw file, or a data file, is extended first; other formats grow by a change of their metadata. The answer comes
//! when the new size is durable. If the image has grown and cannot be made durable, the guest is not notified of it; a
//! raw file that was extended stays so, with zeroes beyond the disk's end.

use control::Kind;
use control::answer::{self, Answer};
use plan::Step;

use super::driver::Driver;
use super::work::Work;
use crate::image::libvhd::Behind;
use crate::image::plan_layers;
use crate::process::failure::Failure;

/// A resize under way.
#[derive(Debug)]
pub struct Resize {
    driver: Driver,
    /// As it was at the beginning.
    behind: Behind,
}

impl Resize {
    /// Begins.
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

    /// Goes on; the answer but for the pause, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        let ended = self.driver.advance(work).map_err(|refusal| match self.driver.failed_at() {
            Some(Step::MakeDurable) => may_grow_yet(refusal),
            _ => refusal,
        });
        if !ended? {
            return Ok(None);
        }
        work.behind().tell_since(&self.behind);
        Ok(Some(answer::Resize { size: work.geometry.len, pause: None }.into()))
    }
}

/// The image has grown and is not durable: a later round may make it so.
fn may_grow_yet(refusal: Failure) -> Failure {
    let what = "the guest still sees the old size; if the image has become durable, the disk has the new size when it is next \
         started";
    refusal.advise(format!("fix the storage and retry: {what}"))
}
