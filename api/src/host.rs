//! The host: the machine on which the daemon runs.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::Problem;

/// The host and its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its identity, which stays when the daemon is upgraded.
    pub uuid: Uuid,
    /// The host's name.
    pub name: String,
    /// The version of the daemon.
    pub version: String,
    /// Since when the daemon runs.
    pub started: Timestamp,
    /// Processors.
    pub cpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// What bounds the work done at one time.
    pub limits: Limits,
    /// VBDs that are plugged.
    pub plugged: u64,
    /// VBDs that are being plugged or unplugged, and those that wait for their turn.
    pub plugging: u64,
    /// Tasks that have not ended.
    pub tasks: u64,
}

/// Bounds of the work that is done at one time; set in the daemon's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// VBDs of one VM that are plugged or unplugged at one time.
    pub plug_window: u32,
    /// VBDs of the host that are plugged or unplugged at one time.
    pub worker_pool_size: u32,
    /// Bytes of memory which those may need together.
    pub worker_memory: u64,
}

/// Unplugs all VBDs: what is done before the host ends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostDrain {
    /// How long guests may take to let go, in seconds; then their disks end without them, with everything flushed that was
    /// answered. A day at most.
    #[serde(default = "drain_timeout")]
    #[schema(maximum = 86400)]
    pub timeout: u32,
}

/// A minute: systemd gives services a minute and a half.
fn drain_timeout() -> u32 {
    60
}

/// Compares what runs with the catalogue.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostReconcile {
    /// Only tell what differs; change nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// A disk that runs and is something else than the catalogue says, or does not say what it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// The VDI.
    pub vdi: Uuid,
    /// The VBD through which it is served.
    pub vbd: Uuid,
    /// The files that the running disk has, from the leaf down; none, if it does not say.
    pub disk: Vec<String>,
    /// The files that the catalogue said, by their names in the repository.
    pub catalogue: Vec<String>,
    /// The catalogue says what the disk says now: what happened was certain.
    pub healed: bool,
    /// Why that is not certain, or what is wrong with the disk, and what can be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// A copy of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Backup {
    /// The file, on the host.
    pub file: String,
    /// When it was made.
    pub made: Timestamp,
    /// Why.
    pub reason: BackupReason,
    /// Bytes.
    pub size: u64,
}

/// Why a copy of the catalogue was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackupReason {
    /// A day was over, or the daemon ended.
    Daily,
    /// Somebody has asked for it.
    Asked,
    /// A newer daemon was about to change the schema.
    Schema,
}

impl BackupReason {
    const ALL: [(BackupReason, &str); 3] =
        [(BackupReason::Daily, "daily"), (BackupReason::Asked, "asked"), (BackupReason::Schema, "schema")];
}

impl fmt::Display for BackupReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = BackupReason::ALL.iter().find(|(reason, _)| reason == self).map_or("", |(_, word)| word);
        formatter.write_str(word)
    }
}

impl FromStr for BackupReason {
    type Err = String;

    fn from_str(word: &str) -> Result<BackupReason, String> {
        let found = BackupReason::ALL.iter().find(|(_, known)| *known == word).map(|(reason, _)| *reason);
        found.ok_or_else(|| format!("{word} is no reason for a backup"))
    }
}
