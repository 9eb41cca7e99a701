//! The layers of a merge become as large as the uppermost of them, before anything is copied.
//!
//! One after the other, from the top, each durably before the next: at every moment none is smaller than the one below it,
//! which a merge insists on, and so does one that begins again after a kill. A raw target comes last: its size is its
//! file's length.

use std::os::fd::AsFd;

use disk::{Format, Image};

use super::errand::Errand;
use super::protocol;
use super::refusal::{Kind, Refusal};
use super::work::Work;

/// Refuses layers that a merge could not take: what lies behind the end of an upper one would come to light.
pub fn check(asked: protocol::Merge, work: &Work<'_>) -> Result<(), Refusal> {
    for depth in asked.from..asked.into {
        let (above, below) = (len(depth, work)?, len(depth.saturating_add(1), work)?);
        if below > above {
            let (upper, lower) = (work.name(depth)?, work.name(depth.saturating_add(1))?);
            let what = format!("{lower} has {below} bytes, and {upper} above it hides all behind {above} of them");
            return Err(Refusal::new(Kind::Unsupported, what)
                .advise("merge the layers above or below these two, or copy the disk: tapline image convert"));
        }
    }
    Ok(())
}

/// Makes the uppermost layer larger that is smaller than the first of them, and is not raw; durable with the next flush.
/// Whether there was one.
pub fn grow_one(asked: protocol::Merge, work: &mut Work<'_>) -> Result<bool, Refusal> {
    let wanted = len(asked.from, work)?;
    for depth in asked.from..=asked.into {
        if len(depth, work)? < wanted && !matches!(work.image(depth)?, Image::Raw(_)) {
            work.disk.grow_layer(depth, wanted)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes the file of a raw target longer, in the background, if it is shorter.
pub fn lengthen(asked: protocol::Merge, work: &mut Work<'_>) -> Result<Option<Errand<Result<(), Refusal>>>, Refusal> {
    let wanted = len(asked.from, work)?;
    if len(asked.into, work)? >= wanted || !matches!(work.image(asked.into)?, Image::Raw(_)) {
        return Ok(None);
    }
    let (_, file) = work.file(asked.into)?;
    let path = file.path().to_owned();
    let failed = move |error| Refusal::failed(format!("lengthen {}", path.display()), &error);
    let file = file.as_fd().try_clone_to_owned().map(std::fs::File::from).map_err(&failed)?;
    work.send(move || file.set_len(wanted).and_then(|()| file.sync_all()).map_err(failed)).map(Some)
}

fn len(depth: usize, work: &Work<'_>) -> Result<u64, Refusal> {
    Ok(work.image(depth)?.geometry().len)
}
