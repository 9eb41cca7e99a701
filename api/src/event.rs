//! Events: every change of an object, in order.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// A change of an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub object: Option<serde_json::Value>,
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
