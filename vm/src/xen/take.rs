//! Detaches a disk from a guest: finds it, requests both ends to close, waits until they have, and removes the remains
//! of the device.
//!
//! It knows nothing about serving processes. Invariant: only nodes of the given device are touched, whatever a guest
//! has written into those it owns.

use std::time::Duration;

use control::Error;
use xen::{DomId, Store, Transaction};

use super::both_ends::BothEnds;
use super::device::{Device, State, children, frontend, remove_own_end, store_failed, text, together, write_all};
use super::domain;
use super::give::is_kept;
use super::vdev::Vdev;

/// Requests both ends to close.
pub fn ask(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    together(store, |store, within| close(store, within, device))
}

/// Like libxl: offline, and Closing unless it has closed already.
fn close(store: &mut dyn Store, within: Option<Transaction>, device: &Device) -> Result<(), Error> {
    match device.states(store, within)?.0 {
        None => Ok(()),
        Some(State::CLOSED) => write_all(store, within, &device.backend(), &[("online", "0")]),
        Some(_) => {
            let closing = State::CLOSING.digits();
            write_all(store, within, &device.backend(), &[("online", "0"), ("state", &closing)])
        }
    }
}

/// Removes both ends' nodes, what xl may know of the device, and the node above ours when it is empty.
pub fn remove(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    together(store, |store, within| {
        let of_xl = text(store, within, &format!("{}/backend", device.of_xl()))?;
        if of_xl.is_some_and(|backend| backend == device.backend()) {
            store.remove(within, &device.of_xl()).map_err(store_failed)?;
        }
        // A frontend that has found another backend in the meantime is no longer ours.
        let served_by = text(store, within, &format!("{}/backend", device.frontend()))?;
        if served_by.is_none_or(|backend| backend == device.backend()) {
            store.remove(within, &device.frontend()).map_err(store_failed)?;
        }
        remove_own_end(store, within, device)
    })
}

/// The backends managed by libxl itself.
const XLS_OWN: [&str; 2] = ["vbd", "qdisk"];

/// Finds the backend of a guest's disk.
pub fn find(store: &mut dyn Store, own: DomId, guest: DomId, vdev: Vdev) -> Result<Device, Error> {
    match look_up(store, own, guest, vdev)? {
        Some(device) => Ok(device),
        None => Err(unknown(store, guest, vdev)),
    }
}

/// Why there is no such disk.
pub fn unknown(store: &mut dyn Store, guest: DomId, vdev: Vdev) -> Error {
    let no_disk = Error::cannot(format!("detach {vdev} of domain {guest}"), "it has no such disk")
        .advise(format!("list its disks: tapline xen list {guest}"));
    domain::seen(store, guest).err().map_or(no_disk, Error::from)
}

/// The device, if the store knows it.
pub fn look_up(store: &mut dyn Store, own: DomId, guest: DomId, vdev: Vdev) -> Result<Option<Device>, Error> {
    // The guest can write anything there: it is trusted only about itself.
    let said = text(store, None, &format!("{}/backend", frontend(guest, vdev)))?;
    let said = said.as_deref().and_then(Device::of_backend);
    if let Some(device) = said.filter(|said| (said.own, said.guest, said.vdev) == (own, guest, vdev)) {
        return Ok(Some(device));
    }
    for kind in children(store, None, &format!("/local/domain/{own}/backend"))? {
        let device = Device { own, kind, guest, vdev };
        if text(store, None, &device.backend())?.is_some() {
            return Ok(Some(device));
        }
    }
    Ok(None)
}

/// Refuses a device that is managed by xl.
pub fn refuse_xls(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    if XLS_OWN.contains(&device.kind.as_str()) && text(store, None, &device.of_xl())?.is_some() {
        return Err(Error::cannot(format!("detach {device}"), "it was attached by xl, which manages it")
            .advise(format!("xl block-detach {} {}", device.guest, device.vdev)));
    }
    Ok(())
}

/// Refuses a device that is managed by the daemon. `action` is what was to be done with it.
pub fn refuse_kept(store: &mut dyn Store, device: &Device, action: &str) -> Result<(), Error> {
    match is_kept(store, device)? {
        true => Err(Error::cannot(format!("{action} {device}"), "it is a VBD managed by taplined")
            .advise("use tapline vbd unplug; if that daemon no longer exists, detach --force")),
        false => Ok(()),
    }
}

/// Waits until the backend has closed or is gone, and reports each change of a state.
pub fn wait_closed(
    store: &mut dyn Store,
    device: &Device,
    patience: Duration,
    tell: impl FnMut(&str),
) -> Result<(), Error> {
    let mut both = BothEnds::new(device, patience, tell);
    let closed = both.until(store, |(backend, _)| matches!(backend, None | Some(State::CLOSED)).then_some(()))?;
    closed.ok_or_else(|| {
        let why = both.at_last();
        let cause = match both.states().1 {
            Some(State::CLOSED) | None => "The disk's process does not respond.",
            Some(State::CONNECTED) => "The guest still uses it: unmount it there, or resume the guest if it is paused.",
            Some(_) => "The guest does not react: check whether it is paused or has no driver.",
        };
        Error::cannot(format!("detach {device}"), why)
            .advise(format!("{cause} --force takes the disk away without the guest's consent"))
    })
}

#[cfg(test)]
mod test {
    use super::super::fake::{WRITABLE, machine, say};
    use super::super::give::{Wish, announce};
    use super::*;

    #[test]
    fn a_releasing_guest_is_awaited_and_nothing_is_left() {
        let (host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        say(&mut store, &device.backend(), "4");
        say(&mut store, &device.frontend(), "4");
        ask(&mut store, &device).unwrap();
        assert_eq!(text(&mut store, None, &format!("{}/online", device.backend())).unwrap().as_deref(), Some("0"));
        let mut ends = host.store(DomId(7)).unwrap();
        let mut told = Vec::new();
        wait_closed(&mut store, &device, Duration::from_secs(60), |states| {
            told.push(states.to_owned());
            match told.len() {
                1 => say(&mut ends, &device.frontend(), "6"),
                _ => say(&mut ends, &device.backend(), "6"),
            }
        })
        .unwrap();
        assert_eq!(told[..2], ["backend Closing, guest Connected", "backend Closing, guest Closed"]);
        remove(&mut store, &device).unwrap();
        assert_eq!(store.list(None, "/local/domain/0/backend/tapline").unwrap(), Some(Vec::new()));
        assert_eq!(store.list(None, "/local/domain/7/device/vbd").unwrap(), Some(Vec::new()));
        assert_eq!((host.counts().watched, host.counts().transactions), (0, 0));
    }

    #[test]
    fn a_guest_that_does_not_release_is_reported_with_advice() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        say(&mut store, &device.backend(), "4");
        say(&mut store, &device.frontend(), "4");
        ask(&mut store, &device).unwrap();
        let failure = wait_closed(&mut store, &device, Duration::ZERO, |_| {}).unwrap_err();
        assert!(failure.message.ends_with("after 0 s the backend is Closing, the guest Connected"), "{failure}");
        assert!(failure.advice.as_deref().unwrap().contains("--force"), "{failure}");
    }

    #[test]
    fn a_guest_with_a_forged_backend_path_harms_no_other() {
        let (_host, mut store, device) = machine();
        store.write(None, "/local/domain/8/name", b"other").unwrap();
        let other = Device { guest: DomId(8), ..device.clone() };
        announce(&mut store, &device, WRITABLE).unwrap();
        announce(&mut store, &other, WRITABLE).unwrap();
        store.write(None, &format!("{}/backend", device.frontend()), other.backend().as_bytes()).unwrap();
        assert_eq!(find(&mut store, DomId(0), DomId(7), device.vdev).unwrap(), device);
        remove(&mut store, &device).unwrap();
        assert_eq!(store.read(None, &device.backend()).unwrap(), None);
        assert!(store.read(None, &other.backend()).unwrap().is_some());
        assert!(store.read(None, &other.frontend()).unwrap().is_some());
    }

    #[test]
    fn what_a_dead_guest_has_left_can_be_detached() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        store.remove(None, "/local/domain/7").unwrap();
        assert_eq!(find(&mut store, DomId(0), DomId(7), device.vdev).unwrap(), device);
        remove(&mut store, &device).unwrap();
        let failure = find(&mut store, DomId(0), DomId(7), device.vdev).unwrap_err();
        assert!(failure.message.contains("find the domain 7"), "{failure}");
    }

    #[test]
    fn a_disk_attached_by_xl_is_refused() {
        let (_host, mut store, device) = machine();
        let device = Device { kind: "vbd".into(), ..device };
        announce(&mut store, &device, WRITABLE).unwrap();
        refuse_xls(&mut store, &device).unwrap();
        store.write(None, &format!("{}/backend", device.of_xl()), device.backend().as_bytes()).unwrap();
        assert_eq!(refuse_xls(&mut store, &device).unwrap_err().advice.as_deref(), Some("xl block-detach 7 xvdb"));
    }

    #[test]
    fn a_disk_of_a_daemon_is_refused() {
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        refuse_kept(&mut store, &device, "detach").unwrap();
        remove(&mut store, &device).unwrap();
        announce(&mut store, &device, Wish { kept: true, ..WRITABLE }).unwrap();
        let failure = refuse_kept(&mut store, &device, "detach").unwrap_err();
        assert!(failure.message.ends_with("it is a VBD managed by taplined"), "{failure}");
        assert!(failure.advice.as_deref().is_some_and(|advice| advice.contains("tapline vbd unplug")), "{failure}");
    }

    #[test]
    fn a_missing_disk_is_refused() {
        let (_host, mut store, device) = machine();
        let failure = find(&mut store, DomId(0), DomId(7), device.vdev).unwrap_err();
        assert_eq!(
            failure.with_advice(),
            "cannot detach xvdb of domain 7: it has no such disk\n  list its disks: tapline xen list 7"
        );
    }
}
