//! `image create`: creates an empty image, or an empty child of another image.

use control::size::{Size, readable};
use control::{FormatName, ImageName, Kind};
use disk::Format;
use disk::qcow2::Compression;
use plan::Step;
use serde::Serialize;

use crate::files::Files;
use crate::image::chain::{Chain, Layers, metadata_options};
use crate::image::create::{Allocation, Plan, Target, unit_of};
use crate::image::libvhd;
use crate::image::map_of_daemon::Daemon;
use crate::image::parent_link;
use crate::image::remote;
use crate::image::replay_redo;
use crate::jobs::planned;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::Create;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Created<'a> {
    image: String,
    size: u64,
    kind: &'a str,
    parent: Option<String>,
}

/// Runs `image create`.
pub fn run(files: &Files, create: &Create) -> Result<Exit, Failure> {
    check_unit(&create.image, create.block_size, create.cluster_size)?;
    let unit = unit(&create.image, create.block_size.or(create.cluster_size))?;
    let plan = match create.parent.split_first() {
        Some((parent, below)) => {
            // It stays locked until the child exists, so that it does not change meanwhile.
            let layers = open_parent(files, create, parent, below)?;
            let plan = plan_child(&create.image, parent, &layers, create.size.or(create.size_option), unit)?;
            let daemon = create.map_of_daemon.then(Daemon::of_stdin).transpose()?;
            let map = daemon.as_ref().map_or(Ok(None), |daemon| daemon.next_interval(&layers))?;
            create_child(files, &create.image, &plan, create.force)?;
            if let (Some(daemon), Some(map)) = (daemon, map) {
                daemon.records(map.begin_halted(files, create.image.path(), plan.len)?)?;
            }
            plan
        }
        None => {
            let plan = plan_alone(create, unit)?;
            Target::create_anywhere(files, &create.image, &plan, create.force)?.keep()?;
            plan
        }
    };
    libvhd::note_block_size(&create.image, unit);
    report(create, &plan)
}

fn report(create: &Create, plan: &Plan) -> Result<Exit, Failure> {
    let kind = match (create.image.format, &plan.allocation) {
        (FormatName::Raw, _) => "raw",
        (FormatName::Vhd, Allocation::Fixed) => "fixed",
        (FormatName::Vhd, Allocation::Thin) => "dynamic",
        (FormatName::Vhd, Allocation::Child(_)) => "differencing",
        (FormatName::Qcow2, Allocation::Child(_)) => "overlay",
        (FormatName::Qcow2, _) => "thin",
        (FormatName::Vmdk | FormatName::Vhdx | FormatName::Null | FormatName::Model, _) => {
            unreachable!("such images are not created")
        }
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

fn plan_alone(create: &Create, unit: Option<u32>) -> Result<Plan, Failure> {
    let Some(Size(len)) = create.size.or(create.size_option) else {
        return Err(usage(&create.image, "it needs a size").advise("add --size, or --parent to create a child"));
    };
    if len == 0 {
        return Err(usage(&create.image, "a disk cannot have 0 bytes").advise("give its size, as in --size 10G"));
    }
    if create.fixed && create.image.format == FormatName::Qcow2 {
        return Err(usage(&create.image, "a qcow2 image is always thin").advise("omit --fixed, or create a raw image"));
    }
    let allocation = if create.fixed { Allocation::Fixed } else { Allocation::Thin };
    Ok(Plan { len, allocation, unit, compression: Compression::default(), identity: None })
}

/// Creates a child in the order of [`plan::clone`], as on a disk that is served.
pub fn create_child(files: &Files, child: &ImageName, plan: &Plan, force: bool) -> Result<(), Failure> {
    let mut created = None;
    planned::carry_out(plan::clone(0), |step| match (step, &mut created) {
        (Step::CreateChild { .. }, _) => {
            created = Some(Target::begin_anywhere(files, child, plan, force)?);
            Ok(())
        }
        (Step::SyncNew, Some(target)) => target.sync(),
        (Step::NameNew, Some(target)) => target.give_name(),
        (Step::SyncName, Some(target)) => target.sync_name(),
        (Step::RemoveNew, _) => {
            created = None;
            Ok(())
        }
        _ => unreachable!("{step:?} is not a step of a clone"),
    })
}

/// Returns the properties of an empty child of the image `parent`, which is open as `layers`.
pub fn plan_child(
    child: &ImageName,
    parent: &ImageName,
    layers: &Layers,
    size: Option<Size>,
    unit: Option<u32>,
) -> Result<Plan, Failure> {
    if child.format == FormatName::Raw {
        return Err(usage(child, "a raw image cannot have a parent").advise("create a qcow2 or vhd image"));
    }
    remote::refuse_child(child, parent)?;
    let Some((image, file)) = layers.images.first().zip(layers.files.first()) else {
        return Err(Failure::new(format!("open {parent}"), "it has no layer"));
    };
    let parent_len = image.geometry().len;
    let len = size.map_or(parent_len, |Size(size)| size);
    if len < parent_len {
        let why = format!("its size of {len} bytes is smaller than that of {parent}, {parent_len} bytes");
        return Err(usage(child, why).advise("omit --size: a child must be at least as large as its parent"));
    }
    let link = parent_link::record(&layers.from, child.path(), parent, image, file)?;
    let inherited = if child.format == parent.format { unit_of(image) } else { None };
    Ok(Plan {
        len,
        allocation: Allocation::Child(link),
        unit: unit.or(inherited),
        compression: Compression::default(),
        identity: None,
    })
}

/// Opens the parent, locked. Its own parents may be left out; those that are named must fit.
fn open_parent(files: &Files, create: &Create, parent: &ImageName, below: &[ImageName]) -> Result<Layers, Failure> {
    let names = std::iter::once(parent).chain(below).collect();
    match below {
        [] => {
            replay_redo::image(files, parent).and_then(|()| Layers::open_alone(files, parent, metadata_options(true)))
        }
        _ => Layers::open_chain(
            &Chain {
                from: files,
                names,
                accept_changed: create.accept_changed_parent,
                writable: 0,
                command: None,
                served: None,
                settled: true,
            },
            metadata_options(true),
        ),
    }
}

/// Rejects an allocation unit given with another format's option.
pub fn check_unit(image: &ImageName, block: Option<Size>, cluster: Option<Size>) -> Result<(), Failure> {
    match image.format {
        FormatName::Raw if block.is_some() || cluster.is_some() => {
            Err(usage(image, "a raw image has no allocation unit").advise("omit --block-size and --cluster-size"))
        }
        FormatName::Vhd if cluster.is_some() => {
            Err(usage(image, "a VHD has blocks, not clusters").advise("use --block-size"))
        }
        FormatName::Qcow2 if block.is_some() => {
            Err(usage(image, "a qcow2 image has clusters, not blocks").advise("use --cluster-size"))
        }
        _ => Ok(()),
    }
}

/// Converts a requested allocation unit. The format itself checks whether it supports it.
pub fn unit(image: &ImageName, size: Option<Size>) -> Result<Option<u32>, Failure> {
    let Some(Size(size)) = size else { return Ok(None) };
    u32::try_from(size).map(Some).map_err(|_| usage(image, format!("an allocation unit of {size} bytes is too large")))
}

fn usage(image: &ImageName, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::new(format!("create {image}"), why).of_kind(Kind::Invalid)
}
