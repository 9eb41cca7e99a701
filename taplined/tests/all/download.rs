//! Downloads: exported disks that clients fetch piece by piece.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{Taplined, start};

const PIECE: usize = 4 << 20;

/// A daemon with a repository, and a disk in it of nine megabytes that begin and end with data.
fn bed() -> (Taplined, String, String) {
    let daemon = start();
    let sr = daemon.repository("vms");
    let path = daemon.room().join("disk.raw");
    let mut bytes = vec![0; 9 << 20];
    bytes[..5].copy_from_slice(b"begin");
    bytes[(9 << 20) - 3..].copy_from_slice(b"end");
    fs::write(&path, bytes).unwrap();
    let asked = json!({ "sr": sr, "name": "disk", "path": path, "source_format": "raw" });
    let vdi = daemon.done(daemon.post("/vdis/import", asked))["uuid"].as_str().unwrap().to_owned();
    (daemon, sr, vdi)
}

fn export(daemon: &Taplined, vdi: &str, format: &str) -> Value {
    let asked = json!({ "download": true, "format": format });
    let result = daemon.done(daemon.post(&format!("/vdis/{vdi}/export"), asked));
    let (status, download) = daemon.get(&format!("/downloads/{}", result["download"].as_str().unwrap()));
    assert_eq!(status, 200, "{download}");
    download
}

fn piece(daemon: &Taplined, download: &Value, offset: usize) -> Vec<u8> {
    let path = format!("/v1/downloads/{}/data?offset={offset}", download["uuid"].as_str().unwrap());
    let got = daemon.exchange("GET", &path, &[], "");
    assert_eq!(got.status, 200);
    got.body.into_bytes()
}

#[test]
fn a_disk_is_fetched_in_pieces() {
    let (daemon, sr, vdi) = bed();
    let download = export(&daemon, &vdi, "raw");
    assert_eq!((&download["size"], &download["vdi"], &download["sr"]), (&json!(9 << 20), &json!(vdi), &json!(sr)));
    let pieces = [0, PIECE, 2 * PIECE].map(|offset| piece(&daemon, &download, offset));
    assert_eq!(pieces.each_ref().map(Vec::len), [PIECE, PIECE, 1 << 20]);
    let all = pieces.concat();
    assert!(all.starts_with(b"begin") && all.ends_with(b"end") && all[5..all.len() - 3].iter().all(|byte| *byte == 0));
    assert!(piece(&daemon, &download, 9 << 20).is_empty());
    let path = format!("/downloads/{}", download["uuid"].as_str().unwrap());
    let (status, problem) = daemon.get(&format!("{path}/data?offset={}", (9 << 20) + 1));
    assert_eq!((status, &problem["field"]), (400, &json!("offset")), "{problem}");
    // It has no name, and its space is free once it is removed.
    assert_eq!(
        fs::read_dir(daemon.room().join("vms"))
            .unwrap()
            .flatten()
            .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
            .count(),
        1
    );
    assert_eq!(daemon.delete(&path).0, 204);
    assert_eq!((daemon.get(&path).0, daemon.get("/downloads").1), (404, json!([])));
}

#[test]
fn an_export_is_either_a_file_or_a_download() {
    let (daemon, _, vdi) = bed();
    let export = format!("/vdis/{vdi}/export");
    for asked in [json!({ "format": "raw" }), json!({ "format": "raw", "download": true, "path": "/srv/a" })] {
        let (status, problem) = daemon.post(&export, asked);
        assert_eq!((status, &problem["field"]), (400, &json!("path")), "{problem}");
    }
}

#[test]
fn a_download_ends_with_the_daemon_and_with_its_repository() {
    let (mut daemon, sr, vdi) = bed();
    export(&daemon, &vdi, "qcow2");
    daemon.done(daemon.post(&format!("/srs/{sr}/detach"), json!({})));
    assert_eq!(daemon.get("/downloads").1, json!([]));
    daemon.done(daemon.post(&format!("/srs/{sr}/attach"), json!({})));
    let download = export(&daemon, &vdi, "qcow2");
    daemon.restart();
    assert_eq!(daemon.get(&format!("/downloads/{}", download["uuid"].as_str().unwrap())).0, 404);
}
