//! SR: a storage repository, which contains VDIs.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    AbsolutePath, Description, Health, ImageFormat, Name, OtherConfig, Problem, SizeRule, SrPolicy, Storage, Tags,
};

/// A storage repository.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sr {
    /// Identity, which is also recorded in the repository itself.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// Words to find it by.
    pub tags: Tags,
    /// Strings that programs keep with it.
    pub other_config: OtherConfig,
    /// The storage of the repository.
    pub source: SrSource,
    /// Whether the repository can be used.
    pub state: SrState,
    /// Whether it does its work; if not, since when, why, and what to do.
    pub health: Health,
    /// Properties of the storage; present while the repository is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<Variant>,
    /// Space usage at the last measurement.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<Space>,
    /// Bytes to keep free: operations that would use them are refused.
    pub reserve: u64,
    /// Requests in flight of all its plugged disks together, beyond which a disk waits that has had more than others.
    pub share_depth: u32,
    /// The size of the pieces into which larger transfers of its disks are split.
    pub split: SizeRule,
    /// The size up to which adjacent transfers of its disks are merged.
    pub merge: SizeRule,
    /// The result of a calibration of its storage, which `auto` follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<SrPolicy>,
    /// Why the repository is lost, and what to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When the repository was added to the catalogue.
    pub created: Timestamp,
}

impl Sr {
    /// Whether its storage is known to be read-only.
    pub fn is_read_only(&self) -> bool {
        self.variant.as_ref().is_some_and(|variant| variant.read_only)
    }
}

/// The storage of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum SrSource {
    /// A directory of the host, on any file system.
    Dir {
        /// The path of the directory.
        path: AbsolutePath,
    },
    /// A directory exported by an NFS server; the daemon mounts it as a hard mount.
    Nfs {
        /// The server's name or address.
        server: String,
        /// The exported directory.
        export: AbsolutePath,
        /// NFS version: 3, 4, 4.1 or 4.2; negotiated if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<String>,
    },
    /// A share of an SMB server; the daemon mounts it as a hard mount.
    Smb {
        /// The server's name or address.
        server: String,
        /// The share, optionally with a directory in it: `vms` or `vms/tapline`.
        share: String,
        /// A file with `username=`, `password=` and `domain=` lines (mount.cifs(8)), readable only by root.
        credentials: AbsolutePath,
    },
    /// A read-only directory of ISO images.
    Iso {
        /// The path of the directory.
        path: AbsolutePath,
    },
}

/// Types of storage: the `type` of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SrType {
    /// A directory of the host.
    Dir,
    /// A directory of an NFS server.
    Nfs,
    /// A share of an SMB server.
    Smb,
    /// A directory of ISO images.
    Iso,
}

impl SrSource {
    /// The type of repository that this source makes.
    pub fn kind(&self) -> SrType {
        match self {
            SrSource::Dir { .. } => SrType::Dir,
            SrSource::Nfs { .. } => SrType::Nfs,
            SrSource::Smb { .. } => SrType::Smb,
            SrSource::Iso { .. } => SrType::Iso,
        }
    }
}

/// Whether a repository can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SrState {
    /// It can be used.
    Attached,
    /// It is known but not attached.
    Detached,
    /// It was attached, but its storage has disappeared or been replaced.
    Lost,
}

/// Properties of a repository's storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Variant {
    /// The file system: ext4, xfs, btrfs, nfs, cifs and so on.
    pub filesystem: String,
    /// How snapshots are kept.
    pub versions: Versions,
    /// Default format of new VDIs.
    pub format: ImageFormat,
    /// Supported formats of VDIs.
    pub formats: Vec<ImageFormat>,
    /// Whether the storage is read-only.
    pub read_only: bool,
    /// Its path on the host.
    pub path: AbsolutePath,
    /// The storage that it is on; absent if that cannot be found out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Storage>,
    /// Remarks, for example on how a server's storage handles flushes.
    pub notes: Vec<String>,
}

/// How snapshots are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Versions {
    /// As chains of images, each of which contains the changes relative to its parent.
    Chain,
    /// As files that share blocks (reflink), without chains.
    Reflink,
    /// Snapshots are not supported.
    None,
}

/// Space usage of a repository, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Space {
    /// Size of the file system.
    pub physical_size: u64,
    /// Used space on the file system, by anything.
    pub physical_utilisation: u64,
    /// Free space without the reserve.
    pub free: u64,
    /// Space used by the repository's images.
    pub images: u64,
    /// Space that the VDIs would use if they were full.
    pub virtual_allocation: u64,
    /// Whether guests are waiting for space.
    pub full: bool,
    /// When the repository will be full at the current rate; absent if it is not filling up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// When this was measured.
    pub measured: Timestamp,
}

/// When a repository will be full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    /// When no free space besides the reserve will be left.
    pub full_at: Timestamp,
    /// The growth rate on which the forecast is based.
    pub bytes_per_day: u64,
    /// For how long the rate was observed, in seconds.
    pub watched_seconds: u64,
}

/// Creates a repository on an empty storage.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// The storage: an empty directory.
    pub source: SrSource,
    /// Bytes to keep free, at most 2^62.
    #[serde(default, deserialize_with = "reserve")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: u64,
    /// Default format of new VDIs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// What destroying a repository would remove, and what it would leave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SrDestroyPlan {
    /// Files that would be removed: images that no VDI needs, and the repository's own metadata.
    pub removes: Vec<String>,
    /// Files that would stay, because they do not belong to the repository.
    pub leaves: Vec<String>,
}

/// Looks for repositories; changes nothing.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrProbe {
    /// The storage to probe.
    pub source: SrSource,
}

/// Which side to keep where a repository and the catalogue have diverged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SrBelieve {
    /// The repository's inventory; the catalogue's differing contents are discarded.
    Repository,
    /// The catalogue; the inventory is rewritten, and the old one is renamed, not removed.
    Catalogue,
}

/// Attaches a repository.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrAttach {
    /// Which side to keep if the repository's inventory and the catalogue have diverged; if omitted, attaching then
    /// fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub believe: Option<SrBelieve>,
}

/// A repository found by a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SrFound {
    /// The repository's identity.
    pub uuid: Uuid,
    /// The name with which it was created.
    pub name: Name,
    /// Whether the repository is already known here.
    pub known: bool,
    /// Number of image files in it.
    pub images: u64,
}

/// Adds an existing repository that was found, or a directory of existing images.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrIntroduce {
    /// Identity, if it is already a repository; otherwise it is assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// Name; if omitted, the recorded one, or the one it had when it was last attached.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Description; if omitted, the recorded one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// The storage of the repository.
    pub source: SrSource,
    /// Bytes to keep free, at most 2^62.
    #[serde(default, deserialize_with = "reserve")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: u64,
    /// Words to find it by, instead of the recorded ones.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::label::given_tags_if")]
    pub tags: Option<Tags>,
    /// Strings that programs keep with it, instead of the recorded ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_config: Option<OtherConfig>,
}

/// Changes a repository; omitted fields are not changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Bytes to keep free, at most 2^62.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "reserve_if_any")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: Option<u64>,
    /// Requests in flight of all its plugged disks together, beyond which a disk waits that has had more than others:
    /// about what the storage can do at once. 128 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 4096)]
    pub share_depth: Option<u32>,
    /// The size of the pieces into which larger transfers of its disks are split. auto by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<SizeRule>,
    /// The size up to which adjacent transfers of its disks are merged. auto by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<SizeRule>,
    /// Words to find it by, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::label::given_tags_if")]
    pub tags: Option<Tags>,
    /// Strings that programs keep with it, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_config: Option<OtherConfig>,
}

/// The result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scan {
    /// New images, and the VDIs created for them.
    pub appeared: Vec<Placed>,
    /// VDIs whose images are gone.
    pub missing: Vec<Uuid>,
    /// VDIs whose images are back.
    pub returned: Vec<Uuid>,
    /// Files that are not images of this repository or cannot be placed in it, with the reasons.
    pub unplaced: Vec<Unplaced>,
    /// Number of files by kind: images, notes, files of others.
    pub counts: BTreeMap<String, u64>,
}

/// A new image and what was made of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    /// File name in the repository.
    pub file: String,
    /// The VDI, which is read-only if other images are based on it; absent for an image marked hidden by its creator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdi: Option<Uuid>,
}

/// An unplaced file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unplaced {
    /// File name in the repository.
    pub file: String,
    /// Why the file is unplaced.
    pub problem: Problem,
}

/// Limits a reserve so that every catalogue can store it and no sum overflows.
fn reserve<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        bytes if bytes > 1 << 62 => Err(D::Error::custom(format!("a reserve must be at most 2^62 bytes, not {bytes}"))),
        bytes => Ok(bytes),
    }
}

fn reserve_if_any<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    reserve(deserializer).map(Some)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_reserve_fits_into_any_catalogue() {
        let patch = |reserve: &str| serde_json::from_str::<SrPatch>(&format!("{{\"reserve\":{reserve}}}"));
        assert_eq!(patch("4611686018427387904").unwrap().reserve, Some(1 << 62));
        assert_eq!(serde_json::from_str::<SrPatch>("{}").unwrap().reserve, None);
        for wrong in ["4611686018427387905", "18446744073709551615", "-1", "0.5", "null"] {
            assert!(patch(wrong).is_err(), "{wrong}");
        }
    }
}
