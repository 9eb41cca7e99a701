//! What was backed up comes back, in each format.

use crate::room::{Room, Server, id, uri};

#[test]
fn each_format_is_backed_up_and_restored_to_each() {
    let room = Room::new();
    room.image("a.raw", 24, 1);
    room.tool("qemu-img", &["convert", "-O", "qcow2", "a.raw", "a.qcow2"]);
    room.tool("qemu-img", &["convert", "-O", "vpc", "-o", "force_size=on", "a.raw", "a.vhd"]);
    let first = room.back_up("raw:a.raw", "a", &[]);
    assert_eq!(first["statistics"]["read"], 6 << 20, "holes were read");
    let mut ids = vec![id(&first).to_owned()];
    for source in ["qcow2:a.qcow2", "vhd:a.vhd"] {
        let next = room.back_up(source, "a", &[]);
        assert_eq!(next["content"], first["content"], "{source}");
        assert_eq!(next["statistics"]["sent"], 0, "{source}: equal data was sent twice");
        ids.push(id(&next).to_owned());
    }
    for (format, destination) in [("raw", "b.raw"), ("qcow2", "b.qcow2"), ("vhd", "b.vhd")] {
        let ran = room.run(&["restore", "t", &ids.pop().unwrap(), &format!("{format}:{destination}")]);
        assert_eq!(ran.code, 0, "{ran:?}");
        room.same(destination, "a.raw");
    }
    let holes = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(room.path("b.raw")).unwrap());
    assert!(holes * 512 < 8 << 20, "zeroes of the restored image take space");
    let left: Vec<_> = std::fs::read_dir(room.path("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 7, "{left:?}");
    room.verify();
}

#[test]
fn an_image_with_a_parent_is_backed_up_as_its_guest_sees_it() {
    let room = Room::new();
    room.image("a.raw", 8, 1);
    room.tool("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "a.raw", "-F", "raw", "b.qcow2"]);
    room.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 7 1M 64k", "b.qcow2"]);
    let made = room.back_up("qcow2:b.qcow2", "b", &["--parent", "raw:a.raw"]);
    room.restores(id(&made), "b.qcow2");
    room.run(&["create", "t", "qcow2:b.qcow2", "--name", "b"]).failed(4, "parent");
}

#[test]
fn an_export_is_backed_up_and_restored_to() {
    let room = Room::new();
    room.image("a.raw", 16, 2);
    let server = Server::qemu(&room, "a.raw", &["-r"]);
    let made = room.back_up(&uri(&room), "a", &[]);
    server.kill();
    room.restores(id(&made), "a.raw");

    std::fs::write(room.path("small.raw"), vec![0; 1 << 20]).unwrap();
    let server = Server::qemu(&room, "small.raw", &[]);
    room.run(&["restore", "t", id(&made), &uri(&room)]).failed(64, "too small");
    server.kill();

    room.image("used.raw", 20, 3);
    let server = Server::qemu(&room, "used.raw", &[]);
    room.run(&["restore", "t", id(&made), &uri(&room)]).failed(7, "not blank");
    server.kill();
    room.image("as-before.raw", 20, 3);
    room.same("used.raw", "as-before.raw");

    let server = Server::qemu(&room, "used.raw", &[]);
    assert_eq!(room.run(&["restore", "t", id(&made), &uri(&room), "--force"]).code, 0);
    server.kill();
    room.tool("truncate", &["-s", "20M", "a.raw"]);
    room.same("used.raw", "a.raw");

    room.tool("truncate", &["-s", "16M", "new.raw"]);
    let server = Server::qemu(&room, "new.raw", &[]);
    assert_eq!(room.run(&["restore", "t", id(&made), &uri(&room)]).code, 0);
    server.kill();
    room.tool("truncate", &["-s", "16M", "a.raw"]);
    room.same("new.raw", "a.raw");
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(room.path("new.raw")).unwrap());
    assert!(blocks * 512 < 6 << 20, "zeroes were written to a blank export");
}

#[test]
fn nothing_that_exists_is_overwritten() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    for destination in ["raw:a.raw", "qcow2:a.raw"] {
        room.run(&["restore", "t", id(&made), destination]).failed(7, "exists already");
        room.run(&["restore", "t", id(&made), destination, "--force"]).failed(64, "--force");
    }
    room.restores(id(&made), "a.raw");
}

#[test]
fn an_image_that_a_machine_writes_to_is_refused() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    let disk = std::path::Path::new(env!("CARGO_BIN_EXE_tapline-backup")).with_file_name("tapline-disk");
    let socket = room.path("s").display().to_string();
    let serving = Server::start(&room, &disk.display().to_string(), &["serve", "raw:a.raw", "--nbd", &socket]);
    room.run(&["create", "t", "raw:a.raw", "--name", "a"]).failed(4, "raw:a.raw");
    drop(serving);
    assert!(room.list().is_empty());
}
