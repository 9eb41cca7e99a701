//! TLS with the common NBD tools: who is served, who is refused, and that the bytes are right.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use tempfile::TempDir;
use testkit::certificates::Authority;
use transport::nbd::{Credentials, Tls};

use crate::nbd_support::{GEOMETRY, Served, output, run};

const LIBNBD: &str = "libnbd-bin";
const QEMU: &str = "qemu-utils";

/// The settings that a directory's files make.
pub fn settings(directory: &Path, verify_peer: bool) -> Tls {
    let read = |name: &str| fs::read(directory.join(name)).unwrap();
    let (certificate, key, authority) = (read("server-cert.pem"), read("server-key.pem"), read("ca-cert.pem"));
    let authority = verify_peer.then_some(&authority[..]);
    let revoked = fs::read(directory.join("ca-crl.pem")).ok();
    let revoked = revoked.as_deref();
    Tls::new(&Credentials { certificate: &certificate, key: &key, authority, revoked }).unwrap()
}

/// A disk served over TLS, and its authority.
pub struct Secure {
    pub served: Served,
    pub authority: Authority,
    room: TempDir,
}

impl Secure {
    fn new(verify_peer: bool) -> Secure {
        let room = tempfile::tempdir().unwrap();
        let authority = Authority::new(&room.path().join("ca")).unwrap();
        let tls = settings(&authority.server().unwrap(), verify_peer);
        Secure { served: Served::tcp_tls(GEOMETRY, tls), authority, room }
    }

    /// A disk at a Unix socket for clients with certificates.
    pub fn unix() -> Secure {
        let room = tempfile::tempdir().unwrap();
        let authority = Authority::new(&room.path().join("ca")).unwrap();
        let tls = settings(&authority.server().unwrap(), true);
        Secure { served: Served::unix_tls(GEOMETRY, tls), authority, room }
    }

    /// A client of an authority with the same name and another key.
    fn stranger(&self) -> PathBuf {
        Authority::new(&self.room.path().join("other")).unwrap().client().unwrap()
    }

    fn port(&self) -> String {
        let uri = self.served.uri();
        uri.trim_end_matches('/').rsplit(':').next().unwrap().to_owned()
    }

    /// The URI for libnbd with the certificates of a directory.
    fn uri(&self, certificates: &Path) -> String {
        format!("nbds://127.0.0.1:{}/?tls-certificates={}", self.port(), certificates.display())
    }

    /// A tool of QEMU with the certificates of a directory.
    fn qemu(&self, tool: &str, certificates: &Path, words: &[&str]) -> Output {
        let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", certificates.display());
        let options = format!("driver=nbd,host=127.0.0.1,port={},tls-creds=tls0", self.port());
        let [verb, words @ ..] = words else { panic!("no words") };
        // qemu-io has no verbs.
        let first: &[&str] =
            if tool == "qemu-img" { &[verb, "--object", &object] } else { &["--object", &object, verb] };
        output(QEMU, tool, &[first, &["--image-opts"], words, &[&options]].concat())
    }

    /// Waits for an event: the tool may notice the end of its connection before the server logs the reason.
    fn logged(&self, words: &str) {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let has = || self.served.events.lock().unwrap().iter().any(|event| event.contains(words));
        while !has() {
            assert!(std::time::Instant::now() < until, "no '{words}' in {:?}", self.served.events.lock().unwrap());
            std::thread::yield_now();
        }
    }
}

fn succeeded(output: &Output) -> bool {
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

#[test]
fn libnbd_with_a_certificate_copies_the_same_bytes() {
    let secure = Secure::new(true);
    let uri = secure.uri(&secure.authority.client().unwrap());
    let info: serde_json::Value = serde_json::from_str(&run(LIBNBD, "nbdinfo", &["--json", &uri])).unwrap();
    assert_eq!((&info["TLS"], &info["structured"]), (&true.into(), &true.into()));
    assert_eq!(info["exports"][0]["export-size"], GEOMETRY.len);
    let (source, fetched) = (secure.served.file("source.raw"), secure.served.file("fetched.raw"));
    let bytes: Vec<u8> = (0..GEOMETRY.len >> 3).flat_map(|word| (word * 0x9e37_79b9).to_ne_bytes()).collect();
    fs::write(&source, &bytes).unwrap();
    let (source, fetched) = (source.to_str().unwrap(), fetched.to_str().unwrap());
    run(LIBNBD, "nbdcopy", &["--connections=4", "--flush", source, &uri]);
    run(LIBNBD, "nbdcopy", &["--connections=4", &uri, fetched]);
    assert!(fs::read(fetched).unwrap() == bytes);
    secure.logged("encrypted by TLS 1.3, certificate verified");
}

#[test]
fn qemu_with_a_certificate_reads_what_it_wrote() {
    let secure = Secure::new(true);
    let client = secure.authority.client().unwrap();
    let info = secure.qemu("qemu-img", &client, &["info"]);
    assert!(succeeded(&info) && String::from_utf8_lossy(&info.stdout).contains("virtual size: 64 MiB"));
    let write = ["-twriteback", "-c", "write -P 9 0 32M", "-c", "write -P 8 40M 1536", "-c", "flush"];
    assert!(succeeded(&secure.qemu("qemu-io", &client, &write)));
    let read = ["-r", "-c", "read -P 9 0 32M", "-c", "read -P 8 40M 1536", "-c", "read -P 0 41M 1M"];
    let read = secure.qemu("qemu-io", &client, &read);
    assert!(succeeded(&read) && !String::from_utf8_lossy(&read.stdout).contains("failed"));
}

#[test]
fn clients_without_a_certificate_are_refused() {
    let secure = Secure::new(true);
    let anonymous = secure.authority.anonymous().unwrap();
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&secure.uri(&anonymous)])));
    assert!(!succeeded(&secure.qemu("qemu-img", &anonymous, &["info"])));
    secure.logged("peer sent no certificates");
}

#[test]
fn clients_of_another_authority_are_refused_by_both_sides() {
    let secure = Secure::new(true);
    let stranger = secure.stranger();
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&secure.uri(&stranger)])));
    assert!(!succeeded(&secure.qemu("qemu-img", &stranger, &["info"])));
    // One that trusts our server, with a certificate of the other authority.
    fs::copy(secure.room.path().join("ca/ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&secure.uri(&stranger)])));
    secure.logged("invalid peer certificate");
}

#[test]
fn clients_with_a_revoked_certificate_are_refused() {
    let room = tempfile::tempdir().unwrap();
    let authority = Authority::new(&room.path().join("ca")).unwrap();
    let (server, client) = (authority.server().unwrap(), authority.client().unwrap());
    authority.revoke_client().unwrap();
    let served = Served::tcp_tls(GEOMETRY, settings(&server, true));
    let secure = Secure { served, authority, room };
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&secure.uri(&client)])));
    secure.logged("invalid peer certificate: Revoked");
}

#[test]
fn clients_without_tls_are_refused() {
    let secure = Secure::new(true);
    let uri = secure.served.uri();
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&uri])));
    let qemu = output(QEMU, "qemu-img", &["info", &uri]);
    assert!(!succeeded(&qemu) && String::from_utf8_lossy(&qemu.stderr).contains("TLS"));
    assert!(secure.served.disk.lock().unwrap().done.is_empty());
}

#[test]
fn a_server_without_tls_refuses_clients_that_require_it() {
    let room = tempfile::tempdir().unwrap();
    let client = Authority::new(&room.path().join("ca")).unwrap().client().unwrap();
    let served = Served::tcp(GEOMETRY);
    let uri = served.uri().replace("nbd://", "nbds://");
    let refused = output(LIBNBD, "nbdinfo", &[&format!("{uri}?tls-certificates={}", client.display())]);
    assert!(!succeeded(&refused));
    run(LIBNBD, "nbdinfo", &[&served.uri()]);
}

#[test]
fn without_verification_clients_need_no_certificate() {
    let secure = Secure::new(false);
    let anonymous = secure.authority.anonymous().unwrap();
    assert!(succeeded(&output(LIBNBD, "nbdinfo", &[&secure.uri(&anonymous)])));
    assert!(succeeded(&secure.qemu("qemu-img", &anonymous, &["info"])));
    let uri = secure.served.uri();
    assert!(!succeeded(&output(LIBNBD, "nbdinfo", &[&uri])), "without TLS nothing is served");
}
