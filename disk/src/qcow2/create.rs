//! Lays out a new qcow2 file, version 3.
//!
//! Header, refcount table, one refcount block, L1 table, each at a cluster of its own and sized for the full disk. All
//! that another program must find in one piece (the parent's name excepted) is in the first sector.

use zerocopy::{FromZeros, IntoBytes};

use super::decompress::Compression;
use super::header::{Extension, Header, known_name};
use super::info::{backing_name, record_parent};
use super::layout::{
    BACKING_NAME_MAX, COMPRESSION_TYPE, EXTENSION_FEATURE_NAMES, L1_BYTES_MAX, LEN_MAX, MAGIC, PAGE,
    REFCOUNT_TABLE_BYTES_MAX, RawFeatureName, RawHeader, SECTOR, index, length, set_entry,
};
use crate::size::in_32_bits;
use crate::{Creation, FileOffset, ImageError, ImageErrorKind, Link, MetaWrite};

/// Bytes in a cluster by default, as in other programs.
pub const CLUSTER_SIZE: u32 = 64 << 10;
/// Where a new image has the name of its parent.
const NAME_AT: u64 = 1024;

/// A qcow2 image to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Virtual size in bytes: whole sectors, at most 1 PiB.
    pub len: u64,
    /// Bytes in a cluster: a power of two from 64 KiB to 2 MiB.
    pub cluster_size: u32,
    /// The new image's identity.
    pub uuid: [u8; 16],
    /// The parent on which it is based, if any.
    pub parent: Option<Link>,
    /// How compressed clusters will be compressed, if it gets any.
    pub compression: Compression,
}

/// Lays out the file of a new image.
pub fn create(spec: &Spec) -> Result<Creation, ImageError> {
    let limits = |what: String| Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
    let cluster = u64::from(spec.cluster_size);
    if !cluster.is_power_of_two() || !(64 << 10..=2 << 20).contains(&cluster) {
        return limits(format!("a cluster size of {cluster} bytes is not a power of two from 64 KiB to 2 MiB"));
    }
    if spec.len == 0 || spec.len % SECTOR != 0 {
        return limits(format!("a virtual size of {} bytes is not a whole number of 512-byte sectors", spec.len));
    }
    let l1_entries = spec.len.div_ceil(cluster * (cluster / 8));
    if spec.len > LEN_MAX || l1_entries * 8 > L1_BYTES_MAX {
        return limits(format!("a virtual size of {} bytes is beyond what such clusters can hold", spec.len));
    }
    let table_len = refcount_table_len(spec.len, cluster);
    if table_len > REFCOUNT_TABLE_BYTES_MAX.max(cluster) {
        return limits(format!("a virtual size of {} bytes needs too large a refcount table", spec.len));
    }
    let block_at = cluster + table_len;
    let l1_at = block_at + cluster;
    let end = l1_at + (l1_entries * 8).next_multiple_of(cluster);
    let mut header = header(spec, l1_entries, l1_at);
    header.raw.refcount_table_at = cluster.into();
    header.raw.refcount_table_clusters = in_32_bits(table_len / cluster, "REFCOUNT_TABLE_BYTES_MAX").into();
    let mut table = vec![0; index(table_len)];
    set_entry(&mut table, 0, block_at);
    let mut block = vec![0; index(cluster)];
    let used = index(end / cluster);
    block.chunks_exact_mut(2).take(used).for_each(|count| count.copy_from_slice(&1u16.to_be_bytes()));
    let l1 = vec![0; index((l1_entries * 8).next_multiple_of(PAGE))];
    let writes = vec![
        MetaWrite { at: FileOffset(cluster), bytes: table },
        MetaWrite { at: FileOffset(block_at), bytes: block },
        MetaWrite { at: FileOffset(l1_at), bytes: l1 },
        MetaWrite { at: FileOffset(0), bytes: first_page(&mut header, spec.parent.as_ref())? },
    ];
    Ok(Creation { len: end, writes })
}

/// Bytes of the file of such an image when this number of its clusters have been written, and this number of L2 tables
/// for them.
pub fn measure(spec: &Spec, clusters: u64, tables: u64) -> Result<u64, ImageError> {
    let cluster = u64::from(spec.cluster_size);
    let used = (create(spec)?.len / cluster).saturating_add(clusters).saturating_add(tables);
    // A new image has one refcount block, in `used`. Each block more counts itself as well.
    let per_block = cluster / 2;
    let more = used.saturating_sub(per_block).div_ceil(per_block - 1);
    Ok(used.saturating_add(more).saturating_mul(cluster))
}

/// Bytes of a refcount table for a disk of `len` bytes, all of it and its tables in use.
fn refcount_table_len(len: u64, cluster: u64) -> u64 {
    let data = len.div_ceil(cluster);
    let l2 = data.div_ceil(cluster / 8);
    let l1 = (l2 * 8).div_ceil(cluster);
    // Refcounts have two bytes. Blocks count themselves, and the table too; one block more is for both.
    let per_block = cluster / 2;
    let blocks = (data + l2 + l1).div_ceil(per_block);
    let blocks = blocks + blocks.div_ceil(per_block) + 1;
    (blocks * 8).next_multiple_of(cluster)
}

fn header(spec: &Spec, l1_entries: u64, l1_at: u64) -> Header {
    let mut raw = RawHeader::new_zeroed();
    raw.magic = MAGIC.into();
    raw.version = 3.into();
    raw.cluster_bits = spec.cluster_size.trailing_zeros().into();
    raw.len = spec.len.into();
    raw.l1_entries = in_32_bits(l1_entries, "L1_BYTES_MAX").into();
    raw.l1_at = l1_at.into();
    raw.refcount_order = 4.into();
    raw.header_len = in_32_bits(length(size_of::<RawHeader>()), "a page").into();
    if spec.compression == Compression::Zstd {
        (raw.compression, raw.incompatible) = (1, COMPRESSION_TYPE.into());
    }
    let names = Extension { kind: EXTENSION_FEATURE_NAMES, data: feature_names() };
    let mut header = Header { raw, extensions: vec![names], extensions_end: SECTOR, backing: Vec::new() };
    record_parent(&mut header, spec.uuid, spec.parent.as_ref());
    header
}

/// Names of the features that an image of ours may have or get ("Feature name table").
fn feature_names() -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, bit) in [(0, 0), (0, 1), (0, 3), (1, 0), (2, 0)] {
        let mut entry = RawFeatureName { kind, bit, name: [0; 46] };
        for (place, &letter) in entry.name.iter_mut().zip(known_name(kind, bit).unwrap_or_default().as_bytes()) {
            *place = letter;
        }
        bytes.extend_from_slice(entry.as_bytes());
    }
    bytes
}

/// The first page of the file: header, extensions, and the parent's name.
fn first_page(header: &mut Header, parent: Option<&Link>) -> Result<Vec<u8>, ImageError> {
    let name = parent.map(backing_name).unwrap_or_default().into_bytes();
    check_name(&name, parent.is_some())?;
    if !name.is_empty() {
        header.raw.backing_at = NAME_AT.into();
        header.raw.backing_len = in_32_bits(length(name.len()), "BACKING_NAME_MAX").into();
    }
    let mut page = header.first_sector()?;
    page.resize(index(NAME_AT), 0);
    page.extend_from_slice(&name);
    page.resize(page.len().next_multiple_of(index(PAGE)), 0);
    header.backing = name;
    debug_assert_eq!(length(page.len()), PAGE, "a name of 1023 bytes fits the first page");
    Ok(page)
}

/// Whether a backing name can be recorded.
pub fn check_name(name: &[u8], wanted: bool) -> Result<(), ImageError> {
    if name.len() > BACKING_NAME_MAX {
        let what = format!("the parent's path of {} bytes is longer than the 1023 that qcow2 can record", name.len());
        return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
    }
    if wanted && name.is_empty() {
        return Err(ImageError::new(ImageErrorKind::OutOfLimits, "a parent without a path cannot be recorded"));
    }
    Ok(())
}
