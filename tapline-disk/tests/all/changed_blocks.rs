//! Maps of changed blocks of real disks: whatever is killed, each block that differs from the beginning of the map is
//! named; and a map is refused when something has written to the image that was not recorded.
//!
//! `TAPLINE_KILLS` sets the number of kills, `TAPLINE_SEED` the random seed.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;
use rustix::fs::{FlockOperation, XattrFlags, fcntl_lock, getxattr, setxattr};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testkit::nbd::wire::Command;

use crate::tool::control::Control;
use crate::tool::nbd::Nbd;
use crate::tool::replaced::{Replaced, wait_until_gone};
use crate::tool::served::Disk;
use crate::tool::{Room, from_environment, noise};

pub const BLOCK: usize = 64 << 10;
/// The requests in flight of a writer.
const DEPTH: usize = 8;
const MARK: &str = "user.tapline.changes";

/// Writes at random to the beginning of a disk until its process is gone.
struct Writer {
    answered: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Writer {
    fn start(room: &Room, len: u64, seed: u64) -> Writer {
        let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
        let answered = Arc::new(AtomicU64::new(0));
        let count = answered.clone();
        let thread = std::thread::spawn(move || {
            let mut random = Rng::with_seed(seed);
            loop {
                for _ in 0..DEPTH {
                    let at = random.u64(..len / 512 - 16) * 512;
                    let data = noise(random.u64(..), 512 * random.usize(1..16));
                    if client.send(Command::Write, at, data.len() as u64, &data).is_err() {
                        return;
                    }
                }
                for _ in 0..DEPTH {
                    if client.answer(0).is_err() {
                        return;
                    }
                    count.fetch_add(1, Ordering::Relaxed);
                }
                if random.u64(..8) == 0 && client.flush().is_err() {
                    return;
                }
            }
        });
        Writer { answered, thread }
    }

    /// Waits until this many more writes were answered, or the writer has ended.
    fn wait_for(&self, more: u64) {
        let until = self.answered.load(Ordering::Relaxed) + more;
        while self.answered.load(Ordering::Relaxed) < until && !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Waits until the last I/O of a killed process is over, for which the kernel keeps its locks.
fn wait_for_storage(room: &Room, names: &[&str]) {
    for name in names.iter().filter(|name| room.file(name).exists()) {
        let file = File::options().write(true).open(room.file(name)).unwrap();
        fcntl_lock(&file, FlockOperation::LockExclusive).unwrap();
    }
}

pub fn serve(room: &Room, words: &str) -> Disk {
    // A killed process leaves its sockets.
    for socket in ["nbd.sock", "control.sock"] {
        fs::remove_file(room.file(socket)).ok();
    }
    Disk::serve(room, &format!("{words} --nbd nbd.sock --control control.sock"))
}

fn kill(disk: Disk) {
    let mut disk = disk;
    disk.signal(Signal::KILL);
    disk.child.wait().unwrap();
}

pub fn ask(room: &Room, request: &Value) -> Value {
    Control::connect(&room.file("control.sock")).done(request)
}

/// The contents of a disk.
fn contents(room: &Room, image: &str) -> Vec<u8> {
    fs::remove_file(room.file("copy")).ok();
    room.done(&format!("image convert {image} raw:copy"));
    room.read("copy")
}

/// Blocks that differ.
fn differing(before: &[u8], after: &[u8]) -> Vec<usize> {
    let blocks = after.chunks(BLOCK).enumerate();
    let old = |nth: usize, len: usize| {
        let begin = (nth * BLOCK).min(before.len());
        before[begin..(begin + len).min(before.len())].to_vec()
    };
    let changed = blocks.filter(|(nth, block)| {
        let mut old = old(*nth, block.len());
        old.resize(block.len(), 0);
        old != *block
    });
    changed.map(|(nth, _)| nth).collect()
}

/// Blocks that maps name.
pub fn named(room: &Room, maps: &str) -> Vec<usize> {
    let listed = room.json(&format!("image changes {maps}"));
    let ranges = listed["ranges"].as_array().unwrap().iter();
    let blocks = |range: &Value| {
        let [start, length] = ["start", "length"].map(|word| usize::try_from(range[word].as_u64().unwrap()).unwrap());
        start / BLOCK..(start + length).div_ceil(BLOCK)
    };
    ranges.flat_map(blocks).collect()
}

/// Checks that maps name all blocks that differ; returns how many differ, and how many are named.
fn check(room: &Room, maps: &str, before: &[u8], image: &str) -> (usize, usize) {
    let (named, differing) = (named(room, maps), differing(before, &contents(room, image)));
    let missed: Vec<&usize> = differing.iter().filter(|block| !named.contains(block)).collect();
    assert!(missed.is_empty(), "{maps} of {image}: blocks {missed:?} have changed and are not named");
    (differing.len(), named.len())
}

pub fn refused(room: &Room, words: &str, why: &str) {
    let said = room.tapline(&format!("serve {words} --nbd refused.sock"));
    assert!(said.code != Some(0) && said.err.contains(why), "{words}: {said:?}");
}

pub fn write(room: &Room, at: u64, len: usize) {
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    client.write(at, &noise(at + 1, len)).unwrap();
}

fn survive_kills(format: &str, kills: u64) {
    let seed = from_environment("TAPLINE_SEED").unwrap_or(1);
    println!("TAPLINE_SEED={seed} TAPLINE_KILLS={kills} {format}");
    let mut random = Rng::with_seed(seed);
    let room = Room::new();
    let image = room.image(format, "96M");
    let before = contents(&room, &image);
    for _ in 0..kills {
        let disk = serve(&room, &format!("{image} --track m"));
        let writer = Writer::start(&room, 48 << 20, random.u64(..));
        writer.wait_for(random.u64(..400));
        kill(disk);
        writer.thread.join().unwrap();
        wait_for_storage(&room, &["a", "m"]);
        check(&room, "m", &before, &image);
    }
    assert_eq!(serve(&room, &format!("{image} --track m")).stop().0, Some(0));
    let (differing, named) = check(&room, "m", &before, &image);
    assert!(differing > 0 && named < (96 << 20) / BLOCK, "{differing} blocks differ, {named} are named");
    // Nothing is named behind what was written to, but for a region.
    let last = named_last(&room);
    assert!(last < (52 << 20) / BLOCK, "block {last} is named");
    room.sound_and_closed(&image);
}

fn named_last(room: &Room) -> usize {
    named(room, "m").into_iter().max().unwrap()
}

#[test]
fn each_block_is_named_that_has_changed_whenever_the_process_is_killed() {
    let kills = from_environment("TAPLINE_KILLS").unwrap_or(6);
    for format in ["raw", "qcow2", "vhd"] {
        survive_kills(format, kills);
    }
}

#[test]
fn a_map_that_was_closed_names_exactly_what_was_written_and_is_continued() {
    for format in ["raw", "qcow2", "vhd"] {
        let room = Room::new();
        let image = room.image(format, "64M");
        let before = contents(&room, &image);
        for at in [5 << 20, 40 << 20] {
            let disk = serve(&room, &format!("{image} --track m"));
            write(&room, at, 70_000);
            assert_eq!(disk.stop().0, Some(0));
        }
        assert_eq!(check(&room, "m", &before, &image), (4, 4), "{format}");
        let text = room.done(&format!("image changes m --image {image}"));
        assert!(text.contains("256 KiB of 64 MiB may have changed") && !text.contains("regions"), "{text}");
        // Blocks 80 and 81 are the highest bits of the 11th byte.
        let bitmap = room.done("image changes m --format xapi");
        assert_eq!(bitmap.trim().len(), (1024_usize / 8).div_ceil(3) * 4, "{bitmap}");
        assert!(bitmap.starts_with("AAAAAAAAAAAAAMAA"), "{bitmap}");
    }
}

#[test]
fn a_map_is_refused_when_the_image_was_written_to_without_it() {
    for format in ["raw", "qcow2", "vhd"] {
        let room = Room::new();
        let image = room.image(format, "64M");
        let begin = |map: &str| {
            let disk = serve(&room, &format!("{image} --track {map}"));
            write(&room, 1 << 20, 4096);
            disk
        };
        // By Tapline, after a clean end and after a kill; found under another name of the file.
        assert_eq!(begin("m1").stop().0, Some(0));
        fs::hard_link(room.file("a"), room.file("other")).unwrap();
        let other = image.replace(":a", ":other");
        let (code, said) = serve(&room, &other).stop();
        assert!(code == Some(0) && said.contains("void"), "{said}");
        refused(&room, &format!("{image} --track m1"), "not marked as tracked");
        let said = room.tapline(&format!("image changes m1 --image {image}"));
        assert!(said.err.contains("not marked as tracked"), "{said:?}");
        kill(begin("m2"));
        wait_for_storage(&room, &["a", "m2"]);
        room.done(&format!("image resize {image} 65M"));
        refused(&room, &format!("{image} --track m2"), "it is of a disk of");
        assert!(getxattr(room.file("a"), MARK, &mut [0; 1024][..]).is_err(), "the job has not removed the mark");
        // By another program, after a clean end.
        assert_eq!(begin("m3").stop().0, Some(0));
        let file = File::options().write(true).open(room.file("a")).unwrap();
        let byte = room.read("a")[700];
        file.write_all_at(&[byte], 700).unwrap();
        refused(&room, &format!("{image} --track m3"), "was changed after the map was closed");
        // A copy with its attributes in the place of the image, whatever its times are.
        kill(begin("m4"));
        wait_for_storage(&room, &["a", "m4"]);
        let mut mark = [0; 1024];
        let len = getxattr(room.file("a"), MARK, &mut mark[..]).unwrap();
        fs::copy(room.file("a"), room.file("b")).unwrap();
        setxattr(room.file("b"), MARK, &mark[..len], XattrFlags::empty()).unwrap();
        fs::rename(room.file("b"), room.file("a")).unwrap();
        refused(&room, &format!("{image} --track m4"), "is a copy");
        // An older copy of the map.
        kill(begin("m5"));
        wait_for_storage(&room, &["a", "m5"]);
        fs::copy(room.file("m5"), room.file("old")).unwrap();
        kill(begin("m5"));
        wait_for_storage(&room, &["a", "m5"]);
        fs::rename(room.file("old"), room.file("m5")).unwrap();
        refused(&room, &format!("{image} --track m5"), "older copy");
    }
}

#[test]
fn a_map_of_another_image_or_no_map_is_refused() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    room.done("image create raw:b --size 32M");
    room.done("image create raw:c --size 96M");
    assert_eq!(serve(&room, &format!("{image} --track m")).stop().0, Some(0));
    refused(&room, "raw:b --track m", "not marked as tracked");
    refused(&room, "raw:c --track m", "it is of a disk of");
    room.write("no-map", b"something else");
    refused(&room, "raw:b --track no-map", "no map of changed blocks");
    refused(&room, "raw:b --track m --read-only", "cannot be used with");
    assert_eq!(serve(&room, "raw:b --track n").stop().0, Some(0));
    let said = room.tapline("image changes m n");
    assert!(said.err.contains("does not continue"), "{said:?}");
    // A bit of both headers is flipped.
    let mut bytes = room.read("m");
    bytes[100] ^= 1;
    bytes[4196] ^= 1;
    fs::write(room.file("m"), bytes).unwrap();
    refused(&room, &format!("{image} --track m"), "no map of changed blocks");
}

#[test]
fn a_snapshot_begins_the_next_map_and_the_old_one_is_complete() {
    let room = Room::new();
    let image = room.image("qcow2", "64M");
    let before = contents(&room, &image);
    let disk = serve(&room, &format!("{image} --track m1"));
    fs::copy(room.file("m1"), room.file("early")).unwrap();
    write(&room, 1 << 20, 4096);
    let snapshot =
        json!({ "verb": "snapshot", "to": format!("qcow2:{}", room.file("b").display()), "map": room.file("m2") });
    ask(&room, &snapshot);
    write(&room, 20 << 20, 4096);
    let shown = ask(&room, &json!({ "verb": "layers" }))["changes"].clone();
    assert!(shown["map"] == json!(room.file("m2")) && shown["state"] == "kept", "{shown}");
    assert_eq!(shown["changed"], json!(BLOCK));
    // A third leaf keeps its map.
    let keep = json!({ "verb": "snapshot", "to": format!("qcow2:{}", room.file("c").display()) });
    ask(&room, &keep);
    write(&room, 30 << 20, 4096);
    ask(&room, &json!({ "verb": "resize", "size": 128 << 20 }));
    write(&room, 100 << 20, 4096);
    assert_eq!(disk.stop().0, Some(0));
    let chain = "qcow2:c --parent qcow2:b --parent qcow2:a";
    let is_marked = |name: &str| getxattr(room.file(name), MARK, &mut [0; 1024][..]).is_ok();
    // The map of the first interval has ended with its image; that of the second continues on the third.
    assert_eq!(["a", "b", "c"].map(is_marked), [true, false, true]);
    room.done("image changes m1 --image qcow2:a");
    let other = room.tapline("image changes m2 --image qcow2:a");
    assert!(other.err.contains("tracked by another map"), "{other:?}");
    assert_eq!(named(&room, "m1"), [16]);
    assert_eq!(named(&room, "m2"), [320, 480, 1600]);
    assert_eq!(check(&room, "m1 m2", &before, chain), (4, 4));
    let snapshot = contents(&room, "qcow2:a");
    assert_eq!(check(&room, "m2", &snapshot, chain), (3, 3));
    refused(&room, &format!("{chain} --track m1"), "ended with a snapshot");
    // A copy of the first map from the middle of its interval has the session of its mark, too.
    fs::rename(room.file("m1"), room.file("whole")).unwrap();
    fs::rename(room.file("early"), room.file("m1")).unwrap();
    let said = room.tapline("image changes m1 m2");
    assert!(said.code != Some(0) && said.err.contains("not complete"), "{said:?}");
    refused(&room, &format!("{chain} --read-only --dirty-bitmap n=m1,m2"), "not complete");
    fs::rename(room.file("whole"), room.file("m1")).unwrap();
    let disk = serve(&room, &format!("{chain} --track m2"));
    write(&room, 0, 512);
    kill(disk);
    wait_for_storage(&room, &["c", "m2"]);
    check(&room, "m2", &snapshot, chain);
}

#[test]
fn tracking_begins_and_ends_on_a_live_disk() {
    let room = Room::new();
    let image = room.image("vhd", "64M");
    let disk = serve(&room, &image);
    write(&room, 1 << 20, 4096);
    ask(&room, &json!({ "verb": "track", "map": room.file("m") }));
    let again =
        Control::connect(&room.file("control.sock")).refused(&json!({ "verb": "track", "map": room.file("n") }));
    assert!(again.1.contains("already"), "{again:?}");
    write(&room, 2 << 20, 4096);
    kill(disk);
    wait_for_storage(&room, &["a", "m"]);
    let disk = serve(&room, &format!("{image} --track m"));
    assert!(named(&room, "m").contains(&32) && !named(&room, "m").contains(&1000));
    let answer = ask(&room, &json!({ "verb": "untrack" }));
    assert_eq!(answer["changes"]["state"], "invalid", "{answer}");
    write(&room, 60 << 20, 4096);
    assert_eq!(disk.stop().0, Some(0));
    let said = room.tapline("image changes m");
    assert!(said.err.contains("misses changes"), "{said:?}");
    refused(&room, &format!("{image} --track m"), "misses changes");
}

#[test]
fn a_revert_ends_the_map() {
    let room = Room::new();
    let image = room.image("qcow2", "64M");
    let disk = serve(&room, &format!("{image} --track m"));
    ask(&room, &json!({ "verb": "snapshot", "to": format!("qcow2:{}", room.file("b").display()) }));
    write(&room, 1 << 20, 4096);
    let revert = json!({ "verb": "revert", "to": 1, "leaf": format!("qcow2:{}", room.file("c").display()) });
    let mut control = Control::connect(&room.file("control.sock"));
    // The connection of the writer may not have ended yet.
    loop {
        control.send(&revert);
        let outcome = control.outcome();
        match outcome["error"]["kind"].as_str() {
            None => break,
            Some("connected") => std::thread::yield_now(),
            Some(_) => panic!("{outcome}"),
        }
    }
    let shown = ask(&room, &json!({ "verb": "layers" }))["changes"].clone();
    assert_eq!(shown["state"], "invalid", "{shown}");
    let said = room.tapline("image changes m");
    assert!(said.err.contains("misses changes"), "{said:?}");
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_successor_continues_the_map() {
    let room = Room::new();
    let image = room.image("qcow2", "64M");
    let before = contents(&room, &image);
    let mut disk = Replaced::serve(&room, &format!("{image} --track m1 --nbd nbd.sock"));
    write(&room, 1 << 20, 4096);
    ask(
        &room,
        &json!({
            "verb": "snapshot", "to": format!("qcow2:{}", room.file("b").display()), "map": room.file("m2"),
        }),
    );
    write(&room, 2 << 20, 4096);
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    let shown = ask(&room, &json!({ "verb": "layers" }))["changes"].clone();
    assert!(shown["map"] == json!(room.file("m2")) && shown["state"] == "kept", "{shown}");
    // The successor knows that no region is suspect.
    assert_eq!(shown["changed"], json!(BLOCK));
    write(&room, 3 << 20, 4096);
    kill_process(disk.pid, Signal::KILL).unwrap();
    wait_until_gone(disk.pid);
    wait_for_storage(&room, &["b", "m2"]);
    check(&room, "m1 m2", &before, "qcow2:b --parent qcow2:a");
}

/// Kills a disk under writes while it takes a snapshot with a new map, or grows.
#[test]
fn a_snapshot_or_resize_that_is_killed_hides_no_change() {
    let kills = from_environment("TAPLINE_KILLS").unwrap_or(5);
    let mut random = Rng::with_seed(from_environment("TAPLINE_SEED").unwrap_or(1));
    let mut refused = 0;
    for nth in 0..kills * 2 {
        let room = Room::new();
        let image = room.image("qcow2", "64M");
        let before = contents(&room, &image);
        let disk = serve(&room, &format!("{image} --track m1"));
        let writer = Writer::start(&room, 32 << 20, random.u64(..));
        writer.wait_for(random.u64(1..100));
        let mut control = Control::connect(&room.file("control.sock"));
        control.send(&match nth % 2 {
            0 => json!({
                "verb": "snapshot", "to": format!("qcow2:{}", room.file("b").display()), "map": room.file("m2"),
            }),
            _ => json!({ "verb": "resize", "size": 80 << 20 }),
        });
        writer.wait_for(random.u64(..60));
        kill(disk);
        writer.thread.join().unwrap();
        wait_for_storage(&room, &["a", "b", "m1", "m2"]);
        // After a crash the new file is the leaf if it exists.
        let (chain, maps, current) = match room.file("b").exists() {
            true => ("qcow2:b --parent qcow2:a", "m1 m2", "m2"),
            false => (image.as_str(), "m1", "m1"),
        };
        // If the process was killed before it had sealed the first map, that is refused: never is anything missing.
        let check = || {
            let is_sealed = !room.tapline(&format!("image changes {maps}")).err.contains("not complete");
            assert!(is_sealed || maps == "m1 m2");
            is_sealed.then(|| check(&room, maps, &before, chain));
        };
        check();
        // The log of the new leaf may not fit it if the kill came right after the switch: then its map is refused,
        // which hides nothing either.
        let again = || serve(&room, &format!("{chain} --track {current}"));
        let disk = match catch_unwind(AssertUnwindSafe(again)) {
            Ok(disk) => disk,
            Err(why) => {
                let why = why.downcast_ref::<String>().cloned().unwrap_or_default();
                assert!(maps == "m1 m2" && why.contains("not all changes are known"), "{why}");
                refused += 1;
                continue;
            }
        };
        write(&room, 63 << 20, 4096);
        kill(disk);
        wait_for_storage(&room, &["a", "b", "m1", "m2"]);
        check();
    }
    assert!(refused < kills, "no map survives a kill during a snapshot");
}

/// Makes a file immutable, also for those that have it open, or undoes that.
fn set_immutable(room: &Room, name: &str, flag: &str) {
    room.tool("chattr", &format!("{flag}i {}", room.file(name).display()));
}

/// A map that can be neither written nor made invalid, with its mark in an image that cannot be changed either.
#[test]
fn a_disk_with_a_doubtful_map_is_stopped_and_its_map_is_continued() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let before = contents(&room, &image);
    let mut disk = serve(&room, &format!("{image} --track m"));
    write(&room, 0, 4096);
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    ["m", "a"].iter().for_each(|name| set_immutable(&room, name, "+"));
    // It waits, since no intent can be written for its region.
    let data = noise(1, 4096);
    client.send(Command::Write, 32 << 20, data.len() as u64, &data).unwrap();
    disk.wait_for("some writes WAIT");
    disk.signal(Signal::TERM);
    assert!(client.answer(0).is_err());
    let said = disk.rest_of_log();
    ["m", "a"].iter().for_each(|name| set_immutable(&room, name, "-"));
    assert!(said.contains("1 requests that waited for the map of changed blocks have failed"), "{said}");
    assert!(disk.child.wait().unwrap().code().is_some());
    let disk = serve(&room, &format!("{image} --track m"));
    write(&room, 8 << 20, 4096);
    assert_eq!(disk.stop().0, Some(0));
    check(&room, "m", &before, &image);
}

#[test]
fn a_map_that_is_longer_than_its_disk_is_continued_and_joined() {
    let room = Room::new();
    let image = room.image("raw", "64M");
    let disk = serve(&room, &format!("{image} --track m1"));
    ask(&room, &json!({ "verb": "resize", "size": 80 << 20 }));
    write(&room, 70 << 20, 4096);
    kill(disk);
    wait_for_storage(&room, &["a", "m1"]);
    // As if the growth had failed, or a power loss had undone it.
    File::options().write(true).open(room.file("a")).unwrap().set_len(64 << 20).unwrap();
    let before = contents(&room, &image);
    let disk = serve(&room, &format!("{image} --track m1"));
    write(&room, 1 << 20, 4096);
    let snapshot =
        json!({ "verb": "snapshot", "to": format!("qcow2:{}", room.file("b").display()), "map": room.file("m2") });
    ask(&room, &snapshot);
    write(&room, 2 << 20, 4096);
    ask(&room, &json!({ "verb": "resize", "size": 72 << 20 }));
    write(&room, 71 << 20, 4096);
    assert_eq!(disk.stop().0, Some(0));
    assert_eq!(room.json("image changes m1")["size"], 64 << 20);
    check(&room, "m1 m2", &before, "qcow2:b --parent raw:a");
    assert!(named(&room, "m1").iter().all(|block| block * BLOCK < 64 << 20));
}

/// Restored in place, the file keeps its number and its mark. What shows it is the redo log of the killed process, with
/// something in it or not, and a start that fails must not be the last to see that.
#[test]
fn a_map_is_refused_for_good_when_the_image_of_a_killed_process_was_restored_in_place() {
    for (format, is_flushed) in [("qcow2", false), ("qcow2", true), ("vhd", false), ("vhd", true)] {
        let room = Room::new();
        let image = room.image(format, "64M");
        let disk = serve(&room, &format!("{image} --track m"));
        write(&room, 1 << 20, 4096);
        assert_eq!(disk.stop().0, Some(0));
        let copy = room.read("a");
        let disk = serve(&room, &format!("{image} --track m"));
        let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
        client.write(20 << 20, &noise(1, 4096)).unwrap();
        if is_flushed {
            client.flush().unwrap();
        }
        kill(disk);
        wait_for_storage(&room, &["a", "m"]);
        room.done(&format!("image changes m --image {image}"));
        fs::write(room.file("a"), copy).unwrap();
        let why = "not in the state in which the last process left it";
        let said = room.tapline(&format!("image changes m --image {image}"));
        assert!(said.code != Some(0) && said.err.contains(why), "{said:?}");
        for _ in 0..2 {
            // What holds unanswered changes is set aside, and the mark ends with it.
            let why = if is_flushed { why } else { "not marked as tracked" };
            refused(&room, &format!("{image} --track m"), why);
        }
        let begun = serve(&room, &format!("{image} --track n"));
        write(&room, 2 << 20, 4096);
        kill(begun);
        wait_for_storage(&room, &["a", "n"]);
        assert_eq!(serve(&room, &format!("{image} --track n")).stop().0, Some(0));
    }
}
