//! Downloads the distribution's packages: Xen, a kernel for dom0, and dom0's programs.
//!
//! Downloaded packages are reused, so that later runs need no network; nothing is installed and no root is needed. The
//! file `complete` is written last: without it everything is fetched again.

use std::fs;
use std::path::{Path, PathBuf};

use super::BedError;
use crate::guest::kernel::{Apt, file_name};
use crate::guest::{GuestError, at, distribution};
use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// Full kernels: those for virtual machines do not support dom0.
const KERNELS: [&str; 2] = ["linux-image-amd64", "linux-image-generic"];

/// Packages that dom0 needs in addition to Xen's own tools, with the same names in Debian 12 and 13 and Ubuntu 24.04.
/// kexec is for guests; extlinux makes their disks bootable.
const DOM0: [&str; 12] = [
    "bash",
    "busybox-static",
    "coreutils",
    "e2fsprogs",
    "extlinux",
    "grep",
    "kexec-tools",
    "mawk",
    "mount",
    "qemu-system-xen",
    "sed",
    "util-linux",
];

pub struct Packages {
    /// Packages of the kernel and the hypervisor.
    pub boot: Vec<PathBuf>,
    /// Packages of dom0 with all dependencies.
    pub dom0: Vec<PathBuf>,
}

impl Packages {
    /// The packages in `cache`, downloaded if missing.
    pub fn obtain(cache: &Path, progress: &Progress) -> Result<Self, BedError> {
        let directory = cache.join("packages");
        let complete = directory.join("complete");
        // The marker is only valid for the same packages.
        let wanted = format!("{DOM0:?}\n");
        if !fs::read_to_string(&complete).is_ok_and(|list| list == wanted) {
            if directory.exists() {
                fs::remove_dir_all(&directory).map_err(at("remove", &directory))?;
            }
            fetch(&directory, progress)?;
            fs::write(&complete, &wanted).map_err(at("write", &complete))?;
        }
        let packages = |place| distribution::packages_in(&directory.join(place));
        Ok(Self { boot: packages("boot")?, dom0: packages("dom0")? })
    }

    /// The names of the packages, which include versions, one per line.
    pub fn names(&self) -> String {
        self.boot.iter().chain(&self.dom0).map(|file| format!("{}\n", file_name(file))).collect()
    }
}

fn fetch(directory: &Path, progress: &Progress) -> Result<(), BedError> {
    for place in ["boot", "dom0/partial"] {
        let place = directory.join(place);
        fs::create_dir_all(&place).map_err(at("create", &place))?;
    }
    Apt::with_any_lists(directory, progress, |apt| download(apt, directory, progress)).map_err(BedError::Packages)
}

/// The reason why packages are not available.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    #[error("apt knows no package {0}")]
    Unknown(String),
    #[error(transparent)]
    Lists(#[from] GuestError),
    #[error(transparent)]
    Tool(#[from] ToolError),
}

fn download(apt: &Apt, directory: &Path, progress: &Progress) -> Result<(), PackageError> {
    let version = newest_xen(apt)?;
    let mut boot = kernel(apt)?;
    boot.push(format!("xen-hypervisor-{version}-amd64"));
    progress.detail(&format!("downloading {}, once", boot.join(", ")));
    tool::text(apt.command("apt-get").args(["-q", "download"]).args(&boot).current_dir(directory.join("boot")))?;

    progress.detail(&format!("downloading what dom0 runs with Xen {version} (90 MB), once"));
    let (store, utils) = ("xenstore-utils", format!("xen-utils-{version}"));
    let packages: Vec<&str> = DOM0.into_iter().chain([store, utils.as_str()]).collect();
    distribution::download(apt, &packages, &directory.join("dom0"), directory)?;
    Ok(())
}

/// The latest version of the hypervisor: `4.17` in Debian 12 and Ubuntu 24.04, `4.20` in Debian 13.
fn newest_xen(apt: &Apt) -> Result<String, PackageError> {
    let pattern = "^xen-hypervisor-4\\.[0-9]+-amd64$";
    let listing = tool::text(apt.command("apt-cache").args(["search", "--names-only", pattern]))?;
    newest_in(&listing).ok_or_else(|| PackageError::Unknown("xen-hypervisor-4.*-amd64".to_owned()))
}

fn newest_in(listing: &str) -> Option<String> {
    let minor = |line: &str| -> Option<u32> {
        let rest = line.strip_prefix("xen-hypervisor-4.")?;
        rest.split_once("-amd64")?.0.parse().ok()
    };
    listing.lines().filter_map(minor).max().map(|minor| format!("4.{minor}"))
}

/// The kernel's package, and those of its modules if they are separate, as in Ubuntu.
fn kernel(apt: &Apt) -> Result<Vec<String>, PackageError> {
    for meta in KERNELS {
        let Some(image) = apt.dependency(meta, "linux-image-") else { continue };
        let modules = apt.dependency(&image, "linux-modules-");
        let more = apt.dependency(meta, "linux-modules-extra-");
        return Ok(std::iter::once(image).chain(modules).chain(more).collect());
    }
    Err(PackageError::Unknown(KERNELS.join(" or ")))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_newest_xen_is_found_by_number() {
        let listing = "xen-hypervisor-4.9-amd64 - x\nxen-hypervisor-4.17-amd64 - Xen\nxen-hypervisor-common - y\n";

        assert_eq!(newest_in(listing).as_deref(), Some("4.17"));
        assert_eq!(newest_in(""), None);
    }
}
