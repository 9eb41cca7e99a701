//! Images created on block devices: a device is never removed, and its contents are only overwritten on request.

use std::fs;
use std::os::unix::fs::FileExt;

use crate::tool::large::Large;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;

/// Fills the device with random data as its previous contents.
fn used(device: &Large, len: u64) {
    let file = fs::File::options().write(true).open(&device.name).unwrap();
    file.write_all_at(&vec![0xa5; usize::try_from(len).unwrap()], 0).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn an_image_on_a_used_device_is_readable_by_other_programs() {
    for (format, sector) in [("qcow2", "512"), ("vhd", "512"), ("qcow2", "4096")] {
        let Some(device) = Large::device(24 * MIB, sector) else { return };
        used(&device, 24 * MIB);
        let room = &device.room;
        let image = format!("{format}:{}", device.name);
        let said = room.tapline(&format!("image create {image} --size 16M"));
        assert!(said.code == Some(4) && said.err.contains("already contains data, at byte 0"), "{said:?}");
        assert_eq!(fs::read(&device.name).unwrap(), vec![0xa5; 24 << 20], "nothing was done to it");
        room.done(&format!("image create {image} --size 16M --force"));
        assert_eq!(room.json(&format!("image check {image}"))["result"], "clean");
        room.guest(&image, &["read -P 0 0 16M", "write -P 1 0 100k", "write -P 2 9M 1M", "discard 9M 512k"]);
        room.guest(&image, &["read -P 1 0 100k", "read -P 0 100k 8M", "read -P 0 9M 512k", "read -P 2 9728k 512k"]);
        assert_eq!(room.json(&format!("image check {image}"))["result"], "clean");
        room.done(&format!("image convert {image} raw:ours"));
        // QEMU ignores a VHD's bitmaps, and shows the previous contents of the device.
        if format == "qcow2" {
            room.tool("qemu-img", &format!("convert -f qcow2 -O raw {} theirs", device.name));
            room.tool("qemu-img", "compare -f raw -F raw ours theirs");
        }
        let other = Large::device(24 * MIB, sector).unwrap();
        room.done(&format!("image create {format}:{} --parent {image}", other.name));
        room.guest(&format!("{format}:{} --parent {image}", other.name), &["read -P 1 0 100k", "write -P 3 0 1M"]);
    }
}

#[test]
fn a_disk_is_converted_onto_a_device() {
    let Some(device) = Large::device(24 * MIB, "512") else { return };
    let room = &device.room;
    room.make_raw("a", 16 * MIB);
    for format in ["qcow2", "vhd", "raw"] {
        used(&device, 24 * MIB);
        let target = format!("{format}:{}", device.name);
        let said = room.tapline(&format!("image convert raw:a {target}"));
        assert!(said.code == Some(4) && said.err.contains("already contains data"), "{said:?}");
        room.done(&format!("image convert raw:a {target} --force"));
        if format == "raw" {
            let found = fs::read(&device.name).unwrap();
            assert_eq!(found[..16 << 20], room.read("a"));
            assert!(found[16 << 20..].iter().all(|&byte| byte == 0), "nothing of before is left");
        } else {
            room.done(&format!("image compare raw:a {target}"));
        }
    }
}

#[test]
fn small_or_used_devices_are_refused_and_unchanged() {
    let Some(device) = Large::device(8 * MIB, "512") else { return };
    let room = &device.room;
    let refused = |words: &str, why: &str| {
        let said = room.tapline(words);
        assert!(said.code != Some(0) && said.err.contains(why), "{words}: {said:?}");
    };
    refused(&format!("image create vhd:{} --size 4M --fixed", device.name), "a fixed VHD cannot");
    refused(&format!("image create raw:{} --size 9M", device.name), "8388608 bytes, but the image needs 9437184");
    used(&device, MIB);
    room.make_raw("a", 16 * MIB);
    refused(&format!("image convert raw:a raw:{} --force", device.name), "enlarge the device");
    assert_eq!(fs::read(&device.name).unwrap()[..1 << 20], vec![0xa5; 1 << 20]);
    room.done(&format!("image create qcow2:{} --size 4M --force", device.name));
    let _disk = Disk::serve(room, &format!("qcow2:{} --nbd ./nbd.sock", device.name));
    Nbd::connect(&room.file("nbd.sock")).unwrap().write(0, &[7; 512]).unwrap();
    refused(&format!("image create qcow2:{} --size 4M --force", device.name), "in use");
    refused(&format!("image convert raw:a qcow2:{} --force", device.name), "in use");
    refused(&format!("image compact qcow2:{}", device.name), "in use");
}

/// A device node's time is that of the last boot.
#[test]
fn a_child_of_a_device_opens_whatever_the_time_of_its_node() {
    let Some(device) = Large::device(24 * MIB, "512") else { return };
    let room = &device.room;
    let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_600_000_000);
    for format in ["raw", "qcow2", "vhd"] {
        let parent = format!("{format}:{}", device.name);
        room.done(&format!("image create {parent} --size 16M --force"));
        room.done(&format!("image create vhd:{format}.child --parent {parent}"));
        fs::File::open(&device.name).unwrap().set_modified(long_ago).unwrap();
        room.guest(&format!("vhd:{format}.child --parent {parent}"), &["write -P 1 0 64k"]);
        room.guest(&format!("vhd:{format}.child --parent {parent}"), &["read -P 1 0 64k"]);
        let layers = room.json(&format!("image info vhd:{format}.child"));
        assert!(layers[0]["parent"]["modified"].is_null(), "{layers}");
    }
}

/// A conversion that finds no space leaves nothing that opens as an image.
#[test]
fn a_conversion_that_fails_leaves_no_image_on_the_device() {
    let Some(device) = Large::device(8 * MIB, "512") else { return };
    let room = &device.room;
    room.write("a", &vec![9; 16 << 20]);
    for format in ["qcow2", "vhd"] {
        let said = room.tapline(&format!("image convert raw:a {format}:{} --force", device.name));
        assert!(said.code == Some(4) && said.err.contains("holds no image"), "{said:?}");
        let said = room.tapline(&format!("image info {format}:{}", device.name));
        assert_eq!(said.code, Some(4), "{said:?}");
    }
}
