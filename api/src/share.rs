//! How disks share the storage of a repository.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The weight of a disk of which nothing else is said.
pub const SHARE_WEIGHT: u32 = 100;
/// Requests in flight of all disks of a repository, unless another depth is set.
pub const SHARE_DEPTH: u32 = 128;

/// A disk's share of a storage that other disks use too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskShare {
    /// A disk with twice the weight of another one gets twice as much while both use the storage; 100 by default.
    #[schema(minimum = 1, maximum = 10_000)]
    pub weight: u32,
}
