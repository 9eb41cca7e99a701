//! A disk on a block device without space: a loop device over a sparse file, on a really full file system. Other
//! overcommitted devices (thin volumes) return the same error, ENOSPC.

use std::fs;
use std::io;
use std::process::Command;

use serde_json::json;

use crate::tool::control::Control;
use crate::tool::large::Large;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;
use crate::tool::small::{MIB, PIECES, Small, at, piece};

/// A device of 64 MiB over a file system of 48 MiB, most of which is taken by something that can be removed.
struct Device {
    small: Small,
    name: String,
}

impl Device {
    /// `None`, with a message, without the right to mount or without loop devices.
    fn new() -> Option<Device> {
        let small = Small::with_ballast()?;
        let back = small.room.file("small/back");
        fs::File::create(&back).unwrap().set_len(64 << 20).unwrap();
        match Command::new("losetup").args(["--find", "--show"]).arg(back).output() {
            Ok(made) if made.status.success() => {
                let name = String::from_utf8(made.stdout).unwrap().trim().into();
                Some(Device { small, name })
            }
            other => {
                println!("not run: there is no loop device to be had: {other:?}");
                None
            }
        }
    }

    fn serve(&self, words: &str) -> (Disk, Control) {
        self.small.serve(&format!("raw:{} --nbd ./nbd.sock {words}", self.name))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        Command::new("losetup").args(["--detach", &self.name]).status().ok();
    }
}

fn write_all(guest: &mut Nbd) -> io::Result<()> {
    (0..PIECES).try_for_each(|n| guest.write(at(n), &piece(n)))?;
    guest.flush()
}

#[test]
fn a_guest_on_a_full_device_waits_and_continues() {
    let Some(device) = Device::new() else { return };
    let (disk, mut control) = device.serve("--when-full wait");
    let mut watcher = device.small.control();
    watcher.done(&json!({ "verb": "watch" }));
    let mut guest = device.small.nbd();
    let writer = std::thread::spawn(move || write_all(&mut guest));
    assert_eq!(watcher.next_line().unwrap()["event"]["state"], "full");
    // It has no effect, and reads continue.
    control.done(&json!({ "verb": "space" }));
    assert!(device.small.nbd().read(0, MIB).unwrap() == piece(0));
    device.small.make_space();
    control.done(&json!({ "verb": "space" }));
    writer.join().unwrap().unwrap();
    let mut reader = device.small.nbd();
    assert!((0..PIECES).all(|n| reader.read(at(n), MIB).unwrap() == piece(n)));
    drop(reader);
    let layers = control.done(&json!({ "verb": "layers" }));
    assert_eq!((&layers["full"], &layers["broken"]), (&json!(false), &json!(false)));
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_guest_on_a_full_device_gets_an_error_without_waiting() {
    let Some(device) = Device::new() else { return };
    let (disk, mut control) = device.serve("");
    let mut guest = device.small.nbd();
    assert_eq!(write_all(&mut guest).unwrap_err().kind(), io::ErrorKind::StorageFull);
    // Data that had space is there and can be made durable; the disk works as before.
    guest.flush().unwrap();
    assert!(guest.read(0, MIB).unwrap() == piece(0));
    assert_eq!(control.done(&json!({ "verb": "layers" }))["broken"], false);
    device.small.make_space();
    write_all(&mut guest).unwrap();
    drop(guest);
    assert_eq!(disk.stop().0, Some(0));
}

/// Through the page cache, the lack of space is only noticed at a flush, when the written data is already lost: waiting
/// does not help, and nothing more is written.
#[test]
fn a_full_device_behind_the_page_cache_is_a_failed_sync() {
    let Some(device) = Device::new() else { return };
    let (disk, mut control) = device.serve("--cache writeback --when-full wait");
    let mut guest = device.small.nbd();
    assert_eq!(write_all(&mut guest).unwrap_err().raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    let layers = control.done(&json!({ "verb": "layers" }));
    assert_eq!((&layers["full"], &layers["broken"]), (&json!(false), &json!(true)));
    guest.write(0, &piece(1)).unwrap_err();
    drop(guest);
    let (code, said) = disk.stop();
    assert!(code != Some(0) && said.contains("a sync has FAILED"), "{code:?}: {said}");
}

/// An image of a format that grows, on a device that does not: as on a logical volume.
#[test]
fn an_image_fills_its_device_completely_and_stays_intact() {
    for (format, sector) in [("vhd", "512"), ("vhd", "4096"), ("qcow2", "512"), ("qcow2", "4096")] {
        let Some(Large { room, name, .. }) = &Large::device(20 << 20, sector) else { return };
        room.done(&format!("image create {format}:made --size 64M"));
        room.tool("dd", &format!("if=made of={name} bs=1M conv=notrunc,fsync status=none"));
        let image = format!("{format}:{name}");
        let serve = || Disk::serve(room, &format!("{image} --nbd nbd.sock --control control.sock"));
        let nbd = || Nbd::connect(&room.file("nbd.sock")).unwrap();
        let disk = serve();
        let mut guest = nbd();
        let place = |n: usize| u64::try_from(n * 2 * MIB).unwrap();
        let failed = (0..32).find_map(|n| guest.write(place(n), &piece(n)).err().map(|why| (n, why)));
        let (there, why) = failed.expect("more was written than the device has");
        assert!(there > 5 && why.kind() == io::ErrorKind::StorageFull, "{image}: {there}: {why}");
        // Data that had space is durable, and the disk continues with it.
        guest.flush().unwrap();
        guest.write(0, &piece(99)).unwrap();
        guest.flush().unwrap();
        drop(guest);
        let layers = Control::connect(&room.file("control.sock")).done(&json!({ "verb": "layers" }));
        assert_eq!(layers["broken"], false, "{image}");
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{image}: {said}");
        let checked = room.tapline(&format!("image check {image}"));
        assert_eq!(checked.code, Some(0), "{image}: {checked:?}");
        if format == "vhd" {
            // libvhd looks for it there on a device.
            let bytes = fs::read(name).unwrap();
            assert!(bytes[..512] == bytes[bytes.len() - 512..], "{image}: the footer is not at the device's end");
        }
        let disk = serve();
        let mut guest = nbd();
        assert!((1..there).all(|n| guest.read(place(n), MIB).unwrap() == piece(n)), "{image}");
        assert!(guest.read(0, MIB).unwrap() == piece(99), "{image}");
        drop(guest);
        assert_eq!(disk.stop().0, Some(0), "{image}");
    }
}
