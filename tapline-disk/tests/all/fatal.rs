//! A fatal request, which kills its disk's process every time: it fails once with an error, and all other requests
//! succeed.
//!
//! Invariants: exactly three deaths; one error, for that request only; all other requests in flight succeed; any number
//! of kills during recovery is invisible to the guest.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use testkit::ring::{Driver, Kind};

use crate::tool::control::Control;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;
use crate::tool::{Room, TAPLINE};

/// The block of the request that kills, and its sector.
const BLOCK: u64 = 17;
const SECTOR: u64 = BLOCK * 8;

/// Serves an image with a process that aborts at that request.
fn serve(room: &Room, words: &str, point: &str) -> Disk {
    let mut command = room.command(TAPLINE);
    command.arg("serve").args(words.split_whitespace()).env("TAPLINE_DISK_ABORT_AT", format!("{point}:{SECTOR}"));
    Disk::start(command)
}

/// Waits until the process has aborted by itself.
fn reap(disk: &mut Disk) {
    assert_eq!(disk.child.wait().unwrap().signal(), Some(6), "{}", disk.said);
}

/// Runs a guest at queue depth 32, with one fatal request among the others.
fn survive(format: &str, recorded: bool, kind: Kind, point: &str) {
    println!("{format}, recorded: {recorded}, {kind:?}, {point}");
    let room = Room::new();
    room.done(&format!("image create {format}:a --size 16M"));
    let words = format!("{format}:a --vhost-user vm.sock --control c.sock");
    let mut disk = serve(&room, &words, point);
    let mut driver = Driver::connect(&room.file("vm.sock"), recorded);
    driver.may_fail = Some(BLOCK);
    for block in 0..32 {
        driver.offer(if block == BLOCK { kind } else { Kind::Write }, block);
    }
    driver.offer(Kind::Flush, 4000);
    for _ in 1..3 {
        reap(&mut disk);
        disk = serve(&room, &words, point);
        driver.connect_again();
    }
    reap(&mut disk);
    // Completions of the dead processes arrive before or after this.
    disk = serve(&room, &words, point);
    driver.connect_again();
    driver.drain();
    assert_eq!((driver.failed, driver.answered), (1, 33));
    let line = disk.wait_for("has killed");
    let asked = if kind == Kind::Read { "a read" } else { "a write" };
    let told = format!("{asked} of 4096 bytes at sector {SECTOR}, queue 0, descriptor ");
    assert!(line.contains(&told) && line.contains("3 processes"), "{line}");
    let mut control = Control::connect(&room.file("c.sock"));
    for verb in ["stats", "layers", "watch"] {
        assert_eq!(control.done(&json!({ "verb": verb }))["fatal"], 1, "{verb}");
    }
    // It continues like any disk.
    for round in 0..8 {
        (32..64).for_each(|block| driver.offer(if round % 2 == 0 { Kind::Write } else { Kind::Read }, block));
        driver.drain();
    }
    assert_eq!(driver.failed, 1);
    assert_eq!(disk.stop().0, Some(0));
    room.done(&format!("image convert {format}:a raw:b"));
    let expected = if point == "answer" && kind == Kind::Write { 1 } else { 0 };
    driver.check_but(&room.read("b"), (kind == Kind::Write).then_some((BLOCK, expected)));
}

#[test]
fn a_request_that_kills_the_process_before_it_begins_fails_once() {
    survive("raw", true, Kind::Write, "begin");
    survive("raw", false, Kind::Read, "begin");
    survive("qcow2", true, Kind::Write, "begin");
    survive("vhd", false, Kind::Write, "begin");
}

#[test]
fn a_request_that_kills_the_process_after_it_is_done_fails_once() {
    survive("raw", true, Kind::Read, "answer");
    survive("qcow2", true, Kind::Write, "answer");
    survive("vhd", false, Kind::Read, "answer");
}

/// An NBD client reconnects and repeats the request.
#[test]
fn an_nbd_request_that_kills_the_process_fails_once() {
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let words = "qcow2:a --nbd ./n.sock";
    for _ in 0..3 {
        let mut disk = serve(&room, words, "begin");
        let mut client = Nbd::connect(&room.file("n.sock")).unwrap();
        client.write(SECTOR * 512 + 8192, &[1; 512]).unwrap();
        client.write(SECTOR * 512, &[2; 4096]).unwrap_err();
        reap(&mut disk);
    }
    let mut disk = serve(&room, words, "begin");
    let mut client = Nbd::connect(&room.file("n.sock")).unwrap();
    let error = client.write(SECTOR * 512, &[2; 4096]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    client.write(SECTOR * 512 + 8192, &[3; 512]).unwrap();
    disk.wait_for("has killed");
    assert_eq!(disk.stop().0, Some(0));
}

/// A process killed repeatedly before it has completed any request, or during recovery: no request is blamed.
/// `TAPLINE_LIFE_US` sets the maximum lifetime of a process, `TAPLINE_KILLS` the number of kills, `TAPLINE_SEED` the
/// random seed.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn repeated_kills_during_recovery_fail_no_request() {
    let from_environment = |name: &str, otherwise: u64| {
        std::env::var(name).map_or(otherwise, |value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
    };
    let (life, kills) = (from_environment("TAPLINE_LIFE_US", 2000), from_environment("TAPLINE_KILLS", 200));
    let seed = from_environment("TAPLINE_SEED", 3);
    println!("TAPLINE_LIFE_US={life} TAPLINE_KILLS={kills} TAPLINE_SEED={seed}");
    let room = Room::new();
    room.done("image create qcow2:a --size 16M");
    let words = "qcow2:a --vhost-user vm.sock";
    let mut disk = Disk::serve(&room, words);
    let mut driver = Driver::connect(&room.file("vm.sock"), true);
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..kills {
        let (life, begun) = (Duration::from_micros(random.u64(..life)), Instant::now());
        loop {
            for _ in 0..128 {
                let kind = if random.u64(..4) == 0 { Kind::Read } else { Kind::Write };
                driver.offer(kind, random.u64(..4096));
            }
            let Some(left) = life.checked_sub(begun.elapsed()) else { break };
            driver.interrupt(left);
        }
        disk.signal(Signal::KILL);
        disk.child.wait().unwrap();
        disk = Disk::serve(&room, words);
        driver.connect_again();
    }
    driver.drain();
    println!("{} requests answered", driver.answered);
    assert_eq!(driver.failed, 0);
    assert_eq!(disk.stop().0, Some(0));
    room.done("image convert qcow2:a raw:b");
    driver.check(&room.read("b"));
}
