//! The host: the computer on which the daemon runs.

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
    /// Identity, which is kept when the daemon is upgraded.
    pub uuid: Uuid,
    /// The host's name.
    pub name: String,
    /// The version of the daemon.
    pub version: String,
    /// When the daemon was started.
    pub started: Timestamp,
    /// Number of processors.
    pub cpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// Limits on concurrent work.
    pub limits: Limits,
    /// Number of plugged VBDs.
    pub plugged: u64,
    /// Number of VBDs that are being plugged or unplugged or are waiting for that.
    pub plugging: u64,
    /// Number of unfinished tasks.
    pub tasks: u64,
}

/// Limits on concurrent work, set in the daemon's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// VBDs of one VM that are plugged or unplugged at the same time.
    pub plug_window: u32,
    /// VBDs of the host that are plugged or unplugged at the same time.
    pub worker_pool_size: u32,
    /// Bytes of memory that these operations may need in total.
    pub worker_memory: u64,
}

/// Unplugs all VBDs, before the host shuts down.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostDrain {
    /// Grace period before forced unplug, in seconds, at most one day; everything that was acknowledged is flushed in
    /// either case.
    #[serde(default = "drain_timeout")]
    #[schema(maximum = 86400)]
    pub timeout: u32,
}

/// A minute: systemd gives services a minute and a half.
fn drain_timeout() -> u32 {
    60
}

/// Compares running disks, repositories and the catalogue.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostReconcile {
    /// Only report differences; change nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// What was compared with the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DifferenceKind {
    /// The files of the running disk of a VBD.
    Disk,
    /// A running disk process of a VBD that is not plugged, or does not exist.
    Process,
    /// A file of a repository.
    File,
    /// The inventory of a repository.
    Inventory,
}

impl DifferenceKind {
    /// The word for this value.
    pub fn word(self) -> &'static str {
        match self {
            DifferenceKind::Disk => "disk",
            DifferenceKind::Process => "process",
            DifferenceKind::File => "file",
            DifferenceKind::Inventory => "inventory",
        }
    }
}

/// Something that differs from the catalogue, or cannot be compared with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// What was compared.
    pub kind: DifferenceKind,
    /// The repository, for a file or an inventory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sr: Option<Uuid>,
    /// The VDI, if one is concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdi: Option<Uuid>,
    /// The VBD, for a disk or a process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vbd: Option<Uuid>,
    /// The files that were found: of a running disk from the leaf down, or one in a repository. Empty if a disk does
    /// not report them, or if a file is gone.
    pub found: Vec<String>,
    /// The files in the catalogue, by their names in the repository.
    pub catalogue: Vec<String>,
    /// Whether the catalogue was updated from the disk, because it was certain what had happened.
    pub healed: bool,
    /// Why that is not certain, or what is wrong with the disk, and what can be done about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

impl Difference {
    /// Nothing but what was compared.
    pub fn new(kind: DifferenceKind) -> Difference {
        let (found, catalogue) = (Vec::new(), Vec::new());
        Difference { kind, sr: None, vdi: None, vbd: None, found, catalogue, healed: false, problem: None }
    }
}

/// A backup of the catalogue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Backup {
    /// Path of the file on the host.
    pub file: String,
    /// When the backup was created.
    pub created: Timestamp,
    /// Why the backup was created.
    pub reason: BackupReason,
    /// Size in bytes.
    pub size: u64,
}

/// Why a backup of the catalogue was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BackupReason {
    /// Daily, or when the daemon stopped.
    Daily,
    /// On request.
    Asked,
    /// Before a newer daemon changed the schema.
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
        found.ok_or_else(|| format!("{word} is not a backup reason"))
    }
}
