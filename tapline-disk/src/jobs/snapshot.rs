//! `image snapshot` and `image clone`: create a new image with the same contents.
//!
//! It is a child that records its parent or, from raw to raw, a file that shares the other's blocks (reflink),
//! depending on the given format. Either is created completely or not at all, in the order of [`plan::clone`] or
//! [`plan::copy`]. A snapshot freezes the image, so no process may have it open; a clone leaves it as it is, and others
//! may read it.

use control::size::readable;
use control::{FormatName, ImageName};
use plan::Step;
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::chain::{Chain, Layers};
use crate::image::create;
use crate::image::reflink::Copy;
use crate::image::replay_redo;
use crate::jobs::create::{create_child, plan_child};
use crate::jobs::planned;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::Snapshot;

/// The command that creates the new image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotVerb {
    /// `image snapshot`: the image becomes the parent, and must not be written any more.
    Snapshot,
    /// `image clone`: the image already is a parent, or is shared.
    Clone,
}

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Made {
    image: String,
    new: String,
    size: u64,
    /// `child` or `reflink`.
    how: &'static str,
}

/// Runs `image snapshot` or `image clone`.
pub fn run(files: &Files, snapshot: &Snapshot, verb: SnapshotVerb) -> Result<Exit, Failure> {
    create::must_differ(files, &snapshot.to, std::iter::once(&snapshot.image).chain(&snapshot.parents.names))?;
    let layers = open(files, snapshot, verb)?;
    let size = layers.geometry().map_or(0, |geometry| geometry.len);
    let how = match (snapshot.image.format, snapshot.to.format, layers.files.first()) {
        (FormatName::Raw, FormatName::Raw, Some(file)) => {
            copy(files, &snapshot.image, file, &snapshot.to)?;
            "reflink"
        }
        _ => {
            let plan = plan_child(&snapshot.to, &snapshot.image, &layers, None, None)?;
            create_child(files, &snapshot.to, &plan, false)?;
            "child"
        }
    };
    let (image, new) = (snapshot.image.to_string(), snapshot.to.to_string());
    report(snapshot, verb, Made { image, new, size, how })
}

/// Creates a copy that shares the image's blocks.
fn copy(files: &Files, from: &ImageName, file: &ImageFile, to: &ImageName) -> Result<(), Failure> {
    let mut created = None;
    planned::carry_out(plan::copy(), |step| match (step, &mut created) {
        (Step::CreateCopy, _) => {
            created = Some(Copy::create(files, from, to)?);
            Ok(())
        }
        // The lock excludes all other users.
        (Step::HoldDurable | Step::Release, _) => Ok(()),
        (Step::ShareBlocks, Some(copy)) => copy.share(file),
        (Step::SyncNew, Some(copy)) => copy.sync(),
        (Step::NameNew, Some(copy)) => copy.give_name(),
        (Step::SyncName, Some(copy)) => copy.sync_name(),
        (Step::RemoveNew, _) => {
            created = None;
            Ok(())
        }
        _ => unreachable!("{step:?} is not a step of a copy"),
    })
}

/// Opens the image, locked until the new one exists. Its own parents may be left out; those that are named must fit.
fn open(files: &Files, snapshot: &Snapshot, verb: SnapshotVerb) -> Result<Layers, Failure> {
    let options = OpenOptions { write: verb == SnapshotVerb::Snapshot, cache: Cache::Writeback, lock: true };
    match snapshot.parents.names.is_empty() {
        true => replay_redo::image(files, &snapshot.image)
            .and_then(|()| Layers::open_alone(files, &snapshot.image, options)),
        false => {
            let chain = Chain { settled: true, ..Chain::of(files, &snapshot.image, &snapshot.parents) };
            Layers::open_chain(&chain, options)
        }
    }
}

fn report(snapshot: &Snapshot, verb: SnapshotVerb, made: Made) -> Result<Exit, Failure> {
    if snapshot.json {
        output::json(&made)?;
        return Ok(Exit::Done);
    }
    let Made { image, new, size, how } = made;
    let size = readable(size);
    let line = match (how, verb) {
        ("reflink", _) => format!("created {new}: {size}, sharing the blocks of {image} (reflink)\n"),
        (_, SnapshotVerb::Snapshot) => {
            format!("created {new}: {size}, a child of {image}, which must no longer be written\n")
        }
        (_, SnapshotVerb::Clone) => format!("created {new}: {size}, a child of {image}\n"),
    };
    let hint = match how {
        "reflink" => String::new(),
        _ => format!("  use it with --parent {}{}\n", snapshot.image, rest(&snapshot.parents.names)),
    };
    output::print(&(line + &hint))?;
    Ok(Exit::Done)
}

fn rest(parents: &[ImageName]) -> String {
    parents.iter().map(|parent| format!(" --parent {parent}")).collect()
}
