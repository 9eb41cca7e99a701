//! `image merge`: merges layers of a chain into the one below them.
//!
//! 1. The children of layers that will be written record that their parents are changing, so that a chain left by a
//!    kill can be opened ([`disk::Link::modified`]). *If killed here or later:* repeating the command continues.
//! 2. The merge proper ([`Runner::merge`]): at every moment the chain's contents are unchanged.
//! 3. The layer above the merged ones is linked to the target. *If killed before:* the merged layers hold no data, and
//!    are merged again quickly.
//! 4. The files of the merged layers are removed, if requested, from the topmost down, each durably before the next.
//!    *If killed before:* the same command finds the layer above already based on the target, or the image itself gone
//!    and the files below it empty, and does the rest ([`crate::stale_layers`]).

use disk::{Format, Image, Link};
use serde::Serialize;
use uring::{Cache, OpenOptions};

use crate::cli::Merge;
use crate::failure::{Exit, Failure};
use crate::files;
use crate::image_name::ImageName;
use crate::jobs::resize::grow;
use crate::layers::{Chain, Layers};
use crate::log::say;
use crate::ordered;
use crate::output;
use crate::parent_link;
use crate::progress::Progress;
use crate::relink::{Time, relink};
use crate::runner::Runner;
use crate::signals::Signal;
use crate::size::readable;
use crate::stale_layers::{self, StaleLayers};

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Merged {
    /// The image of the chain as it is now.
    image: String,
    /// The layers that no longer hold data.
    merged: Vec<String>,
    into: String,
    copied: u64,
    deleted: bool,
}

/// The answer to `--is-done`.
#[derive(Serialize)]
struct IsDone {
    done: bool,
}

/// Runs the job.
pub fn run(merge: &Merge) -> Result<Exit, Failure> {
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    let mut chain = Chain::of(&merge.image, &merge.parents);
    let Some(target) = chain.names.get(merge.into).copied().filter(|_| merge.from < merge.into) else {
        return Err(no_such_layers(merge, chain.names.len()));
    };
    let sources: Vec<ImageName> =
        chain.names.iter().take(merge.into).skip(merge.from).map(|name| (*name).clone()).collect();
    chain.writable = merge.into.saturating_add(1);
    // The layer that will get another parent.
    let above = merge.from.checked_sub(1).and_then(|n| chain.names.get(n).copied());
    let is_done = || above.is_some_and(|above| stale_layers::are_all(above, &sources, target));
    if merge.is_done {
        // A leaf has no child that could show this. One without data has the contents of the layers below it, and its
        // own size.
        return tell_whether_done(merge, is_done() || above.is_none() && hold_nothing(&sources, target)?);
    }
    if is_done() {
        return finish(merge, chain, &sources);
    }
    if is_being_removed(merge, &sources, target)? {
        return finish(merge, chain, &sources).map_err(|failure| {
            let image = &merge.image;
            failure.advise(format!("{image} does not exist, and there is no sign that it was merged: check its name"))
        });
    }
    let time = above.map(Time::of).transpose()?;
    prepare(merge, &chain)?;
    let layers = Layers::open_chain(&chain, merge.access.options(true))?;
    let mut runner = Runner::new(layers, merge.access.engine())?;
    let copied = copy(merge, target, &mut runner, &mut stop)?;
    if let Some(above) = above {
        let (image, file) = runner.layer(merge.from).ok_or_else(|| no_such_layers(merge, chain.names.len()))?;
        relink(above, Some(&parent_link::record(above.path(), target, image, file)?))?;
    }
    if let Some(time) = time {
        time.put_back()?;
    }
    if merge.delete {
        delete(&sources)?;
    }
    report(merge, target, &sources, copied)
}

/// The command was killed after the layer above was linked to the target: only the merged files can remain. The chain
/// without them is opened as by any writer, which verifies it, and removes what a killed one has left.
fn finish(merge: &Merge, mut chain: Chain<'_>, sources: &[ImageName]) -> Result<Exit, Failure> {
    chain.names.drain(merge.from..merge.into);
    chain.writable = merge.from.saturating_add(1);
    let Some(&target) = chain.names.get(merge.from) else { return Err(no_such_layers(merge, chain.names.len())) };
    Runner::new(Layers::open_chain(&chain, merge.access.options(true))?, merge.access.engine())?.flush()?;
    let stale = StaleLayers::of(sources, &stale_layers::MergeLayer::of(target)?)?;
    if merge.delete {
        stale.remove()?;
    }
    report(merge, target, sources, 0)
}

/// Whether the image itself was merged and removed, as the first of the sources. It had no child that could show this;
/// the remaining sources do.
fn is_being_removed(merge: &Merge, sources: &[ImageName], target: &ImageName) -> Result<bool, Failure> {
    let is_gone = |name: &ImageName| !files::is_taken(name.path());
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

/// Whether all of the sources exist and hold no data, and the target is as large as they are.
fn hold_nothing(sources: &[ImageName], target: &ImageName) -> Result<bool, Failure> {
    let target = stale_layers::MergeLayer::of(target)?;
    match StaleLayers::of(sources, &target) {
        Ok(stale) => {
            Ok(stale.layers().count() == sources.len() && stale.layers().all(|source| source.len <= target.len))
        }
        Err(failure) => {
            say(format_args!("not merged yet: {failure}"));
            Ok(false)
        }
    }
}

fn tell_whether_done(merge: &Merge, done: bool) -> Result<Exit, Failure> {
    if merge.json {
        output::json(&IsDone { done })?;
    } else {
        output::print(if done { "the merge is complete\n" } else { "there are layers to merge\n" })?;
    }
    Ok(Exit::Done)
}

fn no_such_layers(merge: &Merge, count: usize) -> Failure {
    let why = format!("the chain has layers 0 to {}, and layers are merged downwards", count.saturating_sub(1));
    Failure::new(format!("merge from {} into {}", merge.from, merge.into), why)
        .advise("0 is the image, 1 its first --parent, and so on: --from must be less than --into")
        .exit_as(Exit::Usage)
}

/// Verifies the chain; makes the children of all layers that will be written record that these change; and gives the
/// layers the size of the first of them. None of this changes the chain's contents. From the top, each layer durably
/// before the next: a layer that records its parent's change is changed itself, and none may be smaller than the one
/// below it.
fn prepare(merge: &Merge, chain: &Chain<'_>) -> Result<(), Failure> {
    let options = OpenOptions { cache: Cache::Writeback, ..merge.access.options(true) };
    let mut layers = Layers::open_chain(chain, options)?;
    let len = layers.images.get(merge.from).map_or(0, |image| image.geometry().len);
    let named = chain.names.iter().zip(&layers.images).map(|(&name, image)| (name.clone(), image));
    let merged = merge.into.saturating_sub(merge.from).saturating_add(1);
    check_layers(&named.skip(merge.from).take(merged).collect::<Vec<_>>())?;
    let open = chain.names.iter().zip(layers.files.iter_mut().zip(&mut layers.images)).enumerate();
    for (depth, (name, (file, image))) in open.take(merge.into.saturating_add(1)) {
        let failed =
            |why: Box<dyn std::error::Error + Send + Sync>| Failure::new(format!("prepare {name} for merging"), why);
        // What is forgotten already is written again: a sync of it may have failed, and the page cache does not tell.
        let link = image.link().filter(|_| depth < merge.into);
        if let Some(link) = link {
            let changing = Link { modified: None, len: None, ..link };
            image.relink(Some(&changing)).map_err(|error| failed(error.into()))?;
            ordered::round(file, image).map_err(|error| failed(error.into()))?;
        }
        if depth > merge.from && image.geometry().len < len {
            grow(name, file, image, len).map_err(failed)?;
        }
    }
    Ok(())
}

/// Rejects layers, from the topmost down, that cannot be merged into the last of them. If an upper layer is smaller,
/// growing would expose parent data; internal snapshots of a layer would show the changed contents of the layers below
/// it, and be removed with its file.
pub fn check_layers(layers: &[(ImageName, &Image)]) -> Result<(), Failure> {
    for ((upper, above), (lower, below)) in layers.iter().zip(layers.iter().skip(1)) {
        let (above_len, below_len) = (above.geometry().len, below.geometry().len);
        if below_len > above_len {
            let why = format!("it has {below_len} bytes, of which {upper} above it hides all beyond {above_len}");
            return Err(Failure::new(format!("merge {upper} into {lower}"), why)
                .advise("merge the layers above or below these two, or copy the disk: tapline image convert"));
        }
        if matches!(above, Image::Qcow2(qcow2) if qcow2.info().snapshots > 0) {
            let why = "it has internal snapshots, whose contents would change";
            return Err(Failure::new(format!("merge {upper} into {lower}"), why)
                .advise("delete them, or copy the disk: tapline image convert"));
        }
    }
    Ok(())
}

fn copy(merge: &Merge, target: &ImageName, runner: &mut Runner, stop: &mut Signal) -> Result<u64, Failure> {
    let mut progress = Progress::new("merging", runner.geometry().len);
    let copied = runner.merge(merge.from, merge.into, |now| {
        progress.reach(now.done);
        if !stop.take() {
            return Ok(());
        }
        Err(Failure::new(format!("merge into {target}"), "interrupted by a signal").advise(
            "the chain is valid and its contents are unchanged; repeat the command to continue where it stopped",
        ))
    });
    progress.finish();
    copied.map_err(|failure| failure.about(target))
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
