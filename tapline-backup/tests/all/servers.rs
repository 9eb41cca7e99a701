//! NBD servers that die, come back or lie.

use crate::room::{Room, Server, begun, id, uri};

#[test]
fn a_server_that_comes_back_is_read_on() {
    let room = Room::new();
    room.image("a.raw", 160, 1);
    let server = Server::qemu(&room, "a.raw", &["-r"]);
    let mut child = begun(&room, &["create", "t", &uri(&room), "--name", "a"], 2);
    server.kill();
    std::fs::remove_file(room.path("s")).unwrap_or_default();
    let _server = Server::qemu(&room, "a.raw", &["-r"]);
    assert!(child.wait().unwrap().success());
    let listed = room.list();
    assert_eq!(listed.len(), 1);
    room.restores(id(&listed[0]), "a.raw");
}

#[test]
fn a_server_that_comes_back_is_restored_to() {
    let room = Room::new();
    room.image("a.raw", 160, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    room.tool("truncate", &["-s", "160M", "b.raw"]);
    let server = Server::qemu(&room, "b.raw", &[]);
    let mut child = begun(&room, &["restore", "t", id(&made), &uri(&room)], 3);
    server.kill();
    std::fs::remove_file(room.path("s")).unwrap_or_default();
    let server = Server::qemu(&room, "b.raw", &[]);
    assert!(child.wait().unwrap().success());
    server.kill();
    room.same("a.raw", "b.raw");
}

#[test]
fn a_server_with_less_data_than_it_says_costs_the_backup() {
    let room = Room::new();
    let pread = "if [ $(($3 + $4)) -gt 4194304 ]; then echo EIO >&2; exit 1; fi; head -c $3 /dev/urandom";
    let pread = format!("pread={pread}");
    let socket = room.path("s").display().to_string();
    let _server = Server::start(&room, "nbdkit", &["-f", "-U", &socket, "eval", "get_size=echo 64M", &pread]);
    room.run(&["create", "t", &uri(&room), "--name", "a"]).failed(4, "of the disk");
    assert!(room.list().is_empty());
    room.verify();
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let room = Room::new();
    room.run(&["create", "t", &uri(&room), "--name", "a"]).failed(4, "cannot open nbd+unix");
    room.run(&["create", "t", "nbds://host/x", "--name", "a"]).failed(64, "TLS");
    room.run(&["create", "t", "a.raw", "--name", "a"]).failed(64, "raw:a.raw");
}
