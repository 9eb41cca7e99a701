//! VDIs of a real daemon on real files: their contents after each verb, and after the daemon was killed at each step
//! of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testkit::web_server::WebServer;

use crate::harness;
use crate::harness::{Taplined, disks};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;

/// A daemon and its own repository.
struct Bed {
    daemon: Taplined,
    sr: String,
}

fn bed() -> Bed {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    Bed { daemon, sr }
}

impl Bed {
    fn directory(&self) -> PathBuf {
        self.daemon.room().join("vms")
    }

    fn create(&self, name: &str, format: &str) -> String {
        let asked = json!({ "sr": self.sr, "name": name, "size": SIZE, "format": format });
        self.daemon.done(self.daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into()
    }

    fn verb(&self, vdi: &str, verb: &str, body: Value) -> Value {
        self.daemon.done(self.daemon.post(&format!("/vdis/{vdi}/{verb}"), body))
    }

    fn made(&self, vdi: &str, verb: &str, body: Value) -> String {
        self.verb(vdi, verb, body)["uuid"].as_str().unwrap().into()
    }

    fn show(&self, vdi: &str) -> Value {
        let (status, shown) = self.daemon.get(&format!("/vdis/{vdi}"));
        assert_eq!(status, 200, "{shown}");
        shown
    }

    /// The images of a VDI from the top down, as a disk process names them.
    fn chain(&self, vdi: &str) -> Vec<String> {
        let names = disks::chain(&self.daemon, vdi).into_iter();
        names.map(|(format, file)| format!("{format}:{}", self.directory().join(file).display())).collect()
    }

    /// Writes a megabyte of `byte` at megabyte `at`, over NBD from a disk process, while the VDI is not in use.
    fn write(&self, vdi: &str, at: u64, byte: u8) {
        let socket = self.daemon.room().join("write.sock");
        let mut command = Command::new(harness::disk_program());
        for (depth, name) in self.chain(vdi).iter().enumerate() {
            if depth == 0 { command.arg("serve") } else { command.arg("--parent") }.arg(name);
        }
        command.args(["--nbd"]).arg(&socket).stderr(Stdio::null());
        let mut disk = command.spawn().unwrap();
        harness::wait_until("the disk is served", || UnixStream::connect(&socket).is_ok());
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let write = format!("write -P {byte} {at}M 1M");
        let done = Command::new("qemu-io").args(["-f", "raw", "-c", &write, "-c", "flush", &uri]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(Command::new("kill").arg(disk.id().to_string()).status().unwrap().success());
        assert!(disk.wait().unwrap().success());
    }

    /// The byte that fills each megabyte of a VDI.
    fn read(&self, vdi: &str) -> Vec<u8> {
        let path = self.daemon.room().join(format!("read-{}", self.tasks()));
        self.verb(vdi, "export", json!({ "path": path, "format": "raw" }));
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let chunks = bytes.chunks(usize::try_from(MIB).unwrap());
        chunks.map(|chunk| if chunk.iter().all(|byte| *byte == chunk[0]) { chunk[0] } else { 255 }).collect()
    }

    fn tasks(&self) -> usize {
        self.daemon.get("/tasks").1.as_array().unwrap().len()
    }

    /// Checks that files and catalogue agree, and that finished tasks hold nothing.
    fn nothing_is_left(&self) {
        let names =
            fs::read_dir(self.directory()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let files: BTreeSet<String> = names.filter(|name| !name.starts_with('.')).collect();
        let catalogue = self.daemon.catalogue();
        let mut known = catalogue.prepare("SELECT file FROM image WHERE state <> 'no-data'").unwrap();
        let known: Vec<String> = known.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        let vdis = self.daemon.get("/vdis").1;
        let maps = vdis.as_array().unwrap().iter().filter_map(|vdi| vdi["cbt"]["maps"].as_array()).flatten();
        let maps = maps.map(|map| format!("{}.changes", map["uuid"].as_str().unwrap()));
        let known: BTreeSet<String> = known.into_iter().chain(maps).collect();
        assert_eq!(files, known, "{}", self.daemon.log());
        let held = "SELECT (SELECT count(*) FROM lease) + (SELECT count(*) FROM claim)
                    + (SELECT count(*) FROM name_claim)";
        let held: u32 = catalogue.query_row(held, [], |row| row.get(0)).unwrap();
        assert_eq!(held, 0, "{}", self.daemon.log());
        disks::inventory_agrees(&self.daemon);
    }
}

/// The expected contents: these megabytes, and zeroes elsewhere.
fn content(named: &[(usize, u8)]) -> Vec<u8> {
    let mut all = vec![0; usize::try_from(SIZE / MIB).unwrap()];
    for (at, byte) in named {
        all[*at] = *byte;
    }
    all
}

#[test]
fn a_vdi_is_created_and_destroyed() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    let shown = bed.show(&vdi);
    assert_eq!((&shown["name"], &shown["size"], &shown["depth"]), (&json!("disk"), &json!(SIZE), &json!(1)));
    assert_eq!(bed.daemon.get("/vdis?match=disk").1, json!([shown]));
    assert_eq!(bed.daemon.get(&format!("/vdis?match={}", &vdi[..8])).1, json!([shown]));
    let (status, would) = bed.daemon.delete(&format!("/vdis/{vdi}?dry_run=true"));
    assert_eq!((status, &would["removes"]), (200, &json!([shown["file"]])));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{vdi}")));
    assert_eq!(bed.daemon.get(&format!("/vdis/{vdi}")).0, 404);
    bed.nothing_is_left();
}

#[test]
fn a_revert_restores_a_snapshots_contents() {
    for format in ["qcow2", "vhd"] {
        let bed = bed();
        let vdi = bed.create("disk", format);
        bed.write(&vdi, 1, 1);
        let snapshot = bed.made(&vdi, "snapshot", json!({ "name": "before" }));
        bed.write(&vdi, 1, 2);
        bed.write(&vdi, 2, 2);
        assert_eq!(bed.read(&snapshot), content(&[(1, 1)]));
        assert_eq!(bed.read(&vdi), content(&[(1, 2), (2, 2)]));
        let shown = bed.show(&snapshot);
        assert_eq!((&shown["read_only"], &shown["snapshot_of"]), (&json!(true), &json!(vdi)));

        bed.verb(&vdi, "revert", json!({ "snapshot": snapshot }));
        assert_eq!(bed.read(&vdi), content(&[(1, 1)]));
        bed.write(&vdi, 3, 3);
        assert_eq!(bed.read(&snapshot), content(&[(1, 1)]));
        bed.daemon.settle();
        bed.nothing_is_left();
    }
}

#[test]
fn clones_share_only_their_origin() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    bed.write(&vdi, 0, 1);
    let first = bed.made(&vdi, "clone", json!({ "name": "first" }));
    let template = bed.made(&vdi, "snapshot", json!({}));
    let second = bed.made(&template, "clone", json!({ "name": "second" }));
    bed.write(&vdi, 1, 2);
    bed.write(&first, 1, 3);
    bed.write(&second, 1, 4);
    assert_eq!(bed.read(&vdi), content(&[(0, 1), (1, 2)]));
    assert_eq!(bed.read(&first), content(&[(0, 1), (1, 3)]));
    assert_eq!(bed.read(&second), content(&[(0, 1), (1, 4)]));
    assert_eq!(bed.read(&template), content(&[(0, 1)]));
    bed.daemon.settle();
    bed.nothing_is_left();
}

#[test]
fn images_of_destroyed_snapshots_are_merged_automatically() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    let mut snapshots = Vec::new();
    for byte in 1..=3 {
        bed.write(&vdi, u64::from(byte), byte);
        snapshots.push(bed.made(&vdi, "snapshot", json!({})));
    }
    bed.write(&vdi, 3, 9);
    assert_eq!(bed.show(&vdi)["depth"], 4);
    // Children record the modification time of their parent in seconds, and a merge modifies parents.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    for snapshot in &snapshots {
        bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
        bed.daemon.settle();
        assert_eq!(bed.read(&vdi), content(&[(1, 1), (2, 2), (3, 9)]));
    }
    bed.daemon.settle();
    assert_eq!(bed.show(&vdi)["depth"], 1);
    bed.nothing_is_left();
}

#[test]
fn copies_exports_and_imports_are_complete() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    bed.write(&vdi, 5, 7);
    bed.made(&vdi, "snapshot", json!({}));
    bed.write(&vdi, 6, 8);
    let copy = bed.made(&vdi, "copy", json!({ "sr": bed.sr, "format": "vhd" }));
    assert_eq!((bed.show(&copy)["depth"].clone(), bed.read(&copy)), (json!(1), content(&[(5, 7), (6, 8)])));

    let path = bed.daemon.room().join("out.vhd");
    bed.verb(&copy, "export", json!({ "path": path, "format": "vhd" }));
    // A guest's data is private.
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let (status, problem) = bed.daemon.post(&format!("/vdis/{copy}/export"), json!({ "path": path, "format": "vhd" }));
    assert_eq!((status, &problem["code"]), (409, &json!("exists")));
    let asked = json!({ "sr": bed.sr, "name": "in", "path": path, "source_format": "vhd", "format": "qcow2" });
    let imported = bed.daemon.done(bed.daemon.post("/vdis/import", asked))["uuid"].as_str().unwrap().to_owned();
    assert_eq!(bed.read(&imported), content(&[(5, 7), (6, 8)]));
    // Formats of other hypervisors.
    let raw = bed.daemon.room().join("out.raw");
    bed.verb(&copy, "export", json!({ "path": raw, "format": "raw" }));
    for format in ["vmdk", "vhdx"] {
        let theirs = bed.daemon.room().join(format!("theirs.{format}"));
        let made = Command::new("qemu-img").args(["convert", "-f", "raw", "-O", format]).args([&raw, &theirs]).status();
        assert!(made.expect("qemu-img (make prepare?)").success());
        let asked = json!({ "sr": bed.sr, "name": format, "path": theirs, "source_format": format, "format": "qcow2" });
        let imported = bed.daemon.done(bed.daemon.post("/vdis/import", asked))["uuid"].as_str().unwrap().to_owned();
        assert_eq!(bed.read(&imported), content(&[(5, 7), (6, 8)]), "{format}");
    }
    // An invalid VHD is refused before anything is created.
    fs::write(&path, [7; 1 << 16]).unwrap();
    let asked = json!({ "sr": bed.sr, "name": "in", "path": path, "source_format": "vhd" });
    assert_ne!(bed.daemon.post("/vdis/import", asked).0, 202);
    bed.nothing_is_left();
}

#[test]
fn a_dry_run_does_not_affect_running_tasks() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    // A merge that is running during the whole test; a real verb on this image would cancel it.
    let merge = "6e000000-0000-4000-8000-000000000001";
    let planted = "INSERT INTO task (uuid, verb, about, state, cancellable, intent, created, requester)
                   VALUES (?1, 'vdi-merge', '[]', 'running', 1, '{}', '2026-11-22T12:00:00Z',
                   '{\"type\":\"daemon\"}')";
    bed.daemon.catalogue().execute(planted, [merge]).unwrap();
    bed.daemon.catalogue().execute("INSERT INTO claim VALUES (?1, ?2)", (&vdi, merge)).unwrap();
    let (status, plan) = bed.daemon.delete(&format!("/vdis/{vdi}?dry_run=true"));
    assert_eq!((status, plan["removes"].as_array().map(Vec::len)), (200, Some(1)), "{plan}");
    assert_eq!(bed.daemon.get(&format!("/tasks/{merge}")).1["state"], "running");
}

/// Follows events during `work`, up to the end of a task of this verb; returns the progress values.
fn progress_during(bed: &Bed, verb: &str, work: impl FnOnce()) -> Vec<f64> {
    let mut stream = UnixStream::connect(bed.daemon.socket()).unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nhost: t\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    assert!(lines.by_ref().any(|line| line.is_empty()), "there is no stream of events");
    work();
    let mut parts = Vec::new();
    for line in lines {
        let Some(event) = line.strip_prefix("data: ").map(|data| serde_json::from_str::<Value>(data).unwrap()) else {
            continue;
        };
        let task = &event["object"];
        if task["verb"] == verb {
            parts.push(task["progress"].as_f64().unwrap());
        }
        if task["verb"] == verb && task["state"] == "done" {
            return parts;
        }
    }
    panic!("the events have ended before the task");
}

#[test]
fn long_running_tasks_report_progress() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    (0..16).for_each(|at| bed.write(&vdi, at, 7));
    let on_the_way = |parts: Vec<f64>| {
        assert!(parts.is_sorted(), "{parts:?}");
        parts.into_iter().filter(|part| *part > 0.0 && *part < 1.0).count()
    };
    let parts = progress_during(&bed, "vdi-copy", || drop(bed.made(&vdi, "copy", json!({ "sr": bed.sr }))));
    assert!(on_the_way(parts) > 3);
    let snapshot = bed.made(&vdi, "snapshot", json!({}));
    (0..16).for_each(|at| bed.write(&vdi, at, 8));
    let parts = progress_during(&bed, "vdi-merge", || drop(bed.daemon.delete(&format!("/vdis/{snapshot}"))));
    assert!(on_the_way(parts) > 1);
}

/// The arguments of the disk processes, recorded by a wrapper of the program.
#[test]
fn image_jobs_have_access_only_to_passed_files() {
    let mut bed = bed();
    let (room, words) = (bed.daemon.room().to_owned(), bed.daemon.room().join("words"));
    let (noting, real) = (room.join("noting"), room.join("tapline-disk"));
    // Its user may have no access to the build directory.
    testkit::program::copy(&harness::disk_program(), &real);
    let script = format!("echo \"$@\" >> {}\nexec {} \"$@\"", words.display(), real.display());
    testkit::program::script(&noting, &script);
    fs::write(&words, "").unwrap();
    // It runs as a user of its own.
    for (path, mode) in [(&room, 0o711), (&words, 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let config = fs::read_to_string(room.join("taplined.toml")).unwrap();
    let others: Vec<&str> = config.lines().filter(|line| !line.starts_with("disk-program")).collect();
    fs::write(room.join("taplined.toml"), format!("disk-program = {noting:?}\n{}\n", others.join("\n"))).unwrap();
    bed.daemon.restart();

    let vdi = bed.create("disk", "qcow2");
    let snapshot = bed.made(&vdi, "snapshot", json!({}));
    bed.made(&vdi, "copy", json!({ "sr": bed.sr, "format": "vhd" }));
    bed.verb(&vdi, "resize", json!({ "size": 2 * SIZE }));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
    bed.daemon.settle();
    // New files are examined.
    let images = room.join("vms");
    fs::copy(images.join(bed.show(&vdi)["file"].as_str().unwrap()), images.join("appeared.qcow2")).unwrap();
    bed.daemon.done(bed.daemon.post(&format!("/srs/{}/scan", bed.sr), json!({})));
    let noted = fs::read_to_string(&words).unwrap();
    for verb in ["create", "convert", "resize", "merge", "info"] {
        assert!(noted.lines().any(|line| line.starts_with(&format!("image {verb} "))), "{verb}: {noted}");
    }
    assert!(noted.lines().all(|line| line.contains("--handed") && line.contains("--confine")), "{noted}");
}

#[test]
fn a_vdi_grows_and_never_shrinks() {
    let bed = bed();
    for format in ["qcow2", "vhd", "raw"] {
        let vdi = bed.create(format, format);
        bed.verb(&vdi, "resize", json!({ "size": 2 * SIZE }));
        assert_eq!(bed.show(&vdi)["size"], 2 * SIZE);
        let (status, problem) = bed.daemon.post(&format!("/vdis/{vdi}/resize"), json!({ "size": SIZE }));
        assert_eq!((status, &problem["field"]), (422, &json!("size")));
    }
    bed.nothing_is_left();
}

impl Bed {
    /// Plugs a VDI for NBD clients; returns the VBD.
    fn plug(&self, vdi: &str) -> String {
        let (status, vbd) = self.daemon.post("/vbds", json!({ "vdi": vdi, "transport": "nbd" }));
        assert_eq!(status, 201, "{vbd}");
        let vbd = vbd["uuid"].as_str().unwrap().to_owned();
        self.daemon.done(self.daemon.post(&format!("/vbds/{vbd}/plug"), json!({})));
        vbd
    }

    fn unplug(&self, vbd: &str) {
        self.daemon.done(self.daemon.post(&format!("/vbds/{vbd}/unplug"), json!({})));
        let (status, _) = self.daemon.delete(&format!("/vbds/{vbd}"));
        assert_eq!(status, 204);
    }

    /// Runs a `qemu-io` command on a VBD's socket.
    fn client(&self, vbd: &str, command: &str) {
        let (_, shown) = self.daemon.get(&format!("/vbds/{vbd}"));
        let uri = format!("nbd+unix:///?socket={}", shown["socket"].as_str().unwrap());
        let done = Command::new("qemu-io").args(["-f", "raw", "-c", command, "-c", "flush", &uri]).output().unwrap();
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success() && !said.contains("failed"), "{command}: {said}");
    }
}

#[test]
fn a_plugged_vdi_is_snapshotted_cloned_grown_and_merged() {
    for format in ["qcow2", "vhd"] {
        let bed = bed();
        let vdi = bed.create("disk", format);
        let vbd = bed.plug(&vdi);
        bed.client(&vbd, "write -P 1 1M 1M");
        let snapshot = bed.made(&vdi, "snapshot", json!({ "name": "before" }));
        bed.client(&vbd, "write -P 2 1M 1M");
        let clone = bed.made(&vdi, "clone", json!({ "name": "clone" }));
        bed.client(&vbd, "write -P 3 2M 1M");
        assert_eq!(bed.read(&snapshot), content(&[(1, 1)]));
        assert_eq!(bed.read(&clone), content(&[(1, 2)]));
        bed.client(&vbd, "read -P 2 1M 1M");
        bed.verb(&vdi, "resize", json!({ "size": 2 * SIZE }));
        bed.client(&vbd, "write -P 4 20M 1M");

        for gone in [&snapshot, &clone] {
            bed.daemon.done(bed.daemon.delete(&format!("/vdis/{gone}")));
            bed.daemon.settle();
            bed.client(&vbd, "read -P 3 2M 1M");
        }
        assert_eq!(bed.show(&vdi)["depth"], 1, "{}", bed.daemon.log());
        // The next daemon finds what this one has left.
        bed.client(&vbd, "read -P 2 1M 1M");
        bed.unplug(&vbd);
        let mut expected = content(&[(1, 2), (2, 3)]);
        expected.resize(2 * expected.len(), 0);
        expected[20] = 4;
        assert_eq!(bed.read(&vdi), expected);
        bed.nothing_is_left();
    }
}

#[test]
fn concurrently_destroyed_snapshots_are_merged_in_turn() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    let vbd = bed.plug(&vdi);
    let mut snapshots = Vec::new();
    for byte in 1..=4 {
        bed.client(&vbd, &format!("write -P {byte} {byte}M 1M"));
        snapshots.push(bed.made(&vdi, "snapshot", json!({})));
    }
    let begun: Vec<Value> = snapshots
        .iter()
        .map(|snapshot| {
            let (status, task) = bed.daemon.delete(&format!("/vdis/{snapshot}"));
            assert_eq!(status, 202, "{task}");
            task
        })
        .collect();
    for task in &begun {
        assert_eq!(bed.daemon.wait(task)["state"], "done", "{}", bed.daemon.log());
    }
    // A merge that had to give way is retried after half a minute.
    harness::wait_until("the chain is one file", || bed.show(&vdi)["depth"] == 1);
    bed.unplug(&vbd);
    assert_eq!(bed.read(&vdi), content(&[(1, 1), (2, 2), (3, 3), (4, 4)]));
    bed.daemon.settle();
    bed.nothing_is_left();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_chain_is_limited_to_a_servable_depth() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    bed.write(&vdi, 1, 1);
    let snapshots: Vec<String> = (1..60).map(|_| bed.made(&vdi, "snapshot", json!({}))).collect();
    assert_eq!(bed.show(&vdi)["depth"], 60);
    let last = snapshots.last().unwrap();
    // Another image can still be created on the snapshot below the leaf.
    let asks = [(&vdi, "snapshot", json!({})), (&vdi, "clone", json!({}))];
    for (vdi, verb, asked) in asks {
        let (status, refused) = bed.daemon.post(&format!("/vdis/{vdi}/{verb}"), asked);
        assert_eq!((status, &refused["code"]), (409, &json!("state")), "{verb}: {refused}");
        assert!(refused["advice"].as_str().unwrap().contains("destroy unneeded snapshots"), "{refused}");
    }
    let clone = bed.made(last, "clone", json!({}));
    assert_eq!(bed.show(&clone)["depth"], 60);
    let vbd = bed.plug(&vdi);
    bed.client(&vbd, "write -P 2 2M 1M");
    bed.unplug(&vbd);
    assert_eq!(bed.read(&vdi), content(&[(1, 1), (2, 2)]));
    bed.verb(&vdi, "revert", json!({ "snapshot": last }));
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{clone}")));
    for snapshot in &snapshots {
        bed.daemon.done(bed.daemon.delete(&format!("/vdis/{snapshot}")));
    }
    harness::wait_until("the chain is one file", || bed.show(&vdi)["depth"] == 1);
    assert_eq!(bed.read(&vdi), content(&[(1, 1)]));
    bed.daemon.settle();
    bed.nothing_is_left();
}

/// The image of a destroyed snapshot is being merged when the next snapshot is destroyed.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_snapshot_can_follow_another_at_once() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    let vbd = bed.plug(&vdi);
    let mut last = bed.made(&vdi, "snapshot", json!({}));
    for round in 0..30_u64 {
        bed.client(&vbd, &format!("write -P {} {}M 1M", round + 1, round % 16));
        bed.daemon.done(bed.daemon.delete(&format!("/vdis/{last}")));
        last = bed.made(&vdi, "snapshot", json!({}));
    }
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{last}")));
    harness::wait_until("the chain is one file", || bed.show(&vdi)["depth"] == 1);
    bed.unplug(&vbd);
    let expected: Vec<(usize, u8)> = (0..16).zip((17..31).chain(15..17)).collect();
    assert_eq!(bed.read(&vdi), content(&expected));
    bed.daemon.settle();
    bed.nothing_is_left();
}

/// Each leaves an image to merge, and that merge starts just when the next one is requested.
#[test]
fn a_beginning_merge_does_not_block_a_vdi() {
    let bed = bed();
    let vdi = bed.create("disk", "qcow2");
    let vbd = bed.plug(&vdi);
    let snapshots: Vec<String> = (0..16).map(|_| bed.made(&vdi, "snapshot", json!({}))).collect();
    for snapshot in &snapshots {
        let (status, task) = bed.daemon.delete(&format!("/vdis/{snapshot}"));
        assert_eq!(status, 202, "{task}\n{}", bed.daemon.log());
        assert_eq!(bed.daemon.wait(&task)["state"], "done", "{}", bed.daemon.log());
    }
    harness::wait_until("the chain is one file", || bed.show(&vdi)["depth"] == 1);
    bed.unplug(&vbd);
    bed.daemon.settle();
    bed.nothing_is_left();
}

/// Requests a verb.
type Ask = Box<dyn Fn(&Bed) -> (u16, Value)>;

/// Prepares a VDI for a verb such that the request passes each of its steps.
fn scenario(bed: &Bed, verb: &str) -> Ask {
    let vdi = bed.create("disk", "qcow2");
    bed.write(&vdi, 1, 1);
    let snapshot = bed.made(&vdi, "snapshot", json!({}));
    bed.write(&vdi, 2, 2);
    let (sr, out) = (bed.sr.clone(), bed.daemon.room().join("out.raw"));
    let post = |path: String, body: Value| -> Ask { Box::new(move |bed| bed.daemon.post(&path, body.clone())) };
    match verb {
        "vdi-create" => post("/vdis".into(), json!({ "sr": sr, "name": "new", "size": SIZE })),
        "vdi-snapshot" => post(format!("/vdis/{vdi}/snapshot"), json!({})),
        "vdi-clone" => post(format!("/vdis/{vdi}/clone"), json!({})),
        "vdi-revert" => post(format!("/vdis/{vdi}/revert"), json!({ "snapshot": snapshot })),
        "vdi-copy" => post(format!("/vdis/{vdi}/copy"), json!({ "sr": sr })),
        "vdi-resize" => post(format!("/vdis/{vdi}/resize"), json!({ "size": 2 * SIZE })),
        "vdi-export" => post(format!("/vdis/{vdi}/export"), json!({ "path": out, "format": "raw" })),
        "vdi-import" => {
            bed.verb(&vdi, "export", json!({ "path": out, "format": "raw" }));
            post("/vdis/import".into(), json!({ "sr": sr, "name": "in", "path": out, "source_format": "raw" }))
        }
        "vdi-fetch" => {
            let server = WebServer::start();
            let byte = |at: usize| if at < 3 << 20 { 7 } else { 0 };
            server.put("/a.raw", &(0..usize::try_from(SIZE).unwrap()).map(byte).collect::<Vec<u8>>());
            let (url, insecure) = (server.url("/a.raw"), true);
            let asked =
                json!({ "sr": sr, "name": "in", "url": url, "insecure_http": insecure, "source_format": "raw" });
            post("/vdis/import".into(), asked)
        }
        "vdi-restore" => {
            let (target, backup) = crate::backups::backed_up(&bed.daemon, &vdi);
            post(format!("{target}/restore"), json!({ "backup": backup, "sr": sr, "name": "back" }))
        }
        "vdi-restore-in-place" => {
            let (target, backup) = crate::backups::backed_up(&bed.daemon, &vdi);
            // The snapshot of the backup is merged.
            bed.daemon.settle();
            bed.write(&vdi, 3, 3);
            let target = target.trim_start_matches("/backup-targets/");
            post(format!("/vdis/{vdi}/restore"), json!({ "target": target, "backup": backup }))
        }
        // The child of the second snapshot has its recorded parent changed.
        "vdi-merge" => {
            bed.made(&vdi, "snapshot", json!({ "name": "second" }));
            bed.write(&vdi, 3, 3);
            Box::new(move |bed| bed.daemon.delete(&format!("/vdis/{snapshot}")))
        }
        "vdi-cbt-enable" => post(format!("/vdis/{vdi}/cbt-enable"), json!({})),
        "vdi-cbt-disable" => {
            bed.verb(&vdi, "cbt-enable", json!({}));
            // Its map begins when it is plugged.
            let vbd = bed.plug(&vdi);
            bed.unplug(&vbd);
            post(format!("/vdis/{vdi}/cbt-disable"), json!({}))
        }
        "vdi-data-destroy" => {
            bed.verb(&vdi, "cbt-enable", json!({}));
            let vbd = bed.plug(&vdi);
            bed.client(&vbd, "write -P 3 3M 1M");
            let tracked = bed.made(&vdi, "snapshot", json!({ "name": "tracked" }));
            bed.client(&vbd, "write -P 4 3M 1M");
            bed.unplug(&vbd);
            post(format!("/vdis/{tracked}/data-destroy"), json!({}))
        }
        "vdi-destroy" => Box::new(move |bed| bed.daemon.delete(&format!("/vdis/{snapshot}"))),
        // An image without VDI and children, as left by a merge that was refused for a while.
        "sr-reclaim" => Box::new(move |bed| {
            let uuid = uuid();
            fs::write(bed.directory().join(&uuid), "an image").unwrap();
            let row = "INSERT INTO image VALUES (?1, ?2, ?1, 'qcow2', 512, 0, NULL, 'ready', FALSE)";
            bed.daemon.catalogue().execute(row, [&uuid, &bed.sr]).unwrap();
            bed.daemon.delete(&format!("/vdis/{vdi}"))
        }),
        other => panic!("no test comes by {other}: write a scenario for it"),
    }
}

fn uuid() -> String {
    fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap().trim().to_owned()
}

/// Every VDI by name and whether its changes are recorded, with its depth and contents; and whether something was
/// exported.
type State = (Vec<(String, bool, u64, Vec<u8>)>, bool);

fn state(bed: &Bed) -> State {
    let (_, vdis) = bed.daemon.get("/vdis");
    let of = |vdi: &Value| {
        // The time of a snapshot follows the @.
        let recorded = if vdi["cbt"]["enabled"] == true { ", recorded" } else { "" };
        let name = format!("{}{recorded}", vdi["name"].as_str().unwrap().split('@').next().unwrap());
        let (read_only, depth) = (vdi["read_only"].as_bool().unwrap(), vdi["depth"].as_u64().unwrap());
        let data = match vdi["state"] == "no-data" {
            true => Vec::new(),
            false => bed.read(vdi["uuid"].as_str().unwrap()),
        };
        (name, read_only, depth, data)
    };
    let mut all: Vec<_> = vdis.as_array().unwrap().iter().map(of).collect();
    all.sort();
    (all, bed.daemon.room().join("out.raw").exists())
}

/// Kills the daemon at each point of a verb, and checks that the verb is then completed or rolled back, and can be
/// repeated.
fn killed_anywhere(verb: &str, steps: &[&str]) {
    let whole = bed();
    let ask = scenario(&whole, verb);
    whole.daemon.settle();
    let before = state(&whole);
    whole.daemon.done(ask(&whole));
    whole.daemon.settle();
    let done = state(&whole);
    assert_ne!(before, done, "{verb} changes nothing that is looked at");
    for point in points(verb, steps) {
        let mut bed = bed();
        let ask = scenario(&bed, verb);
        bed.daemon.settle();
        die_at(&mut bed, &point, &ask);
        bed.daemon.settle();
        bed.nothing_is_left();
        let after = state(&bed);
        assert!(after == before || after == done, "{point}: {after:?} is neither {before:?} nor {done:?}");
        if after == before {
            // It was rolled back, so it can be requested again.
            bed.daemon.done(ask(&bed));
            bed.daemon.settle();
            assert_eq!(state(&bed), done, "{point}");
            bed.nothing_is_left();
        }
    }
}

fn points(verb: &str, steps: &[&str]) -> Vec<String> {
    steps.iter().flat_map(|step| [format!("{verb}:{step}"), format!("{verb}:{step}:after")]).collect()
}

/// Makes a daemon die at a point of a request, and starts another.
fn die_at(bed: &mut Bed, point: &str, ask: &Ask) {
    bed.daemon.restart_with(&[("TAPLINED_ABORT_AT", point)]);
    ask(bed);
    bed.daemon.wait_for_death();
    bed.daemon.restart();
}

/// Steps of all journalled jobs, by verb.
fn steps() -> BTreeMap<String, Vec<String>> {
    let lines = Command::new(env!("CARGO_BIN_EXE_taplined")).arg("--steps").output().unwrap().stdout;
    let lines = String::from_utf8(lines).unwrap();
    let mut by_verb: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (verb, step) in lines.lines().map(|line| line.split_once(' ').unwrap()) {
        by_verb.entry(verb.into()).or_default().push(step.into());
    }
    by_verb
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_job_is_completed_or_rolled_back_after_any_kill() {
    let by_verb = steps();
    assert!(by_verb.len() >= 14, "{by_verb:?}");
    // Those of repositories are in sr.rs, those of VMs in vm_snapshot.rs.
    let others = ["sr-create", "sr-destroy", "sr-introduce"];
    let is_other = |verb: &str| others.contains(&verb) || verb.starts_with("vm-");
    for (verb, steps) in by_verb.into_iter().filter(|(verb, _)| !is_other(verb)) {
        killed_anywhere(&verb, &steps.iter().map(String::as_str).collect::<Vec<_>>());
    }
}

/// In each run: a download is continued, which no other job is before it is certain to succeed.
#[test]
fn a_download_is_completed_or_rolled_back_after_any_kill() {
    killed_anywhere("vdi-fetch", &["fetch", "copy", "record"]);
}

/// In each run: incremental backups rest on it.
#[test]
fn the_data_of_a_snapshot_is_destroyed_despite_any_kill() {
    killed_anywhere("vdi-data-destroy", &["forget", "remove"]);
}

/// In each run: what a kill costs here is a disk.
#[test]
fn a_disk_is_restored_in_place_or_as_it_was_despite_any_kill() {
    killed_anywhere("vdi-restore-in-place", &["copy", "record", "remove"]);
}

/// The same while a client uses the disk, whose process keeps running or dies with the daemon.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_job_on_a_plugged_vdi_is_completed_or_rolled_back_after_any_kill() {
    let by_verb = steps();
    for verb in ["vdi-snapshot", "vdi-clone", "vdi-resize", "vdi-merge"] {
        let steps: Vec<&str> = by_verb[verb].iter().map(String::as_str).collect();
        for (point, disk_dies) in
            points(verb, &steps).into_iter().flat_map(|point| [(point.clone(), false), (point, true)])
        {
            let mut bed = bed();
            let ask = scenario(&bed, verb);
            let vdi = bed
                .daemon
                .get("/vdis?match=disk")
                .1
                .as_array()
                .unwrap()
                .iter()
                .find(|vdi| vdi["read_only"] == false)
                .unwrap()["uuid"]
                .as_str()
                .unwrap()
                .to_owned();
            bed.daemon.settle();
            let before = bed.read(&vdi);
            let vbd = bed.plug(&vdi);
            bed.daemon.restart_with(&[("TAPLINED_ABORT_AT", &point)]);
            ask(&bed);
            bed.daemon.wait_for_death();
            if disk_dies {
                let pid: i64 = bed.daemon.catalogue().query_row("SELECT pid FROM vbd", [], |row| row.get(0)).unwrap();
                crate::harness::kill(&pid);
            }
            bed.daemon.restart();
            bed.daemon.settle();
            harness::wait_until("it is served", || bed.daemon.get(&format!("/vbds/{vbd}")).1["state"] == "plugged");
            bed.client(&vbd, "write -P 9 9M 1M");
            bed.unplug(&vbd);
            bed.daemon.settle();
            bed.nothing_is_left();
            let mut expected = before;
            expected[9] = 9;
            expected.resize(bed.read(&vdi).len(), 0);
            assert_eq!(bed.read(&vdi), expected, "{point}, the disk dies: {disk_dies}");
        }
    }
}
