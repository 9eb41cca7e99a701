//! NBD servers that die, come back or lie.

use std::path::Path;

use testkit::certificates::Authority;

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
fn a_disk_is_backed_up_and_restored_over_tls() {
    let room = Room::new();
    room.image("a.raw", 16, 1);
    room.tool("truncate", &["-s", "16M", "b.raw"]);
    let authority = Authority::new(&room.path("certificates")).unwrap();
    let credentials =
        format!("tls-creds-x509,id=tls,endpoint=server,verify-peer=yes,dir={}", authority.server().unwrap().display());
    let with_tls = ["--object", &credentials, "--tls-creds", "tls"];
    let uri = |certificates: &Path| {
        let socket = room.path("s");
        format!("nbds+unix://localhost/?socket={}&tls-certificates={}", socket.display(), certificates.display())
    };
    let (client, stranger) = (authority.client().unwrap(), authority.anonymous().unwrap());
    let server = Server::qemu(&room, "a.raw", &with_tls);
    room.run(&["create", "t", &uri(&stranger), "--name", "a"]).failed(4, "cannot open nbds+unix");
    let made = room.back_up(&uri(&client), "a", &[]);
    server.kill();
    std::fs::remove_file(room.path("s")).unwrap_or_default();
    let server = Server::qemu(&room, "b.raw", &with_tls);
    assert_eq!(room.run(&["restore", "t", id(&made), &uri(&client)]).code, 0);
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
    let without_certificates = format!("nbds://host/x?tls-certificates={}", room.path("none").display());
    room.run(&["create", "t", &without_certificates, "--name", "a"]).failed(64, "ca-cert.pem");
    room.run(&["create", "t", "a.raw", "--name", "a"]).failed(64, "raw:a.raw");
}
