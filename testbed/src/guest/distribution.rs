//! A root file system made of the distribution's packages, of which none is installed: downloaded with all that they
//! depend on, unpacked into a tree, and the tree made an image.
//!
//! Knows nothing of what the packages are for. No root is needed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::kernel::{Apt, entries, file_name};
use super::{GuestError, at, image};
use crate::progress::Progress;
use crate::tool::{self, ToolError};

/// Packages of which the programs that are run without their maintainers' scripts use nothing.
const NOT_UNPACKED: [&str; 11] =
    ["adduser", "debconf", "dpkg_", "iso-codes", "libperl", "libpython", "passwd", "perl", "python", "tar_", "udev_"];
const NOT_KEPT: [&str; 8] = ["bug", "doc", "gtk-doc", "info", "lintian", "locale", "man", "zoneinfo"];

/// The job of a guest that goes on in such a root, which is its first disk, with the program that the parameter INIT
/// names.
pub const TO_ROOT: &str = include_str!("../../guest/to-root.sh");

/// Without its own scripts no package makes these.
const DIRECTORIES: [&str; 10] = ["dev", "drop", "etc", "mnt", "proc", "root", "run", "srv", "sys", "tmp"];

/// A root for a guest, kept as an image in a cache directory; the directory is removed to fetch newer packages.
pub struct Root<'a> {
    /// What it is, in words: `servers and clients of NFS and SMB (75 MB)`.
    pub about: &'a str,
    /// Packages by names that Debian 12 and 13 have.
    pub packages: &'a [&'a str],
    /// Of those that are mostly of no use, the ones that are needed here.
    pub also: &'a [&'a str],
    /// Files by their paths: the first process, `etc/passwd`, `etc/group`.
    pub files: &'a [(&'a str, &'a str)],
    /// Its size.
    pub mib: u32,
}

impl Root<'_> {
    /// The image in `cache`, made when it is not there or was made of something else.
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

    /// The directory of the packages, which are downloaded where they were not.
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

/// Downloads `packages` and all that they depend on into `directory`, which must have a directory `partial`; `scratch`
/// is for apt.
pub fn download(apt: &Apt, packages: &[&str], directory: &Path, scratch: &Path) -> Result<(), GuestError> {
    // By an empty list of what is installed apt hands out all that the packages depend on, not what this machine lacks.
    let installed = scratch.join("installed");
    fs::write(&installed, "").map_err(at("write", &installed))?;
    let mut install = apt.command("apt-get");
    install.arg(format!("-oDir::State::status={}", installed.display()));
    install.arg(format!("-oDir::Cache::archives={}", directory.display()));
    // No other apt knows of these directories, and a plain user may not lock the machine's.
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

/// A tree with what is in the packages, as `root`; of those that are mostly of no use, with `also`.
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

/// Unpacks a package over what is there; dpkg-deb by itself would put directories in the place of our links.
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

/// Makes the tree an image of `mib` and removes it.
pub fn make_image(root: &Path, image: &Path, mib: u32) -> Result<(), GuestError> {
    let mke2fs = tool::locate("mke2fs").ok_or(GuestError::Missing { program: "mke2fs", package: "e2fsprogs" })?;
    let mut command = Command::new(mke2fs);
    command.args(["-q", "-t", "ext4", "-O", "^has_journal,^metadata_csum", "-E", "root_owner=0:0", "-d"]);
    tool::text(command.arg(root).arg(image).arg(format!("{mib}M")))?;
    fs::remove_dir_all(root).map_err(at("remove", root))
}
