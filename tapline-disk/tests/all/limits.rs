//! A disk with limits: they hold, they can be changed while it is served, and held requests neither delay anything else
//! nor get lost.
//!
//! Only minimum times and counters are asserted: how slow a limited disk is depends on the machine, but it is never
//! faster than its limit.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::nbd::{Client, Command};
use testkit::ring::{BLOCK, Driver, Kind};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;

/// A guest's requests pass one by one, a hundred of them in ten seconds.
const SLOW: &str = "iops=10,burst=1ms";

/// After the first, each write of a MiB waits for 16 s: longer than a client waits for [`COUNT`] of them.
const STANDSTILL: &str = "bandwidth=64K,burst=1ms";
const COUNT: u64 = 20;
const MIB: usize = 1 << 20;

fn serve(room: &Room, words: &str) -> (Disk, Control) {
    if !room.file("a").exists() {
        room.done("image create raw:a --size 32M");
    }
    let disk = Disk::serve(room, &format!("raw:a --control control.sock {words}"));
    let control = Control::connect(&room.file("control.sock"));
    (disk, control)
}

fn limit(control: &mut Control, limits: Option<Value>) -> Value {
    let mut request = json!({ "verb": "limit" });
    if let Some(limits) = limits {
        request["limits"] = limits;
    }
    control.done(&request)
}

/// Waits until `count` requests are held by a limit.
fn wait_for_waiting(control: &mut Control, count: u64) {
    while limit(control, None)["waiting"] != count {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends `count` writes of `len` bytes without waiting for their completion.
fn send_writes(nbd: &mut Client, count: u64, len: usize) {
    (0..count).for_each(|n| {
        let at = n * u64::try_from(len).unwrap();
        nbd.send(Command::Write, at, u64::try_from(len).unwrap(), &vec![u8::try_from(n + 1).unwrap(); len]).unwrap();
    });
}

fn take_answers(nbd: &mut Client, count: u64) {
    (0..count).for_each(|_| drop(nbd.answer(0).unwrap()));
}

fn connect(room: &Room) -> Client {
    Client::connect(&room.file("nbd.sock")).unwrap()
}

fn holds(path: &Path, count: u64, len: usize) -> bool {
    let bytes = std::fs::read(path).unwrap();
    (0..count).all(|n| {
        let at = usize::try_from(n).unwrap() * len;
        bytes[at..at + len] == vec![u8::try_from(n + 1).unwrap(); len]
    })
}

#[test]
fn no_more_requests_go_than_the_limit_and_its_burst() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "--nbd nbd.sock --limit iops=200,burst=100ms");
    let mut nbd = connect(&room);
    let begun = Instant::now();
    send_writes(&mut nbd, 120, BLOCK);
    take_answers(&mut nbd, 120);
    // 20 are saved up, and the others pass at 200 per second.
    assert!(begun.elapsed() >= Duration::from_millis(499), "{:?}", begun.elapsed());
    let told = limit(&mut control, None);
    assert_eq!((&told["limits"], &told["waiting"]), (&json!({ "iops": 200, "burst_ms": 100 }), &json!(0)));
    // Requests that a busy machine sends late wait less, or not at all.
    assert!((1..=100).contains(&told["throttled"].as_u64().unwrap()), "{told}");
    assert!(told["throttled_ns"].as_u64().unwrap() > 0, "{told}");
    assert_eq!(disk.stop().0, Some(0));
    assert!(holds(&room.file("a"), 120, BLOCK));
}

#[test]
fn no_more_bytes_go_than_the_limit_and_its_burst() {
    let room = Room::new();
    let (disk, _control) = serve(&room, "--nbd nbd.sock --limit bandwidth=4M,burst=50ms");
    let mut nbd = connect(&room);
    let begun = Instant::now();
    (0..3).for_each(|_| drop(nbd.read(0, 1 << 20).unwrap()));
    // Each is larger than the burst and passes all the same; the next one waits until the bucket is full again.
    assert!(begun.elapsed() >= Duration::from_millis(499), "{:?}", begun.elapsed());
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn flushes_and_requests_of_the_other_kind_do_not_wait() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, &format!("--nbd nbd.sock --limit write-{STANDSTILL}"));
    let mut nbd = connect(&room);
    send_writes(&mut nbd, COUNT, MIB);
    wait_for_waiting(&mut control, COUNT - 1);
    let mut other = connect(&room);
    assert_eq!(other.read(1 << 20, 512).unwrap().len(), 512);
    other.flush().unwrap();
    assert_eq!(limit(&mut control, None)["waiting"], COUNT - 1);
    limit(&mut control, Some(json!({})));
    take_answers(&mut nbd, COUNT);
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn removing_or_raising_a_limit_releases_what_waits() {
    for limits in [json!({}), json!({ "bandwidth": 1_u64 << 40 })] {
        let room = Room::new();
        let (disk, mut control) = serve(&room, &format!("--nbd nbd.sock --limit {STANDSTILL}"));
        let mut nbd = connect(&room);
        send_writes(&mut nbd, COUNT, MIB);
        wait_for_waiting(&mut control, COUNT - 1);
        assert_eq!(limit(&mut control, Some(limits.clone()))["limits"], limits);
        take_answers(&mut nbd, COUNT);
        assert_eq!(limit(&mut control, None)["waiting"], 0);
        assert_eq!(disk.stop().0, Some(0));
        assert!(holds(&room.file("a"), COUNT, MIB));
    }
}

#[test]
fn limits_that_make_no_sense_are_refused_and_change_nothing() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "--nbd nbd.sock --limit iops=5000");
    for (limits, why) in [
        (json!({ "iops": 0 }), "would stop the disk"),
        (json!({ "iops": 100, "read_iops": 200 }), "more than iops"),
        (json!({ "burst_ms": 100 }), "no limit"),
    ] {
        let (kind, message) = control.refused(&json!({ "verb": "limit", "limits": limits }));
        assert!(kind == "invalid" && message.contains(why), "{kind}: {message}");
    }
    assert_eq!(limit(&mut control, None)["limits"], json!({ "iops": 5000 }));
    assert_eq!(limit(&mut control, Some(json!({ "write_bandwidth": 1 << 20 })))["limits"]["iops"], Value::Null);
    assert_eq!(disk.stop().0, Some(0));
    let said = room.tapline("serve raw:a --nbd nbd.sock --limit iops=0");
    assert!(said.code == Some(64) && said.err.contains("leave it out for no limit"), "{}", said.err);
}

#[test]
fn a_disk_that_stops_does_what_waits_for_its_nbd_clients() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, &format!("--nbd nbd.sock --limit {STANDSTILL}"));
    let mut nbd = connect(&room);
    send_writes(&mut nbd, COUNT, MIB);
    wait_for_waiting(&mut control, COUNT - 1);
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    take_answers(&mut nbd, COUNT);
    assert!(holds(&room.file("a"), COUNT, MIB));
}

#[test]
fn an_upgrade_does_not_wait_for_the_limit_and_keeps_it() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "--nbd nbd.sock --limit iops=5000");
    let mut disk = Replaced::of(&room, disk);
    let slow = json!({ "bandwidth": 64 << 10, "burst_ms": 1 });
    limit(&mut control, Some(slow.clone()));
    let mut nbd = connect(&room);
    send_writes(&mut nbd, COUNT, MIB);
    wait_for_waiting(&mut control, COUNT - 1);
    drop(control);
    let answer = disk.upgrade().join().unwrap();
    disk.replaced_by(&answer);
    take_answers(&mut nbd, COUNT);
    let mut control = Control::connect(&room.file("control.sock"));
    assert_eq!(limit(&mut control, None)["limits"], slow, "not those of the command line");
    // Removed permanently, unknown to the command line.
    assert_eq!(limit(&mut control, Some(json!({})))["limits"], json!({}));
    drop(control);
    let answer = disk.upgrade().join().unwrap();
    disk.replaced_by(&answer);
    let mut control = Control::connect(&room.file("control.sock"));
    assert_eq!(limit(&mut control, None)["limits"], json!({}));
    drop((nbd, control));
    disk.stop();
    assert!(holds(&room.file("a"), COUNT, MIB));
}

/// Returns a guest with requests held by the limit.
fn waiting_machine(room: &Room, recorded: bool) -> (Disk, Control, Driver) {
    let (disk, mut control) = serve(room, &format!("--vhost-user vm.sock --limit {SLOW}"));
    let mut driver = Driver::connect(&room.file("vm.sock"), recorded);
    (0..100).for_each(|block| driver.prepare(Kind::Write, block));
    driver.kick();
    while limit(&mut control, None)["waiting"].as_u64() < Some(50) {
        std::thread::sleep(Duration::from_millis(1));
    }
    (disk, control, driver)
}

fn unlimit_and_check(room: &Room, mut disk_control: (Disk, Control), mut driver: Driver) {
    limit(&mut disk_control.1, Some(json!({})));
    driver.drain();
    assert_eq!(driver.answered, 100);
    assert_eq!(disk_control.0.stop().0, Some(0));
    driver.check(&room.read("a"));
}

/// QEMU's main loop waits for this reply when a guest resets, stops or loses the device.
#[test]
fn a_queue_stops_at_once_while_its_requests_wait_and_resumes_later() {
    for recorded in [true, false] {
        let room = Room::new();
        let (disk, mut control, mut driver) = waiting_machine(&room, recorded);
        let base = driver.stop_ring();
        assert!(driver.unanswered() > 0, "it has waited for the limit");
        assert_eq!(limit(&mut control, None)["waiting"], 0, "nothing of it is left here");
        driver.start_ring(base);
        unlimit_and_check(&room, (disk, control), driver);
    }
}

#[test]
fn requests_that_wait_stay_with_the_guest_when_the_process_stops() {
    for recorded in [true, false] {
        let room = Room::new();
        let (disk, control, driver) = waiting_machine(&room, recorded);
        drop(control);
        let (code, said) = disk.stop();
        assert!(code == Some(0) && said.contains("waiting requests stay with their guest"), "{said}");
        let mut driver = driver;
        let next = serve(&room, &format!("--vhost-user vm.sock --limit {SLOW}"));
        driver.connect_again();
        unlimit_and_check(&room, next, driver);
    }
}

#[test]
fn requests_that_wait_are_done_once_after_the_process_was_killed() {
    for recorded in [true, false] {
        let room = Room::new();
        let (mut disk, control, mut driver) = waiting_machine(&room, recorded);
        drop(control);
        disk.signal(Signal::KILL);
        disk.child.wait().unwrap();
        let next = serve(&room, &format!("--vhost-user vm.sock --limit {SLOW}"));
        driver.connect_again();
        unlimit_and_check(&room, next, driver);
    }
}

#[test]
fn requests_that_wait_are_handed_over_in_an_upgrade_with_the_limit() {
    for recorded in [true, false] {
        let room = Room::new();
        let (disk, control, mut driver) = waiting_machine(&room, recorded);
        drop(control);
        let mut disk = Replaced::of(&room, disk);
        let answer = disk.upgrade_to("/bin/false").join().unwrap();
        assert_eq!(answer["error"]["kind"], "failed", "{answer}");
        let answer = disk.upgrade().join().unwrap();
        disk.replaced_by(&answer);
        let mut control = Control::connect(&room.file("control.sock"));
        while limit(&mut control, None)["waiting"].as_u64() < Some(50) {
            std::thread::sleep(Duration::from_millis(1));
        }
        limit(&mut control, Some(json!({})));
        driver.drain();
        assert_eq!(driver.answered, 100);
        disk.stop();
        driver.check(&room.read("a"));
    }
}

#[test]
fn a_pause_does_not_wait_for_requests_that_a_limit_holds_back() {
    let room = Room::new();
    let (disk, mut control, driver) = waiting_machine(&room, true);
    control.done(&json!({ "verb": "pause" }));
    assert!(limit(&mut control, None)["waiting"].as_u64() > Some(0), "it has waited for the limit");
    let ended = |control: &mut Control| control.done(&json!({ "verb": "stats" }))["writes"]["count"].clone();
    let before = ended(&mut control);
    // Requests that the limit releases meanwhile wait for the end of the pause.
    limit(&mut control, Some(json!({})));
    while limit(&mut control, None)["waiting"] != 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ended(&mut control), before);
    control.done(&json!({ "verb": "resume" }));
    unlimit_and_check(&room, (disk, control), driver);
}

#[test]
fn a_disk_with_limits_sleeps_while_nothing_waits() {
    let room = Room::new();
    let (disk, mut control) = serve(&room, "--nbd nbd.sock --limit iops=100,burst=10ms");
    let mut nbd = connect(&room);
    send_writes(&mut nbd, 20, BLOCK);
    take_answers(&mut nbd, 20);
    let slept = |control: &mut Control| control.done(&json!({ "verb": "stats" }))["sleeps"].as_u64().unwrap();
    let before = slept(&mut control);
    std::thread::sleep(Duration::from_millis(300));
    let after = slept(&mut control);
    // Only the client of the control socket wakes it.
    assert!(after - before <= 4, "{} sleeps", after - before);
    assert_eq!(disk.stop().0, Some(0));
}
