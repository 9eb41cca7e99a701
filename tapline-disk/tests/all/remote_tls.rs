//! Images at NBD servers that require TLS: qemu-nbd, nbdkit and our own; certificates that do not fit, and servers
//! without TLS.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;

use testkit::certificates::Authority;

use crate::remote::{Server, make_disk, slow_file, start, wait_for_line, wait_for_progress};
use crate::tool::Room;
use crate::tool::served::Disk;

fn uri(socket: &str, certificates: &str) -> String {
    format!("nbds+unix:///?socket={socket}&tls-certificates={certificates}")
}

/// An authority in the directory `ca` of the room, with the directories `server`, `client` and `anonymous`.
fn authority(room: &Room) -> Authority {
    let authority = Authority::new(&room.file("ca")).unwrap();
    authority.server().unwrap();
    authority.client().unwrap();
    authority.anonymous().unwrap();
    authority
}

fn nbdkit(room: &Room, words: &str, socket: &str) -> Server {
    let tls = "--tls=require --tls-verify-peer --tls-certificates=";
    Server::nbdkit(room, &format!("{tls}{} {words}", room.file("ca/server").display()), socket)
}

#[test]
fn a_disk_is_copied_through_tls_to_each_server_and_back() {
    let room = Room::new();
    authority(&room);
    make_disk(&room, "qcow2:disk.qcow2");
    for name in ["qemu.raw", "own.raw"] {
        room.done(&format!("image create raw:{name} --size 64M"));
    }
    let (directory, at) = (room.file("ca/server"), room.file("qemu"));
    let object = format!("tls-creds-x509,id=tls0,endpoint=server,verify-peer=yes,dir={}", directory.display());
    let words = format!("--object {object} --tls-creds tls0 --persistent -e 8 -f raw -k {} qemu.raw", at.display());
    let _qemu = Server::start(&room, &format!("qemu-nbd {words}"), "qemu");
    let _nbdkit = nbdkit(&room, "memory 64M", "nbdkit");
    let _own = Disk::serve(&room, "raw:own.raw --nbd ./own --nbd-tls ca/server");
    for socket in ["qemu", "nbdkit", "own"] {
        let there = uri(socket, "ca/client");
        room.done(&format!("image convert qcow2:disk.qcow2 {there} --verify"));
        room.done(&format!("image convert {there} qcow2:back-{socket}.qcow2"));
        room.done(&format!("image compare qcow2:back-{socket}.qcow2 raw:full.raw"));
        let said = room.tapline(&format!("image info {}", uri(socket, "ca/anonymous")));
        assert!(said.code == Some(4) && said.err.contains("client-cert.pem"), "{socket}: {said:?}");
        let plain = room.tapline(&format!("image info nbd+unix:///?socket={socket}"));
        assert!(plain.code == Some(4) && plain.err.contains("nbds"), "{socket}: {plain:?}");
    }
}

#[test]
fn certificates_that_do_not_fit_are_refused_by_file_and_reason() {
    let room = Room::new();
    authority(&room);
    let other = Authority::new(&room.file("other")).unwrap();
    other.anonymous().unwrap();
    let _server = Server::nbdkit(
        &room,
        &format!("--tls=require --tls-certificates={} memory 64M", room.file("ca/server").display()),
        "s",
    );
    let _plain = Server::nbdkit(&room, "--tls=off memory 64M", "plain");
    let refused = |uri: &str, why: &str| {
        let said = room.tapline(&format!("image info {uri}"));
        assert!(matches!(said.code, Some(4 | 64)) && said.err.contains(why), "'{why}': {said:?}");
    };
    let good = uri("s", "ca/anonymous");
    room.done(&format!("image info {good}"));
    refused(&uri("plain", "ca/anonymous"), "the server refuses TLS");
    refused(&format!("{good}&tls-hostname=elsewhere"), "is for another name");
    refused(&format!("{good}&tls-hostname=a/b"), "'a/b'");
    refused(&uri("s", "other/anonymous"), "not signed by an authority in ca-cert.pem");
    refused(&uri("s", "nowhere"), "nowhere/ca-cert.pem");
    refused(&format!("{good}&tls-verify-peer=false"), "'tls-verify-peer=false' is not supported");
    let client = |name: &str| room.file(&format!("ca/client/{name}"));
    fs::set_permissions(client("client-key.pem"), Permissions::from_mode(0o644)).unwrap();
    refused(&uri("s", "ca/client"), "every user of this host can read it");
    fs::remove_file(client("client-key.pem")).unwrap();
    refused(&uri("s", "ca/client"), "client-key.pem");
    fs::copy(room.file("ca/server/server-key.pem"), client("client-key.pem")).unwrap();
    refused(&uri("s", "ca/client"), "client-key.pem: the key does not belong");
    fs::write(client("client-cert.pem"), "").unwrap();
    refused(&uri("s", "ca/client"), "client-cert.pem: it contains no certificate");
    fs::remove_file(client("client-cert.pem")).unwrap();
    refused(&uri("s", "ca/client"), "client-cert.pem");
    fs::remove_file(client("client-key.pem")).unwrap();
    fs::write(client("ca-cert.pem"), "").unwrap();
    refused(&uri("s", "ca/client"), "ca-cert.pem: it contains no certificate");
}

#[test]
fn the_default_directory_is_that_of_libnbd() {
    let room = Room::new();
    authority(&room);
    let _server = nbdkit(&room, "memory 64M", "s");
    if rustix::process::geteuid().is_root() {
        let said = room.tapline("image info nbds+unix:///?socket=s");
        assert!(said.code == Some(0) || said.err.contains("/etc/pki/libnbd"), "{said:?}");
        return;
    }
    let home = room.file("home/.config/pki");
    fs::create_dir_all(&home).unwrap();
    std::os::unix::fs::symlink(room.file("ca/client"), home.join("libnbd")).unwrap();
    let mut info = room.command(crate::tool::TAPLINE);
    info.args(["image", "info", "nbds+unix:///?socket=s"]).env("HOME", room.file("home"));
    assert!(info.status().unwrap().success());
}

#[test]
fn a_server_killed_during_a_conversion_through_tls_changes_nothing() {
    let room = Room::new();
    authority(&room);
    make_disk(&room, "raw:from.raw");
    room.done("image create raw:to.raw --size 64M");
    let slow = slow_file("to.raw");
    let mut target = nbdkit(&room, &slow, "to");
    let mut job = start(&room, &format!("image convert raw:from.raw {}", uri("to", "ca/client")));
    let mut lines = BufReader::new(job.stderr.take().unwrap()).lines();
    for round in 0..2 {
        wait_for_progress(&room, "to.raw", &mut job);
        drop(target);
        wait_for_line(&mut lines, "connection lost");
        target = nbdkit(&room, if round == 0 { &slow } else { "file to.raw" }, "to");
        wait_for_line(&mut lines, "connected again");
    }
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(job.wait().unwrap().success(), "{rest:?}");
    assert!(room.read("to.raw") == room.read("full.raw"), "the copy differs");
    drop(target);
}
