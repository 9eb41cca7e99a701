//! Downloads into files: complete, interrupted, continued, and begun again.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use control::checksum::Checksum;
use httpfile::{DownloadError, HttpErrorKind, Object, download, find};
use testkit::web_server::{Trick, WebServer};

use crate::{client, impatient, noise, open, url};

const MIB: usize = 1 << 20;

fn fetch(server: &WebServer, file: &File) -> Result<u64, DownloadError> {
    let (object, _) = open(&impatient(), server)?;
    download(&Arc::new(object), file, &mut |_| ())
}

fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// 25 MiB with a hole of 8 MiB, and an odd end.
fn object() -> Vec<u8> {
    let mut bytes = noise(25 * MIB + 7);
    bytes[9 * MIB..17 * MIB].fill(0);
    bytes
}

#[test]
fn a_download_is_complete_and_its_zeroes_are_holes() {
    let (server, bytes) = (WebServer::start(), object());
    server.put("/a", &bytes);
    let file = tempfile::tempfile().unwrap();
    let mut seen = Vec::new();
    let (object, _) = open(&client(), &server).unwrap();
    assert_eq!(download(&Arc::new(object), &file, &mut |done| seen.push(done)).unwrap(), 0);
    assert!(contents(&file) == bytes);
    assert!(file.metadata().unwrap().blocks() * 512 < 18 * MIB as u64);
    assert!(seen.is_sorted() && seen.last() == Some(&(bytes.len() as u64)));
}

#[test]
fn a_download_that_was_interrupted_continues() {
    // More than is read ahead of the file.
    let (server, bytes) = (WebServer::start(), noise(60 * MIB + 7));
    server.put("/a", &bytes);
    let file = tempfile::tempfile().unwrap();
    let (object, _) = open(&impatient(), &server).unwrap();
    let interrupted = download(&Arc::new(object), &file, &mut |done| {
        if done > 0 {
            server.play(Trick::Closes);
        }
    });
    assert!(matches!(interrupted, Err(DownloadError::Http(error)) if error.kind == HttpErrorKind::Away));
    server.play(Trick::None);
    let before = server.requests().len();
    let continued = fetch(&server, &file).unwrap();
    assert!(contents(&file) == bytes);
    assert!(continued > 0, "{:?}", server.requests());
    let later = server.requests().split_off(before);
    // The first bytes are read to recognize the object.
    let begins: Vec<u64> = later.iter().skip(1).map(|request| begin(request)).collect();
    assert_eq!(begins.iter().min(), Some(&continued), "{later:?}");
}

/// The first byte of a request's range.
fn begin(request: &str) -> u64 {
    request.strip_prefix("/a ").and_then(|range| range.split_once('-')).unwrap().0.parse().unwrap()
}

#[test]
fn a_download_of_a_changed_object_begins_again() {
    let (server, old) = (WebServer::start(), object());
    server.put("/a", &old);
    let file = tempfile::tempfile().unwrap();
    let (object, _) = open(&impatient(), &server).unwrap();
    let new = noise(25 * MIB + 7);
    let mut replaced = false;
    let failed = download(&Arc::new(object), &file, &mut |done| {
        if done > 0 && !std::mem::replace(&mut replaced, true) {
            server.put("/a", &new);
        }
    });
    assert!(matches!(failed, Err(DownloadError::Http(error)) if error.kind == HttpErrorKind::Changed));
    assert_eq!(fetch(&server, &file).unwrap(), 0);
    assert!(contents(&file) == new);
}

#[test]
fn digests_are_found_next_to_the_file() {
    let server = WebServer::start();
    let (hex, other) = ("0a".repeat(32), "0b".repeat(64));
    let a = url(&server, "/dir/a.img");
    let found = |checksum: &Checksum| find(&client(), &a, checksum).map(|digest| digest.to_string());
    let missing = found(&Checksum::Auto).unwrap_err();
    assert!(missing.to_string().contains("SHA256SUMS"), "{missing}");
    server.put("/dir/a.img.sha512", format!("{other}  a.img\n").as_bytes());
    assert_eq!(found(&Checksum::Auto).unwrap(), format!("sha512:{other}"));
    // A list of other files is no reason to stop.
    server.put("/dir/SHA256SUMS", format!("{hex}  b.img\n").as_bytes());
    assert_eq!(found(&Checksum::Auto).unwrap(), format!("sha512:{other}"));
    server.put("/dir/SHA256SUMS", format!("{hex} *a.img\n").as_bytes());
    assert_eq!(found(&Checksum::Auto).unwrap(), format!("sha256:{hex}"));
    assert_eq!(found(&Checksum::In(server.url("/dir/SHA256SUMS"))).unwrap(), format!("sha256:{hex}"));
    assert!(found(&Checksum::In(server.url("/none"))).is_err());
    server.put("/long", &vec![b'x'; 5 * MIB]);
    assert_eq!(found(&Checksum::In(server.url("/long"))).unwrap_err().kind, HttpErrorKind::Refused);
    // A server that fails is not one without a list.
    server.play(Trick::Status(500, ""));
    assert_eq!(found(&Checksum::Auto).unwrap_err().kind, HttpErrorKind::Away);
}

#[test]
fn the_file_and_its_list_may_not_be_read_over_http_by_default() {
    let server = WebServer::start();
    server.put("/SHA256SUMS", b"");
    let careful = httpfile::Options { allow_http: false, ..crate::options(std::time::Duration::ZERO) };
    let careful = Arc::new(httpfile::Client::new(careful));
    assert!(find(&careful, &url(&server, "/a"), &Checksum::Auto).is_err());
    assert!(Object::open(&careful, &url(&server, "/a")).is_err());
    assert!(server.requests().is_empty());
}
