//! The logical block size of VDIs: recorded, kept by every verb, and visible to clients of a disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::{Taplined, disks, start};

const SIZE: u64 = 8 << 20;

struct Bed {
    daemon: Taplined,
    sr: String,
}

fn bed() -> Bed {
    let daemon = start();
    let sr = daemon.repository("vms");
    Bed { daemon, sr }
}

impl Bed {
    fn path(&self, name: &str) -> PathBuf {
        self.daemon.room().join(name)
    }

    fn task(&self, path: &str, body: Value) -> Value {
        self.daemon.done(self.daemon.post(path, body))
    }

    fn made(&self, path: &str, body: Value) -> String {
        self.task(path, body)["uuid"].as_str().unwrap().into()
    }

    fn create(&self, name: &str, body: Value) -> String {
        let mut asked = json!({ "sr": self.sr, "name": name, "size": SIZE });
        asked.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        self.made("/vdis", asked)
    }

    fn import(&self, name: &str, path: &Path, body: Value) -> String {
        let mut asked = json!({ "sr": self.sr, "name": name, "path": path });
        asked.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        self.made("/vdis/import", asked)
    }

    fn sectors(&self, vdi: &str) -> Value {
        self.daemon.get(&format!("/vdis/{vdi}")).1["logical_block_size"].clone()
    }

    /// The minimum block size that an NBD client of a VDI is sent.
    fn served(&self, vdi: &str) -> Value {
        let vbd = disks::vbd(&self.daemon, vdi, "nbd");
        disks::plug(&self.daemon, &vbd);
        let listed = Command::new("nbdinfo").args(["--json", &disks::nbd(&self.daemon, &vbd)]).output().unwrap();
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
        disks::unplug(&self.daemon, &vbd);
        assert_eq!(self.daemon.delete(&vbd).0, 204);
        let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
        listed["exports"][0]["block_size_minimum"].clone()
    }
}

/// A VHDX with sectors of 4096 bytes, patched from one of QEMU, which cannot create such.
fn vhdx(room: &Path) -> PathBuf {
    let (raw, path) = (room.join("source.raw"), room.join("source.vhdx"));
    fs::File::create(&raw).unwrap().set_len(SIZE).unwrap();
    let made = Command::new("qemu-img").args(["convert", "-f", "raw", "-O", "vhdx"]).args([&raw, &path]).status();
    assert!(made.expect("qemu-img (make prepare?)").success());
    let mut file = fs::read(&path).unwrap();
    let find = |what: &[u8]| file.windows(what.len()).position(|bytes| bytes == what).unwrap();
    // The entry of the item "logical sector size" in the metadata table.
    let (table, item) = (find(b"metadata"), find(&[0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47]));
    let at = table + usize::try_from(u32::from_le_bytes(file[item + 16..item + 20].try_into().unwrap())).unwrap();
    assert_eq!(file[at..at + 4], 512u32.to_le_bytes());
    file[at..at + 4].copy_from_slice(&4096u32.to_le_bytes());
    fs::write(&path, file).unwrap();
    path
}

#[test]
fn an_imported_vhdx_keeps_its_sectors_in_every_verb() {
    let bed = bed();
    let vdi = bed.import("web", &vhdx(bed.daemon.room()), json!({ "source_format": "vhdx", "format": "qcow2" }));
    assert_eq!((bed.sectors(&vdi), bed.served(&vdi)), (json!(4096), json!(4096)));
    let snapshot = bed.made(&format!("/vdis/{vdi}/snapshot"), json!({}));
    let clone = bed.made(&format!("/vdis/{snapshot}/clone"), json!({}));
    let copy = bed.made(&format!("/vdis/{vdi}/copy"), json!({ "sr": bed.sr, "format": "vhd" }));
    for made in [&snapshot, &clone, &copy] {
        assert_eq!(bed.sectors(made), 4096);
    }
    assert_eq!(bed.served(&copy), 4096);
    // A revert restores the sectors of its guest.
    assert_eq!(bed.daemon.patch(&format!("/vdis/{vdi}"), json!({ "logical_block_size": 512 })).0, 200);
    assert_eq!(bed.served(&vdi), 512);
    bed.task(&format!("/vdis/{vdi}/revert"), json!({ "snapshot": snapshot }));
    assert_eq!((bed.sectors(&vdi), bed.served(&vdi)), (json!(4096), json!(4096)));
    disks::inventory_agrees(&bed.daemon);
}

#[test]
fn an_option_overrides_the_sectors_of_the_source() {
    let bed = bed();
    let path = vhdx(bed.daemon.room());
    let vdi = bed.import("small", &path, json!({ "source_format": "vhdx", "logical_block_size": 512 }));
    assert_eq!(bed.sectors(&vdi), 512);
    let raw = bed.path("source.raw");
    let vdi = bed.import("raw", &raw, json!({ "source_format": "raw" }));
    assert_eq!(bed.sectors(&vdi), 512);
    let vdi = bed.import("large", &raw, json!({ "source_format": "raw", "logical_block_size": 4096, "format": "raw" }));
    assert_eq!((bed.sectors(&vdi), bed.served(&vdi)), (json!(4096), json!(4096)));
}

#[test]
fn an_export_warns_of_sectors_that_its_format_cannot_record() {
    let bed = bed();
    let (small, large) = (bed.create("small", json!({})), bed.create("large", json!({ "logical_block_size": 4096 })));
    for format in ["raw", "vhd", "qcow2"] {
        let asked = |name: &str| json!({ "path": bed.path(&format!("{name}.{format}")), "format": format });
        let done = bed.task(&format!("/vdis/{large}/export"), asked("large"));
        assert!(done["warning"].as_str().unwrap().contains("--logical-block-size 4096"), "{done}");
        assert_eq!(bed.task(&format!("/vdis/{small}/export"), asked("small"))["warning"], Value::Null);
    }
    // As the warning advises.
    let asked = json!({ "source_format": "qcow2", "logical_block_size": 4096 });
    assert_eq!(bed.sectors(&bed.import("back", &bed.path("large.qcow2"), asked)), 4096);
}

#[test]
fn sizes_that_sectors_do_not_divide_are_refused() {
    let bed = bed();
    let odd = json!({ "sr": bed.sr, "name": "odd", "size": SIZE + 512, "logical_block_size": 4096 });
    let (status, problem) = bed.daemon.post("/vdis", odd);
    assert_eq!((status, &problem["field"]), (400, &json!("size")), "{problem}");
    let (status, problem) =
        bed.daemon.post("/vdis", json!({ "sr": bed.sr, "name": "a", "size": SIZE, "logical_block_size": 1024 }));
    assert_eq!(status, 400, "{problem}");
    let vdi = bed.create("disk", json!({ "logical_block_size": 4096 }));
    let (status, problem) = bed.daemon.post(&format!("/vdis/{vdi}/resize"), json!({ "size": SIZE + 512 }));
    assert_eq!(status, 400, "{problem}");
    bed.task(&format!("/vdis/{vdi}/resize"), json!({ "size": SIZE + 4096 }));
    let small = bed.create("small", json!({ "size": SIZE + 512 }));
    let (status, problem) = bed.daemon.patch(&format!("/vdis/{small}"), json!({ "logical_block_size": 4096 }));
    assert_eq!((status, &problem["field"]), (400, &json!("logical_block_size")), "{problem}");
}

#[test]
fn sectors_of_a_plugged_disk_do_not_change() {
    let bed = bed();
    let vdi = bed.create("disk", json!({}));
    assert_eq!(bed.served(&vdi), 512);
    let vbd = disks::vbd(&bed.daemon, &vdi, "vhost-user");
    disks::plug(&bed.daemon, &vbd);
    let (status, problem) = bed.daemon.patch(&format!("/vdis/{vdi}"), json!({ "logical_block_size": 4096 }));
    assert_eq!((status, &problem["code"]), (409, &json!("in-use")), "{problem}");
    disks::unplug(&bed.daemon, &vbd);
    assert_eq!(bed.daemon.patch(&format!("/vdis/{vdi}"), json!({ "logical_block_size": 4096 })).0, 200);
    assert_eq!(bed.sectors(&vdi), 4096);
}

#[test]
fn a_scanned_image_has_the_sectors_of_its_chain_or_512() {
    let bed = bed();
    let vdi = bed.create("disk", json!({ "logical_block_size": 4096, "format": "qcow2" }));
    assert_eq!(bed.daemon.patch(&format!("/vdis/{vdi}"), json!({ "read_only": true })).0, 200);
    let directory = bed.path("vms");
    let file = bed.daemon.get(&format!("/vdis/{vdi}")).1["file"].as_str().unwrap().to_owned();
    fs::write(directory.join("alone.raw"), vec![0; 1 << 20]).unwrap();
    let words = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &file, "above.qcow2"];
    assert!(Command::new("qemu-img").args(words).current_dir(&directory).status().unwrap().success());
    let scan = bed.task(&format!("/srs/{}/scan", bed.sr), json!({}));
    for (file, sectors) in [("alone.raw", 512), ("above.qcow2", 4096)] {
        let placed = scan["appeared"].as_array().unwrap().iter().find(|placed| placed["file"] == file);
        let vdi = placed.unwrap_or_else(|| panic!("{scan}"))["vdi"].as_str().unwrap();
        assert_eq!(bed.sectors(vdi), sectors, "{file}");
    }
}

/// The behaviour of earlier versions: the storage decides, which is 512 wherever it supports sectors of 512.
#[test]
fn a_disk_of_an_earlier_version_is_served_and_copied_as_before() {
    let bed = bed();
    let (vdi, other) =
        (bed.create("disk", json!({ "format": "raw" })), bed.create("other", json!({ "format": "qcow2" })));
    bed.daemon.catalogue().execute("UPDATE vdi SET logical_block_size = NULL", []).unwrap();
    assert_eq!((bed.sectors(&vdi), bed.served(&vdi)), (Value::Null, json!(512)));
    let clone = bed.made(&format!("/vdis/{other}/clone"), json!({}));
    assert_eq!(bed.sectors(&clone), Value::Null);
    let copy = bed.made(&format!("/vdis/{vdi}/copy"), json!({ "sr": bed.sr }));
    assert_eq!(bed.sectors(&copy), 512);
}
