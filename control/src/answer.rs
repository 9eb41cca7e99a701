//! Answers and events of a disk.
//!
//! Invariants: a field that some programs of this protocol version do not send is optional or has a default; readers
//! ignore unknown fields and words.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits::Limits;
use crate::method::Method;
use crate::{Error, FormatName, ImageName, PollingMode, Progress, SizeRule};

/// Answer to `version`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Version {
    /// Version of the protocol.
    pub version: u64,
    /// Version of the program.
    pub program: Option<String>,
    /// Verbs that the process supports.
    pub verbs: Vec<String>,
    /// Process ID of the disk process.
    pub pid: Option<u32>,
}

/// Answer to `layers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Whether the disk is served read-only.
    pub read_only: bool,
    /// Conditions that prevent writes.
    #[serde(flatten)]
    pub condition: Condition,
    /// Number of connected guests or clients.
    #[serde(default)]
    pub peers: Option<usize>,
    /// How requests of a vhost-user guest survive the death of the process.
    #[serde(default)]
    pub inflight: Option<InFlight>,
    /// The I/O engine of the disk.
    #[serde(default)]
    pub engine: Option<IoEngine>,
    /// The map of changed blocks; none if the disk has not been tracked.
    #[serde(default)]
    pub changes: Option<Changes>,
    /// Layers from the leaf downwards.
    pub layers: Vec<Layer>,
}

/// The map of changed blocks of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Path of its file.
    pub map: String,
    /// Its id.
    pub id: String,
    /// Id of the map that it continues.
    #[serde(default)]
    pub continues: Option<String>,
    /// Whether it can be relied on.
    pub state: MapState,
    /// Whether its file names exactly what has changed: otherwise regions of 4 MiB that were written to lately count as
    /// changed if the process is killed.
    #[serde(default)]
    pub at_rest: bool,
    /// Bytes of the blocks that have changed.
    #[serde(default)]
    pub changed: Option<u64>,
    /// Session of the process that records in it.
    #[serde(default)]
    pub session: Option<String>,
    /// Inode of its file.
    #[serde(default)]
    pub inode: Option<u64>,
}

/// Whether a map of changed blocks can be relied on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MapState {
    /// It names each block that has changed.
    Kept,
    /// It says that changes are missing, and is refused from now on.
    Invalid,
    /// It could not be written, nor made invalid: writes wait until its file is removed.
    Doubtful,
    /// A state of a newer program.
    #[serde(other)]
    Other,
}

/// Answer to `track` and `untrack`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tracked {
    /// The map of changed blocks; none if the disk is not tracked.
    pub changes: Option<Changes>,
    /// Time that requests were held.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// The I/O engine of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoEngine {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
    /// No engine: the disk stores nothing.
    #[serde(other)]
    None,
}

/// How requests in flight are found after the death of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InFlight {
    /// The front-end records them in shared memory.
    #[serde(rename = "recorded")]
    Recorded,
    /// They are not recorded; requests complete in order.
    #[serde(rename = "in order", other)]
    InOrder,
}

/// A layer in [`Layers`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Number of the layer, counted from the leaf, 0.
    pub layer: usize,
    /// Format of its image file.
    pub format: FormatName,
    /// Path of its image file.
    pub path: Option<String>,
    /// Path of its external data file, if it has one.
    #[serde(default)]
    pub data_file: Option<String>,
    /// Virtual size of the layer in bytes.
    pub size: u64,
    /// Allocated bytes of its files.
    pub allocated: Option<u64>,
    /// Device number of the open file, to which its path may no longer lead.
    #[serde(default)]
    pub device: Option<u64>,
    /// Inode number of the open file.
    #[serde(default)]
    pub inode: Option<u64>,
    /// Whether the layer is open for writing.
    pub writable: bool,
    /// The connection to its NBD server, if it is at one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<Server>,
}

/// The connection to the NBD server of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// Whether there is a connection that works.
    pub connected: bool,
    /// How long there has been none, in milliseconds.
    pub away_ms: Option<u64>,
    /// The last error, while there is none.
    pub error: Option<String>,
    /// Attempts to connect since the last connection that worked.
    pub attempts: u32,
    /// Writes that were answered and are not flushed; they are sent again on a new connection.
    pub kept: u64,
}

impl Layer {
    /// Image name of the layer; none if it has no file.
    pub fn name(&self) -> Option<ImageName> {
        let data_file = self.data_file.as_deref().map(PathBuf::from);
        Some(ImageName { format: self.format, path: self.path.as_deref()?.into(), data_file })
    }
}

/// Answer to `stats`, and the line that `serve --stats` writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Nanoseconds since the process was started.
    pub elapsed_ns: u64,
    /// Counters of reads.
    pub reads: Counters,
    /// Counters of writes.
    pub writes: Counters,
    /// Counters of flushes.
    pub flushes: Counters,
    /// Counters of discards.
    pub discards: Counters,
    /// Iterations of the event loop.
    pub rounds: u64,
    /// Number of times that the event loop slept.
    pub sleeps: u64,
    /// Number of times that memory was released because the disk was idle.
    pub rests: u64,
    /// Polls that found work.
    pub polls_hit: u64,
    /// Polls that found no work.
    pub polls_missed: u64,
    /// Operations submitted on each lane that is in use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lanes: Vec<u64>,
    /// Conditions that prevent writes.
    #[serde(flatten)]
    pub condition: Condition,
}

/// Counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Completed requests.
    pub count: u64,
    /// Bytes of completed requests.
    pub bytes: u64,
    /// Sum of the durations of completed requests and of those in flight so far, in nanoseconds.
    pub sum_ns: u64,
    /// Requests in flight.
    pub in_flight: u64,
}

/// Answer to `trace`: the state of the recording in the statistics page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// Number of requests traced since the page was created, which is the number of the next one.
    pub next: u64,
    /// Number of requests that the page keeps.
    pub kept: u64,
}

/// Answer to `polling`: the settings in force and their effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// When the thread of the disk polls.
    pub mode: PollingMode,
    /// Maximum polling time before a sleep, in microseconds.
    pub max_us: u64,
    /// Polls that found work.
    pub hits: u64,
    /// Polls that found no work.
    pub misses: u64,
    /// Total polling time in nanoseconds.
    pub polled_ns: u64,
}

/// Answer to `shape`: how transfers are split and merged, why, and how many were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shape {
    /// Rule that was set for splitting.
    pub split: SizeRule,
    /// Rule that was set for merging.
    pub merge: SizeRule,
    /// Size in bytes of the pieces that larger transfers are split into; none if transfers are not split.
    pub split_bytes: Option<u64>,
    /// Maximum size in bytes of merged adjacent transfers; none if transfers are not merged.
    pub merge_bytes: Option<u64>,
    /// Policy of the disk, which a rule `auto` follows.
    pub policy: Option<PolicyNote>,
    /// Transfers that were split since the statistics page was created.
    pub splits: u64,
    /// Transfers that were merged into another one.
    pub merges: u64,
    /// Merged transfers that were repeated alone because the merged one failed.
    pub redone: u64,
}

/// Beginning of [`PolicyNote::why`] for a policy that is not followed.
pub const NOT_FOLLOWED: &str = "it is not followed: ";

/// A policy for the sizes of transfers, and the measurement that it is based on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyNote {
    /// File of the policy; empty for the policy of a repository.
    pub file: String,
    /// UUID of the repository whose policy it is, in a daemon's catalogue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// Storage that was measured.
    pub device: String,
    /// Time of the measurement.
    pub measured: String,
    /// Kernel version during the measurement.
    pub kernel: String,
    /// Size in bytes that transfers are split into; none if they are not split.
    pub split: Option<u64>,
    /// Maximum size in bytes of merged transfers; none if they are not merged.
    pub merge: Option<u64>,
    /// Reason, for people.
    pub why: String,
}

impl PolicyNote {
    /// Name of the policy for a message, to follow 'the policy'.
    pub fn name(&self) -> String {
        match &self.repository {
            Some(repository) => format!("of repository {repository}"),
            None => self.file.clone(),
        }
    }
}

/// Answer to `threads`: the setting in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Threads {
    /// Maximum number of threads of the disk, including its own.
    pub most: usize,
    /// Operations submitted on each lane that is in use.
    pub lanes: Vec<u64>,
}

/// Answer to `limit`: the limits in force and their effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limited {
    /// Limits of the disk; rates without one are unlimited.
    pub limits: Limits,
    /// Requests that are being throttled.
    pub waiting: usize,
    /// Requests that were throttled since the statistics page was created.
    pub throttled: u64,
    /// Total time that requests were throttled, in nanoseconds.
    pub throttled_ns: u64,
}

/// Answer to `share`: how the disk shares its storage with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shared {
    /// Whether the storage is shared; if not, the other fields have no meaning.
    pub shared: bool,
    /// Weight of the disk.
    pub weight: u32,
    /// Requests in flight on the storage above which disks that exceed their share wait.
    pub depth: u32,
    /// Other disks that used the storage in the last interval.
    pub others: u32,
    /// Requests that are held by the share.
    pub waiting: usize,
    /// Requests that were held by the share since the statistics page was created.
    pub held: u64,
    /// Total time that requests were held by the share, in nanoseconds.
    pub held_ns: u64,
}

/// Conditions that prevent a disk from writing; answer to `space` and `watch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// Whether a sync failed: all later writes fail.
    pub broken: bool,
    /// Whether requests wait for space on the storage.
    pub full: bool,
    /// Number of requests that wait for space.
    pub waiting: usize,
    /// Requests that were failed because successive processes died while handling them.
    pub fatal: u64,
    /// How long an NBD server of its images is away, in milliseconds: requests wait for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub away_ms: Option<u64>,
}

/// An event of `watch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Change {
    /// Requests wait for space.
    Full {
        /// Number of waiting requests.
        waiting: usize,
    },
    /// Requests continue.
    Resumed {
        /// Number of waiting requests, which is 0.
        waiting: usize,
    },
    /// A sync failed.
    Broken {
        /// Number of requests that wait for space.
        waiting: usize,
    },
    /// A request was failed because successive processes died while handling it.
    Fatal {
        /// Number of such requests so far.
        fatal: u64,
    },
    /// An event of a newer program.
    #[serde(other)]
    Other,
}

/// An event of `watch` about NBD servers, which the daemon reads as [`Change::Other`]: its disks have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum ServerChange {
    /// An NBD server of the disk's images is away: requests wait for it. [`Change::Resumed`] is the end of that.
    Away {
        /// Number of requests that wait for space.
        waiting: usize,
    },
}

/// How long requests were held while the chain was changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// Longest delay of a request as seen by the guest, in microseconds.
    pub pause_us: u64,
    /// Time that requests were held, in microseconds.
    pub held_us: u64,
}

/// Answer to `snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Method that was used.
    pub method: Method,
    /// Image that was created by reflink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
    /// The leaf of the disk.
    pub leaf: String,
    /// Parent of the leaf, if there is a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Images of the chain from the leaf downwards.
    pub layers: Vec<String>,
    /// Time spent creating the file.
    #[serde(flatten)]
    pub took: Option<Took>,
    /// Time that requests were held.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// Time spent creating a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Took {
    /// Microseconds apart from syncs.
    pub work_us: u64,
    /// Microseconds spent in syncs.
    pub sync_us: u64,
}

/// Answer to `clone`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clone {
    /// The new image.
    pub image: String,
    /// Images below it, from its parent downwards.
    pub parents: Vec<String>,
    /// Time spent creating the file.
    #[serde(flatten)]
    pub took: Took,
}

/// Answer to `merge` and to the verbs that control a merge, and its progress events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// State of the merge.
    pub state: MergeState,
    /// Layers that are merged; none if there was no merge.
    #[serde(flatten)]
    pub layers: Option<MergeLayers>,
    /// Bytes processed so far, while the merge is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<u64>,
    /// Total number of bytes to process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub len: Option<u64>,
    /// Bytes copied so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied: Option<u64>,
    /// Reason for a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
    /// Outcome of a completed merge.
    #[serde(flatten)]
    pub merged: Option<Merged>,
}

impl Merge {
    /// Progress of a running merge.
    pub fn progress(&self) -> Option<Progress> {
        Some(Progress { doing: "merging".into(), done: self.done?, len: self.len? })
    }
}

/// State of a merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeState {
    /// There was no merge.
    None,
    /// Files are being prepared.
    Beginning,
    /// Data is being copied.
    Running,
    /// Paused by a client.
    Paused,
    /// All data is copied; the chain is being changed.
    Ending,
    /// Unused files are being removed.
    Removing,
    /// The merge is complete.
    Done,
    /// Cancelled by a client.
    Cancelled,
    /// The merge failed.
    Failed,
    /// A state of a newer program.
    #[default]
    #[serde(other)]
    Other,
}

/// The layers that are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeLayers {
    /// Number of the uppermost layer.
    pub from: usize,
    /// Number of the layer that receives the data.
    pub into: usize,
}

/// Outcome of a completed merge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// Images that are no longer needed.
    pub unused: Vec<String>,
    /// Whether they were removed.
    pub deleted: bool,
    /// Images of the chain from the leaf downwards.
    #[serde(rename = "layers")]
    pub chain: Vec<String>,
    /// Longest time that requests were held.
    #[serde(flatten)]
    pub pause: Pause,
}

/// Answer to `revert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revert {
    /// The new leaf.
    pub leaf: String,
    /// Images of the chain from the leaf downwards.
    pub layers: Vec<String>,
    /// Images that no longer belong to the chain.
    pub unused: Vec<String>,
}

/// Answer to `resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resize {
    /// New size of the disk in bytes.
    pub size: u64,
    /// Time that requests were held.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// Answer to `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// Process that serves the disk now.
    pub pid: u32,
    /// The version of its program.
    #[serde(default)]
    pub program: Option<String>,
    /// Time that requests waited, in microseconds.
    pub pause_us: u64,
}

/// Answer to `pause` and `resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// Whether requests are held.
    pub paused: bool,
    /// Time that they were held, after `resume`.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// Defines [`Answer`], the type of all answers, for the disk process.
macro_rules! answers {
    ($($name:ident)*) => {
        /// An answer to any verb.
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        #[serde(untagged)]
        #[allow(missing_docs, reason = "each is called like the type that it holds")]
        pub enum Answer {
            $($name($name),)*
        }

        $(impl From<$name> for Answer {
            fn from(answer: $name) -> Answer {
                Answer::$name(answer)
            }
        })*
    };
}

answers! {
    Version Layers Stats Condition Snapshot Clone Merge Revert Resize Upgrade Paused Polling Shape Threads Limited Shared
    Trace Tracked
}

impl Answer {
    /// Adds the time that requests were held, if the answer has a field for it.
    pub fn set_pause(&mut self, measured: Pause) {
        match self {
            Answer::Snapshot(Snapshot { pause, .. })
            | Answer::Resize(Resize { pause, .. })
            | Answer::Paused(Paused { pause, .. })
            | Answer::Tracked(Tracked { pause, .. }) => *pause = Some(measured),
            _ => {}
        }
    }
}
