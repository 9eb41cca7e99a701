//! The clusters of the qcow2 files that are laid out here, and where in a file its first tables stand.

use disk::FileOffset;

use crate::sector::SECTOR;

/// Bytes in a cluster, but for one with subclusters. L2 tables have 256 entries then, and cover 512 KiB; refcount
/// blocks have 1024.
pub const CLUSTER: u64 = 2048;
/// Sectors in a cluster.
pub const CLUSTER_SECTORS: u64 = CLUSTER / SECTOR;
/// Clusters that a refcount block counts: each has two bytes.
pub const COUNTED: u64 = CLUSTER / 2;
/// Bytes of a device: more than anybody needs here.
pub const DEVICE: u64 = 4 * COUNTED * CLUSTER;
/// Where the first refcount block stands.
pub const BLOCK_AT: FileOffset = FileOffset(2 * CLUSTER);
/// Where the L1 table stands.
pub const L1_AT: FileOffset = FileOffset(3 * CLUSTER);
