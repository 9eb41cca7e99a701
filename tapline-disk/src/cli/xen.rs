//! The words of `xen`, and those of `serve` that are about Xen.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::Access;
use crate::image_name::ImageName;
use crate::toolstack::vdev::{NotAVdev, Vdev};

/// The name of our backends in the store, unless another is named.
pub use vm::xen::disks::KIND;

/// `xen`.
#[derive(Debug, Args)]
pub struct Xen {
    /// What to do
    #[command(subcommand)]
    pub verb: XenVerb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum XenVerb {
    /// Give a guest a disk, also while it runs
    Attach(Attach),
    /// Take a disk from a guest, also while it runs
    Detach(Detach),
    /// Replace a disk's process by one of this program, while its guest runs
    Upgrade(Upgrade),
    /// List the disks of guests, with the states of both ends
    List {
        /// Only those of this domain
        #[arg(value_name = "DOMID|NAME")]
        domain: Option<String>,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Do what a block script of xl is called for: block-tapline runs this
    #[command(hide = true)]
    Script {
        /// add or remove
        action: ScriptAction,
    },
}

/// `xen attach`.
#[derive(Debug, Args)]
pub struct Attach {
    /// The guest
    #[arg(value_name = "DOMID|NAME")]
    pub domain: String,
    /// The image; then its parents, if it has any, from the top down
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<ImageName>,
    /// What the guest calls the disk: xvdb, hda, a number [default: the first of xvda, xvdb, … that is free]
    #[arg(long, value_name = "VDEV")]
    pub vdev: Option<Vdev>,
    /// r: the guest may read only
    #[arg(long, value_name = "r|w", default_value = "w")]
    pub mode: Mode,
    /// The name of the backend in the store
    #[arg(long, value_name = "NAME", default_value = KIND, value_parser = kind)]
    pub backend_kind: String,
    /// Wait until the guest uses the disk
    #[arg(long)]
    pub wait: bool,
    /// How long to wait, for the disk's process and for the guest
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// Only make the nodes in the store: somebody else serves the disk
    #[arg(long, conflicts_with_all = ["accept_changed_parent", "cache", "io_engine", "grants", "control", "log"])]
    pub no_serve: bool,
    /// Use a parent that was changed after its child was made
    #[arg(long)]
    pub accept_changed_parent: bool,
    #[command(flatten)]
    pub access: Access,
    /// How the guest's pages are reached
    #[arg(long, value_name = "POLICY", default_value = "auto")]
    pub grants: GrantPolicy,
    /// The disk's control socket [default: /run/tapline/xen-DOMID-VDEV.sock]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Where the disk's process says what happens [default: /var/log/tapline/xen-DOMID-VDEV.log]
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
}

/// `xen detach`.
#[derive(Debug, Args)]
pub struct Detach {
    /// The guest
    #[arg(value_name = "DOMID|NAME")]
    pub domain: String,
    /// The disk
    pub vdev: Vdev,
    /// Without the guest's consent, which is waited for at most 2 seconds: what it has not flushed is lost to it, as if the
    /// disk were pulled
    #[arg(long)]
    pub force: bool,
    /// How long the guest may take
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub timeout: Duration,
}

/// `xen upgrade`.
#[derive(Debug, Args)]
pub struct Upgrade {
    /// The guest
    #[arg(value_name = "DOMID|NAME")]
    pub domain: String,
    /// The disk
    pub vdev: Vdev,
    /// How long the old process may take to end, and the new one to serve
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// Values of `--on-stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnStop {
    /// The guest is asked to let the disk go.
    #[default]
    Close,
    /// The guest waits for another process.
    Leave,
}

/// Values of `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Read only.
    #[value(alias = "ro")]
    R,
    /// Read and write.
    #[value(alias = "rw")]
    W,
}

/// What xl calls a block script for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScriptAction {
    /// A disk comes.
    Add,
    /// A disk goes.
    Remove,
}

/// Values of `--grants`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GrantPolicy {
    /// Persistent if the guest offers it, copy otherwise.
    #[default]
    Auto,
    /// Bytes are copied from and to the guest's pages by the hypervisor.
    Copy,
    /// Pages are mapped for each request.
    Map,
    /// Pages are mapped once and stay; we copy from and to them.
    Persistent,
}

/// Whose disk, and which: DOMID/VDEV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenDisk {
    /// The guest, by number or name.
    pub domain: String,
    /// The disk.
    pub vdev: Vdev,
}

/// Why a word names no disk of a guest.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAXenDisk {
    /// There is no domain, or no disk, in it.
    NoSlash(String),
    /// The disk is none.
    Vdev(NotAVdev),
}

impl std::error::Error for NotAXenDisk {}

impl fmt::Display for NotAXenDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAXenDisk::NoSlash(word) => write!(f, "«{word}» names no disk of a guest; write 7/xvdb or NAME/xvdb"),
            NotAXenDisk::Vdev(why) => why.fmt(f),
        }
    }
}

impl FromStr for XenDisk {
    type Err = NotAXenDisk;

    fn from_str(word: &str) -> Result<XenDisk, NotAXenDisk> {
        match word.rsplit_once('/') {
            Some((domain, vdev)) if !domain.is_empty() => {
                Ok(XenDisk { domain: domain.to_owned(), vdev: vdev.parse().map_err(NotAXenDisk::Vdev)? })
            }
            _ => Err(NotAXenDisk::NoSlash(word.to_owned())),
        }
    }
}

impl fmt::Display for XenDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.vdev)
    }
}

/// A name that is one word of a path in the store.
pub fn kind(word: &str) -> Result<String, String> {
    let letters = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if letters && !word.is_empty() && word.len() <= 32 {
        Ok(word.to_owned())
    } else {
        Err("a backend's name has letters, digits, - and _, at most 32".to_owned())
    }
}

/// A day is more than anybody waits, and far from what a clock cannot add.
fn seconds(word: &str) -> Result<Duration, String> {
    let seconds = word.parse().ok().filter(|&seconds| seconds <= 86_400);
    seconds.map(Duration::from_secs).ok_or_else(|| "write whole seconds, at most 86400".to_owned())
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::cli::Command;
    use crate::cli::test::parse;

    #[test]
    fn attach_takes_a_chain_and_a_disk() {
        let Ok(Command::Xen(Xen { verb: XenVerb::Attach(attach) })) =
            parse("xen attach vm vhd:a vhd:b --vdev xvdb --mode r --wait --timeout 5")
        else {
            panic!("not an attach command")
        };
        assert_eq!(attach.images.len(), 2);
        assert_eq!((attach.mode, attach.wait, attach.timeout), (Mode::R, true, Duration::from_secs(5)));
        assert_eq!((attach.vdev, attach.backend_kind.as_str()), ("xvdb".parse().ok(), "tapline"));
    }

    #[test]
    fn what_is_meant_for_a_process_is_refused_where_none_is_started() {
        for words in
            ["--grants map", "--cache none", "--io-engine aio", "--control s", "--log l", "--accept-changed-parent"]
        {
            let said = parse(&format!("xen attach vm vhd:a --no-serve {words}")).unwrap_err();
            let word = words.split_whitespace().next().unwrap();
            assert!(said.contains("cannot be used with") && said.contains(word), "{said}");
        }
        assert!(parse("xen attach vm vhd:a --no-serve --mode r --wait").is_ok());
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_to_write() {
        assert!(parse("xen attach vm").unwrap_err().contains("IMAGE"));
        assert!(parse("xen attach vm vhd:a --vdev vdb").unwrap_err().contains("write xvda to xvdz"));
        assert!(parse("xen attach vm vhd:a --backend-kind a/b").is_err());
        assert!(parse("xen attach vm vhd:a --timeout -1").is_err());
        assert!(parse("xen detach vm").is_err());
    }

    #[test]
    fn a_disk_of_a_guest_is_a_domain_and_a_device() {
        let Ok(Command::Serve(serve)) = parse("serve vhd:a --xen vm/xvdb --grants copy") else {
            panic!("not a serve command")
        };
        assert_eq!(serve.xen.unwrap().to_string(), "vm/xvdb");
        assert_eq!((serve.xen_backend.as_str(), serve.grants), ("tapline", GrantPolicy::Copy));
        for word in ["7", "/xvda", "7/", "7/vda"] {
            assert!(parse(&format!("serve vhd:a --xen {word}")).is_err(), "{word}");
        }
        // Over NBD its firmware reads the disk; of two ways to a machine one would be nobody's.
        assert!(parse("serve vhd:a --xen 7/xvda --nbd s").is_ok());
        assert!(parse("serve vhd:a --xen 7/xvda --vhost-user s").is_err());
    }
}
