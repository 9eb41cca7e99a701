//! Storage that requires 4096-byte alignment for O_DIRECT, used by guests with 512-byte sectors and by formats with
//! metadata as small: all data is stored at its offset, and other programs can read it.

use std::fs;
use std::os::unix::fs::FileExt;

use fastrand::Rng;
use rustix::process::Signal;
use serde_json::json;
use testkit::nbd::Command;

use crate::tool::control::Control;
use crate::tool::guest::Guest;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::large::Large;
use crate::tool::nbd::{Nbd, Versions};
use crate::tool::served::Disk;
use crate::tool::{Room, from_environment};

const SECTOR: u64 = 512;

/// Not a multiple of 4096.
const LEN: u64 = (12 << 20) + 3 * SECTOR;

/// File systems, caches and engines.
const STORAGES: [(&str, &str, &str); 4] = [
    ("mkfs.ext4 -q -b 4096", "none", "uring"),
    ("mkfs.xfs -q -s size=4096", "none", "uring"),
    ("mkfs.xfs -q -s size=4096", "none", "aio"),
    ("mkfs.ext4 -q -b 4096", "writeback", "uring"),
];

/// A disk that is written, and its expected contents.
struct Written<'a> {
    room: &'a Room,
    model: Vec<u8>,
    random: Rng,
}

impl Written<'_> {
    fn new(room: &Room) -> Written<'_> {
        let seed = from_environment("TAPLINE_SEED").unwrap_or(1);
        println!("TAPLINE_SEED={seed}");
        Written { room, model: vec![0; usize::try_from(LEN).unwrap()], random: Rng::with_seed(seed) }
    }

    fn sector(&mut self) -> u64 {
        let sectors = LEN / SECTOR;
        match self.random.u64(..8) {
            0 => self.random.u64(..sectors),
            1 => sectors - 1 - self.random.u64(..20),
            // Most overlap units of other writes in flight.
            _ => 4000 + self.random.u64(..64),
        }
    }

    /// Writes many small, disjoint pieces at the same time.
    fn burst(&mut self, guest: &mut Nbd) {
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for _ in 0..40 {
            let (at, long) = (self.sector(), self.random.u64(..4) == 0);
            let count = (1 + self.random.u64(..if long { 40 } else { 3 })).min(LEN / SECTOR - at);
            if taken.iter().any(|&(from, to)| from < at + count && at < to) {
                continue;
            }
            taken.push((at, at + count));
            let byte = self.random.u8(1..);
            let range = usize::try_from(at * SECTOR).unwrap()..usize::try_from((at + count) * SECTOR).unwrap();
            self.model[range.clone()].fill(byte);
            guest.send(Command::Write, at * SECTOR, count * SECTOR, &self.model[range]).unwrap();
        }
        taken.iter().for_each(|_| drop(guest.answer(0).unwrap()));
        let (at, count) = (self.sector(), 1 + self.random.u64(..3));
        let count = count.min(LEN / SECTOR - at);
        let range = usize::try_from(at * SECTOR).unwrap()..usize::try_from((at + count) * SECTOR).unwrap();
        guest.ask(Command::Zeroes, at * SECTOR, count * SECTOR, &[]).unwrap();
        self.model[range].fill(0);
    }

    fn check(&mut self, guest: &mut Nbd) {
        for _ in 0..40 {
            let at = self.sector();
            let count = (1 + self.random.u64(..20)).min(LEN / SECTOR - at);
            let range = usize::try_from(at * SECTOR).unwrap()..usize::try_from((at + count) * SECTOR).unwrap();
            let found = guest.read(at * SECTOR, range.len()).unwrap();
            assert!(found == self.model[range], "{count} sectors at {at} hold something else");
        }
    }

    /// Serves the disk, writes, kills it, and continues.
    fn live(&mut self, words: &str) {
        let words = format!("{words} --nbd ./nbd.sock");
        for life in 0..3 {
            let mut disk = Disk::serve(self.room, &words);
            let mut guest = Nbd::connect(&self.room.file("nbd.sock")).unwrap();
            assert_eq!(guest.size, LEN);
            self.check(&mut guest);
            for _ in 0..6 {
                self.burst(&mut guest);
                self.check(&mut guest);
                if self.random.bool() {
                    guest.flush().unwrap();
                }
            }
            if life < 2 {
                disk.signal(Signal::KILL);
                disk.child.wait().unwrap();
            } else {
                drop(guest);
                let (code, said) = disk.stop();
                assert_eq!(code, Some(0), "{said}");
            }
        }
    }

    fn save(&self) {
        fs::write(self.room.file("model"), &self.model).unwrap();
    }
}

/// Returns the format's name in other programs.
fn theirs(format: &str) -> &str {
    if format == "vhd" { "vpc" } else { format }
}

/// Tests an image that was created elsewhere, on one of these file systems.
fn survives(format: &str, options: &str, serve: &str) {
    let make = |room: &Room| drop(room.done(&format!("image create {format}:made --size {LEN} {options}")));
    survives_made(format, &make, serve);
}

fn survives_made(format: &str, make: &dyn Fn(&Room), serve: &str) {
    for (mkfs, cache, engine) in STORAGES {
        println!("{format} on {mkfs}, {cache}, {engine}");
        let Some(large) = Large::file_system(mkfs) else { return };
        let room = &large.room;
        make(room);
        fs::copy(room.file("made"), room.file("large/a")).unwrap();
        let before = fs::metadata(room.file("made")).unwrap().len();
        let mut written = Written::new(room);
        written.live(&format!("{format}:large/a --cache {cache} --io-engine {engine} {serve}"));
        written.save();
        let after = fs::metadata(room.file("large/a")).unwrap().len();
        if before >= LEN {
            assert_eq!(after, before, "the file has another length");
        }
        if format == "vhd" {
            let mut footer = [0; 8];
            fs::File::open(room.file("large/a")).unwrap().read_exact_at(&mut footer, after - 512).unwrap();
            assert_eq!(&footer, b"conectix", "the footer is not at the end");
        }
        if format != "raw" {
            room.sound_and_closed(&format!("{format}:large/a"));
        }
        // Read with O_DIRECT, and written with it to a raw file whose size is not aligned.
        room.done(&format!("image compare {format}:large/a raw:model --cache {cache}"));
        room.done(&format!("image convert {format}:large/a raw:large/b --cache {cache}"));
        large.take("a");
        large.take("b");
        assert!(room.read("b") == written.model, "the copy holds something else");
        room.tool("qemu-img", &format!("compare -f raw -F {} model a", theirs(format)));
        if format == "qcow2" {
            room.tool("qemu-img", "check -f qcow2 a");
        }
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_raw_disk() {
    survives("raw", "", "--logical-block-size 512");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_qcow2_disk() {
    survives("qcow2", "", "");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_qcow2_disk_of_small_clusters() {
    let make = |options: &str, room: &Room| {
        drop(room.tool("qemu-img", &format!("create -q -f qcow2 -o {options} made {LEN}")));
    };
    survives_made("qcow2", &|room| make("cluster_size=512", room), "");
    survives_made("qcow2", &|room| make("cluster_size=2k,refcount_bits=8", room), "");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_vhd_disk() {
    survives("vhd", "", "");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_vhd_disk_of_small_blocks() {
    survives("vhd", "--block-size 512K", "");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_fixed_vhd_disk() {
    survives("vhd", "--fixed", "");
}

/// A process that may neither open its files nor use many system calls: it sets the end of the file through its
/// descriptor.
#[test]
fn a_confined_disk_with_passed_files() {
    let Some(large) = Large::file_system(STORAGES[0].0) else { return };
    let room = &large.room;
    room.done(&format!("image create vhd:large/a --size {LEN}"));
    let words = format!("serve vhd:{NOWHERE}/large/a --nbd {NOWHERE}/nbd.sock --confine");
    let files = [Handed::open(room, "large/a", true), Handed::redo_log(room, "large/a")];
    let disk = Hand::to(&words).files(&files).listen(room, "nbd", "nbd.sock").serve();
    let mut guest = Nbd::connect(&room.file("nbd.sock")).unwrap();
    let mut written = Written::new(room);
    for _ in 0..10 {
        written.burst(&mut guest);
        written.check(&mut guest);
        guest.flush().unwrap();
    }
    drop(guest);
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    // The lock belongs to the open file description, which this process has too.
    drop(files);
    written.save();
    room.sound_and_closed("vhd:large/a");
    room.done("image compare vhd:large/a raw:model --cache none");
}

/// Returns the block sizes that the server reports to clients.
fn shown(room: &Room) -> String {
    let told = room.tool("qemu-nbd", &format!("--list --socket {}", room.file("nbd.sock").display()));
    let line = told.lines().find(|line| line.contains("min block")).unwrap_or_else(|| panic!("{told}"));
    line.trim().to_owned()
}

#[test]
fn a_raw_disk_keeps_its_sectors_under_a_snapshot_and_grows_and_is_merged() {
    let Some(large) = Large::file_system(STORAGES[1].0) else { return };
    let room = &large.room;
    room.done("image create raw:large/a --size 64M");
    let serve = |words: &str| Disk::serve(room, &format!("{words} --nbd ./nbd.sock --control ./control.sock"));
    let work = |versions: Versions| {
        let path = room.file("nbd.sock");
        let guest = Guest::start(move || Nbd::connect(&path).unwrap(), versions, Rng::with_seed(3));
        guest.work(300);
        guest
    };
    let disk = serve("raw:large/a");
    assert_eq!(shown(room), "min block: 4096");
    let guest = work(Versions::new(96, (512 << 10) + 4096));
    let mut control = Control::connect(&room.file("control.sock"));
    let leaf = format!("qcow2:{}", room.file("large/b").display());
    control.done(&json!({ "verb": "snapshot", "to": leaf }));
    guest.work(300);
    let mut versions = guest.stop();
    drop(control);
    assert_eq!(disk.stop().0, Some(0));
    // The child created on it works for the same guest.
    let disk = serve("qcow2:large/b --parent raw:large/a");
    assert_eq!(shown(room), "min block: 4096");
    versions.check(&mut Nbd::connect(&room.file("nbd.sock")).unwrap());
    let guest = work(versions);
    let mut control = Control::connect(&room.file("control.sock"));
    control.done(&json!({ "verb": "resize", "size": 80 << 20 }));
    control.done(&json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
    let mut versions = guest.stop();
    let mut end = Nbd::connect(&room.file("nbd.sock")).unwrap();
    end.write((80 << 20) - 4096, &[9; 4096]).unwrap();
    end.flush().unwrap();
    versions.check(&mut end);
    drop((end, control));
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    let _disk = serve("raw:large/a --logical-block-size 512");
    assert_eq!(shown(room), "min block: 512");
    versions.check(&mut Nbd::connect(&room.file("nbd.sock")).unwrap());
}

#[test]
fn a_raw_disk_of_a_partial_sector_can_be_served_in_sectors_of_512() {
    let Some(large) = Large::file_system(STORAGES[1].0) else { return };
    let room = &large.room;
    room.done(&format!("image create raw:large/a --size {LEN}"));
    let said = room.tapline("serve raw:large/a --nbd ./nbd.sock");
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("4096-byte blocks") && said.err.contains("--logical-block-size 512"), "{said:?}");
}

/// Kernels have such loop devices since Linux 6.15 or so; no drive has such sectors.
#[test]
fn sectors_too_large_for_atomic_writes_are_refused() {
    let Some(large) = Large::device(64 << 20, "8192") else { return };
    let said = large.room.tapline(&format!("serve raw:{} --nbd ./nbd.sock", large.name));
    assert_eq!(said.code, Some(4), "{said:?}");
    assert!(said.err.contains("8192 bytes"), "{said:?}");
}
