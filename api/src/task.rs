//! Task: something that takes time, and survives the daemon.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{ObjectKind, Problem};

/// Something that takes time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Task {
    /// Its identity.
    pub uuid: Uuid,
    /// The verb: `vdi-snapshot`, `vbd-plug` and so on.
    pub verb: String,
    /// What it is at work on, and what it makes.
    pub about: Vec<About>,
    /// Whether it has ended, and how.
    pub state: TaskState,
    /// How much of it is done, 0 to 1.
    pub progress: f64,
    /// The step that it is at, or has ended at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Whether it can be cancelled, at the step that it is at.
    pub cancellable: bool,
    /// What came of it: an object, whose `uuid` is that of what the verb has made, or else of what it was about. Verbs of VBDs
    /// and VMs answer all of the object, those about many VBDs the UUIDs of all. The rest is the verb's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<serde_json::Value>,
    /// Why it failed; or, while it is not over, why its step is being tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When it was asked for.
    pub created: Timestamp,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<Timestamp>,
}

/// An object that a task is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct About {
    /// What it is.
    pub kind: ObjectKind,
    /// Which.
    pub uuid: Uuid,
}

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TaskState {
    /// It waits for its turn.
    Pending,
    /// It is being done.
    Running,
    /// It was cancelled and undoes what it has done.
    Cancelling,
    /// It is done.
    Done,
    /// It failed, and has undone what it could.
    Failed,
    /// It was cancelled, and has undone what it had done.
    Cancelled,
    /// An earlier daemon has begun it, and this one does not understand it. What it holds stays held, until one comes that
    /// does.
    Stuck,
}

impl TaskState {
    /// Whether nothing more comes of it, as long as this daemon runs.
    pub fn is_over(self) -> bool {
        matches!(self, TaskState::Done | TaskState::Failed | TaskState::Cancelled | TaskState::Stuck)
    }
}
