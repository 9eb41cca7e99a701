//! Disks of a domain of ours: attached, detached, and cleaned up when it ends.
//!
//! It knows nothing about serving processes; either end may be created first. Invariant: changes apply only to the
//! intended domain, never to another one that has got the same id since a reboot of the host.

use control::Error;
use xen::{DomId, Store};

use super::device::{Device, State, children, store_failed, text};
use super::domain;
use super::give::{self, Wish};
use super::take;
use super::vdev::Vdev;

/// The name of our back ends in the store.
pub const KIND: &str = "tapline";

/// A domain of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Its id, until the host is rebooted.
    pub domain: DomId,
    /// Its permanent UUID.
    pub uuid: String,
}

impl Guest {
    /// The domain that had this id when it was created.
    pub fn numbered(number: u16, uuid: &str) -> Guest {
        Guest { domain: DomId(number), uuid: uuid.to_owned() }
    }

    /// The domain of that identity, if there is one.
    pub fn find(store: &mut dyn Store, uuid: &str) -> Result<Option<Guest>, Error> {
        for number in children(store, None, "/local/domain")? {
            let Ok(number) = number.parse() else { continue };
            let guest = Guest { domain: DomId(number), uuid: uuid.to_owned() };
            if guest.is_there(store)? {
                return Ok(Some(guest));
            }
        }
        Ok(None)
    }

    /// Whether its number is still its own. libxl names a domain's identity in a node that the guest cannot write.
    pub fn is_there(&self, store: &mut dyn Store) -> Result<bool, Error> {
        let named = text(store, None, &format!("/local/domain/{}/vm", self.domain))?;
        Ok(named.is_some_and(|named| named.strip_prefix("/vm/") == Some(self.uuid.as_str())))
    }

    /// Whether it is there and does not die.
    pub fn lives(&self, store: &mut dyn Store) -> Result<bool, Error> {
        Ok(self.is_there(store)? && store.is_introduced(self.domain).map_err(store_failed)?)
    }

    /// One of its disks.
    pub fn device(&self, store: &mut dyn Store, vdev: Vdev) -> Result<Device, Error> {
        Ok(Device { own: domain::own(store)?, kind: KIND.to_owned(), guest: self.domain, vdev })
    }

    /// Whether it has a disk there, whatever process serves it.
    pub fn has(&self, store: &mut dyn Store, vdev: Vdev) -> Result<bool, Error> {
        let device = self.device(store, vdev)?;
        let backend = text(store, None, &format!("{}/backend", device.frontend()))?;
        Ok(match backend.as_deref().and_then(Device::of_backend) {
            // A closed device does not count.
            Some(other) => !matches!(other.states(store, None)?, (None | Some(State::CLOSED), _)),
            None => false,
        })
    }

    /// Attaches a disk, which a running guest notices.
    pub fn give(&self, store: &mut dyn Store, vdev: Vdev, read_only: bool) -> Result<(), Error> {
        let device = self.device(store, vdev)?;
        if !self.is_there(store)? {
            return Err(Error::cannot(format_args!("give {vdev} to the guest"), "its domain has ended"));
        }
        give::announce(store, &device, Wish { read_only, kept: true })
    }

    /// Requests the release of a disk from the guest.
    pub fn ask_for(&self, store: &mut dyn Store, vdev: Vdev) -> Result<(), Error> {
        if !self.is_there(store)? {
            return Ok(());
        }
        let device = self.device(store, vdev)?;
        take::ask(store, &device)
    }

    /// Whether it has released a disk, or no longer exists.
    pub fn has_let_go(&self, store: &mut dyn Store, vdev: Vdev) -> Result<bool, Error> {
        if !self.lives(store)? {
            return Ok(true);
        }
        let device = self.device(store, vdev)?;
        Ok(matches!(device.states(store, None)?.0, None | Some(State::CLOSED)))
    }

    /// Whether a disk is finished: its serving process then exits by itself, and another would have no guest.
    pub fn is_done_with(&self, store: &mut dyn Store, vdev: Vdev) -> Result<bool, Error> {
        if !self.lives(store)? {
            return Ok(true);
        }
        let device = self.device(store, vdev)?;
        let offline = text(store, None, &format!("{}/online", device.backend()))?.as_deref() == Some("0");
        Ok(match device.states(store, None)?.0 {
            None => true,
            Some(state) => offline && state == State::CLOSED,
        })
    }

    /// Removes the remains of a disk that is no longer served.
    pub fn forget(&self, store: &mut dyn Store, vdev: Vdev) -> Result<(), Error> {
        let device = self.device(store, vdev)?;
        let another = text(store, None, &format!("/local/domain/{}/vm", self.domain))?.is_some();
        match another && !self.is_there(store)? {
            true => Ok(()),
            false => take::remove(store, &device),
        }
    }
}

#[cfg(test)]
mod test {
    use xen::fake::{FakeStore, Guest as Domain, Host};

    use super::*;

    const UUID: &str = "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d";

    fn machine() -> (Domain, FakeStore, Guest) {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        for (number, uuid) in [(6, "other"), (7, UUID)] {
            store.write(None, &format!("/local/domain/{number}/name"), b"vm").unwrap();
            store.write(None, &format!("/local/domain/{number}/vm"), format!("/vm/{uuid}").as_bytes()).unwrap();
        }
        let guest = Guest::find(&mut store, UUID).unwrap().unwrap();
        (host.guest(guest.domain), store, guest)
    }

    fn xvdb() -> Vdev {
        Vdev::of_position(1)
    }

    fn say(store: &mut FakeStore, node: &str, state: &str) {
        store.write(None, &format!("{node}/state"), state.as_bytes()).unwrap();
    }

    #[test]
    fn a_domain_is_found_by_its_uuid() {
        let (_domain, mut store, guest) = machine();
        assert_eq!(guest.domain, DomId(7));
        assert_eq!(Guest::find(&mut store, "another").unwrap(), None);
    }

    #[test]
    fn a_disk_is_attached_requested_back_released_and_removed() {
        let (_domain, mut store, guest) = machine();
        let device = guest.device(&mut store, xvdb()).unwrap();
        assert!(!guest.has(&mut store, xvdb()).unwrap());
        guest.give(&mut store, xvdb(), false).unwrap();
        for node in [device.backend(), device.frontend()] {
            say(&mut store, &node, "4");
        }
        assert!(guest.has(&mut store, xvdb()).unwrap());
        assert!(guest.give(&mut store, xvdb(), false).is_err());
        guest.ask_for(&mut store, xvdb()).unwrap();
        assert!(!guest.has_let_go(&mut store, xvdb()).unwrap());
        assert!(!guest.is_done_with(&mut store, xvdb()).unwrap(), "the guest holds on to it");
        say(&mut store, &device.backend(), "6");
        assert!(guest.has_let_go(&mut store, xvdb()).unwrap() && guest.is_done_with(&mut store, xvdb()).unwrap());
        guest.forget(&mut store, xvdb()).unwrap();
        for node in [device.backend(), device.frontend()] {
            assert_eq!(store.read(None, &node).unwrap(), None, "{node}");
        }
    }

    #[test]
    fn a_disk_of_a_reinitialising_guest_is_not_finished() {
        let (_domain, mut store, guest) = machine();
        let device = guest.device(&mut store, xvdb()).unwrap();
        guest.give(&mut store, xvdb(), false).unwrap();
        say(&mut store, &device.backend(), "6");
        assert!(!guest.is_done_with(&mut store, xvdb()).unwrap());
    }

    #[test]
    fn a_vanished_domain_has_released_everything() {
        let (_domain, mut store, guest) = machine();
        guest.give(&mut store, xvdb(), false).unwrap();
        store.remove(None, "/local/domain/7").unwrap();
        assert!(guest.has_let_go(&mut store, xvdb()).unwrap() && guest.is_done_with(&mut store, xvdb()).unwrap());
        guest.ask_for(&mut store, xvdb()).unwrap();
        assert!(guest.give(&mut store, xvdb(), false).unwrap_err().message.contains("has ended"));
        guest.forget(&mut store, xvdb()).unwrap();
        assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
    }

    #[test]
    fn a_dying_domain_has_released_its_disks_despite_nodes() {
        let (domain, mut store, guest) = machine();
        guest.give(&mut store, xvdb(), false).unwrap();
        assert!(!guest.has_let_go(&mut store, xvdb()).unwrap());
        domain.die();
        assert!(guest.has_let_go(&mut store, xvdb()).unwrap() && guest.is_done_with(&mut store, xvdb()).unwrap());
    }

    #[test]
    fn another_domain_with_the_same_id_is_not_touched() {
        let (_domain, mut store, guest) = machine();
        guest.give(&mut store, xvdb(), false).unwrap();
        let before = Guest { uuid: "before the host was started anew".into(), ..guest.clone() };
        assert!(before.give(&mut store, Vdev::of_position(2), false).is_err());
        before.ask_for(&mut store, xvdb()).unwrap();
        before.forget(&mut store, xvdb()).unwrap();
        let device = guest.device(&mut store, xvdb()).unwrap();
        assert_eq!(device.states(&mut store, None).unwrap().0, Some(State::INITIALISING));
        assert_eq!(text(&mut store, None, &format!("{}/online", device.backend())).unwrap().as_deref(), Some("1"));
    }
}
