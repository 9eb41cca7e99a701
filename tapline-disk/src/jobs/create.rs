//! `image create`: an empty image, or an empty child of another.

use std::path::Path;

use disk::vhd;
use disk::{Format, Image};
use serde::Serialize;

use crate::cli::Create;
use crate::failure::{Exit, Failure};
use crate::image_name::{FormatName, ImageName};
use crate::layers::{Layers, to_look_at};
use crate::output;
use crate::size::{Size, readable};
use crate::target::{BLOCK_SIZE, Plan, Target, relative, seconds};

/// What was made.
#[derive(Serialize)]
struct Created<'a> {
    image: String,
    size: u64,
    kind: &'a str,
    parent: Option<String>,
}

/// Runs the job.
pub fn run(create: &Create) -> Result<Exit, Failure> {
    let plan = match create.parent.split_first() {
        Some((parent, below)) => plan_child(create, parent, below)?,
        None => plan_alone(create)?,
    };
    Target::create(&create.image, &plan, false)?.keep()?;
    report(create, &plan)
}

fn report(create: &Create, plan: &Plan) -> Result<Exit, Failure> {
    let kind = match (create.image.format, &plan.kind) {
        (FormatName::Raw, _) => "raw",
        (_, vhd::Kind::Fixed) => "fixed",
        (_, vhd::Kind::Dynamic) => "dynamic",
        (_, vhd::Kind::Differencing(_)) => "differencing",
    };
    let parent = create.parent.first().map(ImageName::to_string);
    if create.json {
        output::json(&Created { image: create.image.to_string(), size: plan.len, kind, parent })?;
    } else {
        let on = parent.map(|parent| format!(" on {parent}")).unwrap_or_default();
        output::print(&format!("created {}: {kind}, {}{on}\n", create.image, readable(plan.len)))?;
    }
    Ok(Exit::Done)
}

fn plan_alone(create: &Create) -> Result<Plan, Failure> {
    let Some(Size(len)) = create.size else {
        return Err(usage(create, "it needs a size").advise("add --size, or --parent to make a child"));
    };
    if create.image.format == FormatName::Raw && create.block_size.is_some() {
        return Err(usage(create, "a raw image has no blocks").advise("leave out --block-size"));
    }
    let kind = if create.fixed { vhd::Kind::Fixed } else { vhd::Kind::Dynamic };
    Ok(Plan { len, kind, block_size: block_size(create)?.unwrap_or(BLOCK_SIZE), allocate: create.fixed })
}

fn plan_child(create: &Create, parent: &ImageName, below: &[ImageName]) -> Result<Plan, Failure> {
    if create.image.format == FormatName::Raw {
        return Err(usage(create, "a raw image cannot stand on a parent").advise("create a vhd image"));
    }
    let layers = open_parent(parent, below)?;
    let Some(image) = layers.images.first() else {
        return Err(Failure::new(format!("open {parent}"), "it has no layer"));
    };
    let len = image.geometry().len;
    if let Some(Size(size)) = create.size.filter(|&Size(size)| size != len) {
        let why = format!("its size of {size} bytes is not that of {parent}, {len} bytes");
        return Err(usage(create, why).advise("leave out --size: a child has the size of its parent"));
    }
    let (uuid, inherited) = match image {
        Image::Vhd(vhd) => (vhd.info().uuid, vhd.info().block_size),
        Image::Raw(_) => ([0; 16], None),
    };
    let block_size = block_size(create)?.or(inherited).unwrap_or(BLOCK_SIZE);
    let (relative, absolute) = parent_paths(create.image.path(), parent.path())?;
    let modified = std::fs::metadata(parent.path()).and_then(|metadata| metadata.modified());
    let modified = modified.map_err(|error| Failure::new(format!("find the time of {parent}"), error))?;
    let recorded = vhd::Parent { uuid, modified: seconds(modified), relative, absolute };
    Ok(Plan { len, kind: vhd::Kind::Differencing(recorded), block_size, allocate: false })
}

/// The parent, locked: nobody changes it under its new child. Its own parents need not be named; those that are
/// must fit.
fn open_parent(parent: &ImageName, below: &[ImageName]) -> Result<Layers, Failure> {
    match below {
        [] => Layers::open_alone(parent, to_look_at(true)),
        below => Layers::open(parent, below, to_look_at(true)),
    }
}

/// How the new image's metadata names the parent: as seen from its own directory, and from the root.
pub fn parent_paths(child: &Path, parent: &Path) -> Result<(String, String), Failure> {
    let failed = |path: &Path, error| Failure::new(format!("find where {} is", path.display()), error);
    let parent = parent.canonicalize().map_err(|error| failed(parent, error))?;
    let directory = child.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = directory.canonicalize().map_err(|error| failed(directory, error))?;
    let relative = relative(&directory.join("child"), &parent);
    match (relative.to_str(), parent.to_str()) {
        (Some(relative), Some(absolute)) => Ok((relative.to_owned(), absolute.to_owned())),
        _ => Err(Failure::new(
            format!("record the parent {}", parent.display()),
            "its path is not UTF-8, which a VHD's parent locator must be",
        )),
    }
}

fn block_size(create: &Create) -> Result<Option<u32>, Failure> {
    let Some(Size(size)) = create.block_size else { return Ok(None) };
    let narrow = u32::try_from(size).map(Some);
    narrow.map_err(|_| usage(create, "a block of a VHD has at most 16 MiB").advise("2M is what all others write"))
}

fn usage(create: &Create, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::new(format!("create {}", create.image), why).exit_as(Exit::Usage)
}
