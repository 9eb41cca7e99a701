//! Memory and storage that an idle served disk releases after a while.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use crate::tool::Room;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;

const MIB: u64 = 1 << 20;
/// The number of offsets all over a disk of 10 GiB, each in another 2 MiB.
const PLACES: u64 = 2000;

/// Returns the offset of the `number`th write.
fn place(number: u64) -> u64 {
    number * 1601 % 5000 * 2 * MIB
}

fn statistics(room: &Room, disk: &Disk) -> Value {
    let lines = || std::fs::read_to_string(room.file("stats")).unwrap();
    let before = lines().lines().count();
    disk.signal(Signal::USR1);
    loop {
        if let Some(line) = lines().lines().nth(before) {
            return serde_json::from_str(line).unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the private memory of a process in bytes.
fn own_memory(disk: &Disk) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", disk.child.id())).unwrap();
    let line = smaps.lines().find_map(|line| line.strip_prefix("Anonymous:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024
}

/// Returns the memory of a disk of this format just after writes all over it, and after a period without requests.
fn used_and_rested(format: &str) -> (u64, u64) {
    let room = Room::new();
    room.done(&format!("image create {format}:a --size 10G"));
    let disk = Disk::serve(&room, &format!("{format}:a --nbd nbd.sock --stats stats"));
    let mut guest = Nbd::connect(&room.file("nbd.sock")).unwrap();
    for number in 0..PLACES {
        guest.write(place(number), &[u8::try_from(number % 251).unwrap(); 4096]).unwrap();
    }
    guest.flush().unwrap();
    let used = own_memory(&disk);
    while statistics(&room, &disk)["rests"] == 0 {
        std::thread::sleep(Duration::from_millis(200));
    }
    let rested = own_memory(&disk);
    for number in (0..PLACES).step_by(97) {
        assert_eq!(guest.read(place(number), 4096).unwrap(), [u8::try_from(number % 251).unwrap(); 4096]);
    }
    drop(guest);
    assert_eq!(disk.stop().0, Some(0));
    room.sound_and_closed(&format!("{format}:a"));
    (used, rested)
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_idle_qcow2_disk_releases_its_cache() {
    let (used, rested) = used_and_rested("qcow2");
    assert!(rested + MIB < used && rested < 2 * MIB, "{used} bytes, then {rested}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_idle_vhd_disk_releases_its_cache() {
    let (used, rested) = used_and_rested("vhd");
    assert!(rested < used && rested < 2 * MIB, "{used} bytes, then {rested}");
}
