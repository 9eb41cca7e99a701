//! Enlarges the layers of a merge to the size of the topmost of them, before anything is copied.
//!
//! One after the other, from the top, each durably before the next: at every moment none is smaller than the one below
//! it, as a merge requires, including one that is restarted after a kill. A raw target comes last: its size is its
//! file's length.

use disk::{Format, Image};

use super::blocking_task::BlockingTask;
use super::protocol;
use super::refusal::{Kind, Refusal};
use super::work::Work;
use crate::image_name::ImageName;
use crate::jobs::merge::check_layers;

/// Refuses layers that a merge could not take.
pub fn check(asked: &protocol::MergeRequest, work: &Work<'_>) -> Result<(), Refusal> {
    let layers = (asked.from..=asked.into).map(|depth| Ok((work.name(depth)?, work.image(depth)?)));
    let layers: Vec<(ImageName, &Image)> = layers.collect::<Result<_, Refusal>>()?;
    check_layers(&layers).map_err(|failure| Refusal::from(failure).of_kind(Kind::Unsupported))
}

/// Makes the uppermost layer larger that is smaller than the first of them, and is not raw; durable with the next
/// flush. Whether there was one.
pub fn grow_one(asked: &protocol::MergeRequest, work: &mut Work<'_>) -> Result<bool, Refusal> {
    let wanted = len(asked.from, work)?;
    for depth in asked.from..=asked.into {
        if len(depth, work)? < wanted && !matches!(work.image(depth)?, Image::Raw(_)) {
            work.disk.grow_layer(depth, wanted)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the file of a raw target longer, or its data file, in the background, if it is shorter.
pub fn lengthen(
    asked: &protocol::MergeRequest,
    work: &mut Work<'_>,
) -> Result<Option<BlockingTask<Result<(), Refusal>>>, Refusal> {
    let wanted = len(asked.from, work)?;
    // A raw image is as long as its file; one with a data file has grown by now, and the file has not.
    let is_long = matches!(work.image(asked.into)?, Image::Raw(_)) && len(asked.into, work)? >= wanted;
    if is_long || !work.has_flat_data(asked.into)? { Ok(None) } else { work.lengthen(asked.into, wanted) }
}

fn len(depth: usize, work: &Work<'_>) -> Result<u64, Refusal> {
    Ok(work.image(depth)?.geometry().len)
}
