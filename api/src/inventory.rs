//! Inventory: what a repository says of itself, in a file beside its images.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{Description, ImageFormat, Name};

/// What a repository says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Inventory {
    /// The repository's identity.
    pub sr: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// How many changes it has recorded.
    pub generation: u64,
    /// A hash over all of them: two inventories with one head are one.
    pub head: String,
    /// Its images.
    pub images: Vec<InventoryImage>,
    /// Its VDIs.
    pub vdis: Vec<InventoryVdi>,
}

/// An image as an inventory has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InventoryImage {
    /// Its identity.
    pub uuid: Uuid,
    /// Its file's name in the repository.
    pub file: String,
    /// Its format.
    pub format: ImageFormat,
    /// What it shows, in bytes.
    pub size: u64,
    /// The image it stands on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<Uuid>,
    /// It was found damaged.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub damaged: bool,
    /// The VDI that it shows is diverged: nothing uses it before somebody has decided what it consists of.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub diverged: bool,
    /// It was taken in hidden, and is not merged or removed by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kept: bool,
}

/// A VDI as an inventory has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct InventoryVdi {
    /// Its identity.
    pub uuid: Uuid,
    /// The image it shows.
    pub image: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default, skip_serializing_if = "Description::is_empty")]
    pub description: Description,
    /// Whether it may only be read.
    pub read_only: bool,
    /// The VDI whose state it keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<Uuid>,
    /// The moment of that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_time: Option<Timestamp>,
    /// When it was made.
    pub created: Timestamp,
}
