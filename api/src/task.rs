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
