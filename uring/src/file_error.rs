//! Why an image file could not be opened or created: what was tried, on which path, and what to do next.

use std::io;
use std::path::{Path, PathBuf};

use crate::lock::{Holder, NotLocked};

/// How a process uses a file, which decides the mode of its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// Reading: writers are excluded.
    Reading,
    /// Writing: all other users are excluded.
    Writing,
}

impl std::fmt::Display for AccessMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            AccessMode::Reading => "reading",
            AccessMode::Writing => "writing",
        })
    }
}

/// An image file could not be opened or created.
#[derive(Debug, thiserror::Error)]
pub enum FileOpenError {
    /// ENOENT, ENOTDIR.
    #[error("cannot open {path}: there is no such file", path = path.display())]
    Missing {
        /// The path as given.
        path: PathBuf,
    },
    /// EACCES, EPERM, EROFS.
    #[error("cannot open {path} for {wanted}: {why}", path = path.display())]
    NotPermitted {
        /// The path as given.
        path: PathBuf,
        /// The access wanted.
        wanted: AccessMode,
        /// The reason, and how to fix it.
        why: &'static str,
    },
    /// A directory, a socket, a terminal.
    #[error("cannot open {path} as an image: it is {found}, not a file or block device", path = path.display())]
    NotAnImage {
        /// The path as given.
        path: PathBuf,
        /// The actual type of the file, as a noun with an article.
        found: &'static str,
    },
    /// The file system has no direct I/O, or requires an alignment that we cannot serve.
    #[error(
        "cannot open {path} with O_DIRECT: {why}; put the image on another file system, or use the page cache \
         with --cache writeback",
        path = path.display()
    )]
    DirectRefused {
        /// The path as given.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// Another open file description holds a conflicting lock.
    #[error(
        "cannot open {path} for {wanted}: it is in use: {by} has it open for {held}; stop that process first",
        path = path.display()
    )]
    InUse {
        /// The path as given.
        path: PathBuf,
        /// The access wanted.
        wanted: AccessMode,
        /// The access of the other holder.
        held: AccessMode,
        /// The other holder.
        by: String,
    },
    /// `create_new` found an existing file.
    #[error("cannot create {path}: it already exists; choose another name", path = path.display())]
    Exists {
        /// The path as given.
        path: PathBuf,
    },
    /// The process may use only files handed to it, and this one was not, or not for this access.
    #[error("cannot open {path} for {wanted}: it was not passed to this process with that access", path = path.display())]
    NotHanded {
        /// The path as given.
        path: PathBuf,
        /// The access wanted.
        wanted: AccessMode,
    },
    /// The descriptor handed over for a file refers to another file.
    #[error("cannot open {path} again: the descriptor handed over under that name is another file", path = path.display())]
    AnotherFile {
        /// The path as given.
        path: PathBuf,
    },
    /// Any other error.
    #[error("cannot {tried} {path}", path = path.display())]
    Failed {
        /// The step that failed, as a verb.
        tried: &'static str,
        /// The path as given.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl FileOpenError {
    pub(crate) fn failed(tried: &'static str, path: &Path, cause: impl Into<io::Error>) -> FileOpenError {
        FileOpenError::Failed { tried, path: path.to_owned(), source: cause.into() }
    }

    /// The error for a lock that was not acquired.
    pub(crate) fn not_locked(path: &Path, wanted: AccessMode, why: NotLocked) -> FileOpenError {
        match why {
            NotLocked::Conflict(Holder { access: held, program: by, .. }) => {
                FileOpenError::InUse { path: path.to_owned(), wanted, held, by }
            }
            NotLocked::Failed(cause) => FileOpenError::failed("lock", path, cause),
        }
    }

    /// The error for a failed `open` or `stat`.
    pub(crate) fn refused(tried: &'static str, path: &Path, wanted: AccessMode, cause: io::Error) -> FileOpenError {
        let path = path.to_owned();
        match cause.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) if tried == "open" => FileOpenError::Missing { path },
            Some(libc::EEXIST) => FileOpenError::Exists { path },
            Some(libc::EACCES | libc::EPERM) => {
                let why = "permission denied; check the owner and mode of the file and its directories";
                FileOpenError::NotPermitted { path, wanted, why }
            }
            Some(libc::EROFS) => {
                let why = "its file system is mounted read-only; remount it writable, or serve it with --read-only";
                FileOpenError::NotPermitted { path, wanted, why }
            }
            _ => FileOpenError::Failed { tried, path, source: cause },
        }
    }
}
