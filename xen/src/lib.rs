//! Xen from user space: what a backend needs of the hypervisor, as three traits.
//!
//! A guest grants pages ([`Grants`]), signals through event channels ([`EventChannels`]), and both sides find each other
//! in the store ([`Store`]). In a real driver domain the kernel's devices and the store's daemon are behind them; for
//! machines without Xen, [`fake`] puts shared memory there. Knows nothing of block devices.
//!
//! With `memory` and `uring` this is where unsafe code is: ioctls, and mappings of pages that belong to guests.
//! Invariant: what a guest has granted stays mapped as long as anything points into it, and no longer.

pub mod daemon;
mod event;
pub mod fake;
mod grant;
pub mod kernel;
mod pending;
mod store;
pub mod wire;

pub use event::{EventChannels, Port};
pub use grant::{Copied, CopyBatch, Direction, GrantRef, Granted, Grants, Piece};
pub use store::{Store, StoreError, Transaction, WatchEvent};

/// Number of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomId(pub u16);

impl std::fmt::Display for DomId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Bytes of a page: what is granted at once, on every architecture (Xen's public header io/ring.h counts in these).
pub const PAGE: usize = 4096;
