//! A qcow2 image whose parent is an export of an NBD server, in every job and served, and copied up; the state of the
//! server at the control socket.

use std::io::{BufRead, BufReader};

use serde_json::json;

use crate::remote::{Server, make_disk, start, uri, wait_for_line, wait_for_progress};
use crate::tool::Room;
use crate::tool::control::Control;
use crate::tool::served::Disk;

const MIB: usize = 1 << 20;

/// A disk `base.raw` at the server `base`, and a child of it.
fn clone(room: &Room, words: &str) -> Server {
    make_disk(room, "raw:base.raw");
    let server = Server::nbdkit(room, &format!("-r {words} file base.raw"), "base");
    room.done(&format!("image create qcow2:clone.qcow2 --parent {}", uri("base")));
    server
}

/// The bytes of a disk, converted to a file.
fn contents(room: &Room, disk: &str) -> Vec<u8> {
    room.done(&format!("image convert {disk} --force"));
    room.read("copy.raw")
}

#[test]
fn a_clone_of_an_export_works_in_every_job_and_for_qemu() {
    let room = Room::new();
    let _server = clone(&room, "");
    let parent = uri("base");
    let info = room.tool("qemu-img", "info -U --output=json clone.qcow2");
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    assert_eq!((&info["backing-filename"], &info["backing-filename-format"]), (&json!(parent), &json!("raw")));
    let mut expected = room.read("full.raw");
    assert!(contents(&room, &format!("qcow2:clone.qcow2 raw:copy.raw --parent {parent}")) == expected);
    // Written by a guest, partly over data of the parent, with copy on write.
    let disk = Disk::serve(&room, &format!("qcow2:clone.qcow2 --parent {parent} --nbd at"));
    let at = format!("nbd+unix:///?socket={}", room.file("at").display());
    room.qemu_io(&["-f", "raw", &at], &["write -P 9 1000k 5k", "write -P 8 50M 64k", "discard 33M 1M", "flush"]);
    assert_eq!(disk.stop().0, Some(0));
    expected[1000 << 10..1005 << 10].fill(9);
    expected[50 * MIB..50 * MIB + (64 << 10)].fill(8);
    let copy = contents(&room, &format!("qcow2:clone.qcow2 raw:copy.raw --parent {parent}"));
    expected[33 * MIB..34 * MIB].copy_from_slice(&copy[33 * MIB..34 * MIB]);
    assert!(copy == expected, "the clone differs");
    assert!(copy[33 * MIB..34 * MIB].iter().all(|&byte| byte == 0));
    room.tool("qemu-img", "compare -U -f qcow2 -F raw clone.qcow2 copy.raw");
    let lines = room.json(&format!("image map qcow2:clone.qcow2 --parent {parent}"));
    let data = lines.as_array().unwrap().iter().filter(|line| line["data"] == true);
    let data: u64 = data.map(|line| line["length"].as_u64().unwrap()).sum();
    assert!((10 << 20..13 << 20).contains(&data), "{lines}");
    room.done(&format!("image measure qcow2:clone.qcow2 --format vhd --parent {parent}"));
    let said = room.tapline("image map qcow2:clone.qcow2");
    assert!(said.code != Some(0) && said.err.contains(&format!("--parent '{parent}'")), "{said:?}");
    // One that QEMU has made.
    room.tool("qemu-img", &format!("create -q -f qcow2 -b {parent} -F raw theirs.qcow2"));
    assert!(
        contents(&room, &format!("qcow2:theirs.qcow2 raw:copy.raw --parent {parent}")) == room.read("full.raw"),
        "theirs"
    );
    // A snapshot of the clone is a chain of three.
    room.done(&format!("image create qcow2:upper.qcow2 --parent qcow2:clone.qcow2 --parent {parent}"));
    let parents = format!("--parent qcow2:clone.qcow2 --parent {parent}");
    assert!(contents(&room, &format!("qcow2:upper.qcow2 raw:copy.raw {parents}")) == expected, "upper");
}

#[test]
fn a_clone_is_flattened_over_kills_of_its_server_and_of_the_job() {
    let room = Room::new();
    make_disk(&room, "raw:base.raw");
    let server = Server::slow(&room, "base.raw", "base");
    let parent = uri("base");
    room.done(&format!("image create qcow2:clone.qcow2 --parent {parent}"));
    let flatten = format!("image flatten qcow2:clone.qcow2 --parent {parent}");
    let mut job = start(&room, &flatten);
    wait_for_progress(&room, "clone.qcow2", &mut job);
    job.kill().unwrap();
    job.wait().unwrap();
    drop(server);
    let fast = Server::nbdkit(&room, "-r file base.raw", "base");
    assert!(contents(&room, &format!("qcow2:clone.qcow2 raw:copy.raw --parent {parent}")) == room.read("full.raw"));
    room.done(&flatten);
    room.done(&format!("image create qcow2:other.qcow2 --parent {parent}"));
    drop(fast);
    let server = Server::nbdkit(&room, "-r --filter=log --filter=rate file base.raw rate=8M logfile=reads", "base");
    let mut job = start(&room, &format!("image flatten qcow2:other.qcow2 --parent {parent}"));
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    // From its first read on it takes seconds.
    while !std::fs::read_to_string(room.file("reads")).is_ok_and(|reads| reads.contains("Read ")) {
        assert_eq!(job.try_wait().unwrap(), None);
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    drop(server);
    wait_for_line(&mut lines, "connection lost");
    let fast = Server::nbdkit(&room, "-r file base.raw", "base");
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(job.wait().unwrap().success(), "{rest:?}");
    drop(fast);
    for clone in ["clone", "other"] {
        let copy = contents(&room, &format!("qcow2:{clone}.qcow2 raw:copy.raw"));
        assert!(copy == room.read("full.raw"), "the flattened {clone} differs");
        room.done(&format!("image check qcow2:{clone}.qcow2"));
    }
}

#[test]
fn the_state_of_a_server_is_at_the_control_socket() {
    let room = Room::new();
    let server = clone(&room, "");
    let parent = uri("base");
    let mut disk = Disk::serve(&room, &format!("qcow2:clone.qcow2 --parent {parent} --nbd at --control c"));
    let (mut control, mut watch) = (Control::connect(&room.file("c")), Control::connect(&room.file("c")));
    let layers = control.done(&json!({ "verb": "layers" }));
    let layer = &layers["layers"][1];
    assert_eq!(
        (&layer["path"], &layer["server"]["connected"], &layer["inode"]),
        (&json!(parent), &json!(true), &json!(null))
    );
    assert_eq!(watch.done(&json!({ "verb": "watch" }))["away_ms"], json!(null));
    drop(server);
    disk.wait_for("connection lost");
    let event = watch.next_line().unwrap();
    assert_eq!(event["event"]["state"], "away", "{event}");
    let layers = control.done(&json!({ "verb": "layers" }));
    let away = &layers["layers"][1]["server"];
    assert!(away["connected"] == false && away["away_ms"].is_u64() && away["error"].is_string(), "{layers}");
    assert!(layers["away_ms"].is_u64() && control.done(&json!({ "verb": "stats" }))["away_ms"].is_u64());
    let _server = Server::nbdkit(&room, "-r file base.raw", "base");
    let event = watch.next_line().unwrap();
    assert_eq!(event["event"]["state"], "resumed", "{event}");
    for request in [
        json!({ "verb": "snapshot", "to": { "format": "qcow2", "path": room.file("new") } }),
        json!({ "verb": "upgrade" }),
        json!({ "verb": "resize", "size": 128 * MIB }),
    ] {
        let (kind, said) = control.refused(&request);
        assert!(
            said.contains("is at an NBD server") || kind == "malformed" || kind == "invalid",
            "{request}: {kind}: {said}"
        );
    }
    let (kind, said) = control.refused(&json!({ "verb": "resize", "size": 128 * MIB }));
    assert!(kind == "unsupported" && said.contains("is at an NBD server"), "{kind}: {said}");
    control.done(&json!({ "verb": "pause" }));
    control.done(&json!({ "verb": "resume" }));
    assert_eq!(disk.stop().0, Some(0));
}
