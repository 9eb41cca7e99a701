//! A failed sync is recorded in the redo log of its image: contents of this and other layers' logs are available to
//! reads by the next process, and are never written to the images.

use rustix::process::Signal;
use serde_json::json;

use crate::tool::control::Control;
use crate::tool::nbd::{BLOCK, Nbd};
use crate::tool::served::Disk;
use crate::tool::{Room, where_refused};

const FORMATS: [&str; 2] = ["vhd", "qcow2"];

/// Blocks in different blocks of a VHD and clusters of a qcow2.
const FLUSHED: u64 = 0;
const ANSWERED: u64 = 2048;
const LATER: u64 = 4096;

/// The offsets in a redo log of the mark of a failed sync, and of the format version.
const FAILED_AT: u64 = 40;
const VERSION_AT: u64 = 8;

fn serve(room: &Room, words: &str) -> (Disk, Nbd) {
    let disk = Disk::serve(room, &format!("{words} --nbd nbd.sock"));
    let client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    (disk, client)
}

fn kill(room: &Room, disk: Disk) {
    disk.signal(Signal::KILL);
    drop(disk);
    std::fs::remove_file(room.file("nbd.sock")).unwrap();
}

/// Flushes one block and only writes others, kills the process, and then marks a failed sync in its log.
fn live_and_fail(room: &Room, words: &str, image: &str) {
    let (disk, mut client) = serve(room, words);
    client.write(FLUSHED * BLOCK as u64, &[1; BLOCK]).unwrap();
    client.flush().unwrap();
    client.write(ANSWERED * BLOCK as u64, &[2; BLOCK]).unwrap();
    kill(room, disk);
    room.write_redo_log(image, FAILED_AT, &1u64.to_ne_bytes());
}

/// Returns the first bytes of the three blocks.
fn found(client: &mut Nbd) -> [u8; 3] {
    [FLUSHED, ANSWERED, LATER].map(|block| client.read(block * BLOCK as u64, BLOCK).unwrap()[0])
}

fn logs(room: &Room) -> usize {
    std::fs::read_dir(room.file("redo")).unwrap().count()
}

#[test]
fn after_a_failed_sync_acknowledged_data_is_readable_until_accepted() {
    for format in FORMATS {
        let room = Room::new();
        room.done(&format!("image create {format}:a --size 64M"));
        let words = format!("{format}:a");
        live_and_fail(&room, &words, "a");

        let before = room.read("a");
        let (disk, mut client) = serve(&room, &words);
        assert_eq!(found(&mut client), [1, 2, 0], "{format}");
        client.write(LATER * BLOCK as u64, &[3; BLOCK]).unwrap_err();
        client.flush().unwrap_err();
        kill(&room, disk);
        assert!(room.read("a") == before, "{format}: it was written to");

        let (disk, mut client) = serve(&room, &format!("{words} --accept-failed-sync"));
        assert_eq!(found(&mut client), [1, 0, 0], "{format}");
        client.write(LATER * BLOCK as u64, &[3; BLOCK]).unwrap();
        client.flush().unwrap();
        assert_eq!(found(&mut client), [1, 0, 3], "{format}");
        drop(client);
        assert_eq!((disk.stop().0, logs(&room)), (Some(0), 0), "{format}");
        room.sound(&words);
    }
}

#[test]
fn a_failed_sync_of_a_parent_keeps_data_readable_and_stops_writes() {
    for format in FORMATS {
        let room = Room::new();
        room.done(&format!("image create {format}:p --size 64M"));
        room.done(&format!("image create {format}:a --parent {format}:p"));
        live_and_fail(&room, &format!("{format}:p"), "p");

        let words = format!("{format}:a --parent {format}:p --accept-changed-parent");
        let before = (room.read("p"), room.read("a"));
        for _ in 0..2 {
            let (disk, mut client) = serve(&room, &words);
            assert_eq!(found(&mut client), [1, 2, 0], "{format}");
            client.write(LATER * BLOCK as u64, &[3; BLOCK]).unwrap_err();
            kill(&room, disk);
        }
        assert!((room.read("p"), room.read("a")) == before, "{format}: something was written");

        let (disk, mut client) = serve(&room, &format!("{words} --accept-failed-sync"));
        assert_eq!(found(&mut client), [1, 0, 0], "{format}");
        client.write(LATER * BLOCK as u64, &[3; BLOCK]).unwrap();
        drop(client);
        assert_eq!((disk.stop().0, logs(&room)), (Some(0), 0), "{format}");
    }
}

#[test]
fn after_a_failed_sync_a_job_sees_only_flushed_data() {
    for format in FORMATS {
        let room = Room::new();
        room.done(&format!("image create {format}:a --size 64M"));
        live_and_fail(&room, &format!("{format}:a"), "a");
        let said = room.tapline(&format!("image convert {format}:a raw:b"));
        assert!(said.code == Some(0) && said.err.contains("after a power loss"), "{format}: {said:?}");
        let raw = room.read("b");
        let first = |block: u64| raw[usize::try_from(block).unwrap() * BLOCK];
        assert_eq!([first(FLUSHED), first(ANSWERED), first(LATER)], [1, 0, 0], "{format}");
        assert_eq!(logs(&room), 0, "{format}");
    }
}

/// Data discarded by an upper layer is in a lower one only after that one is durable.
#[test]
fn nothing_is_written_above_a_layer_whose_log_cannot_be_replayed() {
    for format in FORMATS {
        let room = Room::new();
        room.done(&format!("image create {format}:p --size 64M"));
        room.done(&format!("image create {format}:a --parent {format}:p"));
        for words in [format!("{format}:a --parent {format}:p"), format!("{format}:p")] {
            let (disk, mut client) = serve(&room, &words);
            client.write(ANSWERED * BLOCK as u64, &[2; BLOCK]).unwrap();
            kill(&room, disk);
        }
        room.write_redo_log("p", VERSION_AT, &3u64.to_ne_bytes());
        let before = (room.read("a"), room.redo_log("a"));
        let said = room.tapline(&format!("image convert {format}:a raw:b --parent {format}:p --accept-changed-parent"));
        assert!(said.code == Some(4) && said.err.contains("of version 3"), "{format}: {said:?}");
        assert!((room.read("a"), room.redo_log("a")) == before, "{format}: the child was settled first");
    }
}

/// The system fails fsync(2), which a resize uses; fdatasync(2), which flushes use, would succeed.
#[test]
fn a_failed_sync_of_a_resize_breaks_the_disk() {
    where_refused(libc::SYS_fsync, libc::EIO.unsigned_abs(), || {
        let room = Room::new();
        room.write("a", &[0; 1 << 20]);
        let (disk, mut client) = serve(&room, "raw:a --control c.sock");
        client.write(0, &[1; BLOCK]).unwrap();
        let resize = json!({"verb": "resize", "size": 2 << 20});
        let (_, said) = Control::connect(&room.file("c.sock")).refused(&resize);
        assert!(said.starts_with("cannot sync "), "{said}");
        client.flush().unwrap_err();
        client.write(0, &[2; BLOCK]).unwrap_err();
        let (_, said) = Control::connect(&room.file("c.sock")).refused(&resize);
        assert!(said.contains("its storage failed"), "{said}");
        drop(disk);
    });
}

/// A resize of an image that is not served syncs by itself, a merge through a disk. The next command must not trust a
/// successful sync.
#[test]
fn a_failed_sync_of_a_job_is_known_to_the_next_process() {
    for job in ["resize qcow2:a --size 128M", "merge qcow2:a --from 0 --into 1"] {
        let room = Room::new();
        room.done("image create qcow2:p --size 64M");
        room.done("image create qcow2:a --parent qcow2:p --size 64M");
        let job = format!("image {job} --parent qcow2:p");
        where_refused(libc::SYS_fdatasync, libc::EIO.unsigned_abs(), || {
            let said = room.tapline(&job);
            assert!(said.code != Some(0) && said.err.contains("Input/output error"), "{job}: {said:?}");
        });
        let said = room.tapline(&job);
        let known = "a sync of qcow2:a or of an image below it failed in its last process";
        assert!(said.code == Some(0) && said.err.contains(known), "{job}: {said:?}");
        let said = room.tapline(&job);
        assert!(!said.err.contains(known), "{job}: {said:?}");
    }
}
