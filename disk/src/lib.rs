//! The waist of Tapline: many transports, many formats, one [`Disk`] between them.
//!
//! A transport pops [`Request`]s from its peer; the disk looks up in a format where the bytes live, has an I/O engine
//! move them, and answers. Everything here is a plain state machine: no file, no thread, no clock, no unsafe code. The
//! same code therefore runs over io_uring and over a simulator that crashes it at every write.

#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, clippy::panic))]

mod align;
mod backlog;
mod chain_map;
pub mod changes;
mod crc32c;
mod data_file;
mod disk;
mod error;
pub mod foreign;
mod format;
mod image;
mod io;
mod link;
#[cfg(test)]
#[path = "../tests/memory_io/mod.rs"]
mod memory_io;
mod offset;
mod parent;
mod problem;
pub mod qcow2;
pub mod raw;
pub mod redo;
mod request;
mod round;
mod shape;
mod slab;
mod span;
mod stamp;
mod transport;
mod unaligned;
pub mod vhd;

pub use align::Aligner;
pub use data_file::{DATA_FILE, DataFiles};
pub use disk::{Damage, Damaged, Disk, LAYERS_MAX, Layer, MapState, MergeProgress, MergeState, Options, Times};
pub use error::{ImageError, ImageErrorKind};
pub use format::{
    Access, Committed, Corrupt, Creation, Discarded, Fill, Format, Mapping, MetaBlock, MetaWrite, Reserved, Tail,
    Ticket, Wait,
};
pub use image::{Image, stamps_in};
pub use io::{
    Action, Allocation, EngineFailed, FileDone, FileError, FileId, FileOp, Io, OpId, ReadFault, Source, Until,
};
pub use link::Link;
pub use memory::size;
pub use offset::{DiskOffset, FileOffset, FileRange};
pub use parent::check_parent;
pub use problem::{Problem, Severity};
pub use redo::{Records, RedoLog};
pub use request::{Extent, ExtentKind, Operation, Request, Status, Token};
pub use shape::{Shape, ShapeCounts, ShapePolicy};
pub use span::{Geometry, Span};
pub use stamp::Stamp;
pub use transport::{Disconnected, Transport};
