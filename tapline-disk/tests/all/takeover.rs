//! A disk whose process is killed while its client keeps running: completed writes are available to the next process,
//! and are covered by its flush.
//!
//! `TAPLINE_TAKEOVER_ROUNDS` sets how often the process is killed, for each kind of disk; `TAPLINE_TAKEOVER_SEED` sets
//! the random seed.

use fastrand::Rng;

use rustix::process::Signal;

use crate::tool::Room;
use crate::tool::nbd::{BLOCK, Nbd};
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

/// Creates images of a kind; returns the arguments for serving it.
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

/// Does some writes, and kills the process.
fn live_and_die(room: &Room, words: &str, model: &mut [u8], random: &mut Rng, round: u64) {
    let disk = Disk::serve(room, &format!("{words} --nbd nbd.sock"));
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    if round > 0 {
        // Like a guest that has been waiting for it.
        client.flush().unwrap();
    }
    check(&mut client, model, random);
    for write in 0..20 {
        let (block, version) = (random.u64(..BLOCKS), random.u8(1..));
        client.write(block * BLOCK as u64, &content(version)).unwrap();
        model[usize::try_from(block).unwrap()] = version;
        if write == 9 && random.bool() {
            client.flush().unwrap();
        }
    }
    disk.signal(Signal::KILL);
    drop(disk);
    std::fs::remove_file(room.file("nbd.sock")).unwrap();
}

/// Reads everything that was ever written, or some of it.
fn check(client: &mut Nbd, model: &[u8], random: &mut Rng) {
    let written: Vec<usize> = (0..model.len()).filter(|&block| model[block] != 0).collect();
    let some = written.len().min(400);
    for at in 0..some {
        let block = if written.len() > some { written[random.usize(..written.len())] } else { written[at] };
        let found = client.read((block * BLOCK) as u64, BLOCK).unwrap();
        assert!(found == content(model[block]), "block {block} holds {} for {}", found[0], model[block]);
    }
}

fn survives(kind: &str) {
    let (rounds, seed) = (number("TAPLINE_TAKEOVER_ROUNDS", 6), number("TAPLINE_TAKEOVER_SEED", 7));
    println!("{kind}: TAPLINE_TAKEOVER_ROUNDS={rounds} TAPLINE_TAKEOVER_SEED={seed}");
    let room = Room::new();
    let words = make(&room, kind);
    let (mut model, mut random) = (vec![0; usize::try_from(BLOCKS).unwrap()], Rng::with_seed(seed));
    for round in 0..rounds {
        live_and_die(&room, &words, &mut model, &mut random, round);
    }
    let disk = Disk::serve(&room, &format!("{words} --nbd nbd.sock"));
    let mut client = Nbd::connect(&room.file("nbd.sock")).unwrap();
    check(&mut client, &model, &mut random);
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

/// Times and names of a file say nothing about its contents.
#[test]
fn an_image_with_another_time_mode_and_name_keeps_answered_writes() {
    for kind in ["vhd", "qcow2"] {
        let room = Room::new();
        let words = make(&room, kind);
        let (mut model, mut random) = (vec![0; usize::try_from(BLOCKS).unwrap()], Rng::with_seed(1));
        for (life, hours) in [(0, 1i64), (1, -24)] {
            live_and_die(&room, &words, &mut model, &mut random, life);
            let image = std::fs::File::options().write(true).open(room.file("a.img")).unwrap();
            let now = std::time::SystemTime::now();
            let shift = std::time::Duration::from_secs(hours.unsigned_abs() * 3600);
            image.set_modified(if hours > 0 { now + shift } else { now - shift }).unwrap();
            std::fs::rename(room.file("a.img"), room.file("b.img")).unwrap();
            std::fs::hard_link(room.file("b.img"), room.file("a.img")).unwrap();
            std::fs::remove_file(room.file("b.img")).unwrap();
        }
        live_and_die(&room, &words, &mut model, &mut random, 2);
    }
}

/// Restored in place, with its old modification time, as by `cp -p` and backups: the log belongs to a later state.
#[test]
fn a_copy_restored_in_place_is_served_as_it_was() {
    for (kind, is_used) in [("vhd", false), ("vhd", true), ("qcow2", false), ("qcow2", true)] {
        let room = Room::new();
        let words = make(&room, kind);
        let (mut model, mut random) = (vec![0; usize::try_from(BLOCKS).unwrap()], Rng::with_seed(1));
        if is_used {
            // The copy has the stamp of an earlier process.
            live_and_die(&room, &words, &mut model, &mut random, 0);
            assert_eq!(Disk::serve(&room, &format!("{words} --nbd nbd.sock")).stop().0, Some(0));
        }
        let (copy, old) = (room.read("a.img"), model.clone());
        let modified = std::fs::metadata(room.file("a.img")).unwrap().modified().unwrap();
        live_and_die(&room, &words, &mut model, &mut random, 1);
        std::fs::write(room.file("a.img"), copy).unwrap();
        std::fs::File::options().write(true).open(room.file("a.img")).unwrap().set_modified(modified).unwrap();
        room.done(&format!("image convert {kind}:a.img raw:b"));
        let found = room.read("b");
        for (block, version) in old.iter().enumerate() {
            assert!(found[block * BLOCK..(block + 1) * BLOCK] == content(*version), "block {block} of {kind}");
        }
        let disk = Disk::serve(&room, &format!("{words} --nbd nbd.sock"));
        let (code, said) = disk.stop();
        assert!(code == Some(0) && said.contains("is not used"), "{said}");
        room.sound(&format!("{kind}:a.img"));
    }
}

/// The killed process was of a version with another log layout.
#[test]
fn a_log_of_another_version_is_refused_and_kept() {
    let room = Room::new();
    let words = make(&room, "qcow2");
    let (mut model, mut random) = (vec![0; usize::try_from(BLOCKS).unwrap()], Rng::with_seed(1));
    live_and_die(&room, &words, &mut model, &mut random, 0);
    let set_version = |version: u64| room.write_redo_log("a.img", 8, &version.to_ne_bytes());
    set_version(3);
    let before = (room.read("a.img"), room.redo_log("a.img"));
    for refused in [
        "serve qcow2:a.img --nbd other.sock",
        "image check qcow2:a.img",
        "image convert qcow2:a.img raw:b",
        "image resize qcow2:a.img --size 80M",
    ] {
        let said = room.tapline(refused);
        assert_eq!(said.code, Some(4), "{refused}: {said:?}");
        assert!(said.err.contains("of version 3") && said.err.contains(".redo"), "{refused}: {said:?}");
    }
    assert!((room.read("a.img"), room.redo_log("a.img")) == before, "something was written");
    set_version(2);
    live_and_die(&room, &words, &mut model, &mut random, 1);
}

/// Whatever opens the image sees the completed writes.
#[test]
fn a_job_sees_acknowledged_writes() {
    for kind in ["vhd", "qcow2"] {
        let room = Room::new();
        let words = make(&room, kind);
        let (mut model, mut random) = (vec![0; usize::try_from(BLOCKS).unwrap()], Rng::with_seed(1));
        live_and_die(&room, &words, &mut model, &mut random, 0);
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
