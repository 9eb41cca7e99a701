//! The directory of redo logs: its path, and the checks that no other user can put a log there.
//!
//! Knows nothing about logs. Invariant: only the user who owns the images can put files there.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use control::redo_name::{self, OF_ROOT};

/// Returns the directory of this user's logs.
pub fn path() -> PathBuf {
    redo_name::directory(rustix::process::geteuid().as_raw())
}

/// Creates the directory of the logs, which only this user may enter.
pub fn create(directory: &Path) -> io::Result<()> {
    if let Some(run) = directory.parent().filter(|_| directory == Path::new(OF_ROOT)) {
        create_shared(run)?;
    }
    DirBuilder::new().recursive(true).mode(0o700).create(directory)
}

/// Creates a directory that other users may enter, whatever the umask: the daemon's sockets will be there.
fn create_shared(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().create(directory) {
        Ok(()) => std::fs::set_permissions(directory, Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Rejects a directory that other users can write to or have created: it may contain a forged log.
pub fn check(directory: &Path) -> io::Result<()> {
    let metadata = match std::fs::symlink_metadata(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    if metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0 {
        return Ok(());
    }
    let what = format!("{} is not a directory owned by this user and writable only by it", directory.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_a_new_shared_directory_gets_its_mode() {
        let room = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let made = room.path().join("run");
        create_shared(&made).unwrap();
        assert_eq!(mode(&made), 0o755);
        std::fs::set_permissions(&made, Permissions::from_mode(0o711)).unwrap();
        create_shared(&made).unwrap();
        assert_eq!(mode(&made), 0o711);
    }
}
