//! The limits of a VBD's disk.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Limits of a disk. What is omitted is not limited; an empty object is no limit at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskLimits {
    /// Requests per second: reads, writes and discards, not flushes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 1_000_000_000)]
    pub iops: Option<u64>,
    /// Reads per second; not more than iops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 1_000_000_000)]
    pub read_iops: Option<u64>,
    /// Writes per second; not more than iops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 10, maximum = 1_000_000_000)]
    pub write_iops: Option<u64>,
    /// Bytes per second that are read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 65_536)]
    pub bandwidth: Option<u64>,
    /// Bytes per second that are read; not more than bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 65_536)]
    pub read_bandwidth: Option<u64>,
    /// Bytes per second that are written; not more than bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 65_536)]
    pub write_bandwidth: Option<u64>,
    /// The burst that an unused disk saves up: the amount that each limit allows in this many milliseconds. 100 by
    /// default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3_600_000)]
    pub burst_ms: Option<u64>,
}
