//! The arguments of `xen`.

use std::path::PathBuf;
use std::time::Duration;

use arguments::{Access, GrantPolicy, KIND, backend_kind};
use clap::{Args, Subcommand, ValueEnum};
use control::ImageName;
use vm::xen::vdev::Vdev;

/// Arguments of `xen`.
#[derive(Debug, Args)]
pub struct Xen {
    /// What to do
    #[command(subcommand)]
    pub verb: XenVerb,
}

/// The verbs of `xen`.
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
    },
    /// The work of an xl block script, run by block-tapline
    #[command(hide = true)]
    Script {
        /// add or remove
        action: ScriptAction,
    },
}

/// Arguments of `xen attach`.
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
    #[arg(long, value_name = "NAME", default_value = KIND, value_parser = backend_kind)]
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

/// Arguments of `xen detach`.
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

/// Arguments of `xen upgrade`.
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

/// The reason why xl runs the block script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScriptAction {
    /// A disk is being added.
    Add,
    /// A disk is being removed.
    Remove,
}

/// Parses a timeout. At most a day: longer than any user waits, and no overflow of the clock.
fn seconds(word: &str) -> Result<Duration, String> {
    let seconds = word.parse().ok().filter(|&seconds| seconds <= 86_400);
    seconds.map(Duration::from_secs).ok_or_else(|| "give whole seconds, at most 86400".to_owned())
}

#[cfg(test)]
mod test {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Words {
        #[command(flatten)]
        xen: Xen,
    }

    fn parse(line: &str) -> Result<XenVerb, String> {
        Words::try_parse_from(line.split_whitespace()).map(|words| words.xen.verb).map_err(|error| error.to_string())
    }

    #[test]
    fn attach_takes_a_chain_and_a_disk() {
        let Ok(XenVerb::Attach(attach)) = parse("xen attach vm vhd:a vhd:b --vdev xvdb --mode r --wait --timeout 5")
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
}
