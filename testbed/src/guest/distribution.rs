//! Builds a root file system from the distribution's packages without installing them: they are downloaded with all
//! dependencies, unpacked into a tree, and the tree becomes an image.
//!
//! Knows nothing about the purpose of the packages. Needs no root.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::kernel::{Apt, entries, file_name};
use super::{GuestError, at, image};
use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// Packages that are unnecessary for programs that run without maintainer scripts.
const NOT_UNPACKED: [&str; 11] =
    ["adduser", "debconf", "dpkg_", "iso-codes", "libperl", "libpython", "passwd", "perl", "python", "tar_", "udev_"];
const NOT_KEPT: [&str; 8] = ["bug", "doc", "gtk-doc", "info", "lintian", "locale", "man", "zoneinfo"];

/// The job of a guest that switches to such a root on its first disk, with the program named by the parameter INIT.
pub const TO_ROOT: &str = include_str!("../../guest/to-root.sh");

/// Directories that packages create only in their maintainer scripts.
const DIRECTORIES: [&str; 10] = ["dev", "drop", "etc", "mnt", "proc", "root", "run", "srv", "sys", "tmp"];

/// A root file system for a guest, cached as an image; removing the cache directory fetches newer packages.
pub struct Root<'a> {
    /// A description: `servers and clients of NFS and SMB (75 MB)`.
    pub about: &'a str,
    /// Packages, by names that exist in Debian 12 and 13.
    pub packages: &'a [&'a str],
    /// Packages of [`NOT_UNPACKED`] that are needed nevertheless.
    pub also: &'a [&'a str],
    /// Files by path: the first process, `etc/passwd`, `etc/group`.
    pub files: &'a [(&'a str, &'a str)],
    /// Size of the image in MiB.
    pub mib: u32,
}

impl Root<'_> {
    /// The image in `cache`, built if it is missing or has other inputs.
    pub fn obtain(&self, cache: &Path, progress: &Progress) -> Result<PathBuf, GuestError> {
        let (image, list) = (cache.join("root.img"), cache.join("inputs"));
        let inputs = format!("{:?} {:?} {}\n{:?}", self.packages, self.also, self.mib, self.files);
        if image.exists() && fs::read_to_string(&list).is_ok_and(|list| list == inputs) {
            return Ok(image);
        }
        let packages = self.fetch(cache, progress)?;
        progress.detail("making the guest's root");
        let root = cache.join("root");
        if root.exists() {
            fs::remove_dir_all(&root).map_err(at("remove", &root))?;
        }
        unpack(&root, &packages_in(&packages)?, self.also)?;
        for directory in DIRECTORIES.map(|name| root.join(name)) {
            fs::create_dir_all(&directory).map_err(at("create", &directory))?;
        }
        for (path, content) in self.files {
            put(&root.join(path), content.as_bytes())?;
        }
        make_image(&root, &image, self.mib)?;
        image::replace(&list, inputs.as_bytes())?;
        Ok(image)
    }

    /// The directory of the packages, which are downloaded if they are missing.
    fn fetch(&self, cache: &Path, progress: &Progress) -> Result<PathBuf, GuestError> {
        let packages = cache.join("packages");
        let (complete, wanted) = (packages.join("complete"), format!("{:?}", self.packages));
        if fs::read_to_string(&complete).is_ok_and(|fetched| fetched == wanted) {
            return Ok(packages);
        }
        let partial = packages.join("partial");
        fs::create_dir_all(&partial).map_err(at("create", &partial))?;
        progress.detail(&format!("downloading {}, once", self.about));
        Apt::with_any_lists(cache, progress, |apt| download(apt, self.packages, &packages, cache))?;
        fs::write(&complete, wanted).map_err(at("write", &complete))?;
        Ok(packages)
    }
}

/// Downloads `packages` with all dependencies into `directory`, which must have a directory `partial`; `scratch` is for
/// apt.
pub fn download(apt: &Apt, packages: &[&str], directory: &Path, scratch: &Path) -> Result<(), GuestError> {
    // With an empty list of installed packages, apt downloads all dependencies, not only those missing on this host.
    let installed = scratch.join("installed");
    fs::write(&installed, "").map_err(at("write", &installed))?;
    let mut install = apt.command("apt-get");
    install.arg(format!("-oDir::State::status={}", installed.display()));
    install.arg(format!("-oDir::Cache::archives={}", directory.display()));
    // Other apt processes do not use these directories, and a user without root may not take the host's lock.
    install.args(["-oDebug::NoLocking=1", "-q", "-y", "--no-install-recommends", "--download-only", "install"]);
    tool::text(install.args(packages))?;
    Ok(())
}

/// The packages in `directory`.
pub fn packages_in(directory: &Path) -> Result<Vec<PathBuf>, GuestError> {
    let mut files = entries(directory)?;
    files.retain(|file| file_name(file).ends_with(".deb"));
    files.sort();
    Ok(files)
}

/// Unpacks the packages into the tree `root`, without the unnecessary ones that are not in `also`.
pub fn unpack<'a>(
    root: &Path,
    packages: impl IntoIterator<Item = &'a PathBuf>,
    also: &[&str],
) -> Result<(), GuestError> {
    for directory in ["bin", "sbin", "lib", "lib64"] {
        let target = root.join("usr").join(directory);
        fs::create_dir_all(&target).map_err(at("create", &target))?;
        let link = root.join(directory);
        std::os::unix::fs::symlink(Path::new("usr").join(directory), &link).map_err(at("create", &link))?;
    }
    for package in packages {
        let name = file_name(package);
        let unused = NOT_UNPACKED.iter().filter(|unused| !also.contains(unused)).any(|unused| name.starts_with(unused));
        if !unused {
            unpack_into(root, package)?;
        }
    }
    for (name, target) in [("run", "../run"), ("lock", "../run/lock")] {
        let link = root.join("var").join(name);
        if !link.is_symlink() {
            if link.exists() {
                fs::remove_dir_all(&link).map_err(at("remove", &link))?;
            }
            std::os::unix::fs::symlink(target, &link).map_err(at("create", &link))?;
        }
    }
    put(&root.join("etc/passwd"), b"root:x:0:0:root:/root:/bin/sh\n")?;
    let sh = root.join("bin/sh");
    if sh.is_symlink() {
        fs::remove_file(&sh).map_err(at("remove", &sh))?;
    }
    std::os::unix::fs::symlink("bash", &sh).map_err(at("create", &sh))
}

/// Unpacks a package over the tree; dpkg-deb alone would replace our symbolic links by directories.
fn unpack_into(root: &Path, package: &Path) -> Result<(), GuestError> {
    let mut unpacking = Command::new("dpkg-deb");
    unpacking.arg("--fsys-tarfile").arg(package).stdout(Stdio::piped());
    let failed = |command: &Command, source| ToolError::Start { command: tool::line_of(command), source };
    let mut child = unpacking.spawn().map_err(|source| failed(&unpacking, source))?;
    let mut tar = Command::new("tar");
    tar.args(["-x", "--keep-directory-symlink", "--no-same-owner", "-C"]).arg(root);
    tar.args(NOT_KEPT.iter().map(|part| format!("--exclude=./usr/share/{part}")));
    if let Some(stream) = child.stdout.take() {
        tar.stdin(Stdio::from(stream));
    }
    let unpacked = tool::text(&mut tar);
    let status = child.wait().map_err(|source| failed(&unpacking, source))?;
    unpacked?;
    if status.success() {
        return Ok(());
    }
    Err(ToolError::Failed { command: tool::line_of(&unpacking), status, said: "see above".to_owned() }.into())
}

/// Writes a program or file of the tree.
pub fn put(file: &Path, content: &[u8]) -> Result<(), GuestError> {
    fs::write(file, content).map_err(at("write", file))?;
    fs::set_permissions(file, fs::Permissions::from_mode(0o755)).map_err(at("change", file))
}

/// Converts the tree to an image of `mib` MiB and removes it.
pub fn make_image(root: &Path, image: &Path, mib: u32) -> Result<(), GuestError> {
    let mke2fs = tool::locate("mke2fs").ok_or(GuestError::Missing { program: "mke2fs", package: "e2fsprogs" })?;
    let mut command = Command::new(mke2fs);
    command.args(["-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-E", "root_owner=0:0", "-d"]);
    tool::text(command.arg(root).arg(image).arg(format!("{mib}M")))?;
    fs::remove_dir_all(root).map_err(at("remove", root))
}
