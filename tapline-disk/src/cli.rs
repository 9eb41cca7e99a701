//! The words of the command line and what they may be. It knows no image and does nothing.

mod disk;
mod image;
mod xen;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::image_name::ImageName;

pub use disk::{Disk, DiskVerb, SnapshotMethod};
pub use image::{
    Check, Compact, Compare, Convert, Create, Flatten, ImageCommand, Info, Map, Merge, Rebase, Resize, Snapshot,
};
pub use xen::{Attach, Detach, GrantPolicy, KIND, Mode, OnStop, ScriptAction, Upgrade, Xen, XenDisk, XenVerb};

/// The disk process of Tapline: serves one image, or runs one image job.
///
/// Images are named FORMAT:PATH, with raw, vhd or qcow2 as the format; one that keeps its data in another file
/// qcow2:PATH,data-file=PATH. Sizes are written 512M, 10G, 2T.
/// Exit codes: 0 done, 1 the images differ, 2 the image is damaged, 3 it was and is repaired,
/// 4 the command could not be done, 5 the image only takes more space than it needs, 64 wrong arguments.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true, propagate_version = true)]
pub struct Arguments {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Create, describe, check, convert, compare and rearrange image files that nobody serves
    #[command(subcommand)]
    Image(ImageCommand),
    /// Serve one image to a virtual machine (vhost-user, Xen) or to anything that speaks NBD
    Serve(Serve),
    /// Ask a disk that is served to snapshot, merge, clone, revert, resize or pause, while its guest goes on
    Disk(Disk),
    /// Give Xen guests disks and take them away
    Xen(Xen),
}

impl Command {
    /// Where the command has its files from, where that can be chosen.
    pub fn handing(&self) -> Option<Handing> {
        match self {
            Command::Serve(serve) => Some(serve.handing),
            Command::Image(command) => command.handing(),
            Command::Disk(_) | Command::Xen(_) => None,
        }
    }
}

/// `serve`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("transport").required(true).args(["vhost_user", "nbd", "xen"]).multiple(true))]
pub struct Serve {
    /// The image
    pub image: ImageName,
    #[command(flatten)]
    pub parents: Parents,
    /// Listen at this socket for a virtual machine monitor that speaks vhost-user
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["nbd", "xen"])]
    pub vhost_user: Option<PathBuf>,
    /// Listen here for NBD clients: the path of a socket, or a host and a port. With --xen for whoever shows the
    /// guest's firmware the disk
    #[arg(long, value_name = "SOCKET|HOST:PORT")]
    pub nbd: Option<String>,
    /// The name by which NBD clients find the disk, beside none [default: the image's name]
    #[arg(long, value_name = "NAME", requires = "nbd", value_parser = export_name)]
    pub nbd_export: Option<String>,
    /// Be the backend of this disk of a Xen guest: 7/xvdb, or NAME/xvdb
    #[arg(long, value_name = "DOMAIN/VDEV")]
    pub xen: Option<XenDisk>,
    /// The name of that backend in Xen's store
    #[arg(long, value_name = "NAME", default_value = KIND, value_parser = xen::kind)]
    #[arg(requires = "xen", conflicts_with = "vhost_user")]
    pub xen_backend: String,
    /// How pages of a Xen guest are reached. auto: persistent if the guest offers it, copy otherwise
    #[arg(long, value_name = "POLICY", default_value = "auto", requires = "xen", conflicts_with = "vhost_user")]
    pub grants: GrantPolicy,
    /// What SIGTERM does to a Xen guest's disk. close: the guest is asked to let go. leave: it waits for the next
    /// process, as after SIGUSR2
    #[arg(long, value_name = "WHAT", default_value = "close", requires = "xen", conflicts_with = "vhost_user")]
    pub on_stop: OnStop,
    /// Refuse everything that would change the disk
    #[arg(long)]
    pub read_only: bool,
    /// Queues offered to a virtual machine: one for each of its processors is best
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: u16,
    /// What the guest is told as the disk's serial number [default: the name of the image's file, as far as it fits]
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["nbd", "xen"], value_parser = serial)]
    pub serial: Option<String>,
    /// The sectors that the guest is shown; a disk keeps those with which it was partitioned [default: 512, or those of
    /// the storage, if the image is raw, or the last of its parents, and O_DIRECT needs 4096]
    #[arg(long, value_name = "BYTES")]
    pub logical_block_size: Option<LogicalBlock>,
    #[command(flatten)]
    pub access: Access,
    /// Look for more work for at most so long before sleeping, as long as that is worth it; 0: sleep at once
    #[arg(long, value_name = "MICROSECONDS", default_value_t = 50, value_parser = clap::value_parser!(u64).range(0..=10_000))]
    pub poll_max: u64,
    /// A write that finds no space on the storage fails, or waits until there is some, with all behind it that need
    /// space
    #[arg(long, value_name = "WHAT", default_value = "fail")]
    pub when_full: WhenFull,
    /// Serve the image as after a power loss though a sync of it, or of an image below it, has failed under an earlier
    /// process
    #[arg(long)]
    pub accept_failed_sync: bool,
    /// Append a line of statistics (JSON) to this file on SIGUSR1 and at the end
    #[arg(long, value_name = "FILE", conflicts_with = "handed")]
    pub stats: Option<PathBuf>,
    /// Listen here for requests to snapshot, merge, resize the disk while it is served: see `tapline disk`
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    #[command(flatten)]
    pub handing: Handing,
    /// Take the place of the process that serves the disk, which hands everything over on standard input: it is started
    /// so by that process, or by a daemon (`tapline disk SOCKET upgrade`, docs/control.md)
    #[arg(long, conflicts_with = "xen", hide = true)]
    pub take_over: bool,
    /// Print what to paste into a virtual machine's configuration as well
    #[arg(long, value_name = "FOR")]
    pub print: Option<PrintFor>,
}

/// Where the process has its files from.
#[derive(Clone, Copy, Debug, Args)]
pub struct Handing {
    /// Take all files and sockets from standard input, as open descriptors, and open no path: for daemons, see
    /// docs/control.md
    #[arg(long)]
    pub handed: bool,
    /// Then give up all privilege, and every way to a file or socket by its name
    #[arg(long, requires = "handed")]
    pub confine: bool,
    /// End when the other end of standard input is closed, as if killed: nobody waits for the job, and it keeps nothing
    #[arg(long, requires = "handed", hide = true)]
    pub end_with_input: bool,
}

/// Parents, named by the caller and never by an image.
#[derive(Debug, Args)]
pub struct Parents {
    /// The image's parent; repeated for the parent's parent and so on, from the top down
    #[arg(long = "parent", value_name = "FORMAT:PATH")]
    pub names: Vec<ImageName>,
    /// Use a parent that was changed after its child was made: what the child shows may have changed with it
    #[arg(long)]
    pub accept_changed_parent: bool,
}

/// How files are read and written.
#[derive(Clone, Copy, Debug, Args)]
pub struct Access {
    /// none: O_DIRECT, or an error where the file system has none. writeback: the host's page cache, with
    /// fdatasync for flushes
    #[arg(long, value_name = "MODE", default_value = "none")]
    pub cache: CacheMode,
    /// Which interface of the kernel carries the I/O [default: uring; aio with --grants map, and
    /// for files on which uring would need a thread for every request]
    #[arg(long, value_name = "ENGINE")]
    pub io_engine: Option<IoEngine>,
}

/// What fits into the place that virtio has for it (1.2, 5.2.6), and into the names that guests make of it.
fn serial(word: &str) -> Result<String, String> {
    if (1..=20).contains(&word.len()) && word.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(word.to_owned())
    } else {
        Err("a serial number has 1 to 20 letters, digits and signs, and no blanks".to_owned())
    }
}

/// What a client can ask for ("String values" of the protocol).
fn export_name(word: &str) -> Result<String, String> {
    match word.len() {
        1..=4096 => Ok(word.to_owned()),
        _ => Err("the name of an export has 1 to 4096 bytes".to_owned()),
    }
}

/// Values of `--cache`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CacheMode {
    /// O_DIRECT.
    None,
    /// Through the page cache.
    Writeback,
}

/// Values of `--logical-block-size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogicalBlock {
    /// What nearly all disks have.
    #[value(name = "512")]
    Small,
    /// What some drives have.
    #[value(name = "4096")]
    Large,
}

impl LogicalBlock {
    /// How many.
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
    /// The guest is told.
    Fail,
    /// It waits.
    Wait,
}

/// Values of `--io-engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IoEngine {
    /// io_uring.
    Uring,
    /// Linux AIO.
    Aio,
}

/// Values of `--print`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrintFor {
    /// Arguments of QEMU before 10.2.
    Qemu,
    /// Arguments of QEMU 9.2 and later, which finds the disk again sooner when it was started again.
    #[value(name = "qemu-9.2")]
    Qemu92,
    /// Elements of libvirt's domain XML.
    Libvirt,
    /// Arguments of Cloud Hypervisor.
    CloudHypervisor,
}

impl From<PrintFor> for vm::paste::Monitor {
    fn from(target: PrintFor) -> Self {
        match target {
            PrintFor::Qemu => Self::Qemu,
            PrintFor::Qemu92 => Self::Qemu92,
            PrintFor::Libvirt => Self::Libvirt,
            PrintFor::CloudHypervisor => Self::CloudHypervisor,
        }
    }
}

#[cfg(test)]
mod test {
    use clap::CommandFactory;

    use super::*;

    /// What a command line means, or what is said of it.
    pub fn parse(line: &str) -> Result<Command, String> {
        let words = std::iter::once("tapline").chain(line.split_whitespace());
        Arguments::try_parse_from(words).map(|arguments| arguments.command).map_err(|error| error.to_string())
    }

    #[test]
    fn the_definition_holds_together() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn create_takes_a_size_or_a_parent() {
        assert!(parse("image create vhd:disk.vhd --size 10G --block-size 2M").is_ok());
        assert!(parse("image create vhd:disk.vhd --size 10G --fixed").is_ok());
        assert!(parse("image create vhd:child.vhd --parent vhd:base.vhd").is_ok());
        assert!(parse("image create vhd:disk.vhd").unwrap_err().contains("--size"));
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
    fn a_serial_number_is_what_a_guest_over_vhost_user_can_be_told() {
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
    fn what_is_about_xen_is_refused_with_another_transport() {
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
    fn a_wrong_image_name_is_refused_with_what_to_write() {
        assert!(parse("image info disk.vhd").unwrap_err().contains("raw:disk.vhd, vhd:disk.vhd or qcow2:disk.vhd"));
    }

    #[test]
    fn compare_tells_the_parents_of_both_apart() {
        let Ok(Command::Image(ImageCommand::Compare(compare))) =
            parse("image compare vhd:a vhd:b --parent vhd:p --other-parent raw:q")
        else {
            panic!("not a compare command")
        };
        assert_eq!(compare.parents.names.len(), 1);
        assert_eq!(compare.other_parent, ["raw:q".parse().unwrap()]);
    }

    #[test]
    fn help_speaks_of_the_program_by_the_name_it_was_called() {
        assert!(parse("image create --help").unwrap_err().contains("Usage: tapline image create"));
    }
}
