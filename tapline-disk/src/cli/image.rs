//! The words of `image`.

use clap::{Args, Subcommand};

use super::{Access, Handing, Parents};
use crate::image_name::ImageName;
use crate::size::Size;

/// Jobs on images that nobody serves.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Create an empty image, or an empty child of another
    Create(Create),
    /// Tell what an image says of itself; parents named inside it are shown and never opened
    Info(Info),
    /// Check an image's structure, and repair it where that loses nothing
    Check(Check),
    /// List which parts of the disk hold data and which read as zero
    Map(Map),
    /// Copy a disk into a new image, of another format perhaps; holes stay holes
    Convert(Convert),
    /// Compare what two disks hold
    Compare(Compare),
    /// Freeze an image as the parent of a new one, which reads as it did; raw on XFS and btrfs: share its blocks
    Snapshot(Snapshot),
    /// Make a new image that reads as this one, which other clones may stand on too
    Clone(Snapshot),
    /// Merge layers of a chain into the one below them
    Merge(Merge),
    /// Put an image on other parents without changing what it shows
    Rebase(Rebase),
    /// Copy into an image all that its parents show, and make it stand on its own
    Flatten(Flatten),
    /// Make a disk larger
    Resize(Resize),
    /// Rewrite a VHD or qcow2 image without its gaps; its content, identity and parent stay
    Compact(Compact),
}

impl ImageCommand {
    /// Where the command has its files from, where that can be chosen.
    pub fn handing(&self) -> Option<Handing> {
        match self {
            ImageCommand::Create(create) => Some(create.handing),
            ImageCommand::Info(info) => Some(info.handing),
            ImageCommand::Check(check) => Some(check.handing),
            ImageCommand::Map(map) => Some(map.handing),
            ImageCommand::Convert(convert) => Some(convert.handing),
            ImageCommand::Compare(compare) => Some(compare.handing),
            ImageCommand::Merge(merge) => Some(merge.handing),
            ImageCommand::Resize(resize) => Some(resize.handing),
            // These replace files or make notes beside them.
            ImageCommand::Snapshot(_) | ImageCommand::Clone(_) | ImageCommand::Rebase(_) => None,
            ImageCommand::Flatten(_) | ImageCommand::Compact(_) => None,
        }
    }
}

/// `image create`.
#[derive(Debug, Args)]
pub struct Create {
    /// The image to create, in a file, which is never overwritten, or on a block device that holds nothing
    pub image: ImageName,
    /// Overwrite what a block device holds
    #[arg(long, conflicts_with = "handed")]
    pub force: bool,
    /// Size of the disk; that of the parent unless given, which a child may exceed
    #[arg(long, required_unless_present = "parent")]
    pub size: Option<Size>,
    /// Allocate the whole disk now (VHD of the fixed kind)
    #[arg(long, conflicts_with = "parent")]
    pub fixed: bool,
    /// Unit of allocation of a VHD: a power of two from 512K to 16M [default: 2M, or as the parent]
    #[arg(long, value_name = "SIZE", conflicts_with = "fixed")]
    pub block_size: Option<Size>,
    /// Unit of allocation of a qcow2 image: a power of two from 64K to 2M [default: 64K, or as the parent, if larger]
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["fixed", "block_size"])]
    pub cluster_size: Option<Size>,
    /// Create a child of this image (twice and more: of this chain of them, from the top down)
    #[arg(long, value_name = "FORMAT:PATH")]
    pub parent: Vec<ImageName>,
    /// Use a chain in which a parent was changed after its child was made
    #[arg(long, requires = "parent")]
    pub accept_changed_parent: bool,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image info`.
#[derive(Debug, Args)]
pub struct Info {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// Repair what can be repaired without loss
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image map`.
#[derive(Debug, Args)]
pub struct Map {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image convert`.
#[derive(Debug, Args)]
pub struct Convert {
    /// The image to read
    #[arg(value_name = "SRC")]
    pub source: ImageName,
    /// The image to create
    #[arg(value_name = "DST")]
    pub target: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    #[command(flatten)]
    pub access: Access,
    /// Replace the target if it exists, once the conversion is complete; until then both take space. A block
    /// device that holds something is overwritten at once
    #[arg(long, conflicts_with = "handed")]
    pub force: bool,
    /// Allocate the whole target (VHD of the fixed kind)
    #[arg(long)]
    pub fixed: bool,
    /// Unit of allocation of a VHD target [default: 2M]
    #[arg(long, value_name = "SIZE", conflicts_with = "fixed")]
    pub block_size: Option<Size>,
    /// Unit of allocation of a qcow2 target [default: 64K]
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["fixed", "block_size"])]
    pub cluster_size: Option<Size>,
    /// Read both afterwards and compare
    #[arg(long)]
    pub verify: bool,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image compare`.
#[derive(Debug, Args)]
pub struct Compare {
    /// One image
    #[arg(value_name = "A")]
    pub one: ImageName,
    /// The other
    #[arg(value_name = "B")]
    pub other: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// A parent of B; repeated, from the top down
    #[arg(long, value_name = "FORMAT:PATH")]
    pub other_parent: Vec<ImageName>,
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image snapshot` and `image clone`.
#[derive(Debug, Args)]
pub struct Snapshot {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// The new image; a file that exists is never overwritten. raw: shares the blocks of a raw image (reflink)
    #[arg(long, value_name = "FORMAT:PATH")]
    pub to: ImageName,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image merge`. Layers are numbered as the chain is named: 0 is the image, 1 its parent, and so on.
#[derive(Debug, Args)]
pub struct Merge {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// The uppermost layer to merge: 0 is the image, 1 its parent, and so on
    #[arg(long, value_name = "N")]
    pub from: usize,
    /// The layer that takes in N and all between; nothing else may stand on it
    #[arg(long, value_name = "M")]
    pub into: usize,
    /// Remove the files that were merged, which hold nothing afterwards
    #[arg(long, conflicts_with = "handed")]
    pub delete: bool,
    /// Only tell whether such a merge has moved everything already, as one that was killed at its very end has
    #[arg(long, conflicts_with = "delete")]
    pub is_done: bool,
    #[command(flatten)]
    pub access: Access,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image rebase`.
#[derive(Debug, Args)]
pub struct Rebase {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// The new parent; repeated, from the top down
    #[arg(long, value_name = "FORMAT:PATH", required = true)]
    pub onto: Vec<ImageName>,
    /// Only record the new parent: for one that was moved, or whose content is known to be the same
    #[arg(long = "unsafe")]
    pub record_only: bool,
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image flatten`.
#[derive(Debug, Args)]
pub struct Flatten {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The image; what is new reads as zero
    pub image: ImageName,
    /// The new size, never less than the present one
    #[arg(long)]
    pub size: Size,
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image compact`.
#[derive(Debug, Args)]
pub struct Compact {
    /// The image; its parents need not be named, nothing of them is read
    pub image: ImageName,
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
