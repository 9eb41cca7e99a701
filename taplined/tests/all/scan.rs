//! Scans of a repository with real images created by `tapline-disk` and by QEMU.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{Taplined, disk_program, start};

/// A repository, and the program that creates images in it.
struct Bench {
    daemon: Taplined,
    sr: String,
    path: PathBuf,
}

/// `None` where `tapline-disk` cannot be passed its files.
fn bench() -> Option<Bench> {
    let help = Command::new(disk_program()).args(["image", "info", "--help"]).output().unwrap();
    if !String::from_utf8_lossy(&help.stdout).contains("--handed") {
        harness::not_run(&format!("scans of real images: {} knows no --handed", disk_program().display()));
        return None;
    }
    let daemon = start();
    // Disk processes run as another user and cannot access the files by path.
    fs::set_permissions(daemon.room(), fs::Permissions::from_mode(0o700)).unwrap();
    let sr = daemon.repository("vms");
    let path = daemon.room().join("vms");
    Some(Bench { daemon, sr, path })
}

impl Bench {
    fn image(&self, words: &[&str]) {
        let ran = Command::new(disk_program()).arg("image").args(words).current_dir(&self.path).output().unwrap();
        assert!(ran.status.success(), "{words:?}: {}", String::from_utf8_lossy(&ran.stderr));
    }

    /// Creates an empty image, as a child of the parents, if any.
    fn create(&self, image: &str, parents: &[&str]) {
        let size = if parents.is_empty() { vec!["--size", "8M"] } else { Vec::new() };
        let parents = parents.iter().flat_map(|parent| ["--parent", *parent]);
        let words: Vec<&str> = ["create", image].into_iter().chain(size).chain(parents).collect();
        self.image(&words);
    }

    fn qemu_img(&self, words: &[&str]) {
        let ran = Command::new("qemu-img").args(words).current_dir(&self.path).output().unwrap();
        assert!(ran.status.success(), "{words:?}: {}", String::from_utf8_lossy(&ran.stderr));
    }

    fn scan(&self) -> Value {
        self.daemon.done(self.daemon.post(&format!("/srs/{}/scan", self.sr), json!({})))
    }

    fn space(&self) -> Value {
        self.daemon.get(&format!("/srs/{}", self.sr)).1["space"].clone()
    }
}

/// Files that have appeared, and whether they are VDIs.
fn appeared(scan: &Value) -> Vec<(String, bool)> {
    let mut appeared: Vec<_> = scan["appeared"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| (one["file"].as_str().unwrap().to_owned(), one["vdi"].is_string()))
        .collect();
    appeared.sort();
    appeared
}

/// Unplaced files, with the code of the reason.
fn unplaced(scan: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let lines = scan["unplaced"].as_array().unwrap().iter();
    lines.map(|one| (text(&one["file"]), text(&one["problem"]["code"]))).collect()
}

fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(file, code)| ((*file).into(), (*code).into())).collect()
}

/// Marks a VHD as XenServer's storage manager does: byte 85 of its footer and of the copy at its beginning.
fn hide(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let end = bytes.len() - 512;
    for at in [0, end] {
        let footer = &mut bytes[at..at + 512];
        assert_eq!(&footer[..8], b"conectix");
        footer[85] = 1;
        footer[64..68].fill(0);
        let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
        footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    }
    fs::write(path, bytes).unwrap();
}

#[test]
fn existing_chains_become_vdis_on_read_only_images() {
    let Some(bench) = bench() else { return };
    // As XenServer leaves them: files named by the UUIDs of their VDIs, and an inner node marked as hidden.
    let leaf = "2f0e9c5e-6f6c-4a0e-8f0a-7c1df36c3a01";
    bench.create("vhd:inner.vhd", &[]);
    hide(&bench.path.join("inner.vhd"));
    bench.create(&format!("vhd:{leaf}.vhd"), &["vhd:inner.vhd"]);
    bench.create("vhd:snapshot.vhd", &["vhd:inner.vhd"]);
    bench.create("vhd:garbage.vhd", &[]);
    hide(&bench.path.join("garbage.vhd"));
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "base.qcow2", "8M"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    fs::write(bench.path.join("plain.raw"), vec![1; 1 << 20]).unwrap();

    let scan = bench.scan();
    assert_eq!(unplaced(&scan), []);
    let want = [
        (format!("{leaf}.vhd"), true),
        ("base.qcow2".into(), true),
        ("garbage.vhd".into(), false),
        ("inner.vhd".into(), false),
        ("plain.raw".into(), true),
        ("snapshot.vhd".into(), true),
        ("top.qcow2".into(), true),
    ];
    assert_eq!(appeared(&scan), want);
    let by_uuid = scan["appeared"].as_array().unwrap().iter().find(|one| one["vdi"] == leaf);
    assert_eq!(by_uuid.unwrap()["file"], format!("{leaf}.vhd"));
    // Four disks of 8 MiB and one of 1: hidden images do not count.
    assert_eq!(bench.space()["virtual_allocation"], (4 << 23) + (1 << 20));
    assert!(bench.space()["images"].as_u64().unwrap() >= 1 << 20);
    let vdi = |file: &str| {
        let uuid = scan["appeared"].as_array().unwrap().iter().find(|one| one["file"] == file).unwrap()["vdi"].clone();
        bench.daemon.get(&format!("/vdis/{}", uuid.as_str().unwrap())).1
    };
    let (base, top) = (vdi("base.qcow2"), vdi("top.qcow2"));
    assert_eq!((&base["read_only"], &base["snapshot_of"]), (&json!(true), &top["uuid"]), "{base}");
    assert_eq!((&top["read_only"], &top["snapshot_of"]), (&json!(false), &Value::Null), "{top}");
    let path = format!("/vdis/{}", base["uuid"].as_str().unwrap());
    assert_ne!(bench.daemon.patch(&path, json!({ "read_only": false })).0, 200, "what others stand on is not written");

    // Nothing is changed, not even what XenServer would have merged or removed. A job that ends starts a cleanup of
    // the repository.
    bench.daemon.done(bench.daemon.post("/vdis", json!({ "sr": bench.sr, "name": "new", "size": 1 << 20 })));
    bench.daemon.settle();
    let again = bench.scan();
    bench.daemon.settle();
    assert_eq!((appeared(&again).len(), unplaced(&again).len()), (0, 0), "{again}");
    assert_eq!(again["counts"]["images"], 8, "{again}");
}

#[test]
fn unneeded_files_are_removed_when_their_repository_is_attached() {
    let Some(bench) = bench() else { return };
    bench.create("vhd:base.vhd", &[]);
    bench.create("vhd:one.vhd", &["vhd:base.vhd"]);
    bench.create("vhd:other.vhd", &["vhd:base.vhd"]);
    let scan = bench.scan();
    let vdi = |file: &str| {
        scan["appeared"].as_array().unwrap().iter().find(|one| one["file"] == file).unwrap()["vdi"].clone()
    };
    let (one, other) = (vdi("one.vhd"), vdi("other.vhd"));
    bench.daemon.done(bench.daemon.post(&format!("/srs/{}/detach", bench.sr), json!({})));
    // As if the daemon had ended after the VDIs were removed from the catalogue, and before their files were.
    let catalogue = bench.daemon.catalogue();
    for gone in [one, vdi("base.vhd")] {
        assert_eq!(catalogue.execute("DELETE FROM vdi WHERE uuid = ?1", [gone.as_str().unwrap()]).unwrap(), 1);
    }
    drop(catalogue);
    bench.daemon.done(bench.daemon.post(&format!("/srs/{}/attach", bench.sr), json!({})));
    harness::wait_until("what nobody needs is gone", || {
        !bench.path.join("one.vhd").exists() && !bench.path.join("other.vhd").exists()
    });
    harness::wait_until("all tasks are over", || bench.daemon.get("/tasks?open=true").1 == json!([]));
    let left = bench.daemon.get(&format!("/vdis/{}", other.as_str().unwrap())).1;
    assert_eq!((&left["state"], &left["depth"]), (&json!("ready"), &json!(1)), "{left}");
}

#[test]
fn images_that_cannot_be_added_are_reported_with_the_reason_and_untouched() {
    let Some(bench) = bench() else { return };
    let at = |name: &str| bench.path.join(name);
    bench.create("vhd:base.vhd", &[]);
    bench.create("vhd:leaf.vhd", &["vhd:base.vhd"]);
    bench.create("vhd:orphan.vhd", &["vhd:base.vhd"]);
    fs::copy(at("base.vhd"), at("copy.vhd")).unwrap();
    bench.scan();

    // A parent that is missing here, and thus its child; a wrong parent; a loop.
    fs::remove_file(at("orphan.vhd")).unwrap();
    bench.create("vhd:gone.vhd", &[]);
    bench.create("vhd:child.vhd", &["vhd:gone.vhd"]);
    fs::remove_file(at("gone.vhd")).unwrap();
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "8M"]);
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2"]);
    bench.qemu_img(&["rebase", "-u", "-f", "qcow2", "-b", "b.qcow2", "-F", "qcow2", "a.qcow2"]);
    // A file of another format than its name implies, a link, a directory, and a file that another process is
    // writing.
    fs::write(at("text.vhd"), "no image").unwrap();
    bench.qemu_img(&["create", "-q", "-f", "qcow2", "wrong.raw", "8M"]);
    std::os::unix::fs::symlink("/etc/passwd", at("link.raw")).unwrap();
    fs::create_dir(at("folder.qcow2")).unwrap();
    fs::write(at("upload.raw"), [0; 512]).unwrap();
    let root = chown(at("upload.raw"), Some(65534), None).is_ok();

    let scan = bench.scan();
    let mut want = owned(&[
        ("a.qcow2", "invalid"),
        ("b.qcow2", "invalid"),
        ("child.vhd", "not-found"),
        ("copy.vhd", "exists"),
        ("folder.qcow2", "invalid"),
        ("link.raw", "invalid"),
        ("text.vhd", "failed"),
    ]);
    if root {
        want.push(("upload.raw".into(), "busy".into()));
    }
    want.push(("wrong.raw".into(), "invalid".into()));
    let told: Vec<_> = unplaced(&scan).into_iter().filter(|one| one.0 != "base.vhd" && one.0 != "leaf.vhd").collect();
    assert_eq!(told, want, "{scan}");
    assert_eq!(fs::read_to_string(at("text.vhd")).unwrap(), "no image");
}

#[test]
fn a_child_of_a_writable_disk_is_not_added_until_that_disk_is_read_only() {
    let Some(bench) = bench() else { return };
    bench.create("vhd:base.vhd", &[]);
    let vdi = bench.scan()["appeared"][0]["vdi"].clone();
    bench.create("vhd:leaf.vhd", &["vhd:base.vhd"]);
    let scan = bench.scan();
    assert_eq!(unplaced(&scan), owned(&[("leaf.vhd", "in-use")]));
    assert!(scan["unplaced"][0]["problem"]["detail"].as_str().unwrap().contains(vdi.as_str().unwrap()), "{scan}");
}

#[test]
fn removed_images_are_missing_until_they_return() {
    let Some(bench) = bench() else { return };
    bench.create("vhd:a.vhd", &[]);
    let vdi = bench.scan()["appeared"][0]["vdi"].clone();
    fs::rename(bench.path.join("a.vhd"), bench.daemon.room().join("a.vhd")).unwrap();
    assert_eq!(bench.scan()["missing"], json!([vdi]));
    assert_eq!(bench.scan()["missing"], json!([]), "it is told once");
    fs::rename(bench.daemon.room().join("a.vhd"), bench.path.join("a.vhd")).unwrap();
    assert_eq!(bench.scan()["returned"], json!([vdi]));
}

#[test]
fn a_directory_of_existing_images_becomes_a_repository_with_all_of_them() {
    let Some(bench) = bench() else { return };
    let path = bench.daemon.room().join("theirs");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("disk.raw"), [1; 4096]).unwrap();
    let body = json!({ "name": "theirs", "source": { "type": "dir", "path": path } });
    assert_eq!(bench.daemon.failed(bench.daemon.post("/srs", body.clone()))["code"], "exists");
    let made = bench.daemon.done(bench.daemon.post("/srs/introduce", body));
    let scan = bench.daemon.post(&format!("/srs/{}/scan", made["uuid"].as_str().unwrap()), json!({}));
    assert_eq!(appeared(&bench.daemon.done(scan)), [("disk.raw".to_owned(), true)]);
    assert_eq!(fs::read(path.join("disk.raw")).unwrap(), [1; 4096]);
}

/// The data of snapshots is still there afterwards, although they are no longer recorded.
#[test]
fn forgetting_introducing_and_scanning_keep_every_disks_state() {
    let Some(bench) = bench() else { return };
    let made = bench.daemon.post("/vdis", json!({ "sr": bench.sr, "name": "web", "size": 8 << 20 }));
    let vdi = bench.daemon.done(made)["uuid"].as_str().unwrap().to_owned();
    let verb = |verb: &str, body: Value| bench.daemon.done(bench.daemon.post(&format!("/vdis/{vdi}/{verb}"), body));
    let snapshot = verb("snapshot", json!({ "name": "before" }))["uuid"].as_str().unwrap().to_owned();
    let files = images(&bench.path);
    assert_eq!(files.len(), 2);

    bench.daemon.done(bench.daemon.post(&format!("/srs/{}/detach", bench.sr), json!({})));
    assert_eq!(bench.daemon.post(&format!("/srs/{}/forget", bench.sr), json!({})).0, 204);
    assert_eq!(bench.daemon.get(&format!("/vdis/{snapshot}")).0, 404);
    // Like a repository from before inventories existed (those with one are in inventory.rs).
    fs::remove_file(bench.path.join(".tapline-inventory.jsonl")).unwrap();
    let body = json!({ "uuid": bench.sr, "name": "vms", "source": { "type": "dir", "path": bench.path } });
    bench.daemon.done(bench.daemon.post("/srs/introduce", body));
    bench.scan();
    bench.daemon.settle();
    assert!(images(&bench.path) == files, "{}", bench.daemon.log());
    let vdis = bench.daemon.get("/vdis").1;
    let read_only = vdis.as_array().unwrap().iter().filter(|vdi| vdi["read_only"] == true).count();
    assert!(read_only >= 1, "{vdis}");
}

/// Images by name, with their contents.
fn images(path: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let mut images: Vec<_> = entries
        .filter(|path| path.extension().is_some_and(|end| end == "qcow2"))
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    images.sort();
    images
}
