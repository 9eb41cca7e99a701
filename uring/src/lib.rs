//! File I/O engines: what turns a [`disk::FileOp`] into system calls, and the files that it works on.
//!
//! Two engines do the same work by the same rules (`flight`): [`Uring`] over io_uring, and [`Aio`] over Linux AIO
//! for machines where io_uring is forbidden and for files on which every request would need a thread with io_uring.
//! Either is the one wait of its thread: it also watches file descriptors.
//!
//! Invariant: memory, iovec and operation belong to the slab of the engine from `push` until the operation is
//! handed back; the kernel never holds an address of anything that may be freed or moved.
//!
//! Nothing here knows about images, guests or requests. Nothing is weakened in silence: a file system that refuses
//! O_DIRECT, a kernel that refuses io_uring, are errors which say what to do.
//!
//! A process that writes to files should ignore SIGXFSZ: the kernel sends it beside EFBIG.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod aio;
mod aio_context;
mod alignment;
mod bounce;
mod call;
mod engine;
mod engine_error;
mod entry;
mod epoll;
mod file;
mod file_error;
mod file_table;
mod flight;
mod flights;
mod lock;
mod nowait;
mod offline;
mod polls;
mod registered;
mod reopen;
mod ring;
mod uring;
mod workers;

pub use aio::Aio;
pub use alignment::Alignment;
pub use engine::{DEPTH_MAX, Engine, EngineKind};
pub use engine_error::EngineError;
pub use file::{Cache, ImageFile, OpenOptions, open_for, sync_directory};
pub use file_error::{FileOpenError, Held};
pub use file_table::FILES_MAX;
pub use uring::Uring;
