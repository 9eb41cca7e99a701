//! The metadata of a VHD, as printed by `image info`.

use control::size::readable;
use disk::vhd::{self, DiskType};
use jiff::Timestamp;
use serde::Serialize;

use crate::image::uuid;
use crate::process::output::printable;

/// The fields of a VHD. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct VhdFields {
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

/// The image's recorded parent. None of this is ever followed.
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

/// Returns the fields of an image.
pub fn fields(info: &vhd::Info) -> VhdFields {
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

/// Formats the fields for people, one row each.
pub fn rows(vhd: &VhdFields) -> Vec<(&'static str, String)> {
    let created = i64::try_from(vhd.created).ok().and_then(|created| Timestamp::from_second(created).ok());
    let created = created.map_or_else(|| "an invalid time".into(), |created| created.to_string());
    let creator = format!("{} {}, at {created}", printable(&vhd.creator), vhd.creator_version);
    let mut rows = vec![
        ("kind", vhd.kind.to_owned()),
        ("uuid", vhd.uuid.clone()),
        ("geometry", format!("{} cylinders, {} heads, {} sectors", vhd.cylinders, vhd.heads, vhd.sectors)),
        ("creator", creator),
    ];
    if let Some(block_size) = vhd.block_size {
        let batmap = if vhd.batmap { ", with a batmap" } else { "" };
        let (used, all) = (vhd.blocks_allocated, vhd.blocks);
        rows.push(("blocks", format!("{used} of {all} allocated, {} each{batmap}", readable(block_size.into()))));
    }
    if vhd.hidden {
        rows.push(("hidden", "yes: an inner node of a chain for the Xen tools".to_owned()));
    }
    if vhd.saved {
        rows.push(("saved", "yes: it belongs to a suspended guest".to_owned()));
    }
    if let Some(parent) = &vhd.parent {
        rows.push(("parent", format!("'{}' with uuid {}", printable(&parent.name), parent.uuid)));
        let locator =
            |locator: &LocatorFields| format!("{} {}", printable(&locator.platform), printable(&locator.path));
        rows.extend(parent.locators.iter().map(|found| ("", locator(found))));
    }
    rows
}
