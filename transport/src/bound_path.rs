//! The path of a listening Unix socket: whose it is to remove.
//!
//! Knows nothing about the socket itself. Invariant: a path is removed only while the file there is the one that was
//! made for this socket, not a later one of the same name, and only by the process whose turn it is.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Device and inode.
type Inode = (u64, u64);

/// A path and the file there. It is removed when this is dropped, if it is ours.
#[derive(Debug)]
pub(crate) struct BoundPath {
    path: PathBuf,
    /// The file, if it is ours to remove.
    ours: Option<Inode>,
    /// The file, if it becomes ours as soon as the process before this one has let go.
    others: Option<Inode>,
}

impl BoundPath {
    /// A path that was bound just now, by this process.
    pub fn made(path: &Path) -> io::Result<BoundPath> {
        let found = fs::symlink_metadata(path)?;
        Ok(BoundPath { path: path.to_owned(), ours: Some((found.dev(), found.ino())), others: None })
    }

    /// A path that another process has bound. It is left alone; with its file named it is removed in the end, if
    /// [`BoundPath::begin`] was called.
    pub fn of_another(path: &Path, file: Option<Inode>) -> BoundPath {
        BoundPath { path: path.to_owned(), ours: None, others: file }
    }

    /// The process before this one has let go: the path is ours to remove, if it was its.
    pub fn begin(&mut self) {
        self.ours = self.others.take().or(self.ours);
    }

    /// The file, if it is ours to remove.
    pub fn file(&self) -> Option<Inode> {
        self.ours
    }

    /// The path is another process's to remove.
    #[cfg(test)]
    pub fn leave(&mut self) {
        self.ours = None;
    }

    /// Removes the path, if it is ours and still the same file.
    pub fn remove(&mut self) {
        let Some(ours) = self.ours.take() else { return };
        let found = fs::symlink_metadata(&self.path).map(|found| (found.dev(), found.ino()));
        if found.is_ok_and(|found| found == ours) {
            // Nothing is lost by a path that stays: whoever binds it next finds nobody behind it and replaces it.
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
    fn the_path_of_another_process_is_removed_only_after_that_has_let_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        fs::write(&path, "").unwrap();
        let mut before = BoundPath::made(&path).unwrap();
        drop(BoundPath::of_another(&path, before.file()));
        assert!(path.exists());
        let mut next = BoundPath::of_another(&path, before.file());
        before.leave();
        drop(before);
        next.begin();
        assert!(path.exists() && next.file().is_some());
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn a_later_file_of_the_same_name_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        fs::write(&path, "").unwrap();
        let ours = BoundPath::made(&path).unwrap();
        // Another inode: the first still is there while the second is made.
        fs::write(directory.path().join("later"), "").unwrap();
        fs::rename(directory.path().join("later"), &path).unwrap();
        drop(ours);
        assert!(path.exists());
    }
}
