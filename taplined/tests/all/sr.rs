//! Repositories over the API of the real daemon, on real directories.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{Taplined, start, start_with, wait_until};

fn dir(path: &Path) -> Value {
    json!({ "type": "dir", "path": path })
}

fn create(path: &Path) -> Value {
    json!({ "name": "disks", "source": dir(path) })
}

fn sr(daemon: &Taplined, uuid: &str) -> Value {
    let (status, sr) = daemon.get(&format!("/srs/{uuid}"));
    assert_eq!(status, 200, "{sr}");
    sr
}

fn directory(daemon: &Taplined, name: &str) -> std::path::PathBuf {
    let path = daemon.room().join(name);
    fs::create_dir(&path).unwrap();
    path
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_repository_goes_through_its_life_cycle() {
    let daemon = start();
    let path = directory(&daemon, "vms");
    let uuid = daemon.done(daemon.post("/srs", create(&path)))["uuid"].as_str().unwrap().to_owned();
    let made = sr(&daemon, &uuid);
    assert_eq!((&made["state"], &made["variant"]["path"]), (&json!("attached"), &json!(path)));
    assert!(made["space"]["physical_size"].as_u64().unwrap() > 0, "{made}");
    for like in ["disks", &uuid[..8]] {
        assert_eq!(daemon.get(&format!("/srs?match={like}")).1.as_array().unwrap().len(), 1, "{like}");
    }
    assert_eq!(daemon.get("/srs?match=disk").1, json!([]));

    let (_, found) = daemon.post("/srs/probe", json!({ "source": dir(&path) }));
    assert_eq!(found, json!([{ "uuid": uuid, "name": "disks", "known": true, "images": 0 }]));
    assert_eq!(daemon.post(&format!("/srs/{uuid}/forget"), json!({})).1["code"], "state");
    daemon.done(daemon.post(&format!("/srs/{uuid}/detach"), json!({})));
    assert_eq!(sr(&daemon, &uuid)["state"], "detached");
    assert_eq!(daemon.post(&format!("/srs/{uuid}/scan"), json!({})).1["code"], "state");
    assert_eq!(daemon.post(&format!("/srs/{uuid}/forget"), json!({})).0, 204);
    assert_eq!(daemon.get("/srs").1, json!([]));

    let introduce = |more: Value| {
        let mut body = create(&path);
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        daemon.post("/srs/introduce", body)
    };
    assert_eq!(introduce(json!({})).1["field"], "uuid");
    assert_eq!(introduce(json!({ "uuid": "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d" })).1["code"], "not-found");
    daemon.done(introduce(json!({ "uuid": uuid })));
    assert_eq!(sr(&daemon, &uuid)["state"], "attached");

    fs::write(path.join("notes.txt"), "others'").unwrap();
    let (status, plan) = daemon.delete(&format!("/srs/{uuid}?dry_run=true"));
    assert_eq!((status, &plan["leaves"]), (200, &json!(["notes.txt"])));
    assert_eq!(names(&path).len(), 4);
    daemon.done(daemon.delete(&format!("/srs/{uuid}")));
    assert_eq!(names(&path), ["notes.txt"]);
    assert_eq!(daemon.get(&format!("/srs/{uuid}")).0, 404);
}

#[test]
fn invalid_values_are_refused_by_field() {
    let daemon = start();
    let path = directory(&daemon, "vms");
    let with = |name: &str, value: Value| {
        let mut body = create(&path);
        body[name] = value;
        let (status, problem) = daemon.post("/srs", body);
        (status, problem["field"].as_str().unwrap_or_default().to_owned())
    };
    let refused = |field: &str| (400, field.to_owned());
    assert_eq!(with("reserve", json!(u64::MAX)), refused("reserve"));
    assert_eq!(with("name", json!("a\u{7}")), refused("name"));
    assert_eq!(with("nam", json!("a")), refused("nam"));
    // For a tagged value serde reports only that it is in the source.
    assert_eq!(with("source", json!({ "type": "dir", "path": "/a/../b" })).0, 400);
    assert_eq!(with("source", json!({ "type": "nfs", "server": "-o", "export": "/a" })), refused("source.server"));
    assert_eq!(daemon.get("/srs").1, json!([]));
    assert_eq!(names(&path).len(), 0);
}

#[test]
fn an_unsuitable_directory_is_refused_and_unchanged() {
    let daemon = start();
    let full = directory(&daemon, "full");
    fs::write(full.join("a"), "").unwrap();
    assert_eq!(daemon.failed(daemon.post("/srs", create(&full)))["code"], "exists");
    assert_eq!(names(&full), ["a"]);
    let below_a_file = full.join("a/vms");
    assert_eq!(daemon.failed(daemon.post("/srs", create(&below_a_file)))["field"], "source");
    assert_eq!(names(&full), ["a"]);

    let path = directory(&daemon, "vms");
    daemon.done(daemon.post("/srs", create(&path)));
    assert_eq!(daemon.post("/srs", create(&path)).1["code"], "exists");
    // Another daemon of this host cannot attach it at the same time.
    let other = start();
    assert_eq!(other.failed(other.post("/srs", create(&path)))["code"], "exists");
    let uuid = daemon.get("/srs").1[0]["uuid"].clone();
    let mut introduced = create(&path);
    introduced["uuid"] = uuid.clone();
    assert_eq!(other.failed(other.post("/srs/introduce", introduced.clone()))["code"], "in-use");
    daemon.done(daemon.post(&format!("/srs/{}/detach", uuid.as_str().unwrap()), json!({})));
    other.done(other.post("/srs/introduce", introduced));
}

#[test]
fn a_missing_directory_is_created_with_its_parents() {
    let daemon = start();
    let path = daemon.room().join("srv/tapline/vms");
    let result = daemon.done(daemon.post("/srs", create(&path)));
    assert_eq!(result["created_directory"], json!(path));
    let uuid = result["uuid"].as_str().unwrap();
    assert_eq!(sr(&daemon, uuid)["variant"]["path"], json!(path));

    daemon.done(daemon.delete(&format!("/srs/{uuid}")));
    assert_eq!(daemon.done(daemon.post("/srs", create(&path)))["created_directory"], Value::Null, "it exists");
}

#[test]
fn a_failed_creation_removes_the_directories_it_created() {
    let daemon = start();
    let above = directory(&daemon, "srv");
    let mut body = create(&above.join("tapline/vms"));
    body["reserve"] = json!(1_u64 << 60);
    assert_eq!(daemon.failed(daemon.post("/srs", body))["field"], "reserve");
    assert!(names(&above).is_empty(), "{:?}", names(&above));
}

#[test]
fn repositories_are_reattached_or_lost_until_back() {
    let mut daemon = start_with("[storage]\nlost-interval = 1", &[]);
    let (stays, goes) = (daemon.repository("stays"), daemon.repository("goes"));
    let (path, aside) = (daemon.room().join("goes"), daemon.room().join("aside"));
    daemon.kill();
    fs::rename(&path, &aside).unwrap();
    daemon.restart();
    assert_eq!(sr(&daemon, &stays)["state"], "attached");
    assert_eq!(sr(&daemon, &goes)["state"], "lost");
    let why = sr(&daemon, &goes)["problem"]["detail"].clone();
    assert!(why.as_str().unwrap().contains(path.to_str().unwrap()), "{why}");
    let scan = daemon.post(&format!("/srs/{goes}/scan"), json!({})).1;
    assert!(scan["code"] == "state" && scan["advice"].as_str().unwrap().contains("storage"), "{scan}");
    // Another directory at its path is not the repository.
    fs::create_dir(&path).unwrap();
    assert_eq!(daemon.failed(daemon.post(&format!("/srs/{goes}/attach"), json!({})))["code"], "state");
    fs::remove_dir(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    wait_until("the repository is found again", || sr(&daemon, &goes)["state"] == "attached");
    assert_eq!(sr(&daemon, &goes)["problem"], Value::Null);
}

#[test]
fn a_vanished_repository_is_lost_at_the_next_check() {
    let daemon = start();
    let uuid = daemon.repository("vms");
    fs::rename(daemon.room().join("vms"), daemon.room().join("aside")).unwrap();
    daemon.patch(&format!("/srs/{uuid}"), json!({ "reserve": 4096 }));
    // Another check may have been first, and may still be recording it.
    wait_until("the repository is lost", || sr(&daemon, &uuid)["state"] == "lost");
}

#[test]
fn the_reserve_is_not_free_space() {
    let daemon = start();
    let uuid = daemon.repository("vms");
    let space = sr(&daemon, &uuid)["space"].clone();
    let (free, size) = (space["free"].as_u64().unwrap(), space["physical_size"].as_u64().unwrap());
    let set = |reserve: u64| daemon.patch(&format!("/srs/{uuid}"), json!({ "reserve": reserve, "name": "other" }));
    let (status, refused) = set(size);
    assert_eq!((status, &refused["field"]), (400, &json!("reserve")), "{refused}");
    let (status, patched) = set(size - 512);
    assert_eq!((status, &patched["name"], &patched["space"]["free"]), (200, &json!("other"), &json!(0)));
    assert!(free > 0);
}

#[test]
fn space_is_measured_after_a_task() {
    let daemon = start();
    let uuid = daemon.repository("vms");
    let used = || sr(&daemon, &uuid)["space"]["physical_utilisation"].as_u64().unwrap();
    let before = used();
    fs::write(daemon.room().join("vms/file"), vec![1; 32 << 20]).unwrap();
    // It is already attached: a task only needs to end.
    daemon.done(daemon.post(&format!("/srs/{uuid}/attach"), json!({})));
    wait_until("it is measured", || used() != before);
}

/// The daemon is killed at every step of a job; after its restart the job is done, or nothing of it is left.
#[test]
fn a_killed_creation_is_completed_or_rolled_back() {
    for (point, made) in [("label", false), ("label:after", false), ("record", true), ("record:after", true)] {
        let mut daemon = start_with("", &[(harness::ABORT_AT, &format!("sr-create:{point}"))]);
        let path = directory(&daemon, "vms");
        daemon.post_and_die("/srs", create(&path));
        daemon.restart();
        let task = daemon.get("/tasks").1[0].clone();
        assert_eq!(daemon.wait(&task)["state"] == "done", made, "{point}: {task}");
        let srs = daemon.get("/srs").1;
        assert_eq!(srs.as_array().unwrap().len(), usize::from(made), "{point}");
        assert_eq!(names(&path).is_empty(), !made, "{point}: {:?}", names(&path));
        if made {
            assert_eq!(srs[0]["state"], "attached", "{point}");
            harness::disks::inventory_agrees(&daemon);
        } else {
            daemon.done(daemon.post("/srs", create(&path)));
        }
    }
}

#[test]
fn a_rolled_back_introduction_keeps_an_existing_label() {
    let mut daemon = start_with("", &[(harness::ABORT_AT, "sr-introduce:label:after")]);
    let uuid = daemon.repository("vms");
    let path = daemon.room().join("vms");
    daemon.done(daemon.post(&format!("/srs/{uuid}/detach"), json!({})));
    daemon.post(&format!("/srs/{uuid}/forget"), json!({}));
    let mut body = create(&path);
    body["uuid"] = json!(uuid);
    daemon.post_and_die("/srs/introduce", body.clone());
    daemon.restart();
    assert_eq!(daemon.get("/srs").1, json!([]));
    daemon.done(daemon.post("/srs/introduce", body));
}

#[test]
fn a_killed_destruction_is_rolled_back_only_before_its_first_step() {
    for point in ["remove", "remove:after", "forget", "forget:after"] {
        let mut daemon = start_with("", &[(harness::ABORT_AT, &format!("sr-destroy:{point}"))]);
        let uuid = daemon.repository("vms");
        daemon.ask_and_die("DELETE", &format!("/srs/{uuid}"), None);
        daemon.restart();
        let task = daemon.get("/tasks").1[0].clone();
        assert_eq!(daemon.wait(&task)["state"], "done", "{point}");
        assert_eq!(daemon.get("/srs").1, json!([]), "{point}");
        assert!(names(&daemon.room().join("vms")).is_empty(), "{point}");
    }
}

#[test]
fn an_iso_library_has_read_only_vdis() {
    let daemon = start();
    let path = directory(&daemon, "isos");
    fs::write(path.join("debian 13.iso"), [0; 4096]).unwrap();
    fs::write(path.join("other.vhd"), [0; 4096]).unwrap();
    let made = daemon.post("/srs", json!({ "name": "isos", "source": { "type": "iso", "path": path } }));
    let uuid = daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let scan = daemon.done(daemon.post(&format!("/srs/{uuid}/scan"), json!({})));
    assert_eq!((&scan["appeared"][0]["file"], &scan["unplaced"]), (&json!("debian 13.iso"), &json!([])));
    assert_eq!(names(&path), ["debian 13.iso", "other.vhd"]);
    assert_eq!(daemon.delete(&format!("/srs/{uuid}")).1["code"], "unsupported");

    fs::remove_file(path.join("debian 13.iso")).unwrap();
    let scan = daemon.done(daemon.post(&format!("/srs/{uuid}/scan"), json!({})));
    assert_eq!(scan["missing"].as_array().unwrap().len(), 1);
    fs::write(path.join("debian 13.iso"), [0; 4096]).unwrap();
    let again = daemon.done(daemon.post(&format!("/srs/{uuid}/scan"), json!({})));
    assert_eq!(again["returned"], scan["missing"]);
}

/// Replacements for mount(8) and umount(8), since the kernel may support neither NFS nor SMB. They record their
/// arguments, and mount a tmpfs with the same source.
fn stand_ins(room: &Path) -> String {
    let bin = room.join("bin");
    fs::create_dir(&bin).unwrap();
    let script = |name: &str, does: &str| {
        let records = format!("echo {name} \"$@\" >> {}/words", room.display());
        testkit::program::script(&bin.join(name), &format!("{records}\n{does}"));
    };
    // The real program runs a helper, too, and waits for it.
    let hang = "test -e \"$(dirname $0)/hang\" && { sleep 1000 & echo $! >\"$(dirname $0)/child\"; wait; exit 1; }";
    // mount -t nfs -o OPTIONS -- SOURCE TARGET
    script("mount", &format!("{hang}; exec /bin/mount -t tmpfs -- \"$6\" \"$7\""));
    let busy = "test -e \"$(dirname $0)/busy\" && { echo target is busy >&2; exit 32; }";
    script("umount", &format!("{busy}; exec /bin/umount \"$@\""));
    format!("{}:{}", bin.display(), std::env::var("PATH").unwrap())
}

/// Whether this process may mount; reports it if not.
fn is_root() -> bool {
    let root = fs::read_to_string("/proc/self/status").unwrap().contains("Uid:\t0\t");
    if !root {
        harness::not_run("a test that mounts: only root can");
    }
    root
}

struct Unmounted<'a>(&'a Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        for entry in fs::read_dir(self.0.join("run/sr")).into_iter().flatten().flatten() {
            Command::new("umount").arg(entry.path()).status().ok();
        }
    }
}

fn words(room: &Path) -> Vec<String> {
    fs::read_to_string(room.join("words")).unwrap_or_default().lines().map(String::from).collect()
}

#[test]
fn a_server_is_mounted_once_and_unmounted_at_detach() {
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = stand_ins(place.path());
    let mut daemon = start_with("[storage]\nanswer-timeout = 2", &[("PATH", &path)]);
    let run = daemon.room().to_owned();
    let _unmounted = Unmounted(&run);
    let source = json!({ "type": "nfs", "server": "nas", "export": "/vms", "version": "4.2" });
    let body = json!({ "name": "nas", "source": source });
    let uuid = daemon.done(daemon.post("/srs", body.clone()))["uuid"].as_str().unwrap().to_owned();
    let at = run.join("run/sr").join(&uuid);
    let mounts = words(place.path());
    assert_eq!(mounts.len(), 1, "{mounts:?}");
    assert!(mounts[0].starts_with("mount -t nfs -o hard,nosuid,nodev,noexec,"), "{mounts:?}");
    assert!(mounts[0].ends_with(&format!("vers=4.2 -- nas:/vms {}", at.display())), "{mounts:?}");
    let notes = sr(&daemon, &uuid)["variant"]["notes"].to_string();
    assert!(notes.contains("hard"), "{notes}");

    daemon.kill();
    daemon.restart();
    assert_eq!(sr(&daemon, &uuid)["state"], "attached");
    assert_eq!(words(place.path()).len(), 1, "it is not mounted twice");

    // A repository that cannot be unmounted is not detached.
    fs::write(place.path().join("bin/busy"), "").unwrap();
    let busy = daemon.failed(daemon.post(&format!("/srs/{uuid}/detach"), json!({})));
    assert!(busy["detail"].as_str().unwrap().contains("target is busy"), "{busy}");
    assert_eq!(sr(&daemon, &uuid)["state"], "attached");
    assert!(at.join(".tapline-sr.json").exists());

    fs::remove_file(place.path().join("bin/busy")).unwrap();
    daemon.done(daemon.post(&format!("/srs/{uuid}/detach"), json!({})));
    assert!(!at.exists());
    let lazy = words(place.path())
        .into_iter()
        .find(|words| words.starts_with("umount") && words.split(' ').any(|word| word == "-l"));
    assert_eq!(lazy, None);
    // The server has other contents now: without the label nothing is used.
    assert_eq!(daemon.failed(daemon.post(&format!("/srs/{uuid}/attach"), json!({})))["code"], "state");
    assert!(!at.exists(), "what was mounted in vain is unmounted");
}

#[test]
fn a_foreign_mount_is_not_mistaken_for_the_server() {
    if !is_root() {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let path = stand_ins(place.path());
    let mut daemon = start_with("", &[("PATH", &path)]);
    let run = daemon.room().to_owned();
    let _unmounted = Unmounted(&run);
    let body = json!({ "name": "nas", "source": { "type": "nfs", "server": "nas", "export": "/vms" } });
    let made = daemon.post("/srs", body);
    let uuid = daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let at = run.join("run/sr").join(&uuid);
    daemon.kill();
    let run =
        |program: &str, words: &[&str]| assert!(Command::new(program).args(words).arg(&at).status().unwrap().success());
    run("umount", &[]);
    run("mount", &["-t", "tmpfs", "other:/vms"]);
    daemon.restart();
    assert_eq!(sr(&daemon, &uuid)["state"], "lost");
    assert!(daemon.log().contains("other:/vms"), "{}", daemon.log());
    run("umount", &[]);
}

#[test]
fn an_unresponsive_server_blocks_no_other_request() {
    let place = tempfile::tempdir().unwrap();
    let path = stand_ins(place.path());
    fs::write(place.path().join("bin/hang"), "").unwrap();
    let daemon = start_with("[storage]\nanswer-timeout = 1", &[("PATH", &path)]);
    let body = json!({ "name": "nas", "source": { "type": "nfs", "server": "nas", "export": "/vms" } });
    let task = daemon.post("/srs", body).1;
    assert_eq!(daemon.get("/host").0, 200);
    let task = daemon.wait(&task);
    assert_eq!(task["problem"]["code"], "timeout", "{task}");
    assert!(task["problem"]["detail"].as_str().unwrap().contains("nas:/vms"), "{task}");
    assert_eq!(daemon.get("/srs").1, json!([]));
    assert_eq!(words(place.path()).len(), 1, "it is not waited for once more to undo what was not done");
    // A program that keeps running would mount at an unexpected time.
    let child = fs::read_to_string(place.path().join("bin/child")).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    wait_until("what mount(8) has started is killed with it", || {
        fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "))
    });
}

/// A copy by reflink is made under a temporary name; a killed process leaves it behind.
#[test]
fn unfinished_files_are_removed_on_attach() {
    let mut daemon = start();
    daemon.repository("vms");
    daemon.kill();
    let name = |format: &str| format!("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d.{format}.unfinished");
    let paths = ["raw", "vhd"].map(|format| daemon.room().join("vms").join(name(format)));
    paths.iter().for_each(|path| fs::write(path, "x").unwrap());
    daemon.restart();
    assert_eq!(paths.map(|path| path.exists()), [false, true]);
}

#[test]
fn a_disk_is_not_changed_in_a_repository_that_is_detached() {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 1 << 20, "format": "qcow2" });
    let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    daemon.done(daemon.post(&format!("/srs/{sr}/detach"), json!({})));
    for (verb, body) in
        [("resize", json!({ "size": 2 << 20 })), ("snapshot", json!({})), ("clone", json!({})), ("merge", json!({}))]
    {
        let (status, refused) = daemon.post(&format!("/vdis/{vdi}/{verb}"), body);
        assert_eq!((status, refused["code"].as_str()), (409, Some("state")), "{verb}: {refused}");
    }
    assert_eq!(daemon.get("/tasks?open=true").1, json!([]));
    daemon.done(daemon.post(&format!("/srs/{sr}/attach"), json!({})));
    daemon.done(daemon.post(&format!("/vdis/{vdi}/resize"), json!({ "size": 2 << 20 })));
}
