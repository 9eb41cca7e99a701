//! Changed-block tracking of the daemon's disks, with real disk processes: what is named is compared with the blocks
//! that differ, after kills, restores and writes that nothing recorded.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{chain, io, nbd, plug, state, unplug, vbd};
use crate::harness::{ABORT_AT, Taplined, kill, start_with, wait_until};

pub const BLOCK: usize = 64 << 10;
pub const SIZE: u64 = 32 << 20;

/// A change of files behind the daemon's back.
type Change<'a> = &'a dyn Fn(&Bed);

/// A plugged disk of a daemon, whose changes are recorded.
pub struct Bed {
    pub daemon: Taplined,
    sr: String,
    pub vdi: String,
    pub vbd: String,
}

pub fn bed(format: &str, settings: &str) -> Bed {
    let daemon = start_with(settings, &[]);
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": SIZE, "format": format });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = vbd(&daemon, &vdi, "nbd");
    plug(&daemon, &vbd);
    let bed = Bed { daemon, sr, vdi, vbd };
    bed.verb(&bed.vdi, "cbt-enable");
    bed
}

impl Bed {
    pub fn verb(&self, vdi: &str, verb: &str) -> Value {
        self.daemon.done(self.daemon.post(&format!("/vdis/{vdi}/{verb}"), json!({})))
    }

    pub fn snapshot(&self) -> String {
        self.verb(&self.vdi, "snapshot")["uuid"].as_str().unwrap().into()
    }

    pub fn destroy(&self, vdi: &str) {
        self.daemon.done(self.daemon.delete(&format!("/vdis/{vdi}")));
        self.daemon.settle();
    }

    /// Fills blocks of the plugged disk.
    pub fn write(&self, blocks: &[usize], byte: u8) {
        let write = |at: &usize| format!("write -P {byte} {}k 64k", at * 64);
        let mut commands: Vec<String> = blocks.iter().map(write).collect();
        commands.push("flush".into());
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        let (written, said) = io(&nbd(&self.daemon, &self.vbd), &commands);
        assert!(written, "{said}\n{}", self.daemon.log());
    }

    pub fn tracking(&self) -> Value {
        self.daemon.get(&format!("/vdis/{}", self.vdi)).1["cbt"].clone()
    }

    /// The map in use.
    pub fn map(&self) -> String {
        let tracking = self.tracking();
        let last = tracking["maps"].as_array().and_then(|maps| maps.last());
        last.unwrap_or_else(|| panic!("{tracking}\n{}", self.daemon.log()))["uuid"].as_str().unwrap().into()
    }

    pub fn ask(&self, from: &str, to: &str) -> (u16, Value) {
        self.daemon.get(&format!("/vdis/{to}/changes?from={from}"))
    }

    /// The blocks that are named.
    #[track_caller]
    pub fn changed(&self, from: &str, to: &str) -> BTreeSet<usize> {
        let (status, said) = self.ask(from, to);
        assert_eq!(status, 200, "{said}\n{}", self.daemon.log());
        let (_, xapi) = self.daemon.get(&format!("/vdis/{to}/changes?from={from}&format=xapi"));
        let mut named = BTreeSet::new();
        for extent in said["extents"].as_array().unwrap() {
            let number = |key: &str| usize::try_from(extent[key].as_u64().unwrap()).unwrap();
            named.extend(number("start") / BLOCK..(number("start") + number("length")).div_ceil(BLOCK));
        }
        let bitmap = decoded(xapi["bitmap"].as_str().unwrap_or_else(|| panic!("{xapi}")));
        let in_bitmap = (0..bitmap.len() * 8).filter(|block| bitmap[block / 8] >> (7 - block % 8) & 1 == 1);
        assert_eq!(in_bitmap.collect::<BTreeSet<_>>(), named);
        named
    }

    /// Why changes are not known.
    #[track_caller]
    fn refused(&self, from: &str, to: &str) -> String {
        let (status, problem) = self.ask(from, to);
        assert!((400..500).contains(&status), "{status} {problem}");
        assert!(problem["advice"].as_str().is_some_and(|advice| advice.contains("full backup")), "{problem}");
        problem["detail"].as_str().unwrap().into()
    }

    /// The blocks in which two snapshots differ.
    fn differ(&self, one: &str, other: &str) -> BTreeSet<usize> {
        let [one, other] = [one, other].map(|vdi| {
            let path = self.daemon.room().join(format!("{vdi}.raw"));
            if !path.exists() {
                let asked = json!({ "path": path, "format": "raw" });
                self.daemon.done(self.daemon.post(&format!("/vdis/{vdi}/export"), asked));
            }
            fs::read(path).unwrap()
        });
        let len = one.len().max(other.len()).div_ceil(BLOCK);
        let block = |bytes: &[u8], at: usize| {
            let mut all = bytes.get(at * BLOCK..bytes.len().min((at + 1) * BLOCK)).unwrap_or_default().to_vec();
            all.resize(BLOCK, 0);
            all
        };
        (0..len).filter(|at| block(&one, *at) != block(&other, *at)).collect()
    }

    pub fn directory(&self) -> PathBuf {
        self.daemon.room().join("vms")
    }

    pub fn leaf(&self) -> PathBuf {
        self.directory().join(&chain(&self.daemon, &self.vdi)[0].1)
    }

    pub fn map_path(&self, map: &str) -> PathBuf {
        self.directory().join(format!("{map}.changes"))
    }

    fn pid(&self) -> u64 {
        self.daemon.get(&self.vbd).1["pid"].as_u64().unwrap()
    }

    fn wait_until_served(&self, not_by: u64) {
        wait_until("another process serves the disk", || {
            let vbd = self.daemon.get(&self.vbd).1;
            vbd["state"] == "plugged" && vbd["pid"].as_u64().is_some_and(|pid| pid != not_by)
        });
    }

    /// Unplugs, changes something, and plugs.
    fn while_halted(&self, change: impl FnOnce()) {
        unplug(&self.daemon, &self.vbd);
        change();
        plug(&self.daemon, &self.vbd);
    }

    /// No file is there that the catalogue does not know.
    pub fn nothing_is_left(&self) {
        self.daemon.settle();
        let catalogue = self.daemon.catalogue();
        let mut files = catalogue.prepare("SELECT file FROM image WHERE state <> 'no-data'").unwrap();
        let known: Vec<String> = files.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        let vdis = self.daemon.get("/vdis").1;
        let maps = vdis.as_array().unwrap().iter().filter_map(|vdi| vdi["cbt"]["maps"].as_array()).flatten();
        let maps: Vec<String> = maps.map(|map| format!("{}.changes", map["uuid"].as_str().unwrap())).collect();
        let expected: BTreeSet<String> = known.into_iter().chain(maps).collect();
        let files = || -> BTreeSet<String> {
            let names = fs::read_dir(self.directory()).unwrap();
            let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| !name.starts_with('.')).collect()
        };
        wait_until("maps that are not needed are removed", || files() == expected);
    }
}

fn decoded(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let mut bits = digits.iter().flat_map(|digit| (0..6).rev().map(move |bit| digit >> bit & 1)).collect::<Vec<u8>>();
    bits.truncate(bits.len() / 8 * 8);
    bits.chunks(8).map(|bits| bits.iter().fold(0, |byte, bit| byte << 1 | bit)).collect()
}

pub fn copy_with_attributes(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}

#[test]
fn exactly_the_blocks_that_differ_are_named() {
    for (format, settings) in [("qcow2", "disk-user-range = \"61000-61999\""), ("vhd", "")] {
        let bed = bed(format, settings);
        bed.write(&[0, 1, 40], 1);
        let first = bed.snapshot();
        assert_eq!(bed.ask(&bed.vdi, &first).0, 400, "backwards");
        bed.write(&[1, 5, 6, 300], 2);
        let second = bed.snapshot();
        assert_eq!(bed.changed(&first, &second), BTreeSet::from([1, 5, 6, 300]));
        assert_eq!(bed.changed(&first, &second), bed.differ(&first, &second));
        bed.write(&[7], 3);
        assert!(bed.changed(&second, &bed.vdi).contains(&7));
        assert!(bed.changed(&first, &bed.vdi).is_superset(&BTreeSet::from([1, 5, 6, 7, 300])));
        // Halted, and plugged again.
        unplug(&bed.daemon, &bed.vbd);
        assert_eq!(bed.changed(&second, &bed.vdi), BTreeSet::from([7]));
        let map = bed.map();
        plug(&bed.daemon, &bed.vbd);
        bed.write(&[8], 4);
        // A restart of the daemon, an upgrade of the process, and a larger disk.
        let mut bed = bed;
        bed.daemon.restart();
        bed.write(&[9], 5);
        bed.daemon.done(bed.daemon.post(&format!("{}/upgrade", bed.vbd), json!({})));
        bed.write(&[10], 6);
        let larger = json!({ "size": SIZE * 2 });
        bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), larger));
        bed.write(&[900], 7);
        assert_eq!(bed.map(), map);
        let third = bed.snapshot();
        let named = bed.changed(&second, &third);
        assert_eq!(named, BTreeSet::from([7, 8, 9, 10, 900]), "{}", bed.daemon.log());
        assert_eq!(named, bed.differ(&second, &third));
        assert_eq!(bed.changed(&first, &third), bed.differ(&first, &third));
        // The interval of a destroyed snapshot stays part of the changes.
        bed.destroy(&second);
        assert_eq!(bed.changed(&first, &third), bed.differ(&first, &third));
        assert!(bed.tracking()["ended"].is_null(), "{}", bed.tracking());
        bed.nothing_is_left();
        bed.destroy(&first);
        bed.nothing_is_left();
        bed.verb(&bed.vdi, "cbt-disable");
        bed.nothing_is_left();
        assert_eq!(bed.tracking()["enabled"], false);
    }
}

#[test]
fn kills_name_too_much_at_most_and_keep_the_map() {
    let mut bed = bed("qcow2", "disk-user-range = \"62000-62999\"");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[3, 100], 2);
    let map = bed.map();
    for (round, kills) in [(0, "disk"), (1, "daemon"), (2, "both")] {
        let pid = bed.pid();
        if kills != "disk" {
            bed.daemon.kill();
        }
        if kills != "daemon" {
            kill(&pid);
        }
        if kills != "disk" {
            bed.daemon.restart();
        }
        if kills != "daemon" {
            bed.wait_until_served(pid);
        }
        bed.write(&[200 + round], 3);
        assert_eq!(bed.map(), map, "{kills}: {}\n{}", bed.tracking(), bed.daemon.log());
    }
    let second = bed.snapshot();
    let (named, differ) = (bed.changed(&first, &second), bed.differ(&first, &second));
    assert_eq!(differ, BTreeSet::from([3, 100, 200, 201, 202]));
    assert!(named.is_superset(&differ), "{named:?}");
    // The map of the second snapshot may not be sealed yet, or any more.
    bed.write(&[7], 6);
    let (third, pid) = (bed.snapshot(), bed.pid());
    kill(&pid);
    bed.wait_until_served(pid);
    assert!(bed.changed(&second, &third).is_superset(&bed.differ(&second, &third)));
    assert!(bed.changed(&first, &third).is_superset(&bed.differ(&first, &third)));
    assert!(bed.tracking()["ended"].is_null(), "{}", bed.tracking());
}

#[test]
fn what_was_not_recorded_is_refused_and_the_machine_starts() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let mut first = bed.snapshot();
    // Each change, and a word of the reason.
    let qemu_io = |bed: &Bed| {
        let leaf = bed.leaf();
        let done =
            Command::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 9 1M 64k"]).arg(&leaf).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let deleted = |bed: &Bed| fs::remove_file(bed.map_path(&bed.map())).unwrap();
    let copied = |bed: &Bed| {
        let leaf = bed.leaf();
        let other = leaf.with_extension("other");
        copy_with_attributes(&leaf, &other);
        fs::rename(&other, &leaf).unwrap();
    };
    let served = |bed: &Bed| {
        let chain = chain(&bed.daemon, &bed.vdi);
        let names = chain.iter().map(|(format, file)| format!("{format}:{}", bed.directory().join(file).display()));
        let mut command = Command::new(crate::harness::disk_program());
        command.args(["image", "resize", "--size", &SIZE.to_string(), "--accept-changed-parent"]);
        for (depth, name) in names.enumerate() {
            if depth > 0 { command.arg("--parent") } else { &mut command }.arg(name);
        }
        let done = command.output();
        assert!(done.as_ref().is_ok_and(|done| done.status.success()), "{done:?}");
    };
    let cases: [(Change<'_>, &str); 4] = [
        (&qemu_io, "changed after the map was closed"),
        (&deleted, "missing"),
        (&copied, "copy"),
        (&served, "without recording"),
    ];
    for (change, reason) in cases {
        let before = bed.map();
        bed.while_halted(|| change(&bed));
        assert_ne!(bed.map(), before, "{reason}");
        let said = bed.refused(&first, &bed.vdi);
        assert!(said.contains(reason), "{reason}: {said}");
        assert!(bed.tracking()["ended"].as_str().unwrap().contains(reason), "{}", bed.tracking());
        // A new chain of backups.
        first = bed.snapshot();
        bed.write(&[30], 2);
        let next = bed.snapshot();
        assert!(bed.changed(&first, &next).is_superset(&bed.differ(&first, &next)));
        first = next;
    }
    // An older copy of the map.
    let (map, saved) = (bed.map_path(&bed.map()), bed.daemon.room().join("saved"));
    unplug(&bed.daemon, &bed.vbd);
    copy_with_attributes(&map, &saved);
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[31], 2);
    bed.while_halted(|| copy_with_attributes(&saved, &map));
    assert!(bed.refused(&first, &bed.vdi).contains("older copy"));
    // Of a map that is in use.
    let (first, map) = (bed.snapshot(), bed.map_path(&bed.map()));
    let copy = map.with_extension("copy");
    copy_with_attributes(&map, &copy);
    bed.write(&[32], 2);
    fs::rename(&copy, &map).unwrap();
    assert!(bed.refused(&first, &bed.vdi).contains("not the one in which the running disk records"));
}

#[test]
fn a_revert_ends_the_map_and_snapshots_of_a_halted_disk_do_not() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    unplug(&bed.daemon, &bed.vbd);
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), json!({ "snapshot": first })));
    assert!(bed.refused(&first, &bed.vdi).contains("reverted"));
    plug(&bed.daemon, &bed.vbd);
    assert!(bed.refused(&first, &bed.vdi).contains("reverted"));
    // Snapshots of a disk that is not plugged.
    let second = bed.snapshot();
    bed.write(&[2], 3);
    unplug(&bed.daemon, &bed.vbd);
    let third = bed.snapshot();
    assert_eq!(bed.changed(&second, &third), BTreeSet::from([2]));
    assert_eq!(bed.changed(&third, &bed.vdi), BTreeSet::new());
    let fourth = bed.snapshot();
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[3], 4);
    let fifth = bed.snapshot();
    assert_eq!(bed.changed(&fourth, &fifth), BTreeSet::from([3]));
    assert_eq!(bed.changed(&second, &fifth), BTreeSet::from([2, 3]));
    // Of one to which another program has written.
    unplug(&bed.daemon, &bed.vbd);
    let leaf = bed.leaf();
    let done = Command::new("qemu-io").args(["-f", "qcow2", "-c", "write -P 9 1M 64k"]).arg(&leaf).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let sixth = bed.snapshot();
    assert!(bed.refused(&fifth, &sixth).contains("no map"));
    assert!(bed.refused(&sixth, &bed.vdi).contains("no map"));
    plug(&bed.daemon, &bed.vbd);
    let third = bed.snapshot();
    bed.write(&[3], 4);
    assert!(bed.changed(&third, &bed.vdi).contains(&3));
    assert!(bed.refused(&second, &third).contains("not known"));
    // A clone begins without, and ends nothing.
    let clone: String = bed.verb(&bed.vdi, "clone")["uuid"].as_str().unwrap().into();
    assert!(bed.daemon.get(&format!("/vdis/{clone}")).1["cbt"].is_null());
    bed.write(&[4], 5);
    assert!(bed.changed(&third, &bed.vdi).is_superset(&BTreeSet::from([3, 4])));
    bed.nothing_is_left();
}

/// A copy of a map that was made while its disk was served has the same session as the map.
#[test]
fn an_older_copy_of_the_map_of_an_ended_interval_is_refused() {
    let bed = bed("qcow2", "");
    let first = bed.snapshot();
    bed.write(&[1], 2);
    let map = bed.map_path(&bed.map());
    let copy = map.with_extension("copy");
    copy_with_attributes(&map, &copy);
    bed.write(&[2], 3);
    let second = bed.snapshot();
    assert!(bed.changed(&first, &second).contains(&2));
    fs::rename(&copy, &map).unwrap();
    assert!(bed.refused(&first, &second).contains("nothing shows that its file is not an older copy"));
    // One whose interval ends while it is not plugged.
    bed.write(&[3], 4);
    let map = bed.map_path(&bed.map());
    copy_with_attributes(&map, &copy);
    bed.write(&[4], 5);
    unplug(&bed.daemon, &bed.vbd);
    let third = bed.snapshot();
    assert!(bed.changed(&second, &third).contains(&4));
    fs::rename(&copy, &map).unwrap();
    assert!(bed.refused(&second, &third).contains("nothing shows that its file is not an older copy"));
}

/// The mark in its image is gone with the image.
#[test]
fn the_map_of_a_snapshot_of_a_halted_disk_outlives_its_data() {
    let bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    unplug(&bed.daemon, &bed.vbd);
    let second = bed.snapshot();
    bed.verb(&second, "data-destroy");
    assert!(bed.changed(&first, &bed.vdi).contains(&1));
    let third = bed.snapshot();
    bed.destroy(&third);
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[2], 3);
    let fourth = bed.snapshot();
    assert_eq!(bed.changed(&second, &fourth), BTreeSet::from([2]));
    assert_eq!(bed.changed(&first, &fourth), BTreeSet::from([1, 2]));
    // A clone ends an interval, too, and leaves no image that has its mark.
    unplug(&bed.daemon, &bed.vbd);
    bed.verb(&bed.vdi, "clone");
    plug(&bed.daemon, &bed.vbd);
    bed.write(&[3], 4);
    let fifth = bed.snapshot();
    assert_eq!(bed.changed(&second, &fifth), BTreeSet::from([2, 3]));
    bed.nothing_is_left();
}

#[test]
fn the_daemon_may_die_at_each_step() {
    for at in [
        "vdi-cbt-enable:map",
        "vdi-cbt-enable:map:after",
        "vdi-cbt-enable:record:after",
        "vdi-cbt-disable:record:after",
        "vdi-cbt-disable:end:after",
        "vdi-cbt-disable:remove:after",
        "vdi-snapshot:leaf:after",
        "vdi-snapshot:record:after",
        "vdi-snapshot:seal:after",
    ] {
        let mut bed = bed("qcow2", "");
        if at.starts_with("vdi-cbt-enable") {
            bed.verb(&bed.vdi, "cbt-disable");
        }
        bed.write(&[0], 1);
        let first = bed.snapshot();
        bed.write(&[1], 2);
        bed.daemon.restart_with(&[(ABORT_AT, at)]);
        let verb = at.split(':').next().unwrap().trim_start_matches("vdi-");
        bed.daemon.post_and_die(&format!("/vdis/{}/{verb}", bed.vdi), json!({}));
        bed.daemon.restart();
        bed.daemon.settle();
        bed.write(&[2], 3);
        match verb {
            "snapshot" => assert!(bed.changed(&first, &bed.vdi).is_superset(&BTreeSet::from([1, 2])), "{at}"),
            _ => {
                let enabled = bed.tracking()["enabled"] == true;
                assert_eq!(enabled, at == "vdi-cbt-enable:record:after", "{at}: {}", bed.tracking());
                if enabled {
                    let second = bed.snapshot();
                    bed.write(&[3], 3);
                    assert!(bed.changed(&second, &bed.vdi).contains(&3));
                } else {
                    bed.verb(&bed.vdi, "cbt-enable");
                }
            }
        }
        assert_eq!(state(&bed.daemon, &bed.vbd), "plugged");
        bed.nothing_is_left();
        let _ = &bed.sr;
    }
}

/// The catalogue was restored from a backup that was made before two snapshots; the disk kept running.
#[test]
fn a_restored_catalogue_never_names_too_little_nor_prevents_snapshots() {
    let mut bed = bed("qcow2", "");
    bed.write(&[0], 1);
    let first = bed.snapshot();
    bed.write(&[1], 2);
    let state = bed.daemon.room().join("state");
    let files = ["catalogue.db", "catalogue.db-wal", "catalogue.db-shm"].map(|name| state.join(name));
    assert!(bed.daemon.stop());
    let backup = files.clone().map(|path| fs::read(path).ok());
    bed.daemon.restart();
    bed.snapshot();
    bed.write(&[2], 3);
    bed.snapshot();
    bed.write(&[3], 4);
    assert!(bed.daemon.stop());
    fs::remove_file(state.join("catalogue.db.seal")).unwrap_or_default();
    for (path, bytes) in files.iter().zip(&backup) {
        fs::remove_file(path).unwrap_or_default();
        bytes.iter().for_each(|bytes| fs::write(path, bytes).unwrap());
    }
    // The repository's inventory would bring the catalogue up to date.
    fs::remove_file(bed.directory().join(".tapline-inventory.jsonl")).unwrap();
    bed.daemon.restart();
    bed.daemon.settle();
    let known = |bed: &Bed, named: &[usize]| {
        if bed.ask(&first, &bed.vdi).0 == 200 {
            assert!(bed.changed(&first, &bed.vdi).is_superset(&named.iter().copied().collect()));
        } else {
            bed.refused(&first, &bed.vdi);
        }
    };
    known(&bed, &[1, 2, 3]);
    let next = bed.snapshot();
    bed.write(&[4], 5);
    known(&bed, &[1, 2, 3, 4]);
    assert!(bed.changed(&next, &bed.vdi).contains(&4));
    bed.while_halted(|| ());
    bed.write(&[5], 5);
    let last = bed.snapshot();
    assert!(bed.changed(&next, &last).is_superset(&bed.differ(&next, &last)));
    // One from before tracking was enabled.
    bed.verb(&bed.vdi, "cbt-disable");
    assert!(bed.daemon.stop());
    let before = files.clone().map(|path| fs::read(path).ok());
    bed.daemon.restart();
    bed.verb(&bed.vdi, "cbt-enable");
    assert!(bed.daemon.stop());
    fs::remove_file(state.join("catalogue.db.seal")).unwrap_or_default();
    for (path, bytes) in files.iter().zip(&before) {
        fs::remove_file(path).unwrap_or_default();
        bytes.iter().for_each(|bytes| fs::write(path, bytes).unwrap());
    }
    fs::remove_file(bed.directory().join(".tapline-inventory.jsonl")).unwrap();
    bed.daemon.restart();
    assert_eq!(bed.tracking()["enabled"], false);
    bed.snapshot();
    bed.write(&[6], 5);
    bed.verb(&bed.vdi, "cbt-enable");
    let next = bed.snapshot();
    bed.write(&[7], 5);
    assert!(bed.changed(&next, &bed.vdi).contains(&7));
}

/// The image of a killed process is restored in place: its number and its mark are the same, and only the redo log
/// shows it. The first process that sees the log may not be the one that serves the disk.
#[test]
fn a_restore_in_place_is_found_out_whatever_fails_first() {
    for is_flushed in [false, true] {
        let mut bed = bed("qcow2", "disk-user-range = \"62000-62999\"");
        bed.write(&[0], 1);
        let first = bed.snapshot();
        bed.write(&[1], 2);
        let copy = fs::read(bed.leaf()).unwrap();
        let (path, parent) = (bed.leaf(), bed.directory().join(&chain(&bed.daemon, &bed.vdi)[1].1));
        let write = ["write -P 3 2M 64k", "flush"];
        let (written, said) = io(&nbd(&bed.daemon, &bed.vbd), &write[..1 + usize::from(is_flushed)]);
        assert!(written, "{said}");
        let pid = bed.pid();
        bed.daemon.kill();
        kill(&pid);
        fs::write(path, copy).unwrap();
        // The leaf is opened, and its parent cannot be.
        let whole = fs::read(&parent).unwrap();
        fs::File::options().write(true).open(&parent).unwrap().write_all_at(b"X", 0).unwrap();
        bed.daemon.restart();
        wait_until("two starts have failed", || bed.daemon.log().contains("pause=200ms"));
        assert!(bed.ask(&first, &bed.vdi).0 >= 400);
        fs::File::options().write(true).open(&parent).unwrap().write_all_at(&whole[..1], 0).unwrap();
        bed.wait_until_served(pid);
        assert!(bed.refused(&first, &bed.vdi).contains("not in the state in which"), "{}", bed.tracking());
        let second = bed.snapshot();
        bed.write(&[4], 4);
        let third = bed.snapshot();
        assert!(bed.changed(&second, &third).is_superset(&bed.differ(&second, &third)));
    }
}
