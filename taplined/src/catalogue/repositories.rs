//! Finds a repository that a daemon with this state directory has had attached, when there is no catalogue to ask.
//!
//! A repository's lock file says which host had it last, on which machine, and where its state directory was. Only that
//! counts: a host may have been given the disks of another one before its first start, and other daemons of this
//! machine have repositories of their own. It changes nothing, and asks no server, which may not answer.

use std::fs;
use std::path::{Path, PathBuf};

use api::Problem;
use repo::driver::{filesystem, last_host_at, machine};

use crate::config::Config;

/// File systems on disks of this host, or in its memory. Others may never respond.
const LOCAL: [&str; 12] =
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs", "tmpfs", "xfs", "zfs"];

/// Directories in the root of a file system that are looked into: more are a file system of something else.
const LOOKED_AT: usize = 1024;

/// A repository of ours: one that a daemon has mounted, or one in the root of a local file system or directly below.
pub fn one_of_ours(config: &Config) -> Result<Option<PathBuf>, Problem> {
    let mounts = filesystem::mounts()?;
    let points = config.run_directory.join("sr");
    if let Some(mount) = mounts.iter().find(|mount| mount.at.parent() == Some(&points)) {
        return Ok(Some(mount.at.clone()));
    }
    let here = machine();
    let is_ours = |path: &Path| {
        last_host_at(path).is_some_and(|last| last.machine == here && last.state_directory == config.state_directory)
    };
    let is_mount = |path: &Path| mounts.iter().any(|mount| mount.at == path);
    for mount in mounts.iter().filter(|mount| LOCAL.contains(&mount.kind.as_str())) {
        // What is mounted there is looked at by its own kind.
        let below = directories_in(&mount.at).filter(|path| !is_mount(path));
        if let Some(found) = std::iter::once(mount.at.clone()).chain(below).find(|path| is_ours(path)) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The directories in a directory; none if it cannot be listed.
fn directories_in(path: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten().take(LOOKED_AT);
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}
