//! File I/O engines, which turn a [`disk::FileOp`] into system calls, and the files they work on.
//!
//! Two engines follow the same rules (`flight`): [`Uring`] over io_uring, and [`Aio`] over Linux AIO, for machines
//! where io_uring is forbidden and for files on which every io_uring request would need a thread. Each is the only wait
//! of its thread: it also watches file descriptors. Two more do nothing, for measurements: [`Null`] at once, and
//! [`Modelled`] in the time that a device of some kind would take. An engine can have lanes (`lanes`): more threads,
//! each with such an engine on the same files, that do transfers for the first.
//!
//! Invariant: memory, iovec and operation belong to the engine's slab from `push` until the operation is handed back;
//! the kernel never holds an address of anything that may be freed or moved.
//!
//! Nothing here knows about images, guests or requests. There are no fallbacks: a file system that refuses O_DIRECT or
//! a kernel that refuses io_uring is an error, which names the other engine where that one may do.
//!
//! A process that writes to files should ignore SIGXFSZ: the kernel sends it along with EFBIG.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod aio;
mod aio_context;
mod alignment;
mod backend;
mod bell;
mod bounce;
mod call;
mod engine;
mod engine_error;
mod epoll;
mod file;
mod file_error;
mod file_table;
mod flight;
mod flight_slab;
mod known_len;
mod lanes;
mod lock;
mod modelled;
mod nowait_backoff;
mod null;
mod offline;
mod polls;
mod registered_buffers;
mod reopen;
mod ring;
mod spsc;
mod sqe;
mod sync;
mod thread;
mod unique_id;
mod uring;
mod workers;

pub use aio::Aio;
pub use alignment::Alignment;
pub use engine::{DEPTH_MAX, Engine, EngineKind};
pub use engine_error::EngineError;
pub use file::{Cache, ImageFile, OpenOptions, access_mode, sync_directory};
pub use file_error::{AccessMode, FileOpenError};
pub use file_table::FILES_MAX;
pub use modelled::Modelled;
pub use null::Null;
pub use unique_id::{UNIQUE_ID_MAX, id_in_file_system};
pub use uring::Uring;
