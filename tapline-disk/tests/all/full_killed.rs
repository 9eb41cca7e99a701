//! A disk on a really full file system whose process is killed: the next one reads what was written through the redo
//! log of the last, which it has no space to replay; so do jobs, and processes that only read.

use std::io;

use rustix::process::Signal;
use serde_json::json;

use crate::tool::control::Control;
use crate::tool::nbd::Nbd;
use crate::tool::served::Disk;
use crate::tool::small::{MIB, Small};

const FORMATS: [&str; 2] = ["vhd", "qcow2"];
const PAGE: usize = 4096;
/// The number of pages written, each in another block of a VHD; a qcow2 needs its first tables for them.
const PAGES: usize = 20;

/// Returns an offset within a block.
fn at(n: usize) -> u64 {
    u64::try_from(n * (2 * MIB + PAGE)).unwrap()
}

fn page(n: usize) -> Vec<u8> {
    vec![u8::try_from(n + 1).unwrap(); PAGE]
}

fn write_some(guest: &mut Nbd, pages: std::ops::Range<usize>) {
    pages.for_each(|n| guest.write(at(n), &page(n)).unwrap());
}

fn holds(guest: &mut Nbd, pages: std::ops::Range<usize>) -> bool {
    pages.into_iter().all(|n| guest.read(at(n), PAGE).unwrap() == page(n))
}

fn is_full<T>(outcome: io::Result<T>) -> bool {
    outcome.is_err_and(|error| error.kind() == io::ErrorKind::StorageFull)
}

fn kill(small: &Small, disk: Disk) {
    disk.signal(Signal::KILL);
    drop(disk);
    std::fs::remove_file(small.room.file("nbd.sock")).unwrap();
}

/// Kills the process of a disk on a full file system, whose guest has written pages and flushed none.
fn killed(format: &str) -> Option<Small> {
    let small = Small::with_ballast()?;
    small.room.done(&format!("image create {format}:small/a --size 64M"));
    let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
    let mut guest = small.nbd();
    write_some(&mut guest, 0..PAGES);
    small.fill();
    assert!(is_full(guest.write(at(PAGES + 1), &page(0))), "the file system is not full");
    kill(&small, disk);
    Some(small)
}

#[test]
fn the_next_process_reads_everything_and_flushes_it_when_there_is_space() {
    for format in FORMATS {
        let Some(small) = killed(format) else { return };
        for _ in 0..2 {
            let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
            let mut guest = small.nbd();
            assert!(holds(&mut guest, 0..PAGES), "{format}");
            assert!(is_full(guest.flush()), "{format}: it says that it is durable");
            guest.write(at(0), &page(0)).unwrap();
            kill(&small, disk);
        }
        let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
        let mut guest = small.nbd();
        assert!(is_full(guest.flush()), "{format}");
        small.make_space();
        guest.flush().unwrap();
        kill(&small, disk);
        small.room.lose_redo_logs();
        let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
        assert!(holds(&mut small.nbd(), 0..PAGES), "{format}: not durable");
        assert_eq!(disk.stop().0, Some(0));
        small.room.sound(&format!("{format}:small/a"));
    }
}

#[test]
fn who_only_reads_reads_everything_and_writes_nothing() {
    for format in FORMATS {
        let Some(small) = killed(format) else { return };
        let name = format!("{format}:small/a");
        let before = small.room.read("small/a");
        let disk = Disk::serve(&small.room, &format!("{name} --read-only --nbd nbd.sock"));
        assert!(holds(&mut small.nbd(), 0..PAGES), "{format}");
        assert_eq!(disk.stop().0, Some(0), "{format}");

        small.room.done(&format!("image convert {name} raw:copy"));
        let copy = small.room.read("copy");
        for n in 0..PAGES {
            let at = usize::try_from(at(n)).unwrap();
            assert!(copy[at..at + PAGE] == page(n), "{format}: page {n} of the copy");
        }
        let said = small.room.done(&format!("image check {name}"));
        assert!(said.contains("was killed and has left"), "{format}: {said}");
        assert!(small.room.json(&format!("image check {name}"))["left_sectors"].as_u64() > Some(0), "{format}");
        let said = small.room.done(&format!("image info {name}"));
        assert!(said.contains("redo log"), "{format}: {said}");
        assert!(small.room.json(&format!("image info {name}"))[0]["left_sectors"].as_u64() > Some(0), "{format}");
        assert!(small.room.read("small/a") == before, "{format}: it was written to");

        let said = small.room.tapline(&format!("image check --repair {name}"));
        assert_eq!(said.code, Some(4), "{format}: {said:?}");
        assert!(said.err.contains("nothing is lost: free some space"), "{format}: {said:?}");
        small.make_space();
        small.room.done(&format!("image check --repair {name}"));
        assert!(small.room.json(&format!("image check {name}"))["left_sectors"].is_null(), "{format}");
    }
}

/// A parent's process is killed where there is no space; its child is on another file system.
#[test]
fn a_child_is_served_while_its_parent_has_no_space_to_replay_its_log() {
    for format in FORMATS {
        let Some(small) = Small::with_ballast() else { return };
        small.room.done(&format!("image create {format}:small/a --size 64M"));
        small.room.done(&format!("image create {format}:child --parent {format}:small/a"));
        let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
        let mut guest = small.nbd();
        write_some(&mut guest, 0..PAGES / 2);
        small.fill();
        assert!(is_full(guest.flush()), "{format}");
        kill(&small, disk);

        let words = format!("{format}:child --parent {format}:small/a --accept-changed-parent --nbd nbd.sock");
        let before = small.room.read("small/a");
        let disk = Disk::serve(&small.room, &format!("{words} --read-only"));
        assert!(holds(&mut small.nbd(), 0..PAGES / 2), "{format}");
        assert_eq!(disk.stop().0, Some(0), "{format}");
        assert!(small.room.read("small/a") == before, "{format}: who only reads has written to it");

        let mut disk = Disk::serve(&small.room, &words);
        assert!(disk.said.contains("there is no space to replay the redo log"), "{format}: {}", disk.said);
        let mut guest = small.nbd();
        assert!(holds(&mut guest, 0..PAGES / 2), "{format}");
        write_some(&mut guest, PAGES / 2..PAGES);
        assert!(holds(&mut guest, 0..PAGES), "{format}");
        assert!(is_full(guest.flush()), "{format}: it says that it is durable");
        disk.said.clear();
        kill(&small, disk);

        // Now the child has a log too, which must be replayed after its parent's; allocations wait for that.
        let disk = Disk::serve(&small.room, &words);
        let mut guest = small.nbd();
        assert!(holds(&mut guest, 0..PAGES), "{format}");
        write_some(&mut guest, PAGES / 2..PAGES);
        assert!(is_full(guest.write(at(PAGES), &page(0))), "{format}: what is owed was forgotten");
        assert!(is_full(guest.flush()), "{format}: it says that it is durable");
        kill(&small, disk);
        let disk = Disk::serve(&small.room, &words);
        let mut guest = small.nbd();
        small.make_space();
        guest.flush().unwrap();
        kill(&small, disk);
        small.room.lose_redo_logs();
        let disk = Disk::serve(&small.room, &words);
        assert!(holds(&mut small.nbd(), 0..PAGES), "{format}: not durable");
        assert_eq!(disk.stop().0, Some(0));
        small.room.sound(&format!("{format}:small/a"));
        small.room.sound(&format!("{format}:child"));
    }
}

/// A child records its parent's modification time: one of a parent that is still to be written to would never open.
#[test]
fn a_layer_that_is_not_durable_yet_gets_no_child_before_it_is() {
    for format in FORMATS {
        let Some(small) = Small::with_ballast() else { return };
        small.room.done(&format!("image create {format}:small/a --size 64M"));
        small.room.done(&format!("image create {format}:child --parent {format}:small/a"));
        let disk = Disk::serve(&small.room, &format!("{format}:small/a --nbd nbd.sock"));
        write_some(&mut small.nbd(), 0..PAGES / 2);
        small.fill();
        kill(&small, disk);

        let words = format!("{format}:child --parent {format}:small/a --accept-changed-parent --nbd nbd.sock");
        let disk = Disk::serve(&small.room, &format!("{words} --control control.sock"));
        assert!(disk.said.contains("there is no space to replay the redo log"), "{format}: {}", disk.said);
        let mut control = Control::connect(&small.room.file("control.sock"));
        let name = |file: &str| format!("{format}:{}", small.room.file(file).display());
        let clone = json!({ "verb": "clone", "of": 1, "to": name("clone") });
        let (kind, what) = control.refused(&clone);
        assert!(kind == "state" && what.contains("not durable yet"), "{format}: {kind}: {what}");
        let revert = json!({ "verb": "revert", "to": 1, "leaf": name("reverted") });
        assert_eq!(control.refused(&revert).0, "state", "{format}");
        assert!(!small.room.file("clone").exists() && !small.room.file("reverted").exists(), "{format}");

        small.make_space();
        small.nbd().flush().unwrap();
        control.done(&clone);
        assert_eq!(disk.stop().0, Some(0));
        small.room.done(&format!("image map {format}:clone --parent {format}:small/a"));
    }
}
