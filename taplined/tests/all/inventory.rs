//! Repositories with an inventory: it matches the catalogue, and restores what an older catalogue lacks.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness;
use crate::harness::mounted::Mounted;
use crate::harness::{Taplined, disks, start};

const INVENTORY: &str = ".tapline-inventory.jsonl";

/// A daemon with a repository that contains a disk, two snapshots and a clone, and a read-only disk.
struct Bed {
    daemon: Taplined,
    sr: String,
    path: PathBuf,
    vdi: String,
}

fn bed() -> Bed {
    let daemon = start();
    let sr = daemon.repository("vms");
    let path = daemon.room().join("vms");
    let made = daemon.post("/vdis", json!({ "sr": sr, "name": "web", "description": "the\nsite", "size": 8 << 20 }));
    let vdi = daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let bed = Bed { daemon, sr, path, vdi };
    bed.verb("snapshot", json!({ "name": "before" }));
    bed.verb("clone", json!({ "name": "try" }));
    bed.verb("snapshot", json!({ "name": "after" }));
    let other = bed.create("template");
    assert_eq!(
        bed.daemon.patch(&format!("/vdis/{other}"), json!({ "read_only": true, "logical_block_size": 4096 })).0,
        200
    );
    let labels = json!({ "tags": ["ssd", "prod"], "other_config": { "backup": "nightly" } });
    assert_eq!(bed.daemon.patch(&format!("/vdis/{other}"), labels.clone()).0, 200);
    assert_eq!(bed.daemon.patch(&format!("/srs/{}", bed.sr), json!({ "description": "fast" })).0, 200);
    assert_eq!(bed.daemon.patch(&format!("/srs/{}", bed.sr), labels).0, 200);
    bed
}

impl Bed {
    fn verb(&self, verb: &str, body: Value) -> String {
        let done = self.daemon.done(self.daemon.post(&format!("/vdis/{}/{verb}", self.vdi), body));
        done["uuid"].as_str().unwrap().into()
    }

    fn create(&self, name: &str) -> String {
        let made = self.daemon.post("/vdis", json!({ "sr": self.sr, "name": name, "size": 8 << 20 }));
        self.daemon.done(made)["uuid"].as_str().unwrap().into()
    }

    fn post(&self, verb: &str) {
        self.daemon.done(self.daemon.post(&format!("/srs/{}/{verb}", self.sr), json!({})));
    }

    fn file(&self) -> PathBuf {
        self.path.join(INVENTORY)
    }

    /// The current catalogue: its file, and its write-ahead log.
    fn catalogue(&mut self) -> Catalogue {
        assert!(self.daemon.stop());
        let copied = self.copied();
        self.daemon.restart();
        copied
    }

    /// A copy of the catalogue while no daemon runs.
    fn copied(&self) -> Catalogue {
        ["catalogue.db", "catalogue.db-wal"].map(|name| (name, fs::read(self.state(name)).unwrap_or_default()))
    }

    fn state(&self, name: &str) -> PathBuf {
        self.daemon.room().join("state").join(name)
    }

    /// Replaces the catalogue with an older copy, and starts a daemon with it.
    fn restore(&mut self, catalogue: &Catalogue) {
        assert!(self.daemon.stop());
        fs::remove_file(self.state("catalogue.db-shm")).ok();
        for (name, bytes) in catalogue {
            fs::write(self.state(name), bytes).unwrap();
        }
        self.daemon.restart();
    }
}

type Catalogue = [(&'static str, Vec<u8>); 2];

/// All data about VDIs, except what is local to a host or measured.
fn vdis(daemon: &Taplined) -> Vec<Value> {
    let mut vdis = daemon.get("/vdis").1.as_array().unwrap().clone();
    for vdi in &mut vdis {
        vdi.as_object_mut().unwrap().remove("physical_utilisation");
    }
    vdis
}

fn sr(daemon: &Taplined, uuid: &str) -> Value {
    daemon.get(&format!("/srs/{uuid}")).1
}

fn files(path: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_forgotten_repository_is_restored_by_introducing_it_on_any_host() {
    let bed = bed();
    let known = vdis(&bed.daemon);
    assert_eq!(known.len(), 5);
    let snapshots = known.iter().filter(|vdi| vdi["snapshot_of"] == json!(bed.vdi)).count();
    assert_eq!(snapshots, 2, "{known:?}");
    disks::inventory_agrees(&bed.daemon);
    let images = files(&bed.path);
    bed.post("detach");
    assert_eq!(bed.daemon.post(&format!("/srs/{}/forget", bed.sr), json!({})).0, 204);
    assert_eq!(vdis(&bed.daemon), Vec::<Value>::new());

    let body = json!({ "uuid": bed.sr, "source": { "type": "dir", "path": bed.path } });
    let other = start();
    for daemon in [&bed.daemon, &other] {
        daemon.done(daemon.post("/srs/introduce", body.clone()));
        assert_eq!(vdis(daemon), known);
        let shown = sr(daemon, &bed.sr);
        assert_eq!((&shown["name"], &shown["description"]), (&json!("vms"), &json!("fast")), "{shown}");
        let labels = (&shown["tags"], &shown["other_config"]);
        assert_eq!(labels, (&json!(["prod", "ssd"]), &json!({ "backup": "nightly" })), "{shown}");
        assert_eq!(daemon.get("/vdis?tag=ssd").1[0]["name"], "template");
        let scan = daemon.done(daemon.post(&format!("/srs/{}/scan", bed.sr), json!({})));
        assert_eq!((&scan["appeared"], &scan["missing"], &scan["unplaced"]), (&json!([]), &json!([]), &json!([])));
        assert_eq!((vdis(daemon), files(&bed.path)), (known.clone(), images.clone()));
        disks::inventory_agrees(daemon);
        daemon.done(daemon.post(&format!("/srs/{}/detach", bed.sr), json!({})));
    }
    // Changes by the other host are noticed here when it is attached the next time.
    other.done(other.post(&format!("/srs/{}/attach", bed.sr), json!({})));
    other.done(other.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({ "name": "elsewhere" })));
    let known = vdis(&other);
    other.done(other.post(&format!("/srs/{}/detach", bed.sr), json!({})));
    bed.post("attach");
    assert_eq!((vdis(&bed.daemon), known.len()), (known, 6));
}

#[test]
fn a_name_given_on_introduction_replaces_the_recorded_one() {
    let bed = bed();
    bed.post("detach");
    bed.daemon.post(&format!("/srs/{}/forget", bed.sr), json!({}));
    let source = json!({ "type": "dir", "path": bed.path });
    let given = json!({ "uuid": bed.sr, "name": "new", "source": source, "tags": ["hdd"] });
    bed.daemon.done(bed.daemon.post("/srs/introduce", given));
    let shown = sr(&bed.daemon, &bed.sr);
    assert_eq!((&shown["name"], &shown["description"]), (&json!("new"), &json!("fast")), "{shown}");
    let labels = (&shown["tags"], &shown["other_config"]);
    assert_eq!(labels, (&json!(["hdd"]), &json!({ "backup": "nightly" })), "{shown}");
    disks::inventory_agrees(&bed.daemon);
    assert_eq!(bed.daemon.get(&format!("/srs/{}/inventory", bed.sr)).1["name"], "new");
}

#[test]
fn an_older_catalogue_is_upgraded() {
    let mut bed = bed();
    let old = bed.catalogue();
    let gone = bed.create("gone soon");
    bed.verb("snapshot", json!({ "name": "later" }));
    bed.verb("resize", json!({ "size": 16 << 20 }));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{gone}")));
    bed.daemon.patch(&format!("/vdis/{}", bed.vdi), json!({ "name": "site", "tags": ["new"] }));
    bed.daemon.patch(&format!("/srs/{}", bed.sr), json!({ "other_config": {} }));
    let known = vdis(&bed.daemon);
    let images = files(&bed.path);
    bed.restore(&old);
    assert_eq!(vdis(&bed.daemon), known, "{}", bed.daemon.log());
    let shown = sr(&bed.daemon, &bed.sr);
    assert_eq!((&shown["tags"], &shown["other_config"]), (&json!(["prod", "ssd"]), &json!({})), "{shown}");
    assert!(bed.daemon.log().contains("brought up to date"));
    // SQLite silently drops transactions at a damaged end of the write-ahead log; the repositories still have them.
    bed.verb("snapshot", json!({ "name": "last" }));
    disks::inventory_agrees(&bed.daemon);
    let known = vdis(&bed.daemon);
    bed.daemon.restart();
    assert_eq!(vdis(&bed.daemon), known);
    assert_eq!(files(&bed.path).len(), images.len() + 1);
}

#[test]
fn a_job_of_an_older_catalogue_removes_nothing_newer() {
    let mut bed = bed();
    // The copy is made while a VDI is being created, and the VDI is completed afterwards.
    bed.daemon.restart_with(&[(harness::ABORT_AT, "vdi-create:record")]);
    bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "new", "size": 8 << 20 }));
    bed.daemon.wait_for_death();
    // A moment before: a rollback is still possible, and that daemon would remove the file.
    let place = bed.daemon.room().join("copy");
    fs::create_dir(&place).unwrap();
    for (name, bytes) in bed.copied() {
        fs::write(place.join(name), bytes).unwrap();
    }
    let copy = rusqlite::Connection::open(place.join("catalogue.db")).unwrap();
    let back = "UPDATE task SET step = 'file' WHERE verb = 'vdi-create' AND ended IS NULL";
    assert_eq!(copy.execute(back, []).unwrap(), 1);
    drop(copy);
    let copied = [("catalogue.db", fs::read(place.join("catalogue.db")).unwrap()), ("catalogue.db-wal", Vec::new())];
    bed.daemon.restart();
    harness::wait_until("it is made", || bed.daemon.get("/tasks?open=true").1 == json!([]));
    assert_eq!(vdis(&bed.daemon).len(), 6);
    bed.create("another");
    let (known, images) = (vdis(&bed.daemon), files(&bed.path));
    bed.restore(&copied);
    assert_eq!((vdis(&bed.daemon), files(&bed.path)), (known, images), "{}", bed.daemon.log());
    assert_eq!(bed.daemon.get("/tasks?open=true").1, json!([]));
}

/// The daemon runs when the repository's inventory is chosen over its catalogue: jobs of the catalogue must not
/// continue on a state that no longer exists.
#[test]
fn a_job_of_a_diverged_catalogue_ends_when_the_repository_is_chosen() {
    let mut bed = bed();
    let twin = bed.daemon.room().join("twin");
    fs::create_dir(&twin).unwrap();
    let copy = |from: &Path, to: &Path| {
        for name in files(from) {
            fs::copy(from.join(&name), to.join(&name)).unwrap();
        }
    };
    bed.daemon.restart_with(&[("TAPLINED_ABORT_AT", "inventory:append")]);
    copy(&bed.path, &twin);
    let vdi = format!("/vdis/{}/snapshot", bed.vdi);
    bed.daemon.post_and_die(&vdi, json!({ "name": "lost" }));
    // Another host has used it in the meantime.
    let other = start();
    let source = json!({ "type": "dir", "path": twin });
    other.done(other.post("/srs/introduce", json!({ "uuid": bed.sr, "source": source })));
    other.done(other.post(&vdi, json!({ "name": "kept" })));
    let there = vdis(&other);
    other.done(other.post(&format!("/srs/{}/detach", bed.sr), json!({})));
    fs::remove_dir_all(&bed.path).unwrap();
    fs::rename(&twin, &bed.path).unwrap();
    bed.daemon.restart();
    assert_eq!(sr(&bed.daemon, &bed.sr)["state"], "lost", "{}", bed.daemon.log());
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/attach", bed.sr), json!({ "believe": "repository" })));
    harness::wait_until("nothing is under way", || bed.daemon.get("/tasks?open=true").1 == json!([]));
    assert_eq!(vdis(&bed.daemon), there, "{}", bed.daemon.log());
    bed.verb("snapshot", json!({ "name": "next" }));
}

/// Makes a repository and a catalogue diverge; returns the VDIs of both.
fn diverged() -> (Bed, Vec<Value>, Vec<Value>) {
    let mut bed = bed();
    let old = bed.catalogue();
    let twin = bed.daemon.room().join("twin");
    bed.create("there");
    bed.create("there too");
    let there = vdis(&bed.daemon);
    bed.post("detach");
    fs::rename(&bed.path, &twin).unwrap();
    fs::create_dir(&bed.path).unwrap();
    // The state when the catalogue was copied, without the two VDIs.
    for name in files(&twin) {
        fs::copy(twin.join(&name), bed.path.join(&name)).unwrap();
    }
    let lines = fs::read_to_string(bed.file()).unwrap();
    let kept: Vec<&str> = lines.split_inclusive('\n').collect();
    fs::write(bed.file(), kept[..kept.len() - 2].concat()).unwrap();
    bed.restore(&old);
    bed.create("here");
    let here = vdis(&bed.daemon);
    bed.post("detach");
    fs::copy(twin.join(INVENTORY), bed.file()).unwrap();
    (bed, there, here)
}

#[test]
fn nothing_is_changed_after_divergence_until_it_is_resolved() {
    for believed in ["repository", "catalogue"] {
        let (bed, there, here) = diverged();
        let before = (files(&bed.path), fs::read(bed.file()).unwrap());
        let refused = bed.daemon.failed(bed.daemon.post(&format!("/srs/{}/attach", bed.sr), json!({})));
        let message = refused["detail"].as_str().unwrap();
        assert!(message.contains("'there'") && message.contains("'here'") && message.contains("diverged"), "{message}");
        assert!(refused["advice"].as_str().unwrap().contains("--believe"), "{refused}");
        assert_eq!((files(&bed.path), fs::read(bed.file()).unwrap()), before);
        assert_eq!(vdis(&bed.daemon), here);

        let attach = format!("/srs/{}/attach", bed.sr);
        bed.daemon.done(bed.daemon.post(&attach, json!({ "believe": believed })));
        let after = vdis(&bed.daemon);
        let uuids = |vdis: &[Value]| vdis.iter().map(|vdi| vdi["uuid"].clone()).collect::<Vec<_>>();
        assert_eq!(uuids(&after), uuids(if believed == "repository" { &there } else { &here }));
        assert!(after.iter().all(|vdi| vdi["state"] == "ready"), "{after:?}");
        disks::inventory_agrees(&bed.daemon);
        assert_eq!(bed.path.join(format!("{INVENTORY}.damaged")).exists(), believed == "catalogue");
        bed.post("detach");
        bed.post("attach");
    }
}

#[test]
fn a_restored_repository_backup_is_reported() {
    let bed = bed();
    bed.post("detach");
    let old = fs::read(bed.file()).unwrap();
    bed.post("attach");
    bed.create("one");
    bed.create("two");
    bed.post("detach");
    fs::write(bed.file(), old).unwrap();
    let refused = bed.daemon.failed(bed.daemon.post(&format!("/srs/{}/attach", bed.sr), json!({})));
    let message = refused["detail"].as_str().unwrap();
    assert!(["Only in the catalogue: ", "'one'", "'two'"].iter().all(|part| message.contains(part)), "{refused}");
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/attach", bed.sr), json!({ "believe": "catalogue" })));
    assert_eq!(vdis(&bed.daemon).len(), 7);
}

/// An operator who only sees that the repository is lost has not read the log.
#[test]
fn a_repository_refused_at_start_is_reported_with_advice() {
    let mut bed = bed();
    bed.post("detach");
    let old = fs::read(bed.file()).unwrap();
    bed.post("attach");
    bed.create("one");
    bed.create("two");
    bed.daemon.kill();
    fs::write(bed.file(), old).unwrap();
    bed.daemon.restart();
    let lost = sr(&bed.daemon, &bed.sr);
    assert_eq!(lost["state"], "lost", "{lost}");
    assert!(lost["problem"]["detail"].as_str().unwrap().contains("diverged"), "{lost}");
    assert!(lost["problem"]["advice"].as_str().unwrap().contains("--believe"), "{lost}");
    let refused = bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "three", "size": 1 << 20 })).1;
    assert!(refused["detail"].as_str().unwrap().contains("diverged"), "{refused}");
    assert!(refused["advice"].as_str().unwrap().contains("--believe"), "{refused}");
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/attach", bed.sr), json!({ "believe": "catalogue" })));
    let attached = sr(&bed.daemon, &bed.sr);
    assert_eq!((&attached["state"], &attached["problem"]), (&json!("attached"), &Value::Null));
}

#[test]
fn a_damaged_inventory_is_rewritten_only_by_a_complete_catalogue() {
    let bed = bed();
    let known = vdis(&bed.daemon);
    bed.post("detach");
    let mut bytes = fs::read(bed.file()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(bed.file(), &bytes).unwrap();

    let other = start();
    let body = json!({ "uuid": bed.sr, "source": { "type": "dir", "path": bed.path } });
    let refused = other.failed(other.post("/srs/introduce", body));
    assert!(refused["detail"].as_str().unwrap().contains("line"), "{refused}");
    assert_eq!((other.get("/srs").1, fs::read(bed.file()).unwrap()), (json!([]), bytes.clone()));

    bed.post("attach");
    assert_eq!(vdis(&bed.daemon), known);
    disks::inventory_agrees(&bed.daemon);
    assert_eq!(fs::read(bed.path.join(format!("{INVENTORY}.damaged"))).unwrap(), bytes);
    let scan = bed.daemon.done(bed.daemon.post(&format!("/srs/{}/scan", bed.sr), json!({})));
    assert_eq!((&scan["counts"]["notes"], &scan["unplaced"]), (&json!(4), &json!([])), "{scan}");
}

#[test]
fn a_removed_or_replaced_inventory_is_rewritten() {
    let bed = bed();
    let older = fs::read(bed.file()).unwrap();
    bed.create("later");
    let spoil = |now: &[u8]| {
        let mut other = now.to_vec();
        let last = other.len() - 10;
        other[last] ^= 1;
        [
            Some(Vec::new()),
            Some(now[..100].to_vec()),
            Some(older.clone()),
            Some([b"\n", now, now].concat()),
            Some(other),
            None,
        ]
    };
    for n in 0..6 {
        let before = fs::read(bed.file()).unwrap();
        let there = &spoil(&before)[n];
        match there {
            Some(bytes) => fs::write(bed.file(), bytes).unwrap(),
            None => fs::remove_file(bed.file()).unwrap(),
        }
        bed.create(&format!("behind {n}"));
        disks::inventory_agrees(&bed.daemon);
        // The user who put it there finds it again.
        let kept = bed.path.join(format!("{INVENTORY}.damaged"));
        assert_eq!(fs::read(&kept).ok(), there.clone(), "{n}");
        fs::remove_file(kept).ok();
    }
    // Its history is unbroken: after forgetting and introducing it, everything is back.
    let known = vdis(&bed.daemon);
    bed.post("detach");
    bed.post("attach");
    assert_eq!(vdis(&bed.daemon), known);
}

#[test]
fn a_copy_of_a_repository_is_recognized() {
    let bed = bed();
    let copy = bed.daemon.room().join("copy");
    bed.post("detach");
    fs::create_dir(&copy).unwrap();
    for name in files(&bed.path) {
        fs::copy(bed.path.join(&name), copy.join(&name)).unwrap();
    }
    bed.post("attach");
    let body = json!({ "uuid": bed.sr, "source": { "type": "dir", "path": copy } });
    assert_eq!(bed.daemon.post("/srs/introduce", body).1["code"], "exists");
    // With its own label, its inventory is still that of the original.
    let label = fs::read_to_string(copy.join(".tapline-sr.json")).unwrap();
    let own = "5e000000-0000-4000-8000-000000000001";
    fs::write(copy.join(".tapline-sr.json"), label.replace(&bed.sr, own)).unwrap();
    let body = json!({ "uuid": own, "source": { "type": "dir", "path": copy } });
    let refused = bed.daemon.failed(bed.daemon.post("/srs/introduce", body));
    assert!(refused["detail"].as_str().unwrap().contains("another repository"), "{refused}");
    assert_eq!(vdis(&bed.daemon).len(), 5);
}

#[test]
fn a_repository_without_inventory_gets_one() {
    let mut bed = bed();
    let known = vdis(&bed.daemon);
    assert!(bed.daemon.stop());
    fs::remove_file(bed.file()).unwrap();
    bed.daemon.restart();
    disks::inventory_agrees(&bed.daemon);
    let (status, shown) = bed.daemon.get(&format!("/srs/{}/inventory", bed.sr));
    assert_eq!((status, shown["vdis"].as_array().unwrap().len()), (200, known.len()));
    let at = json!({ "source": { "type": "dir", "path": bed.path } });
    assert_eq!(bed.daemon.post("/srs/inventory", at.clone()).1, shown);
    bed.post("detach");
    assert_eq!(bed.daemon.post("/srs/inventory", at).1, shown);
}

#[test]
fn the_inventory_matches_the_catalogue_after_any_kill() {
    for point in ["inventory:append", "inventory:append:after"] {
        let mut bed = bed();
        bed.daemon.restart_with(&[(harness::ABORT_AT, point)]);
        // According to the catalogue, it is complete when the daemon is killed.
        bed.daemon.post(&format!("/vdis/{}/snapshot", bed.vdi), json!({ "name": "last" }));
        bed.daemon.wait_for_death();
        bed.daemon.restart();
        harness::wait_until("it is done", || bed.daemon.get("/tasks?open=true").1 == json!([]));
        assert_eq!(vdis(&bed.daemon).len(), 6);
        disks::inventory_agrees(&bed.daemon);
        bed.post("detach");
        let other = start();
        let body = json!({ "uuid": bed.sr, "source": { "type": "dir", "path": bed.path } });
        other.done(other.post("/srs/introduce", body));
        assert_eq!(vdis(&other), vdis(&bed.daemon), "{point}");
    }
}

/// Its process uses a leaf that the restored catalogue does not contain: if the process dies, its replacement uses it
/// too.
#[test]
fn a_running_disk_survives_a_restored_catalogue() {
    let mut bed = bed();
    let vbd = disks::vbd(&bed.daemon, &bed.vdi, "nbd");
    disks::plug(&bed.daemon, &vbd);
    let io = |daemon: &Taplined, command: &str| {
        let (well, said) = disks::io(&disks::nbd(daemon, &vbd), &[command, "flush"]);
        assert!(well, "{said}\n{}", daemon.log());
    };
    io(&bed.daemon, "write -P 1 0 1M");
    let old = bed.catalogue();
    bed.verb("snapshot", json!({ "name": "live" }));
    io(&bed.daemon, "write -P 2 1M 1M");
    let known = vdis(&bed.daemon);
    let running = disks::processes(&bed.daemon);
    bed.restore(&old);
    assert_eq!(disks::processes(&bed.daemon), running);
    let same = |one: &Value, other: &Value| {
        (&one["uuid"], &one["file"], &one["depth"]) == (&other["uuid"], &other["file"], &other["depth"])
    };
    let now = vdis(&bed.daemon);
    assert!(
        now.len() == known.len() && now.iter().zip(&known).all(|(one, other)| same(one, other)),
        "{now:?} {known:?}"
    );
    io(&bed.daemon, "read -P 2 1M 1M");
    for pid in &running {
        crate::harness::kill(&pid);
    }
    harness::wait_until("another process serves it", || {
        let shown = bed.daemon.get(&vbd).1;
        let pid = shown["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
        shown["state"] == "plugged" && pid.is_some_and(|pid| !running.contains(&pid))
    });
    io(&bed.daemon, "read -P 1 0 1M");
    io(&bed.daemon, "read -P 2 1M 1M");
    disks::unplug(&bed.daemon, &vbd);
    disks::inventory_agrees(&bed.daemon);
}

/// Freeing space is recorded first, and space for that record is reserved.
#[test]
fn on_a_full_file_system_a_disk_can_be_destroyed() {
    let daemon = start();
    let path = daemon.room().join("small");
    fs::create_dir(&path).unwrap();
    let Some(_mounted) = Mounted::over(path.clone(), &["-t", "tmpfs", "-o", "size=16m", "small"]) else {
        harness::not_run("a test on a file system that is full: only root can mount one");
        return;
    };
    let made = daemon.post("/srs", json!({ "name": "small", "source": { "type": "dir", "path": path } }));
    let sr = daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let made = daemon.post("/vdis", json!({ "sr": sr, "name": "disk", "size": 1 << 20 }));
    let vdi = daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let full = fs::write(path.join("others"), vec![1; 32 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(28), "{full}");
    // The inventory grows by many lines; then the VDI is destroyed.
    for n in 0..200 {
        daemon.patch(&format!("/vdis/{vdi}"), json!({ "name": format!("disk {n}") }));
    }
    daemon.done(daemon.delete(&format!("/vdis/{vdi}")));
    disks::inventory_agrees(&daemon);
    daemon.done(daemon.delete(&format!("/srs/{sr}")));
}
