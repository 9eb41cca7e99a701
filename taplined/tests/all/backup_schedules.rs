//! Schedules of backups, with a clock that the test sets.

use std::cell::Cell;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::backups::{create_target, register};
use crate::harness::disks::{io, nbd, plug, unplug, vbd};
use crate::harness::{ABORT_AT, start, wait_until};
use crate::retention::{Bed, failed_schedules};

/// A daemon with a clock, a disk, a registered target in the directory `target`, and another disk whose schedule is
/// changed to have the daemon read the clock.
struct Scheduled {
    bed: Bed,
    target: String,
    other: String,
    turn: Cell<u16>,
    /// How often the rule was applied.
    pruned: Cell<usize>,
}

impl Scheduled {
    fn new(words: &[&str], key: &Value) -> Scheduled {
        let bed = Bed::new();
        create_target(&bed.daemon.room().join("target"), words);
        let target = register(&bed.daemon, key);
        let made = bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "other", "size": 1 << 20 }));
        let other = bed.daemon.done(made)["uuid"].as_str().unwrap().to_owned();
        Scheduled { bed, target, other, turn: Cell::new(1), pruned: Cell::new(0) }
    }

    /// With an encrypted target, whose key is in the room of the daemon and is known by a name in this directory.
    fn encrypted(room: &Path) -> Scheduled {
        let key = room.join("key");
        let one = Scheduled::new(&["--new-key", key.to_str().unwrap()], &json!(key));
        let in_room = one.bed.daemon.room().join("key");
        fs::rename(&key, &in_room).unwrap();
        std::os::unix::fs::symlink(&in_room, &key).unwrap();
        one
    }

    fn disk(&self) -> String {
        format!("/vdis/{}", self.bed.vdi)
    }

    fn set(&self, of: &str, schedule: Value) -> Value {
        let mut schedule = schedule;
        schedule["target"] = json!(self.target);
        let (status, patched) = self.bed.daemon.patch(of, json!({ "backup_schedule": schedule }));
        assert_eq!(status, 200, "{patched}");
        patched
    }

    /// Sets the clock, and has the daemon read it.
    fn pass(&mut self, at: i64, hours: u64) {
        self.bed.set_clock(at, hours);
        self.look();
    }

    fn look(&self) {
        self.turn.set(self.turn.get() % 40 + 1);
        let retention = json!({ "retention": { "monthly": self.turn.get() } });
        let (status, patched) = self.bed.daemon.patch(&format!("/vdis/{}", self.other), retention);
        assert_eq!(status, 200, "{patched}");
    }

    /// Waits until the last backup of an object by its schedule was due at an hour, and the rule was applied after it.
    fn made(&self, of: &str, hour: i64) {
        self.made_only(of, hour);
        self.pruned.set(self.pruned.get() + 1);
        wait_until("the rule was applied", || {
            let tasks = self.bed.daemon.get("/tasks?verb=backup-prune&state=done").1;
            tasks.as_array().is_some_and(|tasks| tasks.len() >= self.pruned.get())
        });
    }

    /// Waits until the last backup of an object by its schedule was due at an hour.
    fn made_only(&self, of: &str, hour: i64) {
        wait_until("a backup was made", || {
            let shown = self.bed.daemon.get(of).1;
            shown["last_backup"].is_string() && self.bed.hour(&shown["last_backup"]) == hour
        });
    }

    /// Waits until something is wrong; returns that.
    fn problem(&self, of: &str) -> Value {
        wait_until("a problem is recorded", || self.bed.daemon.get(of).1["backup_problem"].is_object());
        self.bed.daemon.get(of).1["backup_problem"].clone()
    }

    fn tasks(&self, verb: &str) -> usize {
        self.bed.daemon.get(&format!("/tasks?verb={verb}")).1.as_array().unwrap().len()
    }

    /// The hours of the backups on the target, oldest first.
    fn hours(&self) -> Vec<i64> {
        let (status, list) = self.bed.daemon.get(&format!("/backup-targets/{}/backups", self.target));
        assert_eq!(status, 200, "{list}");
        list.as_array().unwrap().iter().map(|backup| self.bed.hour(&backup["time"])).collect()
    }
}

#[test]
fn a_backup_is_made_each_hour_and_the_rule_is_applied_to_the_target() {
    let mut one = Scheduled::new(&[], &Value::Null);
    let disk = one.disk();
    let invalid = |schedule: Value| one.bed.daemon.patch(&disk, json!({ "backup_schedule": schedule })).0;
    assert_eq!(invalid(json!({ "target": one.target })), 400);
    assert_eq!(invalid(json!({ "target": one.bed.vdi, "daily": 1 })), 404);
    one.set(&disk, json!({ "hourly": 2 }));
    one.made(&disk, 0);
    for hour in 1..4 {
        one.pass(hour, 1);
        one.made(&disk, hour);
    }
    assert_eq!(one.hours(), [2, 3]);
    // One by hand counts as well, and it is the last one of its hour.
    one.bed.daemon.done(one.bed.daemon.post(&format!("{disk}/backup"), json!({ "target": one.target })));
    assert_eq!(one.hours(), [2, 3, 3]);
    // After hours without a daemon, one is made and not all of those that were missed.
    assert!(one.bed.daemon.stop());
    one.bed.set_clock(12, 9);
    one.bed.daemon.restart();
    one.made(&disk, 12);
    one.look();
    assert_eq!(one.hours(), [3, 12]);
    assert_eq!((one.tasks("vdi-backup"), one.tasks("backup-prune")), (6, 5));
    let (status, refused) = one.bed.daemon.delete(&format!("/backup-targets/{}", one.target));
    assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
    // The schedule ends, and its backups stay.
    assert_eq!(one.bed.daemon.patch(&disk, json!({ "backup_schedule": null })).0, 200);
    assert!(one.bed.daemon.get(&disk).1["last_backup"].is_null());
    assert_eq!(one.hours(), [3, 12]);
    assert_eq!(one.bed.daemon.delete(&format!("/backup-targets/{}", one.target)).0, 204);
}

#[test]
fn a_target_that_is_away_costs_one_task_an_hour_and_no_backup() {
    let mut one = Scheduled::new(&[], &Value::Null);
    let disk = one.disk();
    one.set(&disk, json!({ "hourly": 1 }));
    one.made(&disk, 0);
    let (path, aside) = (one.bed.daemon.room().join("target"), one.bed.daemon.room().join("aside"));
    fs::rename(&path, &aside).unwrap();
    one.pass(1, 1);
    let problem = one.problem(&disk);
    assert!(problem["detail"].as_str().unwrap().contains("target") && problem["advice"].is_string(), "{problem}");
    let shown = one.bed.daemon.get(&disk).1;
    assert_eq!(one.bed.hour(&shown["last_backup"]), 0);
    assert!((failed_schedules(&one.bed) - 1.0).abs() < 0.1);
    for _ in 0..3 {
        one.look();
    }
    assert_eq!((one.tasks("vdi-backup"), one.tasks("backup-prune")), (2, 1));
    fs::rename(&aside, &path).unwrap();
    one.pass(2, 1);
    one.made(&disk, 2);
    assert!(one.bed.daemon.get(&disk).1["backup_problem"].is_null());
    assert_eq!((one.tasks("vdi-backup"), one.tasks("backup-prune"), one.hours()), (3, 2, vec![2]));
}

/// The key of a target, which is a FIFO: each process stops until the key is written to it.
struct Fifo {
    path: PathBuf,
    key: Vec<u8>,
}

impl Fifo {
    /// Replaces the key of the target.
    fn of(one: &Scheduled) -> Fifo {
        let path = one.bed.daemon.room().join("key");
        let key = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success());
        Fifo { path, key }
    }

    fn open(&self) -> fs::File {
        fs::OpenOptions::new().write(true).open(&self.path).unwrap()
    }

    /// Lets a backup open the target before its snapshot is taken; it stops when it opens it to write.
    fn until_copied(&self, one: &Scheduled) {
        self.open().write_all(&self.key).unwrap();
        wait_until("it is being copied", || {
            let tasks = one.bed.daemon.get("/tasks?verb=vdi-backup&open=true").1;
            tasks.as_array().unwrap().iter().any(|task| task["step"] == "copy")
        });
    }

    /// Lets the process that waits go, and all later ones.
    fn let_go(self) {
        let mut waits = self.open();
        let whole = self.path.with_extension("new");
        fs::write(&whole, &self.key).unwrap();
        fs::set_permissions(&whole, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&whole, &self.path).unwrap();
        waits.write_all(&self.key).unwrap();
    }
}

#[test]
fn a_backup_that_is_due_while_the_one_before_is_made_is_left_out_and_snapshots_go_on() {
    let room = tempfile::tempdir().unwrap();
    let mut one = Scheduled::encrypted(room.path());
    let disk = one.disk();
    let fifo = Fifo::of(&one);
    one.set(&disk, json!({ "hourly": 3 }));
    fifo.until_copied(&one);
    one.pass(1, 1);
    let problem = one.problem(&disk);
    assert!(problem["code"] == "busy" && problem["detail"].as_str().unwrap().contains("left out"), "{problem}");
    assert_eq!(one.tasks("vdi-backup"), 1);
    // The disk is free for its schedule of snapshots.
    assert_eq!(one.bed.daemon.patch(&disk, json!({ "retention": { "hourly": 1 } })).0, 200);
    wait_until("a snapshot was taken", || one.bed.taken() == [1]);
    fifo.let_go();
    one.made(&disk, 0);
    // What was left out stays on record until the next one, which is not made in this hour.
    assert_eq!(one.bed.daemon.get(&disk).1["backup_problem"], problem);
    one.look();
    assert_eq!(one.tasks("vdi-backup"), 1);
    one.pass(2, 1);
    one.made(&disk, 2);
    assert!(one.bed.daemon.get(&disk).1["backup_problem"].is_null());
    assert_eq!(one.hours(), [0, 2]);
}

/// The clock is read for the rule when the backup has ended: the reading from its beginning is older than those of
/// other schedules.
#[test]
fn the_rule_is_applied_after_a_long_backup_during_which_other_schedules_were_followed() {
    let room = tempfile::tempdir().unwrap();
    let mut one = Scheduled::encrypted(room.path());
    let disk = one.disk();
    one.set(&disk, json!({ "daily": 1 }));
    one.made(&disk, 0);
    assert_eq!(one.bed.daemon.patch(&disk, json!({ "retention": { "hourly": 30 } })).0, 200);
    let fifo = Fifo::of(&one);
    one.pass(24, 24);
    fifo.until_copied(&one);
    let snapshots = |one: &Scheduled| one.tasks("vdi-schedule");
    for hour in 25..28 {
        let before = snapshots(&one);
        one.pass(hour, 1);
        wait_until("another schedule is followed", || snapshots(&one) > before);
    }
    fifo.let_go();
    wait_until("what is superfluous is removed", || one.hours() == [24]);
    assert!(one.bed.daemon.get(&disk).1["backup_problem"].is_null());
}

#[test]
fn a_machine_is_retained_with_all_of_its_disks() {
    let mut one = Scheduled::new(&[], &Value::Null);
    let hardware = json!({ "name": "web", "driver": "qemu", "memory": 256 << 20, "vcpus": 1 });
    let vm = one.bed.daemon.post("/vms", hardware).1["uuid"].as_str().unwrap().to_owned();
    for (position, vdi) in [(0, &one.bed.vdi), (1, &one.other)] {
        let (status, made) = one.bed.daemon.post("/vbds", json!({ "vm": vm, "vdi": vdi, "position": position }));
        assert_eq!(status, 201, "{made}");
    }
    let vm = format!("/vms/{vm}");
    one.set(&vm, json!({ "hourly": 2 }));
    one.made(&vm, 0);
    // A disk of it has a schedule as well: its backups are none of the machine.
    one.set(&one.disk(), json!({ "hourly": 1 }));
    one.made(&one.disk(), 0);
    for hour in 1..3 {
        one.pass(hour, 1);
        one.made(&vm, hour);
        one.made(&one.disk(), hour);
    }
    let mut hours = one.hours();
    hours.sort_unstable();
    assert_eq!(hours, [1, 1, 2, 2, 2]);
    assert_eq!(one.bed.daemon.get(&format!("{vm}/snapshots")).1, json!([]));
    assert_eq!(one.bed.daemon.delete(&vm).0, 204);
    // Nothing is due for a machine that is gone.
    one.pass(3, 1);
    one.made(&one.disk(), 3);
    assert_eq!(one.tasks("vm-backup"), 3);
}

#[test]
fn nothing_is_removed_while_the_clock_is_not_trusted() {
    let mut one = Scheduled::new(&[], &Value::Null);
    let disk = one.disk();
    one.set(&disk, json!({ "hourly": 1 }));
    one.made(&disk, 0);
    // The clock jumps ahead by days.
    one.pass(100, 1);
    one.made_only(&disk, 100);
    assert!(one.problem(&disk)["detail"].as_str().unwrap().contains("superfluous ones stay for now"));
    assert_eq!((one.hours(), one.tasks("backup-prune")), (vec![0, 100], 1));
    one.pass(2, 1);
    one.made_only(&disk, 2);
    one.problem(&disk);
    assert_eq!((one.hours(), one.tasks("backup-prune")), (vec![0, 100, 2], 1));
}

#[test]
fn a_daemon_that_is_killed_makes_the_backup_that_was_due_again() {
    let mut daemon = start();
    create_target(&daemon.room().join("target"), &[]);
    let target = register(&daemon, &Value::Null);
    let sr = daemon.repository("disks");
    let made = daemon.post("/vdis", json!({ "sr": sr, "name": "web", "size": 8 << 20 }));
    let disk = format!("/vdis/{}", daemon.done(made)["uuid"].as_str().unwrap());
    let guest = vbd(&daemon, &disk[6..], "nbd");
    plug(&daemon, &guest);
    assert!(io(&nbd(&daemon, &guest), &["write -P 5 0 1M", "flush"]).0);
    unplug(&daemon, &guest);
    daemon.restart_with(&[(ABORT_AT, "vdi-backup:copy")]);
    let schedule = json!({ "backup_schedule": { "target": target, "monthly": 12 } });
    let (status, patched) = daemon.patch(&disk, schedule);
    assert!([0, 200].contains(&status), "{patched}");
    daemon.wait_for_death();
    daemon.restart();
    wait_until("it was made", || daemon.get(&disk).1["last_backup"].is_string());
    let backups = daemon.get(&format!("/backup-targets/{target}/backups")).1;
    assert_eq!(backups.as_array().unwrap().len(), 1, "{backups}");
    // And only once.
    daemon.restart();
    daemon.settle();
    assert_eq!(daemon.get("/tasks?verb=vdi-backup").1.as_array().unwrap().len(), 2);
}
