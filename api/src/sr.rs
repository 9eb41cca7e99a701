//! SR: a storage repository, the place where VDIs lie.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, Description, ImageFormat, Name, Problem};

/// A storage repository.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Sr {
    /// Its identity, which is recorded in the repository too.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// What it lies on.
    pub source: SrSource,
    /// Whether it can be used.
    pub state: SrState,
    /// What the storage is and can; known while it is attached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<Variant>,
    /// How full it is, when that was last looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub space: Option<Space>,
    /// Bytes that are left free: nothing new is begun that would take them.
    pub reserve: u64,
    /// Why it is lost, and what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When it was made known.
    pub created: Timestamp,
}

/// What a repository lies on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "kebab-case", deny_unknown_fields)]
pub enum SrSource {
    /// A directory of the host, on whatever file system it is.
    Dir {
        /// The directory.
        path: AbsolutePath,
    },
    /// A directory that an NFS server exports; the daemon mounts it, hard.
    Nfs {
        /// The server's name or address.
        server: String,
        /// What it exports.
        export: AbsolutePath,
        /// The protocol's version: 3, 4, 4.1 or 4.2; what both can do if it is not named.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<String>,
    },
    /// A share of an SMB server; the daemon mounts it, hard.
    Smb {
        /// The server's name or address.
        server: String,
        /// The share, and a directory in it: `vms` or `vms/tapline`.
        share: String,
        /// A file with `username=`, `password=` and `domain=` lines (mount.cifs(8)), for root only.
        credentials: AbsolutePath,
    },
    /// A directory with ISO images, for reading only.
    Iso {
        /// The directory.
        path: AbsolutePath,
    },
}

/// Whether a repository can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SrState {
    /// It is.
    Attached,
    /// It is known and not attached.
    Detached,
    /// It was attached and what it lies on has gone, or is another one now.
    Lost,
}

/// What the storage of a repository is and can.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Variant {
    /// The file system: ext4, xfs, btrfs, nfs, cifs and so on.
    pub filesystem: String,
    /// How states of a disk are kept.
    pub versions: Versions,
    /// The format of a new VDI for which none is named.
    pub format: ImageFormat,
    /// Formats that a VDI may have.
    pub formats: Vec<ImageFormat>,
    /// Nothing can be written.
    pub read_only: bool,
    /// Where it is in the host's tree.
    pub path: AbsolutePath,
    /// What is worth knowing of it: how a server's storage honours a flush, for example.
    pub notes: Vec<String>,
}

/// How states of a disk are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Versions {
    /// As chains of images, each of which holds what has changed since the one it stands on.
    Chain,
    /// As files that share blocks (reflink): no chains.
    Reflink,
    /// Not at all.
    None,
}

/// How full a repository is, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Space {
    /// Of the file system it lies on.
    pub physical_size: u64,
    /// Used on that file system, by whomever.
    pub physical_utilisation: u64,
    /// Free for us, the reserve not counted.
    pub free: u64,
    /// What its images take.
    pub images: u64,
    /// What its VDIs would take if they were full.
    pub virtual_allocation: u64,
    /// Guests wait for space.
    pub full: bool,
    /// When it will be full at the present rate; none if it does not fill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forecast: Option<Forecast>,
    /// When this was measured.
    pub measured: Timestamp,
}

/// When a repository will be full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forecast {
    /// When no byte is left beside the reserve.
    pub full_at: Timestamp,
    /// The rate that this comes of.
    pub bytes_per_day: u64,
    /// How long that rate was watched, in seconds.
    pub watched_seconds: u64,
}

/// Makes a repository in a place where there is none.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrCreate {
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// What it lies on: an empty directory.
    pub source: SrSource,
    /// Bytes to leave free: at most 2^62.
    #[serde(default, deserialize_with = "reserve")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: u64,
    /// The format of new VDIs for which none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
}

/// What the destruction of a repository would remove, and what it would leave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SrDestroyPlan {
    /// Files that are removed: images that no VDI needs, and what says that it is a repository.
    pub removes: Vec<String>,
    /// Files that stay: nobody has told the repository of them.
    pub leaves: Vec<String>,
}

/// Looks for repositories, and changes nothing.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrProbe {
    /// Where.
    pub source: SrSource,
}

/// Whose word counts where a repository and the catalogue have diverged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SrBelieve {
    /// The repository's inventory: what the catalogue says otherwise is given up.
    Repository,
    /// The catalogue: the inventory is written anew. The one that is there is renamed, not removed.
    Catalogue,
}

impl SrBelieve {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            SrBelieve::Repository => "repository",
            SrBelieve::Catalogue => "catalogue",
        }
    }
}

/// A repository that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SrFound {
    /// Its identity.
    pub uuid: Uuid,
    /// The name it was made with.
    pub name: Name,
    /// Whether it is known here already.
    pub known: bool,
    /// Image files in it.
    pub images: u64,
}

/// Makes a repository known that exists: one that was found, or a directory of images that others have made.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrIntroduce {
    /// Its identity, if there is a repository there already; else it is given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<Uuid>,
    /// Its name; the one that it has, or had when it was last attached, if that is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description; the one that it has if that is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// What it lies on.
    pub source: SrSource,
    /// Bytes to leave free: at most 2^62.
    #[serde(default, deserialize_with = "reserve")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: u64,
}

/// Changes what is left out not at all.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Bytes to leave free: at most 2^62.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "reserve_if_any")]
    #[schema(maximum = 4611686018427387904_i64)]
    pub reserve: Option<u64>,
}

/// What a scan has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Scan {
    /// Images that have appeared, and the VDIs they have become.
    pub appeared: Vec<Placed>,
    /// VDIs whose images are gone.
    pub missing: Vec<Uuid>,
    /// VDIs whose images are there again.
    pub returned: Vec<Uuid>,
    /// Files that are no image of this repository, or one that cannot be placed, and why.
    pub unplaced: Vec<Unplaced>,
    /// Files by what they are: images, notes, of others.
    pub counts: BTreeMap<String, u64>,
}

/// An image that was found and what it has become.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Placed {
    /// The file's name in the repository.
    pub file: String,
    /// The VDI, for reading only if others stand on it; none for an image that its maker has hidden.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vdi: Option<Uuid>,
}

/// A file that has no place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Unplaced {
    /// The file's name in the repository.
    pub file: String,
    /// Why.
    pub problem: Problem,
}

/// A reserve that no catalogue has trouble with, and no sum overflows.
fn reserve<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    match u64::deserialize(deserializer)? {
        bytes if bytes > 1 << 62 => Err(D::Error::custom(format!("a reserve is at most 2^62 bytes; {bytes} is more"))),
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
