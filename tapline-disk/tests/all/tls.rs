//! `serve --nbd-tls`: certificates that cannot be used are refused before anything is opened; a confined process and
//! the next one after an upgrade serve over TLS.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use testkit::certificates::Authority;

use crate::confined;
use crate::tool::Room;
use crate::tool::handed::{Handed, NOWHERE};
use crate::tool::replaced::Replaced;
use crate::tool::served::Disk;

/// Runs `nbdinfo` on a socket with the certificates of a directory.
fn nbdinfo(socket: &Path, certificates: &Path) -> Output {
    let uri = format!("nbds+unix://localhost/?socket={}&tls-certificates={}", socket.display(), certificates.display());
    Command::new("timeout").args(["120", "nbdinfo", "--json", &uri]).output().unwrap()
}

/// An authority in the directory `ca` of the room, whose server's directory is `ca/server`.
fn authority(room: &Room) -> Authority {
    let authority = Authority::new(&room.file("ca")).unwrap();
    authority.server().unwrap();
    authority
}

/// Asserts that a server with these certificates is refused for this reason, and opens no image.
fn refused(room: &Room, why: &str) {
    let said = room.tapline("serve qcow2:a --nbd nbd.sock --nbd-tls ca/server");
    assert!(matches!(said.code, Some(4 | 64)) && said.err.contains(why), "'{why}': {said:?}");
    assert!(!said.err.contains("writable") && !room.file("nbd.sock").exists(), "the image was opened: {said:?}");
}

#[test]
fn certificates_that_cannot_be_used_are_refused() {
    let room = Room::new();
    room.done("image create qcow2:a --size 8M");
    let authority = authority(&room);
    let file = |name: &str| room.file(&format!("ca/server/{name}"));
    authority.expire_server().unwrap();
    refused(&room, "server-cert.pem: the certificate has expired");
    let client = authority.client().unwrap();
    fs::copy(client.join("client-cert.pem"), file("server-cert.pem")).unwrap();
    refused(&room, "the certificate is not for a server");
    authority.server().unwrap();
    fs::copy(client.join("client-key.pem"), file("server-key.pem")).unwrap();
    refused(&room, "server-key.pem: the key does not belong to the certificate");
    fs::write(file("server-key.pem"), "no key").unwrap();
    refused(&room, "it contains no unencrypted private key");
    authority.server().unwrap();
    fs::set_permissions(file("server-key.pem"), Permissions::from_mode(0o644)).unwrap();
    refused(&room, "every user of this host can read it");
    fs::set_permissions(file("server-key.pem"), Permissions::from_mode(0o600)).unwrap();
    fs::write(file("ca-crl.pem"), "").unwrap();
    refused(&room, "ca-crl.pem: it contains no revocation list");
    fs::remove_file(file("ca-crl.pem")).unwrap();
    fs::write(file("ca-cert.pem"), "").unwrap();
    refused(&room, "ca-cert.pem: it contains no certificate");
    fs::remove_file(file("ca-cert.pem")).unwrap();
    refused(&room, "--nbd-tls-verify-peer no");
    authority.server().unwrap();
    fs::write(file("server-cert.pem"), "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n").unwrap();
    refused(&room, "it is not a PEM file");
    fs::remove_file(file("server-cert.pem")).unwrap();
    refused(&room, "server-cert.pem");
}

#[test]
fn with_client_certificates_a_network_address_may_be_served() {
    let room = Room::new();
    room.done("image create qcow2:a --size 8M");
    let authority = authority(&room);
    let disk = Disk::serve(&room, "qcow2:a --nbd 0.0.0.0:0 --nbd-tls ca/server --control control.sock");
    let (code, said) = disk.stop();
    assert!(code == Some(0) && said.contains("serving NBD at nbds://0.0.0.0:"), "{said}");
    let disk = Disk::serve(&room, "qcow2:a --nbd ./nbd.sock --nbd-tls ca/server --nbd-tls-verify-peer no");
    assert!(disk.said.contains("serving NBD at nbds+unix:///"), "{}", disk.said);
    let shown = nbdinfo(&room.file("nbd.sock"), &authority.anonymous().unwrap());
    assert!(shown.status.success(), "{shown:?}");
    assert_eq!(disk.stop().0, Some(0));
}

#[test]
fn a_confined_disk_is_served_over_tls() {
    let Some(room) = confined::room() else { return };
    let authority = authority(&room);
    let client = authority.client().unwrap();
    // Read by another user before the process gives up access to files.
    let files = tempfile::tempdir().unwrap();
    fs::set_permissions(files.path(), Permissions::from_mode(0o755)).unwrap();
    for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
        let path = files.path().join(name);
        fs::copy(room.file(&format!("ca/server/{name}")), &path).unwrap();
        std::os::unix::fs::chown(&path, Some(65534), Some(65534)).unwrap();
    }
    confined::by_nobody(&format!("image create qcow2:{NOWHERE}/a --size 8M")).file(&Handed::create(&room, "a")).done();
    let tls = files.path().display();
    let words = format!("serve qcow2:{NOWHERE}/a --nbd {NOWHERE}/nbd.sock --nbd-tls {tls}");
    let disk =
        confined::by_nobody(&words).file(&Handed::open(&room, "a", true)).listen(&room, "nbd", "nbd.sock").serve();
    let shown = nbdinfo(&room.file("nbd.sock"), &client);
    assert!(shown.status.success(), "{shown:?}");
    assert!(!nbdinfo(&room.file("nbd.sock"), &authority.anonymous().unwrap()).status.success());
    let (code, said) = disk.stop();
    assert!(code == Some(0) && said.contains("certificate verified"), "{said}");
}

#[test]
fn clients_over_tls_are_disconnected_by_an_upgrade_and_served_again() {
    let room = Room::new();
    room.done("image create qcow2:a --size 8M");
    let client = authority(&room).client().unwrap();
    let mut disk = Replaced::serve(&room, "qcow2:a --nbd ./nbd.sock --nbd-tls ca/server");
    let socket = room.file("nbd.sock");
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", client.display());
    let options = format!("driver=nbd,path={},tls-creds=tls0,tls-hostname=localhost", socket.display());
    // It keeps its connection until its input ends.
    let mut connected = Command::new("qemu-io")
        .args(["--object", &object, "--image-opts", &options])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    connected.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
    let mut lines = BufReader::new(connected.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("8 MiB"));
    let answer = disk.upgrade().join().unwrap();
    disk.replaced_by(&answer);
    let shown = nbdinfo(&socket, &client);
    assert!(shown.status.success(), "{shown:?}");
    drop(connected.stdin.take());
    connected.wait().unwrap();
    let said = disk.stop();
    assert!(said.contains("disconnected by an upgrade: a TLS connection is not handed over"), "{said}");
}
