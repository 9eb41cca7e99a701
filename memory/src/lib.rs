//! Memory that a disk operation points into.
//!
//! A request of a guest names guest memory; a metadata write names a buffer of our own. Both reach the
//! kernel as [`Segments`]: a list of address ranges together with what keeps those ranges mapped. This
//! crate and the I/O engines are the only places with `unsafe`, so that formats, transports and the disk
//! between them can do without.
//!
//! Invariant: a [`Segments`] never outlives the mapping or buffer it points into, because it holds it.
//!
//! It knows nothing about requests, rings, files and images.

mod buffer;
mod guest;
mod heap;
mod mapping;
mod numa;
mod segments;
mod shared;
mod shrinking;
pub mod size;
mod socket;

pub use buffer::{Buffer, PAGE};
pub use guest::{GuestAddr, GuestMemory, Region};
pub use heap::give_back_freed;
pub use mapping::Mapping;
pub use numa::{NUMA_NODES_MAX, prefer_numa_node};
pub use segments::{Part, Segments};
pub use shared::{Shared, Window};
pub use socket::{Piece, send};
