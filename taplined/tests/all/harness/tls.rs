//! The daemon over TLS: certificates made with openssl, and a client that sees every byte of a response.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{Taplined, wait_until};

/// A certificate authority with its own directory.
pub struct Authority {
    room: tempfile::TempDir,
}

/// A connection over TLS.
pub type Talk = StreamOwned<ClientConnection, TcpStream>;

/// A response: its status, headers and body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }

    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap().to_owned()
    }
}

/// Creates a key and a certificate. Without an issuer, it is self-signed.
fn certify(directory: &Path, name: &str, words: &[&str]) {
    let files = [format!("{name}.key"), format!("{name}.pem")];
    testkit::certificates::certify(directory, [&files[0], &files[1]], name, words).unwrap();
}

impl Authority {
    pub fn new() -> Authority {
        let room = tempfile::tempdir().unwrap();
        certify(room.path(), "ca", &[]);
        Authority { room }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    /// A certificate for this host.
    pub fn certify(&self, name: &str) {
        let words = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"];
        certify(self.room.path(), name, &[&words[..], &["-addext", "basicConstraints=critical,CA:FALSE"]].concat());
    }

    /// Settings of a daemon that has the certificate `served`.
    pub fn settings(&self, more: &str) -> String {
        let (certificate, key) = (self.path("served.pem"), self.path("served.key"));
        format!("[api]\nlisten = [\"127.0.0.1:0\"]\ncertificate = {certificate:?}\nkey = {key:?}\n{more}")
    }

    /// Starts a daemon with a certificate by this authority.
    pub fn start(&self, more: &str) -> Taplined {
        self.certify("served");
        super::start_with(&self.settings(more), &[])
    }

    /// The configuration of a client that trusts only this authority.
    pub fn trust(&self) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_file(self.path("ca.pem")).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_root_certificates(roots).with_no_client_auth())
    }

    /// Connects and completes the handshake.
    pub fn connect(&self, daemon: &Taplined) -> Talk {
        let stream = TcpStream::connect(("127.0.0.1", port(daemon))).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let client = ClientConnection::new(self.trust(), "127.0.0.1".try_into().unwrap()).unwrap();
        let mut talk = StreamOwned::new(client, stream);
        while talk.conn.is_handshaking() {
            talk.conn.complete_io(&mut talk.sock).unwrap();
        }
        talk
    }

    /// Sends a single request on its own connection.
    pub fn ask(&self, daemon: &Taplined, token: Option<&str>, request: &str, body: &Value) -> Answer {
        let mut talk = self.connect(daemon);
        send(&mut talk, token, request, body, "connection: close\r\n");
        let answer = rest(&mut talk);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{request}: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    /// Sends a GET request.
    pub fn get(&self, daemon: &Taplined, token: Option<&str>, path: &str) -> Answer {
        self.ask(daemon, token, &format!("GET {path}"), &Value::Null)
    }
}

/// Sends a request, such as `GET /host`. Metrics are outside the version prefix of the API.
pub fn send(talk: &mut Talk, token: Option<&str>, request: &str, body: &Value, headers: &str) {
    let (method, path) = request.split_once(' ').unwrap();
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let token = token.map(|token| format!("authorization: Bearer {token}\r\n")).unwrap_or_default();
    let len = body.len();
    let root = if path.starts_with("/metrics") { "" } else { "/v1" };
    let head = format!("{method} {root}{path} HTTP/1.1\r\nhost: t\r\n{token}{headers}content-length: {len}\r\n\r\n");
    talk.write_all(format!("{head}{body}").as_bytes()).unwrap();
}

/// Everything received until the connection is closed, in whatever way.
pub fn rest(talk: &mut Talk) -> String {
    let mut all = Vec::new();
    let mut piece = [0; 4096];
    loop {
        match talk.read(&mut piece) {
            Ok(0) => break,
            Ok(len) => all.extend_from_slice(piece.get(..len).unwrap()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => panic!("the connection does not end: {all:?}"),
            // The connection was cut off.
            Err(_) => break,
        }
    }
    String::from_utf8(all).unwrap()
}

/// The port on which the daemon listens for TLS, according to its log.
pub fn port(daemon: &Taplined) -> u16 {
    let log = daemon.log();
    let said = log.lines().filter_map(|line| line.split_once("serving over TLS address=127.0.0.1:")).next_back();
    said.unwrap_or_else(|| panic!("{log}")).1.trim().parse().unwrap()
}

/// Creates a token; returns its UUID and its secret.
pub fn token(daemon: &Taplined, asked: Value) -> (String, String) {
    let (status, made) = daemon.post("/tokens", asked);
    assert_eq!(status, 201, "{made}");
    (made["token"]["uuid"].as_str().unwrap().into(), made["secret"].as_str().unwrap().into())
}

/// Creates a token with the role admin.
pub fn any_token(daemon: &Taplined) -> String {
    token(daemon, json!({ "name": "any" })).1
}

/// Replaces the served certificate, and makes the daemon reload it.
pub fn replace(authority: &Authority, daemon: &Taplined, certificate: &str, said: &str) {
    fs::copy(authority.path(&format!("{certificate}.pem")), authority.path("served.pem")).unwrap();
    fs::copy(authority.path(&format!("{certificate}.key")), authority.path("served.key")).unwrap();
    let told = Command::new("kill").args(["-HUP", &daemon.pid().to_string()]).status().unwrap();
    assert!(told.success());
    wait_until("the daemon says that it has looked", || daemon.log().contains(said));
}
