//! Notifications that a domain may have ended, by xenstore, without polling.
//!
//! It does not know which domain: xenstore has one event for all. Invariant: changes between two checks are not missed.

use std::os::fd::{AsFd, BorrowedFd};

use control::Error;
use xen::Store;
use xen::xenstored::XenstoredClient;

use super::device::store_failed;

/// A connection to xenstore that receives notifications about ended domains.
pub struct Departures {
    store: Box<dyn Store + Send>,
}

impl std::fmt::Debug for Departures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Departures")
    }
}

impl Departures {
    /// From now on; once at the beginning as well.
    pub fn watch() -> Result<Departures, Error> {
        let store = XenstoredClient::connect().map_err(store_failed)?;
        Departures::of(Box::new(store))
    }

    fn of(mut store: Box<dyn Store + Send>) -> Result<Departures, Error> {
        // Said when a domain shuts down, begins to die, and is gone.
        store.watch("@releaseDomain", "departures").map_err(store_failed)?;
        Ok(Departures { store })
    }

    /// Whether there was a notification since the last call.
    pub fn take(&mut self) -> Result<bool, Error> {
        let mut told = false;
        while self.store.take_event().map_err(store_failed)?.is_some() {
            told = true;
        }
        Ok(told)
    }
}

/// Readable when there is a notification.
impl AsFd for Departures {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.fd()
    }
}
