//! How files are read and written, from the command line to the engine.

use arguments::{Access, CacheMode, IoEngine};
use uring::{Cache, EngineKind, OpenOptions};

/// The options of a file that is opened as the command line says, and locked.
pub fn options(access: Access, write: bool) -> OpenOptions {
    let cache = match access.cache {
        CacheMode::None => Cache::None,
        CacheMode::Writeback => Cache::Writeback,
    };
    OpenOptions { write, cache, lock: true }
}

/// The engine, if the command line names one.
pub fn engine(access: Access) -> Option<EngineKind> {
    access.io_engine.map(|engine| match engine {
        IoEngine::Uring => EngineKind::Uring,
        IoEngine::Aio => EngineKind::Aio,
    })
}
