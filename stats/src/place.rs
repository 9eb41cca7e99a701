//! Where the pages of this machine are.
//!
//! It knows paths and nothing about what is there.

use std::path::{Path, PathBuf};

/// The directory of the pages of disks that are served without a daemon; `None` for a user who has no directory for
/// what lives as long as the machine runs.
pub fn directory() -> Option<PathBuf> {
    let run = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/run"),
        false => PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty())?),
    };
    Some(run.join("tapline/stats"))
}

/// The page of a disk of a daemon, in the directory of its VBD.
pub fn of_daemon(vbd: &Path) -> PathBuf {
    vbd.join("statistics.page")
}
