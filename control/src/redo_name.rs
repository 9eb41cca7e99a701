//! The file name of an image's redo log.
//!
//! The disk process and the daemon find the same log by it. It knows nothing about where logs are. Invariant: the name
//! depends on the image's file, not on its path, and never changes between versions: a killed process may be followed
//! by one of any version.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

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
