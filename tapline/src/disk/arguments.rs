//! The arguments of `disk`: requests to a disk that is being served.
//!
//! Invariant: each verb of crate `control` for users has a command here; a missing one is a compile error.

use std::fmt::Debug;
use std::path::PathBuf;

use arguments::{LimitWords, number};
use clap::{Args, Subcommand, ValueEnum};
use control::ask::{self, Method};
use control::limits::Limits;
use control::size::Size;
use control::{Ask, Error, ImageName, POLLING_MAX_US, SizeRule, THREADS_MAX, with_verbs};

use super::{Target, execute, human, whole, whole_path};
use crate::failure::Failure;
use crate::hand_over::disk_program;

/// Arguments of `disk`.
#[derive(Debug, Args)]
pub struct Disk {
    /// The disk's control socket (`serve --control`)
    #[arg(value_name = "SOCKET")]
    pub control: PathBuf,
    /// The request
    #[command(subcommand)]
    pub verb: DiskVerb,
}

/// A verb of the control socket as a command.
pub trait DiskRequest: Ask {
    /// The arguments of the command.
    type Arguments: Args + Debug;

    /// Builds the request from the arguments.
    fn of(arguments: &Self::Arguments) -> Result<Self, Error>;

    /// Formats the reply as lines for users.
    fn shown(answer: &Self::Answer) -> Vec<String>;
}

macro_rules! words {
    (
        $($(#[$doc:meta])* $word:literal $kind:ident::$verb:ident -> $answer:ty;)*
        for programs: $($(#[$_doc:meta])* $_word:literal $_kind:ident::$_verb:ident -> $_answer:ty;)*
    ) => {
        /// The verbs. Layers are numbered from the leaf, 0, downwards.
        #[derive(Debug, Subcommand)]
        pub enum DiskVerb {
            $($(#[$doc])* #[command(name = $word)] $verb(<ask::$verb as DiskRequest>::Arguments),)*
        }

        impl DiskVerb {
            /// Sends the verb to a disk and prints the reply.
            pub(super) fn execute(&self, disk: &Target<'_>) -> Result<(), Failure> {
                match self {
                    $(DiskVerb::$verb(arguments) => execute::<ask::$verb>(disk, arguments),)*
                }
            }
        }
    };
}

with_verbs!(words);

#[derive(Debug, Args)]
pub struct NoArguments {}

/// Implements [`DiskRequest`] for verbs without arguments.
macro_rules! without_arguments {
    ($($verb:ident $shown:ident;)*) => {
        $(impl DiskRequest for ask::$verb {
            type Arguments = NoArguments;

            fn of(_: &NoArguments) -> Result<ask::$verb, Error> {
                Ok(ask::$verb {})
            }

            fn shown(answer: &Self::Answer) -> Vec<String> {
                human::$shown(answer)
            }
        })*
    };
}

without_arguments! {
    Version version;
    Layers layers;
    Stats stats;
    MergeStatus merge;
    MergePause merge;
    MergeResume merge;
    MergeCancel merge;
    Space space;
    Pause paused;
    Resume paused;
}

#[derive(Debug, Args)]
pub struct Snapshot {
    /// The new file; raw on XFS and btrfs creates a copy, every other format a chain
    #[arg(long, value_name = "FORMAT:PATH")]
    pub to: ImageName,
    /// How to take the snapshot
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    pub method: SnapshotMethod,
    /// A new map of changed blocks, which continues the present one; that ends with the snapshot [default: the present
    /// one continues]
    #[arg(long, value_name = "MAP")]
    pub map: Option<PathBuf>,
}

impl DiskRequest for ask::Snapshot {
    type Arguments = Snapshot;

    fn of(given: &Snapshot) -> Result<ask::Snapshot, Error> {
        let method = match given.method {
            SnapshotMethod::Auto => Method::Auto,
            SnapshotMethod::Reflink => Method::Reflink,
            SnapshotMethod::Chain => Method::Chain,
        };
        let map = given.map.as_deref().map(whole_path).transpose()?;
        Ok(ask::Snapshot { to: whole(&given.to)?, method, map, new: None })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::snapshot(answer)
    }
}

#[derive(Debug, Args)]
pub struct Track {
    /// The file of the new map, which must not exist
    #[arg(value_name = "MAP")]
    pub map: PathBuf,
}

impl DiskRequest for ask::Track {
    type Arguments = Track;

    fn of(given: &Track) -> Result<ask::Track, Error> {
        Ok(ask::Track { map: whole_path(&given.map)?, new: None })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::tracked(answer)
    }
}

#[derive(Debug, Args)]
pub struct Untrack {
    /// The file of the map was removed: only for a map that is doubtful
    #[arg(long)]
    pub removed: bool,
}

impl DiskRequest for ask::Untrack {
    type Arguments = Untrack;

    fn of(given: &Untrack) -> Result<ask::Untrack, Error> {
        Ok(ask::Untrack { removed: given.removed, recorded: false })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::tracked(answer)
    }
}

#[derive(Debug, Args)]
pub struct Merge {
    /// The topmost layer to merge; 0 is the leaf
    #[arg(long, value_name = "LAYER", value_parser = number::<usize>(0..=u64::MAX))]
    pub from: usize,
    /// The target layer
    #[arg(long, value_name = "LAYER", value_parser = number::<usize>(0..=u64::MAX))]
    pub into: usize,
    /// Limit of bytes copied per second
    #[arg(long, allow_hyphen_values = true, value_name = "SIZE")]
    pub rate: Option<Size>,
    /// Do not wait for the end; merge-status shows the progress
    #[arg(long)]
    pub detach: bool,
    /// Remove the merged files, which no longer hold data
    #[arg(long)]
    pub delete: bool,
    /// Expected chain; refuse on mismatch. From the leaf down; makes it safe to repeat the command after a crash
    #[arg(long, value_name = "FORMAT:PATH", num_args = 1..)]
    pub expect: Vec<ImageName>,
}

impl DiskRequest for ask::Merge {
    type Arguments = Merge;

    fn of(given: &Merge) -> Result<ask::Merge, Error> {
        let Merge { from, into, rate, detach, delete, ref expect } = *given;
        let expect = expect.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
        let expect = (!expect.is_empty()).then_some(expect);
        Ok(ask::Merge { from, into, rate: rate.map(|rate| rate.0), follow: !detach, delete, expect })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::merge(answer)
    }
}

#[derive(Debug, Args)]
pub struct Revert {
    /// The layer
    #[arg(long, value_name = "LAYER", value_parser = number::<usize>(0..=u64::MAX))]
    pub to: usize,
    /// The new leaf on top of it
    #[arg(long, value_name = "FORMAT:PATH")]
    pub leaf: ImageName,
}

impl DiskRequest for ask::Revert {
    type Arguments = Revert;

    fn of(given: &Revert) -> Result<ask::Revert, Error> {
        Ok(ask::Revert { to: given.to, leaf: whole(&given.leaf)? })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::revert(answer)
    }
}

#[derive(Debug, Args)]
pub struct Clone {
    /// The layer: 1 or below
    #[arg(long, value_name = "LAYER", value_parser = number::<usize>(0..=u64::MAX))]
    pub of: usize,
    /// The new file
    #[arg(long, value_name = "FORMAT:PATH")]
    pub to: ImageName,
}

impl DiskRequest for ask::Clone {
    type Arguments = Clone;

    fn of(given: &Clone) -> Result<ask::Clone, Error> {
        Ok(ask::Clone { of: given.of, to: whole(&given.to)? })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::clone(answer)
    }
}

#[derive(Debug, Args)]
pub struct Resize {
    /// The new size
    #[arg(long, allow_hyphen_values = true)]
    pub size: Size,
}

impl DiskRequest for ask::Resize {
    type Arguments = Resize;

    fn of(given: &Resize) -> Result<ask::Resize, Error> {
        Ok(ask::Resize { size: given.size.0, recorded: false })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::resize(answer)
    }
}

#[derive(Debug, Args)]
pub struct Limit {
    /// All limits; those not given are removed.
    #[command(flatten)]
    pub words: LimitWords,
    /// Remove all limits
    #[arg(long, conflicts_with_all = arguments::LIMITS, conflicts_with = "burst")]
    pub none: bool,
}

impl DiskRequest for ask::Limit {
    type Arguments = Limit;

    fn of(given: &Limit) -> Result<ask::Limit, Error> {
        let limits = if given.none { Some(Limits::default()) } else { given.words.limits()? };
        Ok(ask::Limit { limits, recorded: false })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::limited(answer)
    }
}

#[derive(Debug, Args)]
pub struct Share {
    /// Its weight from now on: a disk with twice the weight of another one gets twice as much of the storage
    #[arg(long, value_name = "N")]
    pub weight: Option<u32>,
}

impl DiskRequest for ask::Share {
    type Arguments = Share;

    fn of(given: &Share) -> Result<ask::Share, Error> {
        given.weight.map_or(Ok(()), control::share::check_weight)?;
        Ok(ask::Share { weight: given.weight, ..ask::Share::default() })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::shared(answer)
    }
}

#[derive(Debug, Args)]
pub struct Upgrade {
    /// The program to start [default: the tapline-disk that belongs to this program]
    #[arg(long, value_name = "PATH")]
    pub program: Option<PathBuf>,
    /// Give up and change nothing if the guest's requests would have to wait longer than this many milliseconds
    #[arg(long, value_name = "MS", default_value_t = 50, value_parser = number::<u64>(1..=60_000))]
    pub pause_max: u64,
}

impl DiskRequest for ask::Upgrade {
    type Arguments = Upgrade;

    fn of(given: &Upgrade) -> Result<ask::Upgrade, Error> {
        let program = given.program.as_deref().map_or_else(disk_program, std::path::absolute);
        let program = program.map_err(|error| Error::cannot("find the program to start", error))?;
        let pause_max = Some(given.pause_max.saturating_mul(1000));
        Ok(ask::Upgrade { program: Some(program), successor: false, pause_max })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::upgrade(answer)
    }
}

#[derive(Debug, Args)]
pub struct Polling {
    /// Busy-polling: off, on or adaptive
    #[arg(long, value_name = "WHEN")]
    pub mode: Option<arguments::Polling>,
    /// Maximum time of such a look
    #[arg(long, value_name = "MICROSECONDS", value_parser = number::<u64>(0..=POLLING_MAX_US))]
    pub max: Option<u64>,
}

impl DiskRequest for ask::Polling {
    type Arguments = Polling;

    fn of(given: &Polling) -> Result<ask::Polling, Error> {
        Ok(ask::Polling { mode: given.mode.map(Into::into), max_us: given.max })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::polling(answer)
    }
}

#[derive(Debug, Args)]
pub struct Shape {
    /// Split larger transfers into pieces of this size, a power of two; auto: as the policy says
    #[arg(long, value_name = "SIZE|none|auto")]
    pub split: Option<SizeRule>,
    /// Merge adjacent transfers up to this size, a power of two; auto: as the policy says
    #[arg(long, value_name = "SIZE|off|auto")]
    pub merge: Option<SizeRule>,
}

impl DiskRequest for ask::Shape {
    type Arguments = Shape;

    fn of(given: &Shape) -> Result<ask::Shape, Error> {
        Ok(ask::Shape { split: given.split, merge: given.merge, ..ask::Shape::default() })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::shape(answer)
    }
}

#[derive(Debug, Args)]
pub struct Threads {
    /// How many it may use from now on, its own among them
    #[arg(value_name = "N", value_parser = number::<usize>(1..=THREADS_MAX as u64))]
    pub most: Option<usize>,
}

impl DiskRequest for ask::Threads {
    type Arguments = Threads;

    fn of(given: &Threads) -> Result<ask::Threads, Error> {
        Ok(ask::Threads { most: given.most })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::threads(answer)
    }
}

/// Values of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SnapshotMethod {
    /// A reflink copy if the file system supports it, otherwise a chain.
    Auto,
    /// A reflink copy.
    Reflink,
    /// A chain.
    Chain,
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        disk: Disk,
    }

    fn parse(line: &str) -> Result<Disk, String> {
        Words::try_parse_from(line.split_whitespace()).map(|words| words.disk).map_err(|error| error.to_string())
    }

    #[test]
    fn a_verb_needs_its_arguments() {
        assert!(parse("disk /s snapshot").unwrap_err().contains("--to"));
        assert!(parse("disk /s merge --from 0").unwrap_err().contains("--into"));
        assert!(parse("disk /s frobnicate").is_err());
        assert!(parse("disk layers").is_err());
    }

    #[test]
    fn limits_replace_each_other_and_none_stands_alone() {
        let limits = |line: &str| match parse(line).unwrap().verb {
            DiskVerb::Limit(given) => ask::Limit::of(&given).map(|limit| limit.limits),
            other => panic!("{other:?}"),
        };
        assert_eq!(limits("disk /s limit"), Ok(None), "they are shown");
        assert_eq!(limits("disk /s limit --none"), Ok(Some(Limits::default())));
        let given = limits("disk /s limit --iops 5000 --bandwidth 100M --burst 2s").unwrap();
        assert_eq!(given, Some("iops=5000,bandwidth=100M,burst=2s".parse().unwrap()));
        assert!(limits("disk /s limit --iops 100 --write-iops 200").is_err());
        assert!(parse("disk /s limit --none --iops 100").is_err());
    }

    #[test]
    fn a_weight_is_checked_before_the_request_is_sent() {
        let share = |line: &str| match parse(line).unwrap().verb {
            DiskVerb::Share(given) => ask::Share::of(&given).map(|share| share.weight),
            other => panic!("{other:?}"),
        };
        assert_eq!((share("disk /s share"), share("disk /s share --weight 300")), (Ok(None), Ok(Some(300))));
        assert!(share("disk /s share --weight 0").unwrap_err().message.contains("give 1 to 10000"));
    }
}
