//! `cargo xtask bench targets`: the performance targets of Tapline relative to its peers.
//!
//! A row has a load, the servers that run it alternately, figures, and target ratios between two of the servers.
//! Medians and ratios of medians are printed, and whether each target was met in this run: a missed target is not a
//! failure.

mod hogs;
mod images;
mod load;
mod rows;
mod run;

use std::path::PathBuf;

use testbed::options::{positive, whole_path};
use testbed::programs::root;

pub use run::run;

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Only rows whose names begin with one of these; `--list` shows the names
    #[arg(value_name = "ROW")]
    only: Vec<String>,
    /// List the rows without measuring
    #[arg(long)]
    list: bool,
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Directory for images in memory: a tmpfs
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    memory: PathBuf,
    /// Directory for images on real storage: ext4 or XFS on a disk
    #[arg(long, value_parser = whole_path, default_value_os_t = root().join("target"))]
    disk: PathBuf,
    /// Size of each image in MiB
    #[arg(long = "size", value_name = "MIB", default_value_t = 1024)]
    mib: u64,
    #[arg(long)]
    json: bool,
}

/// The storage of a row's images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// A tmpfs.
    Memory,
    /// Real storage.
    Disk,
}

/// The image of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Raw,
    /// A dynamic VHD created by Tapline: its blocks are aligned to pages.
    Vhd,
    /// A dynamic VHD created by QEMU: its blocks begin at odd sectors.
    QemuVhd,
    Qcow2,
    /// A chain of VHDs in which neighbouring 4 KiB blocks may be in different layers.
    ScatteredChain,
    /// A raw image without any data: created again for each measurement.
    Sparse,
    /// No storage.
    Null,
}

/// The server that runs a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowServer {
    Tapline(Image),
    /// Tapline with more options.
    TaplineWith(Image, &'static [&'static str]),
    /// qemu-storage-daemon.
    Qsd(Image),
    /// fio itself, without a server.
    Fio,
    /// Tapline over NBD, with fio as the client.
    TaplineNbd,
    Nbdkit,
    QemuNbd,
}

/// The load of the client.
#[derive(Clone, Copy, Debug)]
struct Load {
    /// The pattern: randread, randwrite, read or write.
    pattern: &'static str,
    block: u32,
    depth: u32,
    /// Whether the client polls for completions.
    spins: bool,
    /// Requests per second, sent one at a time.
    rate: Option<u32>,
    /// Whether the page cache is used, initially without any data of the image.
    cold: bool,
    /// Whether the image is new and empty.
    fresh: bool,
    /// Whether other processes want all of each CPU.
    hogs: bool,
}

/// A figure that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Figure {
    Iops,
    /// Requests per second of the server's CPU time.
    IopsPerCpu,
    /// Median latency in microseconds.
    P50,
    /// CPU usage of the server, as a part of one CPU.
    ServerCpu,
    /// Number of times the client slept or polled, per request.
    Waits,
    /// CPU time of the client per request, in microseconds.
    ClientCpu,
    /// Part of the server's CPU that the competing process got.
    HogCpu,
}

/// The target value of a figure.
#[derive(Clone, Copy, Debug)]
enum Threshold {
    /// At least this factor times that of the other server.
    AtLeast(f64, &'static str),
    /// At most this factor times that of the other server.
    AtMost(f64, &'static str),
    /// At most this value, independent of other servers.
    No(f64),
}

/// A target of a row.
#[derive(Clone, Copy, Debug)]
struct Target {
    of: &'static str,
    figure: Figure,
    wanted: Threshold,
}

impl RowServer {
    /// The peer's program, and the package of Debian and Ubuntu that contains it.
    fn peer(self) -> Option<(&'static str, &'static str)> {
        match self {
            RowServer::Tapline(_) | RowServer::TaplineWith(..) | RowServer::TaplineNbd => None,
            RowServer::Qsd(_) => Some(("qemu-storage-daemon", "qemu-system-common")),
            RowServer::Fio => Some(("fio", "fio")),
            RowServer::Nbdkit => Some(("nbdkit", "nbdkit")),
            RowServer::QemuNbd => Some(("qemu-nbd", "qemu-utils")),
        }
    }
}

/// A load, the servers that run it, and the targets.
#[derive(Debug)]
struct Row {
    name: &'static str,
    what: &'static str,
    storage: Storage,
    load: Load,
    /// The servers, by the names that the targets use.
    who: &'static [(&'static str, RowServer)],
    targets: &'static [Target],
}
