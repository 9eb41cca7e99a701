//! A description of a qcow2 image, from its header.
//!
//! Knows nothing of clusters. Names of files are shown and never opened.

use super::bitmaps;
use super::decompress::Compression;
use super::header::Header;
use super::layout::{CORRUPT, DIRTY, EXTENSION_IDENTITY, LAZY_REFCOUNTS, RawIdentity, name_sum};
use crate::{FileOffset, Link, Source};
use zerocopy::{FromZeros, IntoBytes};

/// The backing file, as the header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Its name, to be shown to people.
    pub name: String,
    /// Its format in QEMU's words, if recorded.
    pub format: Option<String>,
}

/// The fields of a qcow2's metadata that people ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// 2 or 3.
    pub version: u32,
    /// Virtual size in bytes.
    pub len: u64,
    /// Bytes in a cluster.
    pub cluster_size: u64,
    /// Entries of the L1 table.
    pub l1_entries: u32,
    /// Where the L1 table stands.
    pub l1_at: FileOffset,
    /// Where the refcount table stands.
    pub refcount_table_at: FileOffset,
    /// Bytes of the refcount table.
    pub refcount_table_len: u64,
    /// Bits of a refcount, as a power of two.
    pub refcount_order: u32,
    /// Of compressed clusters.
    pub compression: Compression,
    /// Names of incompatible features in use.
    pub incompatible: Vec<String>,
    /// Names of compatible features in use.
    pub compatible: Vec<String>,
    /// Names of the autoclear bits that are set.
    pub autoclear: Vec<String>,
    /// The refcounts may be wrong: the last writer has not closed the image.
    pub dirty: bool,
    /// Marked as damaged.
    pub corrupt: bool,
    /// Programs may put the update of refcounts off.
    pub lazy_refcounts: bool,
    /// The backing file.
    pub backing: Option<Backing>,
    /// The name of the external data file, if the image has one and names it.
    pub data_file: Option<String>,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Names of the persistent bitmaps.
    pub bitmaps: Vec<String>,
    /// Whether the bitmaps agree with the data.
    pub bitmaps_valid: bool,
    /// The image's identity, from an extension of our own; all zero in images of other programs.
    pub uuid: [u8; 16],
}

impl Info {
    /// Describes the image with this header.
    pub fn of(header: &Header, source: &mut dyn Source) -> Info {
        let raw = &header.raw;
        let incompatible = raw.incompatible.get();
        let (bitmaps, bitmaps_valid) = bitmaps::names(header, source);
        Info {
            version: raw.version.get(),
            len: raw.len.get(),
            cluster_size: header.cluster_size(),
            l1_entries: raw.l1_entries.get(),
            l1_at: FileOffset(raw.l1_at.get()),
            refcount_table_at: FileOffset(raw.refcount_table_at.get()),
            refcount_table_len: header.refcount_table_len(),
            refcount_order: raw.refcount_order.get(),
            compression: if raw.compression == 1 { Compression::Zstd } else { Compression::Deflate },
            incompatible: header.feature_names(0, incompatible),
            compatible: header.feature_names(1, raw.compatible.get()),
            autoclear: header.feature_names(2, raw.autoclear.get()),
            dirty: incompatible & DIRTY != 0,
            corrupt: incompatible & CORRUPT != 0,
            lazy_refcounts: raw.compatible.get() & LAZY_REFCOUNTS != 0,
            backing: (!header.backing.is_empty()).then(|| Backing {
                name: String::from_utf8_lossy(&header.backing).into_owned(),
                format: header.backing_format(),
            }),
            data_file: header.data_file(),
            snapshots: raw.snapshots.get(),
            bitmaps,
            bitmaps_valid,
            uuid: header.identity().map(|identity| identity.uuid).unwrap_or_default(),
        }
    }
}

/// The parent as the header records it.
pub fn link(header: &Header) -> Option<Link> {
    if header.backing.is_empty() {
        return None;
    }
    let name = String::from_utf8_lossy(&header.backing).into_owned();
    let known = header.identity().filter(|identity| {
        identity.flags & RawIdentity::PARENT != 0 && identity.name_sum.get() == name_sum(&header.backing)
    });
    let is_absolute = name.starts_with('/') || has_protocol(&name);
    Some(Link {
        format: header.backing_format().and_then(|format| our_format(&format)),
        uuid: known.map(|identity| identity.parent_uuid).unwrap_or_default(),
        relative: if is_absolute { String::new() } else { name.clone() },
        absolute: if is_absolute { name } else { String::new() },
        len: known.map(|identity| identity.parent_len.get()).filter(|&len| len != 0),
        modified: known
            .filter(|identity| identity.flags & RawIdentity::MODIFIED != 0)
            .map(|identity| identity.parent_modified.get()),
    })
}

/// The backing name that an image gets for `parent`. QEMU would take a relative path with a colon for a protocol.
pub fn backing_name(parent: &Link) -> String {
    match parent.relative.as_str() {
        "" => parent.absolute.clone(),
        name if has_protocol(name) => format!("./{name}"),
        name => name.to_owned(),
    }
}

/// Whether QEMU takes a backing name for a URI, or another name that begins with a protocol.
fn has_protocol(name: &str) -> bool {
    name.split('/').next().is_some_and(|first| first.contains(':'))
}

/// Our extension for an image `uuid` on `parent`.
pub fn identity(uuid: [u8; 16], parent: Option<&Link>) -> Vec<u8> {
    let mut raw = RawIdentity::new_zeroed();
    raw.version = RawIdentity::VERSION;
    raw.uuid = uuid;
    if let Some(parent) = parent {
        raw.flags = RawIdentity::PARENT | if parent.modified.is_some() { RawIdentity::MODIFIED } else { 0 };
        raw.parent_uuid = parent.uuid;
        raw.parent_len = parent.len.unwrap_or(0).into();
        raw.parent_modified = parent.modified.unwrap_or(0).into();
        raw.name_sum = name_sum(backing_name(parent).as_bytes()).into();
    }
    raw.as_bytes().to_vec()
}

/// Gives the header the extension of an image `uuid` on `parent`, and the parent's format.
pub fn record_parent(header: &mut Header, uuid: [u8; 16], parent: Option<&Link>) {
    header.set_extension(EXTENSION_IDENTITY, Some(identity(uuid, parent)));
    let format = parent.and_then(|parent| parent.format).map(|format| qemu_format(format).as_bytes().to_vec());
    header.set_extension(super::layout::EXTENSION_BACKING_FORMAT, format);
}

/// A format in QEMU's words.
fn qemu_format(ours: &str) -> &str {
    if ours == "vhd" { "vpc" } else { ours }
}

/// A format of QEMU in our words.
fn our_format(qemu: &str) -> Option<&'static str> {
    match qemu {
        "raw" => Some("raw"),
        "qcow2" => Some("qcow2"),
        "vpc" => Some("vhd"),
        _ => None,
    }
}
