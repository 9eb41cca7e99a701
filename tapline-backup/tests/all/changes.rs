//! Incremental backups read what has changed, and nothing else.

use crate::room::{Room, Server, id, uri};

#[test]
fn only_listed_changes_are_read() {
    let room = Room::new();
    room.image("a.raw", 64, 1);
    let first = room.back_up("raw:a.raw", "a", &[]);
    room.tool("qemu-io", &["-f", "raw", "-c", "write -P 9 8M 64k", "a.raw"]);
    std::fs::write(room.path("changed"), format!("[{{\"start\":{},\"length\":65536}}]", 8 << 20)).unwrap();
    let content = first["content"].as_str().unwrap();
    let more = ["--since", id(&first), "--since-content", content, "--changed", "changed"];
    let second = room.back_up("raw:a.raw", "a", &more);
    assert_eq!(second["statistics"]["read"], 64 << 10);
    assert_eq!(second["since"], first["id"]);
    room.restores(id(&second), "a.raw");
    // A full one finds the same.
    assert_eq!(room.back_up("raw:a.raw", "a", &[])["content"], second["content"]);
}

#[test]
fn changes_of_another_base_disk_or_size_are_refused() {
    let room = Room::new();
    room.image("a.raw", 8, 1);
    room.image("larger.raw", 12, 1);
    let first = room.back_up("raw:a.raw", "a", &[]);
    std::fs::write(room.path("changed"), "[]").unwrap();
    let create = |source, name, more: &[&str]| {
        room.run(&[&["create", "t", source, "--name", name, "--since", id(&first)], more].concat())
    };
    let zeroes = "0".repeat(64);
    create("raw:a.raw", "b", &["--changed", "changed"]).failed(64, "another disk");
    create("raw:larger.raw", "a", &["--changed", "changed"]).failed(64, "another size");
    create("raw:a.raw", "a", &["--changed", "changed", "--since-content", &zeroes]).failed(64, "other content");
    create("raw:a.raw", "a", &[]).failed(64, "--changed");
    create("raw:a.raw", "a", &["--bitmap", "x"]).failed(64, "NBD");
    std::fs::write(room.path("changed"), "[{\"start\":0,\"length\":8388609}]").unwrap();
    create("raw:a.raw", "a", &["--changed", "changed"]).failed(64, "beyond its end");
    assert_eq!(room.list().len(), 1);
}

#[test]
fn a_dirty_bitmap_of_qemu_says_what_is_read() {
    let room = Room::new();
    room.tool("qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "2304M"]);
    room.tool("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 4M", "-c", "write -P 2 2300M 1M", "a.qcow2"]);
    let first = room.back_up("qcow2:a.qcow2", "a", &[]);
    room.tool("qemu-img", &["bitmap", "--add", "a.qcow2", "b0"]);
    let changes = ["-c", "write -P 3 1M 64k", "-c", "write -P 4 2301M 64k", "-c", "write -P 5 1500M 64k"];
    room.tool("qemu-io", &[&["-f", "qcow2"], changes.as_slice(), &["a.qcow2"]].concat());
    let server = Server::qemu(&room, "a.qcow2", &["-r", "-B", "b0"]);
    let second = room.back_up(&uri(&room), "a", &["--since", id(&first), "--bitmap", "b0"]);
    assert_eq!(second["statistics"]["read"], 3 * (64 << 10));
    let other = ["create", "t", &uri(&room), "--name", "a", "--since", id(&first), "--bitmap", "other"];
    room.run(&other).failed(4, "qemu:dirty-bitmap:other");
    server.kill();
    room.restores(id(&second), "a.qcow2");
}
