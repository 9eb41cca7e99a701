//! The path of a listening Unix socket, and whether this process must remove it.
//!
//! It knows nothing about the socket itself. Invariant: a path is removed only while it refers to the file created for
//! this socket, not to a later one of the same name, and only by the process that owns it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Device and inode.
type Inode = (u64, u64);

/// A path and the file there, which is removed on drop if this process owns it.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    /// The file, if this process owns it.
    owned: Option<Inode>,
    /// The file, if this process will own it once the previous one has released it.
    inherited: Option<Inode>,
}

impl BoundPath {
    /// A path that this process has just bound.
    pub fn created(path: &Path) -> io::Result<BoundPath> {
        let found = fs::symlink_metadata(path)?;
        Ok(BoundPath { path: path.to_owned(), owned: Some((found.dev(), found.ino())), inherited: None })
    }

    /// A path that another process has bound. It is removed only if its file is given and
    /// [`BoundPath::take_ownership`] was called.
    pub fn foreign(path: &Path, file: Option<Inode>) -> BoundPath {
        BoundPath { path: path.to_owned(), owned: None, inherited: file }
    }

    /// Takes ownership of the path if the previous process, which has released it, owned it.
    pub fn take_ownership(&mut self) {
        self.owned = self.inherited.take().or(self.owned);
    }

    /// The file, if this process owns it.
    pub fn file(&self) -> Option<Inode> {
        self.owned
    }

    /// Gives up ownership: another process will remove the path.
    #[cfg(test)]
    pub fn disown(&mut self) {
        self.owned = None;
    }

    /// Removes the path if this process owns it and it is still the same file.
    pub fn remove(&mut self) {
        let Some(owned) = self.owned.take() else { return };
        let found = fs::symlink_metadata(&self.path).map(|found| (found.dev(), found.ino()));
        if found.is_ok_and(|found| found == owned) {
            // A remaining path is harmless: the next process that binds it finds no listener and replaces it.
            fs::remove_file(&self.path).ok();
        }
    }
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_foreign_path_is_removed_only_after_its_process_has_released_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        fs::write(&path, "").unwrap();
        let mut before = BoundPath::created(&path).unwrap();
        drop(BoundPath::foreign(&path, before.file()));
        assert!(path.exists());
        let mut next = BoundPath::foreign(&path, before.file());
        before.disown();
        drop(before);
        next.take_ownership();
        assert!(path.exists() && next.file().is_some());
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn a_later_file_of_the_same_name_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        fs::write(&path, "").unwrap();
        let bound = BoundPath::created(&path).unwrap();
        // Another inode: the first file still exists while the second is created.
        fs::write(directory.path().join("later"), "").unwrap();
        fs::rename(directory.path().join("later"), &path).unwrap();
        drop(bound);
        assert!(path.exists());
    }
}
