//! The cluster layout of the qcow2 files created here, and the positions of their first tables.

use disk::FileOffset;

use crate::sector::SECTOR;

/// Bytes in a cluster, except in images with subclusters. L2 tables have 256 entries and cover 512 KiB; refcount blocks
/// have 1024 entries.
pub const CLUSTER: u64 = 2048;
/// Sectors in a cluster.
pub const CLUSTER_SECTORS: u64 = CLUSTER / SECTOR;
/// Clusters counted by a refcount block, with two bytes each.
pub const COUNTED: u64 = CLUSTER / 2;
/// Size of a device in bytes: more than any test needs.
pub const DEVICE: u64 = 4 * COUNTED * CLUSTER;
/// Offset of the first refcount block.
pub const BLOCK_AT: FileOffset = FileOffset(2 * CLUSTER);
/// Offset of the L1 table.
pub const L1_AT: FileOffset = FileOffset(3 * CLUSTER);
