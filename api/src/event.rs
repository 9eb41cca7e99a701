//! Events: every change of an object, in order.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Requester;

/// A change of an object.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// The event's number: later events have higher numbers, and a client that was disconnected continues after the
    /// last one it has seen.
    pub seq: u64,
    /// When the change happened.
    pub at: Timestamp,
    /// The kind of the changed object.
    pub kind: ObjectKind,
    /// The UUID of the changed object.
    pub uuid: Uuid,
    /// How the object has changed.
    pub change: Change,
    /// Who requested the change; for changes made by a task, who requested the task.
    pub requester: Requester,
    /// The object after the change; absent if it was removed.
    // As text: a daemon keeps thousands of them, each of which would be five times as large in pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    pub object: Option<Box<RawValue>>,
}

impl Event {
    /// The object after the change, as its own type or any type with some of its fields; `None` if it was removed.
    pub fn object<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, serde_json::Error> {
        self.object.as_deref().map(|text| serde_json::from_str(text.get())).transpose()
    }
}

/// Objects are equal if their text is.
impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        let rest = |event: &Event| (event.seq, event.at, event.kind, event.uuid, event.change);
        let texts = [self, other].map(|event| event.object.as_deref().map(RawValue::get));
        rest(self) == rest(other) && self.requester == other.requester && texts[0] == texts[1]
    }
}

/// Kinds of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ObjectKind {
    /// The host.
    Host,
    /// A storage repository.
    Sr,
    /// A virtual disk image.
    Vdi,
    /// A virtual block device.
    Vbd,
    /// A virtual machine.
    Vm,
    /// A task.
    Task,
}

/// How an object has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// It was created.
    Added,
    /// It was changed.
    Changed,
    /// It was removed.
    Removed,
}
