//! Inventory: a repository's own record of its contents, in a file next to its images.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{ChangeTracking, Description, ImageFormat, LogicalBlockSize, Name, OtherConfig, Retention, Tags};

/// A repository's own record of its contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Inventory {
    /// The repository's identity.
    pub sr: Uuid,
    /// The repository's name.
    pub name: Name,
    /// The repository's description.
    pub description: Description,
    /// Words to find it by.
    pub tags: Tags,
    /// Strings that programs keep with it.
    pub other_config: OtherConfig,
    /// The number of changes recorded so far.
    pub generation: u64,
    /// A hash over all changes: inventories with the same head are identical.
    pub head: String,
    /// The repository's images.
    pub images: Vec<InventoryImage>,
    /// The repository's VDIs.
    pub vdis: Vec<InventoryVdi>,
}

/// An image in an inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InventoryImage {
    /// The image's identity.
    pub uuid: Uuid,
    /// File name in the repository.
    pub file: String,
    /// Its format.
    pub format: ImageFormat,
    /// Virtual size in bytes.
    pub size: u64,
    /// The image's parent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Uuid>,
    /// Whether the image was found damaged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub damaged: bool,
    /// Whether the image's VDI is diverged: it is not used until somebody has resolved this.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub diverged: bool,
    /// Whether there is no file: its VDI is a snapshot whose data was destroyed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_data: bool,
    /// Whether the image was added as hidden; it is then not merged or removed automatically.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
}

/// A VDI in an inventory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InventoryVdi {
    /// The VDI's identity.
    pub uuid: Uuid,
    /// The VDI's image.
    pub image: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default, skip_serializing_if = "Description::is_empty")]
    pub description: Description,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
    /// Whether the VDI is read-only.
    pub read_only: bool,
    /// The size of the sectors that its guest addresses, in bytes; absent if its storage decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logical_block_size: Option<LogicalBlockSize>,
    /// The VDI of which this is a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<Uuid>,
    /// When the snapshot was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_time: Option<Timestamp>,
    /// The schedule by which snapshots of it are taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Whether it was taken by the schedule of its VDI.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scheduled: bool,
    /// Whether it was taken for a backup, by a daemon that destroys it or keeps it as a base.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub for_backup: bool,
    /// The recording of its changed blocks, and the maps of changed blocks that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cbt: Option<Box<ChangeTracking>>,
    /// When the VDI was created.
    pub created: Timestamp,
}
