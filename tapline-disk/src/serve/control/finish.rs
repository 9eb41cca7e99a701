//! A `merge` that is requested again after a crash at its very end: the sources have already left the chain, and at
//! most their files still exist ([`crate::stale_layers`]).
//!
//! Layer numbers refer to different layers in the shorter chain. So a merge is recognized as complete only if the
//! request lists the expected chain, and the disk has that chain without the sources. If there is a layer above the
//! target, its parent was verified when the disk was opened; but what that layer records may be in the page cache only,
//! and is made durable before the files go ([`plan::finish_merge`]).

use serde_json::{Value, json};

use super::driver::Driver;
use super::protocol;
use super::refusal::{Kind, Refusal};
use super::work::Work;
use crate::image_name::ImageName;
use crate::stale_layers::{MergeLayer, StaleLayers};

/// The end of a merge under way.
#[derive(Debug)]
pub struct Finish {
    asked: protocol::MergeRequest,
    sources: Vec<ImageName>,
    driver: Driver,
}

/// What remains to be done of the requested merge; `None` if it has not been done. Refused if the disk has another
/// chain.
pub fn what_is_left(asked: &protocol::MergeRequest, work: &Work<'_>) -> Result<Option<Finish>, Refusal> {
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
        return Err(Refusal::new(Kind::State, what).advise("list the layers, and request the merge that they need"));
    }
    let target = MergeLayer::in_image(&work.name(asked.from)?, work.image(asked.from)?);
    let (merged, delete, leaf) = (sources.clone(), asked.delete, asked.from == 0);
    let remove = move || finish(&merged, &target, delete, leaf);
    Ok(Some(Finish { asked: asked.clone(), sources, driver: Driver::removing(remove, plan::finish_merge(true)) }))
}

/// Looks for the files, and removes them if that is wanted. `leaf`: nothing stood on them.
fn finish(sources: &[ImageName], target: &MergeLayer, delete: bool, leaf: bool) -> Result<(), Refusal> {
    let stale = StaleLayers::of(sources, target).map_err(|failure| Refusal::from(failure).of_kind(Kind::State))?;
    if let Some(gone) =
        sources.iter().find(|&source| leaf && !delete && !stale.layers().any(|layer| layer.name == *source))
    {
        // No layer above tells that it was merged, and it was not to be removed.
        let what = format!("{gone} is gone, and it is unknown whether it was merged before");
        return Err(Refusal::new(Kind::State, what).advise("a merge with 'delete' removes it as its last step"));
    }
    if delete { Ok(stale.remove()?) } else { Ok(()) }
}

impl Finish {
    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        Ok(self.driver.advance(work)?.then(|| self.answer(work)))
    }

    /// As that of a merge that had something to do.
    fn answer(&self, work: &Work<'_>) -> Value {
        json!({
            "state": "done",
            "from": self.asked.from,
            "into": self.asked.into,
            "copied": 0,
            "unused": self.sources.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "deleted": self.asked.delete,
            "layers": work.names(),
            "pause_us": 0,
            "held_us": 0,
        })
    }
}
