//! Events: every change of an object, in order.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

/// A change of an object.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number: later events have higher ones, and a client that was away goes on behind the last it has seen.
    pub seq: u64,
    /// When.
    pub at: Timestamp,
    /// What has changed.
    pub kind: ObjectKind,
    /// Which.
    pub uuid: Uuid,
    /// How.
    pub change: Change,
    /// The object as it is then; none if it was removed.
    // As text: a daemon keeps thousands of them, each of which would be five times as large in pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    pub object: Option<Box<RawValue>>,
}

impl Event {
    /// The object as it is then, of its own type or of any that has some of its fields; none if it was removed.
    pub fn object<'a, T: Deserialize<'a>>(&'a self) -> Result<Option<T>, serde_json::Error> {
        self.object.as_deref().map(|text| serde_json::from_str(text.get())).transpose()
    }
}

/// Objects are the same if their text is.
impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        let rest = |event: &Event| (event.seq, event.at, event.kind, event.uuid, event.change);
        let texts = [self, other].map(|event| event.object.as_deref().map(RawValue::get));
        rest(self) == rest(other) && texts[0] == texts[1]
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
    /// It is new.
    Added,
    /// It is another than before.
    Changed,
    /// It is no more.
    Removed,
}
