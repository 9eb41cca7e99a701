//! The screen of a machine as a WebSocket: who may open it, and its end with the token or the machine.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::tls::{Authority, Talk, token};
use crate::harness::{self, Taplined, start_with};

pub const QEMU: &str = "qemu-system-x86_64";

/// The headers of a handshake except Host (RFC 6455, 4.1; the key is that of its example).
const HANDSHAKE: &str = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                         sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

/// The matching key of the response (4.2.2).
const ACCEPTED: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";

/// Whether QEMU is installed; reports it if not.
pub fn has_qemu() -> bool {
    let is_there = Command::new(QEMU).arg("--version").output().is_ok();
    if !is_there {
        harness::not_run(&format!("screens of machines: there is no {QEMU}; `make prepare` installs it"));
    }
    is_there
}

/// Starts a machine with this hardware, which boots from an empty disc, and the tag 'web'; returns its path.
pub fn machine(daemon: &Taplined, mut platform: Value) -> String {
    let disc = daemon.room().join("disc.iso");
    std::fs::write(&disc, vec![0; 1 << 20]).unwrap();
    platform["dvd"] = json!(format!("file:{}", disc.display()));
    let asked = json!({ "name": "guest", "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "tags": ["web"],
        "platform": platform });
    let (status, vm) = daemon.post("/vms", asked);
    assert_eq!(status, 201, "{vm}");
    let vm = format!("/vms/{}", vm["uuid"].as_str().unwrap());
    daemon.done(daemon.post(&format!("{vm}/start"), json!({})));
    vm
}

/// The platform of a machine with a private screen.
pub fn private() -> Value {
    json!({ "vga": "std", "vnc": "private" })
}

/// The response's head.
fn head(talk: &mut impl Read) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        talk.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    String::from_utf8(head).unwrap().to_ascii_lowercase()
}

/// The content of the next binary message of less than 126 bytes.
fn message(talk: &mut impl Read) -> Vec<u8> {
    let mut frame = [0; 2];
    talk.read_exact(&mut frame).unwrap();
    assert_eq!(frame[0], 0x82, "not a whole binary message");
    let mut content = vec![0; frame[1].into()];
    talk.read_exact(&mut content).unwrap();
    content
}

fn over_socket(daemon: &Taplined, vm: &str, headers: &str) -> UnixStream {
    let mut talk = UnixStream::connect(daemon.socket()).unwrap();
    talk.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let request = format!("GET /v1{vm}/screen HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    talk.write_all(request.as_bytes()).unwrap();
    talk
}

#[test]
fn a_screen_is_relayed_in_both_directions_until_the_machine_ends() {
    if !has_qemu() {
        return;
    }
    let daemon = start_with(&format!("qemu-program = {QEMU:?}"), &[]);
    let vm = machine(&daemon, private());
    let mut talk = over_socket(&daemon, &vm, &format!("{HANDSHAKE}sec-websocket-protocol: tapline.screen\r\n"));
    let answer = head(&mut talk);
    assert!(
        answer.starts_with("http/1.1 101") && answer.contains("sec-websocket-protocol: tapline.screen"),
        "{answer}"
    );
    assert!(answer.contains(&ACCEPTED.to_ascii_lowercase()), "{answer}");
    assert_eq!(message(&mut talk), b"RFB 003.008\n");
    // The same version, masked with zeros; then the server lists its authentication methods: one, none.
    talk.write_all(&[&[0x82, 0x80 | 12, 0, 0, 0, 0][..], b"RFB 003.008\n"].concat()).unwrap();
    assert_eq!(message(&mut talk), [1, 1]);
    // A second viewer sees it too.
    let mut second = over_socket(&daemon, &vm, HANDSHAKE);
    assert!(head(&mut second).starts_with("http/1.1 101"));
    assert_eq!(message(&mut second), b"RFB 003.008\n");
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
    let mut rest = Vec::new();
    talk.read_to_end(&mut rest).unwrap();
    let refused = daemon.exchange("GET", &format!("/v1{vm}/screen"), &[], "").refusal();
    assert_eq!(refused, (400, "invalid".into(), String::new()), "it is a WebSocket");
    let mut halted = over_socket(&daemon, &vm, HANDSHAKE);
    assert!(head(&mut halted).starts_with("http/1.1 409"));
}

#[test]
fn a_page_of_another_origin_opens_no_screen() {
    if !has_qemu() {
        return;
    }
    let daemon = start_with(&format!("qemu-program = {QEMU:?}"), &[]);
    let vm = machine(&daemon, private());
    for (origin, status) in
        [("https://evil.example", "403"), ("http://localhost:9090", "403"), ("http://localhost", "101")]
    {
        let mut talk = over_socket(&daemon, &vm, &format!("{HANDSHAKE}origin: {origin}\r\n"));
        let answer = head(&mut talk);
        assert!(answer.starts_with(&format!("http/1.1 {status}")), "{origin}: {answer}");
    }
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
}

#[test]
fn a_socket_of_another_program_is_not_connected_to() {
    if !has_qemu() {
        return;
    }
    let daemon = start_with(&format!("qemu-program = {QEMU:?}"), &[]);
    let place = daemon.room().join("screen");
    let vm = machine(&daemon, json!({ "vga": "std", "vnc": format!("unix:{}", place.display()) }));
    assert!(head(&mut over_socket(&daemon, &vm, HANDSHAKE)).starts_with("http/1.1 101"));
    // The daemon would otherwise connect an operator to its own socket, with the rights of root.
    let known = [place, daemon.room().join("run").join(vm.replacen("/vms/", "vm/", 1)).join("vnc")];
    for path in known {
        std::fs::remove_file(&path).ok();
        std::os::unix::fs::symlink(daemon.socket(), &path).unwrap();
    }
    let answer = head(&mut over_socket(&daemon, &vm, HANDSHAKE));
    assert!(answer.starts_with("http/1.1 409"), "{answer}");
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
}

/// Opens the screen over TLS as a browser does, with the token as a subprotocol.
fn as_browser(authority: &Authority, daemon: &Taplined, vm: &str, secret: &str) -> (Talk, String) {
    let mut talk = authority.connect(daemon);
    let protocols = format!("sec-websocket-protocol: tapline.screen, tapline.token.{secret}\r\n");
    harness::tls::send(&mut talk, None, &format!("GET {vm}/screen"), &Value::Null, &format!("{HANDSHAKE}{protocols}"));
    let answer = head(&mut talk);
    (talk, answer)
}

#[test]
fn over_tcp_the_token_of_an_operator_opens_a_screen_until_it_is_revoked() {
    if !has_qemu() {
        return;
    }
    let authority = Authority::new();
    authority.certify("served");
    let daemon = start_with(&format!("qemu-program = {QEMU:?}\n{}", authority.settings("")), &[]);
    let vm = machine(&daemon, private());
    let (uuid, operator) = token(&daemon, json!({ "name": "ops", "role": "operator", "tag": "web" }));
    let (_, other) = token(&daemon, json!({ "name": "other", "role": "operator", "tag": "db" }));
    let (_, reader) = token(&daemon, json!({ "name": "reads", "role": "reader" }));
    for (secret, status) in [(&other, "403"), (&reader, "403"), (&"tapline_wrong".to_owned(), "401")] {
        let (_, answer) = as_browser(&authority, &daemon, &vm, secret);
        assert!(answer.starts_with(&format!("http/1.1 {status}")), "{answer}");
    }
    let (mut talk, answer) = as_browser(&authority, &daemon, &vm, &operator);
    assert!(answer.starts_with("http/1.1 101") && !answer.contains("tapline.token"), "{answer}");
    assert_eq!(message(&mut talk), b"RFB 003.008\n");
    assert_eq!(daemon.delete(&format!("/tokens/{uuid}")).0, 204);
    let mut rest = Vec::new();
    // The connection is cut off in either way.
    talk.read_to_end(&mut rest).ok();
    assert!(as_browser(&authority, &daemon, &vm, &operator).1.starts_with("http/1.1 401"));
    assert!(!daemon.log().contains(&operator));
    daemon.done(daemon.post(&format!("{vm}/shutdown"), json!({ "force": true })));
}
