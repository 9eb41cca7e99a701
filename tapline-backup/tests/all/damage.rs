//! A target of another key, of a newer version, or damaged.

use std::fs;
use std::path::PathBuf;

use crate::room::{Room, id};

#[test]
fn a_wrong_or_missing_key_is_refused_before_anything_is_written() {
    let room = Room::without_target();
    fs::create_dir(room.path("t")).unwrap();
    room.image("a.raw", 8, 1);
    assert_eq!(room.run(&["target", "create", "t", "--new-key", "key"]).code, 0);
    assert_eq!(fs::metadata(room.path("key")).unwrap().len(), 65);
    fs::create_dir(room.path("u")).unwrap();
    assert_eq!(room.run(&["target", "create", "u", "--new-key", "other"]).code, 0);
    room.run(&["target", "create", "u", "--new-key", "key"]).failed(7, "already");
    let before = files(&room);
    for (more, why) in
        [(&["--key-file", "other"][..], "not the key"), (&[], "encrypted"), (&["--key-file", "none"], "none")]
    {
        room.run(&[&["create", "t", "raw:a.raw", "--name", "a"], more].concat()).failed(64, why);
        room.run(&[&["prune", "t", "--grace", "0"], more].concat()).failed(64, why);
    }
    assert_eq!(files(&room), before);
    let made = room.back_up("raw:a.raw", "a", &["--key-file", "key"]);
    let ran = room.run(&["restore", "t", id(&made), "raw:b.raw", "--key-file", "key"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    room.same("a.raw", "b.raw");
    let plain: Vec<u8> = fs::read(room.path("a.raw")).unwrap()[..64].to_vec();
    for file in files(&room) {
        assert!(!fs::read(&file).unwrap().windows(64).any(|part| part == plain), "{file:?} is not encrypted");
    }
}

#[test]
fn a_newer_version_is_refused_and_says_so() {
    let room = Room::new();
    let format = fs::read_to_string(room.path("t/format")).unwrap();
    let line = format.lines().next().unwrap().replace("\"tapline-backup\":2", "\"tapline-backup\":3");
    let digest = blake3::hash(line.as_bytes()).to_hex();
    fs::write(room.path("t/format"), format!("{line}\n{digest}\n-\n")).unwrap();
    room.run(&["list", "t"]).failed(4, "version 3");
    fs::write(room.path("t/format"), "rubbish").unwrap();
    room.run(&["list", "t"]).failed(2, "damaged");
}

#[test]
fn no_target_and_a_directory_of_others_are_not_taken_for_one() {
    let room = Room::without_target();
    fs::create_dir(room.path("t")).unwrap();
    room.run(&["list", "t"]).failed(6, "no backup target");
    room.run(&["list", "nowhere"]).failed(6, "nowhere");
    fs::write(room.path("t/letters"), "").unwrap();
    room.run(&["target", "create", "t"]).failed(7, "not empty");
    for others in ["log/daily", "tmp/upload"] {
        fs::create_dir_all(room.path("v").join(others).parent().unwrap()).unwrap();
        fs::write(room.path("v").join(others), "").unwrap();
        room.run(&["target", "create", "v"]).failed(7, "not empty");
        fs::remove_dir_all(room.path("v")).unwrap();
    }
    room.run(&["list", "http://host/prefix"]).failed(64, "only directories");
    assert_eq!(fs::read_dir(room.path("t")).unwrap().count(), 1);
}

#[test]
fn another_target_than_the_named_one_is_refused() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let target = room.run(&["target", "show", "t", "--json"]).json()["id"].as_str().unwrap().to_owned();
    room.back_up("raw:a.raw", "a", &["--target-id", &target]);
    let words = ["create", "t", "raw:a.raw", "--name", "a", "--target-id", &"0".repeat(32)];
    room.run(&words).failed(64, "another target");
    assert_eq!(room.list().len(), 1);
}

#[test]
fn damage_is_found_named_and_never_restored() {
    for (place, spoil) in
        [("packs", "flip"), ("packs", "cut"), ("backups", "flip"), ("backups", "cut"), ("packs", "remove")]
    {
        let room = Room::new();
        room.image("a.raw", 8, 1);
        room.image("b.raw", 8, 2);
        let (a, b) = (room.back_up("raw:a.raw", "a", &[]), room.back_up("raw:b.raw", "b", &[]));
        let listed = files(&room);
        // Those of one backup: the sizes of both packs differ from that of an index.
        let of = |file: &&PathBuf| file.to_string_lossy().contains(&format!("t/{place}/"));
        let victim = listed.iter().find(of).unwrap();
        let bytes = fs::read(victim).unwrap();
        match spoil {
            "flip" => {
                let mut bytes = bytes;
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                fs::write(victim, bytes).unwrap();
            }
            "cut" => fs::write(victim, &bytes[..bytes.len() / 2]).unwrap(),
            _ => fs::remove_file(victim).unwrap(),
        }
        let verified = room.run(&["verify", "t", "--json"]);
        assert_eq!(verified.code, 2, "{place} {spoil}: {verified:?}");
        let report: serde_json::Value = serde_json::from_str(&verified.out).unwrap();
        let lost = report["lost"].as_array().unwrap();
        assert_eq!(lost.len(), 1, "{place} {spoil}: {report}");
        let (lost, sound, image) =
            if lost[0]["id"] == a["id"] { (id(&a), id(&b), "b.raw") } else { (id(&b), id(&a), "a.raw") };
        room.restores(sound, image);
        let ran = room.run(&["restore", "t", lost, "raw:c.raw"]);
        assert!(ran.code == 2 && ran.out.is_empty(), "{place} {spoil}: {ran:?}");
        let names = fs::read_dir(room.path("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(names.filter(|name| name.starts_with("c.raw")).count() == 0, "{place} {spoil}: a part was restored");
        assert!(room.run(&["verify", "t"]).out.contains("lost:"));
        if place == "packs" {
            // A new backup brings back what the target has lost, to the old one as well.
            let own = if lost == id(&a) { "a.raw" } else { "b.raw" };
            let repaired = room.back_up(&format!("raw:{own}"), "again", &["--repair"]);
            room.restores(id(&repaired), own);
            room.restores(lost, own);
        }
    }
}

/// All files of the target.
fn files(room: &Room) -> Vec<PathBuf> {
    let listed = room.tool("find", &[&room.path("t").display().to_string(), "-type", "f"]);
    let mut listed: Vec<PathBuf> = listed.lines().map(PathBuf::from).collect();
    listed.sort();
    listed
}
