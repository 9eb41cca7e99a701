//! The metadata of a qcow2 image, as printed by `image info`.

use control::size::readable;
use disk::Link;
use disk::qcow2::{Compression, Info};
use serde::Serialize;

use crate::image::uuid;
use crate::process::output::printable;

/// The fields of a qcow2 image. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct Qcow2Fields {
    version: u32,
    /// Present if the image has it: it is our own extension.
    uuid: Option<String>,
    cluster_size: u64,
    refcount_bits: u64,
    /// The method of compressed clusters, if there are any: `deflate` or `zstd`.
    compression: &'static str,
    lazy_refcounts: bool,
    /// Whether the refcounts may be wrong; the next writer then rebuilds them.
    dirty: bool,
    /// Whether the last writer has marked it as damaged.
    corrupt: bool,
    incompatible_features: Vec<String>,
    compatible_features: Vec<String>,
    autoclear_features: Vec<String>,
    /// The name of the external data file in the header.
    data_file: Option<String>,
    /// The number of internal snapshots.
    snapshots: u32,
    bitmaps: Vec<String>,
    bitmaps_valid: bool,
    parent: Option<ParentFields>,
}

/// The image's recorded parent. None of this is ever followed.
#[derive(Serialize)]
struct ParentFields {
    /// The backing file name in the header.
    name: String,
    /// The backing format in the header, as named by QEMU.
    format: Option<String>,
    uuid: Option<String>,
    size: Option<u64>,
    /// Seconds since 1970.
    modified: Option<u64>,
}

/// Returns the fields of an image with this parent link.
pub fn fields(info: &Info, link: Option<&Link>) -> Qcow2Fields {
    let parent = info.backing.as_ref().map(|backing| ParentFields {
        name: backing.name.clone(),
        format: backing.format.clone(),
        uuid: link.and_then(|link| uuid::known(&link.uuid)),
        size: link.and_then(|link| link.len),
        modified: link.and_then(|link| link.modified),
    });
    Qcow2Fields {
        version: info.version,
        uuid: uuid::known(&info.uuid),
        cluster_size: info.cluster_size,
        refcount_bits: 1 << info.refcount_order,
        compression: match info.compression {
            Compression::Deflate => "deflate",
            Compression::Zstd => "zstd",
        },
        lazy_refcounts: info.lazy_refcounts,
        dirty: info.dirty,
        corrupt: info.corrupt,
        incompatible_features: info.incompatible.clone(),
        compatible_features: info.compatible.clone(),
        autoclear_features: info.autoclear.clone(),
        data_file: info.data_file.clone(),
        snapshots: info.snapshots,
        bitmaps: info.bitmaps.clone(),
        bitmaps_valid: info.bitmaps_valid,
        parent,
    }
}

/// Formats the fields for people, one row each.
pub fn rows(qcow2: &Qcow2Fields) -> Vec<(&'static str, String)> {
    let mut rows = vec![("version", qcow2.version.to_string())];
    rows.extend(qcow2.uuid.clone().map(|uuid| ("uuid", uuid)));
    let packed = format!("compressed ones by {}", qcow2.compression);
    rows.push(("clusters", format!("{} each, {packed}", readable(qcow2.cluster_size))));
    rows.push((
        "refcounts",
        format!("{} bits{}", qcow2.refcount_bits, if qcow2.lazy_refcounts { ", lazy" } else { "" }),
    ));
    let features = [
        ("incompatible", &qcow2.incompatible_features),
        ("compatible", &qcow2.compatible_features),
        ("autoclear", &qcow2.autoclear_features),
    ];
    for (name, found) in features.into_iter().filter(|(_, found)| !found.is_empty()) {
        rows.push((name, printable(&found.join(", "))));
    }
    if qcow2.dirty {
        rows.push(("dirty", "yes: it was not closed; the next writer rebuilds its refcounts".to_owned()));
    }
    if qcow2.corrupt {
        rows.push(("corrupt", "yes: the last writer found it damaged".to_owned()));
    }
    if let Some(name) = &qcow2.data_file {
        rows.push(("data file", format!("'{}'", printable(name))));
    }
    if qcow2.snapshots > 0 {
        rows.push(("snapshots", format!("{} inside the image", qcow2.snapshots)));
    }
    if !qcow2.bitmaps.is_empty() {
        let valid = if qcow2.bitmaps_valid { "" } else { ", no longer valid" };
        rows.push(("bitmaps", format!("{}{valid}", printable(&qcow2.bitmaps.join(", ")))));
    }
    if let Some(parent) = &qcow2.parent {
        let format = parent.format.as_ref().map(|format| format!(", format {}", printable(format))).unwrap_or_default();
        let uuid = parent.uuid.as_ref().map(|uuid| format!(" with uuid {uuid}")).unwrap_or_default();
        rows.push(("parent", format!("'{}'{uuid}{format}", printable(&parent.name))));
    }
    rows
}
