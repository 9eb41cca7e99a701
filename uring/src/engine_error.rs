//! Why an engine cannot be opened, and what to do instead.

use std::io;
use std::path::PathBuf;

use disk::FileId;

use crate::EngineKind;

/// An engine could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Lanes were requested for an engine that does no I/O.
    #[error("a disk that stores nothing has no I/O that another thread could do")]
    NoLanes,
    /// io_uring is not available to this process: a sysctl, a seccomp filter, or a kernel without it.
    #[error("cannot set up io_uring: it is forbidden here ({reason})")]
    UringForbidden {
        /// The cause, as far as it can be determined.
        reason: String,
    },
    /// The kernel's io_uring is too old.
    #[error("cannot use the io_uring of this kernel: it lacks {missing}")]
    UringTooOld {
        /// The missing feature, and the kernel version that introduced it.
        missing: &'static str,
    },
    /// The rings count as locked memory of the user, and its limit is used up.
    #[error(
        "cannot set up io_uring: no memory for its rings, or this user's locked-memory limit (ulimit -l, \
         RLIMIT_MEMLOCK) is exhausted"
    )]
    UringNoMemory(#[source] io::Error),
    /// Linux AIO on a file that is open through the page cache, where it would block.
    #[error(
        "cannot use Linux AIO on {path}: it is open through the page cache, where AIO is not asynchronous; use \
         --cache none, or --io-engine uring",
        path = path.display()
    )]
    AioNeedsDirect {
        /// The file.
        path: PathBuf,
    },
    /// fs.aio-max-nr is used up.
    #[error("cannot set up Linux AIO for {wanted} requests: the system limit fs.aio-max-nr{limit} is nearly exhausted")]
    AioExhausted {
        /// The number of requests needed.
        wanted: u32,
        /// The limit and its current use, in parentheses; empty in a process that may not read them.
        limit: String,
    },
    /// A seccomp filter or a security module.
    #[error("cannot set up Linux AIO: it is forbidden here (a seccomp or security policy refuses {call})")]
    AioForbidden {
        /// The system call.
        call: &'static str,
    },
    /// A kernel without Linux AIO, or with an old one.
    #[error("cannot use the Linux AIO of this kernel: it lacks {missing}")]
    AioMissing {
        /// The missing feature.
        missing: &'static str,
    },
    /// A chain that is too long, or too many files added to it.
    #[error("cannot have more than {max} files open in one I/O engine", max = crate::FILES_MAX)]
    TooManyFiles,
    /// No file has this id.
    #[error("the I/O engine has no file {id}", id = .0.0)]
    NoSuchFile(FileId),
    /// A file cannot be removed while it is in use.
    #[error("file {id} of the I/O engine has operations in flight", id = .0.0)]
    FileBusy(FileId),
    /// A replacement whose alignment or size differs.
    #[error("file {id} of the I/O engine cannot be replaced by one of another alignment or size", id = .0.0)]
    Mismatch(FileId),
    /// An unsupported queue depth.
    #[error("cannot open an I/O engine with queue depth {depth}: must be 1-{max}")]
    Depth {
        /// The requested depth.
        depth: usize,
        /// The largest depth.
        max: u32,
    },
    /// A file could not be opened again.
    #[error(transparent)]
    File(crate::FileOpenError),
    /// Another system call failed.
    #[error("cannot {tried}")]
    Failed {
        /// The attempted operation, as a verb phrase.
        tried: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl EngineError {
    /// The other engine, if the system refuses this one.
    pub fn other(&self) -> Option<EngineKind> {
        match self {
            EngineError::UringForbidden { .. } | EngineError::UringTooOld { .. } | EngineError::UringNoMemory(_) => {
                Some(EngineKind::Aio)
            }
            EngineError::AioExhausted { .. } | EngineError::AioForbidden { .. } | EngineError::AioMissing { .. } => {
                Some(EngineKind::Uring)
            }
            _ => None,
        }
    }

    /// How the system could be made to grant this engine.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            EngineError::UringNoMemory(_) => Some("raise the limit"),
            EngineError::AioExhausted { .. } => Some("raise it with sysctl -w fs.aio-max-nr=NUMBER"),
            _ => None,
        }
    }

    pub(crate) fn failed(tried: &'static str, cause: impl Into<io::Error>) -> EngineError {
        EngineError::Failed { tried, source: cause.into() }
    }
}

/// The value of a sysctl, for display; `None` in a process that may not read it.
pub(crate) fn sysctl(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|value| value.trim().to_owned())
}
