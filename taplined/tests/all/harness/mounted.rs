//! File systems mounted for a test.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A file system mounted over a directory until dropped.
pub struct Mounted(PathBuf);

impl Mounted {
    /// Runs `mount` with these arguments; `None` where this process may not.
    pub fn over(at: PathBuf, words: &[&str]) -> Option<Mounted> {
        let mounted = Command::new("mount").args(words).arg(&at).status();
        mounted.is_ok_and(|status| status.success()).then_some(Mounted(at))
    }

    /// The mount point.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily: a daemon that has it open is about to be killed, and its disks outlive the test by a moment.
        Command::new("umount").arg("-l").arg(&self.0).status().ok();
    }
}
