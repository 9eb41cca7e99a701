//! The control socket of a served disk: every verb while a guest works, hostile clients, and a process that is killed
//! at any point.

use std::sync::mpsc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::guest::Guest;
use crate::tool::nbd::{BLOCK, Nbd, Versions};
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;

const FORMATS: [&str; 2] = ["vhd", "qcow2"];
const MIB: u64 = 1 << 20;

/// The number of blocks that a guest writes, at times a bit more than a merge's chunk apart.
const BLOCKS: usize = 96;
const STRIDE: u64 = MIB / 2 + 4096;

/// Serves an empty disk of 64 MiB.
fn serve(room: &Room, format: &str) -> Disk {
    room.done(&format!("image create {format}:a --size 64M"));
    Disk::serve(room, &format!("{format}:a --nbd nbd.sock --control control.sock"))
}

fn control(room: &Room) -> Control {
    Control::connect(&room.file("control.sock"))
}

fn nbd(room: &Room) -> Nbd {
    Nbd::connect(&room.file("nbd.sock")).unwrap()
}

fn name(room: &Room, format: &str, file: &str) -> String {
    format!("{format}:{}", room.file(file).display())
}

fn snapshot(room: &Room, format: &str, file: &str) -> Value {
    json!({ "verb": "snapshot", "to": name(room, format, file) })
}

/// Starts a guest that works on the disk over NBD.
fn guest(room: &Room, versions: Versions, seed: u64) -> Guest {
    let path = room.file("nbd.sock");
    Guest::start(move || Nbd::connect(&path).unwrap(), versions, Rng::with_seed(seed))
}

#[test]
fn a_snapshot_under_load_loses_nothing_and_reports_the_pause() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 1);
        guest.work(200);
        let told = control(&room).done(&snapshot(&room, format, "b"));
        guest.work(200);
        let mut versions = guest.stop();
        versions.check(&mut nbd(&room));
        assert_eq!(told["method"], "chain");
        assert!(told["pause_us"].is_u64() && told["held_us"].is_u64(), "{told}");
        let layers = control(&room).done(&json!({ "verb": "layers" }))["layers"].clone();
        assert_eq!(layers.as_array().unwrap().len(), 2);
        assert_eq!((&layers[0]["writable"], &layers[1]["writable"]), (&json!(true), &json!(false)));
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        for words in [format!("{format}:b --parent {format}:a"), format!("{format}:a")] {
            room.sound(&words);
        }
        let _disk = Disk::serve(&room, &format!("{format}:b --parent {format}:a --nbd nbd.sock"));
        versions.check(&mut nbd(&room));
    }
}

#[test]
fn the_old_leaf_stays_as_it_was_at_the_snapshot() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let mut guest = nbd(&room);
        guest.write(0, &[1; BLOCK]).unwrap();
        control(&room).done(&snapshot(&room, format, "b"));
        guest.write(0, &[2; BLOCK]).unwrap();
        assert_eq!(guest.read(0, BLOCK).unwrap(), [2; BLOCK]);
        assert_eq!(disk.stop().0, Some(0));
        room.done(&format!("image convert {format}:a raw:old"));
        assert_eq!(room.read("old")[..BLOCK], [1; BLOCK]);
    }
}

#[test]
fn a_merge_of_the_live_leaf_under_load_loses_nothing() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 2);
        guest.work(200);
        let mut control = control(&room);
        control.done(&snapshot(&room, format, "b"));
        guest.work(200);
        let merge = json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true });
        let told = control.done(&merge);
        guest.work(200);
        let mut versions = guest.stop();
        versions.check(&mut nbd(&room));
        assert_eq!((&told["state"], &told["unused"]), (&json!("done"), &json!([name(&room, format, "b")])));
        assert!(!room.file("b").exists());
        assert_eq!(control.done(&json!({ "verb": "merge-status" })), told);
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        room.sound(&format!("{format}:a"));
        let _disk = Disk::serve(&room, &format!("{format}:a --nbd nbd.sock"));
        versions.check(&mut nbd(&room));
    }
}

/// Clusters of 512 bytes to 32 KiB, which other programs create and we do not.
#[test]
fn a_disk_of_small_clusters_is_snapshotted_under_load_and_merged_into() {
    for cluster in [512, 4096, 32768] {
        let room = Room::new();
        room.tool("qemu-img", &format!("create -q -f qcow2 -o cluster_size={cluster} a 64M"));
        let disk = serve_chain(&room, "qcow2", &["a"]);
        let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 7);
        guest.work(100);
        let mut control = control(&room);
        control.done(&snapshot(&room, "qcow2", "b"));
        guest.work(100);
        control.done(&snapshot(&room, "qcow2", "c"));
        guest.work(100);
        control.done(&json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "delete": true }));
        control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true }));
        guest.work(100);
        let mut versions = guest.stop();
        versions.check(&mut nbd(&room));
        assert_eq!(disk.stop().0, Some(0));
        room.tool("qemu-img", "check -U -f qcow2 a");
        room.done("image create qcow2:d --parent qcow2:a");
        let _disk = serve_chain(&room, "qcow2", &["d", "a"]);
        versions.check(&mut nbd(&room));
    }
}

#[test]
fn a_merge_below_the_leaf_links_the_layer_above_to_the_target() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 3);
        let mut control = control(&room);
        for file in ["b", "c"] {
            guest.work(100);
            control.done(&snapshot(&room, format, file));
        }
        guest.work(100);
        control.done(&json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "delete": true }));
        let mut versions = guest.stop();
        versions.check(&mut nbd(&room));
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        let _disk = Disk::serve(&room, &format!("{format}:c --parent {format}:a --nbd nbd.sock"));
        versions.check(&mut nbd(&room));
    }
}

#[test]
fn a_merge_is_paused_resumed_and_cancelled() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut versions = Versions::new(BLOCKS, STRIDE);
    let (mut guest, mut random) = (nbd(&room), Rng::with_seed(4));
    let mut control = control(&room);
    control.done(&snapshot(&room, "vhd", "b"));
    (0..300).for_each(|_| versions.step(&mut guest, &mut random).unwrap());
    let begun = control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "rate": 65536 }));
    assert_eq!(begun["len"], 64 * MIB);
    assert_eq!(control.done(&json!({ "verb": "merge-pause" }))["state"], "paused");
    assert_eq!(control.refused(&snapshot(&room, "vhd", "c")).0, "busy");
    assert_eq!(control.done(&json!({ "verb": "merge-resume" }))["state"], "running");
    control.done(&json!({ "verb": "pause" }));
    control.done(&json!({ "verb": "resume" }));
    control.done(&json!({ "verb": "merge-cancel" }));
    let ended = loop {
        let status = control.done(&json!({ "verb": "merge-status" }));
        if status.get("error").is_some() {
            break status;
        }
        versions.step(&mut guest, &mut random).unwrap();
    };
    assert_eq!((&ended["state"], &ended["error"]["kind"]), (&json!("cancelled"), &json!("cancelled")));
    assert!(ended["done"].as_u64() < Some(64 * MIB), "{ended}");
    assert_eq!(control.done(&json!({ "verb": "merge-status" }))["state"], "cancelled");
    assert_eq!(control.refused(&json!({ "verb": "merge-cancel" })).0, "state");
    versions.check(&mut guest);
    // A repeated request continues where it stopped.
    control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
    versions.check(&mut guest);
    assert_eq!(disk.stop().0, Some(0));
    room.sound("vhd:a");
}

#[test]
fn a_parent_shared_by_two_disks_is_not_a_merge_target() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let mut one = nbd(&room);
        one.write(0, &[1; BLOCK]).unwrap();
        let mut control = control(&room);
        let clone = |of: usize| json!({ "verb": "clone", "of": of, "to": name(&room, format, "c") });
        assert_eq!(control.refused(&clone(0)).0, "state");
        control.done(&snapshot(&room, format, "b"));
        let told = control.done(&clone(1));
        assert!(told["work_us"].is_u64() && told["sync_us"].is_u64(), "{told}");
        let other = Disk::serve(&room, &format!("{format}:c --parent {format}:a --nbd other.sock"));
        let mut two = Nbd::connect(&room.file("other.sock")).unwrap();
        one.write(0, &[2; BLOCK]).unwrap();
        two.write(4096, &[3; BLOCK]).unwrap();
        assert_eq!(two.read(0, BLOCK).unwrap(), [1; BLOCK]);
        assert_eq!(one.read(4096, BLOCK).unwrap(), [0; BLOCK]);
        let (kind, why) = control.refused(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
        assert_eq!(kind, "in-use");
        assert!(why.contains("layer 1") && why.contains(&name(&room, format, "a")), "{why}");
        one.write(8192, &[4; BLOCK]).unwrap();
        assert_eq!((other.stop().0, disk.stop().0), (Some(0), Some(0)));
    }
}

#[test]
fn a_disk_is_reverted_only_without_clients() {
    for format in FORMATS {
        let room = Room::new();
        let disk = serve(&room, format);
        let mut guest = nbd(&room);
        guest.write(0, &[1; BLOCK]).unwrap();
        let mut control = control(&room);
        control.done(&snapshot(&room, format, "b"));
        guest.write(0, &[2; BLOCK]).unwrap();
        let revert = json!({ "verb": "revert", "to": 1, "leaf": name(&room, format, "c") });
        let (kind, why) = control.refused(&revert);
        assert_eq!(kind, "connected", "{why}");
        assert!(!room.file("c").exists());
        drop(guest);
        let told = loop {
            let line = control.ask(&revert);
            if line["error"]["kind"] != "connected" {
                break line["ok"].clone();
            }
        };
        assert_eq!(told["unused"], json!([name(&room, format, "b")]));
        assert_eq!(nbd(&room).read(0, BLOCK).unwrap(), [1; BLOCK]);
        assert_eq!(disk.stop().0, Some(0));
        room.sound(&format!("{format}:c --parent {format}:a"));
    }
}

#[test]
fn a_larger_disk_is_seen_by_the_next_client_and_stays_so() {
    for format in ["raw", "vhd", "qcow2"] {
        let room = Room::new();
        let disk = serve(&room, format);
        let mut before = nbd(&room);
        let mut control = control(&room);
        let resize = |size: u64| json!({ "verb": "resize", "size": size });
        for size in [MIB, 64 * MIB + 1, u64::MAX] {
            assert_eq!(control.refused(&resize(size)).0, "unsupported", "{size}");
        }
        assert_eq!(control.done(&resize(96 * MIB))["size"], 96 * MIB);
        before.write(0, &[1; BLOCK]).unwrap();
        let mut after = nbd(&room);
        assert_eq!((before.size, after.size), (64 * MIB, 96 * MIB));
        after.write(96 * MIB - 4096, &[2; BLOCK]).unwrap();
        assert_eq!(disk.stop().0, Some(0));
        let _disk = Disk::serve(&room, &format!("{format}:a --nbd nbd.sock"));
        let mut again = nbd(&room);
        assert_eq!(again.size, 96 * MIB);
        assert_eq!(again.read(96 * MIB - 4096, BLOCK).unwrap(), [2; BLOCK]);
    }
}

/// A daemon has died while its disk held requests, and the next daemon has found that the disk did not grow.
#[test]
fn requests_of_a_client_that_disconnected_early_are_not_begun() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut before = control(&room);
    before.done(&json!({ "verb": "version" }));
    disk.signal(Signal::STOP);
    before.send(&json!({ "verb": "resize", "size": 96 * MIB }));
    drop(before);
    let mut after = control(&room);
    after.send(&json!({ "verb": "layers" }));
    disk.signal(Signal::CONT);
    assert_eq!(after.outcome()["ok"]["size"], 64 * MIB);
    // During a resize this is refused as busy.
    while after.refused(&json!({ "verb": "resize", "size": 1 })).0 == "busy" {}
    assert_eq!(after.done(&json!({ "verb": "layers" }))["size"], 64 * MIB);
    assert_eq!(disk.stop().0, Some(0));
}

/// The layers in between all have one size at any moment, or the second attempt would be refused.
#[test]
fn a_cancelled_merge_into_smaller_layers_continues_after_a_restart() {
    for (above, base) in [("vhd", "raw"), ("qcow2", "raw"), ("qcow2", "vhd"), ("vhd", "qcow2")] {
        let room = Room::new();
        let disk = serve(&room, base);
        let mut control = control(&room);
        control.done(&json!({ "verb": "snapshot", "to": name(&room, above, "b"), "method": "chain" }));
        control.done(&json!({ "verb": "snapshot", "to": name(&room, above, "c") }));
        control.done(&json!({ "verb": "resize", "size": 96 * MIB }));
        let mut guest = nbd(&room);
        guest.write(96 * MIB - 4096, &[7; BLOCK]).unwrap();
        // The last chunk does not matter: after this one, at this rate, it does not begin within 16 s.
        guest.write(0, &[6; 65_536]).unwrap();
        let merge = json!({ "verb": "merge", "from": 0, "into": 2, "rate": 4096 });
        control.done(&merge);
        control.done(&json!({ "verb": "merge-cancel" }));
        assert_eq!(disk.stop().0, Some(0));
        let _disk = Disk::serve(
            &room,
            &format!("{above}:c --parent {above}:b --parent {base}:a --nbd nbd.sock --control control.sock"),
        );
        let mut control = self::control(&room);
        control.done(&json!({ "verb": "merge", "from": 0, "into": 2, "follow": true }));
        assert_eq!(nbd(&room).read(96 * MIB - 4096, BLOCK).unwrap(), [7; BLOCK]);
        assert_eq!(control.done(&json!({ "verb": "layers" }))["size"], 96 * MIB);
    }
}

/// Serves a disk whose layers are named by their initial numbers; each is created while a guest works.
fn serve_layers(room: &Room, format: &str, files: &[&str]) -> (Disk, Versions) {
    let (first, rest) = files.split_last().unwrap();
    room.done(&format!("image create {format}:{first} --size 64M"));
    let disk = Disk::serve(room, &format!("{format}:{first} --nbd nbd.sock --control control.sock"));
    let guest = guest(room, Versions::new(BLOCKS, STRIDE), 6);
    for file in rest.iter().rev() {
        guest.work(60);
        control(room).done(&snapshot(room, format, file));
    }
    guest.work(60);
    (disk, guest.stop())
}

fn serve_chain(room: &Room, format: &str, files: &[&str]) -> Disk {
    Disk::serve(room, &format!("{} --nbd nbd.sock --control control.sock", chain(format, files)))
}

fn chain(format: &str, files: &[&str]) -> String {
    let parents = files[1..].iter().map(|file| format!(" --parent {format}:{file}"));
    format!("{format}:{}{}", files[0], parents.collect::<String>())
}

fn names(room: &Room, format: &str, files: &[&str]) -> Vec<String> {
    files.iter().map(|file| name(room, format, file)).collect()
}

#[test]
fn a_merge_killed_at_its_end_is_recognized_as_done_on_retry() {
    for format in FORMATS {
        let room = Room::new();
        let (disk, mut versions) = serve_layers(&room, format, &["3", "2", "1", "0"]);
        let (all, left) = (names(&room, format, &["3", "2", "1", "0"]), names(&room, format, &["3", "1", "0"]));
        let merge = json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "expect": all });
        // Without delete, it ends in the state in which a kill would leave it before the deletion.
        control(&room).done(&merge);
        disk.signal(Signal::KILL);
        drop(disk);
        let refused = room.tapline(&format!("serve {} --nbd nbd.sock", chain(format, &["3", "2", "1", "0"])));
        assert!(refused.code == Some(4) && refused.err.contains("its recorded parent is '1'"), "{refused:?}");
        let disk = serve_chain(&room, format, &["3", "1", "0"]);
        let mut control = control(&room);
        let told = control.done(&merge);
        assert_eq!((&told["state"], &told["copied"], &told["deleted"]), (&json!("done"), &json!(0), &json!(false)));
        assert_eq!((&told["layers"], room.file("2").exists()), (&json!(left), true));
        let delete = json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "delete": true, "expect": all });
        for _ in 0..2 {
            assert_eq!(control.done(&delete)["deleted"], true);
            assert!(!room.file("2").exists());
        }
        assert_eq!(control.done(&json!({ "verb": "merge-status" }))["state"], "done");
        // The same numbers refer to other layers now.
        let other = json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "expect": all });
        let (kind, why) = control.refused(&other);
        assert!(kind == "state" && why.contains(&left.join(", ")), "{kind}: {why}");
        versions.check(&mut nbd(&room));
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn a_merged_leaf_left_by_a_kill_is_removed_on_retry() {
    for format in FORMATS {
        let room = Room::new();
        let (disk, mut versions) = serve_layers(&room, format, &["1", "0"]);
        let merge = |delete: bool| {
            let expect = names(&room, format, &["1", "0"]);
            json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": delete, "expect": expect })
        };
        control(&room).done(&merge(false));
        disk.signal(Signal::KILL);
        drop(disk);
        let disk = serve_chain(&room, format, &["0"]);
        let mut control = control(&room);
        for _ in 0..2 {
            assert_eq!(control.done(&merge(true))["layers"], json!(names(&room, format, &["0"])));
            assert!(!room.file("1").exists());
        }
        let (kind, why) = control.refused(&merge(false));
        assert!(kind == "state" && why.contains("it is unknown whether it was merged"), "{kind}: {why}");
        versions.check(&mut nbd(&room));
        assert_eq!(disk.stop().0, Some(0));
    }
}

#[test]
fn a_file_not_left_by_a_merge_is_not_removed() {
    for format in FORMATS {
        let room = Room::new();
        let (disk, _) = serve_layers(&room, format, &["2", "1", "0"]);
        let expect = names(&room, format, &["2", "1", "0"]);
        let merge = json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "delete": true, "expect": expect });
        let mut control = control(&room);
        control.done(&merge);
        // First an unused disk that was never written to, then one in use.
        control.done(&json!({ "verb": "clone", "of": 1, "to": name(&room, format, "1") }));
        let (kind, why) = control.refused(&merge);
        assert!(kind == "state" && why.contains("records its parent's time or size"), "{kind}: {why}");
        let other = Disk::serve(&room, &format!("{} --nbd other.sock", chain(format, &["1", "0"])));
        Nbd::connect(&room.file("other.sock")).unwrap().write(0, &[9; BLOCK]).unwrap();
        let (kind, why) = control.refused(&merge);
        assert!(kind == "state" && why.contains("in use"), "{kind}: {why}");
        assert_eq!((other.stop().0, disk.stop().0), (Some(0), Some(0)));
        assert!(room.file("1").exists());
    }
}

/// As after a crash of the host's daemon, which only knows its own requests: it serves the chain that it knows, or that
/// chain without the layer named in the refusal, and repeats the request.
#[test]
fn a_merge_below_the_leaf_killed_at_any_moment_completes_on_retry() {
    for format in FORMATS {
        let mut random = Rng::with_seed(7);
        for _ in 0..6 {
            let room = Room::new();
            let (disk, mut versions) = serve_layers(&room, format, &["2", "1", "0"]);
            let expect = names(&room, format, &["2", "1", "0"]);
            let merge =
                json!({ "verb": "merge", "from": 1, "into": 2, "follow": true, "delete": true, "expect": expect });
            let mut control = control(&room);
            control.send(&merge);
            std::thread::sleep(Duration::from_micros(random.u64(..80_000)));
            disk.signal(Signal::KILL);
            drop(disk);
            let whole = room.tapline(&format!("image map {}", chain(format, &["2", "1", "0"]))).code == Some(0);
            let files: &[&str] = if whole { &["2", "1", "0"] } else { &["2", "0"] };
            let disk = serve_chain(&room, format, files);
            let told = self::control(&room).done(&merge);
            assert_eq!((&told["deleted"], &told["layers"]), (&json!(true), &json!(names(&room, format, &["2", "0"]))));
            versions.check(&mut nbd(&room));
            assert_eq!(disk.stop().0, Some(0));
            assert!(!room.file("1").exists());
            room.sound(&chain(format, &["2", "0"]));
        }
    }
}

#[test]
fn a_merge_does_not_remove_a_file_that_replaced_a_layer() {
    let room = Room::new();
    let disk = serve(&room, "qcow2");
    let mut control = control(&room);
    control.done(&snapshot(&room, "qcow2", "b"));
    std::fs::rename(room.file("b"), room.file("moved")).unwrap();
    room.write("b", b"precious");
    let told = control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true }));
    assert_eq!(told["deleted"], false, "{told}");
    assert_eq!(room.read("b"), b"precious");
    let (code, said) = disk.stop();
    assert!(code == Some(0) && said.contains("another file now has its name"), "{said}");
}

#[test]
fn a_paused_disk_holds_requests_until_it_is_resumed() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut control = control(&room);
    control.done(&json!({ "verb": "pause" }));
    let path = room.file("nbd.sock");
    let (sent, answered) = mpsc::channel();
    let writer = std::thread::spawn(move || {
        let mut nbd = Nbd::connect(&path).unwrap();
        nbd.write(0, &[1; BLOCK]).unwrap();
        sent.send(()).unwrap();
    });
    while control.done(&json!({ "verb": "stats" }))["writes"]["in_flight"] != 1 {}
    assert!(answered.try_recv().is_err());
    // A snapshot of several disks at one moment: each is paused, then each is taken.
    control.done(&snapshot(&room, "vhd", "b"));
    assert!(answered.try_recv().is_err());
    let told = control.done(&json!({ "verb": "resume" }));
    writer.join().unwrap();
    assert!(told["pause_us"].as_u64().unwrap() > 0, "{told}");
    control.done(&json!({ "verb": "pause" }));
    assert_eq!(disk.stop().0, Some(0), "a paused disk can be stopped");
}

/// A file system of 400 MiB that can share blocks, on a loop device; unmounted with its test.
struct Mounted(std::path::PathBuf);

impl Mounted {
    fn xfs(room: &Room) -> Mounted {
        std::fs::File::create(room.file("storage")).unwrap().set_len(400 * MIB).unwrap();
        room.tool("mkfs.xfs", "-q -m reflink=1 storage");
        let at = room.file("mounted");
        std::fs::create_dir(&at).unwrap();
        room.tool("mount", "-o loop storage mounted");
        Mounted(at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

#[test]
fn a_raw_disk_is_copied_by_reflink_where_the_file_system_can() {
    let room = Room::new();
    let _mounted = Mounted::xfs(&room);
    room.done("image create raw:mounted/a --size 64M");
    let disk = Disk::serve(&room, "raw:mounted/a --nbd nbd.sock --control control.sock");
    let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 5);
    guest.work(100);
    let mut control = control(&room);
    let told = control.done(&snapshot(&room, "raw", "mounted/b"));
    assert_eq!((&told["method"], &told["layers"]), (&json!("reflink"), &json!([name(&room, "raw", "mounted/a")])));
    assert!(told["pause_us"].is_u64(), "{told}");
    let copy = room.read("mounted/b");
    guest.work(100);
    let mut versions = guest.stop();
    versions.check(&mut nbd(&room));
    assert!(room.read("mounted/b") == copy, "the copy changes with the disk");
    // On another file system there is no reflink, and a chain has no raw leaf.
    let (kind, why) = control.refused(&snapshot(&room, "raw", "elsewhere"));
    assert_eq!(kind, "unsupported", "{why}");
    assert!(!room.file("elsewhere").exists());
    assert_eq!(control.done(&snapshot(&room, "qcow2", "mounted/c"))["method"], "chain");
    assert_eq!(disk.stop().0, Some(0));
    // The file shares blocks now, which changes nothing for the chain on it, or for the sectors of a disk.
    let chain = "qcow2:mounted/c --parent raw:mounted/a --nbd nbd.sock --control control.sock";
    let disk = Disk::serve(&room, chain);
    versions.check(&mut nbd(&room));
    self::control(&room).done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
    versions.check(&mut nbd(&room));
    assert_eq!(disk.stop().0, Some(0));
    room.guest("raw:mounted/b", &["write -P 9 1536 512", "read -P 9 1536 512"]);
}

/// Fills the file system; removing the file frees the space again.
fn fill(file: &std::path::Path) {
    let mut filler = std::fs::File::create(file).unwrap();
    for piece in [MIB, 4096] {
        let bytes = vec![1; usize::try_from(piece).unwrap()];
        while std::io::Write::write_all(&mut filler, &bytes).is_ok() {}
    }
}

#[test]
fn full_storage_is_reported_and_writes_continue_once_there_is_space() {
    for format in FORMATS {
        let room = Room::new();
        let _mounted = Mounted::xfs(&room);
        room.done(&format!("image create {format}:mounted/a --size 64G"));
        let disk = Disk::serve(&room, &format!("{format}:mounted/a --nbd nbd.sock --control control.sock"));
        let (mut guest, mut control) = (nbd(&room), control(&room));
        guest.write(0, &[1; BLOCK]).unwrap();
        guest.flush().unwrap();
        fill(&room.file("mounted/filler"));
        // Each is the first in its part of the table.
        let wrote: Vec<u64> =
            (1..60).map(|part| part << 30).filter(|&at| guest.write(at, &[2; BLOCK]).is_ok()).collect();
        assert!(wrote.len() < 59, "the storage is not full");
        let durable = guest.flush().is_ok();
        if !durable {
            assert_eq!(control.refused(&json!({ "verb": "pause" })).0, "no-space");
        }
        assert_eq!(control.refused(&snapshot(&room, format, "mounted/b")).0, "no-space");
        assert!(!room.file("mounted/b").exists());
        assert_eq!(control.done(&json!({ "verb": "layers" }))["broken"], false);
        std::fs::remove_file(room.file("mounted/filler")).unwrap();
        guest.write(60 << 30, &[3; BLOCK]).unwrap();
        control.done(&snapshot(&room, format, "mounted/b"));
        for &at in &wrote {
            assert_eq!(guest.read(at, BLOCK).unwrap(), [2; BLOCK], "{format} at {at}");
        }
        assert_eq!(guest.read(60 << 30, BLOCK).unwrap(), [3; BLOCK]);
        assert_eq!(guest.read(0, BLOCK).unwrap(), [1; BLOCK]);
        drop(guest);
        assert_eq!(disk.stop().0, Some(0));
        room.sound(&chain(format, &["mounted/b", "mounted/a"]));
        println!("{format}: {} written, durable at once: {durable}", wrote.len());
    }
}

/// The table needs space that is not available, which is noticed at once or in a later step.
#[test]
fn a_disk_without_space_to_grow_continues_unchanged_paused_or_not() {
    for (format, size) in [("vhd", 1 << 40), ("qcow2", 16 << 40)] {
        for paused in [true, false] {
            let room = Room::new();
            let _mounted = Mounted::xfs(&room);
            room.done(&format!("image create {format}:mounted/a --size 64M"));
            let disk = Disk::serve(&room, &format!("{format}:mounted/a --nbd nbd.sock --control control.sock"));
            let (mut guest, mut control) = (nbd(&room), control(&room));
            guest.write(0, &[1; BLOCK]).unwrap();
            guest.flush().unwrap();
            fill(&room.file("mounted/filler"));
            if paused {
                control.done(&json!({ "verb": "pause" }));
            }
            let resize = json!({ "verb": "resize", "size": size });
            let refused = control.ask(&resize)["error"].take();
            assert_eq!(refused["kind"], "no-space", "{format} paused: {paused}");
            assert!(refused["advice"].as_str().unwrap().contains("when it is next started"), "{refused}");
            control.done(&json!({ "verb": "resume" }));
            assert_eq!(guest.read(0, BLOCK).unwrap(), [1; BLOCK]);
            // The reported chain is the served one.
            let told = control.done(&json!({ "verb": "layers" }));
            let served = json!(nbd(&room).size);
            assert_eq!((&told["size"], &told["layers"][0]["size"]), (&served, &served), "{format} paused: {paused}");
            std::fs::remove_file(room.file("mounted/filler")).unwrap();
            assert_eq!(control.done(&resize)["size"], size);
            assert_eq!(control.done(&json!({ "verb": "layers" }))["layers"][0]["size"], size);
            let mut guest = nbd(&room);
            guest.write(size - 4096, &[2; BLOCK]).unwrap();
            assert_eq!(guest.read(size - 4096, BLOCK).unwrap(), [2; BLOCK]);
            drop(guest);
            assert_eq!(disk.stop().0, Some(0));
            room.sound(&format!("{format}:mounted/a"));
        }
    }
}

#[test]
fn a_failed_snapshot_changes_nothing() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut control = control(&room);
    room.write("taken", b"precious");
    assert_eq!(control.refused(&snapshot(&room, "vhd", "taken")).0, "exists");
    assert_eq!(control.refused(&snapshot(&room, "vhd", "missing/b")).0, "failed");
    assert_eq!(
        control.refused(&json!({ "verb": "snapshot", "to": name(&room, "raw", "b"), "method": "chain" })).0,
        "unsupported"
    );
    assert_eq!(room.read("taken"), b"precious");
    let layers = control.done(&json!({ "verb": "layers" }))["layers"].clone();
    assert_eq!(layers.as_array().unwrap().len(), 1);
    assert_eq!(disk.stop().0, Some(0));
    let left = std::fs::read_dir(room.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name != "redo").collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn hostile_clients_neither_stop_the_disk_nor_exhaust_memory() {
    let room = Room::new();
    let disk = serve(&room, "vhd");
    let mut guest = nbd(&room);
    for line in
        ["\n", "{}\n", "[]\n", "\u{0}\n", "{\"version\":1,\"verb\":7}\n", "{\"version\":1,\"verb\":\"explode\"}\n"]
    {
        let mut client = control(&room);
        client.send_raw(line.as_bytes());
        assert!(client.next_line().unwrap().get("error").is_some(), "{line}");
    }
    let mut endless = control(&room);
    (0..40).for_each(|_| endless.send_raw(&[b'x'; 4096]));
    assert_eq!(endless.next_line().unwrap()["error"]["kind"], "malformed");
    assert_eq!(endless.next_line(), None);
    // A client that keeps sending requests and never reads.
    let mut deaf = control(&room);
    deaf.send_raw(b"{\"version\":1,\"verb\":\"layers\"}\n".repeat(200).as_slice());
    // More idle connections than allowed.
    let mut crowd: Vec<Control> = (0..40).map(|_| control(&room)).collect();
    guest.write(0, &[7; BLOCK]).unwrap();
    guest.flush().unwrap();
    assert_eq!(guest.read(0, BLOCK).unwrap(), [7; BLOCK]);
    // Earlier connections may still have been open when the others connected, and have been closed for them.
    loop {
        let mut late = control(&room);
        late.send(&json!({ "verb": "version" }));
        if let Some(error) = late.next_line().unwrap().get("error") {
            assert_eq!(error["kind"], "busy");
            break;
        }
        crowd.push(late);
    }
    drop((crowd, deaf));
    while control(&room).ask(&json!({ "verb": "version" })).get("ok").is_none() {}
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn the_socket_is_private_replaces_a_stale_one_and_is_removed() {
    use std::os::unix::fs::PermissionsExt;
    let room = Room::new();
    drop(std::os::unix::net::UnixListener::bind(room.file("control.sock")).unwrap());
    let disk = serve(&room, "vhd");
    let mode = std::fs::metadata(room.file("control.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    room.done("image create vhd:other --size 1M");
    let said = room.tapline("serve vhd:other --nbd other.sock --control control.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert_eq!(disk.stop().0, Some(0));
    assert!(!room.file("control.sock").exists());
}

/// Kills the process at random moments, from before the snapshot to after the merge, and continues with the chain
/// according to decision 0006: if the new file exists, it is the leaf.
#[test]
fn acknowledged_writes_survive_kills_during_snapshots_and_merges() {
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let seed = u64::try_from(seed & u128::from(u64::MAX)).unwrap();
    println!("seed {seed}");
    for format in FORMATS {
        let mut random = Rng::with_seed(seed);
        let room = Room::new();
        room.done(&format!("image create {format}:f0 --size 64M"));
        let mut chain = vec!["f0".to_owned()];
        let mut versions = Versions::new(BLOCKS, STRIDE);
        for round in 1..=8 {
            let parents: String = chain[1..].iter().map(|file| format!(" --parent {format}:{file}")).collect();
            let words = format!("{format}:{}{parents} --nbd nbd.sock --control control.sock", chain[0]);
            let disk = Disk::serve(&room, &words);
            versions.check(&mut nbd(&room));
            let guest = guest(&room, versions, seed + round);
            guest.work(20);
            let file = format!("f{round}");
            let mut control = control(&room);
            control.send(&snapshot(&room, format, &file));
            let merge = json!({ "verb": "merge", "from": 0, "into": 1, "follow": true, "delete": true });
            let merger = std::thread::spawn(move || {
                // The snapshot and then the merge, or the end of the process.
                if control.next_line().is_some() {
                    control.send(&merge);
                    while control.next_line().is_some() {}
                }
            });
            std::thread::sleep(Duration::from_micros(random.u64(..150_000)));
            disk.signal(Signal::KILL);
            merger.join().unwrap();
            versions = guest.wait();
            drop(disk);
            chain.insert(0, file);
            chain.retain(|file| room.file(file).exists());
        }
        let parents: String = chain[1..].iter().map(|file| format!(" --parent {format}:{file}")).collect();
        let disk = Disk::serve(&room, &format!("{format}:{}{parents} --nbd nbd.sock", chain[0]));
        versions.check(&mut nbd(&room));
        assert_eq!(disk.stop().0, Some(0));
        room.sound(&format!("{format}:{}{parents}", chain[0]));
    }
}

#[test]
fn polling_set_under_load_is_kept_by_the_next_process() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let mut disk = Replaced::serve(&room, &format!("{image} --nbd nbd.sock --polling off --poll-max 100"));
    let guest = guest(&room, Versions::new(BLOCKS, STRIDE), 1);
    let ask = |more: Value| {
        let mut asked = json!({ "verb": "polling" });
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        control(&room).done(&asked)
    };
    guest.work(100);
    let off = ask(json!({}));
    assert_eq!((&off["mode"], &off["max_us"]), (&json!("off"), &json!(100)));
    assert_eq!((&off["hits"], &off["misses"], &off["polled_ns"]), (&json!(0), &json!(0), &json!(0)));
    let refused = control(&room).refused(&json!({ "verb": "polling", "max_us": 10_001 }));
    assert_eq!(refused.0, "invalid", "{refused:?}");
    assert_eq!(ask(json!({ "mode": "on" }))["max_us"], 100);
    guest.work(100);
    let on = ask(json!({ "max_us": 70 }));
    let polls = on["hits"].as_u64().unwrap() + on["misses"].as_u64().unwrap();
    assert!(polls > 0 && on["polled_ns"].as_u64().unwrap() > 0, "{on}");
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    guest.work(100);
    let after = ask(json!({}));
    assert_eq!((&after["mode"], &after["max_us"]), (&json!("on"), &json!(70)));
    assert!(after["hits"].as_u64().unwrap() + after["misses"].as_u64().unwrap() > polls, "{on}, {after}");
    guest.stop().check(&mut nbd(&room));
    disk.stop();
}
