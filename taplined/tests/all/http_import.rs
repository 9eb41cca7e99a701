//! Imports from HTTP servers: nginx, and one that is slow, silent or lies.

use std::fs;

use serde_json::{Value, json};
use testkit::certificates::Authority;
use testkit::nginx::Nginx;
use testkit::web_server::{Trick, WebServer};

use crate::harness::{Taplined, disk_program, start, start_with, wait_until};

const MIB: usize = 1 << 20;

/// A raw disk without holes.
fn disk(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from(at / 512 % 251).unwrap() | 1).collect()
}

/// The bytes of a disk.
fn content(daemon: &Taplined, vdi: &Value) -> Vec<u8> {
    let path = daemon.room().join("read");
    let export = format!("/vdis/{}/export", vdi["uuid"].as_str().unwrap());
    daemon.done(daemon.post(&export, json!({ "path": path, "format": "raw" })));
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    bytes
}

/// Names in the repository other than those of its label and lock.
fn files(daemon: &Taplined) -> Vec<String> {
    let names = fs::read_dir(daemon.room().join("vms")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with('.')).collect()
}

fn of_server(server: &WebServer, sr: &str) -> Value {
    let url = server.url("/a.raw");
    json!({ "sr": sr, "name": "web", "url": url, "source_format": "raw", "insecure_http": true })
}

#[test]
fn an_image_at_a_server_becomes_a_disk() {
    let room = tempfile::tempdir().unwrap();
    // The process that downloads is perhaps another user's.
    let certificates = Authority::new(&room.path().join("authority")).unwrap().server().unwrap();
    let public = tempfile::Builder::new().permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755)).tempdir();
    let public = public.unwrap();
    let authority = public.path().join("ca-cert.pem");
    fs::copy(certificates.join("ca-cert.pem"), &authority).unwrap();
    let nginx = Nginx::start(room.path(), &certificates);
    let raw = room.path().join("a.raw");
    fs::write(&raw, disk(8 * MIB)).unwrap();
    let qcow2 = nginx.files().join("web.qcow2");
    let mut convert = std::process::Command::new(disk_program());
    convert.args(["image", "convert"]).arg(format!("raw:{}", raw.display())).arg(format!("qcow2:{}", qcow2.display()));
    assert!(convert.output().unwrap().status.success());
    let sums = std::process::Command::new("sha256sum").arg("web.qcow2").current_dir(nginx.files()).output().unwrap();
    fs::write(nginx.files().join("SHA256SUMS"), sums.stdout).unwrap();

    let daemon = start_with("", &[("SSL_CERT_FILE", authority.to_str().unwrap())]);
    let sr = daemon.repository("vms");
    let asked = |url: &str, format: &str, checksum: &str| json!({ "sr": sr, "name": "web", "url": url, "source_format": format, "checksum": checksum });
    let vdi = daemon.done(daemon.post("/vdis/import", asked(&nginx.https("web.qcow2"), "qcow2", "auto")));
    assert!(content(&daemon, &vdi) == disk(8 * MIB));
    assert_eq!(files(&daemon).len(), 1, "the download is removed");
    // A format is never taken from the contents, nor anything without proof.
    let refused = |answer: (u16, Value), field: &str, why: &str| {
        assert_eq!((answer.0, answer.1["field"].as_str()), (400, Some(field)), "{}", answer.1);
        assert!(answer.1.to_string().contains(why), "{}", answer.1);
    };
    refused(daemon.post("/vdis/import", asked(&nginx.https("web.qcow2"), "raw", "auto")), "url", "qcow2");
    refused(daemon.post("/vdis/import", asked(&nginx.http("web.qcow2"), "qcow2", "auto")), "url", "insecure-http");
    let both = json!({ "sr": sr, "name": "b", "url": "https://h/a", "path": "/a", "source_format": "raw" });
    refused(daemon.post("/vdis/import", both), "path", "several");
    let local = json!({ "sr": sr, "name": "b", "path": "/a", "source_format": "raw", "checksum": "auto" });
    refused(daemon.post("/vdis/import", local), "checksum", "HTTP");
    let secret = json!({ "sr": sr, "name": "b", "url": "https://me:secret@h/a", "source_format": "raw" });
    let (status, answer) = daemon.post("/vdis/import", secret);
    assert!(status == 400 && !answer.to_string().contains("secret"), "{answer}");
    // A wrong digest leaves nothing.
    let wrong = Value::from(format!("sha256:{}", "0".repeat(64)));
    let mut other = asked(&nginx.https("web.qcow2"), "qcow2", wrong.as_str().unwrap());
    other["name"] = "other".into();
    let failed = daemon.failed(daemon.post("/vdis/import", other));
    assert!(failed.to_string().contains("digest"), "{failed}");
    assert_eq!(files(&daemon).len(), 1);
}

#[test]
fn a_killed_daemon_continues_a_download() {
    let mut daemon = start();
    let sr = daemon.repository("vms");
    let (server, bytes) = (WebServer::start(), disk(96 * MIB));
    server.put("/a.raw", &bytes);
    // The look at it, the first bytes, and more than is synced at a time.
    server.answer_only(Some(17));
    let (status, task) = daemon.post("/vdis/import", of_server(&server, &sr));
    assert_eq!(status, 202, "{task}");
    let part = || files(&daemon).into_iter().find(|name| name.ends_with(".download"));
    let recorded = || {
        let path = daemon.room().join("vms").join(part()?);
        let bytes = fs::read(path).ok()?;
        Some(String::from_utf8_lossy(bytes.get(96 * MIB..)?).contains("\"done\":"))
    };
    wait_until("some of it is durable", || recorded() == Some(true));
    daemon.kill();
    let before = server.requests().len();
    server.answer_only(None);
    daemon.restart();
    let ended = daemon.wait(&task);
    assert_eq!(ended["state"], "done", "{ended}\n{}", daemon.log());
    let later = server.requests().split_off(before);
    assert!(!later.iter().any(|request| request.starts_with("/a.raw 0-4194303")), "{later:?}");
    assert!(content(&daemon, &ended["result"]) == bytes);
    assert_eq!(files(&daemon).len(), 1);
}

#[test]
fn a_cancelled_download_leaves_nothing() {
    let daemon = start();
    let sr = daemon.repository("vms");
    let server = WebServer::start();
    server.put("/a.raw", &disk(64 * MIB));
    server.answer_only(Some(4));
    let (status, task) = daemon.post("/vdis/import", of_server(&server, &sr));
    assert_eq!(status, 202, "{task}");
    server.wait_for_requests(6);
    let task = task["uuid"].as_str().unwrap();
    let (status, answer) = daemon.post(&format!("/tasks/{task}/cancel"), json!({}));
    assert!(status < 300, "{answer}");
    daemon.settle();
    assert_eq!(daemon.get(&format!("/tasks/{task}")).1["state"], "cancelled");
    assert_eq!(files(&daemon), [""; 0]);
}

/// What is converted is what was looked at.
#[test]
fn a_disk_that_was_replaced_is_not_imported() {
    let daemon = start();
    let sr = daemon.repository("vms");
    let server = WebServer::start();
    server.put("/a.raw", &disk(8 * MIB));
    server.answer_only(Some(2));
    let (status, task) = daemon.post("/vdis/import", of_server(&server, &sr));
    assert_eq!(status, 202, "{task}");
    server.wait_for_requests(3);
    server.put("/a.raw", &disk(9 * MIB));
    server.answer_only(None);
    let ended = daemon.wait(&task);
    assert_eq!(ended["state"], "failed", "{ended}");
    assert_eq!(files(&daemon), [""; 0]);
    // A server that lies about the bytes is found out by their digest.
    server.put("/a.raw", &disk(8 * MIB));
    server.play(Trick::Lies);
    let mut asked = of_server(&server, &sr);
    asked["checksum"] = format!("sha256:{}", "1".repeat(64)).into();
    daemon.failed(daemon.post("/vdis/import", asked));
    assert_eq!(files(&daemon), [""; 0]);
}
