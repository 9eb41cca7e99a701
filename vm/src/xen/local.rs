//! A disk that xl attaches to its own domain: `xl block-attach 0`, and what it does for pygrub before there is a guest.
//!
//! That domain is running, and its driver already knows the kernel's backend when xl calls its script. Unlike with a
//! guest, it can be observed when the driver has forgotten that: both ends are removed, and recreated with our backend.
//! xl only looks at the state of the node that it has created, which the disk's process therefore maintains
//! ([`shown_to_xl`]). It knows nothing about images but their names.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use control::Error;
use xen::Store;

use super::adopt::{self, Adopted, read_wish, values};
use super::device::{Device, State, remove_own_end, store_failed, together, write_all};
use super::give::make_both_ends;

/// How long the kernel may take to forget a device: it writes back a file system on it, if one was mounted already.
const TO_FORGET: Duration = Duration::from_secs(10);

/// How often this is checked: no event reports it without udev.
const LOOK: Duration = Duration::from_millis(20);

/// Where the kernel shows the devices of the store's nodes.
pub const BUSES: &str = "/sys/bus";

/// The name of the kernel's backend, under which xl looks for the device.
const OF_XL: &str = "vbd";

/// The keys that xl reads when it calls the script again to detach the disk.
const XLS: [&str; 6] = ["script", "type", "params", "mode", "dev", "online"];

/// The node that xl watches for a disk of its own domain; `None` for a guest's disk.
pub fn shown_to_xl(device: &Device) -> Option<String> {
    let theirs = Device { kind: OF_XL.to_owned(), ..device.clone() };
    (device.guest == device.own).then(|| format!("{}/state", theirs.backend()))
}

/// Takes the device at `node` over from the kernel's backend, and gives it to the backend `kind`.
pub fn adopt(store: &mut dyn Store, buses: &Path, node: &str, kind: &str) -> Result<Adopted, Error> {
    let theirs = Device::of_backend(node).ok_or_else(|| adopt::not_a_disk(node))?;
    let (images, wish, kept) = together(store, |store, within| -> Result<_, Error> {
        let (images, wish) = read_wish(store, within, node)?;
        let kept = values(store, within, node, &XLS)?;
        store.remove(within, &theirs.frontend()).map_err(store_failed)?;
        remove_own_end(store, within, &theirs)?;
        Ok((images, wish, kept))
    })?;
    let number = theirs.vdev.number();
    wait_forgotten(&[buses.join(format!("xen/devices/vbd-{number}")), backend_end(buses, &theirs)], &theirs)?;
    let device = Device { kind: kind.to_owned(), ..theirs };
    let kept: Vec<(&str, &str)> = kept.iter().map(|(key, value)| (*key, value.as_str())).collect();
    together(store, |store, within| -> Result<(), Error> {
        make_both_ends(store, within, &device, wish)?;
        // A node without a state is no device to the kernel.
        write_all(store, within, node, &kept)
    })?;
    Ok(Adopted { device, images, wish })
}

/// Says to xl that the disk is there.
pub fn show(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    let Some(shown) = shown_to_xl(device) else { return Ok(()) };
    let node = shown.trim_end_matches("/state");
    write_all(store, None, node, &[("state", &State::CONNECTED.digits())])
}

/// The sysfs entry of a device that exists as long as it has its kernel backend.
pub fn backend_end(buses: &Path, device: &Device) -> PathBuf {
    buses.join(format!("xen-backend/devices/{}-{}-{}", device.kind, device.guest, device.vdev.number()))
}

/// Waits until the kernel has no end of this device any more.
pub fn wait_forgotten(ends: &[PathBuf], device: &Device) -> Result<(), Error> {
    let until = Instant::now() + TO_FORGET;
    while ends.iter().any(|end| end.exists()) {
        if Instant::now() >= until {
            let why = format!("after {} s the kernel still has the device: a process has it open", TO_FORGET.as_secs());
            return Err(Error::cannot(format!("take {device} over from the kernel"), why));
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::super::give::announce;
    use xen::DomId;

    use super::super::device::text;
    use super::super::fake::{WRITABLE, machine, say};
    use super::*;

    /// A disk of domain 0 as xl leaves it to its script: the driver has answered the kernel's backend.
    fn of_xl() -> (xen::fake::Host, xen::fake::FakeStore, Device) {
        let (host, mut store, device) = machine();
        let theirs = Device { kind: "vbd".into(), guest: DomId(0), ..device };
        announce(&mut store, &theirs, WRITABLE).unwrap();
        say(&mut store, &theirs.backend(), "2");
        say(&mut store, &theirs.frontend(), "3");
        for (key, value) in [("params", "qcow2:/a.qcow2"), ("script", "/etc/xen/scripts/block-tapline")] {
            store.write(None, &format!("{}/{key}", theirs.backend()), value.as_bytes()).unwrap();
        }
        (host, store, theirs)
    }

    #[test]
    fn both_ends_are_recreated_after_the_kernel_forgot_them() {
        let (_host, mut store, theirs) = of_xl();
        let buses = tempfile::tempdir().unwrap();
        let end = buses.path().join("xen/devices/vbd-51728");
        std::fs::create_dir_all(&end).unwrap();
        let forgets = std::thread::spawn(move || std::fs::remove_dir(end).unwrap());
        let adopted = adopt(&mut store, buses.path(), &theirs.backend(), "tapline").unwrap();
        forgets.join().unwrap();
        assert_eq!(adopted.device.backend(), "/local/domain/0/backend/tapline/0/51728");
        assert_eq!(
            adopted.device.states(&mut store, None).unwrap(),
            (Some(State::INITIALISING), Some(State::INITIALISING))
        );
        let mut of_xl = |key: &str| text(&mut store, None, &format!("{}/{key}", theirs.backend())).unwrap();
        assert_eq!(of_xl("script").as_deref(), Some("/etc/xen/scripts/block-tapline"));
        assert_eq!([of_xl("state"), of_xl("frontend")], [None, None], "the kernel sees no device");
        // xl is notified when there is a result.
        show(&mut store, &adopted.device).unwrap();
        let shown = shown_to_xl(&adopted.device).unwrap();
        assert_eq!(shown, "/local/domain/0/backend/vbd/0/51728/state");
        assert_eq!(text(&mut store, None, &shown).unwrap().as_deref(), Some("4"));
        assert_eq!(shown_to_xl(&Device { guest: DomId(7), ..adopted.device }), None);
    }

    #[test]
    fn an_invalid_configuration_is_left_unchanged() {
        let (_host, mut store, theirs) = of_xl();
        store.write(None, &format!("{}/params", theirs.backend()), b"/dev/vg/a").unwrap();
        let failure = adopt(&mut store, Path::new("/none"), &theirs.backend(), "tapline").unwrap_err();
        assert!(failure.message.contains("use raw:/dev/vg/a"), "{failure}");
        assert!(store.read(None, &theirs.backend()).unwrap().is_some());
    }
}
