//! Incremental backups by the daemon, and snapshots whose data is destroyed. Each backup is restored and compared byte
//! by byte with the disk at its moment, whatever has happened to the disk, its maps, the target and the catalogue.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::backups::{create_target, register};
use crate::harness::disks::{chain, io, nbd, nothing_leaked, plug, unplug, vbd};
use crate::harness::{ABORT_AT, Taplined, kill, start_with, wait_until};

pub const BLOCK: usize = 64 << 10;
pub const SIZE: u64 = 64 << 20;

/// A plugged disk whose changes are recorded, and a target.
pub struct Bed {
    pub daemon: Taplined,
    pub sr: String,
    pub vdi: String,
    pub vbd: String,
    pub target: String,
    /// What the guest has written.
    pub model: RefCell<Vec<u8>>,
}

/// A backup, with the content that it must have.
pub struct Made {
    pub id: Value,
    pub content: Vec<u8>,
    /// Why everything was read.
    pub full: Option<String>,
    pub read: u64,
}

pub fn bed() -> Bed {
    let daemon = start_with("", &[]);
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": SIZE, "format": "qcow2" });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = vbd(&daemon, &vdi, "nbd");
    plug(&daemon, &vbd);
    create_target(&daemon.room().join("target"), &[]);
    let target = register(&daemon, &Value::Null);
    let model = RefCell::new(vec![0; usize::try_from(SIZE).unwrap()]);
    let bed = Bed { daemon, sr, vdi, vbd, target, model };
    bed.verb(&bed.vdi, "cbt-enable", json!({}));
    bed
}

impl Bed {
    pub fn verb(&self, vdi: &str, verb: &str, asked: Value) -> Value {
        self.daemon.done(self.daemon.post(&format!("/vdis/{vdi}/{verb}"), asked))
    }

    pub fn snapshot(&self) -> String {
        self.verb(&self.vdi, "snapshot", json!({}))["uuid"].as_str().unwrap().into()
    }

    pub fn show(&self, vdi: &str) -> Value {
        self.daemon.get(&format!("/vdis/{vdi}")).1
    }

    /// Fills blocks of the plugged disk.
    pub fn write(&self, blocks: impl IntoIterator<Item = usize>, byte: u8) {
        let mut commands = Vec::new();
        for at in blocks {
            commands.push(format!("write -P {byte} {}k 64k", at * 64));
            self.model.borrow_mut()[at * BLOCK..(at + 1) * BLOCK].fill(byte);
        }
        commands.push("flush".into());
        let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
        let (written, said) = io(&nbd(&self.daemon, &self.vbd), &commands);
        assert!(written, "{said}\n{}", self.daemon.log());
    }

    pub fn begin(&self) -> (u16, Value) {
        self.daemon.post(&format!("/vdis/{}/backup", self.vdi), json!({ "target": self.target }))
    }

    /// Backs the disk up as it is now.
    #[track_caller]
    pub fn back_up(&self) -> Made {
        let made = self.daemon.done(self.begin());
        self.made(&made)
    }

    pub fn made(&self, made: &Value) -> Made {
        assert_eq!(made["since"].is_null(), made["full"].is_string(), "{made}");
        Made {
            id: made["backup"].clone(),
            content: self.model.borrow().clone(),
            full: made["full"].as_str().map(Into::into),
            read: made["statistics"]["read"].as_u64().unwrap(),
        }
    }

    /// One that must read everything, for a reason with these words.
    #[track_caller]
    pub fn back_up_fully(&self, why: &str) -> Made {
        let made = self.back_up();
        let said = made.full.as_deref().unwrap_or_else(|| panic!("only changes were read, despite: {why}"));
        assert!(said.contains(why), "{said}");
        made
    }

    /// One that must read only changes.
    #[track_caller]
    pub fn back_up_changes(&self) -> Made {
        let made = self.back_up();
        assert_eq!(made.full, None, "{}", self.daemon.log());
        made
    }

    /// Compares each byte of a backup.
    #[track_caller]
    pub fn check(&self, made: &Made) {
        let asked = json!({ "backup": made.id, "sr": self.sr, "name": "restored" });
        let restored = self.daemon.post(&format!("/backup-targets/{}/restore", self.target), asked);
        let restored = self.daemon.done(restored)["uuid"].as_str().unwrap().to_owned();
        let path = self.daemon.room().join("restored.raw");
        self.verb(&restored, "export", json!({ "path": path, "format": "raw" }));
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        self.daemon.done(self.daemon.delete(&format!("/vdis/{restored}")));
        let block = |bytes: &[u8], at: usize| bytes[at * BLOCK..(at + 1) * BLOCK].to_vec();
        assert_eq!(bytes.len(), made.content.len());
        let wrong: Vec<usize> =
            (0..bytes.len() / BLOCK).filter(|at| block(&bytes, *at) != block(&made.content, *at)).collect();
        assert_eq!(wrong, Vec::<usize>::new(), "these blocks are not as they were at the moment of the backup");
    }

    /// The states that are kept for the next backups.
    pub fn bases(&self) -> Vec<Value> {
        let vdis = self.daemon.get("/vdis").1;
        vdis.as_array().unwrap().iter().filter(|vdi| vdi["cbt"]["base"].is_object()).cloned().collect()
    }

    /// Waits until no work is left, and nothing but these VDIs, bases, and files that the catalogue knows.
    #[track_caller]
    pub fn only(&self, vdis: usize, bases: usize) {
        self.daemon.settle();
        let catalogue = self.daemon.catalogue();
        wait_until("what was for the backup is gone", || {
            let left: i64 = catalogue.query_row("SELECT count(*) FROM backup_snapshot", [], |row| row.get(0)).unwrap();
            let all = self.daemon.get("/vdis").1.as_array().map_or(0, Vec::len);
            let now = (left, all, self.bases().len());
            if now != (0, vdis + bases, bases) {
                eprintln!("{now:?}: {}", self.daemon.get("/vdis").1);
            }
            now == (0, vdis + bases, bases) && self.daemon.get("/tasks?open=true").1 == json!([])
        });
        assert!(self.bases().iter().all(|base| base["state"] == "no-data"), "{:?}", self.bases());
        let mut files = catalogue.prepare("SELECT file FROM image WHERE state <> 'no-data'").unwrap();
        let known: Vec<String> = files.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        let vdis = self.daemon.get("/vdis").1;
        let maps = vdis.as_array().unwrap().iter().filter_map(|vdi| vdi["cbt"]["maps"].as_array()).flatten();
        let maps = maps.map(|map| format!("{}.changes", map["uuid"].as_str().unwrap()));
        let expected: BTreeSet<String> = known.into_iter().chain(maps).collect();
        let names = |directory: PathBuf| -> BTreeSet<String> {
            let names = fs::read_dir(directory).into_iter().flatten();
            let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| !name.starts_with('.')).collect()
        };
        wait_until("files that are not needed are removed", || names(self.directory()) == expected);
        assert_eq!(names(self.daemon.room().join("run/changes")), BTreeSet::new(), "a list of changes is left");
        nothing_leaked(&self.daemon);
    }

    pub fn directory(&self) -> PathBuf {
        self.daemon.room().join("vms")
    }

    pub fn while_halted(&self, change: impl FnOnce()) {
        unplug(&self.daemon, &self.vbd);
        change();
        plug(&self.daemon, &self.vbd);
    }

    pub fn space(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        let entries = fs::read_dir(self.directory()).unwrap();
        entries.map(|entry| entry.unwrap().metadata().map_or(0, |found| found.blocks() * 512)).sum()
    }
}

#[test]
fn a_backup_reads_only_what_has_changed_since_the_last_one() {
    let bed = bed();
    bed.write(0..800, 1);
    let first = bed.back_up_fully("no backup of the disk to this target");
    assert_eq!(first.read, 800 * BLOCK as u64);
    bed.only(1, 1);
    // 1 %.
    bed.write([3, 4, 5, 250, 400, 799, 800, 801, 1000, 1023], 2);
    let second = bed.back_up_changes();
    assert_eq!(second.read, 10 * BLOCK as u64);
    bed.only(1, 1);
    bed.write([5, 6], 3);
    let _kept = bed.snapshot();
    bed.write([7], 3);
    bed.while_halted(|| ());
    bed.write([8], 4);
    let third = bed.back_up_changes();
    assert!(third.read <= 5 * BLOCK as u64, "{}", third.read);
    bed.only(2, 1);
    let nothing = bed.back_up_changes();
    assert_eq!(nothing.read, 0);
    // Halted.
    unplug(&bed.daemon, &bed.vbd);
    let halted = bed.back_up_changes();
    bed.daemon.settle();
    plug(&bed.daemon, &bed.vbd);
    bed.write([9, 500], 5);
    let last = bed.back_up_changes();
    assert_eq!(last.read, 2 * BLOCK as u64);
    for made in [&first, &second, &third, &nothing, &halted, &last] {
        bed.check(made);
    }
    bed.only(2, 1);
}

#[test]
fn everything_is_read_on_request_and_only_changes_after_it() {
    let bed = bed();
    bed.write(0..100, 1);
    bed.back_up();
    bed.write([3], 2);
    let asked = json!({ "target": bed.target, "full": true });
    let made = bed.made(&bed.verb(&bed.vdi, "backup", asked));
    assert_eq!((made.full.as_deref(), made.read), (Some("a full backup was requested"), 100 * BLOCK as u64));
    bed.check(&made);
    bed.write([4], 3);
    let next = bed.back_up_changes();
    assert_eq!(next.read, BLOCK as u64);
    bed.check(&next);
    bed.only(1, 1);
}

#[test]
fn everything_is_read_when_the_changes_or_the_base_are_in_doubt() {
    type Disturb = fn(&Bed, &Made);
    let cases: [(&str, Disturb); 9] = [
        ("not known", |bed, _| {
            let snapshot = bed.snapshot();
            let then = bed.model.borrow().clone();
            bed.write([40, 41], 9);
            bed.back_up_changes();
            bed.while_halted(|| drop(bed.verb(&bed.vdi, "revert", json!({ "snapshot": snapshot }))));
            *bed.model.borrow_mut() = then;
        }),
        ("no longer on the target", |bed, made| {
            let target = format!("/backup-targets/{}", bed.target);
            bed.daemon.done(bed.daemon.post(&format!("{target}/remove-backups"), json!({ "backups": [made.id] })));
            bed.daemon.done(bed.daemon.post(&format!("{target}/prune"), json!({ "grace": 0 })));
        }),
        ("no backup of the disk", |bed, _| {
            bed.verb(&bed.vdi, "cbt-disable", json!({}));
            bed.write([44], 9);
            bed.verb(&bed.vdi, "cbt-enable", json!({}));
        }),
        // The target is replaced by an older copy of itself.
        ("no longer on the target", |bed, _| {
            let [target, copy] = ["target", "copy"].map(|name| bed.daemon.room().join(name));
            assert!(Command::new("cp").arg("-a").arg(&target).arg(&copy).status().unwrap().success());
            bed.write([45], 9);
            bed.back_up_changes();
            fs::remove_dir_all(&target).unwrap();
            fs::rename(&copy, &target).unwrap();
        }),
        ("another size", |bed, _| {
            bed.verb(&bed.vdi, "resize", json!({ "size": 2 * SIZE }));
            bed.model.borrow_mut().resize(usize::try_from(2 * SIZE).unwrap(), 0);
        }),
        ("another size", |bed, _| {
            bed.while_halted(|| drop(bed.verb(&bed.vdi, "resize", json!({ "size": 2 * SIZE }))));
            bed.model.borrow_mut().resize(usize::try_from(2 * SIZE).unwrap(), 0);
        }),
        // Somebody destroys the base.
        ("no backup of the disk", |bed, _| {
            let base = bed.bases()[0]["uuid"].as_str().unwrap().to_owned();
            bed.daemon.done(bed.daemon.delete(&format!("/vdis/{base}")));
        }),
        // The disk is replaced by an older copy of itself.
        ("not known", |bed, _| {
            let then = bed.model.borrow().clone();
            let leaf = || bed.directory().join(&chain(&bed.daemon, &bed.vdi)[0].1);
            let copy = bed.daemon.room().join("leaf");
            unplug(&bed.daemon, &bed.vbd);
            let file = leaf();
            assert!(Command::new("cp").arg("-a").arg(&file).arg(&copy).status().unwrap().success());
            plug(&bed.daemon, &bed.vbd);
            bed.write([46], 9);
            unplug(&bed.daemon, &bed.vbd);
            assert!(Command::new("cp").arg("-a").arg(&copy).arg(&file).status().unwrap().success());
            plug(&bed.daemon, &bed.vbd);
            *bed.model.borrow_mut() = then;
        }),
        // A map is lost after it was sealed.
        ("its file is missing", |bed, _| {
            let snapshot = bed.snapshot();
            let maps = bed.show(&snapshot)["cbt"]["maps"].clone();
            let map = maps[0]["uuid"].as_str().unwrap();
            fs::remove_file(bed.directory().join(format!("{map}.changes"))).unwrap();
        }),
    ];
    for (why, disturb) in cases {
        let bed = bed();
        bed.write(0..100, 1);
        bed.back_up();
        bed.write([7, 40], 2);
        let made = bed.back_up_changes();
        bed.write([8, 47], 3);
        disturb(&bed, &made);
        bed.write([9, 48], 4);
        let after = bed.back_up_fully(why);
        bed.check(&after);
        // From there on it continues, with the changes since.
        bed.write([10], 5);
        let more = bed.back_up();
        bed.check(&more);
        bed.write([11], 6);
        let last = bed.back_up_changes();
        assert!(last.read <= 2 * BLOCK as u64, "{why}: {}", last.read);
        bed.check(&last);
        bed.daemon.settle();
        assert_eq!(bed.bases().len(), 1, "{why}");
    }
}

#[test]
fn an_incremental_backup_may_be_killed_at_each_step() {
    let mut points: Vec<String> = Vec::new();
    for step in ["snapshot", "copy", "base", "remove"] {
        points.extend([format!("vdi-backup:{step}"), format!("vdi-backup:{step}:after")]);
    }
    for step in ["vdi-data-destroy:forget", "vdi-data-destroy:remove", "vdi-destroy:forget", "vdi-destroy:remove"] {
        points.extend([step.to_owned(), format!("{step}:after")]);
    }
    let mut bed = bed();
    bed.write(0..100, 1);
    let mut all = vec![bed.back_up()];
    bed.only(1, 1);
    for (nth, at) in points.iter().enumerate() {
        eprintln!("{at}");
        bed.write([nth, 50 + nth], 2);
        bed.daemon.restart_with(&[(ABORT_AT, at)]);
        bed.daemon.post_and_die(&format!("/vdis/{}/backup", bed.vdi), json!({ "target": bed.target }));
        bed.daemon.restart();
        bed.only(1, 1);
        bed.write([nth, 51 + nth], 3);
        let next = bed.back_up_changes();
        bed.check(&next);
        all.push(next);
    }
    bed.only(1, 1);
    all.iter().for_each(|made| bed.check(made));
}

#[test]
fn two_backups_of_a_disk_at_the_same_time_leave_one_right_base() {
    let bed = bed();
    bed.write(0..100, 1);
    bed.back_up();
    for round in 0..4 {
        bed.write([round, 90 - round], 2);
        let begun = [bed.begin(), bed.begin(), bed.begin()];
        let made: Vec<Made> = begun
            .into_iter()
            .filter(|(status, _)| *status == 202)
            .map(|(_, task)| bed.daemon.wait(&task))
            .filter(|task| task["state"] == "done")
            .map(|task| bed.made(&task["result"]))
            .collect();
        assert!(!made.is_empty(), "{}", bed.daemon.log());
        made.iter().for_each(|made| bed.check(made));
        bed.daemon.settle();
        bed.write([round + 10], 3);
        let next = bed.back_up();
        bed.check(&next);
        bed.only(1, 1);
    }
}

/// The catalogue is an older one, with the inventory of the repository or without it.
#[test]
fn a_restored_catalogue_never_has_a_wrong_base() {
    for with_inventory in [true, false] {
        let mut bed = bed();
        bed.write(0..100, 1);
        bed.back_up();
        bed.write([1], 2);
        bed.daemon.settle();
        let state = bed.daemon.room().join("state");
        let files = ["catalogue.db", "catalogue.db-wal", "catalogue.db-shm"].map(|name| state.join(name));
        assert!(bed.daemon.stop());
        let backup = files.clone().map(|path| fs::read(path).ok());
        bed.daemon.restart();
        bed.write([2], 3);
        bed.back_up_changes();
        bed.write([3], 4);
        bed.back_up_changes();
        bed.write([4], 5);
        bed.daemon.settle();
        assert!(bed.daemon.stop());
        fs::remove_file(state.join("catalogue.db.seal")).unwrap_or_default();
        for (path, bytes) in files.iter().zip(&backup) {
            fs::remove_file(path).unwrap_or_default();
            bytes.iter().for_each(|bytes| fs::write(path, bytes).unwrap());
        }
        if !with_inventory {
            fs::remove_file(bed.directory().join(".tapline-inventory.jsonl")).unwrap();
        }
        bed.daemon.restart();
        bed.daemon.settle();
        bed.write([5], 6);
        for byte in 7..9 {
            let made = bed.back_up();
            assert!(!with_inventory || made.full.is_none(), "{:?}", made.full);
            bed.check(&made);
            bed.write([5, 6], byte);
        }
        let last = bed.back_up_changes();
        bed.check(&last);
        bed.daemon.settle();
        assert_eq!(bed.bases().len(), 1);
    }
}

#[test]
fn a_machine_is_backed_up_incrementally_and_may_be_killed() {
    let mut bed = bed();
    bed.write(0..50, 1);
    unplug(&bed.daemon, &bed.vbd);
    let created = bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "untracked", "size": 16 << 20 }));
    let other = bed.daemon.done(created)["uuid"].as_str().unwrap().to_owned();
    let hardware = json!({ "name": "web", "driver": "qemu", "memory": 256 << 20, "vcpus": 1 });
    let vm = bed.daemon.post("/vms", hardware).1["uuid"].as_str().unwrap().to_owned();
    for (position, vdi) in [(0, &bed.vdi), (1, &other)] {
        let (status, made) = bed.daemon.post("/vbds", json!({ "vm": vm, "vdi": vdi, "position": position }));
        assert_eq!(status, 201, "{made}");
    }
    let back_up = |bed: &Bed| {
        let made = bed.daemon.done(bed.daemon.post(&format!("/vms/{vm}/backup"), json!({ "target": bed.target })));
        let disks = made["disks"].as_array().unwrap().clone();
        assert!(disks[1]["since"].is_null() && disks[1]["full"].is_string(), "{made}");
        disks[0].clone()
    };
    // On request everything is read of each disk; that is the base of the next ones.
    let whole = json!({ "target": bed.target, "full": true });
    let write = |bed: &Bed, at: usize, byte: u8| {
        plug(&bed.daemon, &bed.vbd);
        bed.write([at], byte);
        bed.daemon.settle();
        unplug(&bed.daemon, &bed.vbd);
    };
    assert!(back_up(&bed)["since"].is_null());
    bed.only(2, 1);
    write(&bed, 49, 2);
    let made = bed.daemon.done(bed.daemon.post(&format!("/vms/{vm}/backup"), whole));
    let disks = made["disks"].as_array().unwrap();
    assert!(disks.iter().all(|disk| disk["full"] == "a full backup was requested"), "{made}");
    write(&bed, 48, 2);
    assert!(back_up(&bed)["since"].is_string());
    bed.only(2, 1);
    for (nth, at) in ["copy:after", "base", "base:after", "remove", "remove:after"].into_iter().enumerate() {
        write(&bed, nth, 2);
        bed.daemon.restart_with(&[(ABORT_AT, &format!("vm-backup:{at}"))]);
        bed.daemon.post_and_die(&format!("/vms/{vm}/backup"), json!({ "target": bed.target }));
        bed.daemon.restart();
        bed.only(2, 1);
        assert_eq!(bed.daemon.get(&format!("/vms/{vm}/snapshots")).1, json!([]), "{at}");
        write(&bed, nth + 20, 3);
        let made = back_up(&bed);
        // The map up to a snapshot of a halted disk is sealed, and outlives the snapshot, which was destroyed.
        assert!(made["since"].is_string(), "{at}: {made}");
        let made = Made { read: 0, full: None, id: made["backup"].clone(), content: bed.model.borrow().clone() };
        bed.check(&made);
        // Both verbs continue each other's backups.
        write(&bed, nth + 30, 4);
        let made = bed.back_up_changes();
        bed.check(&made);
        bed.only(2, 1);
    }
}

#[test]
fn bases_go_with_their_disk_their_target_and_tracking() {
    let bed = bed();
    bed.write([0], 1);
    bed.back_up();
    bed.only(1, 1);
    bed.verb(&bed.vdi, "cbt-disable", json!({}));
    bed.only(1, 0);
    bed.verb(&bed.vdi, "cbt-enable", json!({}));
    bed.back_up();
    bed.only(1, 1);
    assert_eq!(bed.daemon.delete(&format!("/backup-targets/{}", bed.target)).0, 204);
    bed.only(1, 0);
    let bed = self::bed();
    bed.write([0], 1);
    bed.back_up();
    unplug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", bed.vdi)));
    bed.only(0, 0);
}

#[test]
fn a_snapshot_without_data_is_good_for_its_changes_only() {
    let mut bed = bed();
    bed.write(0..200, 1);
    let plain = bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "plain", "size": 1 << 20 }));
    let plain = bed.daemon.done(plain)["uuid"].as_str().unwrap().to_owned();
    let unmapped = bed.verb(&plain, "snapshot", json!({}))["uuid"].as_str().unwrap().to_owned();
    let first = bed.snapshot();
    bed.write(0..200, 2);
    let second = bed.snapshot();
    bed.write(0..200, 3);
    bed.daemon.settle();
    let refused = |vdi: &str, why: &str| {
        let (status, problem) = bed.daemon.post(&format!("/vdis/{vdi}/data-destroy"), json!({}));
        assert!((400..500).contains(&status), "{status} {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(why), "{problem}");
    };
    refused(&bed.vdi, "while VBD");
    refused(&plain, "not a snapshot");
    refused(&unmapped, "no changed blocks are recorded");
    let reader = vbd(&bed.daemon, &first, "nbd");
    refused(&first, "is used by VBD");
    plug(&bed.daemon, &reader);
    refused(&first, "while VBD");
    unplug(&bed.daemon, &reader);
    assert_eq!(bed.daemon.delete(&reader).0, 204);

    let before = bed.space();
    bed.verb(&first, "data-destroy", json!({}));
    bed.daemon.settle();
    // 12 MiB that no other state has.
    wait_until("its space is freed", || bed.space() + (11 << 20) < before);
    let shown = bed.show(&first);
    assert_eq!((&shown["state"], &shown["physical_utilisation"]), (&json!("no-data"), &json!(0)), "{shown}");
    assert_eq!((&shown["health"]["state"], &shown["snapshot_of"]), (&json!("healthy"), &json!(bed.vdi)));
    let changed = |bed: &Bed| {
        let (status, said) = bed.daemon.get(&format!("/vdis/{second}/changes?from={first}"));
        assert_eq!(status, 200, "{said}");
        assert_eq!(said["extents"], json!([{ "start": 0, "length": 200 * BLOCK }]));
    };
    changed(&bed);
    bed.daemon.restart();
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/scan", bed.sr), json!({})));
    changed(&bed);
    assert_eq!(bed.show(&first)["state"], "no-data");
    assert_eq!(bed.daemon.patch(&format!("/vdis/{first}"), json!({ "name": "begin" })).0, 200);
    assert_eq!(bed.daemon.patch(&format!("/vdis/{first}"), json!({ "read_only": false })).0, 409);

    let path = bed.daemon.room().join("out.raw");
    let vdi = &bed.vdi;
    let requests = [
        (format!("/vdis/{first}/data-destroy"), json!({})),
        (format!("/vdis/{first}/snapshot"), json!({})),
        (format!("/vdis/{first}/clone"), json!({})),
        (format!("/vdis/{first}/copy"), json!({ "sr": bed.sr })),
        (format!("/vdis/{first}/export"), json!({ "path": path, "format": "raw" })),
        (format!("/vdis/{first}/resize"), json!({ "size": 2 * SIZE })),
        (format!("/vdis/{first}/merge"), json!({})),
        (format!("/vdis/{first}/backup"), json!({ "target": bed.target })),
        (format!("/vdis/{vdi}/revert"), json!({ "snapshot": first })),
        ("/vbds".into(), json!({ "vdi": first, "transport": "nbd", "mode": "RO" })),
    ];
    for (path, asked) in requests {
        let (status, problem) = bed.daemon.post(&path, asked);
        assert!((400..500).contains(&status), "{path}: {status} {problem}");
        assert!(problem["detail"].as_str().unwrap().contains("destroyed"), "{path}: {problem}");
    }
    // The catalogue may be lost: the inventory has it.
    let (status, inventory) = bed.daemon.get(&format!("/srs/{}/inventory", bed.sr));
    let images = inventory["images"].as_array().unwrap();
    assert!(status == 200 && images.iter().any(|image| image["no_data"] == true), "{inventory}");
    let (status, plan) = bed.daemon.delete(&format!("/vdis/{first}?dry_run=true"));
    assert_eq!((status, &plan["removes"]), (200, &json!([])), "{plan}");
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{first}")));
    // And it goes with nothing left.
    for vdi in [&second, &unmapped, &plain] {
        bed.daemon.done(bed.daemon.delete(&format!("/vdis/{vdi}")));
    }
    bed.only(1, 0);
}

#[test]
fn a_killed_disk_process_does_not_make_a_backup_wrong() {
    let bed = bed();
    bed.write(0..100, 1);
    bed.back_up();
    for round in 0..3 {
        bed.write([round, 60 + round], 2);
        let pid = bed.daemon.get(&bed.vbd).1["pid"].as_u64().unwrap();
        kill(&pid);
        wait_until("another process serves the disk", || {
            let vbd = bed.daemon.get(&bed.vbd).1;
            vbd["state"] == "plugged" && vbd["pid"].as_u64().is_some_and(|now| now != pid)
        });
        bed.write([round + 30], 3);
        let made = bed.back_up_changes();
        bed.check(&made);
    }
    bed.only(1, 1);
}

/// Each backup adds a leaf, and leaves a hidden image that cannot be merged into one that is tracked and not plugged.
#[test]
fn a_halted_disk_can_be_backed_up_any_number_of_times() {
    let bed = bed();
    bed.write([0, 7], 1);
    bed.back_up();
    bed.write([1], 2);
    bed.while_halted(|| {
        let all: Vec<Made> = (0..6).map(|_| bed.back_up()).collect();
        wait_until("hidden images are merged", || chain(&bed.daemon, &bed.vdi).len() <= 3);
        all.iter().for_each(|made| bed.check(made));
    });
    bed.write([2], 3);
    bed.check(&bed.back_up());
    bed.only(1, 1);
}
