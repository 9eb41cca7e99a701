//! The NBD address of the daemon: who may read what, by clients of other projects, and what is left of them.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use testkit::nbd::Command as Request;
use testkit::nbd::wire::{Connection, OPTION_GO, extended_request, option, request};
use tokio_rustls::rustls::{ClientConnection, StreamOwned};

use crate::harness::disks::{io, nbd, nothing_leaked, plug, processes, unplug, vbd, with_disks};
use crate::harness::tls::{Authority, token};
use crate::harness::{Taplined, wait_until};

/// NBD_OPT_STARTTLS.
const STARTTLS: u32 = 5;
/// NBD_REP_ACK.
const ACK: u32 = 1;
/// NBD_REP_ERR_POLICY, NBD_REP_ERR_TLS_REQD, NBD_REP_ERR_UNKNOWN.
const POLICY: u32 = (1 << 31) + 2;
const TLS_REQUIRED: u32 = (1 << 31) + 5;
const UNKNOWN: u32 = (1 << 31) + 6;

/// The data of GO for an export.
fn go(name: &str) -> Vec<u8> {
    let len = u32::try_from(name.len()).unwrap();
    [&len.to_be_bytes()[..], name.as_bytes(), &[0, 0]].concat()
}

/// Chooses an export; returns the type and the text of the last reply.
fn choose(connection: &mut Connection, name: &str) -> (u32, String) {
    connection.option(OPTION_GO, &go(name)).unwrap();
    loop {
        let (kind, data) = connection.option_reply().unwrap();
        // NBD_REP_INFO comes first.
        if kind != 3 {
            return (kind, String::from_utf8_lossy(&data).into_owned());
        }
    }
}

fn connect(daemon: &Taplined) -> Connection {
    Connection::greeted(&daemon.room().join("run/nbd.sock")).unwrap()
}

/// A client that has chosen an export.
fn reader(daemon: &Taplined, name: &str) -> Connection {
    let mut connection = connect(daemon);
    let chosen = choose(&mut connection, name);
    assert_eq!(chosen.0, ACK, "{}", chosen.1);
    connection
}

/// The first byte of an export; an error if the connection has ended.
fn first_byte(connection: &mut Connection) -> io::Result<u8> {
    connection.request(Request::Read, 0, 7, 0, 1)?;
    assert_eq!(connection.simple_reply()?, (0, 7));
    Ok(connection.receive(1)?[0])
}

/// The address of an export, for clients with URIs.
fn uri(daemon: &Taplined, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", daemon.room().join("run/nbd.sock").display())
}

/// Reads a pattern from an export with qemu-io; returns what it says.
fn holds(at: &str, byte: u8) -> Result<(), String> {
    let command = format!("read -P {byte} 0 64k");
    let read = Command::new("qemu-io").args(["-r", "-f", "raw", "-c", &command, at]).output().unwrap();
    let said = String::from_utf8_lossy(&read.stdout).into_owned() + &String::from_utf8_lossy(&read.stderr);
    (read.status.success() && !said.contains("failed")).then_some(()).ok_or(said)
}

fn vbds(daemon: &Taplined) -> usize {
    daemon.get("/vbds").1.as_array().unwrap().len()
}

fn are_gone(daemon: &Taplined, others: usize) {
    wait_until("the VBDs of the NBD address are removed", || vbds(daemon) == others);
    nothing_leaked(daemon);
}

#[test]
fn a_snapshot_is_read_beside_its_guest() {
    let (daemon, vdis) = with_disks("", &["web"]);
    let guest = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &guest);
    assert!(io(&nbd(&daemon, &guest), &["write -P 1 0 64k", "flush"]).0);
    let snapshot = daemon.done(daemon.post(&format!("/vdis/{}/snapshot", vdis[0]), json!({ "name": "before" })));
    assert!(io(&nbd(&daemon, &guest), &["write -P 2 0 64k", "flush"]).0);

    // Without the guest's disk: it is written to.
    let (kind, why) = choose(&mut connect(&daemon), &vdis[0]);
    assert!(kind == POLICY && why.contains("to read the VDI, snapshot it"), "{why}");

    for name in ["before", snapshot["uuid"].as_str().unwrap()] {
        holds(&uri(&daemon, name), 1).unwrap();
    }
    let (written, said) = io(&uri(&daemon, "before"), &["write -P 3 0 64k"]);
    assert!(!written && said.contains("Permission denied"), "{said}");
    let listed = Command::new("nbdinfo").args(["--json", "--list", &uri(&daemon, "")]).output().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.contains(snapshot["uuid"].as_str().unwrap()) && listed.contains("base:allocation"), "{listed}");

    are_gone(&daemon, 1);
    unplug(&daemon, &guest);
    holds(&uri(&daemon, &vdis[0]), 2).unwrap();
    are_gone(&daemon, 1);
}

#[test]
fn clients_of_one_vdi_share_a_process_that_ends_with_the_last() {
    let (daemon, vdis) = with_disks("", &["one", "other"]);
    let mut clients = [reader(&daemon, "one"), reader(&daemon, &vdis[0])];
    assert_eq!((vbds(&daemon), processes(&daemon).len()), (1, 1));
    let mut other = reader(&daemon, "other");
    assert_eq!((vbds(&daemon), processes(&daemon).len()), (2, 2));
    let [mut first, second] = {
        clients.iter_mut().for_each(|client| assert_eq!(first_byte(client).unwrap(), 0));
        clients
    };
    drop(second);
    first_byte(&mut other).unwrap();
    drop(other);
    wait_until("the other VDI is not read any more", || vbds(&daemon) == 1);
    assert_eq!(first_byte(&mut first).unwrap(), 0);
    // While it is read, nobody may write to it.
    let guest = vbd(&daemon, &vdis[0], "nbd");
    let refused = daemon.post(&format!("{guest}/plug"), json!({}));
    assert_eq!((refused.0, &refused.1["code"]), (409, &json!("in-use")), "{}", refused.1);
    drop(first);
    are_gone(&daemon, 1);
    plug(&daemon, &guest);
}

#[test]
fn a_client_that_chooses_again_holds_only_its_last_choice() {
    let (daemon, _) = with_disks("", &["one", "other"]);
    let mut client = connect(&daemon);
    let info = |client: &mut Connection, name: &str| {
        // NBD_OPT_INFO.
        client.option(6, &go(name)).unwrap();
        while client.option_reply().unwrap().0 == 3 {}
    };
    info(&mut client, "one");
    info(&mut client, "other");
    wait_until("only one VDI is plugged", || vbds(&daemon) == 1);
    assert_eq!(choose(&mut client, "nothing").0, UNKNOWN);
    assert_eq!(choose(&mut client, "one").0, ACK);
    assert_eq!(first_byte(&mut client).unwrap(), 0);
    drop(client);
    are_gone(&daemon, 0);
}

#[test]
fn contexts_count_until_requests_begin() {
    let (daemon, _) = with_disks("", &["one", "other"]);
    let acknowledged = |client: &mut Connection, number: u32, data: &[u8]| {
        client.option(number, data).unwrap();
        loop {
            let (kind, _) = client.option_reply().unwrap();
            match kind {
                3 | 4 => {}
                kind => break assert_eq!(kind, ACK, "option {number}"),
            }
        }
    };
    let context = b"base:allocation";
    let set = [&3_u32.to_be_bytes()[..], b"one", &1_u32.to_be_bytes(), &15_u32.to_be_bytes(), context].concat();
    // Structured replies and extended headers.
    for shape in [8, 11] {
        let mut client = connect(&daemon);
        acknowledged(&mut client, shape, &[]);
        acknowledged(&mut client, 10, &set);
        // INFO of another export does not change them.
        acknowledged(&mut client, 6, &go("other"));
        acknowledged(&mut client, OPTION_GO, &go("one"));
        let kind = if shape == 8 {
            client.request(Request::BlockStatus, 0, 5, 0, 4096).unwrap();
            client.chunk().unwrap().kind
        } else {
            client.send(&extended_request(Request::BlockStatus, 0, 5, 0, 4096)).unwrap();
            client.extended_chunk().unwrap().kind
        };
        assert_eq!(kind, if shape == 8 { 5 } else { 6 });
    }
    are_gone(&daemon, 0);
}

#[test]
fn a_vbd_that_was_unplugged_by_force_is_replaced_and_removed() {
    let (daemon, vdis) = with_disks("", &["one"]);
    let mut first = reader(&daemon, "one");
    let mut idle = connect(&daemon);
    idle.option(6, &go("one")).unwrap();
    while idle.option_reply().unwrap().0 == 3 {}
    let vbds = daemon.get("/vbds").1;
    assert_eq!(vbds[0]["for_nbd_address"], true);
    let vbd = vbds[0]["uuid"].as_str().unwrap().to_owned();
    daemon.done(daemon.post(&format!("/vbds/{vbd}/unplug"), json!({ "force": true })));
    assert!(first_byte(&mut first).is_err());
    // One client is left that has the old one.
    let mut second = reader(&daemon, "one");
    assert_eq!(first_byte(&mut second).unwrap(), 0);
    let plugged = daemon.get("/vbds?state=plugged").1;
    assert!(plugged.as_array().unwrap().iter().all(|other| other["uuid"] != vbd.as_str()), "{plugged}");
    drop((first, idle, second));
    are_gone(&daemon, 0);
    plug(&daemon, &crate::harness::disks::vbd(&daemon, &vdis[0], "nbd"));
}

#[test]
fn the_next_daemon_removes_what_a_killed_one_has_left() {
    let (mut daemon, vdis) = with_disks("", &["one"]);
    let mut client = reader(&daemon, "one");
    daemon.kill();
    // The process would serve on, but its client was connected to the daemon.
    assert!(first_byte(&mut client).is_err());
    assert_eq!(processes(&daemon).len(), 1);
    daemon.restart();
    are_gone(&daemon, 0);
    let guest = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &guest);
}

/// A daemon that serves NBD over TLS, its port there, and a disk with a pattern.
fn over_tls() -> (Authority, Taplined, u16) {
    let authority = Authority::new();
    authority.certify("served");
    let settings = authority.settings("[nbd]\nlisten = [\"127.0.0.1:0\"]\n");
    let (daemon, vdis) = with_disks(&settings, &["web"]);
    let guest = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &guest);
    assert!(io(&nbd(&daemon, &guest), &["write -P 9 0 64k", "flush"]).0);
    unplug(&daemon, &guest);
    let log = daemon.log();
    let port = log.lines().find_map(|line| line.split_once("serving NBD over TLS address=127.0.0.1:")).unwrap().1;
    let port = port.trim().parse().unwrap();
    std::fs::copy(authority.path("ca.pem"), authority.path("ca-cert.pem")).unwrap();
    (authority, daemon, port)
}

/// Copies an export to `target` with nbdcopy; returns what it says if it fails.
fn copy(authority: &Authority, port: u16, export: &str, target: &Path) -> Result<(), String> {
    let certificates = authority.path("");
    let export = export.replace('?', "%3F");
    let uri = format!("nbds://127.0.0.1:{port}/{export}?tls-certificates={}", certificates.display());
    let copied = Command::new("nbdcopy").arg(uri).arg(target).output().unwrap();
    copied.status.success().then_some(()).ok_or_else(|| String::from_utf8_lossy(&copied.stderr).into_owned())
}

/// qemu-io on an export.
fn qemu(authority: &Authority, port: u16, export: &str) -> Command {
    let mut qemu = Command::new("qemu-io");
    let credentials = format!("tls-creds-x509,id=t,endpoint=client,dir={}", authority.path("").display());
    let host = "server.host=127.0.0.1,tls-creds=t,tls-hostname=127.0.0.1";
    let options = format!("driver=nbd,server.type=inet,server.port={port},{host},export={export}");
    qemu.args(["--object", &credentials, "-r", "--image-opts", &options]);
    qemu
}

#[test]
fn over_tcp_tls_and_a_token_are_needed() {
    let (authority, daemon, port) = over_tls();
    let target = authority.path("copy");
    let (admin, secret) = token(&daemon, json!({ "name": "backup" }));
    let (_, reader) = token(&daemon, json!({ "name": "monitor", "role": "reader" }));
    copy(&authority, port, &format!("web?token={secret}"), &target).unwrap();
    let copied = std::fs::read(&target).unwrap();
    assert_eq!((copied.len(), &copied[..2]), (16 << 20, &[9, 9][..]));

    for (export, why) in [
        ("web".to_owned(), "needs a token"),
        ("web?token=x".into(), "no taplined token"),
        (format!("web?token={reader}"), "role operator of this object"),
        (format!("nothing?token={secret}"), "no VDI 'nothing'"),
    ] {
        let said = qemu(&authority, port, &export).args(["-c", "read 0 512"]).output().unwrap();
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(said.contains(why), "{export}: {said}");
        copy(&authority, port, &export, &target).unwrap_err();
    }
    daemon.delete(&format!("/tokens/{admin}"));
    copy(&authority, port, &format!("web?token={secret}"), &target).unwrap_err();
    assert!(!daemon.log().contains(&secret));
    are_gone(&daemon, 1);
}

/// A connection that is greeted, and not encrypted.
fn plain(port: u16) -> TcpStream {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&1_u32.to_be_bytes()).unwrap();
    stream
}

/// The type of the next reply to an option.
fn reply(stream: &mut impl Read) -> u32 {
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    stream.read_exact(&mut vec![0; number(16) as usize]).unwrap();
    number(12)
}

#[test]
fn nothing_that_came_before_tls_counts_after_it() {
    let (_authority, daemon, port) = over_tls();
    let (_, secret) = token(&daemon, json!({ "name": "backup" }));
    // In clear text there is no export, however good the token.
    let mut stream = plain(port);
    stream.write_all(&option(OPTION_GO, &go(&format!("web?token={secret}")))).unwrap();
    assert_eq!(reply(&mut stream), TLS_REQUIRED);
    // A request of somebody in between, in the same packet as STARTTLS.
    let injected = [option(STARTTLS, &[]), option(OPTION_GO, &go(&format!("web?token={secret}")))].concat();
    stream.write_all(&injected).unwrap();
    assert_eq!(reply(&mut stream), ACK);
    let mut rest = Vec::new();
    // The handshake fails: an alert, and the end.
    stream.read_to_end(&mut rest).ok();
    assert!(rest.len() < 64 && vbds(&daemon) == 1, "{rest:?}");
    // The option without an error reply.
    let mut stream = plain(port);
    stream.write_all(&option(1, b"web")).unwrap();
    stream.read_to_end(&mut rest).ok();
    assert_eq!(vbds(&daemon), 1);
    // A request without negotiation.
    let mut stream = plain(port);
    stream.write_all(&request(Request::Read, 0, 1, 0, 512)).unwrap();
    stream.read_to_end(&mut rest).ok();
}

#[test]
fn a_revoked_token_ends_its_connection() {
    let (authority, daemon, port) = over_tls();
    let (uuid, secret) = token(&daemon, json!({ "name": "backup" }));
    let mut stream = plain(port);
    stream.write_all(&option(STARTTLS, &[])).unwrap();
    assert_eq!(reply(&mut stream), ACK);
    let client = ClientConnection::new(authority.trust(), "127.0.0.1".try_into().unwrap()).unwrap();
    let mut client = StreamOwned::new(client, stream);
    client.write_all(&option(OPTION_GO, &go(&format!("web?token={secret}")))).unwrap();
    while reply(&mut client) != ACK {}
    client.write_all(&request(Request::Read, 0, 1, 0, 512)).unwrap();
    let mut answer = [0; 16 + 512];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(answer[16..], [9; 512]);
    assert_eq!(daemon.delete(&format!("/tokens/{uuid}")).0, 204);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).ok();
    assert!(rest.is_empty());
    are_gone(&daemon, 1);
}
