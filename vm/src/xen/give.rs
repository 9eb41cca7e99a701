//! Attaches a disk to a guest: creates the nodes by which both ends find each other.
//!
//! It knows nothing about images and serving processes. Invariant: a device in use is never overwritten, and both ends'
//! nodes appear at once, each with its owner and its reader, as created by libxl.

use control::Error;
use xen::{Store, Transaction};

use super::device::{Device, State, described, remove_own_end, store_failed, text, together, write_all};
use super::domain;

/// Properties of a new device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// The guest may not write.
    pub read_only: bool,
    /// A daemon supervises it ([`is_kept`]).
    pub kept: bool,
}

/// The key by which tools recognize a disk managed by a daemon: in our backend, which the guest cannot write.
const KEPT: &str = "tapline-kept";

impl Wish {
    fn mode(self) -> &'static str {
        if self.read_only { "r" } else { "w" }
    }
}

/// Creates the nodes of both ends. A running guest notices the disk from then on.
pub fn announce(store: &mut dyn Store, device: &Device, wish: Wish) -> Result<(), Error> {
    domain::seen(store, device.guest)?;
    together(store, |store, within| {
        refuse_what_is_in_use(store, within, device)?;
        make_both_ends(store, within, device, wish)
    })
}

/// The nodes of both ends, whatever was there.
pub fn make_both_ends(
    store: &mut dyn Store,
    within: Option<Transaction>,
    device: &Device,
    wish: Wish,
) -> Result<(), Error> {
    make_backend(store, within, device, wish)?;
    make_frontend(store, within, device)
}

/// Creates only our backend, if it does not exist: a guest finds it when the toolstack has created the frontend.
/// Returns whether it existed.
pub fn make_own_end(store: &mut dyn Store, device: &Device, wish: Wish) -> Result<bool, Error> {
    domain::seen(store, device.guest)?;
    together(store, |store, within| match device.states(store, within)? {
        (Some(_), _) => Ok(true),
        (None, Some(_)) => {
            let backend = text(store, within, &format!("{}/backend", device.frontend()))?.unwrap_or_default();
            let mismatch = backend != device.backend();
            if mismatch {
                return Err(Error::cannot(format!("serve {device}"), format!("its backend is {backend}"))
                    .advise("give that backend with --xen-backend, or choose another disk"));
            }
            make_backend(store, within, device, wish).map(|()| false)
        }
        (None, None) => make_backend(store, within, device, wish).map(|()| false),
    })
}

/// Takes back what `announce` has written, for a disk that could not be served.
pub fn withdraw(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    together(store, |store, within| {
        store.remove(within, &device.frontend()).map_err(store_failed)?;
        remove_own_end(store, within, device)
    })
}

/// Whether the disk is read-only for the guest according to the toolstack; `None` if our backend does not exist.
pub fn is_read_only(store: &mut dyn Store, device: &Device) -> Result<Option<bool>, Error> {
    let mode = text(store, None, &format!("{}/mode", device.backend()))?;
    Ok(mode.map(|mode| !mode.contains('w')))
}

/// Whether a daemon manages it, and would serve it again after a detach by others.
pub fn is_kept(store: &mut dyn Store, device: &Device) -> Result<bool, Error> {
    Ok(text(store, None, &format!("{}/{KEPT}", device.backend()))?.is_some())
}

/// A device may be created where there is none, where both ends have closed, or where our backend waits and there is no
/// frontend.
fn refuse_what_is_in_use(store: &mut dyn Store, within: Option<Transaction>, device: &Device) -> Result<(), Error> {
    let other = text(store, within, &format!("{}/backend", device.frontend()))?;
    let other = other.as_deref().and_then(Device::of_backend).filter(|other| other != device);
    if let Some(other) = other {
        if text(store, within, &other.backend())?.is_some() {
            return Err(there_already(device, &format!("it belongs to the backend {}", other.backend())));
        }
    }
    let of_xl = text(store, within, &format!("{}/backend", device.of_xl()))?;
    if let Some(backend) = of_xl.filter(|backend| *backend != device.backend()) {
        return Err(there_already(device, &format!("xl has attached it, with the backend {backend}")));
    }
    match device.states(store, within)? {
        (None, _) | (Some(State::CLOSED), None | Some(State::CLOSED)) => Ok(()),
        (Some(State::INITIALISING | State::INIT_WAIT), None) => Ok(()),
        (backend, guest) => {
            let states = format!("its backend is {}, the guest {}", described(backend), described(guest));
            Err(there_already(device, &states))
        }
    }
}

fn there_already(device: &Device, why: &str) -> Error {
    Error::cannot(format!("attach {device}"), format!("it already exists: {why}")).advise(format!(
        "choose another disk with --vdev, or detach this one: tapline xen detach {} {}",
        device.guest, device.vdev
    ))
}

/// Our backend: its keys are libxl's, so that readers find them. Keys written by the serving process are kept, and so
/// is a state in which it waits.
fn make_backend(store: &mut dyn Store, within: Option<Transaction>, device: &Device, wish: Wish) -> Result<(), Error> {
    let node = device.backend();
    let waits = matches!(device.states(store, within)?.0, Some(State::INITIALISING | State::INIT_WAIT));
    let served = text(store, within, &format!("{node}/tapline"))?.is_some();
    // A toolstack may have forbidden it.
    let discard = text(store, within, &format!("{node}/discard-enable"))?.filter(|_| waits || served);
    if !waits && !served {
        store.remove(within, &node).map_err(store_failed)?;
        store.write(within, &node, b"").map_err(store_failed)?;
        let (owner, reader) = (format!("n{}", device.own), format!("r{}", device.guest));
        store.set_permissions(within, &node, &[&owner, &reader]).map_err(store_failed)?;
    }
    if !waits {
        write_all(store, within, &node, &[("state", &State::INITIALISING.digits())])?;
    }
    let (guest, vdev) = (device.guest.to_string(), device.vdev.to_string());
    let values = [
        ("frontend", device.frontend()),
        ("frontend-id", guest),
        ("online", "1".into()),
        ("removable", "0".into()),
        ("bootable", "1".into()),
        ("dev", vdev),
        ("type", "phy".into()),
        ("mode", wish.mode().into()),
        ("device-type", "disk".into()),
        ("discard-enable", discard.unwrap_or_else(|| if wish.read_only { "0" } else { "1" }.into())),
    ];
    let kept = [(KEPT, String::from("1"))];
    let all = values.iter().chain(kept.iter().filter(|_| wish.kept));
    let all: Vec<(&str, &str)> = all.map(|(key, value)| (*key, value.as_str())).collect();
    write_all(store, within, &node, &all)
}

/// The guest's end, which the guest owns and we may read. What an earlier one has left there goes first.
fn make_frontend(store: &mut dyn Store, within: Option<Transaction>, device: &Device) -> Result<(), Error> {
    let node = device.frontend();
    store.remove(within, &node).map_err(store_failed)?;
    store.write(within, &node, b"").map_err(store_failed)?;
    let (owner, reader) = (format!("n{}", device.guest), format!("r{}", device.own));
    store.set_permissions(within, &node, &[&owner, &reader]).map_err(store_failed)?;
    let values = [
        ("backend", device.backend()),
        ("backend-id", device.own.to_string()),
        ("state", State::INITIALISING.digits()),
        ("virtual-device", device.vdev.number().to_string()),
        ("device-type", "disk".into()),
    ];
    write_all(store, within, &node, &values.each_ref().map(|(key, value)| (*key, value.as_str())))
}

#[cfg(test)]
mod test {
    use xen::DomId;
    use xen::fake::{FakeStore, Subsystem};

    use super::super::fake::{WRITABLE, machine, say};
    use super::*;

    fn values(store: &mut FakeStore, node: &str) -> Vec<(String, String)> {
        let mut names = store.list(None, node).unwrap().unwrap();
        names.sort();
        let value = |name: String| {
            let value = store.read(None, &format!("{node}/{name}")).unwrap().unwrap();
            (name, String::from_utf8(value).unwrap())
        };
        names.into_iter().map(value).collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn both_ends_have_the_keys_and_permissions_that_libxl_gives_them() {
        let (host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let (back, front) = ("/local/domain/0/backend/tapline/7/51728", "/local/domain/7/device/vbd/51728");
        let expected = [
            ("bootable", "1"),
            ("dev", "xvdb"),
            ("device-type", "disk"),
            ("discard-enable", "1"),
            ("frontend", front),
            ("frontend-id", "7"),
            ("mode", "w"),
            ("online", "1"),
            ("removable", "0"),
            ("state", "1"),
            ("type", "phy"),
        ];
        assert_eq!(values(&mut store, back), pairs(&expected));
        let expected = [
            ("backend", back),
            ("backend-id", "0"),
            ("device-type", "disk"),
            ("state", "1"),
            ("virtual-device", "51728"),
        ];
        assert_eq!(values(&mut store, front), pairs(&expected));
        for node in [back.to_owned(), format!("{back}/state")] {
            assert_eq!(host.permissions(&node).unwrap(), ["n0", "r7"], "{node}");
        }
        for node in [front.to_owned(), format!("{front}/state")] {
            assert_eq!(host.permissions(&node).unwrap(), ["n7", "r0"], "{node}");
        }
    }

    #[test]
    fn a_running_guest_sees_both_ends_at_once() {
        let (host, mut store, device) = machine();
        let mut guest = host.store(DomId(7)).unwrap();
        guest.watch("device", "frontends").unwrap();
        while guest.take_event().unwrap().is_some() {}
        announce(&mut store, &device, Wish { read_only: true, kept: false }).unwrap();
        assert!(guest.take_event().unwrap().is_some());
        assert_eq!(guest.read(None, &format!("{}/mode", device.backend())).unwrap().as_deref(), Some(b"r".as_slice()));
        assert_eq!(is_read_only(&mut store, &device).unwrap(), Some(true));
    }

    #[test]
    fn a_failing_store_leaves_no_half_created_device() {
        for nth in 1.. {
            let (host, mut store, device) = machine();
            host.fail(Subsystem::Store, nth);
            let announced = announce(&mut store, &device, WRITABLE);
            if announced.is_ok() {
                assert!(nth > 20, "only {nth} calls");
                return;
            }
            let there = [device.backend(), device.frontend()].map(|node| store.read(None, &node).unwrap().is_some());
            assert_eq!(there, [false, false], "call {nth}");
        }
    }

    #[test]
    fn an_existing_device_is_refused_with_states_and_advice() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        say(&mut store, &device.backend(), "4");
        say(&mut store, &device.frontend(), "4");
        let failure = announce(&mut store, &device, WRITABLE).unwrap_err().with_advice();
        assert_eq!(
            failure,
            "cannot attach xvdb of domain 7: it already exists: its backend is Connected, the guest Connected\n  \
             choose another disk with --vdev, or detach this one: tapline xen detach 7 xvdb"
        );
    }

    #[test]
    fn a_disk_of_another_backend_is_refused() {
        let (_host, mut store, device) = machine();
        let qdisk = Device { kind: "qdisk".into(), ..device.clone() };
        announce(&mut store, &qdisk, WRITABLE).unwrap();
        assert!(
            announce(&mut store, &device, WRITABLE)
                .unwrap_err()
                .message
                .contains("belongs to the backend /local/domain/0/backend/qdisk/7/51728")
        );
        // What it leaves when it is gone does not count as a disk.
        store.remove(None, &qdisk.backend()).unwrap();
        announce(&mut store, &device, WRITABLE).unwrap();
    }

    #[test]
    fn a_closed_device_is_recreated_without_old_keys() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        store.write(None, &format!("{}/ring-ref", device.frontend()), b"8").unwrap();
        say(&mut store, &device.backend(), "6");
        say(&mut store, &device.frontend(), "6");
        announce(&mut store, &device, WRITABLE).unwrap();
        assert_eq!(store.read(None, &format!("{}/ring-ref", device.frontend())).unwrap(), None);
        assert_eq!(device.states(&mut store, None).unwrap().0, Some(State::INITIALISING));
    }

    #[test]
    fn our_backend_may_wait_for_the_frontend() {
        let (_host, mut store, device) = machine();
        assert!(!make_own_end(&mut store, &device, WRITABLE).unwrap());
        say(&mut store, &device.backend(), "2");
        assert!(make_own_end(&mut store, &device, WRITABLE).unwrap());
        announce(&mut store, &device, WRITABLE).unwrap();
        assert_eq!(device.states(&mut store, None).unwrap(), (Some(State::INIT_WAIT), Some(State::INITIALISING)));
    }

    #[test]
    fn a_missing_guest_gets_no_device() {
        let (_host, mut store, device) = machine();
        let device = Device { guest: DomId(8), ..device };
        assert!(announce(&mut store, &device, WRITABLE).unwrap_err().message.contains("find the domain 8"));
        assert_eq!(store.list(None, "/local/domain/8").unwrap(), None);
    }
}
