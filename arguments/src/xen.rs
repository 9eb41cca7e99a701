//! The arguments of `serve` that concern Xen.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use vm::xen::vdev::{NotAVdev, Vdev};

/// The default name of our backends in xenstore.
pub use vm::xen::disks::KIND;

/// Values of `--on-stop`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OnStop {
    /// Ask the guest to release the disk.
    #[default]
    Close,
    /// Keep the guest waiting for another process.
    Leave,
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
pub fn backend_kind(word: &str) -> Result<String, String> {
    let letters = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if letters && !word.is_empty() && word.len() <= 32 {
        Ok(word.to_owned())
    } else {
        Err("a backend's name must have at most 32 letters, digits, - or _".to_owned())
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::Command;
    use crate::test::parse;

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
