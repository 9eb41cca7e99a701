//! A disk whose process is killed while its client keeps running: completed writes are available to the next process,
//! and are covered by its flush.
//!
//! `TAPLINE_TAKEOVER_ROUNDS` sets how often the process is killed, for each kind of disk; `TAPLINE_TAKEOVER_SEED` sets
//! the random seed.

use rustix::process::Signal;

use crate::tool::Room;
use crate::tool::nbd::{BLOCK, Dice, Nbd};
use crate::tool::served::Disk;

/// Blocks of the disk: a few MiB, so that both formats allocate in every round.
const BLOCKS: u64 = 16 << 10;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// The contents of a version of a block.
fn content(version: u8) -> Vec<u8> {
    vec![version; BLOCK]
}

/// Creates the images of a kind, and returns the arguments for serving it.
fn make(room: &Room, kind: &str) -> String {
    let (leaf, below) = kind.split_once('-').map_or((kind, None), |(leaf, _)| (leaf, Some("p")));
    match (leaf, below) {
        ("raw", _) => {
            room.done("image create raw:a.raw --size 64M");
            "raw:a.raw".into()
        }
        (format, None) => {
            room.done(&format!("image create {format}:a.img --size 64M"));
            format!("{format}:a.img")
        }
        (format, Some(_)) => {
            room.done("image create raw:p.raw --size 64M");
            room.done(&format!("image create {format}:a.img --parent raw:p.raw"));
            format!("{format}:a.img --parent raw:p.raw")
        }
    }
}

/// Some writes, and then death.
fn live_and_die(room: &Room, words: &str, model: &mut [u8], dice: &mut Dice, round: u64) {
    let disk = Disk::serve(room, &format!("{words} --nbd nbd.sock"));
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    if round > 0 {
        // As a guest does that has been waiting for it.
        client.flush().unwrap();
    }
    check(&mut client, model, dice);
    for write in 0..20 {
        let (block, version) = (dice.throw(BLOCKS), u8::try_from(dice.throw(255) + 1).unwrap());
        client.write(block * BLOCK as u64, &content(version)).unwrap();
        model[usize::try_from(block).unwrap()] = version;
        if write == 9 && dice.throw(2) == 0 {
            client.flush().unwrap();
        }
    }
    disk.signal(Signal::KILL);
    drop(disk);
    std::fs::remove_file(room.file("nbd.sock")).unwrap();
}

/// Reads what was ever written, or some of it.
fn check(client: &mut Nbd, model: &[u8], dice: &mut Dice) {
    let written: Vec<usize> = (0..model.len()).filter(|&block| model[block] != 0).collect();
    let some = written.len().min(400);
    for at in 0..some {
        let block = if written.len() > some {
            written[usize::try_from(dice.throw(written.len() as u64)).unwrap()]
        } else {
            written[at]
        };
        let found = client.read((block * BLOCK) as u64, BLOCK).unwrap();
        assert!(found == content(model[block]), "block {block} holds {} for {}", found[0], model[block]);
    }
}

fn survives(kind: &str) {
    let (rounds, seed) = (number("TAPLINE_TAKEOVER_ROUNDS", 6), number("TAPLINE_TAKEOVER_SEED", 7));
    println!("{kind}: TAPLINE_TAKEOVER_ROUNDS={rounds} TAPLINE_TAKEOVER_SEED={seed}");
    let room = Room::new();
    let words = make(&room, kind);
    let (mut model, mut dice) = (vec![0; usize::try_from(BLOCKS).unwrap()], Dice(seed));
    for round in 0..rounds {
        live_and_die(&room, &words, &mut model, &mut dice, round);
    }
    let disk = Disk::serve(&room, &format!("{words} --nbd nbd.sock"));
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    check(&mut client, &model, &mut dice);
    drop(client);
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    let left = std::fs::read_dir(room.file("redo")).unwrap().count();
    assert_eq!(left, 0, "a disk that ends cleanly leaves no log");
    let image = words.split(' ').next().unwrap();
    if !image.starts_with("raw") {
        room.sound_and_closed(image);
    }
}

#[test]
fn acknowledged_writes_survive_the_process_on_raw() {
    survives("raw");
}

#[test]
fn acknowledged_writes_survive_the_process_on_vhd() {
    survives("vhd");
}

#[test]
fn acknowledged_writes_survive_the_process_on_qcow2() {
    survives("qcow2");
}

#[test]
fn acknowledged_writes_survive_the_process_on_a_vhd_chain() {
    survives("vhd-raw");
}

#[test]
fn acknowledged_writes_survive_the_process_on_a_qcow2_chain() {
    survives("qcow2-raw");
}

/// The image was replaced or changed after its process died: the log may not match it.
#[test]
fn an_image_modified_since_is_not_opened_automatically() {
    let room = Room::new();
    let words = make(&room, "qcow2");
    let (mut model, mut dice) = (vec![0; usize::try_from(BLOCKS).unwrap()], Dice(1));
    live_and_die(&room, &words, &mut model, &mut dice, 0);
    let image = std::fs::File::options().write(true).open(room.file("a.img")).unwrap();
    image.set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(3600)).unwrap();
    let before = room.read("a.img");
    for refused in
        ["serve qcow2:a.img --nbd other.sock", "image check qcow2:a.img", "image resize qcow2:a.img --size 80M"]
    {
        let said = room.tapline(refused);
        assert_eq!(said.code, Some(4), "{refused}: {said:?}");
        assert!(said.err.contains("was changed") && said.err.contains(".redo"), "{refused}: {said:?}");
    }
    assert!(room.read("a.img") == before, "it was written to");
    room.lose_redo_logs();
    assert_eq!(Disk::serve(&room, &format!("{words} --nbd nbd.sock")).stop().0, Some(0));
    room.sound("qcow2:a.img");
}

/// The copy has its old time of modification, as `cp -p` and backups give it back.
#[test]
fn an_image_restored_from_a_copy_is_not_opened_automatically() {
    let room = Room::new();
    let words = make(&room, "qcow2");
    let copy = room.read("a.img");
    let modified = std::fs::metadata(room.file("a.img")).unwrap().modified().unwrap();
    let (mut model, mut dice) = (vec![0; usize::try_from(BLOCKS).unwrap()], Dice(1));
    live_and_die(&room, &words, &mut model, &mut dice, 0);
    std::fs::write(room.file("a.img"), copy).unwrap();
    std::fs::File::options().write(true).open(room.file("a.img")).unwrap().set_modified(modified).unwrap();
    // Its process died a minute ago.
    let minute_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    let seen = minute_ago.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    room.write_redo_log("a.img", 48, &u64::try_from(seen).unwrap().to_ne_bytes());
    let before = room.read("a.img");
    let said = room.tapline("serve qcow2:a.img --nbd other.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("was changed") && said.err.contains(".redo"), "{said:?}");
    assert!(room.read("a.img") == before, "it was written to");
}

/// The killed process was of a version with another log layout.
#[test]
fn a_log_of_another_version_is_refused_and_kept() {
    let room = Room::new();
    let words = make(&room, "qcow2");
    let (mut model, mut dice) = (vec![0; usize::try_from(BLOCKS).unwrap()], Dice(1));
    live_and_die(&room, &words, &mut model, &mut dice, 0);
    let set_version = |version: u64| room.write_redo_log("a.img", 8, &version.to_ne_bytes());
    set_version(2);
    let before = (room.read("a.img"), room.redo_log("a.img"));
    for refused in [
        "serve qcow2:a.img --nbd other.sock",
        "image check qcow2:a.img",
        "image convert qcow2:a.img raw:b",
        "image resize qcow2:a.img --size 80M",
    ] {
        let said = room.tapline(refused);
        assert_eq!(said.code, Some(4), "{refused}: {said:?}");
        assert!(said.err.contains("of version 2") && said.err.contains(".redo"), "{refused}: {said:?}");
    }
    assert!((room.read("a.img"), room.redo_log("a.img")) == before, "something was written");
    set_version(1);
    live_and_die(&room, &words, &mut model, &mut dice, 1);
}

/// Whoever opens the image, whatever for, sees what was answered.
#[test]
fn a_job_sees_acknowledged_writes() {
    for kind in ["vhd", "qcow2"] {
        let room = Room::new();
        let words = make(&room, kind);
        let (mut model, mut dice) = (vec![0; usize::try_from(BLOCKS).unwrap()], Dice(1));
        live_and_die(&room, &words, &mut model, &mut dice, 0);
        let before = (room.read("a.img"), room.redo_log("a.img"));
        room.done(&format!("image convert {kind}:a.img raw:b"));
        assert!((room.read("a.img"), room.redo_log("a.img")) == before, "{kind}: a job that reads has written");
        let found = room.read("b");
        for (block, version) in model.iter().enumerate() {
            assert!(found[block * BLOCK..(block + 1) * BLOCK] == content(*version), "block {block} of {kind}");
        }
        room.done(&format!("image check --repair {kind}:a.img"));
        assert_eq!(std::fs::read_dir(room.file("redo")).unwrap().count(), 0, "the log is not needed any more");
    }
}
