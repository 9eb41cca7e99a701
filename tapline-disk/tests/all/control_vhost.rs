//! The control socket of a virtual machine's disk: verbs while a guest uses vhost-user, and what the guest is notified
//! of.

use std::io::Read;

use fastrand::Rng;
use serde_json::{Value, json};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::guest::Guest;
use crate::tool::nbd::{BLOCK, Peer, Versions};
use crate::tool::served::Disk;
use crate::tool::vhost::{FrontEnd, Vhost};

const FORMATS: [&str; 2] = ["vhd", "qcow2"];
const MIB: u64 = 1 << 20;
const BLOCKS: usize = 96;
const STRIDE: u64 = MIB / 2 + 4096;

/// Serves an empty disk of 64 MiB to a virtual machine; also returns its control socket.
fn serve(room: &Room, format: &str) -> (Disk, Control) {
    room.done(&format!("image create {format}:a --size 64M"));
    let disk = Disk::serve(room, &format!("{format}:a --vhost-user vm.sock --control control.sock"));
    (disk, Control::connect(&room.file("control.sock")))
}

fn vhost(room: &Room) -> Vhost {
    Vhost::connect(&room.file("vm.sock"))
}

fn snapshot(room: &Room, format: &str, file: &str) -> Value {
    json!({ "verb": "snapshot", "to": format!("{format}:{}", room.file(file).display()) })
}

fn merge_the_leaf() -> Value {
    json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true })
}

#[test]
fn snapshot_merge_and_resize_lose_nothing_under_load() {
    for format in FORMATS {
        let room = Room::new();
        let (disk, mut control) = serve(&room, format);
        let path = room.file("vm.sock");
        let guest = Guest::start(move || Vhost::connect(&path), Versions::new(BLOCKS, STRIDE), Rng::with_seed(1));
        guest.work(200);
        for file in ["b", "c"] {
            let told = control.done(&snapshot(&room, format, file));
            assert!(told["pause_us"].is_u64() && told["method"] == "chain", "{told}");
            guest.work(200);
        }
        for file in ["c", "b"] {
            let told = control.done(&merge_the_leaf());
            assert!(told["deleted"] == true && !room.file(file).exists(), "{told}");
            guest.work(200);
        }
        assert_eq!(control.done(&json!({ "verb": "resize", "size": 96 * MIB }))["size"], 96 * MIB);
        guest.work(200);
        let mut versions = guest.stop();
        let mut again = vhost(&room);
        assert_eq!(again.capacity(), 96 * MIB);
        versions.check(&mut again);
        drop(again);
        assert_eq!(disk.stop().0, Some(0));
        room.sound(&format!("{format}:a"));
        // Through another path to the same file.
        room.done(&format!("image convert {format}:a raw:after"));
        let after = room.read("after");
        versions.check(&mut Bytes(&after));
    }
}

/// The contents of a disk, read without its process.
struct Bytes<'a>(&'a [u8]);

impl Peer for Bytes<'_> {
    fn write(&mut self, _: u64, _: &[u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn read(&mut self, at: u64, len: usize) -> std::io::Result<Vec<u8>> {
        let at = usize::try_from(at).unwrap();
        Ok(self.0[at..at + len].to_vec())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_connected_guest_uses_the_added_space() {
    for format in ["raw", "vhd", "qcow2"] {
        let room = Room::new();
        let (disk, mut control) = serve(&room, format);
        let mut guest = vhost(&room);
        guest.write(64 * MIB - 4096, &[1; BLOCK]).unwrap();
        assert!(guest.write(64 * MIB, &[2; BLOCK]).is_err(), "behind the end");
        control.done(&json!({ "verb": "resize", "size": 96 * MIB }));
        assert_eq!(guest.capacity(), 96 * MIB);
        assert_eq!(guest.read(64 * MIB, BLOCK).unwrap(), [0; BLOCK]);
        guest.write(96 * MIB - 4096, &[3; BLOCK]).unwrap();
        assert_eq!(guest.read(96 * MIB - 4096, BLOCK).unwrap(), [3; BLOCK]);
        assert_eq!(guest.read(64 * MIB - 4096, BLOCK).unwrap(), [1; BLOCK]);
        assert!(guest.write(96 * MIB, &[4; BLOCK]).is_err(), "behind the new end");
        assert_eq!(control.refused(&json!({ "verb": "resize", "size": 64 * MIB })).0, "unsupported");
        assert_eq!(guest.capacity(), 96 * MIB);
        drop(guest);
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn a_connected_virtual_machine_is_notified_of_a_new_size() {
    let room = Room::new();
    let (mut disk, mut control) = serve(&room, "qcow2");
    let mut front_end = FrontEnd::connect(&room.file("vm.sock"));
    assert_eq!(front_end.capacity(), 64 * MIB);
    for size in [96 * MIB, 128 * MIB] {
        control.done(&json!({ "verb": "resize", "size": size }));
        let mut message = [0; 12];
        front_end.channel.read_exact(&mut message).unwrap();
        // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no payload, no reply requested.
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(front_end.capacity(), size);
    }
    disk.wait_for("notified the front-end");
    assert_eq!(disk.stop().0, Some(0));
    assert!(front_end.channel.read(&mut [0]).is_ok_and(|count| count == 0), "it was told more than that");
}

#[test]
fn a_guest_waits_while_its_disk_is_paused_and_finds_what_it_wrote() {
    for format in FORMATS {
        let room = Room::new();
        let (disk, mut control) = serve(&room, format);
        let mut guest = vhost(&room);
        guest.write(0, &[1; BLOCK]).unwrap();
        control.done(&json!({ "verb": "pause" }));
        guest.begin_write(0, &[2; BLOCK]);
        while control.done(&json!({ "verb": "stats" }))["writes"]["in_flight"] != 1 {}
        control.done(&snapshot(&room, format, "b"));
        assert_eq!(control.refused(&merge_the_leaf()).0, "state");
        // Everything completed before is in the parent, and nothing that came after.
        room.done(&format!("image convert {format}:a raw:paused"));
        assert_eq!(room.read("paused")[..BLOCK], [1; BLOCK]);
        assert!(guest.completions(0).is_empty(), "a paused disk has answered");
        let told = control.done(&json!({ "verb": "resume" }));
        assert_eq!(guest.completions(1), [0]);
        assert!(told["pause_us"].as_u64().unwrap() > 0, "{told}");
        assert_eq!(guest.read(0, BLOCK).unwrap(), [2; BLOCK]);
        control.done(&merge_the_leaf());
        assert_eq!(guest.read(0, BLOCK).unwrap(), [2; BLOCK]);
        drop(guest);
        assert_eq!(disk.stop().0, Some(0));
        room.sound(&format!("{format}:a"));
    }
}
