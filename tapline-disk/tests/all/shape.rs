//! Transfers that are split and merged under a served disk: data stays intact, settings change while it is served and
//! pass to the next process, and policies are only used on the storage for which they were measured.

use std::fs;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use testkit::nbd::{Client, Command};

use crate::tool::control::Control;
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;
use crate::tool::{Room, noise};

const MIB: usize = 1 << 20;

fn connect(room: &Room) -> Client {
    Client::connect(&room.file("nbd.sock")).unwrap()
}

fn control(room: &Room) -> Control {
    Control::connect(&room.file("control.sock"))
}

fn shape(room: &Room, fields: &Value) -> Value {
    let mut request = json!({ "verb": "shape" });
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    control(room).done(&request)
}

/// Creates a policy file for the storage of a raw image in this room.
fn policy(room: &Room, split: u64) -> Value {
    room.write("full", &noise(1, 64 * MIB));
    room.done("calibrate raw:full --each 1 --policy policy.json");
    let mut found: Value = serde_json::from_slice(&room.read("policy.json")).unwrap();
    found["policy"] = json!({ "split": split, "merge": null });
    room.write("policy.json", found.to_string().as_bytes());
    found
}

#[test]
fn what_is_written_in_pieces_and_merged_is_read_whatever_the_format() {
    for format in ["raw", "vhd", "qcow2", "data-file"] {
        let room = Room::new();
        let image = room.image(format, "16M");
        let disk =
            Disk::serve(&room, &format!("{image} --nbd nbd.sock --control control.sock --io-split 4K --io-merge 64K"));
        let mut nbd = connect(&room);
        let bytes = noise(7, 2 * MIB);
        nbd.write(4096 * 3, &bytes).unwrap();
        // Small adjacent ones, which arrive together.
        let small: Vec<&[u8]> = bytes.chunks(512).take(512).collect();
        let at = |number: usize| u64::try_from(8 * MIB + number * 512).unwrap();
        small.iter().enumerate().for_each(|(number, part)| nbd.send(Command::Write, at(number), 512, part).unwrap());
        small.iter().for_each(|_| drop(nbd.answer(0).unwrap()));
        nbd.flush().unwrap();
        assert!(nbd.read(4096 * 3, 2 * MIB).unwrap() == bytes, "{format}");
        assert!(nbd.read(8 * 1024 * 1024, 512 * 512).unwrap() == bytes[..512 * 512], "{format}");
        let told = shape(&room, &json!({}));
        assert_eq!((&told["split"], &told["split_bytes"]), (&json!("4096"), &json!(4096)));
        assert!(told["splits"].as_u64().unwrap() > 0, "{format}: {told}");
        let (code, said) = disk.stop();
        assert_eq!(code, Some(0), "{said}");
        if format != "raw" {
            room.sound_and_closed(&image);
        }
    }
}

#[test]
fn rules_can_be_changed_live_and_invalid_ones_are_refused() {
    let room = Room::new();
    room.done("image create raw:a --size 16M");
    let _disk = Disk::serve(&room, "raw:a --nbd nbd.sock --control control.sock");
    let mut nbd = connect(&room);
    nbd.write(0, &noise(3, MIB)).unwrap();
    let before = shape(&room, &json!({}));
    assert_eq!((&before["split"], &before["merge"], &before["splits"]), (&json!("none"), &json!("none"), &json!(0)));
    assert_eq!(shape(&room, &json!({ "split": "65536" }))["split_bytes"], 65536);
    nbd.write(MIB as u64, &noise(4, MIB)).unwrap();
    // It stays when the other one changes.
    let told = shape(&room, &json!({ "merge": "1048576" }));
    assert_eq!(
        (&told["split_bytes"], &told["merge_bytes"], &told["splits"]),
        (&json!(65536), &json!(1048576), &json!(1))
    );
    let told = shape(&room, &json!({ "split": "none", "merge": "off" }));
    assert_eq!((&told["split_bytes"], &told["merge_bytes"]), (&json!(null), &json!(null)));
    nbd.write(2 * MIB as u64, &noise(5, MIB)).unwrap();
    assert_eq!(shape(&room, &json!({}))["splits"], 1, "none since");
    for (fields, why) in
        [(json!({ "split": "auto" }), "tapline calibrate"), (json!({ "split": "5000" }), "power of two")]
    {
        let mut request = json!({ "verb": "shape" });
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let refused = control(&room).ask(&request);
        assert!(refused["error"].to_string().contains(why), "{refused}");
    }
    let bytes: Vec<u8> = (3..6).flat_map(|seed| noise(seed, MIB)).collect();
    assert!(nbd.read(0, 3 * MIB).unwrap() == bytes);
}

#[test]
fn an_upgrade_keeps_live_settings_over_the_command_line() {
    let room = Room::new();
    room.done("image create raw:a --size 16M");
    let mut disk = Replaced::serve(&room, "raw:a --nbd nbd.sock --io-split 16K");
    let mut nbd = connect(&room);
    nbd.write(0, &noise(3, MIB)).unwrap();
    shape(&room, &json!({ "split": "none", "merge": "65536" }));
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    let told = shape(&room, &json!({}));
    assert_eq!((&told["split_bytes"], &told["merge_bytes"]), (&json!(null), &json!(65536)));
    assert_eq!(told["splits"], 1, "counters go on");
    // Once more, to nothing.
    shape(&room, &json!({ "merge": "none" }));
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    let told = shape(&room, &json!({}));
    assert_eq!((&told["split_bytes"], &told["merge_bytes"]), (&json!(null), &json!(null)));
    assert!(nbd.read(0, MIB).unwrap() == noise(3, MIB));
    disk.stop();
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_policy_stays_in_force_without_its_file_and_across_an_upgrade() {
    let room = Room::new();
    policy(&room, 32768);
    room.done("image create qcow2:a --size 16M");
    let mut disk = Replaced::serve(&room, "qcow2:a --nbd nbd.sock --io-policy policy.json");
    let told = shape(&room, &json!({}));
    assert_eq!(
        (&told["split"], &told["split_bytes"], &told["merge_bytes"]),
        (&json!("auto"), &json!(32768), &json!(null))
    );
    assert!(told["policy"]["why"].as_str().unwrap().contains("measurements"), "{told}");
    fs::remove_file(room.file("policy.json")).unwrap();
    let upgrade = disk.upgrade();
    disk.replaced_by(&upgrade.join().unwrap());
    assert_eq!(shape(&room, &json!({ "split": "none" }))["split_bytes"], json!(null));
    let told = shape(&room, &json!({ "split": "auto" }));
    assert_eq!((&told["split_bytes"], &told["policy"]["split"]), (&json!(32768), &json!(32768)));
    disk.stop();
    // Given values override the policy; without a policy, 'auto' is refused.
    policy(&room, 32768);
    let disk =
        Disk::serve(&room, "qcow2:a --nbd nbd.sock --control control.sock --io-policy policy.json --io-split 8K");
    assert_eq!(shape(&room, &json!({}))["split_bytes"], 8192);
    disk.stop();
    let said = room.tapline("serve qcow2:a --nbd nbd.sock --io-split auto");
    assert!(said.code != Some(0) && said.err.contains("tapline calibrate"), "{said:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_policy_of_another_device_or_a_damaged_one_is_refused() {
    let room = Room::new();
    let mut found = policy(&room, 32768);
    room.done("image create raw:a --size 16M");
    found["device"] = json!({ "id": "naa.1", "name": "another disk" });
    room.write("other.json", found.to_string().as_bytes());
    room.write("cut.json", b"{\"version\":1,");
    for (file, why) in [("other.json", "measured on another disk"), ("cut.json", "not a policy file"), ("none", "none")]
    {
        let said = room.tapline(&format!("serve raw:a --nbd nbd.sock --io-policy {file}"));
        assert!(said.code != Some(0) && said.err.contains(why) && said.err.contains("tapline calibrate"), "{said:?}");
        assert!(!room.file("nbd.sock").exists());
    }
}

/// A killed process delays nothing: the next one finds all that it had acknowledged.
#[test]
fn acknowledged_writes_survive_a_kill_of_a_disk_that_splits_and_merges() {
    for format in ["raw", "vhd", "qcow2"] {
        let room = Room::new();
        let image = room.image(format, "16M");
        let words = format!("{image} --nbd nbd.sock --control control.sock --io-split 4K --io-merge 16K");
        let mut disk = Replaced::of(&room, Disk::serve(&room, &words));
        let mut nbd = connect(&room);
        let bytes = noise(9, 256 * 1024);
        let parts: Vec<&[u8]> = bytes.chunks(2048).collect();
        let at = |number: usize| u64::try_from(number * 2048).unwrap();
        parts.iter().enumerate().for_each(|(number, part)| nbd.send(Command::Write, at(number), 2048, part).unwrap());
        parts.iter().for_each(|_| drop(nbd.answer(0).unwrap()));
        nbd.write(8 << 20, &bytes).unwrap();
        nbd.send(Command::Write, 12 << 20, 2048, parts[0]).unwrap();
        kill_process(disk.pid, Signal::KILL).unwrap();
        disk.first.child.wait().unwrap();
        let _second = Disk::serve(&room, &format!("{image} --nbd nbd2.sock"));
        let mut nbd = Client::connect(&room.file("nbd2.sock")).unwrap();
        assert!(nbd.read(8 << 20, bytes.len()).unwrap() == bytes, "{format}");
        assert!(nbd.read(0, bytes.len()).unwrap() == bytes, "{format}");
    }
}

#[test]
fn calibrate_reads_what_it_is_told_to_and_keeps_the_evidence() {
    let room = Room::new();
    room.write("full", &noise(1, 64 * MIB));
    let found = room.json("calibrate raw:full --each 1 --policy policy.json");
    assert_eq!(found, serde_json::from_slice::<Value>(&room.read("policy.json")).unwrap());
    assert_eq!((&found["version"], &found["operation"]), (&json!(1), &json!("read")));
    assert!(found["points"].as_array().unwrap().len() > 100);
    assert!(found["points"].as_array().unwrap().iter().all(|point| point["bytes_per_second"].as_u64().unwrap() > 0));
    assert!(!found["kernel"].as_str().unwrap().is_empty());
    assert!(room.read("full") == noise(1, 64 * MIB), "it only reads");
    let said = room.done("calibrate model:nvme --each 1");
    assert!(said.contains("512 KiB in flight") && said.contains("policy: split"), "{said}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn calibrate_writes_only_if_asked_to_and_never_to_what_is_there() {
    let room = Room::new();
    room.write("full", &noise(1, 64 * MIB));
    let said = room.tapline("calibrate raw:full --write --each 1");
    assert!(said.code != Some(0) && said.err.contains("it holds data"), "{said:?}");
    assert!(room.read("full") == noise(1, 64 * MIB));
    let found = room.json("calibrate raw:scratch --write --each 1");
    assert_eq!(found["operation"], "write");
    assert!(!room.file("scratch").exists(), "what was written to is gone");
}

#[test]
fn calibrate_refuses_what_tells_nothing_of_the_storage() {
    let room = Room::new();
    room.write("small", &noise(1, MIB));
    room.done("image create raw:holes --size 1G");
    room.done("image create qcow2:q --size 1G");
    let cases = [
        ("raw:small", "64 MiB or more"),
        ("raw:holes", "holes"),
        ("qcow2:q", "a format would be measured"),
        ("null:1G", "there is none"),
        ("raw:none", "none"),
        ("model:tape", "no kind of storage"),
    ];
    for (words, why) in cases {
        let said = room.tapline(&format!("calibrate {words} --each 1"));
        assert!(said.code != Some(0) && said.err.contains(why), "{words}: {said:?}");
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_disk_in_use_is_refused_unless_that_is_said() {
    let room = Room::new();
    room.write("full", &noise(1, 64 * MIB));
    let _disk = Disk::serve(&room, "raw:full --nbd nbd.sock");
    let said = room.tapline("calibrate raw:full --each 1");
    assert!(said.code != Some(0) && said.err.contains("--in-use"), "{said:?}");
    room.done("calibrate raw:full --each 1 --in-use");
    let said = room.tapline("calibrate raw:full --each 1 --in-use --write");
    assert_eq!(said.code, Some(64), "{said:?}");
}
