//! The arguments of `disk`: requests to a disk that is being served.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use control::ImageName;
use control::size::Size;

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

/// The verbs. Layers are numbered from the leaf, 0, downwards.
#[derive(Debug, Subcommand)]
pub enum DiskVerb {
    /// Take a snapshot: create a new leaf on the current one, or a copy that shares its blocks
    Snapshot {
        /// The new file; raw on XFS and btrfs creates a copy, every other format a chain
        #[arg(long, value_name = "FORMAT:PATH")]
        to: ImageName,
        /// How to take the snapshot
        #[arg(long, value_name = "METHOD", default_value = "auto")]
        method: SnapshotMethod,
    },
    /// Merge layers into the one below them
    Merge {
        /// The topmost layer to merge; 0 is the leaf
        #[arg(long, value_name = "LAYER")]
        from: usize,
        /// The target layer
        #[arg(long, value_name = "LAYER")]
        into: usize,
        /// Limit of bytes copied per second
        #[arg(long, allow_hyphen_values = true, value_name = "SIZE")]
        rate: Option<Size>,
        /// Do not wait for the end; merge-status shows the progress
        #[arg(long)]
        detach: bool,
        /// Remove the merged files, which no longer hold data
        #[arg(long)]
        delete: bool,
        /// Expected chain; refuse on mismatch. From the leaf down; makes it safe to repeat the command after a crash
        #[arg(long, value_name = "FORMAT:PATH", num_args = 1..)]
        expect: Vec<ImageName>,
    },
    /// Retry requests that are waiting for space (serve --when-full wait)
    Space,
    /// Show the merge's progress, or how the last one ended
    MergeStatus,
    /// Pause the merge
    MergePause,
    /// Resume the merge
    MergeResume,
    /// Stop the merge; the disk stays valid, and another merge continues from there
    MergeCancel,
    /// Revert the disk to a layer; no client may be connected
    Revert {
        /// The layer
        #[arg(long, value_name = "LAYER")]
        to: usize,
        /// The new leaf on top of it
        #[arg(long, value_name = "FORMAT:PATH")]
        leaf: ImageName,
    },
    /// Create an empty child of a read-only layer, for another disk
    Clone {
        /// The layer: 1 or below
        #[arg(long, value_name = "LAYER")]
        of: usize,
        /// The new file
        #[arg(long, value_name = "FORMAT:PATH")]
        to: ImageName,
    },
    /// Enlarge the disk and notify its guest
    Resize {
        /// The new size
        #[arg(long, allow_hyphen_values = true)]
        size: Size,
    },
    /// Replace the process that serves the disk; its guest only notices a short wait
    Upgrade {
        /// The program to start [default: the tapline-disk that belongs to this program]
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
        /// Give up and change nothing if the guest's requests would have to wait longer than this many milliseconds
        #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
        pause_max: u64,
    },
    /// Pause all requests; everything is durable while they are paused
    Pause,
    /// Resume requests
    Resume,
    /// List the layers
    Layers,
    /// Show I/O statistics
    Stats,
    /// Show the protocol version
    Version,
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
}
