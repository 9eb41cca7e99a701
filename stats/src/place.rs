//! Where the pages of this machine are.
//!
//! It knows paths, and nothing about what is in a page.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// The directories of all pages of this machine: those of the disks of the daemon with this run directory, and of disks
/// without a daemon.
pub fn directories(run: &Path) -> Vec<PathBuf> {
    std::iter::once(run.join("vbd")).chain(directory()).collect()
}

/// The places in a directory where pages can be: files named so, and directories of VBDs.
pub fn pages_in(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "page") {
            found.push(path);
        } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.push(of_daemon(&path));
        }
    }
    Ok(found)
}

/// Opens a page to be read, without waiting for anything; `None` if it is no regular file.
pub fn open(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::io::retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?);
    Ok(file.metadata()?.is_file().then_some(file))
}

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
