//! Statistics of disks: counters, latencies and the requests in flight, as read from their statistics pages.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Name;

/// The last day of a VBD, by minute. Minutes without requests are left out, as is the one in which it was plugged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VbdHistory {
    /// The VBD.
    pub vbd: Uuid,
    /// Seconds of a step: 60.
    pub step: u64,
    /// The steps, the oldest first.
    pub points: Vec<HistoryPoint>,
}

/// A step of a history.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryPoint {
    /// When the step began.
    pub at: Timestamp,
    /// Read requests per second.
    pub reads: u64,
    /// Write requests per second.
    pub writes: u64,
    /// Bytes read per second.
    pub read_bytes: u64,
    /// Bytes written per second.
    pub written_bytes: u64,
    /// The average latency of all requests, in nanoseconds.
    pub mean_ns: u64,
    /// The latency that 99 % of the requests did not exceed, in nanoseconds.
    pub p99_ns: u64,
}

/// The statistics of a plugged VBD. Counters grow as long as it is plugged, also while its process is restarted or
/// upgraded; rates are differences of two readings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatistics {
    /// The VBD.
    pub vbd: Uuid,
    /// Its VM, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The name of the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_name: Option<Name>,
    /// Its position among the disks of its VM, from 0.
    pub position: u8,
    /// The VDI.
    pub vdi: Uuid,
    /// The name of the VDI.
    pub vdi_name: Name,
    /// The repository.
    pub sr: Uuid,
    /// The name of the repository.
    pub sr_name: Name,
    /// When the page was read.
    pub at: Timestamp,
    /// The same on a clock that is never set, in nanoseconds: for differences.
    pub clock_ns: u64,
    /// The process that writes the page.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How many processes have written the page: restarts and upgrades of the process.
    pub processes: u64,
    /// How many requests are in flight.
    pub in_flight: u64,
    /// How long the oldest request has been in flight, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_ns: Option<u64>,
    /// How often the process slept: it is woken up for each.
    pub sleeps: u64,
    /// Looks for more work before sleeping that have found some.
    pub polls_hit: u64,
    /// Looks that have found none.
    pub polls_missed: u64,
    /// Requests that a limit of the disk has held back.
    pub throttled: u64,
    /// For how many nanoseconds it has, in all.
    pub throttled_ns: u64,
    /// Requests that have waited for the disk's share of its storage.
    pub shared: u64,
    /// For how many nanoseconds they have, in all.
    pub shared_ns: u64,
    /// The counters of each kind of request.
    pub operations: Vec<OperationStatistics>,
    /// The requests in flight, the oldest first: 64 of them at most.
    pub requests: Vec<RequestInFlight>,
    /// The layer above: the disk as the guest's kernel counts it. Present if layers were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest: Option<GuestLayer>,
    /// The layer beneath: the host's block device that the image is on. Present if layers were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host: Option<HostLayer>,
}

/// A guest's figures of a disk. They are not verified: a guest may send anything.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GuestLayer {
    /// Why nothing is known; `device` is missing then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// The device that has the disk's serial number in the guest. Its clock is the guest's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceStatistics>,
}

/// The host's device beneath a disk. Others use it as well, so it is no part of a sum of disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostLayer {
    /// Why nothing is known, as the kind of file system that has no device; `devices` is empty then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// The device beneath the image; if it is a partition, then the whole disk as well.
    pub devices: Vec<DeviceStatistics>,
    /// How many plugged disks of this daemon are on it, this one included.
    pub shared_by: u64,
}

/// A Linux kernel's counters for a block device (/proc/diskstats). Its times are in milliseconds, of 32 bits, and those
/// of requests that have ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DeviceStatistics {
    /// The name of the device in that kernel.
    pub name: String,
    /// When it was counted, in nanoseconds on a clock of that kernel that is never set: for differences.
    pub clock_ns: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// How long there was at least one.
    pub busy_ms: u64,
    /// The sum of all durations. Its growth in a second, divided by 1000, is the average number of requests.
    pub weighted_ms: u64,
    /// Reads.
    pub read: DeviceOperations,
    /// Writes.
    pub write: DeviceOperations,
    /// Discards.
    pub discard: DeviceOperations,
    /// Flushes, which have no size.
    pub flush: DeviceOperations,
}

/// Completed requests of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceOperations {
    /// Requests.
    pub count: u64,
    /// Requests that were merged into one of them and are not counted.
    pub merged: u64,
    /// Bytes.
    pub size: u64,
    /// The sum of their durations.
    pub time_ms: u64,
}

/// The counters of a kind of request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct OperationStatistics {
    /// The kind.
    pub operation: Operation,
    /// Requests that were answered.
    pub count: u64,
    /// Bytes of those.
    pub size: u64,
    /// Those that failed.
    pub errors: u64,
    /// Those that took several operations of the storage in turn.
    pub split: u64,
    /// The longest of all, in nanoseconds.
    pub longest_ns: u64,
    /// How many are in flight.
    pub in_flight: u64,
    /// How long the oldest of them has been in flight, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oldest_ns: Option<u64>,
    /// The sums of what they spent in each stage, in nanoseconds. The growth of a sum in a second, divided by 10⁹, is
    /// the average number of requests in that stage.
    pub stages: StageTimes,
    /// Histogram of the time from the moment when a request could be seen until its guest was notified. Present if
    /// latencies were requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latencies: Option<Vec<LatencyBucket>>,
    /// How long they were with the storage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage_latencies: Option<Vec<LatencyBucket>>,
}

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A read.
    Read,
    /// A write.
    Write,
    /// A flush.
    Flush,
    /// A discard.
    Discard,
    /// A write of zeroes.
    WriteZeroes,
}

/// Nanoseconds in each stage of a request, in their order. They add up to the duration of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StageTimes {
    /// In the ring or the socket, after the process could have seen it.
    pub ring: u64,
    /// Taken, until its first operation is submitted.
    pub map: u64,
    /// Between operations that follow each other.
    pub split: u64,
    /// In front of a full queue of the kernel.
    pub queue: u64,
    /// With the storage.
    pub storage: u64,
    /// After its last operation, until it has its answer.
    pub completion: u64,
    /// From the answer until the guest was notified.
    pub notify: u64,
}

/// How many requests took how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// Upper bound in nanoseconds, exclusive; the bound of the previous bucket is the lower one, inclusive. Buckets are
    /// at most 7 % wide.
    pub below_ns: u64,
    /// How many.
    pub count: u64,
}

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestInFlight {
    /// Its kind.
    pub operation: Operation,
    /// Where it begins, in bytes.
    pub offset: u64,
    /// How many bytes it is for.
    pub size: u64,
    /// For how long it has been in flight, in nanoseconds.
    pub age_ns: u64,
    /// Where it is.
    pub stage: StageInFlight,
}

/// Where a request in flight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StageInFlight {
    /// With the disk: it waits for what it must not overtake, for metadata, or for space.
    Map,
    /// With the storage.
    Storage,
}
