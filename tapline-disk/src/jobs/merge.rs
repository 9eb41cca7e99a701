//! `image merge`: merges layers of a chain into the one below them.
//!
//! The order is [`plan::merge`], as on a disk that is served. If killed, repeating the command continues. If it was
//! killed at its very end, the layer above is already based on the target, or the image itself is gone and the files
//! below it are empty; the command then does the rest ([`crate::image::stale_layers`]). Files are removed from the
//! topmost down, each durably before the next.

use control::size::readable;
use control::{ImageName, IsDone, Kind};
use disk::{Image, Link};
use plan::{Plan, Step};
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::files::access;
use crate::image::chain::{Chain, Layers};
use crate::image::libvhd::MovedMetadata;
use crate::image::mtime::Time;
use crate::image::parent_link;
use crate::image::plan_layers;
use crate::image::progress::Progress;
use crate::image::redo_log;
use crate::image::stale_layers::{self, StaleLayers};
use crate::image::write_synced;
use crate::jobs::planned;
use crate::jobs::resize;
use crate::jobs::runner::Runner;
use crate::process::failure::{Exit, Failure};
use crate::process::log::say;
use crate::process::output;
use crate::process::signals::Signal;
use arguments::Merge;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Merged {
    /// The image of the resulting chain.
    image: String,
    /// The layers that no longer contain data.
    merged: Vec<String>,
    into: String,
    copied: u64,
    deleted: bool,
}

/// Runs `image merge`.
pub fn run(files: &Files, merge: &Merge) -> Result<Exit, Failure> {
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    let mut chain = Chain::of(files, &merge.image, &merge.parents);
    let Some(target) = chain.names.get(merge.into).copied().filter(|_| merge.from < merge.into) else {
        return Err(no_such_layers(merge, chain.names.len()));
    };
    let sources: Vec<ImageName> =
        chain.names.iter().take(merge.into).skip(merge.from).map(|name| (*name).clone()).collect();
    chain.writable = merge.into + 1;
    // The layer that will be based on the target.
    let above = merge.from.checked_sub(1).and_then(|n| chain.names.get(n).copied());
    let is_done = || above.is_some_and(|above| stale_layers::is_merge_complete(files, above, &sources, target));
    if merge.is_done {
        // A leaf has no child that would show this. If it has no data, it has the contents of the layers below it,
        // though perhaps another size.
        return report_done(merge, is_done() || above.is_none() && are_empty(files, &sources, target)?);
    }
    if is_done() {
        return finish(merge, chain, &sources);
    }
    if is_being_removed(files, merge, &sources, target)? {
        return finish(merge, chain, &sources).map_err(|failure| {
            let image = &merge.image;
            failure.advise(format!("{image} does not exist, and there is no sign that it was merged: check its name"))
        });
    }
    let time = above.map(|above| Time::of(files, above)).transpose()?;
    let prepared = open(merge, &chain)?;
    let plan = plan_of(merge, &chain, &prepared)?;
    let (chain, layers) = (&chain, Some(prepared));
    let mut work = MergeJob { merge, chain, layers, runner: None, stop: &mut stop, copied: 0, time };
    // If a step fails, the steps after the failure leave the chain valid, and the same command continues.
    planned::carry_out(plan, |step| work.step(step, &sources)).inspect_err(|_| work.record_failed_syncs())?;
    report(merge, target, &sources, work.copied)
}

/// Finishes a merge that was killed after the layer above was linked to the target: only the merged files can remain.
/// The chain without them is opened as by any writer, which verifies it, and removes what a killed one has left.
fn finish(merge: &Merge, mut chain: Chain<'_>, sources: &[ImageName]) -> Result<Exit, Failure> {
    chain.names.drain(merge.from..merge.into);
    chain.writable = merge.from + 1;
    let Some(&target) = chain.names.get(merge.from) else { return Err(no_such_layers(merge, chain.names.len())) };
    Runner::new(Layers::open_chain(&chain, access::options(merge.access, true))?, access::engine(merge.access))?
        .flush()?;
    let stale = StaleLayers::of(chain.from, sources, &stale_layers::MergeLayer::of(chain.from, target)?)?;
    if merge.delete {
        stale.remove()?;
    }
    report(merge, target, sources, 0)
}

/// Returns whether the image itself was merged and removed, as the first of the sources. It had no child that would
/// show this; the remaining sources do.
fn is_being_removed(files: &Files, merge: &Merge, sources: &[ImageName], target: &ImageName) -> Result<bool, Failure> {
    let is_gone = |name: &ImageName| !files.is_taken(name.path());
    if merge.from > 0 || !merge.delete || !sources.first().is_some_and(is_gone) {
        return Ok(false);
    }
    if sources.iter().all(is_gone) {
        let gone: Vec<String> = sources.iter().map(ToString::to_string).collect();
        let why = format!("{} does not exist", gone.join(", "));
        return Err(Failure::new(format!("merge into {target}"), why)
            .advise("check the name; if a merge with --delete was killed at its very end, the merge is complete"));
    }
    Ok(true)
}

/// Returns whether all sources exist and contain no data, and the target is as large as they are.
fn are_empty(files: &Files, sources: &[ImageName], target: &ImageName) -> Result<bool, Failure> {
    let target = stale_layers::MergeLayer::of(files, target)?;
    match StaleLayers::of(files, sources, &target) {
        Ok(stale) => {
            Ok(stale.layers().count() == sources.len() && stale.layers().all(|source| source.len <= target.len))
        }
        Err(failure) => {
            say(format_args!("not merged yet: {failure}"));
            Ok(false)
        }
    }
}

fn report_done(merge: &Merge, done: bool) -> Result<Exit, Failure> {
    if merge.json {
        output::json(&IsDone { done })?;
    } else {
        output::print(if done { "the merge is complete\n" } else { "there are layers to merge\n" })?;
    }
    Ok(Exit::Done)
}

fn no_such_layers(merge: &Merge, count: usize) -> Failure {
    let why = format!("the chain has layers 0 to {}, and layers are merged downwards", count - 1);
    Failure::new(format!("merge from {} into {}", merge.from, merge.into), why)
        .advise("0 is the image, 1 its first --parent, and so on: --from must be less than --into")
        .of_kind(Kind::Invalid)
}

/// Opens the chain, which verifies it, for the few metadata changes that are made before the copying.
fn open(merge: &Merge, chain: &Chain<'_>) -> Result<Layers, Failure> {
    Layers::open_chain(chain, OpenOptions { cache: Cache::Writeback, ..access::options(merge.access, true) })
}

/// Plans the merge; fails if the layers cannot be merged.
fn plan_of(merge: &Merge, chain: &Chain<'_>, layers: &Layers) -> Result<Plan, Failure> {
    let named: Vec<_> = chain.names.iter().zip(&layers.images).map(|(&name, image)| (name.clone(), image)).collect();
    plan_layers::merge(&named, merge.from, merge.into, merge.delete)
}

/// A merge in progress. The disk is not used otherwise, so nothing has to be held or reopened.
struct MergeJob<'a> {
    merge: &'a Merge,
    chain: &'a Chain<'a>,
    /// The layers until copying begins: each step is durable when it ends.
    layers: Option<Layers>,
    /// The disk after that.
    runner: Option<Runner>,
    stop: &'a mut Signal,
    copied: u64,
    /// The modification time of the layer above.
    time: Option<Time>,
}

impl MergeJob<'_> {
    fn step(&mut self, step: Step, sources: &[ImageName]) -> Result<(), Failure> {
        match step {
            Step::ForgetParent => self.forget_parent(0),
            Step::ForgetParents => (1..self.merge.into).try_for_each(|depth| self.forget_parent(depth)),
            Step::GrowLayer { depth, .. } | Step::Lengthen { depth, .. } => self.grow(depth, step),
            Step::BeginMerge { from, into } => self.begin(from, into),
            Step::CopyAll => self.copy(),
            Step::HoldDurable | Step::MakeDurable => self.runner.as_mut().map_or(Ok(()), Runner::make_durable),
            Step::CancelMerge => self.runner.as_mut().map_or(Ok(()), Runner::stop_merge),
            Step::EndMerge => self.runner().end_merge(),
            Step::LinkParent { child } => self.link(child),
            Step::RemoveSources => delete(sources),
            // No requests are held, and no file is open for more than one use.
            _ => Ok(()),
        }
    }

    /// Returns a layer, before copying begins.
    fn layer(&mut self, depth: usize) -> (&ImageName, &mut ImageFile, &mut Image) {
        let (Some(name), Some(layers)) = (self.chain.names.get(depth), &mut self.layers) else {
            unreachable!("a merge is prepared before it begins, and has layer {depth}")
        };
        match (layers.files.get_mut(depth), layers.images.get_mut(depth)) {
            (Some(file), Some(image)) => (name, file, image),
            _ => unreachable!("each layer has a file"),
        }
    }

    /// Rewrites the link even if it is already without these fields: a sync of it may have failed, which the page cache
    /// does not show.
    fn forget_parent(&mut self, depth: usize) -> Result<(), Failure> {
        let (name, file, image) = self.layer(depth);
        let Some(link) = image.link() else { return Ok(()) };
        let failed =
            |why: Box<dyn std::error::Error + Send + Sync>| Failure::new(format!("prepare {name} for merging"), why);
        let changing = Link { modified: None, len: None, ..link };
        image.relink(Some(&changing)).map_err(|error| failed(error.into()))?;
        write_synced::flush(file, image).map_err(|error| failed(error.into()))
    }

    /// Records the syncs that failed before the disk was open.
    fn record_failed_syncs(&self) {
        let layers = self.layers.iter().flat_map(|layers| layers.names.iter().zip(&layers.files));
        layers
            .filter(|(_, file)| file.sync_has_failed())
            .for_each(|(name, file)| redo_log::record_failed_sync(self.chain.from, name, file));
    }

    fn grow(&mut self, depth: usize, step: Step) -> Result<(), Failure> {
        let (name, file, image) = self.layer(depth);
        let before = MovedMetadata::of([(name.clone(), &*image)]);
        let mut apply = |step| resize::apply(step, file, image);
        let grown = apply(step).and_then(|()| apply(Step::MakeDurable));
        grown.map_err(|why| Failure::new(format!("prepare {name} for merging"), why))?;
        MovedMetadata::of([(name.clone(), &*image)]).log_new_since(&before);
        Ok(())
    }

    fn begin(&mut self, from: usize, into: usize) -> Result<(), Failure> {
        // This releases their locks.
        self.layers = None;
        let access = &self.merge.access;
        let mut runner =
            Runner::new(Layers::open_chain(self.chain, access::options(*access, true))?, access::engine(*access))?;
        let begun = runner.begin_merge(from, into);
        self.runner = Some(runner);
        begun
    }

    fn runner(&mut self) -> &mut Runner {
        let Some(runner) = &mut self.runner else { unreachable!("the merge has not begun") };
        runner
    }

    fn copy(&mut self) -> Result<(), Failure> {
        let (from, into) = (self.merge.from, self.merge.into);
        let Some(&target) = self.chain.names.get(into) else { unreachable!("a merge has a target") };
        let (Some(runner), stop) = (&mut self.runner, &mut *self.stop) else { unreachable!("the merge has not begun") };
        let mut progress = Progress::new(self.chain.from, "merging", runner.geometry().len);
        let copied = runner.copy_all(from, into, |now| {
            progress.reach(now.done);
            if !stop.take() {
                return Ok(());
            }
            Err(Failure::new(format!("merge into {target}"), "interrupted by a signal").advise(
                "the chain is valid and its contents are unchanged; repeat the command to continue where it stopped",
            ))
        });
        progress.finish();
        self.copied = copied.map_err(|failure| failure.about(target))?;
        Ok(())
    }

    /// Links a child to the target. The modification time of the child is restored, because its own children have
    /// recorded it.
    fn link(&mut self, child: usize) -> Result<(), Failure> {
        let (Some(&above), Some(&target)) = (self.chain.names.get(child), self.chain.names.get(self.merge.into)) else {
            unreachable!("a merge has a target, and layer {child} is above it")
        };
        let from = self.chain.from;
        let Some((image, file)) = self.runner().layer(child + 1) else { unreachable!("the target is a layer") };
        let link = parent_link::record(from, above.path(), target, image, file)?;
        let before = self.runner().behind();
        self.runner().relink(child, Some(&link))?;
        self.runner().make_durable()?;
        self.runner().behind().log_new_since(&before);
        self.time.take().map_or(Ok(()), |time| time.restore())
    }
}

fn delete(sources: &[ImageName]) -> Result<(), Failure> {
    sources.iter().try_for_each(|source| {
        source.paths().try_for_each(stale_layers::remove).map_err(|error| {
            Failure::new(format!("remove {source}"), error).advise("it was merged and no longer holds data")
        })
    })
}

fn report(merge: &Merge, target: &ImageName, sources: &[ImageName], copied: u64) -> Result<Exit, Failure> {
    let image = if merge.from == 0 { target } else { &merge.image };
    let merged = Merged {
        image: image.to_string(),
        merged: sources.iter().map(ImageName::to_string).collect(),
        into: target.to_string(),
        copied,
        deleted: merge.delete,
    };
    if merge.json {
        output::json(&merged)?;
        return Ok(Exit::Done);
    }
    let Merged { image, merged, into, copied, deleted } = &merged;
    let (names, copied) = (merged.join(", "), readable(*copied));
    let gone = if *deleted { "removed" } else { "can be removed (--delete does this)" };
    output::print(&format!(
        "merged {names} into {into}, {copied} copied; the merged files {gone}\n  the image is {image}\n"
    ))?;
    Ok(Exit::Done)
}
