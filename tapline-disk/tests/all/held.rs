//! Requests while the disk's requests are held back by a client's `pause` or by a verb, and the memory used by requests
//! in flight.

use std::fs;

use serde_json::json;
use testkit::nbd::Command;
use testkit::ring::{Driver, Kind};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::nbd::{BLOCK, Nbd};
use crate::tool::served::Disk;
use crate::tool::vhost::Many;

const MIB: u64 = 1 << 20;

fn wait_for_writes(control: &mut Control, count: u64) {
    while control.done(&json!({ "verb": "stats" }))["writes"]["in_flight"] != count {}
}

/// Returns a disk of a virtual machine, in which all requests wait.
fn paused(room: &Room, recorded: bool) -> (Disk, Control, Driver) {
    room.done("image create qcow2:a --size 16M");
    let disk = Disk::serve(room, "qcow2:a --vhost-user vm.sock --control control.sock");
    let mut control = Control::connect(&room.file("control.sock"));
    let mut driver = Driver::connect(&room.file("vm.sock"), recorded);
    driver.offer(Kind::Write, 0);
    driver.drain();
    control.done(&json!({ "verb": "pause" }));
    (0..40).for_each(|block| driver.offer(Kind::Write, block));
    driver.offer(Kind::Flush, 4000);
    wait_for_writes(&mut control, 40);
    (disk, control, driver)
}

/// Checks that it no longer waits, and that nothing was lost.
fn goes_on(room: &Room, disk: Disk, control: &mut Control, driver: &mut Driver) {
    control.done(&json!({ "verb": "resume" }));
    driver.drain();
    assert_eq!(disk.stop().0, Some(0));
    room.done("image convert qcow2:a raw:b");
    driver.check(&room.read("b"));
}

#[test]
fn a_paused_disk_does_not_hold_up_a_queue_that_is_to_stop() {
    for recorded in [true, false] {
        let room = Room::new();
        let (disk, mut control, mut driver) = paused(&room, recorded);
        // QEMU is blocked until this is replied to.
        let base = driver.stop_ring();
        assert_eq!(driver.unanswered(), 41, "a paused disk has answered");
        wait_for_writes(&mut control, 0);
        driver.start_ring(base);
        wait_for_writes(&mut control, 40);
        assert_eq!(driver.unanswered(), 41, "a paused disk has answered");
        goes_on(&room, disk, &mut control, &mut driver);
    }
}

#[test]
fn a_guest_that_reconnects_to_a_paused_disk_is_served() {
    for recorded in [true, false] {
        let room = Room::new();
        let (disk, mut control, mut driver) = paused(&room, recorded);
        driver.connect_again();
        goes_on(&room, disk, &mut control, &mut driver);
    }
}

/// A client connects while requests are held, writes, and leaves.
#[test]
fn requests_of_a_disconnected_client_never_reach_a_reverted_disk() {
    for format in ["vhd", "qcow2"] {
        let room = Room::new();
        room.done(&format!("image create {format}:a --size 16M"));
        let disk = Disk::serve(&room, &format!("{format}:a --nbd ./nbd.sock --control control.sock"));
        let nbd = || Nbd::connect(&room.file("nbd.sock")).unwrap();
        let name = |file: &str| format!("{format}:{}", room.file(file).display());
        let mut control = Control::connect(&room.file("control.sock"));
        nbd().write(0, &[1; BLOCK]).unwrap();
        control.done(&json!({ "verb": "snapshot", "to": name("b") }));
        control.done(&json!({ "verb": "pause" }));
        let mut leaving = nbd();
        leaving.send(Command::Write, 0, 4096, &[2; BLOCK]).unwrap();
        wait_for_writes(&mut control, 1);
        drop(leaving);
        while control.done(&json!({ "verb": "layers" }))["peers"] != 0 {}
        let revert = json!({ "verb": "revert", "to": 1, "leaf": name("c") });
        let (kind, why) = control.refused(&revert);
        assert!(kind == "connected" && why.contains("a request from a disconnected client"), "{kind}: {why}");
        control.done(&json!({ "verb": "resume" }));
        wait_for_writes(&mut control, 0);
        assert_eq!(nbd().read(0, BLOCK).unwrap(), [2; BLOCK], "it was done on the disk that it was asked of");
        while control.done(&json!({ "verb": "layers" }))["peers"] != 0 {}
        control.done(&revert);
        assert_eq!(nbd().read(0, BLOCK).unwrap(), [1; BLOCK]);
        assert_eq!(disk.stop().0, Some(0));
    }
}

/// Returns the private memory of the process in bytes.
fn own_memory(disk: &Disk) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", disk.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// 256 requests of 1 MiB are first held, then executed. If the guest's memory is not aligned, bounce buffers are used.
#[test]
fn requests_in_flight_hold_a_bounded_number_of_bytes() {
    for (askew, most) in [(0, 16 * MIB), (1, 48 * MIB)] {
        let room = Room::new();
        room.done("image create raw:a --size 256M");
        let disk = Disk::serve(&room, "raw:a --vhost-user vm.sock --control control.sock");
        let mut control = Control::connect(&room.file("control.sock"));
        let mut many = Many::connect(&room.file("vm.sock"), MIB);
        let before = own_memory(&disk);
        control.done(&json!({ "verb": "pause" }));
        (0..256).for_each(|n| many.read(n * MIB, askew));
        assert_eq!(many.completed(), 0);
        while control.done(&json!({ "verb": "stats" }))["reads"]["in_flight"] != 256 {}
        let held = own_memory(&disk).saturating_sub(before);
        assert!(held < 8 * MIB, "{held} bytes for requests that are held back");
        control.send(&json!({ "verb": "resume" }));
        let (mut done, mut held) = (0, 0);
        while done < 256 {
            done += many.completed();
            held = held.max(own_memory(&disk).saturating_sub(before));
        }
        println!("memory off by {askew}: {held} bytes at most");
        assert!(held < most, "{held} bytes for requests under way");
        drop(many);
        assert_eq!(disk.stop().0, Some(0));
    }
}
