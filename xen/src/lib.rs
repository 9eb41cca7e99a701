//! Xen from user space: what a backend needs from the hypervisor, as three traits.
//!
//! A guest grants pages ([`Grants`]) and notifies through event channels ([`EventChannels`]), and both sides find each
//! other in the store ([`Store`]). In a real driver domain these are implemented by the kernel's devices and xenstored;
//! on machines without Xen, by the shared memory of [`fake`]. It knows nothing about block devices.
//!
//! Besides `memory` and `uring` this is the only crate with unsafe code: ioctls, and mappings of guests' pages.
//! Invariant: granted pages stay mapped as long as anything points into them, and no longer.

mod event;
pub mod fake;
mod grant;
pub mod kernel;
mod pending;
mod store;
pub mod wire;
pub mod xenstored;

pub use event::{EventChannels, Port};
pub use grant::{Copied, CopyBatch, Direction, GrantRef, Granted, Grants, PageRange};
pub use store::{Store, StoreError, Transaction, WatchEvent};

/// A domain id, unique on the host until it reboots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomId(pub u16);

impl std::fmt::Display for DomId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The size of a page: the unit of grants, on every architecture (Xen's public header io/ring.h counts in these).
pub const PAGE: usize = 4096;
