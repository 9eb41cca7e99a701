//! Disk processes, the catalogue and the repository agree, whichever process dies or is cancelled, and whatever is
//! restored from a backup.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{Taplined, disks};

const MIB: u64 = 1 << 20;

/// A daemon, a repository of chains, and a plugged VDI in it, for an NBD client.
struct Bed {
    daemon: Taplined,
    vdi: String,
    vbd: String,
}

fn bed() -> Bed {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 64 * MIB, "format": "qcow2" });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = disks::vbd(&daemon, &vdi, "nbd");
    disks::plug(&daemon, &vbd);
    Bed { daemon, vdi, vbd }
}

impl Bed {
    fn snapshot(&self) -> String {
        let made = self.daemon.done(self.daemon.post(&format!("/vdis/{}/snapshot", self.vdi), json!({})));
        made["uuid"].as_str().unwrap().into()
    }

    #[track_caller]
    fn io(&self, commands: &[&str]) {
        let (well, said) = disks::io(&disks::nbd(&self.daemon, &self.vbd), commands);
        assert!(well, "{commands:?}: {said}");
    }

    fn directory(&self) -> PathBuf {
        self.daemon.room().join("vms")
    }

    fn ask_disk(&self, request: Value) -> Value {
        disks::ask_disk(&self.daemon, &self.vbd, request)
    }

    /// The files of the chain, leaf first, and the size, according to the process that serves them.
    fn served(&self) -> (Vec<String>, u64) {
        let said = self.ask_disk(json!({ "verb": "layers" }))["ok"].take();
        let name = |layer: &Value| layer["path"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
        (said["layers"].as_array().unwrap().iter().map(name).collect(), said["size"].as_u64().unwrap())
    }

    /// The files and the size according to the catalogue.
    fn recorded(&self) -> (Vec<String>, u64) {
        let files = disks::chain(&self.daemon, &self.vdi).into_iter().map(|(_, file)| file).collect();
        let shown = self.daemon.get(&format!("/vdis/{}", self.vdi)).1;
        (files, shown["size"].as_u64().unwrap())
    }
}

#[test]
fn a_disk_is_resized_and_rearranged_only_through_the_daemon() {
    let bed = bed();
    bed.snapshot();
    let before = bed.recorded();
    let new = "qcow2:/new.qcow2";
    for (request, instead) in [
        (json!({ "verb": "resize", "size": 128 * MIB }), "tapline vdi resize"),
        (json!({ "verb": "snapshot", "to": new }), "tapline vdi snapshot"),
        (json!({ "verb": "clone", "of": 1, "to": new }), "tapline vdi clone"),
        (json!({ "verb": "revert", "to": 1, "leaf": new }), "tapline vdi revert"),
        (json!({ "verb": "merge", "from": 0, "into": 1 }), "tapline vdi destroy"),
    ] {
        let refused = bed.ask_disk(request)["error"].take();
        assert_eq!(refused["kind"], "unsupported", "{refused}");
        assert!(refused["advice"].as_str().is_some_and(|advice| advice.contains(instead)), "{refused}");
        assert_eq!(bed.served(), before);
    }
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 128 * MIB })));
    assert_eq!((bed.recorded(), bed.served()), ((before.0.clone(), 128 * MIB), (before.0, 128 * MIB)));
}

/// A leaf merge is completed by the disk's process; a request that interrupts it at that moment must not lose this.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_leaf_merge_that_completes_during_cancellation_is_recorded() {
    for round in 0..40 {
        let bed = bed();
        let snapshot = bed.snapshot();
        bed.io(&["write -P 1 0 8M", "flush"]);
        let (status, task) = bed.daemon.delete(&format!("/vdis/{snapshot}"));
        assert_eq!(status, 202, "{task}");
        assert_eq!(bed.daemon.wait(&task)["state"], "done");
        std::thread::sleep(std::time::Duration::from_millis(round % 20));
        bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 128 * MIB })));
        assert_eq!(bed.recorded(), bed.served(), "round {round}: {}", bed.daemon.log());
        bed.io(&["write -P 2 100M 1M", "flush"]);
        disks::unplug(&bed.daemon, &bed.vbd);
        disks::plug(&bed.daemon, &bed.vbd);
        bed.io(&["read -P 1 0 8M", "read -P 2 100M 1M"]);
    }
}

/// The daemon dies after the merge has completed and before this is recorded; the disk's process continues or dies too.
#[test]
fn a_merge_of_the_leaf_is_recorded_by_the_next_daemon() {
    for disk_dies in [false, true] {
        let mut bed = bed();
        let snapshot = bed.snapshot();
        bed.io(&["write -P 1 0 1M", "flush"]);
        bed.daemon.restart_with(&[("TAPLINED_ABORT_AT", "vdi-merge:merge:after")]);
        bed.daemon.ask_and_die("DELETE", &format!("/vdis/{snapshot}"), None);
        let (files, size) = bed.served();
        assert_eq!((files.len(), size), (1, 64 * MIB));
        if disk_dies {
            let pid = disks::processes(&bed.daemon);
            for pid in pid {
                crate::harness::kill(&pid);
            }
        }
        bed.daemon.restart();
        bed.daemon.settle();
        harness::wait_until("it is served", || disks::state(&bed.daemon, &bed.vbd) == "plugged");
        assert_eq!(bed.recorded(), bed.served(), "the disk dies: {disk_dies}: {}", bed.daemon.log());
        assert_eq!(bed.recorded().0, files, "the disk dies: {disk_dies}");
        bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 128 * MIB })));
        bed.io(&["read -P 1 0 1M", "write -P 2 100M 1M", "flush"]);
        disks::unplug(&bed.daemon, &bed.vbd);
        disks::plug(&bed.daemon, &bed.vbd);
        bed.io(&["read -P 1 0 1M", "read -P 2 100M 1M"]);
        assert_eq!(bed.recorded(), bed.served());
        let there: Vec<_> = fs::read_dir(bed.directory()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(there.iter().filter(|name| name.to_string_lossy().ends_with(".qcow2")).count(), 1, "{there:?}");
    }
}

/// A daemon that rolls a merge back finds it completed, records it and removes the merged image. It dies before it
/// has recorded the rollback, and the next daemon rolls back again.
#[test]
fn a_leaf_merge_found_complete_is_finished() {
    let mut bed = bed();
    let snapshot = bed.snapshot();
    bed.io(&["write -P 1 0 1M", "flush"]);
    disks::unplug(&bed.daemon, &bed.vbd);
    bed.daemon.restart_with(&[("TAPLINED_ABORT_AT", "vdi-merge:merge:after")]);
    bed.daemon.ask_and_die("DELETE", &format!("/vdis/{snapshot}"), None);
    bed.daemon.start_and_die("vdi-merge:undo:after");
    bed.daemon.restart();
    harness::wait_until("nothing is under way", || bed.daemon.get("/tasks?open=true").1 == json!([]));
    assert_eq!(bed.recorded().0.len(), 1);
    disks::plug(&bed.daemon, &bed.vbd);
    bed.io(&["read -P 1 0 1M"]);
    disks::unplug(&bed.daemon, &bed.vbd);
    let there: Vec<_> = fs::read_dir(bed.directory()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(there.iter().filter(|name| name.to_string_lossy().ends_with(".qcow2")).count(), 1, "{there:?}");
}

/// An unknown file, a missing one, and a replaced inventory: each is reported, and nothing is changed.
#[test]
fn differences_in_a_repository_are_reported() {
    let bed = bed();
    let snapshot = bed.snapshot();
    disks::unplug(&bed.daemon, &bed.vbd);
    bed.daemon.settle();
    assert_eq!(bed.reconcile(false), json!([]));
    let found = |kind: &str, sides: (Value, Value), why: &str| {
        for dry_run in [true, false] {
            let all = bed.reconcile(dry_run);
            let differences = all.as_array().unwrap();
            assert_eq!(differences.len(), 1, "{all}");
            let one = &differences[0];
            assert_eq!((&one["kind"], &one["healed"]), (&json!(kind), &json!(false)), "{all}");
            assert_eq!((one["found"].clone(), one["catalogue"].clone()), sides, "{all}");
            assert!(one["problem"]["detail"].as_str().unwrap().contains(why), "{all}");
        }
        bed.reconcile(true)[0].clone()
    };
    let stranger = bed.directory().join("stranger.qcow2");
    fs::write(&stranger, "an image of somebody").unwrap();
    found("file", (json!(["stranger.qcow2"]), json!([])), "is not in the catalogue");
    fs::remove_file(&stranger).unwrap();
    let (_, base) = disks::chain(&bed.daemon, &snapshot).remove(0);
    let aside = bed.daemon.room().join("aside");
    fs::rename(bed.directory().join(&base), &aside).unwrap();
    let gone = found("file", (json!([]), json!([base])), "is gone");
    assert_eq!(gone["vdi"], json!(snapshot));
    fs::rename(&aside, bed.directory().join(&base)).unwrap();
    let inventory = bed.directory().join(".tapline-inventory.jsonl");
    let whole = fs::read_to_string(&inventory).unwrap();
    let older: Vec<&str> = whole.lines().collect();
    fs::write(&inventory, older[..older.len() - 1].join("\n") + "\n").unwrap();
    found("inventory", (json!([]), json!([])), "the catalogue at");
    fs::write(&inventory, &whole[..whole.len() - 9]).unwrap();
    assert_eq!(bed.reconcile(true).as_array().unwrap().len(), 1);
    fs::remove_file(&inventory).unwrap();
    found("inventory", (json!([]), json!([])), "is gone");
    fs::write(&inventory, whole).unwrap();
    assert_eq!(bed.reconcile(true), json!([]));
    disks::plug(&bed.daemon, &bed.vbd);
    disks::unplug(&bed.daemon, &bed.vbd);
    disks::nothing_leaked(&bed.daemon);
}

/// The run directory was cleared, or a disk is stopped: requests for the state report that.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_unresponsive_disk_is_reported_as_a_difference() {
    let bed = bed();
    bed.io(&["write -P 1 0 1M", "flush"]);
    let told = |problem: &str| {
        let differences = bed.reconcile(true);
        assert_eq!(differences.as_array().unwrap().len(), 1, "{differences}");
        assert_eq!((&differences[0]["found"], &differences[0]["vdi"]), (&json!([]), &json!(bed.vdi)));
        let told = differences[0]["problem"]["detail"].as_str().unwrap();
        assert!(told.contains(problem), "{told}");
    };
    let pid = disks::processes(&bed.daemon).pop_first().unwrap();
    let signal = |name: &str| {
        assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
    };
    signal("-STOP");
    told("has not answered");
    signal("-CONT");
    assert_eq!(bed.reconcile(true), json!([]));
    fs::remove_file(disks::control(&bed.daemon, &bed.vbd)).unwrap();
    told("nothing listens");
    let (status, refused) = bed.daemon.post(&format!("/vdis/{}/resize", bed.vdi), json!({ "size": 128 * MIB }));
    assert!(status >= 400 && refused["detail"].as_str().unwrap().contains("nothing listens"), "{refused}");
    bed.io(&["read -P 1 0 1M", "write -P 2 1M 1M"]);
    bed.daemon.done(bed.daemon.post(&format!("{}/unplug", bed.vbd), json!({ "force": true })));
    disks::plug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.reconcile(true), json!([]));
    bed.io(&["read -P 1 0 1M", "read -P 2 1M 1M"]);
}

type Backup = [Option<Vec<u8>>; 3];

impl Bed {
    /// The catalogue's files: committed data may still be in the write-ahead log.
    fn catalogue(&self) -> [PathBuf; 3] {
        let state = self.daemon.room().join("state");
        ["catalogue.db", "catalogue.db-wal", "catalogue.db-shm"].map(|name| state.join(name))
    }

    /// The contents of the catalogue, copied while no daemon runs.
    fn back_up(&mut self) -> Backup {
        assert!(self.daemon.stop());
        let backup = self.catalogue().map(|path| fs::read(path).ok());
        self.daemon.restart();
        backup
    }

    /// Restores a catalogue while no daemon runs.
    fn put_back(&mut self, backup: &Backup) {
        assert!(self.daemon.stop());
        for (path, bytes) in self.catalogue().iter().zip(backup) {
            match bytes {
                Some(bytes) => fs::write(path, bytes).unwrap(),
                None => drop(fs::remove_file(path)),
            }
        }
        // The repository's inventory would bring the catalogue up to date; here the running disk is the only source.
        fs::remove_file(self.directory().join(".tapline-inventory.jsonl")).unwrap();
        self.daemon.restart();
    }

    /// Restores a catalogue while a disk keeps running and is reattached.
    fn put_back_under_it(&mut self, backup: &Backup) {
        let running = disks::processes(&self.daemon);
        self.put_back(backup);
        assert_eq!(disks::processes(&self.daemon), running, "{}", self.daemon.log());
        assert_eq!(disks::state(&self.daemon, &self.vbd), "plugged");
    }

    /// The limits reported by the disk's process.
    fn process_limits(&self) -> Value {
        self.ask_disk(json!({ "verb": "limit" }))["ok"]["limits"].take()
    }

    fn kill_disk(&self) {
        let pid = || self.daemon.get(&self.vbd).1["pid"].clone();
        let before = pid();
        crate::harness::kill(&before);
        harness::wait_until("it is served again", || {
            ![&before, &Value::Null].contains(&&pid()) && disks::state(&self.daemon, &self.vbd) == "plugged"
        });
    }

    fn names(&self) -> Vec<(String, bool)> {
        let vdis = self.daemon.get("/vdis").1;
        let of = |vdi: &Value| (vdi["name"].as_str().unwrap().to_owned(), vdi["read_only"].as_bool().unwrap());
        vdis.as_array().unwrap().iter().map(of).collect()
    }

    fn reconcile(&self, dry_run: bool) -> Value {
        let (status, differences) = self.daemon.post("/host/reconcile", json!({ "dry_run": dry_run }));
        assert_eq!(status, 200, "{differences}");
        differences
    }
}

/// The catalogue was restored from a backup made before two snapshots; the disk kept running.
#[test]
fn a_disk_ahead_of_a_restored_catalogue_loses_nothing_when_it_dies() {
    let mut bed = bed();
    bed.io(&["write -P 1 0 1M", "flush"]);
    let backup = bed.back_up();
    bed.snapshot();
    bed.io(&["write -P 2 1M 1M", "flush"]);
    bed.snapshot();
    bed.io(&["write -P 3 2M 1M", "flush"]);
    let (files, size) = bed.served();
    assert_eq!(files.len(), 3);
    bed.put_back(&backup);
    bed.daemon.settle();
    assert_eq!(bed.recorded(), (files.clone(), size), "{}", bed.daemon.log());
    bed.kill_disk();
    bed.io(&["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 1M", "write -P 4 3M 1M", "flush"]);
    assert_eq!(bed.served(), (files.clone(), size));
    // Images without a recorded snapshot still exist, and are not merged.
    bed.daemon.settle();
    assert_eq!((bed.names().len(), bed.recorded().0), (3, files), "{:?}", bed.names());
    assert_eq!(bed.reconcile(false), json!([]));
}

/// The catalogue is from a time when nothing was plugged.
#[test]
fn a_running_disk_recorded_as_unplugged_is_adopted() {
    let mut bed = bed();
    disks::unplug(&bed.daemon, &bed.vbd);
    let backup = bed.back_up();
    disks::plug(&bed.daemon, &bed.vbd);
    bed.io(&["write -P 1 0 1M", "flush"]);
    bed.put_back_under_it(&backup);
    disks::nothing_leaked(&bed.daemon);
    bed.kill_disk();
    bed.io(&["read -P 1 0 1M"]);
    disks::unplug(&bed.daemon, &bed.vbd);
    disks::nothing_leaked(&bed.daemon);
}

/// The catalogue is from a time when the disk had other limits, and was not plugged.
#[test]
fn an_adopted_disk_has_the_limits_of_the_catalogue() {
    for (before, since) in [(json!({ "iops": 300 }), json!({})), (json!({}), json!({ "iops": 5000 }))] {
        let mut bed = bed();
        let limit = |bed: &Bed, limits: &Value| {
            let (status, said) = bed.daemon.post(&format!("{}/limit", bed.vbd), limits.clone());
            assert_eq!(status, 200, "{said}");
        };
        disks::unplug(&bed.daemon, &bed.vbd);
        limit(&bed, &before);
        let backup = bed.back_up();
        limit(&bed, &since);
        disks::plug(&bed.daemon, &bed.vbd);
        assert_eq!(bed.process_limits()["iops"], since["iops"]);
        bed.put_back_under_it(&backup);
        harness::wait_until("the process is told", || bed.process_limits()["iops"] == before["iops"]);
        assert_eq!(bed.daemon.get(&bed.vbd).1["limits"]["iops"], before["iops"]);
    }
}

/// The catalogue has never contained the VBD, its limits or its weight.
#[test]
fn an_unknown_vbd_takes_limits_and_weight_from_its_process() {
    let mut bed = bed();
    disks::unplug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    let backup = bed.back_up();
    let vdi = bed.daemon.get("/vdis").1[0]["uuid"].clone();
    let asked = json!({ "vdi": vdi, "transport": "nbd", "limits": { "iops": 222 }, "share_weight": 222 });
    let (status, vbd) = bed.daemon.post("/vbds", asked);
    assert_eq!(status, 201, "{vbd}");
    bed.vbd = format!("/vbds/{}", vbd["uuid"].as_str().unwrap());
    disks::plug(&bed.daemon, &bed.vbd);
    harness::wait_until("the process is told", || bed.ask_disk(json!({ "verb": "share" }))["ok"]["weight"] == 222);
    bed.put_back_under_it(&backup);
    let known = bed.daemon.get(&bed.vbd).1;
    assert_eq!((&known["limits"], &known["share_weight"]), (&json!({ "iops": 222 }), &json!(222)));
}

/// The catalogue is from a time before the VBD was created.
#[test]
fn a_running_disk_with_an_unknown_vbd_gets_it_back() {
    let mut bed = bed();
    disks::unplug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    let backup = bed.back_up();
    bed.vbd = disks::vbd(&bed.daemon, &bed.vdi, "nbd");
    disks::plug(&bed.daemon, &bed.vbd);
    bed.io(&["write -P 1 0 1M", "flush"]);
    bed.put_back_under_it(&backup);
    bed.io(&["read -P 1 0 1M"]);
    disks::unplug(&bed.daemon, &bed.vbd);
    disks::nothing_leaked(&bed.daemon);
}

/// The catalogue is from a time when another VBD of the VDI was plugged.
#[test]
fn a_running_disk_replaces_an_unserved_plugged_vbd() {
    let mut bed = bed();
    let before = bed.vbd.clone();
    let backup = bed.back_up();
    disks::unplug(&bed.daemon, &before);
    bed.vbd = disks::vbd(&bed.daemon, &bed.vdi, "nbd");
    disks::plug(&bed.daemon, &bed.vbd);
    bed.io(&["write -P 1 0 1M", "flush"]);
    bed.put_back_under_it(&backup);
    assert_eq!(disks::state(&bed.daemon, &before), "unplugged");
    let problem = bed.daemon.get(&before).1["problem"]["detail"].as_str().unwrap().to_owned();
    assert!(problem.contains("is serving its VDI"), "{problem}");
    disks::nothing_leaked(&bed.daemon);
    bed.kill_disk();
    bed.io(&["read -P 1 0 1M"]);
    disks::unplug(&bed.daemon, &bed.vbd);
    // It can be plugged again.
    disks::plug(&bed.daemon, &before);
    disks::unplug(&bed.daemon, &before);
    disks::nothing_leaked(&bed.daemon);
}

/// The catalogue is from a time when the file to which the disk now writes belonged to a snapshot. Returns that
/// snapshot and the disk's files.
fn diverged() -> (Bed, String, Vec<String>) {
    let mut bed = bed();
    bed.io(&["write -P 1 0 1M", "flush"]);
    let snapshot = bed.snapshot();
    bed.io(&["write -P 2 0 1M", "flush"]);
    let backup = bed.back_up();
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
    harness::wait_until("the leaf is merged", || bed.recorded().0.len() == 1);
    bed.daemon.settle();
    let (files, _) = bed.served();
    bed.put_back(&backup);
    let vdi = bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1;
    assert_eq!(vdi["state"], "diverged", "{}", bed.daemon.log());
    assert_eq!(vdi["health"]["state"], "diverged", "{vdi}");
    assert_eq!(bed.daemon.get(&bed.vbd).1["health"]["state"], "diverged");
    (bed, snapshot, files)
}

/// Its disk dies before the divergence is resolved: the state in the catalogue must not be served in its place.
#[test]
fn a_diverged_disk_is_not_restarted() {
    let (bed, _, files) = diverged();
    let content = || files.iter().map(|file| fs::read(bed.directory().join(file)).unwrap()).collect::<Vec<_>>();
    let before = content();
    let pid = bed.daemon.get(&bed.vbd).1["pid"].to_string();
    crate::harness::kill(&pid);
    harness::wait_until("it says why it is not served", || {
        let vbd = bed.daemon.get(&bed.vbd).1;
        let said = vbd["problem"]["detail"].as_str().unwrap_or_default().to_owned();
        vbd["state"] == "restarting" && said.contains("its disk and the catalogue disagree about its files")
    });
    assert_eq!(disks::processes(&bed.daemon).len(), 0);
    assert!(content() == before, "nothing was written");
    disks::unplug(&bed.daemon, &bed.vbd);
}

/// The catalogue is from a time when the file to which the disk now writes belonged to a snapshot.
#[test]
fn uncertain_differences_are_reported_and_left_for_a_decision() {
    for believe in ["disk", "catalogue"] {
        let (bed, snapshot, files) = diverged();
        assert!(bed.daemon.get(&bed.vbd).1["problem"]["advice"].as_str().unwrap().contains("host reconcile"));
        let differences = bed.reconcile(true);
        assert_eq!(differences[0]["healed"], false, "{differences}");
        assert_eq!(differences[0]["found"].as_array().unwrap().len(), 1);
        // Its guest continues; the VDI cannot be changed.
        bed.io(&["read -P 2 0 1M", "write -P 3 1M 1M", "flush"]);
        for (verb, asked) in [("snapshot", json!({})), ("resize", json!({ "size": 128 * MIB })), ("merge", json!({}))] {
            let (status, refused) = bed.daemon.post(&format!("/vdis/{}/{verb}", bed.vdi), asked);
            assert_eq!((status, &refused["code"]), (409, &json!("state")), "{verb}: {refused}");
        }
        assert_eq!(bed.served().0, files);
        let decide =
            |believe: &str| bed.daemon.post(&format!("/vdis/{}/reconcile", bed.vdi), json!({ "believe": believe }));
        if believe == "disk" {
            // The snapshot's file now belongs to the disk: the snapshot cannot be kept.
            let (status, refused) = decide("disk");
            assert_eq!(status, 409, "{refused}");
            assert!(refused["detail"].as_str().unwrap().contains(&snapshot), "{refused}");
        } else {
            let (status, refused) = decide("catalogue");
            assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
            disks::unplug(&bed.daemon, &bed.vbd);
            let (status, decided) = decide("catalogue");
            assert_eq!((status, &decided["state"]), (200, &json!("ready")), "{decided}");
        }
    }
}

/// The file of a running disk was removed or replaced by a copy: later writes go to a file without a name.
#[test]
fn a_removed_or_replaced_file_is_reported_and_not_used() {
    for (replaced, seen) in [(false, true), (true, true), (true, false)] {
        let bed = bed();
        bed.io(&["write -P 1 0 1M", "flush"]);
        let file = bed.directory().join(&bed.served().0[0]);
        let copy = bed.directory().join("copy");
        fs::copy(&file, &copy).unwrap();
        fs::rename(&copy, if replaced { &file } else { &copy }).unwrap();
        if !replaced {
            fs::remove_file(&file).unwrap();
        }
        bed.io(&["write -P 2 0 1M", "flush"]);
        if seen {
            let differences = bed.reconcile(true);
            let kinds: Vec<&Value> = differences.as_array().unwrap().iter().map(|one| &one["kind"]).collect();
            assert_eq!(kinds, if replaced { vec!["disk"] } else { vec!["disk", "file"] });
            assert_eq!(differences[0]["healed"], false);
            let sr = bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["sr"].as_str().unwrap().to_owned();
            bed.daemon.done(bed.daemon.post(&format!("/srs/{sr}/scan"), json!({})));
            assert_eq!(bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["state"], "diverged", "{}", bed.daemon.log());
            let (status, refused) = bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({}));
            assert_eq!((status, &refused["code"]), (409, &json!("state")), "{refused}");
            let believe = json!({ "believe": "disk" });
            let (status, refused) = bed.daemon.post(&format!("/vdis/{}/reconcile", bed.vdi), believe);
            assert!(status == 409 && refused["detail"].as_str().unwrap().contains("or replaced"), "{refused}");
            let vbd = bed.daemon.get(&bed.vbd).1;
            assert!(vbd["problem"]["detail"].as_str().unwrap().contains("is using files"), "{vbd}");
        }
        bed.io(&["read -P 2 0 1M"]);
        let pid = bed.daemon.get(&bed.vbd).1["pid"].to_string();
        crate::harness::kill(&pid);
        harness::wait_until("it is told why it is not started again", || {
            let vbd = bed.daemon.get(&bed.vbd).1;
            let said = vbd["problem"]["detail"].as_str().unwrap_or_default().to_owned();
            vbd["state"] == "restarting"
                && (said.contains("it was replaced") || said.contains("is missing") || !replaced)
        });
        assert_ne!(disks::state(&bed.daemon, &bed.vbd), "plugged");
    }
}

/// A file may have grown in the meantime: the served size is reported.
#[test]
fn a_disk_resized_by_others_is_shown_as_served() {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 64 * MIB, "format": "raw" });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = disks::vbd(&daemon, &vdi, "nbd");
    let bed = Bed { daemon, vdi, vbd };
    let file = bed.directory().join(&bed.recorded().0[0]);
    fs::File::options().write(true).open(file).unwrap().set_len(96 * MIB).unwrap();
    disks::plug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.served().1, 96 * MIB);
    assert_eq!(bed.recorded(), bed.served(), "{}", bed.daemon.log());
    // Also if its process dies, and another one opens the file.
    let file = bed.directory().join(&bed.recorded().0[0]);
    fs::File::options().write(true).open(file).unwrap().set_len(128 * MIB).unwrap();
    bed.kill_disk();
    assert_eq!(bed.served().1, 128 * MIB);
    harness::wait_until("it is told as it is served", || bed.recorded() == bed.served());
    assert_eq!(bed.reconcile(true), json!([]));
}

/// A process that does not respond, for instance because it waits for storage or was stopped.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_hanging_disk_is_reported_and_can_be_force_unplugged() {
    let bed = bed();
    let snapshot = bed.snapshot();
    bed.io(&["write -P 1 0 8M", "flush"]);
    let pid = bed.daemon.get(&bed.vbd).1["pid"].to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    signal("-STOP");
    // Its image is to be merged by the unresponsive process.
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
    let (status, refused) = bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({}));
    assert_ne!(status, 202, "{refused}");
    harness::wait_until("it is told", || {
        bed.daemon.get(&bed.vbd).1["problem"]["detail"].as_str().is_some_and(|said| said.contains("has not responded"))
    });
    assert_eq!(disks::state(&bed.daemon, &bed.vbd), "plugged");
    signal("-CONT");
    harness::wait_until("it is told that it answers", || bed.daemon.get(&bed.vbd).1["problem"].is_null());
    signal("-STOP");
    let unplugged = bed.daemon.post(&format!("{}/unplug", bed.vbd), json!({ "force": true }));
    assert_eq!(unplugged.0, 202, "{}", unplugged.1);
    bed.daemon.wait(&unplugged.1);
    assert_eq!(disks::state(&bed.daemon, &bed.vbd), "unplugged");
    bed.daemon.settle();
    disks::plug(&bed.daemon, &bed.vbd);
    bed.io(&["read -P 1 0 8M"]);
}

/// A process that uses a file without the catalogue's knowledge.
struct Other(Child);

impl Other {
    /// A process that only reads.
    fn of(bed: &Bed, files: &[String]) -> Other {
        Other::with(bed, files, &["--read-only"])
    }

    fn with(bed: &Bed, files: &[String], words: &[&str]) -> Other {
        let socket = bed.daemon.room().join("other.sock");
        let mut other = Command::new(harness::disk_program());
        for (depth, file) in files.iter().enumerate() {
            other.arg(if depth == 0 { "serve" } else { "--parent" });
            other.arg(format!("qcow2:{}", bed.directory().join(file).display()));
        }
        other.arg("--nbd").arg(&socket).args(words).stdout(Stdio::null()).stderr(Stdio::null());
        let other = Other(other.spawn().unwrap());
        harness::wait_until("the other is there", || UnixStream::connect(&socket).is_ok());
        other
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// For instance the disk of another host whose daemon has died: the file to which its guest writes is not removed.
#[test]
fn a_disk_written_by_an_unknown_process_is_neither_destroyed_nor_reverted() {
    let bed = bed();
    let snapshot = bed.snapshot();
    disks::unplug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    let (files, _) = bed.recorded();
    let other = Other::with(&bed, &files, &[]);
    let (status, refused) = bed.daemon.delete(&format!("/vdis/{}", bed.vdi));
    assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("open for writing"), "{refused}");
    let (status, refused) = bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), json!({ "snapshot": snapshot }));
    assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
    assert!(bed.directory().join(&files[0]).exists());
    drop(other);
    bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), json!({ "snapshot": snapshot })));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", bed.vdi)));
    bed.daemon.settle();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_file_in_use_is_removed_later() {
    let bed = bed();
    disks::unplug(&bed.daemon, &bed.vbd);
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    let (files, _) = bed.recorded();
    let other = Other::of(&bed, &files);
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", bed.vdi)));
    harness::wait_until("it says why the file stays", || bed.daemon.log().contains("a process is using it"));
    assert!(bed.directory().join(&files[0]).exists());
    drop(other);
    harness::wait_until("it is removed", || !bed.directory().join(&files[0]).exists());
    bed.daemon.settle();
}

/// A step that can neither be rolled back nor completed: the last step of a revert removes a file in use.
#[test]
fn a_task_that_cannot_end_says_why_and_can_be_abandoned() {
    let bed = bed();
    let snapshot = bed.snapshot();
    disks::unplug(&bed.daemon, &bed.vbd);
    let (files, _) = bed.recorded();
    let other = Other::of(&bed, &files);
    let (status, task) = bed.daemon.post(&format!("/vdis/{}/revert", bed.vdi), json!({ "snapshot": snapshot }));
    assert_eq!(status, 202, "{task}");
    let task = format!("/tasks/{}", task["uuid"].as_str().unwrap());
    harness::wait_until("it says why it is tried again", || {
        let problem = &bed.daemon.get(&task).1["problem"]["detail"];
        problem.as_str().is_some_and(|said| said.contains("a process is using it"))
    });
    assert_eq!(bed.daemon.get(&task).1["state"], "running");
    assert_eq!(bed.daemon.post(&format!("{task}/cancel"), json!({})).0, 409);
    let (status, abandoned) = bed.daemon.post(&format!("{task}/abandon"), json!({}));
    assert_eq!((status, &abandoned["state"]), (200, &json!("failed")), "{abandoned}");
    assert!(abandoned["problem"]["advice"].as_str().unwrap().contains("diverged"), "{abandoned}");
    bed.daemon.settle();
    assert!(bed.directory().join(&files[0]).exists());
    assert_eq!(bed.daemon.post(&format!("{task}/abandon"), json!({})).0, 409);
    drop(other);
    // Its objects can be used again once the state has been resolved.
    let (status, refused) = bed.daemon.post(&format!("{}/plug", bed.vbd), json!({}));
    assert_eq!((status, &refused["code"]), (409, &json!("state")), "{refused}");
    // Forgetting and introducing a repository does not resolve it.
    assert_eq!(bed.daemon.delete(&bed.vbd).0, 204);
    let sr = bed.daemon.get("/srs").1[0]["uuid"].as_str().unwrap().to_owned();
    bed.daemon.done(bed.daemon.post(&format!("/srs/{sr}/detach"), json!({})));
    assert_eq!(bed.daemon.post(&format!("/srs/{sr}/forget"), json!({})).0, 204);
    let source = json!({ "type": "dir", "path": bed.directory() });
    bed.daemon.done(bed.daemon.post("/srs/introduce", json!({ "uuid": sr, "source": source })));
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["state"], "diverged");
    let decided = bed.daemon.post(&format!("/vdis/{}/reconcile", bed.vdi), json!({ "believe": "catalogue" }));
    assert_eq!((decided.0, &decided.1["state"]), (200, &json!("ready")), "{}", decided.1);
    disks::plug(&bed.daemon, &disks::vbd(&bed.daemon, &bed.vdi, "nbd"));
}
