//! Descriptors that the process of a guest's disk needs and that only root can open: opened for it, and passed to it.
//!
//! Invariant: the event channels are restricted to the guest. The other descriptors cannot be: see
//! docs/decisions/0013-xen-driver.md.

use std::os::fd::OwnedFd;

use control::Error;
use xen::DomId;
use xen::kernel::{Evtchn, Gntdev};
use xen::xenstored::XenstoredClient;

use super::device::store_failed;

/// Descriptors for one process.
#[derive(Debug)]
pub struct Lent {
    /// `/dev/xen/gntdev`.
    pub grants: OwnedFd,
    /// `/dev/xen/evtchn`, for channels of the guest only.
    pub channels: OwnedFd,
    /// A xenstore connection, for the disk's nodes.
    pub store: OwnedFd,
    /// Another xenstore connection, for events about domains.
    pub domains: OwnedFd,
}

/// Opens all of it.
pub fn lend(guest: DomId) -> Result<Lent, Error> {
    let device = |error| Error::cannot("open files for a disk process", error);
    let store = || XenstoredClient::connect_fd().map_err(store_failed);
    Ok(Lent {
        grants: Gntdev::open_fd().map_err(device)?,
        channels: Evtchn::open_restricted_fd(guest).map_err(device)?,
        store: store()?,
        domains: store()?,
    })
}
