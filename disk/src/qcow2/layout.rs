//! The structures of a qcow2 file, byte for byte: `docs/interop/qcow2.rst` of QEMU ("the specification"; its sections
//! are named where they are obeyed). All numbers are big-endian.
//!
//! Knows nothing of what a value means for an image as a whole.

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A length as an index in memory, and a length in memory as a length.
pub use crate::size::{in_memory as index, on_disk as length};

/// Bytes that storage writes whole or not at all, and the unit of the size of compressed clusters.
pub const SECTOR: u64 = 512;
/// Bytes that metadata is written in, and compressed clusters are read in: sectors of 4 KiB have it so.
pub const PAGE: u64 = 4096;
/// First bytes of the file: "QFI\xfb".
pub const MAGIC: u32 = 0x5146_49fb;
/// Bytes of the header of version 2.
pub const HEADER_LEN_V2: u32 = 72;
/// Bytes of the header of version 3 without additional fields.
pub const HEADER_LEN_V3: u32 = 104;
/// Smallest cluster, as a power of two.
pub const CLUSTER_BITS_MIN: u32 = 9;
/// Largest cluster that other programs take, as a power of two.
pub const CLUSTER_BITS_MAX: u32 = 21;
/// Smallest cluster with subclusters, as a power of two: each has a sector then.
pub const SUBCLUSTERS_BITS_MIN: u32 = 14;
/// Largest order of a refcount: 64 bits.
pub const REFCOUNT_ORDER_MAX: u32 = 6;
/// Bytes of an L1 table, at most: what QEMU takes.
pub const L1_BYTES_MAX: u64 = 32 << 20;
/// Bytes of a refcount table, at most: what QEMU takes.
pub const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
/// Bytes of a backing file's name, at most ("Header", byte 16).
pub const BACKING_NAME_MAX: usize = 1023;
/// Bytes of the name of the backing file's format, at most: what QEMU takes.
pub const BACKING_FORMAT_MAX: usize = 15;
/// Method of encryption: LUKS.
pub const CRYPT_LUKS: u32 = 2;
/// Bytes of the disk, at most: 1 PiB. The map of a disk takes 16 bytes of memory a GiB before anything is known of it.
pub const LEN_MAX: u64 = 1 << 50;
/// Bits of an L1, L2 or refcount table entry that are an offset in the file.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit of L1 and L2 entries: the refcount of what it points to is exactly one.
pub const COPIED: u64 = 1 << 63;
/// Bit of L2 entries: a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit of L2 entries: reads as zero, whatever it points to (version 3).
pub const ZERO: u64 = 1;

/// Incompatible: refcounts may be wrong.
pub const DIRTY: u64 = 1;
/// Incompatible: the image is known to be damaged.
pub const CORRUPT: u64 = 1 << 1;
/// Incompatible: guest data lives in another file.
pub const EXTERNAL_DATA: u64 = 1 << 2;
/// Incompatible: the compression type is in the header.
pub const COMPRESSION_TYPE: u64 = 1 << 3;
/// Incompatible: L2 entries have a bitmap of subclusters.
pub const EXTENDED_L2: u64 = 1 << 4;
/// Compatible: a writer may let the refcounts become stale, with [`DIRTY`] set meanwhile.
pub const LAZY_REFCOUNTS: u64 = 1;
/// Autoclear: the bitmaps extension agrees with the data.
pub const BITMAPS_VALID: u64 = 1;
/// Autoclear: the external data file can be read as a raw image. Not to be set without [`EXTERNAL_DATA`].
pub const RAW_EXTERNAL_DATA: u64 = 1 << 1;

/// Autoclear: the stamp extension is that of the image's state. An unassigned bit of the specification, set only
/// while a process of ours has the image: any other writer clears it, as the specification demands.
pub const STAMP_VALID: u64 = 1 << 63;

/// Header extension: where the list of extensions ends.
pub const EXTENSION_END: u32 = 0;
/// Header extension: the format of the backing file.
pub const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
/// Header extension: where the header of LUKS encryption is. Not to be there without ([`CRYPT_LUKS`]).
pub const EXTENSION_ENCRYPTION: u32 = 0x0537_be77;
/// Header extension: the name of the external data file.
pub const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
/// Header extension: names of feature bits.
pub const EXTENSION_FEATURE_NAMES: u32 = 0x6803_f857;
/// Header extension: persistent dirty bitmaps.
pub const EXTENSION_BITMAPS: u32 = 0x2385_2875;
/// Header extension of our own, "TPLN": see [`RawIdentity`]. Other programs keep it and ignore it.
pub const EXTENSION_IDENTITY: u32 = 0x5450_4c4e;

/// Header extension of our own, "TPLS": a [`Stamp`](crate::Stamp), of no meaning without [`STAMP_VALID`].
pub const EXTENSION_STAMP: u32 = 0x5450_4c53;

/// "Header". What a version 2 lacks is zero, but for `refcount_order`, which is 4 then.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawHeader {
    pub magic: U32,
    pub version: U32,
    pub backing_at: U64,
    pub backing_len: U32,
    pub cluster_bits: U32,
    pub len: U64,
    pub encryption: U32,
    pub l1_entries: U32,
    pub l1_at: U64,
    pub refcount_table_at: U64,
    pub refcount_table_clusters: U32,
    pub snapshots: U32,
    pub snapshots_at: U64,
    pub incompatible: U64,
    pub compatible: U64,
    pub autoclear: U64,
    pub refcount_order: U32,
    pub header_len: U32,
    /// An additional field: 0 is deflate, 1 zstd.
    pub compression: u8,
    pub padding: [u8; 7],
}
const _: () = assert!(size_of::<RawHeader>() == 112);

/// The head of each header extension, whose data is padded to a multiple of 8 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawExtension {
    pub kind: U32,
    pub len: U32,
}
const _: () = assert!(size_of::<RawExtension>() == 8);

/// "Feature name table": one name.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawFeatureName {
    /// 0 incompatible, 1 compatible, 2 autoclear.
    pub kind: u8,
    pub bit: u8,
    pub name: [u8; 46],
}
const _: () = assert!(size_of::<RawFeatureName>() == 48);

/// "Bitmaps extension".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawBitmaps {
    pub count: U32,
    pub reserved: U32,
    pub directory_len: U64,
    pub directory_at: U64,
}
const _: () = assert!(size_of::<RawBitmaps>() == 24);

/// Our own extension: who this image is, and whom it was made on.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
pub struct RawIdentity {
    /// 1.
    pub version: u8,
    /// See [`RawIdentity::PARENT`] and [`RawIdentity::MODIFIED`].
    pub flags: u8,
    pub reserved: [u8; 6],
    pub uuid: [u8; 16],
    pub parent_uuid: [u8; 16],
    /// Bytes of the parent's disk; zero if not known.
    pub parent_len: U64,
    /// Seconds since 1970.
    pub parent_modified: U64,
    /// [`name_sum`] of the backing name. A program that changes the name keeps this extension as it is, and what it
    /// says of the parent is then of another one.
    pub name_sum: U64,
}
const _: () = assert!(size_of::<RawIdentity>() == 64);

impl RawIdentity {
    /// The version that we write and read.
    pub const VERSION: u8 = 1;
    /// Flag: there is a parent, and the fields about it count.
    pub const PARENT: u8 = 1;
    /// Flag: `parent_modified` is known.
    pub const MODIFIED: u8 = 2;
}

/// FNV-1a, 64 bits: tells one backing name from another.
pub fn name_sum(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A big-endian entry of a table; zero behind its end.
pub fn entry(bytes: &[u8], index: usize) -> u64 {
    bytes.chunks_exact(8).nth(index).and_then(<[u8]>::first_chunk).map_or(0, |found| u64::from_be_bytes(*found))
}

/// Sets a big-endian entry of a table.
pub fn set_entry(bytes: &mut [u8], index: usize, value: u64) {
    if let Some(place) = bytes.chunks_exact_mut(8).nth(index) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}
