//! Transfer sizes measured on a repository's storage: in the catalogue and in each process that serves one of its
//! disks, whatever happens to the daemon and that process; and nothing is left of the scratch file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{ask_disk, io, nbd, plug, scanned, state, unplug, vbd, with_disks};
use crate::harness::{self, Taplined, wait_until};

fn shape(daemon: &Taplined, vbd: &str) -> Value {
    ask_disk(daemon, vbd, json!({ "verb": "shape" }))["ok"].take()
}

/// The path of the repository in the API.
fn sr(daemon: &Taplined) -> String {
    format!("/srs/{}", daemon.get("/srs").1[0]["uuid"].as_str().unwrap())
}

fn calibrate(daemon: &Taplined, body: Value) -> (u16, Value) {
    daemon.post(&format!("{}/calibrate", sr(daemon)), body)
}

/// The result of a second's measurement is noise: replaces it for the next daemon.
fn change_policy(daemon: &mut Taplined, path: &str, value: &str) {
    daemon.kill();
    let sql = "UPDATE sr SET policy = json_set(policy, ?1, json(?2))";
    assert_eq!(daemon.catalogue().execute(sql, (path, value)).unwrap(), 1);
    daemon.restart();
}

/// A process is notified when it serves.
fn wait_for_split(daemon: &Taplined, vbd: &str, split: Value) {
    wait_until(&format!("it splits into {split}"), || shape(daemon, vbd)["split_bytes"] == split);
}

fn kill(daemon: &Taplined, vbd: &str) {
    let pid = || daemon.get(vbd).1["pid"].clone();
    let before = pid();
    harness::kill(&before);
    wait_until("it is served again", || ![&before, &Value::Null].contains(&&pid()) && state(daemon, vbd) == "plugged");
}

fn names(daemon: &Taplined) -> Vec<String> {
    let entries = fs::read_dir(daemon.room().join("disks")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The measuring processes of this daemon, identified by the storage of its repository.
fn measuring(daemon: &Taplined) -> Vec<u32> {
    let place = daemon.room().join("disks");
    let pids = fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let ours = pids.filter(|pid: &u32| {
        let words = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).into_owned();
        words.contains("calibrate\0") && words.contains(place.to_str().unwrap())
    });
    ours.collect()
}

/// The scratch file of a process: its length, and whether it has a name.
fn scratch(daemon: &Taplined, pid: u32) -> Option<(u64, bool)> {
    let place = daemon.room().join("disks");
    let files: Vec<PathBuf> =
        fs::read_dir(format!("/proc/{pid}/fd")).ok()?.flatten().map(|entry| entry.path()).collect();
    let of_repository = files.iter().find(|file| fs::read_link(file).is_ok_and(|link| link.starts_with(&place)))?;
    let found = fs::metadata(of_repository).ok()?;
    Some((found.len(), found.nlink() > 0))
}

/// Starts a long calibration, and waits until it measures; returns its task and process.
fn begin_long(daemon: &Taplined) -> (Value, u32) {
    let (status, task) = calibrate(daemon, json!({ "seconds": 3600 }));
    assert_eq!(status, 202, "{task}");
    let mut process = None;
    wait_until("it measures", || {
        process = measuring(daemon).first().copied();
        process.and_then(|pid| scratch(daemon, pid)).is_some_and(|(len, _)| len == 256 << 20)
    });
    (task, process.unwrap())
}

fn wait_for_end(daemon: &Taplined) {
    wait_until("nothing measures", || measuring(daemon).is_empty());
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn every_process_follows_a_measured_policy_until_it_is_forgotten() {
    let (mut daemon, vdis) = with_disks("", &["a", "b"]);
    let before = names(&daemon);
    let sr = sr(&daemon);
    assert_eq!(daemon.get(&format!("{sr}/policy")).0, 404);
    let found = daemon.done(calibrate(&daemon, json!({ "seconds": 1 })));
    assert_eq!(names(&daemon), before, "nothing is left");
    let shown = daemon.get(&sr).1;
    assert_eq!(shown["policy"], found["policy"]);
    assert_eq!((&shown["policy"]["operation"], &shown["split"]), (&json!("write"), &json!("auto")));
    assert_eq!(shown["policy"]["device"], shown["variant"]["device"]);
    let evidence = daemon.get(&format!("{sr}/policy")).1;
    assert_eq!(evidence["policy"], found["policy"]);
    assert!(evidence["points"].as_array().unwrap().len() > 100);

    let (a, b) = (vbd(&daemon, &vdis[0], "nbd"), vbd(&daemon, &vdis[1], "nbd"));
    plug(&daemon, &a);
    wait_until("it has the policy", || shape(&daemon, &a)["policy"]["why"] == found["policy"]["why"]);
    change_policy(&mut daemon, "$.split", "4096");
    wait_for_split(&daemon, &a, json!(4096));
    let told = shape(&daemon, &a);
    assert_eq!(
        (&told["split"], &told["policy"]["repository"]),
        (&json!("auto"), &json!(sr.trim_start_matches("/srs/")))
    );
    assert_eq!(told["policy"]["device"], found["policy"]["device"]["name"]);
    let (done, said) = io(&nbd(&daemon, &a), &["write -P 7 0 64k", "read -P 7 0 64k"]);
    assert!(done, "{said}");
    assert!(shape(&daemon, &a)["splits"].as_u64().unwrap() > 0);
    plug(&daemon, &b);
    wait_for_split(&daemon, &b, json!(4096));
    kill(&daemon, &a);
    wait_for_split(&daemon, &a, json!(4096));
    daemon.done(daemon.post(&format!("{b}/upgrade"), json!({})));
    assert_eq!(shape(&daemon, &b)["split_bytes"], 4096, "it is handed over");

    assert_eq!(daemon.delete(&format!("{sr}/policy")).0, 204);
    for vbd in [&a, &b] {
        wait_for_split(&daemon, vbd, Value::Null);
        assert_eq!(shape(&daemon, vbd)["policy"], Value::Null);
    }
    assert_eq!(daemon.get(&sr).1.get("policy"), None);
    assert_eq!(daemon.get(&format!("{sr}/policy")).0, 404);
    unplug(&daemon, &a);
    unplug(&daemon, &b);
}

#[test]
fn configured_sizes_hold_in_running_and_later_processes() {
    let (mut daemon, vdis) = with_disks("", &["a"]);
    let (sr, a) = (sr(&daemon), vbd(&daemon, &vdis[0], "nbd"));
    plug(&daemon, &a);
    let (status, set) = daemon.patch(&sr, json!({ "split": "65536", "merge": "131072" }));
    assert_eq!((status, &set["split"], &set["merge"]), (200, &json!("65536"), &json!("131072")), "{set}");
    wait_for_split(&daemon, &a, json!(65536));
    assert_eq!(shape(&daemon, &a)["merge_bytes"], 131072);
    daemon.kill();
    kill_without_daemon(&daemon, &a);
    daemon.restart();
    wait_until("it is served", || state(&daemon, &a) == "plugged");
    wait_for_split(&daemon, &a, json!(65536));
    // A setting made by hand holds until the catalogue's is sent again.
    ask_disk(&daemon, &a, json!({ "verb": "shape", "split": "4096" }));
    assert_eq!(shape(&daemon, &a)["split_bytes"], 4096);
    daemon.patch(&sr, json!({ "split": "none" }));
    wait_for_split(&daemon, &a, Value::Null);
    for wrong in ["5000", "off", "2048"] {
        let (status, refused) = daemon.patch(&sr, json!({ "split": wrong }));
        assert_eq!(status, 400, "{refused}");
    }
    unplug(&daemon, &a);
}

fn kill_without_daemon(daemon: &Taplined, vbd: &str) {
    let sql = "SELECT pid FROM vbd WHERE uuid = ?1";
    let pid: u32 = daemon.catalogue().query_row(sql, [vbd.trim_start_matches("/vbds/")], |row| row.get(0)).unwrap();
    harness::kill(&pid);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_policy_of_other_storage_is_not_followed_and_both_are_named() {
    let (mut daemon, vdis) = with_disks("", &["a"]);
    daemon.done(calibrate(&daemon, json!({ "seconds": 1 })));
    let a = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &a);
    change_policy(&mut daemon, "$.split", "4096");
    wait_for_split(&daemon, &a, json!(4096));
    change_policy(&mut daemon, "$.device", r#"{"id":"naa.5","name":"sdz (Other, 1 GiB)"}"#);
    wait_for_split(&daemon, &a, Value::Null);
    let shown = daemon.get(&sr(&daemon)).1;
    let own = shown["variant"]["device"]["name"].as_str().unwrap();
    let why = shape(&daemon, &a)["policy"]["why"].as_str().unwrap().to_owned();
    assert!(why.contains("sdz (Other, 1 GiB)") && why.contains(own), "{why}");
    assert!(daemon.log().contains("was measured on sdz (Other, 1 GiB)"), "{}", daemon.log());
    unplug(&daemon, &a);
}

struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        Command::new("umount").arg(&self.0).status().ok();
    }
}

#[test]
fn a_mount_over_a_repository_is_not_taken_for_its_storage() {
    let (daemon, _) = with_disks("", &["a"]);
    let place = daemon.room().join("disks");
    if !Command::new("mount").args(["-t", "tmpfs", "other"]).arg(&place).status().is_ok_and(|code| code.success()) {
        return harness::not_run("a test that mounts: only root can");
    }
    let mounted = Mounted(place);
    // The daemon may have already noticed that the repository is lost.
    let (status, begun) = calibrate(&daemon, json!({ "seconds": 1 }));
    let refused = if status == 202 { daemon.wait(&begun)["problem"].take() } else { begun };
    assert_eq!(refused["code"], "state", "{status}: {refused}");
    drop(mounted);
    assert_eq!(daemon.get(&sr(&daemon)).1.get("policy"), None);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_killed_or_cancelled_calibration_leaves_nothing() {
    let (mut daemon, _) = with_disks("", &["a"]);
    let before = names(&daemon);
    let (task, pid) = begin_long(&daemon);
    assert_eq!(scratch(&daemon, pid), Some((256 << 20, false)), "it has no name");
    daemon.kill();
    wait_for_end(&daemon);
    // A scratch file with a name, as on file systems without nameless files, which its daemon had no time to remove.
    let named = format!("calibration-{}.unfinished", task["uuid"].as_str().unwrap());
    fs::write(daemon.room().join("disks").join(&named), "x").unwrap();
    daemon.restart();
    assert_eq!(names(&daemon), before);
    let ended = daemon.get(&format!("/tasks/{}", task["uuid"].as_str().unwrap())).1;
    assert_eq!(ended["state"], "failed", "{ended}");

    let (task, _) = begin_long(&daemon);
    let (status, refused) = calibrate(&daemon, json!({}));
    assert_eq!((status, &refused["code"]), (409, &json!("busy")), "{refused}");
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", task["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&task)["state"], "cancelled");
    wait_for_end(&daemon);

    // Only the measuring process is killed.
    let (task, pid) = begin_long(&daemon);
    harness::kill(&pid);
    let ended = daemon.wait(&task);
    assert_eq!(ended["state"], "failed", "{ended}");
    assert_eq!(names(&daemon), before);
    assert_eq!(daemon.get(&sr(&daemon)).1.get("policy"), None);
    daemon.done(calibrate(&daemon, json!({ "seconds": 1 })));
}

#[test]
fn a_disk_that_comes_into_use_ends_a_calibration_that_writes() {
    let (daemon, vdis) = with_disks("", &["a"]);
    let a = vbd(&daemon, &vdis[0], "nbd");
    let (task, _) = begin_long(&daemon);
    plug(&daemon, &a);
    let ended = daemon.wait(&task);
    let why = ended["problem"]["detail"].as_str().unwrap_or_default();
    assert!(ended["state"] == "failed" && why.contains("came into use"), "{ended}");
    wait_for_end(&daemon);

    let (status, refused) = calibrate(&daemon, json!({ "seconds": 1 }));
    assert_eq!((status, &refused["code"]), (409, &json!("in-use")), "{refused}");
    assert!(refused["advice"].as_str().unwrap().contains("--read-only"), "{refused}");
    // Nothing in it is full of data.
    let problem = daemon.failed(calibrate(&daemon, json!({ "seconds": 1, "read_only": true })));
    assert!(problem["detail"].as_str().unwrap().contains("full of data"), "{problem}");
    let problem = daemon.failed(calibrate(&daemon, json!({ "seconds": 1, "read_only": true, "vdi": vdis[0] })));
    assert!(problem["advice"].as_str().unwrap().contains("full of data"), "{problem}");
    let full = daemon.room().join("disks/full.raw");
    fs::write(&full, vec![7; 64 << 20]).unwrap();
    let found = scanned(&daemon, sr(&daemon).trim_start_matches("/srs/"), &[]);
    assert!(found.is_empty());
    let modified = fs::metadata(&full).unwrap().mtime_nsec();
    let found = daemon.done(calibrate(&daemon, json!({ "seconds": 1, "read_only": true })));
    assert_eq!(found["policy"]["operation"], "read");
    assert_eq!(fs::metadata(&full).unwrap().mtime_nsec(), modified, "it only reads");
    wait_until("the disk has it", || shape(&daemon, &a)["policy"]["why"] == found["policy"]["why"]);
    unplug(&daemon, &a);
}

#[test]
fn an_impossible_calibration_is_refused() {
    let (daemon, vdis) = with_disks("", &["a"]);
    let unknown = "00000000-0000-0000-0000-000000000001";
    for (body, status, field) in [
        (json!({ "vdi": vdis[0] }), 400, json!("vdi")),
        (json!({ "read_only": true, "vdi": unknown }), 404, json!("vdi")),
        (json!({ "seconds": 0 }), 400, json!("seconds")),
        (json!({ "seconds": 3601 }), 400, json!("seconds")),
    ] {
        let (found, refused) = calibrate(&daemon, body.clone());
        assert_eq!((found, &refused["field"]), (status, &field), "{body}: {refused}");
    }
    assert_eq!(daemon.post(&format!("/srs/{unknown}/calibrate"), json!({})).0, 404);
    let sr = sr(&daemon);
    daemon.done(daemon.post(&format!("{sr}/detach"), json!({})));
    let (status, refused) = calibrate(&daemon, json!({ "seconds": 1 }));
    assert_eq!((status, &refused["code"]), (409, &json!("state")), "{refused}");
    // A result can be forgotten without its storage.
    assert_eq!(daemon.delete(&format!("{sr}/policy")).0, 204);
}
