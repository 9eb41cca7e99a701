//! Backup target: a directory or bucket that disks are backed up to, and the backups on it.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, BackupPlace, Description, ImageFormat, LogicalBlockSize, Name, OtherConfig, S3Access, Tags};

/// Digits of the ID of a backup or a target.
const DIGITS: usize = 32;

/// A backup target that the daemon knows. What is in its directory is not part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupTarget {
    /// Its identity.
    pub uuid: Uuid,
    /// A unique name.
    pub name: Name,
    /// The directory, such as a mount of NFS or SMB, or the bucket: `s3://BUCKET[/PREFIX]`.
    pub path: BackupPlace,
    /// How its bucket is reached, if it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Access>,
    /// The ID of the target in the directory. Nothing is read or written there while another one, or none, is found.
    pub target_id: String,
    /// The file with the key of an encrypted target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_file: Option<AbsolutePath>,
    /// When it was registered.
    pub created: Timestamp,
}

/// Registers a backup target, which must exist.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupTargetAdd {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// A unique name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// The directory, or the bucket: `s3://BUCKET[/PREFIX]`.
    pub path: BackupPlace,
    /// How its bucket is reached; required for one, and only for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Access>,
    /// The file with its key, readable by its owner only; required if it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub key_file: Option<AbsolutePath>,
    /// The ID that the target must have; if omitted, that of the target found there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_id: Option<String>,
}

/// The ID of a backup: 32 hexadecimal digits, of which the first 8 or more are enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct BackupId(String);

impl TryFrom<String> for BackupId {
    type Error = String;

    fn try_from(text: String) -> Result<BackupId, String> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        match (8..=DIGITS).contains(&text.len()) && text.bytes().all(is_digit) {
            true => Ok(BackupId(text)),
            false => Err("the ID of a backup has 8 to 32 hexadecimal digits, in lower case".into()),
        }
    }
}

impl From<BackupId> for String {
    fn from(id: BackupId) -> String {
        id.0
    }
}

impl FromStr for BackupId {
    type Err = String;

    fn from_str(text: &str) -> Result<BackupId, String> {
        text.to_owned().try_into()
    }
}

impl fmt::Display for BackupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl utoipa::PartialSchema for BackupId {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::schema::Type::String)
            .pattern(Some("^[0-9a-f]{8,32}$"))
            .into()
    }
}

impl ToSchema for BackupId {}

/// A backup of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskBackup {
    /// Its ID.
    pub id: BackupId,
    /// The name of the disk when the backup was made.
    pub name: String,
    /// The identity of the disk on the target, the same in all of its backups.
    pub disk: String,
    /// The moment of the content.
    pub time: Timestamp,
    /// The size of the disk in bytes.
    pub size: u64,
    /// The digest of the whole content.
    pub content: String,
    /// The backup that it was based on. It needs no other one to be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<BackupId>,
    /// The moment of a machine, if it was backed up with all of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moment: Option<BackupMoment>,
}

/// A state of a machine on a backup target: backups of all of its disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BackupMoment {
    /// The identity of the machine on the target, the same in all of its backups.
    pub machine: String,
    /// The identity of the moment, the same in the backups of its disks.
    pub id: String,
    /// The number of disks. With fewer backups the state is incomplete, and the machine cannot be restored.
    pub disks: u32,
}

/// Removes backups from a target: all of them, or none if one of them is not there.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupRemove {
    /// The backups.
    #[schema(min_items = 1, max_items = 1000)]
    pub backups: Vec<BackupId>,
}

/// Removes the backups of each machine, and of each disk that was backed up alone, that are superfluous by a rule,
/// and frees the space that only they have used. The rule retains the last one of each of a number of periods that
/// have one, in UTC, and always the one made last and the one with the latest time. All disks of a machine are
/// retained or removed together.
/// Without a rule none is removed, and only what interrupted backups have left is freed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupPrune {
    /// Only backups of this VDI of this host, alone; if omitted, those of each machine and disk, by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdi: Option<Uuid>,
    /// Only backups of this VM of this host, with all of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The number of last backups that are retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<u16>,
    /// Hours of which the last one is retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hourly: Option<u16>,
    /// Days of which the last one is retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daily: Option<u16>,
    /// Weeks, from Monday, of which the last one is retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weekly: Option<u16>,
    /// Months of which the last one is retained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monthly: Option<u16>,
    /// Hours for which objects are spared that no backup refers to, because they may be of a running backup; 24 if
    /// omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 87_600)]
    pub grace: Option<u32>,
}

/// Backs a VDI up.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiBackup {
    /// The backup target.
    pub target: Uuid,
    /// Read everything, even if it is known what has changed since the last backup.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
    /// Verify the target first, read everything, and send again what is damaged there: other backups of the same data
    /// are whole again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repair: bool,
}

/// Backs up all disks of a VM at one moment, and what the VM is. A running guest is paused for the moment.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmBackup {
    /// The backup target.
    pub target: Uuid,
    /// Read everything, even if it is known what has changed since the last backup.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
    /// Verify the target first, read everything, and send again what is damaged there: other backups of the same data
    /// are whole again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repair: bool,
}

/// Creates a halted VM from the backup of one, with new disks.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmRestore {
    /// The backup of any of its disks: the others are found by it.
    pub backup: BackupId,
    /// The repository of the new disks.
    pub sr: Uuid,
    /// The name of the new VM.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// The UUID of the new VM; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its description; that of the original if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
}

/// Restores a backup to a new VDI.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiRestore {
    /// The backup.
    pub backup: BackupId,
    /// The repository of the new VDI.
    pub sr: Uuid,
    /// The name of the new VDI, unique in its repository.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// The UUID of the new VDI; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// Size of the sectors that a guest addresses, in bytes; if omitted, that of the disk that was backed up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<LogicalBlockSize>,
    /// Format; the repository's default if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Replaces the contents of a VDI by those of a backup of it. What was written since is lost.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiRestoreInPlace {
    /// The backup target.
    pub target: Uuid,
    /// The backup.
    pub backup: BackupId,
    /// Accept a backup of another disk, or of another host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub other_disk: bool,
}

/// Replaces the contents of all disks that a halted VM can write by those of a backup of it. What was written since is
/// lost.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmRestoreInPlace {
    /// The backup target.
    pub target: Uuid,
    /// The backup of any of its disks: the others are found by it.
    pub backup: BackupId,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_id_of_a_backup_has_8_to_32_digits() {
        for right in ["4f1d0a2b", "4f1d0a2b4f1d0a2b4f1d0a2b4f1d0a2b"] {
            assert_eq!(right.parse::<BackupId>().unwrap().to_string(), right);
        }
        for wrong in ["", "4f1d0a2", "4F1D0A2B", "4f1d0a2b4f1d0a2b4f1d0a2b4f1d0a2b0", "--repair-x", "4f1d0a2b "] {
            assert!(wrong.parse::<BackupId>().is_err(), "{wrong}");
        }
    }
}
