//! The root of the guest: servers and clients of NFS and SMB as the distribution has them, with all they need, on a disk image.
//!
//! Knows names of packages and nothing of what is tested. Made once; `build/shares` is removed to fetch newer ones.

use std::fs;
use std::path::{Path, PathBuf};

use crate::demo::guest::distribution::{self, put};
use crate::demo::guest::kernel::Apt;
use crate::demo::guest::{GuestError, at, image};
use crate::demo::progress::Progress;

const INIT: &str = include_str!("../../../testbed/shares/init");

/// Debian 12 and 13 have these names.
const PACKAGES: [&str; 18] = [
    "bash",
    "busybox-static",
    "cifs-utils",
    "coreutils",
    "e2fsprogs",
    "grep",
    "iproute2",
    "jq",
    "libgcc-s1",
    "mount",
    "nfs-common",
    "nfs-kernel-server",
    "procps",
    "qemu-utils",
    "samba",
    "samba-common-bin",
    "sed",
    "util-linux",
];

/// Without its own scripts no package makes these.
const DIRECTORIES: [&str; 9] = ["dev", "drop", "mnt", "proc", "root", "run", "srv", "sys", "tmp"];

/// 150 MB are used.
const ROOT_MIB: u32 = 400;

/// The image in `cache`, made when it is not there or of another init.
pub fn obtain(cache: &Path, progress: &Progress) -> Result<PathBuf, GuestError> {
    let (image, list) = (cache.join("root.img"), cache.join("inputs"));
    let inputs = format!("{PACKAGES:?} {ROOT_MIB}\n{INIT}");
    if image.exists() && fs::read_to_string(&list).is_ok_and(|list| list == inputs) {
        return Ok(image);
    }
    let packages = cache.join("packages");
    if !packages.join("complete").exists() {
        fetch(cache, &packages, progress)?;
    }
    progress.detail("making the guest's root");
    let root = cache.join("root");
    if root.exists() {
        fs::remove_dir_all(&root).map_err(at("remove", &root))?;
    }
    distribution::unpack(&root, &distribution::packages_in(&packages)?, &[])?;
    for directory in DIRECTORIES.map(|name| root.join(name)) {
        fs::create_dir_all(&directory).map_err(at("create", &directory))?;
    }
    put(&root.join("etc/group"), b"root:x:0:\nnogroup:x:65534:\n")?;
    put(&root.join("etc/passwd"), b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n")?;
    put(&root.join("sbin/shares-init"), INIT.as_bytes())?;
    distribution::make_image(&root, &image, ROOT_MIB)?;
    image::replace(&list, inputs.as_bytes())?;
    Ok(image)
}

fn fetch(cache: &Path, packages: &Path, progress: &Progress) -> Result<(), GuestError> {
    let partial = packages.join("partial");
    fs::create_dir_all(&partial).map_err(at("create", &partial))?;
    progress.detail("downloading servers and clients of NFS and SMB (75 MB), once");
    Apt::with_any_lists(cache, progress, |apt| distribution::download(apt, &PACKAGES, packages, cache))?;
    let complete = packages.join("complete");
    fs::write(&complete, "").map_err(at("write", &complete))
}
