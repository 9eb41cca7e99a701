//! Task: a long-running operation that survives daemon restarts.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{ObjectKind, Problem, Requester};

/// A long-running operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its identity.
    pub uuid: Uuid,
    /// The verb: `vdi-snapshot`, `vbd-plug` and so on.
    pub verb: String,
    /// The objects that it works on or creates.
    pub about: Vec<About>,
    /// Whether and how it has ended.
    pub state: TaskState,
    /// Completed fraction, 0 to 1.
    pub progress: f64,
    /// What a running backup, restore or verification has done so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The current step, or the step at which it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Whether it can be cancelled at the current step.
    pub cancellable: bool,
    /// The result: an object whose `uuid` is that of the created object, or of the object worked on. Verbs of VBDs and
    /// VMs return the whole object, verbs on several VBDs the UUIDs of all. Other fields depend on the verb.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<serde_json::Value>,
    /// Why the task failed; or, if it has not ended, why its current step is being retried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// Who requested it.
    pub requester: Requester,
    /// When the task was requested.
    pub created: Timestamp,
    /// When the task ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
}

/// How far a transfer to or from a backup target is, in bytes of the disk unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Transfer {
    /// Bytes that are done.
    pub done: u64,
    /// Bytes in total.
    pub len: u64,
    /// Bytes per second lately, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Seconds until the end at that rate, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<u64>,
    /// Bytes of holes, which are neither read nor stored.
    #[serde(default)]
    pub holes: u64,
    /// Bytes that an incremental backup has not read, because they have not changed.
    #[serde(default)]
    pub unchanged: u64,
    /// Bytes that were read and found to be on the target.
    #[serde(default)]
    pub deduplicated: u64,
    /// Bytes of objects that were sent to the target, compressed.
    #[serde(default)]
    pub sent: u64,
}

impl Transfer {
    /// The completed fraction, from 0 to 1.
    #[allow(clippy::cast_precision_loss, reason = "for people, who see hundredths")]
    pub fn part(&self) -> f64 {
        if self.len == 0 { 0.0 } else { self.done as f64 / self.len as f64 }
    }
}

/// An object that a task is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct About {
    /// The object's kind.
    pub kind: ObjectKind,
    /// The object's UUID.
    pub uuid: Uuid,
}

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// It is waiting for its turn.
    Pending,
    /// It is running.
    Running,
    /// It was cancelled and is rolling back.
    Cancelling,
    /// It completed.
    Done,
    /// It failed and has rolled back what it could.
    Failed,
    /// It was cancelled and has rolled back.
    Cancelled,
    /// It was begun by another version of the daemon and this version does not understand it. Its objects stay reserved
    /// until a version runs that does.
    Stuck,
}

impl TaskState {
    /// Whether the task makes no more progress while this daemon runs.
    pub fn is_over(self) -> bool {
        matches!(self, TaskState::Done | TaskState::Failed | TaskState::Cancelled | TaskState::Stuck)
    }
}
