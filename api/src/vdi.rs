//! VDI: a virtual disk image.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    AbsolutePath, BackupSchedule, ChangeTracking, Description, FileChecksum, Health, ImageUrl, LogicalBlockSize, Name,
    OtherConfig, Problem, Retention, Size, Tags, Use,
};

/// A virtual disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vdi {
    /// Identity, which is independent of its files.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// Words to find it by.
    pub tags: Tags,
    /// Strings that programs keep with it.
    pub other_config: OtherConfig,
    /// The repository that contains it.
    pub sr: Uuid,
    /// Size seen by a guest, in bytes.
    pub size: u64,
    /// The size of the sectors by which its guest partitioned it, in bytes. Absent for a VDI of an inventory without
    /// one until it is set: then its storage decides at each plug, which is 4096 for a raw image, and what is based on
    /// one, on storage that takes nothing smaller, and 512 for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<LogicalBlockSize>,
    /// Space used by its own image in bytes, at the last measurement; images below it, which it may share, are not
    /// counted.
    pub physical_utilisation: u64,
    /// The format of its own image.
    pub format: ImageFormat,
    /// The file of its own image, in its repository.
    pub file: String,
    /// Length of its backing chain: 1, or more if its image has a parent.
    pub depth: u32,
    /// Whether the VDI is read-only.
    pub read_only: bool,
    /// The VDI of which this is a snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<Uuid>,
    /// When the snapshot was taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_time: Option<Timestamp>,
    /// The schedule by which snapshots of it are taken, and how many are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Why there is no snapshot by the schedule since the last one that was due; absent when one has been taken again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_problem: Option<Problem>,
    /// The schedule by which it is backed up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_schedule: Option<BackupSchedule>,
    /// When the last backup by this schedule was due; absent until one has been made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<Timestamp>,
    /// Why there is no backup by the schedule since the last one that was due; absent when one has been made again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_problem: Option<Problem>,
    /// Whether it is a snapshot that was taken by the schedule of its VDI, which also destroys it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scheduled: bool,
    /// Whether it is a snapshot that the daemon took for a backup, and will destroy when no backup needs it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_backup: bool,
    /// The recording of its changed blocks, and the maps of changed blocks that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cbt: Option<ChangeTracking>,
    /// Whether the VDI can be used.
    pub state: VdiState,
    /// Whether it can be used and those who use it are served; if not, since when, why, and what to do.
    pub health: Health,
    /// Its current users.
    pub users: Vec<Use>,
    /// When the VDI was created.
    pub created: Timestamp,
}

impl Vdi {
    /// The disk that it is a state of: a snapshot is one of another VDI.
    pub fn disk(&self) -> Uuid {
        self.snapshot_of.unwrap_or(self.uuid)
    }

    /// Whether a backup has its content, and is the base of the next one.
    pub fn is_backup_base(&self) -> bool {
        self.cbt.as_ref().is_some_and(|tracking| tracking.base.is_some())
    }
}

/// Whether a VDI can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VdiState {
    /// It can be used.
    Ready,
    /// One of its files was missing at the last scan.
    Missing,
    /// One of its files was found damaged.
    Damaged,
    /// Its running disk and the catalogue disagree about its files, and it is uncertain what happened.
    Diverged,
    /// It is a snapshot whose data was destroyed; only its maps of changed blocks are left.
    NoData,
}

/// Formats of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// The disk's bytes and nothing else.
    Raw,
    /// Microsoft's Virtual Hard Disk as used by XenServer, at most 2040 GiB.
    Vhd,
    /// QEMU's format, version 3.
    Qcow2,
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageFormat::Raw => "raw",
            ImageFormat::Vhd => "vhd",
            ImageFormat::Qcow2 => "qcow2",
        })
    }
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(word: &str) -> Result<ImageFormat, String> {
        match word {
            "raw" => Ok(ImageFormat::Raw),
            "vhd" => Ok(ImageFormat::Vhd),
            "qcow2" => Ok(ImageFormat::Qcow2),
            _ => Err(format!("'{word}' is not a format: use raw, vhd or qcow2")),
        }
    }
}

/// Formats of files that are imported: those of images, and of other hypervisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SourceFormat {
    /// The disk's bytes and nothing else.
    Raw,
    /// Microsoft's Virtual Hard Disk as used by XenServer.
    Vhd,
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// VMware's format: one file that is monolithicSparse or streamOptimized.
    Vmdk,
    /// Microsoft's later format, of Hyper-V: fixed or dynamic.
    Vhdx,
}

impl From<ImageFormat> for SourceFormat {
    fn from(format: ImageFormat) -> SourceFormat {
        match format {
            ImageFormat::Raw => SourceFormat::Raw,
            ImageFormat::Vhd => SourceFormat::Vhd,
            ImageFormat::Qcow2 => SourceFormat::Qcow2,
        }
    }
}

/// Creates an empty VDI.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// The repository to create it in.
    pub sr: Uuid,
    /// Its name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Whether another VDI in the repository may have the same name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_duplicate_name: bool,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// Size seen by a guest, in bytes.
    pub size: Size,
    /// Size of the sectors that a guest addresses, in bytes; 512 if omitted.
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

/// Changes a VDI; omitted fields are not changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Whether the VDI is read-only; cannot be changed while it is plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// Size of the sectors that a guest addresses, in bytes; cannot be changed while it is plugged. A guest finds its
    /// partitions only with the size with which it made them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<LogicalBlockSize>,
    /// Words to find it by, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::label::given_tags_if")]
    pub tags: Option<Tags>,
    /// Strings that programs keep with it, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_config: Option<OtherConfig>,
    /// The schedule by which snapshots of it are taken, and how many are kept; null ends it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<Retention>)]
    pub retention: Option<Option<Retention>>,
    /// The schedule by which it is backed up, and how many backups are retained; null ends it. The backups stay.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<BackupSchedule>)]
    pub backup_schedule: Option<Option<BackupSchedule>>,
    /// False has a scheduled snapshot stay that its schedule would destroy one day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduled: Option<bool>,
}

/// Grows a VDI; it may be plugged.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiResize {
    /// New size seen by a guest, in bytes; cannot be smaller than the current size.
    pub size: Size,
}

/// Takes a read-only snapshot of a VDI, which may be plugged.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiSnapshot {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Name of the snapshot; if omitted, the VDI's name and the time in UTC: `web@2026-11-23T02:07`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Creates a writable clone of a VDI that shares its unchanged data.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiClone {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Name of the clone; if omitted, the VDI's name with `-clone`, and a number if that is taken.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Reverts a VDI to one of its snapshots. Data written since then is lost.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiRevert {
    /// The snapshot.
    pub snapshot: Uuid,
}

/// Makes a full copy of a VDI in the same or another repository.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiCopy {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// The repository to create it in.
    pub sr: Uuid,
    /// Name of the copy; if omitted, the VDI's name, or if that is taken, the name with `-copy`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
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

/// Creates a VDI from a file on the host, an upload, or a file at an HTTP server: either `path`, `upload` or `url` is
/// given.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiImport {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// The repository to create it in.
    pub sr: Uuid,
    /// Its name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Whether another VDI in the repository may have the same name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allow_duplicate_name: bool,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// The file on the daemon's host, which must not have a backing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<AbsolutePath>,
    /// The upload, all of which has arrived. It is gone when the VDI has been created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<Uuid>,
    /// The file at an HTTP server. It is downloaded into the repository as a whole first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<ImageUrl>,
    /// The digest that the file at an HTTP server must have, or where that is found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checksum: Option<FileChecksum>,
    /// Whether the file is read over plain HTTP, where anyone on the way can change it, although its digest is not
    /// given.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure_http: bool,
    /// Format of the file; it is never guessed.
    pub source_format: SourceFormat,
    /// Whether a file that is raw is taken for that although it looks like an image of another format.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub really_raw: bool,
    /// Size of the sectors that a guest addresses, in bytes; if omitted, that which the file records, or 512 if its
    /// format cannot record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<LogicalBlockSize>,
    /// Format of the VDI; the repository's default if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Writes a VDI, including its backing chain, to a new file: either `path` is given or `download` is true.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiExport {
    /// The file on the daemon's host, which must not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<AbsolutePath>,
    /// Whether the file is for the client to fetch: the task's result has the UUID of a download. Until it is removed,
    /// it takes space in the repository of the VDI.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub download: bool,
    /// Format of the file.
    pub format: ImageFormat,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let text = r#"{"sr":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","name":"a","size":512,"sise":1}"#;
        assert!(serde_json::from_str::<VdiCreate>(text).unwrap_err().to_string().contains("sise"));
    }
}

/// What destroying a VDI would remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VdiDestroyPlan {
    /// Files that would be removed: none if other images are based on it.
    pub removes: Vec<String>,
    /// Bytes that this would free.
    pub freed: u64,
    /// Number of images that are based on it.
    pub needed_by: u64,
}

/// Resolves a diverged VDI.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiReconcile {
    /// Which side is right.
    pub believe: Believed,
}

/// The side that is trusted about the layers of a VDI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Believed {
    /// The running disk. VDIs backed by files that are no longer in its chain are marked damaged, because their
    /// contents may have changed.
    Disk,
    /// The catalogue. Data written to other files is then not part of the VDI.
    Catalogue,
}
