//! `image rebase` and `image flatten`: an image on other parents, or on none, that shows what it showed.
//!
//! 1. What the present parents show and the new ones do not is copied up, and flushed ([`CopyUp`]). *Killed here:* the
//!    image stands on its old parents and shows the same; the command goes on where it ended.
//! 2. The new parent is recorded. *Killed after:* the image stands on it.

use disk::Format;
use serde::Serialize;
use uring::{Cache, OpenOptions};

use crate::cli::{Flatten, Rebase};
use crate::copy_up::CopyUp;
use crate::failure::{Exit, Failure};
use crate::image_name::ImageName;
use crate::layers::{Chain, FileIdentity, Layers};
use crate::lineage;
use crate::output;
use crate::presence::Presence;
use crate::relink::{Time, relink};
use crate::runner::Runner;
use crate::signals::Signal;
use crate::size::readable;

/// What was done. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Moved {
    image: String,
    parent: Option<String>,
    /// Bytes that had to be written to the image.
    copied: u64,
}

/// Runs `image rebase`.
pub fn run(rebase: &Rebase) -> Result<Exit, Failure> {
    let (name, options) = (&rebase.image, rebase.access.options(true));
    let time = Time::of(name)?;
    let new = open_new(rebase)?;
    let Some((parent, image)) = rebase.onto.first().zip(new.images.first()) else {
        return Err(Failure::new(format!("rebase {name}"), "no new parent is named").exit_as(Exit::Usage));
    };
    let link = lineage::record(name.path(), parent, image)?;
    let len = image.geometry().len;
    let copied = if rebase.record_only {
        let layers = Layers::open_alone(name, OpenOptions { cache: Cache::Writeback, ..options })?;
        check_size(name, &layers, parent, len)?;
        relink(name, Some(&link))?;
        time.put_back()?;
        0
    } else {
        let layers = Layers::open(name, &rebase.parents, options)?;
        check_size(name, &layers, parent, len)?;
        let engine = rebase.access.engine();
        let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
        let mut work = CopyUp {
            image: Runner::new(layers, engine)?,
            presence: Presence::of(name, options)?,
            onto: Some(Runner::new(new, engine)?),
            stop: &mut stop,
            title: "rebasing",
        };
        let copied = work.run()?;
        relink(name, Some(&link))?;
        time.put_back()?;
        copied
    };
    let moved = Moved { image: name.to_string(), parent: Some(parent.to_string()), copied };
    let how = if rebase.record_only { ", only recorded" } else { "" };
    let line = format!("{name} stands on {parent} now{how}, {} copied\n", readable(copied));
    report(rebase.json, &moved, &line)
}

/// Runs `image flatten`.
pub fn flatten(flatten: &Flatten) -> Result<Exit, Failure> {
    let (name, options) = (&flatten.image, flatten.access.options(true));
    let time = Time::of(name)?;
    let layers = Layers::open(name, &flatten.parents, options)?;
    let mut copied = 0;
    if layers.images.len() > 1 {
        let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
        let mut work = CopyUp {
            image: Runner::new(layers, flatten.access.engine())?,
            presence: Presence::of(name, options)?,
            onto: None,
            stop: &mut stop,
            title: "flattening",
        };
        copied = work.run()?;
        relink(name, None)?;
        time.put_back()?;
    }
    let moved = Moved { image: name.to_string(), parent: None, copied };
    report(flatten.json, &moved, &format!("{name} stands on its own, {} copied\n", readable(copied)))
}

/// The new parents. The image itself is none of them.
fn open_new(rebase: &Rebase) -> Result<Layers, Failure> {
    let own = FileIdentity::of(&rebase.image);
    if let Some(loops) = rebase.onto.iter().find(|name| own.is_some() && FileIdentity::of(name) == own) {
        let why = format!("it is the same file as {}: no image is its own parent", rebase.image);
        return Err(Failure::new(format!("rebase {} onto {loops}", rebase.image), why).exit_as(Exit::Usage));
    }
    let accept_changed = rebase.parents.accept_changed_parent;
    let chain = Chain { names: rebase.onto.iter().collect(), accept_changed, writable: 0 };
    Layers::open_chain(&chain, rebase.access.options(false))
}

/// A parent may be smaller than its child, which reads as zero behind it, and never larger.
fn check_size(name: &ImageName, layers: &Layers, parent: &ImageName, parent_len: u64) -> Result<(), Failure> {
    let len = layers.geometry().map_or(0, |geometry| geometry.len);
    if parent_len <= len {
        return Ok(());
    }
    let why = format!("the new parent has {parent_len} bytes, the image only {len}");
    Err(Failure::new(format!("rebase {name} onto {parent}"), why)
        .advise(format!("make the image larger first: tapline image resize {name} --size {parent_len}")))
}

fn report(json: bool, moved: &Moved, line: &str) -> Result<Exit, Failure> {
    match json {
        true => output::json(moved)?,
        false => output::print(line)?,
    }
    Ok(Exit::Done)
}
