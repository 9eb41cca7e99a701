//! How files are read and written, from the command line to the engine.

use arguments::{Access, CacheMode, IoEngine, Sharing};
use control::Kind;
use uring::{Cache, EngineKind, OpenOptions};

use crate::process::failure::Failure;

/// Returns options for opening a file as the command line says, locked.
pub fn options(access: Access, write: bool) -> OpenOptions {
    let cache = match access.cache {
        CacheMode::None => Cache::None,
        CacheMode::Writeback => Cache::Writeback,
    };
    OpenOptions { write, cache, lock: true }
}

/// Returns options for an image that is only read: unlocked with `--force-share`.
pub fn shared(options: OpenOptions, sharing: Sharing) -> OpenOptions {
    OpenOptions { lock: options.lock && !sharing.force_share, ..options }
}

/// Adds to an error of opening an image for reading how it can be read while it is in use.
pub fn advise(failure: Failure) -> Failure {
    match failure.kind() {
        Kind::InUse => failure.advise(
            "to read it while it is written, as a mixture of states of different times that may look damaged: \
             --force-share",
        ),
        _ => failure,
    }
}

/// Returns the engine, if the command line names one.
pub fn engine(access: Access) -> Option<EngineKind> {
    access.io_engine.map(|engine| match engine {
        IoEngine::Uring => EngineKind::Uring,
        IoEngine::Aio => EngineKind::Aio,
    })
}
