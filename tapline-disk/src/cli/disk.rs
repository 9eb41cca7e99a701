//! The words of `disk`: what a disk that is served can be asked.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use crate::image_name::ImageName;
use crate::size::Size;

/// `disk`.
#[derive(Debug, Args)]
pub struct Disk {
    /// The socket named by `serve --control`
    pub socket: PathBuf,
    /// What to ask
    #[command(subcommand)]
    pub verb: DiskVerb,
    /// Print what the disk says, as it says it: JSON, a line each
    #[arg(long, global = true)]
    pub json: bool,
}

/// The verbs. Layers are numbered from the leaf, 0, down.
#[derive(Debug, Subcommand)]
pub enum DiskVerb {
    /// Keep the disk as it is now: a new leaf on the present one, or a copy that shares its blocks
    Snapshot {
        /// The new file; raw on XFS and btrfs makes a copy, every other format a chain
        #[arg(long, value_name = "FORMAT:PATH")]
        to: ImageName,
        /// Which way
        #[arg(long, value_name = "METHOD", default_value = "auto")]
        method: SnapshotMethod,
    },
    /// Move what layers hold into the one below them
    Merge {
        /// The uppermost layer that is merged; 0 is the leaf
        #[arg(long, value_name = "LAYER")]
        from: usize,
        /// The layer that takes it all
        #[arg(long, value_name = "LAYER")]
        into: usize,
        /// Copy at most so much a second
        #[arg(long, value_name = "SIZE")]
        rate: Option<Size>,
        /// Do not wait until it ends; merge-status tells how far it is
        #[arg(long)]
        detach: bool,
        /// Remove the files that hold nothing any more
        #[arg(long)]
        delete: bool,
        /// The chain that the numbers are meant of, from the leaf down; safe to give again after a crash
        #[arg(long, value_name = "FORMAT:PATH", num_args = 1..)]
        expect: Vec<ImageName>,
    },
    /// Try again what waits for space (serve --when-full wait), since there may be some
    Space,
    /// Tell how far the merge is, or how the last one ended
    MergeStatus,
    /// Stop the merge for a while
    MergePause,
    /// Go on with the merge
    MergeResume,
    /// End the merge where it is; the disk stays valid, and another merge goes on from there
    MergeCancel,
    /// Make the disk what it was when a layer was its leaf; nobody may be connected
    Revert {
        /// The layer
        #[arg(long, value_name = "LAYER")]
        to: usize,
        /// The new leaf on it
        #[arg(long, value_name = "FORMAT:PATH")]
        leaf: ImageName,
    },
    /// Make an empty child of a read-only layer, for another disk
    Clone {
        /// The layer: 1 or below
        #[arg(long, value_name = "LAYER")]
        of: usize,
        /// The new file
        #[arg(long, value_name = "FORMAT:PATH")]
        to: ImageName,
    },
    /// Make the disk larger; its guest is told
    Resize {
        /// The new size
        #[arg(long)]
        size: Size,
    },
    /// Have another process take the place of the one that serves the disk; its guest notices nothing but a short wait
    Upgrade {
        /// The program to be started [default: this one]
        #[arg(long, value_name = "PATH")]
        program: Option<PathBuf>,
        /// Give up, and leave all as it is, if the guest's requests would have to wait longer than so many milliseconds
        #[arg(long, value_name = "MS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(1..=60_000))]
        pause_max: u64,
    },
    /// Hold all requests; everything is durable while they are held
    Pause,
    /// Let requests go on
    Resume,
    /// List the layers
    Layers,
    /// Tell what the disk has done
    Stats,
    /// Tell which version of the protocol is spoken
    Version,
}

/// Values of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SnapshotMethod {
    /// A copy by reflink where the file system can, else a chain.
    Auto,
    /// A copy by reflink.
    Reflink,
    /// A chain.
    Chain,
}

#[cfg(test)]
mod test {
    use crate::cli::Command;
    use crate::cli::test::parse;

    #[test]
    fn json_may_stand_behind_the_verb() {
        for line in ["disk /s layers --json", "disk --json /s layers", "disk /s snapshot --to vhd:b --json"] {
            let Ok(Command::Disk(disk)) = parse(line) else { panic!("{line}") };
            assert!(disk.json, "{line}");
        }
    }

    #[test]
    fn a_verb_needs_its_arguments() {
        assert!(parse("disk /s snapshot").unwrap_err().contains("--to"));
        assert!(parse("disk /s merge --from 0").unwrap_err().contains("--into"));
        assert!(parse("disk /s frobnicate").is_err());
        assert!(parse("disk layers").is_err());
    }
}
