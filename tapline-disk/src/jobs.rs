//! Jobs on images that are not being served, one module each with a function `run` that prints the result and returns
//! an exit code.

pub mod check;
pub mod compact;
pub mod compare;
pub mod convert;
pub mod create;
pub mod info;
pub mod map;
pub mod merge;
pub mod rebase;
pub mod resize;
pub mod snapshot;

use uring::{Cache, EngineKind, OpenOptions};

use crate::cli::{Access, CacheMode, IoEngine};

impl Access {
    /// The options of a file that is opened according to the command line and locked.
    pub fn options(self, write: bool) -> OpenOptions {
        let cache = match self.cache {
            CacheMode::None => Cache::None,
            CacheMode::Writeback => Cache::Writeback,
        };
        OpenOptions { write, cache, lock: true }
    }

    /// The engine, where one was named.
    pub fn engine(self) -> Option<EngineKind> {
        self.io_engine.map(|engine| match engine {
            IoEngine::Uring => EngineKind::Uring,
            IoEngine::Aio => EngineKind::Aio,
        })
    }
}
