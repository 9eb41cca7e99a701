//! Presents a disk from xl's configuration to an HVM guest's firmware: the disk's process serves NBD to QEMU, and libxl
//! tells QEMU where.
//!
//! libxl reads that from the key `physical-device-path` of the node that it has created for the kernel's backend
//! (libxl_disk.c, libxl__device_disk_find_local_path), when it starts QEMU. It knows nothing about images. Invariant:
//! the kernel never takes the value for one of its own devices.

use std::path::Path;

use control::Error;
use xen::{DomId, Store, Transaction};

use super::device::{Device, remove_own_end, store_failed, text, together, write_all};
use super::give::Wish;
use super::local::{backend_end, wait_forgotten};

/// The kernel's backend, for which xl has created the disk.
const OF_XL: &str = "vbd";

const PATH: &str = "physical-device-path";

/// Whether the guest has firmware that reads the disk through QEMU's emulation: libxl has no read-only emulated disks.
pub fn reads(store: &mut dyn Store, guest: DomId, wish: Wish) -> Result<bool, Error> {
    let of_guest = text(store, None, &format!("/libxl/{guest}/type"))?;
    Ok(!wish.read_only && of_guest.is_some_and(|of_guest| of_guest == "hvm"))
}

/// Makes libxl tell QEMU that the disk is served at this socket. The kernel must have forgotten the node before,
/// because it checks whether the key exists.
pub fn show(store: &mut dyn Store, buses: &Path, device: &Device, socket: &Path) -> Result<(), Error> {
    let theirs = of_xl(device);
    wait_forgotten(&[backend_end(buses, &theirs)], &theirs)?;
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    // A node without a state is no device to the kernel.
    write_all(store, None, &theirs.backend(), &[(PATH, &uri)])
}

/// Takes that back. A node that is a device of the kernel's, or that xl still needs, stays as it is.
pub fn hide(store: &mut dyn Store, device: &Device) -> Result<(), Error> {
    let theirs = of_xl(device);
    let shown = |store: &mut dyn Store, within: Option<Transaction>| -> Result<bool, Error> {
        let names = store.list(within, &theirs.backend()).map_err(store_failed)?;
        Ok(names.is_some_and(|names| names == [PATH]))
    };
    if !shown(store, None)? {
        return Ok(());
    }
    together(store, |store, within| match shown(store, within)? {
        true => Ok(remove_own_end(store, within, &theirs)?),
        false => Ok(()),
    })
}

fn of_xl(device: &Device) -> Device {
    Device { kind: OF_XL.to_owned(), ..device.clone() }
}

#[cfg(test)]
mod test {
    use super::super::fake::{WRITABLE, machine};
    use super::*;

    #[test]
    fn only_writable_disks_of_hvm_guests_are_presented_to_firmware() {
        let (_host, mut store, device) = machine();
        let mut asks = |wish| reads(&mut store, device.guest, wish).unwrap();
        assert!(!asks(WRITABLE), "of a guest of whom xl says nothing");
        for (of_guest, expected) in [("pvh", false), ("pv", false), ("hvm", true)] {
            store.write(None, "/libxl/7/type", of_guest.as_bytes()).unwrap();
            assert_eq!(reads(&mut store, device.guest, WRITABLE).unwrap(), expected, "{of_guest}");
        }
        assert!(!reads(&mut store, device.guest, Wish { read_only: true, ..WRITABLE }).unwrap());
    }

    #[test]
    fn the_path_is_set_after_the_kernel_released_it_and_removed_completely() {
        let (_host, mut store, device) = machine();
        let buses = tempfile::tempdir().unwrap();
        let end = buses.path().join("xen-backend/devices/vbd-7-51728");
        std::fs::create_dir_all(&end).unwrap();
        let forgets = std::thread::spawn(move || std::fs::remove_dir(end).unwrap());
        show(&mut store, buses.path(), &device, Path::new("/run/a.sock")).unwrap();
        forgets.join().unwrap();
        let shown = "/local/domain/0/backend/vbd/7/51728/physical-device-path";
        assert_eq!(text(&mut store, None, shown).unwrap().as_deref(), Some("nbd+unix:///?socket=/run/a.sock"));
        hide(&mut store, &device).unwrap();
        assert_eq!(store.list(None, "/local/domain/0/backend/vbd").unwrap(), Some(Vec::new()));
        hide(&mut store, &device).unwrap();
    }

    #[test]
    fn a_kernel_device_path_is_not_removed() {
        let (_host, mut store, device) = machine();
        let theirs = of_xl(&device);
        write_all(&mut store, None, &theirs.backend(), &[(PATH, "/dev/a"), ("state", "4")]).unwrap();
        hide(&mut store, &device).unwrap();
        assert!(store.read(None, &theirs.backend()).unwrap().is_some());
    }
}
