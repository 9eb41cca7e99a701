//! A running domain: created, reattached to, controlled, and observed to its end.
//!
//! It knows nothing about the servers of its disks. Invariant: a domain belongs to no process, and is found by its UUID
//! alone.

use std::path::Path;

use control::Error;
use xen::xenstored::XenstoredClient;

use super::config::Config;
use super::device::store_failed;
use super::disks::Guest;
use super::vdev::Vdev;
use super::xl::{Reason, State, Xl};

/// The name of the configuration, in the machine's directory.
const CONFIG: &str = "xl.cfg";

/// A domain that was created, running or not.
#[derive(Clone, Debug)]
pub struct XenDomain {
    guest: Guest,
    xl: Xl,
}

/// The state of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Its guest runs.
    Running,
    /// Its guest is paused, or is being saved.
    Paused,
    /// Its guest has ended, and the domain may be destroyed.
    Down(Reason),
    /// It no longer exists.
    Gone,
}

impl XenDomain {
    /// Creates a paused domain. On failure none is left.
    pub fn create_paused(xl: &Xl, config: &Config, directory: &Path) -> Result<XenDomain, Error> {
        let text = config.text().map_err(|error| Error::cannot("create a domain", error))?;
        let path = directory.join(CONFIG);
        std::fs::write(&path, text).map_err(|error| Error::cannot(format_args!("write {}", path.display()), error))?;
        xl.create_paused(&path)?;
        let made = XenDomain::find(xl, &config.uuid)?;
        made.ok_or_else(|| Error::cannot("find the domain created by xl", "xenstore has no domain with that UUID"))
    }

    /// The domain of that identity that xl has restored from a file and not let run (`xl restore -p`), if there is one.
    pub fn find_restored(xl: &Xl, uuid: &str) -> Result<Option<XenDomain>, Error> {
        let Some(found) = XenDomain::find(xl, uuid)? else { return Ok(None) };
        Ok((xl.state(found.guest.domain)? == Some(State::Paused)).then_some(found))
    }

    /// The domain of that identity, if there is one.
    pub fn find(xl: &Xl, uuid: &str) -> Result<Option<XenDomain>, Error> {
        let guest = Guest::find(&mut store()?, uuid)?;
        Ok(guest.map(|guest| XenDomain { guest, xl: xl.clone() }))
    }

    /// Its id and UUID.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The current state.
    pub fn status(&self) -> Result<Status, Error> {
        if !self.guest.lives(&mut store()?)? {
            return Ok(Status::Gone);
        }
        Ok(match self.xl.state(self.guest.domain)? {
            None | Some(State::Dying) => Status::Gone,
            Some(State::Running) => Status::Running,
            Some(State::Paused | State::Saved) => Status::Paused,
            Some(State::Down(reason)) => Status::Down(reason),
        })
    }

    /// Lets the guest run.
    pub fn resume(&self) -> Result<(), Error> {
        self.xl.unpause(self.guest.domain)
    }

    /// Pauses the guest, which stays in memory.
    pub fn pause(&self) -> Result<(), Error> {
        self.xl.pause(self.guest.domain)
    }

    /// Requests the guest to power off, without waiting.
    pub fn ask_to_power_off(&self) -> Result<(), Error> {
        self.xl.ask_to_power_off(self.guest.domain)
    }

    /// Ends the domain at once. That it has ended already is as good.
    pub fn end(&self) -> Result<(), Error> {
        if !self.guest.lives(&mut store()?)? {
            return Ok(());
        }
        let destroyed = self.xl.destroy(self.guest.domain);
        match destroyed {
            Err(_) if !self.guest.lives(&mut store()?)? => Ok(()),
            destroyed => destroyed,
        }
    }

    /// Whether it has a disk there.
    pub fn has(&self, vdev: Vdev) -> Result<bool, Error> {
        self.guest.has(&mut store()?, vdev)
    }

    /// Gives it a disk that is served.
    pub fn plug(&self, vdev: Vdev, read_only: bool) -> Result<(), Error> {
        self.guest.give(&mut store()?, vdev, read_only)
    }

    /// Requests the release of a disk from the guest.
    pub fn begin_unplug(&self, vdev: Vdev) -> Result<(), Error> {
        self.guest.ask_for(&mut store()?, vdev)
    }

    /// Whether the guest has released a disk.
    pub fn finish_unplug(&self, vdev: Vdev) -> Result<bool, Error> {
        self.guest.has_let_go(&mut store()?, vdev)
    }
}

/// The store of this host. A connection for each operation: they are rare, and one that is kept would be lost with
/// xenstored.
pub fn store() -> Result<XenstoredClient, Error> {
    XenstoredClient::connect().map_err(store_failed)
}
