//! File I/O engines, which turn a [`disk::FileOp`] into system calls, and the files they work on.
//!
//! Two engines follow the same rules (`flight`): [`Uring`] over io_uring, and [`Aio`] over Linux AIO, for machines
//! where io_uring is forbidden and for files on which every io_uring request would need a thread. An engine also
//! watches file descriptors, so that its thread sleeps in one place. Two more engines transfer nothing and are for
//! measurements: [`Null`] completes operations at once, [`Modelled`] after the time that a given device would take. An
//! engine can have lanes (`lanes`): additional threads, each with an engine of its own on the same files, that share
//! the transfers.
//!
//! A file can be an export of an NBD server ([`Remote`]): the engine's thread moves its bytes over a socket.
//!
//! Invariant: memory, iovec and operation belong to the engine's slab from `push` until the operation is handed back;
//! the kernel never holds an address of anything that may be freed or moved.
//!
//! Nothing here knows about images, guests or requests. There are no fallbacks: if the file system refuses O_DIRECT or
//! the kernel refuses io_uring, opening fails, and the error names the other engine where that may work.
//!
//! A process that writes to files should ignore SIGXFSZ: the kernel sends it along with EFBIG.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod aio;
mod aio_context;
mod alignment;
mod backend;
mod bell;
mod blocking_source;
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
mod remote;
mod remotes;
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
pub use blocking_source::ReadSource;
pub use engine::{DEPTH_MAX, Engine, EngineKind};
pub use engine_error::EngineError;
pub use file::{Cache, ImageFile, OpenOptions, access_mode, sync_directory};
pub use file_error::{AccessMode, FileOpenError};
pub use file_table::FILES_MAX;
pub use modelled::Modelled;
pub use null::Null;
pub use remote::{Remote, RemoteOpenError, RemoteOptions, RemoteState};
pub use unique_id::{UNIQUE_ID_MAX, id_in_file_system};
pub use uring::Uring;
