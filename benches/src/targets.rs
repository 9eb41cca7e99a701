//! `cargo xtask bench targets`: the figures that Tapline is to reach, each beside the peers that it is measured by.
//!
//! A row is a load, those who carry it out in turns, a figure, and what its ratio between two of them is to be. What is
//! printed are medians and ratios of medians, and whether each target was met in this run: nothing fails by it.

mod hogs;
mod images;
mod load;
mod rows;
mod run;

use std::path::PathBuf;

use testbed::options::{positive, whole_path};
use testbed::programs::root;

pub use run::run;

/// How to measure them.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only rows whose names begin with one of these; `--list` shows the names
    #[arg(value_name = "ROW")]
    only: Vec<String>,
    /// Names of the rows, and no measurement
    #[arg(long)]
    list: bool,
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Of each measurement
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Where the images in memory go: a tmpfs
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    memory: PathBuf,
    /// Where the images on real storage go: ext4 or XFS on a disk
    #[arg(long, value_parser = whole_path, default_value_os_t = root().join("target"))]
    disk: PathBuf,
    /// Size of each image
    #[arg(long = "size", value_name = "MIB", default_value_t = 1024)]
    mib: u64,
    #[arg(long)]
    json: bool,
}

/// Where a row's images lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// On a tmpfs.
    Memory,
    /// On real storage.
    Disk,
}

/// An image of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Raw,
    /// Dynamic, made by us: its blocks begin at whole pages.
    Vhd,
    /// Dynamic, made by QEMU: its blocks begin at odd sectors.
    QemuVhd,
    Qcow2,
    /// A chain of VHDs in which each 4 KiB may live in another layer than the next.
    ScatteredChain,
    /// Raw, and nothing was ever written to it: made anew for each measurement.
    Sparse,
    /// No storage at all.
    Null,
}

/// Who carries a load out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Tapline(Image),
    /// The same with more options.
    TaplineWith(Image, &'static [&'static str]),
    /// qemu-storage-daemon.
    Qsd(Image),
    /// fio itself, with no server.
    Fio,
    /// Over NBD, with fio as the client.
    TaplineNbd,
    Nbdkit,
    QemuNbd,
}

/// What the client does.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// randread, randwrite, read or write.
    pattern: &'static str,
    block: u32,
    depth: u32,
    /// The client spins for answers.
    spins: bool,
    /// Requests a second, one at a time.
    rate: Option<u32>,
    /// Through the page cache, which holds nothing of the image at first.
    cold: bool,
    /// On an image that nothing was written to yet.
    fresh: bool,
    /// Another process wants all of each CPU meanwhile.
    hogs: bool,
}

/// What is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Iops,
    /// Requests a second of the server's CPU time.
    IopsPerCpu,
    /// Median of the latency, microseconds.
    P50,
    /// Of one CPU, the part that the server took.
    ServerCpu,
    /// Times the client went to sleep or looked again, a request.
    Waits,
    /// Microseconds of the client's CPU time, a request.
    ClientCpu,
    /// Of the server's CPU, the part that the process got which wants all of it.
    HogCpu,
}

/// What a figure is to be.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// At least so many times that of the other.
    AtLeast(f64, &'static str),
    /// At most so many times that of the other.
    AtMost(f64, &'static str),
    /// At most this, whatever others have.
    No(f64),
}

/// One target.
#[derive(Clone, Copy, Debug)]
struct Target {
    of: &'static str,
    figure: Figure,
    wanted: Wanted,
}

impl Who {
    /// The program of another project that it takes, and the package of Debian and Ubuntu that has it.
    fn peer(self) -> Option<(&'static str, &'static str)> {
        match self {
            Who::Tapline(_) | Who::TaplineWith(..) | Who::TaplineNbd => None,
            Who::Qsd(_) => Some(("qemu-storage-daemon", "qemu-system-common")),
            Who::Fio => Some(("fio", "fio")),
            Who::Nbdkit => Some(("nbdkit", "nbdkit")),
            Who::QemuNbd => Some(("qemu-nbd", "qemu-utils")),
        }
    }
}

/// A load, who carries it out, and what is to come of it.
#[derive(Debug)]
struct Row {
    name: &'static str,
    what: &'static str,
    storage: Storage,
    load: Load,
    /// By the names that the targets use.
    who: &'static [(&'static str, Who)],
    targets: &'static [Target],
}
