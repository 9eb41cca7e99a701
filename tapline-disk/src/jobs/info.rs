//! `image info`: what an image says of itself, and of the parents that were named with it.

use std::os::unix::fs::MetadataExt;

use disk::vhd::{self, DiskType};
use disk::{Format, Image};
use serde::Serialize;
use uring::ImageFile;

use crate::cli::Info;
use crate::failure::{Exit, Failure};
use crate::image_name::{FormatName, ImageName};
use crate::layers::{Layers, to_look_at};
use crate::output::{self, printable};
use crate::size::readable;
use crate::uuid;

/// One layer. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Layer {
    image: String,
    format: FormatName,
    /// Bytes of the disk.
    size: u64,
    /// Bytes of the file or of the block device, and those of them that take space.
    file_size: u64,
    file_allocated: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    vhd: Option<VhdFields>,
}

#[derive(Serialize)]
struct VhdFields {
    kind: &'static str,
    uuid: String,
    original_size: u64,
    cylinders: u16,
    heads: u8,
    sectors: u8,
    /// Seconds since 1970.
    created: u64,
    creator: String,
    creator_version: String,
    hidden: bool,
    saved: bool,
    block_size: Option<u32>,
    blocks: u64,
    blocks_allocated: u64,
    batmap: bool,
    parent: Option<ParentFields>,
}

/// What the image records of its parent. None of it is ever followed.
#[derive(Serialize)]
struct ParentFields {
    uuid: String,
    name: String,
    modified: u64,
    locators: Vec<LocatorFields>,
}

#[derive(Serialize)]
struct LocatorFields {
    platform: String,
    path: String,
}

/// Runs the job. No lock is taken: what is in use may be looked at too.
pub fn run(info: &Info) -> Result<Exit, Failure> {
    let layers = match info.parents.names.as_slice() {
        [] => Layers::open_alone(&info.image, to_look_at(false))?,
        parents => Layers::open(&info.image, parents, to_look_at(false))?,
    };
    let names = std::iter::once(&info.image).chain(&info.parents.names);
    let described: Result<Vec<Layer>, Failure> = names
        .zip(layers.images.iter().zip(&layers.files))
        .map(|(name, (image, file))| describe(name, image, file))
        .collect();
    let described = described?;
    if info.json {
        output::json(&described)?;
    } else {
        let layers: Vec<String> = described.iter().map(rows).collect();
        output::print(&layers.join("\n"))?;
    }
    Ok(Exit::Done)
}

fn describe(name: &ImageName, image: &Image, file: &ImageFile) -> Result<Layer, Failure> {
    let metadata = std::fs::metadata(name.path()).map_err(|error| Failure::new(format!("examine {name}"), error))?;
    Ok(Layer {
        image: name.to_string(),
        format: name.format,
        size: image.geometry().len,
        // stat(2) knows nothing of what is in a block device, all of which is taken.
        file_size: file.device_len().unwrap_or(metadata.len()),
        // stat(2): in units of 512 bytes, whatever the file system's block.
        file_allocated: file.device_len().unwrap_or(metadata.blocks().saturating_mul(512)),
        vhd: match image {
            Image::Vhd(image) => Some(vhd_fields(image.info())),
            Image::Raw(_) => None,
        },
    })
}

fn vhd_fields(info: &vhd::Info) -> VhdFields {
    let (cylinders, heads, sectors) = info.chs;
    let (major, minor) = info.creator_version;
    VhdFields {
        kind: match info.disk_type {
            DiskType::Fixed => "fixed",
            DiskType::Dynamic => "dynamic",
            DiskType::Differencing => "differencing",
        },
        uuid: uuid::text(&info.uuid),
        original_size: info.original_len,
        cylinders,
        heads,
        sectors,
        created: info.created,
        creator: info.creator.clone(),
        creator_version: format!("{major}.{minor}"),
        hidden: info.hidden,
        saved: info.saved,
        block_size: info.block_size,
        blocks: info.blocks,
        blocks_allocated: info.blocks_allocated,
        batmap: info.batmap,
        parent: parent_fields(info),
    }
}

fn parent_fields(info: &vhd::Info) -> Option<ParentFields> {
    let parent = info.parent.as_ref()?;
    let fields = |locator: &vhd::Locator| LocatorFields { platform: locator.code.clone(), path: locator.path.clone() };
    Some(ParentFields {
        uuid: uuid::text(&parent.uuid),
        name: parent.name.clone(),
        modified: parent.modified,
        locators: parent.locators.iter().map(fields).collect(),
    })
}

/// A layer as people read it, a line for each thing that is known.
fn rows(layer: &Layer) -> String {
    let mut rows = vec![
        ("image", layer.image.clone()),
        ("size", format!("{} ({} bytes)", readable(layer.size), layer.size)),
        ("file", format!("{}, of which {} allocated", readable(layer.file_size), readable(layer.file_allocated))),
    ];
    if let Some(vhd) = &layer.vhd {
        rows.extend(vhd_rows(vhd));
    }
    rows.into_iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}

fn vhd_rows(vhd: &VhdFields) -> Vec<(&'static str, String)> {
    let made_by = format!("{} {}, at {} s since 1970", printable(&vhd.creator), vhd.creator_version, vhd.created);
    let mut rows = vec![
        ("kind", vhd.kind.to_owned()),
        ("uuid", vhd.uuid.clone()),
        ("geometry", format!("{} cylinders, {} heads, {} sectors", vhd.cylinders, vhd.heads, vhd.sectors)),
        ("made by", made_by),
    ];
    if let Some(block_size) = vhd.block_size {
        let batmap = if vhd.batmap { ", with a batmap" } else { "" };
        let (used, all) = (vhd.blocks_allocated, vhd.blocks);
        rows.push(("blocks", format!("{used} of {all} allocated, {} each{batmap}", readable(block_size.into()))));
    }
    if vhd.hidden {
        rows.push(("hidden", "yes: the Xen tools take it for an inner node of a chain".to_owned()));
    }
    if vhd.saved {
        rows.push(("saved", "yes: it belongs to a suspended guest".to_owned()));
    }
    if let Some(parent) = &vhd.parent {
        rows.push(("made on", format!("«{}» with uuid {}", printable(&parent.name), parent.uuid)));
        let locator =
            |locator: &LocatorFields| format!("{} {}", printable(&locator.platform), printable(&locator.path));
        rows.extend(parent.locators.iter().map(|found| ("", locator(found))));
    }
    rows
}
