//! `image info`: shows the metadata of an image, and of the parents given with it.

mod foreign_fields;
mod qcow2_fields;
mod vhd_fields;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use control::size::readable;
use control::{FormatName, ImageName, Kind};
use disk::redo::Owed;
use disk::{Format, Image, Link};
use serde::Serialize;
use uring::ImageFile;

use crate::files::Files;
use crate::image::chain::{Layers, metadata_options};
use crate::image::fileless;
use crate::image::parent_link;
use crate::image::redo_log;
use crate::image::uuid;
use crate::process::failure::{Exit, Failure};
use crate::process::output::{self, printable};
use arguments::Info;

use foreign_fields::{VhdxFields, VmdkFields};
use qcow2_fields::Qcow2Fields;
use vhd_fields::VhdFields;

/// One layer. Names and meanings are part of the interface.
#[derive(Serialize)]
struct LayerInfo {
    image: String,
    format: FormatName,
    /// The size of the disk in bytes.
    size: u64,
    /// The size of the file or of the block device, and the allocated part of it, in bytes.
    file_size: u64,
    file_allocated: u64,
    /// Whether the disk has no file and discards what is written.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    stores_nothing: bool,
    /// The data file, if the image has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    data_file: Option<DataFile>,
    /// The number of metadata sectors that the image's last process, which was killed, has left in its redo log. All
    /// fields count them as written.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_sectors: Option<usize>,
    /// The default logical block size of guests, if the image has no parent; layers above it have the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    logical_block_size: Option<u32>,
    /// The identity known to its children, if the format has one.
    uuid: Option<String>,
    /// Whether XenServer's storage manager has marked it as an inner node of a chain, which no guest uses directly.
    hidden: bool,
    /// The parent, with the same fields for all formats.
    parent: Option<Parent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vhd: Option<VhdFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    qcow2: Option<Qcow2Fields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vmdk: Option<VmdkFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    vhdx: Option<VhdxFields>,
}

/// The file that contains an image's data.
#[derive(Serialize)]
struct DataFile {
    file: String,
    file_size: u64,
    file_allocated: u64,
}

/// The image's recorded parent. None of this is ever followed.
#[derive(Serialize)]
struct Parent {
    format: Option<&'static str>,
    uuid: Option<String>,
    /// The recorded paths, relative to the image's directory and absolute.
    relative: Option<String>,
    absolute: Option<String>,
    size: Option<u64>,
    /// Seconds since 1970.
    modified: Option<u64>,
}

impl Parent {
    fn of(name: &ImageName, link: Link) -> Parent {
        let path = |path: String| (!path.is_empty()).then_some(path);
        Parent {
            format: parent_link::format_of(name, &link).map(FormatName::word),
            uuid: uuid::known(&link.uuid),
            relative: path(link.relative),
            absolute: path(link.absolute),
            size: link.len,
            modified: link.modified,
        }
    }
}

/// Runs the job. No lock is needed, so images in use can be inspected too.
pub fn run(files: &Files, info: &Info) -> Result<Exit, Failure> {
    let files = &if info.unknown { files.distrusting() } else { files.clone() };
    let names = || std::iter::once(&info.image).chain(&info.parents.names);
    let layers = open(files, info, names().filter(|name| !name.is_at_server()).map(ImageName::path))?;
    let left = |depth| layers.logs.iter().find(|(of, _)| *of == depth).and_then(|(_, log)| log.owed());
    let described: Result<Vec<LayerInfo>, Failure> = names()
        .zip(layers.images.iter().zip(&layers.files))
        .enumerate()
        .map(|(depth, (name, (image, file)))| describe(name, (image, file), layers.block(), left(depth)))
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

/// Opens the image, and its parents if they are given. A redo log left by a dead process is read. The log of an image
/// in use is not: it changes during the read, and its process will apply it.
fn open<'a>(files: &Files, info: &Info, mut paths: impl Iterator<Item = &'a Path> + Clone) -> Result<Layers, Failure> {
    let open = |lock| match info.parents.names.is_empty() {
        true => Layers::open_alone(files, &info.image, metadata_options(lock)),
        false => Layers::open(files, &info.image, &info.parents, metadata_options(lock)),
    };
    // Locking an image would end a log with a failed sync.
    let has_failed = paths.clone().any(|path| redo_log::has_failed(files, path));
    if !has_failed && paths.any(|path| redo_log::is_left(files, path)) {
        match open(true) {
            Err(failure) if failure.kind() == Kind::InUse => {}
            opened => return opened,
        }
    }
    open(false)
}

fn describe(
    name: &ImageName,
    (image, file): (&Image, &ImageFile),
    block: u32,
    left: Option<&Owed>,
) -> Result<LayerInfo, Failure> {
    let (file_size, file_allocated) = sizes(name, file)?;
    let data_file = match file.data_file() {
        Some(data) => {
            let (file_size, file_allocated) = sizes(name, data)?;
            Some(DataFile { file: data.path().display().to_string(), file_size, file_allocated })
        }
        None => None,
    };
    Ok(LayerInfo {
        image: name.to_string(),
        format: name.format,
        size: image.geometry().len,
        file_size,
        file_allocated,
        stores_nothing: name.format.stores_nothing(),
        data_file,
        left_sectors: left.map(Owed::sectors),
        logical_block_size: image.link().is_none().then_some(block),
        uuid: uuid::known(&image.identity()),
        hidden: matches!(image, Image::Vhd(image) if image.info().hidden),
        parent: image.link().map(|link| Parent::of(name, link)),
        vhd: match image {
            Image::Vhd(image) => Some(vhd_fields::fields(image.info())),
            Image::Raw(_) | Image::Qcow2(_) | Image::Foreign(_) => None,
        },
        qcow2: match image {
            Image::Qcow2(found) => Some(qcow2_fields::fields(found.info(), image.link().as_ref())),
            Image::Raw(_) | Image::Vhd(_) | Image::Foreign(_) => None,
        },
        vmdk: foreign_fields::vmdk(image),
        vhdx: foreign_fields::vhdx(image),
    })
}

/// Returns the size of a file and its allocated part, in bytes.
fn sizes(name: &ImageName, file: &ImageFile) -> Result<(u64, u64), Failure> {
    let metadata = file.metadata().map_err(|error| Failure::new(format!("examine {name}"), error))?;
    Ok(match file.device_len() {
        // stat(2) does not know what a block device contains; all of it counts as allocated.
        Some(len) => (len, len),
        // stat(2) counts in units of 512 bytes, whatever the file system's block size.
        None => (metadata.len(), metadata.blocks().saturating_mul(512)),
    })
}

/// Formats a layer for people, one line per field.
fn rows(layer: &LayerInfo) -> String {
    let mut rows = vec![
        ("image", printable(&layer.image)),
        ("size", format!("{} ({} bytes)", readable(layer.size), layer.size)),
        ("file", format!("{}, of which {} allocated", readable(layer.file_size), readable(layer.file_allocated))),
    ];
    if layer.stores_nothing {
        rows.push(("ATTENTION", fileless::WARNING.to_owned()));
    }
    if let Some(data) = &layer.data_file {
        let (size, allocated) = (readable(data.file_size), readable(data.file_allocated));
        rows.push(("data file", format!("{size}, of which {allocated} allocated")));
    }
    if let Some(sectors) = layer.left_sectors {
        let what = "sectors of metadata, left by its last process, which was killed; the next writer writes them";
        rows.push(("redo log", format!("{sectors} {what}")));
    }
    if let Some(vhd) = &layer.vhd {
        rows.extend(vhd_fields::rows(vhd));
    }
    if let Some(qcow2) = &layer.qcow2 {
        rows.extend(qcow2_fields::rows(qcow2));
    }
    rows.extend(foreign_fields::rows(layer.vmdk.as_ref(), layer.vhdx.as_ref()));
    rows.into_iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect()
}
