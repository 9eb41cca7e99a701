//! Answers and events of a disk.
//!
//! Invariants: a field that not every program of this version of the protocol has sent has a default, or may be
//! missing; a reader ignores fields and words that it does not know.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits::Limits;
use crate::method::Method;
use crate::{Error, FormatName, ImageName, PollingMode, Progress, SizeRule};

/// `version`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Version {
    /// Of the protocol.
    pub version: u64,
    /// Of the program.
    pub program: Option<String>,
    /// The verbs there are.
    pub verbs: Vec<String>,
    /// The process that answers.
    pub pid: Option<u32>,
}

/// `layers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    /// Bytes of the disk.
    pub size: u64,
    /// Whether it is served for reading only.
    pub read_only: bool,
    /// What keeps it from writing.
    #[serde(flatten)]
    pub condition: Condition,
    /// Guests or clients that are connected.
    #[serde(default)]
    pub peers: Option<usize>,
    /// What becomes of a vhost-user guest's requests when the process dies.
    #[serde(default)]
    pub inflight: Option<InFlight>,
    /// What does its I/O.
    #[serde(default)]
    pub engine: Option<IoEngine>,
    /// From the leaf down.
    pub layers: Vec<Layer>,
}

/// What does the I/O of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IoEngine {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
    /// None: the disk stores nothing.
    #[serde(other)]
    None,
}

/// What becomes of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InFlight {
    /// The front-end records them.
    #[serde(rename = "recorded")]
    Recorded,
    /// It does not, and answers come in the order of the requests.
    #[serde(rename = "in order", other)]
    InOrder,
}

/// One of `layers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its number.
    pub layer: usize,
    /// The format of its file.
    pub format: FormatName,
    /// Its file.
    pub path: Option<String>,
    /// Its external data file.
    #[serde(default)]
    pub data_file: Option<String>,
    /// Bytes of the disk that it shows.
    pub size: u64,
    /// Bytes that its files take.
    pub allocated: Option<u64>,
    /// Which file it is, whatever has its name by now.
    #[serde(default)]
    pub device: Option<u64>,
    /// The same.
    #[serde(default)]
    pub inode: Option<u64>,
    /// Whether it is open for writing.
    pub writable: bool,
}

impl Layer {
    /// What its image is called.
    pub fn name(&self) -> Option<ImageName> {
        let data_file = self.data_file.as_deref().map(PathBuf::from);
        Some(ImageName { format: self.format, path: self.path.as_deref()?.into(), data_file })
    }
}

/// `stats`, and the line that `serve --stats` writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Nanoseconds since the start.
    pub elapsed_ns: u64,
    /// Of each kind of request.
    pub reads: Counters,
    /// The same.
    pub writes: Counters,
    /// The same.
    pub flushes: Counters,
    /// The same.
    pub discards: Counters,
    /// Rounds of the loop.
    pub rounds: u64,
    /// How often it slept.
    pub sleeps: u64,
    /// How often memory was released because the disk was idle.
    pub rests: u64,
    /// Looks for more work that have found some.
    pub polls_hit: u64,
    /// Looks that have not.
    pub polls_missed: u64,
    /// Operations that each of its lanes has got: as many lanes as it uses now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub lanes: Vec<u64>,
    /// What keeps the disk from writing.
    #[serde(flatten)]
    pub condition: Condition,
}

/// Counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Requests that were answered.
    pub count: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// The sum of their durations, and of those in flight until now.
    pub sum_ns: u64,
    /// Requests that were not answered yet.
    pub in_flight: u64,
}

/// `trace`: what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// How many requests were traced before, in the life of the page: the number of the next one.
    pub next: u64,
    /// How many are kept.
    pub kept: u64,
}

/// `polling`: what is in force, and what came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Polling {
    /// When the disk's thread polls.
    pub mode: PollingMode,
    /// For how long at most, in microseconds.
    pub max_us: u64,
    /// Polls that have found something, and those that have not.
    pub hits: u64,
    /// See `hits`.
    pub misses: u64,
    /// For how long it has polled, in nanoseconds.
    pub polled_ns: u64,
}

/// `shape`: how transfers are split and merged, why, and how many were.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shape {
    /// What was asked for.
    pub split: SizeRule,
    /// The same.
    pub merge: SizeRule,
    /// What follows from it: larger transfers are split into pieces of so many bytes, if they are.
    pub split_bytes: Option<u64>,
    /// Adjacent transfers are merged up to so many bytes, if they are.
    pub merge_bytes: Option<u64>,
    /// The policy that the disk has, which is in force where `auto` was asked for.
    pub policy: Option<PolicyNote>,
    /// Transfers that were split, since the statistics page was begun.
    pub splits: u64,
    /// Transfers that went on as part of another one.
    pub merges: u64,
    /// Those that were done again by themselves, since that one failed.
    pub redone: u64,
}

/// How the reason begins of a policy that is there and not followed.
pub const NOT_FOLLOWED: &str = "it is not followed: ";

/// A policy for the sizes of transfers, and what it follows from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyNote {
    /// Its file; empty if it is that of a repository.
    pub file: String,
    /// The UUID of the repository whose policy it is, in the catalogue of a daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub repository: Option<String>,
    /// The storage that it was measured on.
    pub device: String,
    /// When.
    pub measured: String,
    /// With which kernel.
    pub kernel: String,
    /// What it says.
    pub split: Option<u64>,
    /// The same.
    pub merge: Option<u64>,
    /// Why, for people.
    pub why: String,
}

impl PolicyNote {
    /// Which one it is, for people: behind 'the policy'.
    pub fn name(&self) -> String {
        match &self.repository {
            Some(repository) => format!("of repository {repository}"),
            None => self.file.clone(),
        }
    }
}

/// `threads`: what is in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Threads {
    /// How many threads the disk may use, its own among them.
    pub most: usize,
    /// Operations that each of its lanes has got: as many lanes as it uses now.
    pub lanes: Vec<u64>,
}

/// `limit`: what the disk is limited to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limited {
    /// Its limits; what is not there is not limited.
    pub limits: Limits,
    /// Requests that wait for them now.
    pub waiting: usize,
    /// Requests that have waited for them since the statistics page was begun.
    pub throttled: u64,
    /// For how many nanoseconds, in all.
    pub throttled_ns: u64,
}

/// `share`: how the disk shares its storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shared {
    /// Whether it shares it at all; if not, the rest means nothing.
    pub shared: bool,
    /// Its weight.
    pub weight: u32,
    /// Requests in flight of all disks of the storage, beyond which those wait that have had more than others.
    pub depth: u32,
    /// Other disks that were seen using the storage in the last look.
    pub others: u32,
    /// Requests that wait for the disk's share now.
    pub waiting: usize,
    /// Requests that have waited for it since the statistics page was begun.
    pub held: u64,
    /// For how many nanoseconds, in all.
    pub held_ns: u64,
}

/// What keeps a disk from writing, if anything: `space`, `watch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// A sync has failed, and nothing is written any more.
    pub broken: bool,
    /// Requests wait for space on the storage.
    pub full: bool,
    /// So many of them.
    pub waiting: usize,
    /// Requests that were answered with an error since one process after the other had died of them.
    pub fatal: u64,
}

/// An event of `watch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum Change {
    /// Requests wait for space.
    Full {
        /// So many.
        waiting: usize,
    },
    /// They go on.
    Resumed {
        /// None wait.
        waiting: usize,
    },
    /// A sync has failed.
    Broken {
        /// Requests that wait for space.
        waiting: usize,
    },
    /// A request was answered with an error since processes had died of it.
    Fatal {
        /// So many were, in all.
        fatal: u64,
    },
    /// Something that only newer programs know.
    #[serde(other)]
    Other,
}

/// How long requests were held for a change of the chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// What the guest saw, in microseconds.
    pub pause_us: u64,
    /// How long requests were held, in microseconds.
    pub held_us: u64,
}

/// `snapshot`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// How it was taken.
    pub method: Method,
    /// The copy by reflink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<String>,
    /// The leaf.
    pub leaf: String,
    /// What it stands on, in a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The chain.
    pub layers: Vec<String>,
    /// How long it took.
    #[serde(flatten)]
    pub took: Option<Took>,
    /// How long requests were held.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// How long it took to make a file, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Took {
    /// Apart from the storage.
    pub work_us: u64,
    /// The storage.
    pub sync_us: u64,
}

/// `clone`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clone {
    /// The new image.
    pub image: String,
    /// What it stands on.
    pub parents: Vec<String>,
    /// How long it took.
    #[serde(flatten)]
    pub took: Took,
}

/// `merge`, the verbs about one, and its events.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// How far it is.
    pub state: MergeState,
    /// The layers; missing if there was no merge.
    #[serde(flatten)]
    pub layers: Option<MergeLayers>,
    /// While it goes on: how much was gone through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<u64>,
    /// Of so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub len: Option<u64>,
    /// Bytes that were copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied: Option<u64>,
    /// Why it was not done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
    /// What is left when it is done.
    #[serde(flatten)]
    pub merged: Option<Merged>,
}

impl Merge {
    /// How far it is, while it goes on.
    pub fn progress(&self) -> Option<Progress> {
        Some(Progress { doing: "merging".into(), done: self.done?, len: self.len? })
    }
}

/// Where a merge is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MergeState {
    /// There was none.
    None,
    /// It prepares its files.
    Beginning,
    /// It copies.
    Running,
    /// It does not, until told to.
    Paused,
    /// All is copied.
    Ending,
    /// The files are being removed.
    Removing,
    /// It is done.
    Done,
    /// It was ended early.
    Cancelled,
    /// It could not be done.
    Failed,
    /// Something that only newer programs know.
    #[default]
    #[serde(other)]
    Other,
}

/// The layers that are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeLayers {
    /// The uppermost.
    pub from: usize,
    /// The one that takes it all.
    pub into: usize,
}

/// What a merge leaves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merged {
    /// The images that hold nothing any more.
    pub unused: Vec<String>,
    /// Whether they were removed.
    pub deleted: bool,
    /// The chain.
    #[serde(rename = "layers")]
    pub chain: Vec<String>,
    /// How long requests were held, at most.
    #[serde(flatten)]
    pub pause: Pause,
}

/// `revert`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revert {
    /// The new leaf.
    pub leaf: String,
    /// The chain.
    pub layers: Vec<String>,
    /// The images that are not part of it any more.
    pub unused: Vec<String>,
}

/// `resize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resize {
    /// Bytes of the disk.
    pub size: u64,
    /// How long requests were held.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// `upgrade`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgrade {
    /// The process that serves the disk now.
    pub pid: u32,
    /// The version of its program.
    #[serde(default)]
    pub program: Option<String>,
    /// How long requests waited, in microseconds.
    pub pause_us: u64,
}

/// `pause` and `resume`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// Whether requests are held.
    pub paused: bool,
    /// How long they were.
    #[serde(flatten)]
    pub pause: Option<Pause>,
}

/// All answers, as one type for the disk process.
macro_rules! answers {
    ($($name:ident)*) => {
        /// An answer.
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
    Trace
}

impl Answer {
    /// Adds how long requests were held, to the answer of a verb that tells it.
    pub fn set_pause(&mut self, measured: Pause) {
        match self {
            Answer::Snapshot(Snapshot { pause, .. })
            | Answer::Resize(Resize { pause, .. })
            | Answer::Paused(Paused { pause, .. }) => *pause = Some(measured),
            _ => {}
        }
    }
}
