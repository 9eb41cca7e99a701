//! The command lines of the disk process and of the backup program: their words and their values, for these programs,
//! which carry them out, and for the command line `tapline`, which starts them. It knows no image and does nothing.

#![forbid(unsafe_code)]

pub mod backup;
mod confirm;
mod dirty_bitmap;
pub mod example;
mod fetch;
mod image;
mod limit;
pub mod mistyped;
mod new_size;
mod number;
mod patience;
mod xen;

use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use control::calibration::Storage;
use control::limits::Limits;
use control::share::{DEPTHS, WEIGHTS};
use control::tracking::ExpectedMaps;
use control::{CpuList, ImageName, POLLING_MAX_US, PollingMode, SizeRule, THREADS_MAX};

pub use confirm::Confirm;
pub use dirty_bitmap::DirtyBitmap;
pub use fetch::Fetch;
pub use image::{
    Bench, Changes, ChangesFormat, Check, Compact, Compare, Compress, Convert, Create, Flatten, ImageCommand, Info,
    Map, Measure, Merge, Pattern, Rebase, Replay, Resize, Seal, Snapshot, Speed,
};
pub use limit::{LIMITS, LimitWords};
pub use new_size::NewSize;
pub use number::number;
pub use patience::Patience;
pub use xen::{GrantPolicy, KIND, NotAXenDisk, OnStop, XenDisk, backend_kind};

/// Tapline's disk process: serves one image, or runs one image job.
///
/// Images are given as FORMAT:PATH, where FORMAT is raw, vhd or qcow2, or vmdk or vhdx for images that are only read; a
/// qcow2 image with an external data file as qcow2:PATH,data-file=PATH. Sizes are written as 512M, 10G, 2T. Exit
/// codes: 0 success, 1 the images differ, 2 the image is damaged, 3 it was damaged and has been repaired, 4 the command
/// failed, 5 the image is intact but has leaked space, 64 invalid arguments.
#[derive(Debug, Parser)]
#[command(name = "tapline-disk", version, arg_required_else_help = true, propagate_version = true)]
pub struct Arguments {
    /// Treat images given as raw: as raw even if they look like another format
    #[arg(long, global = true)]
    pub really_raw: bool,
    /// How long requests wait for an NBD or HTTP server that is away before they fail [default: 300 with serve, 60
    /// otherwise]
    #[arg(long, global = true, value_name = "SECONDS|forever")]
    pub patience: Option<Patience>,
    /// Also read images over http, without TLS: anyone on the way can change what is read
    #[arg(long, global = true)]
    pub insecure_http: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

impl Arguments {
    /// The command line of this process.
    pub fn of_process() -> Result<Arguments, clap::Error> {
        let command = example::teach(Arguments::command(), &example::examples(example::OF_IMAGES));
        let parsed = command.clone().try_get_matches().and_then(|found| Arguments::from_arg_matches(&found));
        parsed.map_err(|refused| mistyped::with_tips(refused, &command))
    }
}

/// The commands of `tapline-disk`.
#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "there is one in a process, for as long as that lives")]
pub enum Command {
    /// Create, inspect, check, convert, compare and rearrange image files that are not being served
    #[command(subcommand)]
    Image(ImageCommand),
    /// Serve one image to a virtual machine (vhost-user, Xen) or to NBD clients
    Serve(Serve),
    /// Measure which I/O sizes a storage device handles best
    Calibrate(Calibrate),
}

impl Command {
    /// Where the command gets its files from, if that can be chosen.
    pub fn handing(&self) -> Option<Handing> {
        match self {
            Command::Serve(serve) => Some(serve.handing),
            Command::Image(command) => command.handing(),
            Command::Calibrate(calibrate) => Some(calibrate.handing),
        }
    }
}

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("transport").required(true).args(["vhost_user", "nbd", "xen"]).multiple(true))]
pub struct Serve {
    /// The image; null:SIZE is a disk that completes each request at once and stores nothing, model:KIND the same
    /// with the latency of a kind of storage (nvme, sata-ssd, disk or array, followed by ,size=SIZE): for benchmarks
    #[arg(value_parser = ImageName::to_measure)]
    pub image: ImageName,
    /// Its parents.
    #[command(flatten)]
    pub parents: Parents,
    /// Serve vhost-user-blk at this socket, for a virtual machine monitor
    #[arg(long, help_heading = "Transport", value_name = "SOCKET", conflicts_with_all = ["nbd", "xen"])]
    pub vhost_user: Option<PathBuf>,
    /// Serve NBD here: a socket path, or a host and port. With --xen, for the program that presents the disk to the
    /// guest's firmware
    #[arg(long, help_heading = "Transport", value_name = "SOCKET|HOST:PORT")]
    pub nbd: Option<String>,
    /// Serve NBD only over TLS, with the certificates in this directory, whose files are named as for QEMU and nbdkit:
    /// server-cert.pem, server-key.pem, ca-cert.pem and perhaps ca-crl.pem
    #[arg(long, help_heading = "Transport", value_name = "DIRECTORY", requires = "nbd")]
    #[arg(conflicts_with_all = ["xen", "print"])]
    pub nbd_tls: Option<PathBuf>,
    /// Whether NBD clients must show a certificate signed by one in ca-cert.pem. no: everyone who reaches the address
    /// may use the disk
    #[arg(long, help_heading = "Transport", value_name = "yes|no", default_value = "yes", requires = "nbd_tls")]
    #[arg(hide_possible_values = true)]
    pub nbd_tls_verify_peer: VerifyPeer,
    /// Let clients on other hosts write over NBD, which is neither encrypted nor authenticated without --nbd-tls
    #[arg(long, help_heading = "Transport", requires = "nbd")]
    pub allow_unencrypted: bool,
    /// NBD export name, in addition to the empty name [default: the image's name]
    #[arg(long, help_heading = "Transport", value_name = "NAME", requires = "nbd", value_parser = export_name)]
    pub nbd_export: Option<String>,
    /// Offer to NBD clients which blocks have changed, as qemu:dirty-bitmap:NAME: the maps of changed blocks of
    /// successive snapshots, the oldest first, the last one being that of the image, and of --track if the disk is
    /// writable (docs/changed-blocks.md); repeatable
    #[arg(long, help_heading = "Transport", value_name = "NAME=MAP[,MAP...]", requires = "nbd")]
    #[arg(conflicts_with = "xen")]
    pub dirty_bitmap: Vec<DirtyBitmap>,
    /// What a daemon has recorded of each map of the longest dirty bitmap, in JSON; fail unless they are those, and
    /// complete. The maps of each other dirty bitmap are the last ones of these
    #[arg(long, hide = true, value_name = "JSON", requires_all = ["handed", "dirty_bitmap", "read_only"])]
    pub expect: Option<ExpectedMaps>,
    /// Be the backend of this disk of a Xen guest: 7/xvdb, or NAME/xvdb
    #[arg(long, help_heading = "Transport", value_name = "DOMAIN/VDEV")]
    pub xen: Option<XenDisk>,
    /// Name of that backend in xenstore
    #[arg(long, help_heading = "Transport", value_name = "NAME", default_value = KIND, value_parser = backend_kind)]
    #[arg(requires = "xen", conflicts_with = "vhost_user")]
    pub xen_backend: String,
    /// How the pages of a Xen guest are accessed. auto: persistent if the guest supports it, otherwise copy
    #[arg(
        long,
        help_heading = "Transport",
        value_name = "POLICY",
        default_value = "auto",
        requires = "xen",
        conflicts_with = "vhost_user"
    )]
    pub grants: GrantPolicy,
    /// What SIGTERM does to a Xen guest's disk. close: ask the guest to release it. leave: keep the guest waiting for
    /// the next process, as with SIGUSR2
    #[arg(
        long,
        help_heading = "Transport",
        value_name = "WHAT",
        default_value = "close",
        requires = "xen",
        conflicts_with = "vhost_user"
    )]
    pub on_stop: OnStop,
    /// Serve the disk read-only
    #[arg(long)]
    pub read_only: bool,
    /// Number of queues offered to a virtual machine; best is one per guest processor
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<u16>(1..=64))]
    #[arg(help_heading = "Performance")]
    pub queues: u16,
    /// Serial number of the disk [default: 20 digits of the UUID of the image, or of its last parent if it has one; of
    /// a digest of the path where the format has no UUID. Clones of one image have the same]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["nbd", "xen"], value_parser = serial)]
    pub serial: Option<String>,
    /// Sector size seen by the guest, which must not change after partitioning [default: 512, or 4096 if the image or
    /// its last parent is raw and O_DIRECT on its storage requires that]
    #[arg(long, value_name = "BYTES")]
    pub logical_block_size: Option<LogicalBlock>,
    /// How its files are accessed.
    #[command(flatten)]
    pub access: Access,
    /// Busy-polling: off, on, or adaptive (poll only while it finds work and the processors are otherwise idle)
    #[arg(long, help_heading = "Performance", value_name = "WHEN", default_value = "adaptive")]
    pub polling: Polling,
    /// Longest poll; 0: always sleep at once
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50, value_parser = number::<u64>(0..=POLLING_MAX_US))]
    #[arg(help_heading = "Performance")]
    pub poll_max: u64,
    /// Threads that the disk may use to submit I/O. It uses more than one while the first is saturated and processors
    /// are idle
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = number::<usize>(1..=THREADS_MAX as u64))]
    #[arg(help_heading = "Performance")]
    pub threads: usize,
    /// Processors that the disk may run on: 0-3,8 [default: those of --numa-node, else all that it may use]
    #[arg(long, help_heading = "Performance", value_name = "LIST")]
    pub cpus: Option<CpuList>,
    /// Run on the processors of this NUMA node, unless --cpus names others, and prefer its memory
    #[arg(long, help_heading = "Performance", value_name = "NODE", value_parser = number::<u32>(0..=1023))]
    pub numa_node: Option<u32>,
    /// Limit requests and bytes per second: iops=5000,bandwidth=100M. LIMIT is iops, read-iops, write-iops, bandwidth,
    /// read-bandwidth or write-bandwidth; and burst=2s is what an idle disk may save up [default of burst:
    /// 100ms]
    #[arg(long, help_heading = "Limits and shares", value_name = "LIMIT=NUMBER,...", value_parser = limits)]
    pub limit: Option<Box<Limits>>,
    /// Split larger transfers into pieces of this size, a power of two. auto: as the policy says [default: auto with
    /// --io-policy, otherwise none]
    #[arg(long, help_heading = "Performance", value_name = "SIZE|none|auto")]
    pub io_split: Option<SizeRule>,
    /// Merge adjacent transfers up to this size, a power of two. auto: as the policy says [default: auto with
    /// --io-policy, otherwise off]
    #[arg(long, help_heading = "Performance", value_name = "SIZE|off|auto")]
    pub io_merge: Option<SizeRule>,
    /// The I/O sizes that `tapline calibrate` has measured for the storage of the image
    #[arg(long, help_heading = "Performance", value_name = "FILE", conflicts_with = "handed")]
    pub io_policy: Option<PathBuf>,
    /// Share the storage fairly with the other disks that are given this file, a page of memory that the first one
    /// creates; best in /run
    #[arg(long, help_heading = "Limits and shares", value_name = "FILE", conflicts_with = "handed")]
    pub share: Option<PathBuf>,
    /// Weight of this disk among those that share the storage [default: 100]
    #[arg(long, value_name = "N", requires = "share", value_parser = number::<u32>(wide(WEIGHTS)))]
    #[arg(help_heading = "Limits and shares")]
    pub share_weight: Option<u32>,
    /// Requests in flight of all these disks together, beyond which a disk that has had more than others waits: about
    /// what the storage can do at once [default: that of the file, or 128]
    #[arg(long, value_name = "N", requires = "share", value_parser = number::<u32>(wide(DEPTHS)))]
    #[arg(help_heading = "Limits and shares")]
    pub share_depth: Option<u32>,
    /// On ENOSPC: fail the write, or hold it and later allocating requests until space is available
    #[arg(long, help_heading = "Full or failing storage", value_name = "WHAT", default_value = "fail")]
    pub when_full: WhenFull,
    /// Serve an image whose last sync, or that of a parent, failed, accepting that unflushed data may be lost
    #[arg(long, help_heading = "Full or failing storage")]
    pub accept_failed_sync: bool,
    /// Append a line of statistics (JSON) to this file on SIGUSR1 and at exit
    #[arg(long, help_heading = "Control and statistics", value_name = "FILE", conflicts_with = "handed")]
    pub stats: Option<PathBuf>,
    /// Keep the disk's statistics page in this file [default: a new one in /run/tapline/stats, or in
    /// $XDG_RUNTIME_DIR/tapline/stats for a user other than root]
    #[arg(long, help_heading = "Control and statistics", value_name = "FILE", conflicts_with = "handed")]
    pub stats_page: Option<PathBuf>,
    /// Listen at this control socket for `tapline disk` commands such as snapshot, merge and resize
    #[arg(long, help_heading = "Control and statistics", value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Refuse to resize or rearrange the disk for a client that does not know the daemon's catalogue
    #[arg(long, requires = "handed", hide = true)]
    pub managed: bool,
    /// Refuse a raw image that looks like one of another format, although its file is handed over: it is new to the
    /// program that does.
    #[arg(long, requires = "handed", hide = true)]
    pub unknown: bool,
    /// Where its files come from.
    #[command(flatten)]
    pub handing: Handing,
    /// Replace the process that serves the disk, which hands over everything on standard input; used by that process or
    /// by a daemon (`tapline disk SOCKET upgrade`, docs/control.md)
    #[arg(long, conflicts_with = "xen", hide = true)]
    pub take_over: bool,
    /// Record which blocks change in this file, a map of changed blocks; it is created if it does not exist, and
    /// otherwise continued, unless the image was written to without it (docs/changed-blocks.md)
    #[arg(long, value_name = "MAP", conflicts_with = "read_only")]
    pub track: Option<PathBuf>,
    /// Have the parent process say, on standard input, in which map changes are recorded
    #[arg(long, requires = "handed", conflicts_with_all = ["track", "read_only"], hide = true)]
    pub map_of_daemon: bool,
    /// Also print the configuration to paste for a virtual machine
    #[arg(long, value_name = "FOR")]
    pub print: Option<PrintFor>,
}

/// Arguments of `calibrate`.
#[derive(Debug, Args)]
pub struct Calibrate {
    /// A file or block device on the storage: raw:PATH, of a GiB or more if possible. It is only read, unless --write
    /// is given
    #[arg(value_parser = ImageName::to_measure)]
    pub image: ImageName,
    /// Measure writes in place of reads: to an unnamed file of 256 MiB in the same directory, which is removed
    /// afterwards. The named file must not exist or be empty
    #[arg(long)]
    pub write: bool,
    /// Read a file that is open for writing, or a device that is mounted: their I/O is part of the figures
    #[arg(long, conflicts_with = "write")]
    pub in_use: bool,
    /// Save the policy and all measurements in this file, for `serve --io-policy`
    #[arg(long, value_name = "FILE", conflicts_with = "handed")]
    pub policy: Option<PathBuf>,
    /// Milliseconds per measurement, of which there are about 450
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = number::<u64>(1..=10_000))]
    pub each: u64,
    /// Seconds of all measurements together, in place of --each
    #[arg(long, value_name = "SECONDS", conflicts_with = "each", value_parser = number::<u64>(1..=3600))]
    pub seconds: Option<u64>,
    /// The kernel's I/O interface [default: as `serve`]
    #[arg(long, value_name = "ENGINE")]
    pub io_engine: Option<IoEngine>,
    /// What the storage is, as a daemon has found out that hands over a file on it
    #[arg(long, value_name = "JSON", requires = "handed", hide = true)]
    pub storage: Option<Storage>,
    /// Where its file comes from.
    #[command(flatten)]
    pub handing: Handing,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Where the process gets its files from.
#[derive(Clone, Copy, Debug, Args)]
pub struct Handing {
    /// Receive all files and sockets as open descriptors on standard input and open no path (docs/control.md)
    #[arg(long, help_heading = "For daemons")]
    pub handed: bool,
    /// Then drop all privileges and all access to files and sockets by name
    #[arg(long, requires = "handed", help_heading = "For daemons")]
    pub confine: bool,
    /// Keep the right to connect to servers and to read what that needs, such as /etc/resolv.conf
    #[arg(long, hide = true, requires = "handed")]
    pub network: bool,
    /// Exit as if killed when the other end of standard input is closed
    #[arg(long, hide = true)]
    pub end_with_input: bool,
}

/// Parent images, always given by the caller and never taken from an image.
#[derive(Clone, Debug, Args)]
pub struct Parents {
    /// The image's parent; repeat for the parent's parent and so on, from the top down
    #[arg(long = "parent", value_name = "FORMAT:PATH")]
    pub names: Vec<ImageName>,
    /// Use a parent that was modified after its child was created; the child's contents may have changed with it
    #[arg(long)]
    pub accept_changed_parent: bool,
}

/// Whether images that other programs write are read.
#[derive(Clone, Copy, Debug, Args)]
pub struct Sharing {
    /// Read images although another program has them open for writing: what is read may mix states of different times,
    /// and look damaged
    #[arg(short = 'U', long)]
    pub force_share: bool,
}

/// How files are read and written.
#[derive(Clone, Copy, Debug, Args)]
pub struct Access {
    /// none: O_DIRECT, or an error if the file system does not support it. writeback: the host's page cache, with
    /// fdatasync for flushes
    #[arg(long, value_name = "MODE", default_value = "none")]
    pub cache: CacheMode,
    /// The kernel's I/O interface [default: uring; aio with --grants map, and for files for which io_uring would need a
    /// thread per request; the other one where the system refuses it, with a line in the log]
    #[arg(long, value_name = "ENGINE")]
    pub io_engine: Option<IoEngine>,
}

/// Text that fits into virtio's serial number field (1.2, 5.2.6), and into the device names that guests derive from it.
fn serial(word: &str) -> Result<String, String> {
    if (1..=20).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(word.to_owned())
    } else {
        Err("a serial number must have 1 to 20 letters, digits or punctuation marks, without spaces".to_owned())
    }
}

fn wide(range: RangeInclusive<u32>) -> RangeInclusive<u64> {
    u64::from(*range.start())..=u64::from(*range.end())
}

/// Parses the limits of a disk; the error is a message with advice.
fn limits(word: &str) -> Result<Box<Limits>, String> {
    word.parse().map(Box::new).map_err(|error: control::Error| match error.advice {
        Some(advice) => format!("{}: {advice}", error.message),
        None => error.message,
    })
}

/// A name that an NBD client can request ("String values" in the protocol).
fn export_name(word: &str) -> Result<String, String> {
    match word.len() {
        1..=4096 => Ok(word.to_owned()),
        _ => Err("an export name must have 1 to 4096 bytes".to_owned()),
    }
}

/// Values of `--cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheMode {
    /// O_DIRECT.
    None,
    /// The host's page cache.
    Writeback,
}

/// Values of `--logical-block-size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogicalBlock {
    /// The size of nearly all disks.
    #[value(name = "512")]
    Small,
    /// The size of some drives.
    #[value(name = "4096")]
    Large,
}

impl LogicalBlock {
    /// The size in bytes.
    pub fn bytes(self) -> u32 {
        match self {
            LogicalBlock::Small => 512,
            LogicalBlock::Large => 4096,
        }
    }
}

/// Values of `--when-full`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenFull {
    /// The guest gets an error.
    Fail,
    /// The request waits.
    Wait,
}

/// Values of `--polling`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Polling {
    /// Never.
    Off,
    /// While that is worthwhile.
    Adaptive,
    /// Before each sleep.
    On,
}

impl From<Polling> for PollingMode {
    fn from(polling: Polling) -> PollingMode {
        match polling {
            Polling::Off => PollingMode::Off,
            Polling::Adaptive => PollingMode::Adaptive,
            Polling::On => PollingMode::On,
        }
    }
}

/// Values of `--io-engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoEngine {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
}

/// Values of `--nbd-tls-verify-peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyPeer {
    /// Clients without a certificate are refused.
    Yes,
    /// All clients are accepted.
    No,
}

/// Values of `--print`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrintFor {
    /// Command-line options of QEMU before 10.2.
    Qemu,
    /// Command-line options of QEMU 9.2 and later, which reconnects faster after a restart of the disk's process.
    #[value(name = "qemu-9.2")]
    Qemu92,
    /// Elements of libvirt's domain XML. 'virsh start' waits forever if QEMU's user may not open the socket.
    Libvirt,
    /// The disk's element alone, a file for 'virsh attach-device'.
    LibvirtDevice,
    /// Command-line options of Cloud Hypervisor.
    CloudHypervisor,
}

impl From<PrintFor> for vm::paste::Monitor {
    fn from(target: PrintFor) -> Self {
        match target {
            PrintFor::Qemu => Self::Qemu,
            PrintFor::Qemu92 => Self::Qemu92,
            PrintFor::Libvirt => Self::Libvirt,
            PrintFor::LibvirtDevice => Self::LibvirtDevice,
            PrintFor::CloudHypervisor => Self::CloudHypervisor,
        }
    }
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;

    /// The meaning of a command line, or the error message for it.
    pub fn parse(line: &str) -> Result<Command, String> {
        let words = std::iter::once("tapline").chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| arguments.command).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_definition_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn create_takes_a_size_or_a_parent() {
        assert!(parse("image create vhd:disk.vhd --size 10G --block-size 2M").is_ok());
        assert!(parse("image create vhd:disk.vhd --size 10G --fixed").is_ok());
        assert!(parse("image create vhd:child.vhd --parent vhd:base.vhd").is_ok());
        assert!(parse("image create vhd:disk.vhd").unwrap_err().contains("<SIZE>"));
        assert!(parse("image create vhd:child.vhd --parent vhd:base.vhd --fixed").is_err());
    }

    #[test]
    fn serve_needs_exactly_one_transport() {
        let Ok(Command::Serve(serve)) = parse("serve vhd:a --parent vhd:b --parent raw:c --vhost-user s --queues 4")
        else {
            panic!("not a serve command")
        };
        assert_eq!(serve.parents.names.len(), 2);
        assert_eq!((serve.queues, serve.access.cache, serve.access.io_engine), (4, CacheMode::None, None));
        assert!(parse("serve vhd:a").unwrap_err().contains("--vhost-user"));
        assert!(parse("serve vhd:a --vhost-user s --nbd t").is_err());
        assert!(parse("serve vhd:a --nbd t --queues 0").is_err());
    }

    #[test]
    fn a_serial_number_must_fit_virtio() {
        let Ok(Command::Serve(serve)) = parse("serve vhd:a --vhost-user s --serial 0123456789abcdef0123") else {
            panic!("not a serve command")
        };
        assert_eq!(serve.serial.as_deref(), Some("0123456789abcdef0123"));
        let said = parse("serve vhd:a --vhost-user s --serial 0123456789abcdef01234").unwrap_err();
        assert!(said.contains("1 to 20 letters"), "{said}");
        assert!(parse("serve vhd:a --vhost-user s --serial \u{e9}").is_err());
        assert!(parse("serve vhd:a --nbd s --serial a").is_err());
    }

    #[test]
    fn xen_options_are_refused_with_another_transport() {
        for option in ["--on-stop leave", "--on-stop close", "--grants map", "--xen-backend vbd3"] {
            for (transport, why) in [("--nbd", "required arguments"), ("--vhost-user", "cannot be used with")] {
                let said = parse(&format!("serve vhd:a {transport} s {option}")).unwrap_err();
                assert!(said.contains(why) && said.contains(transport), "{said}");
            }
            for also in ["", "--nbd s"] {
                assert!(parse(&format!("serve vhd:a --xen 7/xvda {option} {also}")).is_ok(), "{option} {also}");
            }
        }
    }

    #[test]
    fn an_invalid_image_name_is_refused_with_a_suggestion() {
        assert!(parse("image info disk.vhd").unwrap_err().contains("use vhd:disk.vhd"));
    }

    #[test]
    fn compare_distinguishes_the_parents_of_both_images() {
        let Ok(Command::Image(ImageCommand::Compare(compare))) =
            parse("image compare vhd:a vhd:b --parent vhd:p --other-parent raw:q")
        else {
            panic!("not a compare command")
        };
        assert_eq!(compare.parents.names.len(), 1);
        assert_eq!(compare.other_parent, ["raw:q".parse().unwrap()]);
    }

    #[test]
    fn the_version_is_of_the_program() {
        assert_eq!(parse("--version").unwrap_err(), format!("tapline-disk {}\n", env!("CARGO_PKG_VERSION")));
    }

    #[test]
    fn help_uses_the_name_the_program_was_called_by() {
        assert!(parse("image create --help").unwrap_err().contains("Usage: tapline image create"));
    }
}
