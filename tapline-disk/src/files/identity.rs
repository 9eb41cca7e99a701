//! The identity of a file, independent of its name.
//!
//! It knows nothing about its contents.

use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use control::ImageName;
use uring::ImageFile;

use crate::files::Files;

/// What identifies a file under all its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileIdentity {
    /// Device and inode number, which are the same under all names of the file.
    File(u64, u64),
    /// A device number: one device may have several nodes.
    Device(u64),
}

impl FileIdentity {
    /// Identifies the file of an image, if it exists.
    pub fn of(files: &Files, name: &ImageName) -> Option<FileIdentity> {
        if name.is_at_server() { None } else { FileIdentity::of_path(files, name.path()) }
    }

    /// Identifies the file at a path, if it exists.
    pub fn of_path(files: &Files, path: &Path) -> Option<FileIdentity> {
        files.metadata(path).ok().map(|metadata| FileIdentity::of_metadata(&metadata))
    }

    /// Identifies an open file.
    pub fn of_open(file: &ImageFile) -> Option<FileIdentity> {
        file.metadata().ok().map(|metadata| FileIdentity::of_metadata(&metadata))
    }

    fn of_metadata(metadata: &Metadata) -> FileIdentity {
        match metadata.file_type().is_block_device() {
            true => FileIdentity::Device(metadata.rdev()),
            false => FileIdentity::File(metadata.dev(), metadata.ino()),
        }
    }
}
