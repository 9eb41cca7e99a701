//! Why an image file cannot be opened or created: what was tried, on which path, what to do next.

use std::io;
use std::path::{Path, PathBuf};

/// What the other holder of a lock does with the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It reads: writers are kept out.
    Reading,
    /// It writes: everybody is kept out.
    Writing,
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Held::Reading => "reading",
            Held::Writing => "writing",
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
        /// What was wanted.
        wanted: Held,
        /// The reason, and the way out of it.
        why: &'static str,
    },
    /// A directory, a socket, a terminal.
    #[error("cannot open {path} as an image: it is {found}, neither a file nor a block device", path = path.display())]
    NotAnImage {
        /// The path as given.
        path: PathBuf,
        /// What it is instead.
        found: &'static str,
    },
    /// The file system has no direct I/O, or none whose alignment we can serve.
    #[error(
        "cannot open {path} with O_DIRECT: {why}; put the image on another file system, or accept the page cache \
         by --cache writeback",
        path = path.display()
    )]
    DirectRefused {
        /// The path as given.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// Another open file description holds a lock that excludes ours.
    #[error(
        "cannot open {path} for {wanted}: it is in use, another process has it open for {held}; stop that process first",
        path = path.display()
    )]
    InUse {
        /// The path as given.
        path: PathBuf,
        /// What was wanted.
        wanted: Held,
        /// What the other holder does.
        held: Held,
    },
    /// `create_new` found something.
    #[error("cannot create {path}: it exists already; remove it or choose another name", path = path.display())]
    Exists {
        /// The path as given.
        path: PathBuf,
    },
    /// The process works on what it was handed, and this file was not among it, or not for that.
    #[error("cannot open {path} for {wanted}: it was not handed to this process for that", path = path.display())]
    NotHanded {
        /// The path as given.
        path: PathBuf,
        /// What was wanted.
        wanted: Held,
    },
    /// What was handed in place of a file is another one.
    #[error("cannot open {path} again: what was handed under that name is another file", path = path.display())]
    AnotherFile {
        /// The path as given.
        path: PathBuf,
    },
    /// Anything else.
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

    /// The error for an `open` or `stat` that failed.
    pub(crate) fn refused(tried: &'static str, path: &Path, wanted: Held, cause: io::Error) -> FileOpenError {
        let path = path.to_owned();
        match cause.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) if tried == "open" => FileOpenError::Missing { path },
            Some(libc::EEXIST) => FileOpenError::Exists { path },
            Some(libc::EACCES | libc::EPERM) => {
                let why = "permission denied; check the owner and the mode of the file and of its directories";
                FileOpenError::NotPermitted { path, wanted, why }
            }
            Some(libc::EROFS) => {
                let why = "its file system is mounted read-only; mount it writable, or serve it with --read-only";
                FileOpenError::NotPermitted { path, wanted, why }
            }
            _ => FileOpenError::Failed { tried, path, source: cause },
        }
    }
}
