//! A `merge` that is requested again after a crash at its very end: the sources have already left the chain, and at
//! most their files still exist ([`crate::image::stale_layers`]).
//!
//! Layer numbers refer to different layers in the shorter chain. So a merge is recognized as complete only if the
//! request lists the expected chain, and the disk has that chain without the sources. If there is a layer above the
//! target, its parent was verified when the disk was opened; but the link may be only in the page cache, and is made
//! durable before the files are removed ([`plan::finish_merge`]).

use control::answer::{self, Answer, Merged};
use control::{ImageName, Kind, ask};

use super::driver::Driver;
use super::merge;
use super::work::Work;
use crate::files::Files;
use crate::image::stale_layers::{MergeLayer, StaleLayers};
use crate::process::failure::Failure;

/// The end of a merge, in progress.
#[derive(Debug)]
pub struct Finish {
    asked: ask::Merge,
    sources: Vec<ImageName>,
    driver: Driver,
}

/// Returns what remains to be done of the requested merge; `None` if it has not been done. Fails if the disk has
/// another chain.
pub fn what_is_left(asked: &ask::Merge, work: &Work<'_>) -> Result<Option<Finish>, Failure> {
    let Some(expected) = &asked.expect else { return Ok(None) };
    let layers: Vec<ImageName> =
        (0..work.disk.layers().len()).map(|depth| work.name(depth)).collect::<Result<_, _>>()?;
    if layers == *expected {
        return Ok(None);
    }
    let (mut left, mut sources) = (Vec::new(), Vec::new());
    for (depth, name) in expected.iter().enumerate() {
        let is_source = (asked.from..asked.into).contains(&depth);
        if is_source { &mut sources } else { &mut left }.push(name.clone());
    }
    if layers != left {
        let what = format!("the disk does not have the expected layers: {}", work.names().join(", "));
        return Err(Failure::of(Kind::State, what).advise("list the layers, and request the merge that they need"));
    }
    let target = MergeLayer::in_image(&work.name(asked.from)?, work.image(asked.from)?);
    let (merged, delete, leaf) = (sources.clone(), asked.delete, asked.from == 0);
    let files = work.files.clone();
    let remove = move || finish(&files, &merged, &target, delete, leaf);
    Ok(Some(Finish { asked: asked.clone(), sources, driver: Driver::removing(remove, plan::finish_merge(true)) }))
}

/// Finds the files, and removes them if requested. `leaf`: no layer was based on them.
fn finish(files: &Files, sources: &[ImageName], target: &MergeLayer, delete: bool, leaf: bool) -> Result<(), Failure> {
    let stale = StaleLayers::of(files, sources, target).map_err(|failure| failure.of_kind(Kind::State))?;
    if let Some(gone) =
        sources.iter().find(|&source| leaf && !delete && !stale.layers().any(|layer| layer.name == *source))
    {
        // No layer above shows that it was merged, and its removal was not requested.
        let what = format!("{gone} is gone, and it is unknown whether it was merged before");
        return Err(Failure::of(Kind::State, what).advise("a merge with 'delete' removes it as its last step"));
    }
    if delete { Ok(stale.remove()?) } else { Ok(()) }
}

impl Finish {
    /// Advances the merge; returns the answer at its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        Ok(self.driver.advance(work)?.then(|| self.answer(work).into()))
    }

    /// Returns the same answer as a merge that copied something.
    fn answer(&self, work: &Work<'_>) -> answer::Merge {
        let merged = Merged {
            unused: self.sources.iter().map(ToString::to_string).collect(),
            deleted: self.asked.delete,
            chain: work.names(),
            pause: answer::Pause::default(),
        };
        merge::done(&self.asked, 0, merged)
    }
}
