//! Images that are one file with two names: hard links and bind mounts, in one repository and across repositories.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{plug, vbd};
use crate::harness::{self, Taplined, start};

/// A repository with raw disks, whose VDIs are found by file.
struct Bed {
    daemon: Taplined,
    sr: String,
    path: PathBuf,
}

fn bed(disks: &[&str]) -> Bed {
    let daemon = start();
    let sr = daemon.repository("vms");
    let path = daemon.room().join("vms");
    for (number, name) in disks.iter().enumerate() {
        fs::write(path.join(name), vec![u8::try_from(number + 1).unwrap(); 1 << 20]).unwrap();
    }
    let bed = Bed { daemon, sr, path };
    bed.scan();
    bed
}

impl Bed {
    fn scan_of(&self, sr: &str) -> Value {
        self.daemon.done(self.daemon.post(&format!("/srs/{sr}/scan"), json!({})))
    }

    fn scan(&self) -> Value {
        self.scan_of(&self.sr)
    }

    fn vdi(&self, file: &str) -> Value {
        let vdis = self.daemon.get("/vdis").1;
        vdis.as_array().unwrap().iter().find(|vdi| vdi["file"] == file).unwrap_or_else(|| panic!("{vdis}")).clone()
    }

    fn uuid(&self, file: &str) -> String {
        self.vdi(file)["uuid"].as_str().unwrap().to_owned()
    }

    /// Replaces a file with a link to another.
    fn link(&self, file: &str, to: &str) {
        fs::remove_file(self.path.join(to)).unwrap();
        fs::hard_link(self.path.join(file), self.path.join(to)).unwrap();
    }

    /// As advised: `cp A A.new && mv A.new A`.
    fn give_own_file(&self, path: &std::path::Path) {
        let new = path.with_extension("new");
        fs::copy(path, &new).unwrap();
        fs::rename(new, path).unwrap();
    }
}

fn unplaced(scan: &Value) -> Vec<(&str, &str, &str)> {
    let lines = scan["unplaced"].as_array().unwrap().iter();
    lines
        .map(|one| {
            let problem = &one["problem"];
            (one["file"].as_str().unwrap(), problem["code"].as_str().unwrap(), problem["detail"].as_str().unwrap())
        })
        .collect()
}

#[track_caller]
fn only_linked(scan: &Value, file: &str, other: &str) {
    let [(name, code, detail)] = unplaced(scan)[..] else { panic!("{scan}") };
    assert_eq!((name, code), (file, "exists"), "{scan}");
    assert!(detail.contains("the same file as") && detail.contains(other), "{detail}");
    assert_eq!(scan["appeared"], json!([]), "{scan}");
}

#[test]
fn a_second_name_of_an_image_is_not_a_second_disk() {
    let bed = bed(&["a.raw"]);
    let a = bed.uuid("a.raw");
    fs::hard_link(bed.path.join("a.raw"), bed.path.join("b.raw")).unwrap();
    only_linked(&bed.scan(), "b.raw", &a);
    // A second repository whose files were linked by `cp -al`.
    let there = bed.daemon.room().join("linked");
    fs::create_dir(&there).unwrap();
    fs::hard_link(bed.path.join("a.raw"), there.join("copy.raw")).unwrap();
    let source = json!({ "name": "linked", "source": { "type": "dir", "path": there } });
    let other = bed.daemon.done(bed.daemon.post("/srs/introduce", source));
    let other = other["uuid"].as_str().unwrap();
    only_linked(&bed.scan_of(other), "copy.raw", &a);
    // Each becomes a disk once it has its own file.
    bed.give_own_file(&bed.path.join("b.raw"));
    bed.give_own_file(&there.join("copy.raw"));
    assert_eq!(bed.scan()["appeared"][0]["file"], "b.raw");
    assert_eq!(bed.scan_of(other)["appeared"][0]["file"], "copy.raw");
}

#[test]
fn of_two_new_names_of_one_file_one_becomes_a_disk() {
    let bed = bed(&[]);
    fs::write(bed.path.join("a.raw"), [1; 4096]).unwrap();
    fs::hard_link(bed.path.join("a.raw"), bed.path.join("b.raw")).unwrap();
    let scan = bed.scan();
    assert_eq!(scan["appeared"].as_array().unwrap().len(), 1, "{scan}");
    assert_eq!((scan["appeared"][0]["file"].as_str(), unplaced(&scan)[0].0), (Some("a.raw"), "b.raw"), "{scan}");
}

#[test]
fn a_bind_mount_of_an_image_is_not_a_second_disk() {
    struct Bound(PathBuf);
    impl Drop for Bound {
        fn drop(&mut self) {
            Command::new("umount").arg(&self.0).status().ok();
        }
    }
    let bed = bed(&["a.raw"]);
    let bound = bed.path.join("bound.raw");
    fs::write(&bound, "").unwrap();
    let mut mount = Command::new("mount");
    if !mount.arg("--bind").arg(bed.path.join("a.raw")).arg(&bound).status().is_ok_and(|code| code.success()) {
        return harness::not_run("an image that is bound to a second name: this user may mount nothing");
    }
    let _bound = Bound(bound);
    only_linked(&bed.scan(), "bound.raw", &bed.uuid("a.raw"));
}

#[test]
fn a_disk_whose_file_became_a_link_is_held() {
    let bed = bed(&["a.raw", "b.raw", "c.raw"]);
    let (a, b, c) = (bed.uuid("a.raw"), bed.uuid("b.raw"), bed.uuid("c.raw"));
    bed.link("a.raw", "b.raw");
    bed.link("a.raw", "c.raw");
    let scan = bed.scan();
    let found: Vec<_> = unplaced(&scan).iter().map(|(file, code, _)| (*file, *code)).collect();
    assert_eq!(found, [("b.raw", "state"), ("c.raw", "state")], "{scan}");
    assert!(unplaced(&scan)[0].2.contains(&a) && unplaced(&scan)[0].2.contains(&b), "{scan}");
    let states = ["a.raw", "b.raw", "c.raw"].map(|file| bed.vdi(file)["state"].as_str().unwrap().to_owned());
    assert_eq!(states, ["ready", "diverged", "diverged"]);
    let held = vbd(&bed.daemon, &b, "nbd");
    let refused = bed.daemon.post(&format!("{held}/plug"), json!({}));
    assert_eq!(refused.1["code"], "state", "{refused:?}");
    assert!(refused.1["detail"].as_str().unwrap().contains("a.raw"), "{refused:?}");
    let believe = |vdi: &str| bed.daemon.post(&format!("/vdis/{vdi}/reconcile"), json!({ "believe": "catalogue" }));
    assert!(believe(&b).1["detail"].as_str().unwrap().contains("the same file"));
    // Each advice works.
    bed.give_own_file(&bed.path.join("b.raw"));
    assert!(believe(&b).0 < 300);
    plug(&bed.daemon, &held);
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{c}")));
    bed.daemon.settle();
    assert_eq!(fs::read(bed.path.join("a.raw")).unwrap(), vec![1; 1 << 20]);
    assert!(!bed.path.join("c.raw").exists());
    assert_eq!(unplaced(&bed.scan()), []);
}

#[test]
fn an_undetected_link_is_refused_by_the_lock_with_both_names() {
    let bed = bed(&["a.raw", "b.raw"]);
    let (a, b) = (bed.uuid("a.raw"), bed.uuid("b.raw"));
    bed.link("a.raw", "b.raw");
    plug(&bed.daemon, &vbd(&bed.daemon, &a, "nbd"));
    let second = vbd(&bed.daemon, &b, "nbd");
    let failed = bed.daemon.failed(bed.daemon.post(&format!("{second}/plug"), json!({})));
    let detail = failed["detail"].as_str().unwrap();
    assert!(detail.contains("a.raw") && detail.contains("b.raw") && detail.contains(&a), "{failed}");
    // The running one keeps the file, although the scan finds it only now.
    bed.scan();
    assert_eq!((&bed.vdi("a.raw")["state"], &bed.vdi("b.raw")["state"]), (&json!("ready"), &json!("diverged")));
}

#[test]
fn repositories_that_are_read_only_may_share_files() {
    let bed = bed(&[]);
    let libraries = ["one", "other"].map(|name| {
        let path = bed.daemon.room().join(name);
        fs::create_dir(&path).unwrap();
        path
    });
    fs::write(libraries[0].join("boot.iso"), [1; 4096]).unwrap();
    fs::hard_link(libraries[0].join("boot.iso"), libraries[1].join("boot.iso")).unwrap();
    for path in libraries {
        let source = json!({ "name": path.file_name().unwrap().to_str(), "source": { "type": "iso", "path": path } });
        let made = bed.daemon.done(bed.daemon.post("/srs", source));
        let scan = bed.scan_of(made["uuid"].as_str().unwrap());
        assert_eq!((scan["appeared"].as_array().unwrap().len(), unplaced(&scan)), (1, vec![]), "{scan}");
    }
    let states = bed.daemon.get("/vdis").1;
    assert!(states.as_array().unwrap().iter().all(|vdi| vdi["state"] == "ready"), "{states}");
}
