//! VDI: a virtual disk image.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, Description, Name, Size, Use};

/// A virtual disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vdi {
    /// Its identity, which stays whatever happens to its files.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// The repository it lies in.
    pub sr: Uuid,
    /// What a guest sees, in bytes.
    pub virtual_size: u64,
    /// What its own image takes, in bytes, when that was last looked at; images below it, which it may share, not
    /// counted.
    pub physical_utilisation: u64,
    /// The format of its own image.
    pub format: ImageFormat,
    /// The file of its own image, in its repository.
    pub file: String,
    /// Images it consists of: 1, or more if it stands on others.
    pub depth: u32,
    /// Whether it may only be read.
    pub read_only: bool,
    /// The VDI whose state it keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<Uuid>,
    /// The moment of that state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_time: Option<Timestamp>,
    /// Whether it can be used.
    pub state: VdiState,
    /// Who uses it now.
    pub users: Vec<Use>,
    /// When it was made.
    pub created: Timestamp,
}

/// Whether a VDI can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VdiState {
    /// It can.
    Ready,
    /// A file of it was not there at the last scan.
    Missing,
    /// A file of it was found damaged.
    Damaged,
    /// Its running disk and the catalogue do not agree on its files, and what happened is not certain.
    Diverged,
}

/// Formats of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ImageFormat {
    /// The disk's bytes and nothing else.
    Raw,
    /// Microsoft's Virtual Hard Disk, as XenServer uses it: at most 2040 GiB.
    Vhd,
    /// QEMU's, version 3.
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
            _ => Err(format!("«{word}» is no format: raw, vhd or qcow2")),
        }
    }
}

/// Makes an empty VDI.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiCreate {
    /// The repository to make it in.
    pub sr: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// What a guest will see, in bytes.
    pub size: Size,
    /// The format; the repository's own choice if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
}

/// Changes what is left out not at all.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Whether it may only be read; not while it is plugged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// Lets a VDI grow; it may be plugged.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiResize {
    /// What a guest will see, in bytes: no less than now.
    pub size: Size,
}

/// Keeps the state of a VDI as another one that is for reading only; it may be plugged.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiSnapshot {
    /// The snapshot's name; that of the VDI if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
}

/// Makes a VDI that begins with the state of another one and shares with it what neither changes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiClone {
    /// The clone's name; that of the VDI if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
}

/// Gives a VDI the state that one of its snapshots keeps. What was written since is lost.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiRevert {
    /// The snapshot.
    pub snapshot: Uuid,
}

/// Copies a VDI in full, into the same repository or another one.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiCopy {
    /// The repository to make it in.
    pub sr: Uuid,
    /// The copy's name; that of the VDI if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// The format; the repository's own choice if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
}

/// Makes a VDI of a file of the host.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiImport {
    /// The repository to make it in.
    pub sr: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// The file, which stands on no other.
    pub path: AbsolutePath,
    /// What the file is. It is never guessed.
    pub source_format: ImageFormat,
    /// The format of the VDI; the repository's own choice if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
}

/// Writes a VDI into a new file of the host, with all that it stands on.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiExport {
    /// The file, which must not exist.
    pub path: AbsolutePath,
    /// Its format.
    pub format: ImageFormat,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_field_that_is_not_known_is_refused_by_name() {
        let text = r#"{"sr":"9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d","name":"a","size":512,"sise":1}"#;
        assert!(serde_json::from_str::<VdiCreate>(text).unwrap_err().to_string().contains("sise"));
    }
}

/// Decides what a VDI is that is diverged.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VdiReconcile {
    /// Who is right.
    pub believe: Believed,
}

/// Whose word is taken for what a VDI consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Believed {
    /// The running disk's. VDIs that stood on files which it has no more are damaged then: what they show may have
    /// changed.
    Disk,
    /// The catalogue's. What was written to other files is not in the VDI then.
    Catalogue,
}
