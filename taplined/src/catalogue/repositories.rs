//! Finds a repository that a daemon with this state directory had attached, when there is no catalogue.
//!
//! A repository's lock file names the host and machine that used it last, and that daemon's state directory. Only
//! this counts: a host may have received another's disks before its first start, and other daemons of this machine
//! have repositories of their own. It changes nothing, and contacts no server, which may not answer.

use std::fs;
use std::path::{Path, PathBuf};

use api::Problem;
use repo::driver::{filesystem, last_host_at, machine};

use crate::config::Config;

/// File systems on local disks or in memory. Others may never respond.
const LOCAL: [&str; 12] =
    ["bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "reiserfs", "tmpfs", "xfs", "zfs"];

/// Maximum number of directories examined in the root of a file system: more belong to something else.
const LOOKED_AT: usize = 1024;

/// Finds a repository of ours: one that a daemon has mounted, or one in the root of a local file system or directly
/// below.
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
        // Mount points are examined as file systems of their own.
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
