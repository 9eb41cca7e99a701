//! The arguments of `image`.

use std::fmt;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use control::checksum::Checksum;
use control::size::Size;
use control::tracking::ExpectedMaps;
use control::{FormatName, ImageName, NotAnImage, SizeRule};

use super::{Access, Confirm, Fetch, Handing, NewSize, Parents, Sharing, number};

/// Jobs on images that are not being served.
#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// Create an empty image, or an empty child of another image
    Create(Create),
    /// Show an image's metadata; parents recorded in it are shown but never opened
    Info(Info),
    /// Check an image's structure, and repair it where no data can be lost
    Check(Check),
    /// List which parts of the disk hold data and which read as zeroes
    Map(Map),
    /// List which parts of a disk may have changed, by its maps of changed blocks
    Changes(Changes),
    /// End a map of changed blocks for good, for a daemon: a snapshot was taken of its disk, which was not plugged
    #[command(hide = true)]
    Seal(Seal),
    /// Download a file from an HTTP server; a download that was interrupted is continued
    Fetch(Fetch),
    /// Copy a disk into a new image, possibly of another format; holes are preserved
    Convert(Convert),
    /// Show how much space a disk would take in another format
    Measure(Measure),
    /// Compare the contents of two disks
    Compare(Compare),
    /// Freeze an image as the parent of a new one with the same contents; raw on XFS and btrfs: share its blocks
    Snapshot(Snapshot),
    /// Create a new image with the same contents; an image can have several clones
    Clone(Snapshot),
    /// Merge layers of a chain into the one below them
    Merge(Merge),
    /// Change an image's parents without changing its contents
    Rebase(Rebase),
    /// Copy all data from an image's parents into it, so that it needs no parent
    Flatten(Flatten),
    /// Enlarge a disk
    Resize(Resize),
    /// Rewrite a VHD or qcow2 image without gaps; its contents, identity and parent stay
    Compact(Compact),
    /// Measure how fast a disk is read, or with --overwrite-data written
    Bench(Bench),
    /// Replay a recorded stream of requests on a disk, and compare how long they take
    Replay(Replay),
}

impl ImageCommand {
    /// Where the command gets its files from, if that can be chosen.
    pub fn handing(&self) -> Option<Handing> {
        match self {
            ImageCommand::Create(create) => Some(create.handing),
            ImageCommand::Info(info) => Some(info.handing),
            ImageCommand::Check(check) => Some(check.handing),
            ImageCommand::Map(map) => Some(map.handing),
            ImageCommand::Changes(changes) => Some(changes.handing),
            ImageCommand::Seal(seal) => Some(seal.handing),
            ImageCommand::Fetch(fetch) => Some(fetch.handing),
            ImageCommand::Convert(convert) => Some(convert.handing),
            ImageCommand::Measure(measure) => Some(measure.handing),
            ImageCommand::Compare(compare) => Some(compare.handing),
            ImageCommand::Merge(merge) => Some(merge.handing),
            ImageCommand::Resize(resize) => Some(resize.handing),
            // These replace files or create marker files next to them.
            ImageCommand::Snapshot(_) | ImageCommand::Clone(_) | ImageCommand::Rebase(_) => None,
            ImageCommand::Flatten(_) | ImageCommand::Compact(_) => None,
            // A daemon has no use for it.
            ImageCommand::Bench(_) | ImageCommand::Replay(_) => None,
        }
    }
}

/// `image create`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("length").args(["size", "size_option"]))]
pub struct Create {
    /// The image to create: a file, which is never overwritten, or a block device without data
    pub image: ImageName,
    /// Size of the disk [default: the parent's size]; a child may be larger than its parent
    #[arg(required_unless_present_any = ["parent", "size_option"])]
    pub size: Option<Size>,
    /// The size, as an option
    #[arg(long = "size", value_name = "SIZE", allow_hyphen_values = true)]
    pub size_option: Option<Size>,
    /// Overwrite the contents of a block device
    #[arg(long, conflicts_with = "handed")]
    pub force: bool,
    /// Allocate the whole disk now (fixed VHD)
    #[arg(long, conflicts_with = "parent")]
    pub fixed: bool,
    /// Block size of a VHD: a power of two from 512K to 16M [default: 2M, or the parent's]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with = "fixed")]
    pub block_size: Option<Size>,
    /// Cluster size of a qcow2 image: a power of two from 64K to 2M [default: 64K, or the parent's if larger]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with_all = ["fixed", "block_size"])]
    pub cluster_size: Option<Size>,
    /// Create a child of this image; repeat for its parents, from the top down
    #[arg(long, value_name = "FORMAT:PATH")]
    pub parent: Vec<ImageName>,
    /// Use a chain in which a parent was modified after its child was created
    #[arg(long, requires = "parent")]
    pub accept_changed_parent: bool,
    /// Have the parent process say, on standard input, in which map changes of the child are recorded later
    #[arg(long, requires_all = ["handed", "parent"], hide = true)]
    pub map_of_daemon: bool,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image info`.
#[derive(Debug, Args)]
pub struct Info {
    /// The image
    #[arg(value_parser = ImageName::to_measure)]
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Refuse a raw image that looks like one of another format, although its file is handed over: it is new to the
    /// program that does.
    #[arg(long, hide = true)]
    pub unknown: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image check`.
#[derive(Debug, Args)]
pub struct Check {
    /// The image
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// Repair what can be repaired without losing data
    #[arg(long, conflicts_with = "force_share")]
    pub repair: bool,
    /// Whether images in use are read.
    #[command(flatten)]
    pub sharing: Sharing,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image map`.
#[derive(Debug, Args)]
pub struct Map {
    /// The image
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Whether images in use are read.
    #[command(flatten)]
    pub sharing: Sharing,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image changes`.
#[derive(Debug, Args)]
pub struct Changes {
    /// The map, or those of successive intervals, the oldest first; they may be in use
    #[arg(required = true, value_name = "MAP")]
    pub maps: Vec<PathBuf>,
    /// Fail unless all writes to this image since are known to be recorded in the last of the maps
    #[arg(long, value_name = "FORMAT:PATH")]
    pub image: Option<ImageName>,
    /// How the parts are listed. xapi: a base64 bitmap of blocks of 64 KiB, as XenAPI's VDI.list_changed_blocks
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<ChangesFormat>,
    /// What a daemon has recorded of each map, in JSON; fail unless they are those, and complete
    #[arg(long, hide = true, requires = "handed")]
    pub expect: Option<ExpectedMaps>,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image seal`.
#[derive(Debug, Args)]
pub struct Seal {
    /// The map
    #[arg(value_name = "MAP")]
    pub map: PathBuf,
    /// What a daemon has recorded of it, in JSON; fail unless it is that, and complete
    #[arg(long, requires = "handed")]
    pub expect: ExpectedMaps,
    /// Where its file comes from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How changed parts are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ChangesFormat {
    /// A base64 bitmap.
    Xapi,
    /// Only their total, in JSON.
    #[value(hide = true)]
    Total,
}

/// `image convert`.
#[derive(Clone, Debug, Args)]
pub struct Convert {
    /// The image to read, the URI of a raw disk at an NBD server, or FORMAT:https://HOST/PATH; - is a raw disk on
    /// standard input
    #[arg(value_name = "SRC", value_parser = image_or_stream)]
    pub source: ImageName,
    /// The image to create, or the URI of an existing disk; - is a raw disk on standard output, vhd:- with --fixed a
    /// fixed VHD
    #[arg(value_name = "DST", value_parser = image_or_stream)]
    pub target: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Size of the new disk [default: the source's size]. What is added reads as zeroes; what is cut off must be
    /// zeroes. Needed if the source is a pipe, which must bring that much
    #[arg(long, allow_hyphen_values = true)]
    pub size: Option<Size>,
    /// Replace the target if it exists, when the conversion is complete; until then both take space. A block device
    /// with data is overwritten at once
    #[arg(long, conflicts_with = "handed")]
    pub force: bool,
    /// Allocate the whole target (fixed VHD)
    #[arg(long)]
    pub fixed: bool,
    /// Block size of a VHD target [default: 2M]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with = "fixed")]
    pub block_size: Option<Size>,
    /// Cluster size of a qcow2 target [default: 64K]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with_all = ["fixed", "block_size"])]
    pub cluster_size: Option<Size>,
    /// Compress the clusters of a qcow2 target, as far as that makes them smaller. zlib, the default, is read by every
    /// program; zstd takes less time, and is read by QEMU since version 5.1
    #[arg(long, value_name = "METHOD", num_args = 0..=1, require_equals = true, default_missing_value = "zlib")]
    pub compress: Option<Compress>,
    /// Download the source, an image at an HTTP server, as a whole first, and fail unless it has this digest; see
    /// 'image fetch'. The download is next to the target, and is continued if it was interrupted
    #[arg(long, value_name = "DIGEST|URL|auto", conflicts_with = "handed")]
    pub checksum: Option<Checksum>,
    /// Threads that compress [default: one for each processor]
    #[arg(long, value_name = "N", requires = "compress", value_parser = number::<u16>(1..=256))]
    pub threads: Option<u16>,
    /// Verify the copy by reading both afterwards
    #[arg(long, conflicts_with = "force_share")]
    pub verify: bool,
    /// Copy what can be read of a damaged image, and zeroes in place of the rest, which is listed; then the exit code
    /// is 2
    #[arg(long, conflicts_with = "verify")]
    pub salvage: bool,
    /// Whether images in use are read.
    #[command(flatten)]
    pub sharing: Sharing,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compress {
    /// Deflate, as in zlib.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// `image measure`.
#[derive(Debug, Args)]
pub struct Measure {
    /// The image to be converted
    #[arg(value_name = "SRC", required_unless_present = "size")]
    pub source: Option<ImageName>,
    /// Format of the new image
    #[arg(long, value_name = "FORMAT", value_parser = format)]
    pub format: FormatName,
    /// Size of the disk, in place of an image: it is empty
    #[arg(long, allow_hyphen_values = true, conflicts_with = "source")]
    pub size: Option<Size>,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// A VHD that has all of its space
    #[arg(long)]
    pub fixed: bool,
    /// Block size of a VHD [default: 2M]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with = "fixed")]
    pub block_size: Option<Size>,
    /// Cluster size of a qcow2 image [default: 64K]
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE", conflicts_with_all = ["fixed", "block_size"])]
    pub cluster_size: Option<Size>,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Whether images in use are read.
    #[command(flatten)]
    pub sharing: Sharing,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A format that images are written in.
fn format(word: &str) -> Result<FormatName, String> {
    FormatName::of(word).filter(|format| !format.is_read_only()).ok_or_else(|| "it must be raw, vhd or qcow2".into())
}

/// An image, or `-`: a raw disk on standard input or output.
fn image_or_stream(word: &str) -> Result<ImageName, NotAnImage> {
    if word == "-" { Ok(ImageName::raw_stream()) } else { word.parse() }
}

/// `image compare`.
#[derive(Debug, Args)]
pub struct Compare {
    /// The first image
    #[arg(value_name = "A")]
    pub one: ImageName,
    /// The second image
    #[arg(value_name = "B")]
    pub other: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// A parent of B; repeat from the top down
    #[arg(long, value_name = "FORMAT:PATH")]
    pub other_parent: Vec<ImageName>,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Whether images in use are read.
    #[command(flatten)]
    pub sharing: Sharing,
    /// Where its files come from.
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
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// The new image; an existing file is never overwritten. raw: share the blocks of a raw image (reflink)
    #[arg(long, value_name = "FORMAT:PATH")]
    pub to: ImageName,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image merge`. Layers are numbered in the order given: 0 is the image, 1 its parent, and so on.
#[derive(Debug, Args)]
pub struct Merge {
    /// The image
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// The topmost layer to merge: 0 is the image, 1 its parent, and so on
    #[arg(long, value_name = "N")]
    pub from: usize,
    /// The target layer, which receives N and all layers in between; no other image may be based on it
    #[arg(long, value_name = "M")]
    pub into: usize,
    /// Remove the merged files, which no longer hold data
    #[arg(long, conflicts_with = "handed")]
    pub delete: bool,
    /// Only check whether such a merge is already complete, as when it was killed at its very end
    #[arg(long, conflicts_with = "delete")]
    pub is_done: bool,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Where its files come from.
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
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// The new parent; repeat from the top down
    #[arg(long, value_name = "FORMAT:PATH", required = true)]
    pub onto: Vec<ImageName>,
    /// Only record the new parent, for example if it was moved or its contents are known to be the same
    #[arg(long = "unsafe")]
    pub record_only: bool,
    /// How its files are accessed.
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
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The image; new space reads as zeroes
    pub image: ImageName,
    /// The new size, at least the current one; +SIZE: that much more
    #[arg(required_unless_present = "size_option", conflicts_with = "size_option")]
    pub size: Option<NewSize>,
    /// The size, as an option
    #[arg(long = "size", value_name = "SIZE", allow_hyphen_values = true)]
    pub size_option: Option<NewSize>,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `image compact`.
#[derive(Debug, Args)]
pub struct Compact {
    /// The image; its parents are not read and need not be given
    pub image: ImageName,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `image bench`.
#[derive(Debug, Args)]
pub struct Bench {
    /// The image; null:SIZE is a disk that completes each request at once and stores nothing, model:KIND the same with
    /// the latency of a kind of storage: nvme, sata-ssd, disk or array
    #[arg(value_parser = ImageName::to_measure)]
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// Requests in flight
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = number::<u16>(1..=256))]
    pub depth: u16,
    /// Bytes of a request, a multiple of 512
    #[arg(long, default_value = "4K", allow_hyphen_values = true)]
    pub size: Size,
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 50_000, value_parser = number::<u32>(1..=10_000_000))]
    pub count: u32,
    /// Access pattern: sequential (from the start again at the end) or random
    #[arg(long, value_name = "PATTERN", default_value = "seq")]
    pub pattern: Pattern,
    /// Seed of random accesses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Write in place of reading. What the disk holds is lost
    #[arg(long)]
    pub overwrite_data: bool,
    /// Split larger transfers into pieces of this size, a power of two
    #[arg(long, value_name = "SIZE|none", default_value = "none", value_parser = fixed)]
    pub io_split: SizeRule,
    /// Merge adjacent transfers up to this size, a power of two
    #[arg(long, value_name = "SIZE|off", default_value = "off", value_parser = fixed)]
    pub io_merge: SizeRule,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A rule that follows no policy.
fn fixed(word: &str) -> Result<SizeRule, String> {
    match word.parse()? {
        SizeRule::Auto => Err("a measurement follows no policy: give a size, or none".to_owned()),
        rule => Ok(rule),
    }
}

/// `image replay`.
#[derive(Debug, Args)]
pub struct Replay {
    /// The image, at least as large as the disk's part that the recording has requests for
    pub image: ImageName,
    /// The file written by `tapline trace --record`. It contains no data: writes are of one repeated pattern
    pub recording: PathBuf,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// 1: the recorded pace. N: N times as fast. max: each as soon as no more are in flight than when it was recorded
    #[arg(long, value_name = "N|max", default_value = "1")]
    pub speed: Speed,
    /// Replay writes, discards and writes of zeroes as well. What the disk holds is lost
    #[arg(long)]
    pub write: bool,
    /// Whether to ask before that.
    #[command(flatten)]
    pub confirm: Confirm,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How fast a recording is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    /// The recorded speed times this factor.
    Times(NonZeroU16),
    /// As fast as answers come.
    Max,
}

impl FromStr for Speed {
    type Err = String;

    fn from_str(word: &str) -> Result<Speed, String> {
        match (word, word.parse()) {
            ("max", _) => Ok(Speed::Max),
            (_, Ok(times)) => Ok(Speed::Times(times)),
            _ => Err("give a whole number, 1 or more, or max".to_owned()),
        }
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Speed::Times(times) => times.fmt(f),
            Speed::Max => f.write_str("max"),
        }
    }
}

/// Where the requests of a measurement go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// One behind the other.
    Seq,
    /// Anywhere.
    Random,
}
