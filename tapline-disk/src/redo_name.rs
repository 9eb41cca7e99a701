//! What the redo log of an image is called.
//!
//! The daemon, which may use no package that this program is, and the tests use this file too: all who open a log find
//! the same one. Knows nothing of where logs are. Invariant: the name is made of the image's file, not of its path, and
//! stays what it is from version to version: a process that is killed is followed by one of any.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// The device and the inode of a file; of a block device its number and none.
pub fn numbers(image: &Metadata) -> (u64, u64) {
    match image.file_type().is_block_device() {
        true => (image.rdev(), 0),
        false => (image.dev(), image.ino()),
    }
}

/// What the log of a file is called.
pub fn file_name(image: &Metadata) -> String {
    let (device, inode) = numbers(image);
    format!("{device:x}-{inode:x}.redo")
}
