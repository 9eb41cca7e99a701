//! The file name of an image's redo log.
//!
//! The disk process and the daemon find the same log by it. Of directories it knows only that of logs of processes
//! without a daemon, and it opens nothing. Invariant: the name
//! depends on the image's file, not on its path, and never changes between versions: a killed process may be followed
//! by one of any version.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// The directory of root's logs, below the daemon's run directory.
pub const OF_ROOT: &str = "/run/tapline/redo";

/// The directory of the logs of a user, whose number is given: that of this process.
pub fn directory(user: u32) -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(directory) = set("TAPLINE_REDO_DIR") {
        return directory;
    }
    if user == 0 {
        return PathBuf::from(OF_ROOT);
    }
    let runtime = set("XDG_RUNTIME_DIR").map(|directory| directory.join("tapline/redo"));
    runtime.unwrap_or_else(|| PathBuf::from(format!("/tmp/tapline-{user}/redo")))
}

/// The device and the inode of a file; of a block device its number and none.
pub fn numbers(image: &Metadata) -> (u64, u64) {
    match image.file_type().is_block_device() {
        true => (image.rdev(), 0),
        false => (image.dev(), image.ino()),
    }
}

/// The file name of an image's redo log, from its device and inode numbers.
pub fn file_name(image: &Metadata) -> String {
    let (device, inode) = numbers(image);
    format!("{device:x}-{inode:x}.redo")
}
