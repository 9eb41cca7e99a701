//! A disk whose storage becomes full, on a small and really full file system: the guest gets an error, or waits until
//! there is space again.

use std::fs;
use std::io;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::ring::{Driver, Kind};

use crate::tool;
use crate::tool::control::Control;
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;
use crate::tool::small::{MIB, PIECES, Small, piece};

const FORMATS: [&str; 3] = ["raw", "vhd", "qcow2"];

/// Returns an offset within a block: each piece covers parts of two blocks, and whole ones.
fn at(n: usize) -> u64 {
    tool::small::at(n) + 300
}

fn serve(small: &Small, format: &str, words: &str) -> (Disk, Control) {
    small.room.done(&format!("image create {format}:small/a --size 64M"));
    small.serve(&format!("{format}:small/a --nbd nbd.sock {words}"))
}

/// Serves a raw image to a virtual machine.
fn serve_machine(small: &Small) -> (Disk, Control) {
    small.serve("raw:small/a --vhost-user vm.sock --when-full wait")
}

/// Starts a guest that writes until everything is written or a write fails; its progress is sent to the channel.
fn writer(small: &Small) -> (JoinHandle<io::Result<()>>, mpsc::Receiver<usize>) {
    let mut nbd = small.nbd();
    let (tell, told) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        for n in 0..PIECES {
            nbd.write(at(n), &piece(n))?;
            tell.send(n).ok();
        }
        nbd.flush()
    });
    (writer, told)
}

/// Returns whether the process has a timer that will fire.
fn has_timer(disk: &Disk) -> bool {
    let infos = fs::read_dir(format!("/proc/{}/fdinfo", disk.child.id())).unwrap();
    let armed = |info: String| info.contains("it_value:") && !info.contains("it_value: (0, 0)");
    infos.filter_map(|info| fs::read_to_string(info.unwrap().path()).ok()).any(armed)
}

/// Waits until the process has a timer that will fire, or has none. A timer that has just fired is not set for a
/// moment, and an idle disk has one for ten seconds if it has memory to release.
fn wait_for_timer(disk: &Disk, expected: bool) {
    let begun = Instant::now();
    while has_timer(disk) != expected {
        assert!(begun.elapsed() < Duration::from_secs(60), "a disk has a timer: {}, not {expected}", !expected);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the next event.
fn event(control: &mut Control) -> Value {
    let line = control.next_line().expect("the disk has ended");
    assert_eq!(line["id"], 7, "{line}");
    line["event"]["state"].clone()
}

/// Connects a second client, which has requested notifications.
fn watcher(small: &Small) -> Control {
    let mut watcher = small.control();
    let told = watcher.done(&json!({ "verb": "watch", "id": 7 }));
    assert_eq!((&told["full"], &told["waiting"], &told["broken"]), (&json!(false), &json!(0), &json!(false)));
    watcher
}

#[test]
fn a_guest_waits_for_space_and_continues() {
    for format in FORMATS {
        let Some(small) = Small::with_ballast() else { return };
        let (disk, mut control) = serve(&small, format, "--when-full wait");
        let mut watcher = watcher(&small);
        assert!(!has_timer(&disk));
        let (writer, told) = writer(&small);
        assert_eq!(event(&mut watcher), "full");
        let layers = control.done(&json!({ "verb": "layers" }));
        assert!(layers["full"] == true && layers["waiting"].as_u64() > Some(0), "{layers}");
        let stats = control.done(&json!({ "verb": "stats" }));
        assert!(stats["full"] == true && stats["waiting"].as_u64() > Some(0), "{stats}");
        wait_for_timer(&disk, true);
        // Reads continue, also of the most recent writes.
        let written = told.try_iter().last().unwrap();
        let mut reader = small.nbd();
        assert!(reader.read(at(written), MIB).unwrap() == piece(written));
        // It has no effect: there is no more space than before.
        control.done(&json!({ "verb": "space" }));
        assert!(reader.read(at(0), MIB).unwrap() == piece(0));
        assert_eq!(control.done(&json!({ "verb": "layers" }))["full"], true);
        small.make_space();
        control.done(&json!({ "verb": "space" }));
        assert_eq!(event(&mut watcher), "resumed");
        writer.join().unwrap().unwrap();
        for n in 0..PIECES {
            assert!(reader.read(at(n), MIB).unwrap() == piece(n), "{format}: piece {n}");
        }
        let layers = control.done(&json!({ "verb": "layers" }));
        assert_eq!((&layers["full"], &layers["waiting"]), (&json!(false), &json!(0)));
        wait_for_timer(&disk, false);
        drop(reader);
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("writes wait") && said.contains("no more requests are waiting"), "{said}");
        small.room.sound(&format!("{format}:small/a"));
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn space_is_noticed_without_notification() {
    let Some(small) = Small::with_ballast() else { return };
    let (disk, mut control) = serve(&small, "qcow2", "--when-full wait");
    let mut watcher = watcher(&small);
    let (writer, _) = writer(&small);
    assert_eq!(event(&mut watcher), "full");
    assert_ne!(control.done(&json!({ "verb": "space" }))["waiting"], 0);
    small.make_space();
    assert_eq!(event(&mut watcher), "resumed");
    writer.join().unwrap().unwrap();
    assert_eq!(control.done(&json!({ "verb": "space" }))["waiting"], 0);
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn waiting_requests_fail_for_lack_of_space_when_the_disk_stops() {
    for format in FORMATS {
        let Some(small) = Small::with_ballast() else { return };
        let (disk, _control) = serve(&small, format, "--when-full wait");
        let mut watcher = watcher(&small);
        let (writer, _) = writer(&small);
        assert_eq!(event(&mut watcher), "full");
        let (code, said) = disk.stop();
        assert_eq!(writer.join().unwrap().unwrap_err().kind(), io::ErrorKind::StorageFull, "{said}");
        // Completed writes are flushed, or the exit code reports that they are not.
        assert!(code == Some(0) || said.contains("no space is left on the image's storage"), "{code:?}: {said}");
        assert!(said.contains("stopping"), "{said}");
        assert_ne!(small.room.tapline(&format!("image check {format}:small/a")).code, Some(2), "{format}");
    }
}

#[test]
fn no_request_waits_for_a_disconnected_client() {
    let Some(small) = Small::with_ballast() else { return };
    let (disk, mut control) = serve(&small, "vhd", "--when-full wait");
    let mut watcher = watcher(&small);
    let path = small.room.file("nbd.sock");
    let mut writer = std::process::Command::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 1 0 32M", &format!("nbd+unix:///?socket={}", path.display())])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(event(&mut watcher), "full");
    writer.kill().unwrap();
    writer.wait().unwrap();
    assert_eq!(event(&mut watcher), "resumed");
    let layers = control.done(&json!({ "verb": "layers" }));
    assert_eq!((&layers["full"], &layers["waiting"]), (&json!(false), &json!(0)));
    wait_for_timer(&disk, false);
    small.make_space();
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn without_waiting_a_guest_gets_an_error_at_once() {
    let Some(small) = Small::with_ballast() else { return };
    let (disk, mut control) = serve(&small, "raw", "");
    let (writer, _) = writer(&small);
    assert_eq!(writer.join().unwrap().unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(control.done(&json!({ "verb": "layers" }))["full"], false);
    small.make_space();
    assert_eq!(disk.stop().0, Some(0));
}

/// This needs no space on the disk's file system: the guest writes to another one afterwards.
#[test]
fn a_snapshot_to_another_file_system_unblocks_a_full_disk() {
    let Some(small) = Small::with_ballast() else { return };
    let (disk, mut control) = serve(&small, "raw", "--when-full wait");
    let mut watcher = watcher(&small);
    let (writer, _) = writer(&small);
    assert_eq!(event(&mut watcher), "full");
    let to = format!("qcow2:{}", small.room.file("elsewhere").display());
    control.done(&json!({ "verb": "snapshot", "to": to, "method": "chain" }));
    control.done(&json!({ "verb": "space" }));
    assert_eq!(event(&mut watcher), "resumed");
    writer.join().unwrap().unwrap();
    let mut reader = small.nbd();
    assert!((0..PIECES).all(|n| reader.read(at(n), MIB).unwrap() == piece(n)));
    drop(reader);
    assert_eq!(disk.stop().0, Some(0));
}

/// Returns a machine that has written four blocks, and whose next writes wait for space; a read is completed in the
/// meantime.
fn waiting_machine(small: &Small, recorded: bool) -> (Disk, Control, Driver) {
    small.room.done("image create raw:small/a --size 16M");
    let (disk, control) = serve_machine(small);
    let mut watcher = watcher(small);
    let mut driver = Driver::connect(&small.room.file("vm.sock"), recorded);
    (0..4).for_each(|block| driver.offer(Kind::Write, block));
    driver.drain();
    small.fill();
    (100..104).for_each(|block| driver.offer(Kind::Write, block));
    assert_eq!(event(&mut watcher), "full");
    if recorded {
        driver.offer(Kind::Read, 1);
        let unanswered = driver.unanswered();
        while driver.unanswered() == unanswered {
            driver.interrupt(std::time::Duration::from_secs(1));
        }
    }
    (disk, control, driver)
}

/// QEMU's main loop waits for this reply when a guest resets, stops or loses the device.
#[test]
fn a_queue_of_a_full_disk_stops_at_once_and_resumes_later() {
    for recorded in [true, false] {
        let Some(small) = Small::with_ballast() else { return };
        let (disk, mut control, mut driver) = waiting_machine(&small, recorded);
        let layers = control.done(&json!({ "verb": "layers" }));
        assert_eq!(layers["inflight"], if recorded { "recorded" } else { "in order" });
        let base = driver.stop_ring();
        assert_eq!(base, if recorded { 9 } else { 4 }, "with a record they count as taken");
        assert_eq!(driver.unanswered(), 4);
        let layers = control.done(&json!({ "verb": "layers" }));
        assert_eq!((&layers["full"], &layers["waiting"]), (&json!(false), &json!(0)), "nothing of it is left here");
        // Again, with writes that are resubmitted and wait again.
        driver.start_ring(base);
        assert_eq!(driver.stop_ring(), base);
        small.make_space();
        driver.start_ring(base);
        driver.drain();
        assert_eq!(disk.stop().0, Some(0));
        driver.check(&small.room.read("small/a"));
    }
}

#[test]
fn waiting_requests_stay_with_the_guest_when_the_process_exits() {
    for recorded in [true, false] {
        let Some(small) = Small::with_ballast() else { return };
        let (disk, _control, mut driver) = waiting_machine(&small, recorded);
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("4 waiting requests stay with their guest"), "{said}");
        driver.interrupt(std::time::Duration::ZERO);
        assert_eq!(driver.unanswered(), 4, "no error of ours");
        small.make_space();
        let (disk, _control) = serve_machine(&small);
        driver.connect_again();
        driver.drain();
        assert_eq!(disk.stop().0, Some(0));
        driver.check(&small.room.read("small/a"));
    }
}

/// Waiting requests prevent neither an upgrade nor continuing after a failed upgrade.
#[test]
fn waiting_requests_wait_on_in_the_replacement_process() {
    for recorded in [true, false] {
        let Some(small) = Small::with_ballast() else { return };
        let (disk, control, mut driver) = waiting_machine(&small, recorded);
        drop(control);
        let mut disk = Replaced::of(&small.room, disk);
        let answer = disk.upgrade_to("/bin/false").join().unwrap();
        assert_eq!(answer["error"]["kind"], "failed", "{answer}");
        let answer = disk.upgrade().join().unwrap();
        disk.replaced_by(&answer);
        let mut control = small.control();
        while control.done(&json!({ "verb": "layers" }))["waiting"] != 4 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(control.done(&json!({ "verb": "stats" }))["writes"]["in_flight"], 4);
        small.make_space();
        control.done(&json!({ "verb": "space" }));
        driver.drain();
        disk.stop();
        driver.check(&small.room.read("small/a"));
    }
}

/// A disconnected guest needs nothing any more, and its successor must not see its writes.
#[test]
fn a_disconnected_machine_leaves_no_waiting_request() {
    let Some(small) = Small::with_ballast() else { return };
    let (disk, mut control, driver) = waiting_machine(&small, false);
    driver.leave();
    let mut next = Driver::connect(&small.room.file("vm.sock"), true);
    next.offer(Kind::Read, 100);
    next.drain();
    assert_eq!(control.done(&json!({ "verb": "layers" }))["waiting"], 0);
    small.make_space();
    next.offer(Kind::Write, 101);
    next.drain();
    assert_eq!(disk.stop().0, Some(0));
    next.check(&small.room.read("small/a"));
}

/// Bytes are free, inodes are not.
#[test]
fn a_file_system_without_inodes_is_full_and_the_advice_says_of_what() {
    let Some(small) = Small::new(c"size=48m,nr_inodes=6") else { return };
    small.room.done("image create qcow2:small/a --size 1M");
    let taken = (0..10).take_while(|n| std::fs::File::create_new(small.room.file(&format!("small/{n}"))).is_ok());
    assert!(taken.count() < 10, "there are inodes");
    let said = small.room.tapline("image convert qcow2:small/a raw:small/b");
    assert!(said.code == Some(4) && said.err.contains("no inodes are free on the file system of small"), "{said:?}");
    let (disk, mut control) = small.serve("qcow2:small/a --nbd nbd.sock");
    let snapshot =
        serde_json::json!({ "verb": "snapshot", "to": format!("qcow2:{}", small.room.file("small/b").display()) });
    let line = control.ask(&snapshot);
    assert_eq!(line["error"]["kind"], "no-space", "{line}");
    disk.stop();
}
