//! The arguments of `xen`, and those of `serve` that concern Xen.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use control::ImageName;

use super::Access;
use crate::toolstack::vdev::{NotAVdev, Vdev};

/// The default name of our backends in xenstore.
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
    /// Attach a disk to a guest, which may be running
    Attach(Attach),
    /// Detach a disk from a guest, which may be running
    Detach(Detach),
    /// Replace a disk's process with this program while its guest runs
    Upgrade(Upgrade),
    /// List the disks of guests, with the states of both ends
    List {
        /// Only those of this domain
        #[arg(value_name = "DOMID|NAME")]
        domain: Option<String>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// The work of an xl block script, run by block-tapline
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
    /// The image, followed by its parents, if any, from the top down
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<ImageName>,
    /// The disk's name in the guest: xvdb, hda, a number [default: the first free one of xvda, xvdb, …]
    #[arg(long, value_name = "VDEV")]
    pub vdev: Option<Vdev>,
    /// r: read-only for the guest
    #[arg(long, value_name = "r|w", default_value = "w")]
    pub mode: Mode,
    /// Name of the backend in xenstore
    #[arg(long, value_name = "NAME", default_value = KIND, value_parser = kind)]
    pub backend_kind: String,
    /// Wait until the guest is connected to the disk
    #[arg(long)]
    pub wait: bool,
    /// How long to wait for the disk's process and for the guest
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
    /// Only create the nodes in xenstore; another program serves the disk
    #[arg(long, conflicts_with_all = ["accept_changed_parent", "cache", "io_engine", "grants", "control", "log"])]
    pub no_serve: bool,
    /// Use a parent that was modified after its child was created
    #[arg(long)]
    pub accept_changed_parent: bool,
    #[command(flatten)]
    pub access: Access,
    /// How the guest's pages are accessed
    #[arg(long, value_name = "POLICY", default_value = "auto")]
    pub grants: GrantPolicy,
    /// The disk's control socket [default: /run/tapline/xen-DOMID-VDEV.sock]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Log file of the disk's process [default: /var/log/tapline/xen-DOMID-VDEV.log]
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
    /// Do not require the guest's consent, which is awaited for at most 2 seconds: unflushed data is lost, as if the
    /// disk were pulled out
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
    /// How long the old process may take to exit, and the new one to serve
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub timeout: Duration,
}

/// Values of `--on-stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnStop {
    /// Ask the guest to release the disk.
    #[default]
    Close,
    /// Keep the guest waiting for another process.
    Leave,
}

/// Values of `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Read-only.
    #[value(alias = "ro")]
    R,
    /// Read-write.
    #[value(alias = "rw")]
    W,
}

/// Why xl calls a block script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScriptAction {
    /// A disk is being added.
    Add,
    /// A disk is being removed.
    Remove,
}

/// Values of `--grants`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum GrantPolicy {
    /// Persistent if the guest supports it, otherwise copy.
    #[default]
    Auto,
    /// The hypervisor copies bytes from and to the guest's pages.
    Copy,
    /// Pages are mapped for each request.
    Map,
    /// Pages are mapped once and stay mapped; we copy from and to them.
    Persistent,
}

/// A guest's disk: DOMID/VDEV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenDisk {
    /// The guest, by number or name.
    pub domain: String,
    /// The disk.
    pub vdev: Vdev,
}

/// Why a word is not a guest's disk.
#[derive(Debug, PartialEq, Eq)]
pub enum NotAXenDisk {
    /// The domain or the disk is missing.
    NoSlash(String),
    /// The disk's name is invalid.
    Vdev(NotAVdev),
}

impl std::error::Error for NotAXenDisk {}

impl fmt::Display for NotAXenDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotAXenDisk::NoSlash(word) => write!(f, "'{word}' is not a guest's disk; use the form 7/xvdb or NAME/xvdb"),
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

/// A name that is a single component of a xenstore path.
pub fn kind(word: &str) -> Result<String, String> {
    let letters = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if letters && !word.is_empty() && word.len() <= 32 {
        Ok(word.to_owned())
    } else {
        Err("a backend's name must have at most 32 letters, digits, - or _".to_owned())
    }
}

/// At most a day: longer than anybody waits, and far from any overflow of the clock.
fn seconds(word: &str) -> Result<Duration, String> {
    let seconds = word.parse().ok().filter(|&seconds| seconds <= 86_400);
    seconds.map(Duration::from_secs).ok_or_else(|| "give whole seconds, at most 86400".to_owned())
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
    fn process_options_are_refused_if_no_process_is_started() {
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
    fn invalid_arguments_are_refused_with_a_suggestion() {
        assert!(parse("xen attach vm").unwrap_err().contains("IMAGE"));
        assert!(parse("xen attach vm vhd:a --vdev vdb").unwrap_err().contains("use xvda to xvdz"));
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
        // Its firmware reads the disk over NBD; without --xen, one of two transports would be unused.
        assert!(parse("serve vhd:a --xen 7/xvda --nbd s").is_ok());
        assert!(parse("serve vhd:a --xen 7/xvda --vhost-user s").is_err());
    }
}
