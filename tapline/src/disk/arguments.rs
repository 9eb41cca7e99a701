//! The arguments of `disk`: requests to a disk that is being served.
//!
//! Invariant: each verb of crate `control` that people may need has its word here. One that lacks it does not compile.

use std::fmt::Debug;
use std::path::PathBuf;

use arguments::{LimitWords, number};
use clap::{Args, Subcommand, ValueEnum};
use control::ask::{self, Method};
use control::limits::Limits;
use control::size::Size;
use control::{Ask, Error, ImageName, POLLING_MAX_US, SizeRule, THREADS_MAX, with_verbs};

use super::{Target, human, tell, whole};
use crate::failure::Failure;
use crate::hand_over::disk_program;

/// `disk`.
#[derive(Debug, Args)]
pub struct Disk {
    /// The disk's control socket (`serve --control`)
    #[arg(value_name = "SOCKET")]
    pub control: PathBuf,
    /// The request
    #[command(subcommand)]
    pub verb: DiskVerb,
}

/// A verb as it is said on the command line.
pub trait Said: Ask {
    /// Its arguments.
    type Arguments: Args + Debug;

    /// The request.
    fn of(arguments: &Self::Arguments) -> Result<Self, Error>;

    /// The answer, as lines for people.
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
            $($(#[$doc])* #[command(name = $word)] $verb(<ask::$verb as Said>::Arguments),)*
        }

        impl DiskVerb {
            /// Asks a disk for it.
            pub(super) fn tell(&self, disk: &Target<'_>) -> Result<(), Failure> {
                match self {
                    $(DiskVerb::$verb(arguments) => tell::<ask::$verb>(disk, arguments),)*
                }
            }
        }
    };
}

with_verbs!(words);

#[derive(Debug, Args)]
pub struct Nothing {}

/// Verbs without arguments.
macro_rules! alone {
    ($($verb:ident $shown:ident;)*) => {
        $(impl Said for ask::$verb {
            type Arguments = Nothing;

            fn of(_: &Nothing) -> Result<ask::$verb, Error> {
                Ok(ask::$verb {})
            }

            fn shown(answer: &Self::Answer) -> Vec<String> {
                human::$shown(answer)
            }
        })*
    };
}

alone! {
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
}

impl Said for ask::Snapshot {
    type Arguments = Snapshot;

    fn of(said: &Snapshot) -> Result<ask::Snapshot, Error> {
        let method = match said.method {
            SnapshotMethod::Auto => Method::Auto,
            SnapshotMethod::Reflink => Method::Reflink,
            SnapshotMethod::Chain => Method::Chain,
        };
        Ok(ask::Snapshot { to: whole(&said.to)?, method })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::snapshot(answer)
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

impl Said for ask::Merge {
    type Arguments = Merge;

    fn of(said: &Merge) -> Result<ask::Merge, Error> {
        let Merge { from, into, rate, detach, delete, ref expect } = *said;
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

impl Said for ask::Revert {
    type Arguments = Revert;

    fn of(said: &Revert) -> Result<ask::Revert, Error> {
        Ok(ask::Revert { to: said.to, leaf: whole(&said.leaf)? })
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

impl Said for ask::Clone {
    type Arguments = Clone;

    fn of(said: &Clone) -> Result<ask::Clone, Error> {
        Ok(ask::Clone { of: said.of, to: whole(&said.to)? })
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

impl Said for ask::Resize {
    type Arguments = Resize;

    fn of(said: &Resize) -> Result<ask::Resize, Error> {
        Ok(ask::Resize { size: said.size.0, recorded: false })
    }

    fn shown(answer: &Self::Answer) -> Vec<String> {
        human::resize(answer)
    }
}

#[derive(Debug, Args)]
pub struct Limit {
    /// The limits: all of them, since what is not given is not limited any more.
    #[command(flatten)]
    pub words: LimitWords,
    /// Remove all limits
    #[arg(long, conflicts_with_all = arguments::LIMITS, conflicts_with = "burst")]
    pub none: bool,
}

impl Said for ask::Limit {
    type Arguments = Limit;

    fn of(said: &Limit) -> Result<ask::Limit, Error> {
        let limits = if said.none { Some(Limits::default()) } else { said.words.limits()? };
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

impl Said for ask::Share {
    type Arguments = Share;

    fn of(said: &Share) -> Result<ask::Share, Error> {
        said.weight.map_or(Ok(()), control::share::check_weight)?;
        Ok(ask::Share { weight: said.weight, ..ask::Share::default() })
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

impl Said for ask::Upgrade {
    type Arguments = Upgrade;

    fn of(said: &Upgrade) -> Result<ask::Upgrade, Error> {
        let program = said.program.as_deref().map_or_else(disk_program, std::path::absolute);
        let program = program.map_err(|error| Error::cannot("find the program to start", error))?;
        let pause_max = Some(said.pause_max.saturating_mul(1000));
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

impl Said for ask::Polling {
    type Arguments = Polling;

    fn of(said: &Polling) -> Result<ask::Polling, Error> {
        Ok(ask::Polling { mode: said.mode.map(Into::into), max_us: said.max })
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

impl Said for ask::Shape {
    type Arguments = Shape;

    fn of(said: &Shape) -> Result<ask::Shape, Error> {
        Ok(ask::Shape { split: said.split, merge: said.merge, ..ask::Shape::default() })
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

impl Said for ask::Threads {
    type Arguments = Threads;

    fn of(said: &Threads) -> Result<ask::Threads, Error> {
        Ok(ask::Threads { most: said.most })
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
            DiskVerb::Limit(said) => ask::Limit::of(&said).map(|limit| limit.limits),
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
    fn a_weight_is_checked_before_the_disk_is_asked() {
        let share = |line: &str| match parse(line).unwrap().verb {
            DiskVerb::Share(said) => ask::Share::of(&said).map(|share| share.weight),
            other => panic!("{other:?}"),
        };
        assert_eq!((share("disk /s share"), share("disk /s share --weight 300")), (Ok(None), Ok(Some(300))));
        assert!(share("disk /s share --weight 0").unwrap_err().message.contains("give 1 to 10000"));
    }
}
