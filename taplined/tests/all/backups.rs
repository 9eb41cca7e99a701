//! Backups of VDIs as tasks of the daemon: what is restored, and what is left of one that does not end well.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{io, nbd, nothing_leaked, plug, unplug, vbd};
use crate::harness::mounted::Mounted;
use crate::harness::{ABORT_AT, Taplined, kill, not_run, start, wait_until};

/// A daemon with a repository, a registered target, and a VDI.
pub struct Room {
    pub daemon: Taplined,
    pub sr: String,
    pub vdi: String,
    pub target: String,
}

/// Bytes of the VDI: several batches of the backup program.
pub const SIZE: u64 = 64 << 20;

/// The backup program, which is built beside the daemon.
pub fn program() -> Command {
    let program = Path::new(env!("CARGO_BIN_EXE_taplined")).with_file_name("tapline-backup");
    if !program.exists() {
        let built = Command::new(env!("CARGO")).args(["build", "-q", "-p", "tapline-backup"]).status().unwrap();
        assert!(built.success(), "tapline-backup cannot be built");
    }
    let mut command = Command::new(program);
    command.arg("backup");
    command
}

/// Creates a target in a new directory; returns its ID.
pub fn create_target(directory: &Path, words: &[&str]) -> String {
    fs::create_dir_all(directory).unwrap();
    let made = program().args(["target", "create"]).arg(directory).args(words).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

/// Registers the target in the directory `target`; returns its UUID.
pub fn register(daemon: &Taplined, key: &Value) -> String {
    let asked = json!({ "name": "offsite", "path": daemon.room().join("target"), "key_file": key });
    let (status, target) = daemon.post("/backup-targets", asked);
    assert_eq!(status, 201, "{target}");
    target["uuid"].as_str().unwrap().into()
}

/// Backs a VDI up to a new target; returns the path of that target in the API, and the backup.
pub fn backed_up(daemon: &Taplined, vdi: &str) -> (String, Value) {
    create_target(&daemon.room().join("target"), &[]);
    let target = register(daemon, &Value::Null);
    let made = daemon.done(daemon.post(&format!("/vdis/{vdi}/backup"), json!({ "target": target })));
    (format!("/backup-targets/{target}"), made["backup"].clone())
}

impl Room {
    /// With a target in the directory `target`, whose key is in the file `key`.
    pub fn new() -> Room {
        let daemon = start();
        let key = daemon.room().join("key");
        create_target(&daemon.room().join("target"), &["--new-key", key.to_str().unwrap()]);
        Room::on(daemon, json!(key))
    }

    pub fn on(daemon: Taplined, key: Value) -> Room {
        let sr = daemon.repository("disks");
        let target = register(&daemon, &key);
        let created = daemon.post("/vdis", json!({ "sr": sr, "name": "web", "size": SIZE }));
        let vdi = daemon.done(created)["uuid"].as_str().unwrap().into();
        Room { sr, vdi, target, daemon }
    }

    /// Plugs the VDI, runs commands of qemu-io, and unplugs it.
    pub fn write(&self, commands: &[&str]) {
        self.write_to(&self.vdi, commands);
    }

    /// Runs commands of qemu-io on a VDI that is not plugged.
    pub fn write_to(&self, vdi: &str, commands: &[&str]) {
        let guest = vbd(&self.daemon, vdi, "nbd");
        plug(&self.daemon, &guest);
        assert!(io(&nbd(&self.daemon, &guest), commands).0);
        unplug(&self.daemon, &guest);
        assert_eq!(self.daemon.delete(&guest).0, 204);
    }

    pub fn begin(&self) -> (u16, Value) {
        self.daemon.post(&format!("/vdis/{}/backup", self.vdi), json!({ "target": self.target }))
    }

    pub fn back_up(&self) -> Value {
        self.daemon.done(self.begin())
    }

    pub fn restore(&self, backup: &Value, name: &str) -> (u16, Value) {
        let asked = json!({ "backup": backup, "sr": self.sr, "name": name });
        self.daemon.post(&format!("/backup-targets/{}/restore", self.target), asked)
    }

    pub fn backups(&self) -> Vec<Value> {
        let (status, list) = self.daemon.get(&format!("/backup-targets/{}/backups?vdi={}", self.target, self.vdi));
        assert_eq!(status, 200, "{list}");
        list.as_array().unwrap().clone()
    }

    /// Reads patterns from an idle VDI through a VBD.
    pub fn holds(&self, vdi: &str, commands: &[&str]) {
        let reader = vbd(&self.daemon, vdi, "nbd");
        plug(&self.daemon, &reader);
        let (right, said) = io(&nbd(&self.daemon, &reader), commands);
        assert!(right && !said.contains("Pattern verification failed"), "{said}");
        unplug(&self.daemon, &reader);
        assert_eq!(self.daemon.delete(&reader).0, 204);
    }

    /// Waits until only these VDIs are there, no VBD of a backup, and nothing that is still to be removed.
    pub fn only(&self, vdis: usize) {
        let count = |path: &str| self.daemon.get(path).1.as_array().map_or(usize::MAX, Vec::len);
        wait_until("what was for the backup is gone", || {
            let recorded: i64 = self
                .daemon
                .catalogue()
                .query_row("SELECT count(*) FROM backup_snapshot", [], |row| row.get(0))
                .unwrap();
            count("/vdis") == vdis && recorded == 0 && count("/tasks?open=true") == 0
        });
        nothing_leaked(&self.daemon);
    }

    /// Replaces the key file by a FIFO, at which each process stops until the key is written to it.
    pub fn stop_at_key(&self) -> Stopped {
        let path = self.daemon.room().join("key");
        let key = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").args(["-m", "600"]).arg(&path).status().unwrap().success());
        Stopped { path, key }
    }

    /// Begins a backup, and stops it before it reads the disk; returns the task and the VBD that it reads.
    pub fn begin_and_stop(&self, stopped: &Stopped) -> (Value, String) {
        let (status, task) = self.begin();
        assert_eq!(status, 202, "{task}");
        // The target is opened once before the snapshot is taken.
        stopped.let_go();
        let mut vbd = String::new();
        wait_until("the snapshot is plugged", || {
            let vbds = self.daemon.get("/vbds").1;
            let found = vbds.as_array().unwrap().iter().find(|vbd| vbd["state"] == "plugged" && vbd["mode"] == "RO");
            found.is_some_and(|found| {
                vbd = format!("/vbds/{}", found["uuid"].as_str().unwrap());
                !jobs(&self.daemon).is_empty()
            })
        });
        (task, vbd)
    }

    /// Begins a backup that is slow, and waits until it has sent something; returns the task.
    pub fn begin_slowly(&self) -> Value {
        let stopped = self.stop_at_key();
        let (task, vbd) = self.begin_and_stop(&stopped);
        let (status, limited) = self.daemon.post(&format!("{vbd}/limit"), json!({ "bandwidth": 4 << 20 }));
        assert_eq!(status, 200, "{limited}");
        stopped.let_go();
        stopped.replace();
        wait_until("something is sent", || {
            let task = self.daemon.get(&format!("/tasks/{}", task["uuid"].as_str().unwrap())).1;
            assert!(["running", "pending"].contains(&task["state"].as_str().unwrap()), "{task}");
            task["transfer"]["done"].as_u64().is_some_and(|done| done > 0)
        });
        task
    }
}

/// A key file that is a FIFO.
pub struct Stopped {
    path: PathBuf,
    key: Vec<u8>,
}

impl Stopped {
    /// Waits for a process that opens the key file, and gives it the key.
    pub fn let_go(&self) {
        fs::OpenOptions::new().write(true).open(&self.path).unwrap().write_all(&self.key).unwrap();
    }

    /// Makes it a file again.
    pub fn replace(&self) {
        let other = self.path.with_extension("new");
        fs::write(&other, &self.key).unwrap();
        fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&other, &self.path).unwrap();
    }
}

/// The processes of the backup program of this daemon.
pub fn jobs(daemon: &Taplined) -> Vec<u32> {
    let place = daemon.room().join("target");
    let place = place.to_str().unwrap();
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ours = pids.filter(|pid: &u32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words = String::from_utf8_lossy(&words).into_owned();
        words.contains("tapline-backup") && words.contains(place)
    });
    ours.collect()
}

#[test]
fn a_disk_in_use_is_backed_up_as_it_is_at_one_moment_and_restored() {
    let room = Room::new();
    let guest = vbd(&room.daemon, &room.vdi, "nbd");
    plug(&room.daemon, &guest);
    assert!(io(&nbd(&room.daemon, &guest), &["write -P 1 0 8M", "write -P 2 33M 64k", "flush"]).0);
    let made = room.back_up();
    assert_eq!((&made["uuid"], made["size"].as_u64()), (&json!(room.vdi), Some(SIZE)));
    assert_eq!(made["statistics"]["read"], (8 << 20) + (64 << 10), "{made}");
    room.only(1);
    assert!(io(&nbd(&room.daemon, &guest), &["write -P 3 0 1M", "flush"]).0);
    let again = room.back_up();
    // A chunk with the new pattern, an index, and what describes them.
    assert!(again["statistics"]["sent"].as_u64().unwrap() < 4096, "{again}");

    let listed = room.backups();
    let ids: Vec<&Value> = listed.iter().map(|backup| &backup["id"]).collect();
    assert_eq!(ids, [&made["backup"], &again["backup"]]);
    assert!(listed.iter().all(|backup| backup["name"] == "web" && backup["size"] == SIZE), "{listed:?}");

    let restored = room.daemon.done(room.restore(&made["backup"], "first"))["uuid"].as_str().unwrap().to_owned();
    let patterns = ["read -P 1 0 8M", "read -P 0 8M 25M", "read -P 2 33M 64k", "read -P 0 34668544 32440320"];
    room.holds(&restored, &patterns);
    let shown = room.daemon.get(&format!("/vdis/{restored}")).1;
    assert_eq!((&shown["name"], &shown["size"], &shown["snapshot_of"]), (&json!("first"), &json!(SIZE), &Value::Null));
    assert!(shown["physical_utilisation"].as_u64().unwrap() < 12 << 20, "holes were written: {shown}");
    let newer = room.daemon.done(room.restore(&again["backup"], "second"))["uuid"].as_str().unwrap().to_owned();
    room.holds(&newer, &["read -P 3 0 1M", "read -P 1 1M 7M"]);
    unplug(&room.daemon, &guest);
    room.only(3);
    assert!(fs::read_dir(room.daemon.room().join("run/restore")).unwrap().next().is_none());
    let key = fs::read_to_string(room.daemon.room().join("key")).unwrap();
    assert!(!room.daemon.log().contains(key.trim()), "the log has the key");
}

#[test]
fn the_sector_size_of_a_disk_comes_back_with_it() {
    let room = Room::new();
    let asked = json!({ "sr": room.sr, "name": "large", "size": 16 << 20, "logical_block_size": 4096 });
    let vdi = room.daemon.done(room.daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    let made = room.daemon.done(room.daemon.post(&format!("/vdis/{vdi}/backup"), json!({ "target": room.target })));
    let restored = room.daemon.done(room.restore(&made["backup"], "again"))["uuid"].as_str().unwrap().to_owned();
    assert_eq!(room.daemon.get(&format!("/vdis/{restored}")).1["logical_block_size"], 4096);
}

#[test]
fn backups_of_a_name_that_was_given_out_again_are_of_another_disk() {
    let room = Room::new();
    room.write(&["write -P 1 0 1M"]);
    room.back_up();
    room.daemon.done(room.daemon.delete(&format!("/vdis/{}", room.vdi)));
    let created = room.daemon.post("/vdis", json!({ "sr": room.sr, "name": "web", "size": SIZE }));
    let other = room.daemon.done(created)["uuid"].as_str().unwrap().to_owned();
    room.daemon.done(room.daemon.post(&format!("/vdis/{other}/backup"), json!({ "target": room.target })));
    assert_eq!(room.backups().len(), 1);
    let all = room.daemon.get(&format!("/backup-targets/{}/backups", room.target)).1;
    let disks: Vec<&Value> = all.as_array().unwrap().iter().map(|backup| &backup["disk"]).collect();
    assert!(disks.len() == 2 && disks[0] != disks[1], "{all}");
}

#[test]
fn any_name_of_a_disk_is_one_on_the_target() {
    let room = Room::new();
    let long = "\u{fc}".repeat(128);
    for name in ["--json", "-", "a b\"{}", &long] {
        let (status, vdi) = room.daemon.patch(&format!("/vdis/{}", room.vdi), json!({ "name": name }));
        assert_eq!(status, 200, "{vdi}");
        room.back_up();
        let label = room.backups().pop().unwrap()["name"].as_str().unwrap().to_owned();
        assert!(name.starts_with(&label) && label.len() + 1 >= name.len().min(255), "{name}: {label}");
    }
}

#[test]
fn a_daemon_that_is_killed_leaves_no_snapshot_and_no_part_of_a_backup() {
    let mut room = Room::new();
    room.write(&["write -P 1 0 4M"]);
    let mut made = 0;
    for at in ["snapshot", "snapshot:after", "copy", "copy:after", "remove", "remove:after"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vdi-backup:{at}"))]);
        let path = format!("/vdis/{}/backup", room.vdi);
        room.daemon.post_and_die(&path, json!({ "target": room.target }));
        room.daemon.restart();
        room.only(1);
        made += usize::from(["copy:after", "remove", "remove:after"].contains(&at));
        assert_eq!(room.backups().len(), made, "{at}");
        let task = &room.daemon.get("/tasks?verb=vdi-backup").1[0];
        assert_eq!((&task["state"], &task["verb"]), (&json!("failed"), &json!("vdi-backup")), "{at}: {task}");
    }
    let last = room.back_up();
    room.daemon.done(room.daemon.post(&format!("/backup-targets/{}/verify", room.target), json!({})));
    let restored = room.daemon.done(room.restore(&last["backup"], "after"))["uuid"].as_str().unwrap().to_owned();
    room.holds(&restored, &["read -P 1 0 4M", "read -P 0 4M 60M"]);
}

#[test]
fn what_is_damaged_on_the_target_is_sent_again() {
    let room = {
        let daemon = start();
        create_target(&daemon.room().join("target"), &[]);
        Room::on(daemon, Value::Null)
    };
    room.daemon.done(room.daemon.post(&format!("/vdis/{}/cbt-enable", room.vdi), json!({})));
    room.write(&["write -P 1 0 4M"]);
    let first = room.back_up();
    let packs: Vec<PathBuf> = files_below(&room.daemon.room().join("target/packs"));
    assert!(!packs.is_empty());
    for pack in &packs {
        let mut bytes = fs::read(pack).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0xff;
        fs::write(pack, bytes).unwrap();
    }
    let verify = || {
        let begun = room.daemon.post(&format!("/backup-targets/{}/verify", room.target), json!({}));
        room.daemon.wait(&begun.1)
    };
    let found = verify();
    assert_eq!(found["state"], "failed", "{found}");
    assert!(found["problem"]["advice"].as_str().is_some_and(|advice| advice.contains("--repair")), "{found}");
    let asked = json!({ "target": room.target, "repair": true });
    let made = room.daemon.done(room.daemon.post(&format!("/vdis/{}/backup", room.vdi), asked));
    assert_eq!(made["full"], "damage of the target was to be repaired", "{made}");
    // What is damaged is not needed any more.
    let found = verify();
    assert_eq!((&found["state"], &found["result"]["lost"]), (&json!("done"), &json!([])), "{found}");
    let restored = room.daemon.done(room.restore(&first["backup"], "after"))["uuid"].as_str().unwrap().to_owned();
    room.holds(&restored, &["read -P 1 0 4M", "read -P 0 4M 60M"]);
}

/// The index of an incremental backup has the holes that it has not read.
#[test]
fn an_incremental_backup_is_restored_where_its_data_fits() {
    let room = Room::new();
    room.daemon.done(room.daemon.post(&format!("/vdis/{}/cbt-enable", room.vdi), json!({})));
    room.write(&["write -P 1 0 1M"]);
    room.back_up();
    room.write(&["write -P 2 0 64k"]);
    let second = room.back_up();
    assert!(second["since"].is_string(), "{second}");
    let key = room.daemon.room().join("key");
    let shown = program()
        .args(["show", "--json", "--key-file"])
        .arg(key)
        .arg(room.daemon.room().join("target"))
        .arg(second["backup"].as_str().unwrap())
        .output()
        .unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["data"], json!(1 << 20), "{shown}");
}

/// Another catalogue has no record of what the backups of the one before needed.
#[test]
fn a_catalogue_that_is_rebuilt_destroys_the_snapshots_of_backups_of_the_one_before() {
    let mut room = Room::new();
    room.daemon.done(room.daemon.post(&format!("/vdis/{}/cbt-enable", room.vdi), json!({})));
    room.write(&["write -P 1 0 4M"]);
    let kept: Value = room.daemon.done(room.daemon.post(&format!("/vdis/{}/snapshot", room.vdi), json!({})));
    for at in ["copy", "base:after"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vdi-backup:{at}"))]);
        room.daemon.post_and_die(&format!("/vdis/{}/backup", room.vdi), json!({ "target": room.target }));
        fs::remove_dir_all(room.daemon.room().join("state")).unwrap();
        let directory = room.daemon.room().join("disks");
        let rebuilt = room.daemon.command(&["--rebuild", directory.to_str().unwrap()]);
        assert_eq!(rebuilt.0, 0, "{at}: {rebuilt:?}");
        room.daemon.restart();
        room.only(2);
        assert_eq!(room.daemon.get(&format!("/vdis/{}", kept["uuid"].as_str().unwrap())).0, 200, "{at}");
        room.target = register(&room.daemon, &json!(room.daemon.room().join("key")));
    }
    room.back_up();
}

/// What is created under it would be destroyed.
#[test]
fn nothing_can_have_the_identity_of_a_snapshot_that_is_still_to_be_destroyed() {
    let room = Room::new();
    let stopped = room.stop_at_key();
    let (task, _) = room.begin_and_stop(&stopped);
    let snapshot: String =
        room.daemon.catalogue().query_row("SELECT snapshot FROM backup_snapshot", [], |row| row.get(0)).unwrap();
    let asked = json!({ "sr": room.sr, "name": "mine", "size": SIZE, "uuid": snapshot });
    assert_eq!(room.daemon.post("/vdis", asked.clone()).0, 409);
    stopped.let_go();
    stopped.replace();
    room.daemon.done((202, task));
    room.daemon
        .catalogue()
        .execute("INSERT INTO backup_snapshot (snapshot, vm) VALUES (?1, NULL)", [&snapshot])
        .unwrap();
    let (status, refused) = room.daemon.post("/vdis", asked);
    assert_eq!((status, refused["code"].as_str()), (409, Some("exists")), "{refused}");
}

#[test]
fn a_backup_that_is_killed_or_cancelled_while_it_copies_leaves_nothing() {
    let mut room = Room::new();
    room.write(&["write -P 1 0 32M", "write -P 2 32M 32M"]);

    let task = room.begin_slowly();
    let (status, cancelling) =
        room.daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({}));
    assert_eq!(status, 200, "{cancelling}");
    assert_eq!(room.daemon.wait(&task)["state"], "cancelled");
    wait_until("its process is gone", || jobs(&room.daemon).is_empty());
    room.only(1);

    let task = room.begin_slowly();
    kill(&jobs(&room.daemon)[0]);
    let failed = room.daemon.wait(&task);
    assert_eq!(failed["state"], "failed");
    assert!(failed["problem"]["detail"].as_str().unwrap().contains("SIGKILL"), "{failed}");
    room.only(1);

    room.begin_slowly();
    room.daemon.kill();
    wait_until("its process is gone", || jobs(&room.daemon).is_empty());
    room.daemon.restart();
    room.only(1);
    assert_eq!(room.backups(), Vec::<Value>::new());

    // A daemon that stops cancels it.
    room.begin_slowly();
    assert!(room.daemon.stop());
    wait_until("its process is gone", || jobs(&room.daemon).is_empty());
    room.daemon.restart();
    room.only(1);
    assert_eq!(room.backups(), Vec::<Value>::new());
    room.back_up();
}

#[test]
fn a_process_that_has_not_begun_ends_with_the_daemon() {
    let mut room = Room::new();
    let stopped = room.stop_at_key();
    room.begin_and_stop(&stopped);
    room.daemon.kill();
    wait_until("its process is gone", || jobs(&room.daemon).is_empty());
    stopped.replace();
    room.daemon.restart();
    room.only(1);
}

#[test]
fn a_target_that_is_gone_or_another_one_is_noticed_and_left_alone() {
    let room = Room::new();
    let made = room.back_up();
    let (path, aside) = (room.daemon.room().join("target"), room.daemon.room().join("aside"));
    let key = room.daemon.room().join("key");
    let refused = |what: &str| {
        let problem = room.daemon.failed(room.begin());
        assert!(problem["detail"].as_str().unwrap().contains(what), "{problem}");
        let (status, problem) = room.restore(&made["backup"], "restored");
        assert!(status >= 400 && problem["detail"].as_str().unwrap().contains(what), "{status} {problem}");
        let (status, problem) = room.daemon.get(&format!("/backup-targets/{}/backups", room.target));
        assert!(status >= 400, "{status} {problem}");
        room.only(1);
    };
    fs::rename(&path, &aside).unwrap();
    refused("target");
    // As where a mount is missing.
    fs::create_dir(&path).unwrap();
    refused("no backup target");
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    create_target(&path, &["--key-file", key.to_str().unwrap()]);
    let files = || fs::read_dir(path.join("log")).unwrap().count();
    let before = files();
    refused("another target");
    assert_eq!(files(), before);
    fs::remove_dir_all(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    room.back_up();
    assert_eq!(room.backups().len(), 2);
}

#[test]
fn a_key_that_is_wrong_missing_or_readable_by_others_is_refused() {
    let room = Room::new();
    room.back_up();
    let key = room.daemon.room().join("key");
    let right = fs::read(&key).unwrap();
    let failed = |what: &str| {
        let problem = room.daemon.failed(room.begin());
        assert!(problem["detail"].as_str().unwrap().contains(what), "{problem}");
        room.only(1);
    };
    fs::write(&key, "0".repeat(64)).unwrap();
    failed("not the key");
    fs::write(&key, "rubbish").unwrap();
    failed("not a key file");
    fs::write(&key, &right).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    failed("mode 640");
    fs::remove_file(&key).unwrap();
    failed("key file");
    let asked = json!({ "name": "open", "path": room.daemon.room().join("target") });
    let (status, problem) = room.daemon.post("/backup-targets", asked);
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("encrypted"), "{status} {problem}");
}

/// The list of changes is made, and then the backup is removed that it is of.
#[test]
fn everything_is_read_when_the_base_is_removed_meanwhile() {
    let room = Room::new();
    room.daemon.done(room.daemon.post(&format!("/vdis/{}/cbt-enable", room.vdi), json!({})));
    room.write(&["write -P 1 0 8M"]);
    let first = room.back_up();
    room.write(&["write -P 2 1M 64k"]);
    let stopped = room.stop_at_key();
    let (task, _) = room.begin_and_stop(&stopped);
    assert_eq!(fs::read_dir(room.daemon.room().join("run/changes")).unwrap().count(), 1);
    let mut waits = fs::OpenOptions::new().write(true).open(&stopped.path).unwrap();
    stopped.replace();
    let removed = program()
        .arg("remove")
        .arg(room.daemon.room().join("target"))
        .arg(first["backup"].as_str().unwrap())
        .arg("--key-file")
        .arg(&stopped.path)
        .output()
        .unwrap();
    assert!(removed.status.success(), "{removed:?}");
    waits.write_all(&stopped.key).unwrap();
    drop(waits);
    let task = room.daemon.wait(&task);
    let made = &task["result"];
    assert!(task["state"] == "done" && made["since"].is_null(), "{task}");
    assert!(made["full"].as_str().unwrap().contains(first["backup"].as_str().unwrap()), "{made}");
    assert_eq!(made["statistics"]["read"], 8 << 20, "{made}");
    let restored = room.daemon.done(room.restore(&made["backup"], "back"))["uuid"].as_str().unwrap().to_owned();
    room.holds(&restored, &["read -P 1 0 1M", "read -P 2 1M 64k", "read -P 1 1088k 7104k"]);
    // The disk, the restored one, and the base of the next backup.
    room.only(3);
    assert_eq!(fs::read_dir(room.daemon.room().join("run/changes")).unwrap().count(), 0);
}

#[test]
fn a_target_is_registered_once_and_forgotten_without_its_backups() {
    let room = Room::new();
    room.back_up();
    let (path, key) = (room.daemon.room().join("target"), room.daemon.room().join("key"));
    let add = |name: &str, more: Value| {
        let mut asked = json!({ "name": name, "path": path, "key_file": key });
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        room.daemon.post("/backup-targets", asked)
    };
    assert_eq!(add("other", json!({})).1["code"], "exists");
    assert_eq!(add("offsite", json!({})).1["field"], "name");
    let target = format!("/backup-targets/{}", room.target);
    let shown = room.daemon.get(&target).1;
    let id = shown["target_id"].as_str().unwrap().to_owned();
    assert_eq!(room.daemon.get("/backup-targets?name=offsite").1, json!([shown]));
    assert_eq!(room.daemon.delete(&target).0, 204);
    assert_eq!(room.daemon.get(&target).0, 404);
    assert_eq!(room.begin().0, 404);
    let (status, problem) = add("again", json!({ "target_id": "0".repeat(32) }));
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("another target"), "{problem}");
    let (status, again) = add("again", json!({ "target_id": id }));
    assert_eq!(status, 201, "{again}");
    let listed = room.daemon.get(&format!("/backup-targets/{}/backups", again["uuid"].as_str().unwrap())).1;
    assert_eq!(listed.as_array().unwrap().len(), 1);
}

#[test]
fn a_full_target_fails_the_backup_and_keeps_the_others() {
    let daemon = start();
    let place = daemon.room().join("target");
    fs::create_dir(&place).unwrap();
    let Some(_mounted) = Mounted::over(place.clone(), &["-t", "tmpfs", "-o", "size=3M", "tmpfs"]) else {
        return not_run("a full target: this process may not mount");
    };
    create_target(&place, &["--compression", "0"]);
    let room = Room::on(daemon, Value::Null);
    room.write(&["write -P 1 0 64k"]);
    let first = room.back_up();
    // Each chunk has other content.
    let noise: Vec<u8> =
        (0..8_u64 << 20 >> 3).flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    let file = room.daemon.room().join("noise");
    fs::write(&file, noise).unwrap();
    room.write(&[&format!("write -s {} 0 8M", file.display())]);
    let problem = room.daemon.failed(room.begin());
    assert_eq!(problem["code"], "no-space", "{problem}");
    room.only(1);
    assert_eq!(room.backups().len(), 1);
    let restored = room.daemon.done(room.restore(&first["backup"], "first"))["uuid"].as_str().unwrap().to_owned();
    room.holds(&restored, &["read -P 1 0 64k", "read -P 0 64k 63M"]);
}

#[test]
fn a_restore_that_does_not_end_well_leaves_no_disk_and_no_file() {
    let mut room = Room::new();
    room.write(&["write -P 1 0 8M"]);
    let made = room.back_up();
    let before = images(&room);
    for at in ["copy", "copy:after"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vdi-restore:{at}"))]);
        let asked = json!({ "backup": made["backup"], "sr": room.sr, "name": "restored" });
        room.daemon.post_and_die(&format!("/backup-targets/{}/restore", room.target), asked);
        room.daemon.restart();
        room.only(1);
        assert!(images(&room).is_subset(&before), "{at}: {:?}", images(&room));
    }

    // Stopped when the image is served and nothing is written yet.
    let stopped = room.stop_at_key();
    let begin = std::thread::scope(|scope| {
        let begun = scope.spawn(|| room.restore(&made["backup"], "restored"));
        stopped.let_go();
        begun.join().unwrap()
    });
    assert_eq!(begin.0, 202, "{}", begin.1);
    wait_until("the image is served", || {
        fs::read_dir(room.daemon.room().join("run/restore")).is_ok_and(|mut all| all.next().is_some())
            && !jobs(&room.daemon).is_empty()
    });
    let (status, _) = room.daemon.post(&format!("/tasks/{}/cancel", begin.1["uuid"].as_str().unwrap()), json!({}));
    assert_eq!(status, 200);
    assert_eq!(room.daemon.wait(&begin.1)["state"], "cancelled");
    stopped.replace();
    room.only(1);
    assert!(images(&room).is_subset(&before), "{:?}", images(&room));

    for pack in files_below(&room.daemon.room().join("target/packs")) {
        let mut bytes = fs::read(&pack).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        fs::write(&pack, bytes).unwrap();
    }
    let problem = room.daemon.failed(room.restore(&made["backup"], "restored"));
    assert!(problem["detail"].as_str().unwrap().contains("no sound copy"), "{problem}");
    room.only(1);
    assert!(images(&room).is_subset(&before), "{:?}", images(&room));
    let problem = room.daemon.failed(room.daemon.post(&format!("/backup-targets/{}/verify", room.target), json!({})));
    assert!(problem["detail"].as_str().unwrap().contains("cost 1 backups"), "{problem}");
}

/// The images of the repository. Some may be merged meanwhile.
pub fn images(room: &Room) -> BTreeSet<String> {
    let entries = fs::read_dir(room.daemon.room().join("disks")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".qcow2")).collect()
}

pub fn files_below(place: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// A halted VM with the VDI of the room and another one, which holds another pattern.
pub fn machine(room: &Room) -> (String, String) {
    let created = room.daemon.post("/vdis", json!({ "sr": room.sr, "name": "data", "size": 16 << 20 }));
    let data = room.daemon.done(created)["uuid"].as_str().unwrap().to_owned();
    let hardware = json!({ "name": "web", "driver": "qemu", "description": "shop", "memory": 256 << 20, "vcpus": 2 });
    let (status, vm) = room.daemon.post("/vms", hardware);
    assert_eq!(status, 201, "{vm}");
    let vm = vm["uuid"].as_str().unwrap().to_owned();
    for (position, vdi, bootable) in [(0, &room.vdi, true), (3, &data, false)] {
        let vbd = json!({ "vm": vm, "vdi": vdi, "position": position, "bootable": bootable });
        let (status, vbd) = room.daemon.post("/vbds", vbd);
        assert_eq!(status, 201, "{vbd}");
    }
    (vm, data)
}

#[test]
fn a_machine_is_backed_up_with_all_its_disks_and_restored_under_another_name() {
    let room = Room::new();
    room.write(&["write -P 1 0 1M"]);
    let (vm, data) = machine(&room);
    let backed_up = room.daemon.done(room.daemon.post(&format!("/vms/{vm}/backup"), json!({ "target": room.target })));
    room.only(2);
    let disks = backed_up["disks"].as_array().unwrap();
    let vdis: Vec<&Value> = disks.iter().map(|disk| &disk["vdi"]).collect();
    assert_eq!(vdis, [&json!(room.vdi), &json!(data)]);
    // By any of its disks.
    for (number, disk) in disks.iter().enumerate() {
        let asked = json!({ "backup": disk["backup"], "sr": room.sr, "name": format!("web{number}") });
        let restored = room.daemon.post(&format!("/backup-targets/{}/restore-vm", room.target), asked);
        let restored = room.daemon.done(restored)["uuid"].as_str().unwrap().to_owned();
        let shown = room.daemon.get(&format!("/vms/{restored}")).1;
        let hardware = (&shown["memory"], &shown["vcpus"], &shown["power"], &shown["description"]);
        assert_eq!(hardware, (&json!(256 << 20), &json!(2), &json!("halted"), &json!("shop")));
        let vbds = room.daemon.get(&format!("/vbds?vm={restored}")).1;
        let of = |index: usize, field: &str| vbds[index][field].clone();
        assert_eq!(vbds.as_array().unwrap().len(), 2);
        assert_eq!((of(0, "position"), of(0, "bootable")), (json!(0), json!(true)));
        assert_eq!((of(1, "position"), of(1, "bootable")), (json!(3), json!(false)));
        assert!(of(0, "vdi") != room.vdi.as_str() && of(1, "vdi") != data.as_str());
        room.holds(of(0, "vdi").as_str().unwrap(), &["read -P 1 0 1M", "read -P 0 1M 63M"]);
        let name = room.daemon.get(&format!("/vdis/{}", of(1, "vdi").as_str().unwrap())).1["name"].clone();
        assert_eq!(name, format!("web{number}-3"));
    }
    // The backup of a disk alone is none of a machine, and one that lacks a disk cannot be restored.
    let alone = room.back_up();
    let restore = |backup: &Value| {
        let asked = json!({ "backup": backup, "sr": room.sr, "name": "again" });
        room.daemon.post(&format!("/backup-targets/{}/restore-vm", room.target), asked)
    };
    let (status, problem) = restore(&alone["backup"]);
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("disk alone"), "{problem}");
    let asked = json!({ "backups": [disks[1]["backup"]] });
    let removed = room.daemon.done(room.daemon.post(&format!("/backup-targets/{}/remove-backups", room.target), asked));
    assert_eq!(removed["removed"].as_array().unwrap().len(), 1, "{removed}");
    let (status, problem) = restore(&disks[0]["backup"]);
    assert!(status == 409 && problem["detail"].as_str().unwrap().contains("position 3"), "{problem}");
}

#[test]
fn a_machine_whose_backup_does_not_end_well_leaves_nothing() {
    let mut room = Room::new();
    room.write(&["write -P 1 0 1M"]);
    let (vm, _) = machine(&room);
    for at in ["snapshot", "snapshot:after", "copy", "remove"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vm-backup:{at}"))]);
        room.daemon.post_and_die(&format!("/vms/{vm}/backup"), json!({ "target": room.target }));
        room.daemon.restart();
        room.only(2);
        assert_eq!(room.daemon.get(&format!("/vms/{vm}/snapshots")).1, json!([]), "{at}");
    }
    let before = images(&room);
    let backup = room.backups()[0]["id"].clone();
    for at in ["copy", "copy:after"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vm-restore:{at}"))]);
        let asked = json!({ "backup": backup, "sr": room.sr, "name": "restored" });
        room.daemon.post_and_die(&format!("/backup-targets/{}/restore-vm", room.target), asked);
        room.daemon.restart();
        room.only(2);
        assert_eq!(room.daemon.get("/vms").1.as_array().unwrap().len(), 1);
        assert!(images(&room).is_subset(&before), "{at}: {:?}", images(&room));
    }
}

#[test]
fn a_machine_that_is_destroyed_while_it_is_backed_up_leaves_no_snapshots_of_its_disks() {
    let room = Room::new();
    let (vm, _) = machine(&room);
    let stopped = room.stop_at_key();
    let (status, task) = room.daemon.post(&format!("/vms/{vm}/backup"), json!({ "target": room.target }));
    assert_eq!(status, 202, "{task}");
    // The target is opened once before the snapshots are taken.
    stopped.let_go();
    wait_until("the snapshots are taken", || {
        room.daemon.get(&format!("/vms/{vm}/snapshots")).1.as_array().unwrap().len() == 1
            && !jobs(&room.daemon).is_empty()
    });
    assert_eq!(room.daemon.get("/vdis").1.as_array().unwrap().len(), 4);
    assert_eq!(room.daemon.delete(&format!("/vms/{vm}")).0, 204);
    assert_eq!(room.daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(room.daemon.wait(&task)["state"], "cancelled");
    room.only(2);
}

#[test]
fn a_snapshot_of_a_machine_that_the_next_daemon_completes_is_destroyed_by_it() {
    let mut room = Room::new();
    let (vm, _) = machine(&room);
    for at in ["disks", "first:after", "disks:after", "record", "record:after"] {
        room.daemon.restart_with(&[(ABORT_AT, &format!("vm-snapshot:{at}"))]);
        room.daemon.post_and_die(&format!("/vms/{vm}/backup"), json!({ "target": room.target }));
        room.daemon.restart();
        room.only(2);
        assert_eq!(room.daemon.get(&format!("/vms/{vm}/snapshots")).1, json!([]), "{at}");
    }
}

#[test]
fn a_request_to_a_target_that_hangs_is_answered_and_its_process_is_killed() {
    let mut room = Room::new();
    let config = room.daemon.room().join("taplined.toml");
    let settings = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{settings}\n[storage]\nanswer-timeout = 1\n")).unwrap();
    room.daemon.restart();
    let stopped = room.stop_at_key();
    let list = format!("/backup-targets/{}/backups", room.target);
    // More than there are turns.
    for _ in 0..4 {
        let (status, problem) = room.daemon.get(&list);
        assert_eq!((status, &problem["code"]), (504, &json!("timeout")), "{problem}");
    }
    wait_until("its processes are gone", || jobs(&room.daemon).is_empty());
    stopped.replace();
    wait_until("it responds again", || room.daemon.get(&list).0 == 200);
}

#[test]
fn superfluous_backups_of_one_disk_are_pruned() {
    let room = Room::new();
    room.back_up();
    room.write(&["write -P 1 0 1M"]);
    let second = room.back_up();
    let created = room.daemon.post("/vdis", json!({ "sr": room.sr, "name": "other", "size": 16 << 20 }));
    let other = room.daemon.done(created)["uuid"].as_str().unwrap().to_owned();
    for _ in 0..2 {
        room.daemon.done(room.daemon.post(&format!("/vdis/{other}/backup"), json!({ "target": room.target })));
    }
    let prune = |asked: Value| room.daemon.post(&format!("/backup-targets/{}/prune", room.target), asked);
    assert_eq!(prune(json!({ "last": 0 })).0, 400);
    assert_eq!(prune(json!({ "vdi": room.vdi })).0, 400);
    assert_eq!(room.daemon.done(prune(json!({})))["removed"], json!([]));
    let pruned = room.daemon.done(prune(json!({ "last": 1, "vdi": room.vdi, "grace": 0 })));
    assert_eq!(pruned["removed"].as_array().unwrap().len(), 1, "{pruned}");
    let left = room.backups();
    assert!(left.len() == 1 && left[0]["id"] == second["backup"], "{left:?}");
    let all = room.daemon.get(&format!("/backup-targets/{}/backups", room.target)).1;
    assert_eq!(all.as_array().unwrap().len(), 3);
}

#[test]
fn a_machine_can_be_restored_after_every_prune() {
    let room = Room::new();
    room.write(&["write -P 1 0 1M"]);
    let (vm, data) = machine(&room);
    let back_up = || {
        let done = room.daemon.done(room.daemon.post(&format!("/vms/{vm}/backup"), json!({ "target": room.target })));
        done["disks"].as_array().unwrap().iter().map(|disk| disk["backup"].clone()).collect::<Vec<_>>()
    };
    let prune = |asked: Value| room.daemon.post(&format!("/backup-targets/{}/prune", room.target), asked);
    let removed = |pruned: &Value| {
        let removed = pruned["removed"].as_array().unwrap().iter().map(|backup| backup["id"].to_string());
        removed.collect::<BTreeSet<_>>()
    };
    let (first, second) = (back_up(), back_up());
    // Newer states of the disks alone are none of the machine.
    room.back_up();
    room.daemon.done(room.daemon.post(&format!("/vdis/{data}/backup"), json!({ "target": room.target })));
    assert_eq!(prune(json!({ "vm": vm })).0, 400);
    assert_eq!(prune(json!({ "vm": vm, "vdi": data, "last": 1 })).0, 400);
    let of_disk = room.daemon.done(prune(json!({ "vdi": data, "last": 1 })));
    assert_eq!((removed(&of_disk).len(), &of_disk["unjudged"]), (0, &json!(0)));
    let pruned = room.daemon.done(prune(json!({ "last": 1, "grace": 0 })));
    let expected: BTreeSet<String> = first.iter().map(Value::to_string).collect();
    assert_eq!((removed(&pruned), &pruned["unjudged"]), (expected, &json!(0)));
    let asked = json!({ "backup": second[1], "sr": room.sr, "name": "again" });
    room.daemon.done(room.daemon.post(&format!("/backup-targets/{}/restore-vm", room.target), asked));
    let third = back_up();
    let of_vm = room.daemon.done(prune(json!({ "vm": vm, "last": 1 })));
    assert_eq!(removed(&of_vm), second.iter().map(Value::to_string).collect());
    let moments: BTreeSet<String> = room.backups().iter().map(|backup| backup["moment"]["disks"].to_string()).collect();
    assert_eq!((moments, third.len()), (BTreeSet::from(["2".into(), "null".into()]), 2));
}
