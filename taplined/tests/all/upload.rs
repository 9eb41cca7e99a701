//! Uploads: files that clients send piece by piece and that become disks.

use std::fs;

use serde_json::{Value, json};

use crate::harness::chromium::{Browser, forward};
use crate::harness::{Exchange, Taplined, start};

const MIB: usize = 1 << 20;

/// A raw image of three megabytes, each filled with another letter.
fn image() -> String {
    ["a", "b", "c"].map(|letter| letter.repeat(MIB)).concat()
}

fn create(daemon: &Taplined, sr: &str, size: usize) -> String {
    let (status, made) = daemon.post("/uploads", json!({ "sr": sr, "name": "disk.raw", "size": size }));
    assert_eq!((status, &made["received"]), (201, &json!(0)), "{made}");
    format!("/uploads/{}", made["uuid"].as_str().unwrap())
}

fn append(daemon: &Taplined, upload: &str, offset: usize, piece: &str) -> Exchange {
    let path = format!("/v1{upload}/append?offset={offset}");
    daemon.exchange("POST", &path, &[("content-type", "application/octet-stream")], piece)
}

fn import(sr: &str, upload: &str) -> Value {
    let uuid = upload.trim_start_matches("/uploads/");
    json!({ "sr": sr, "name": "sent", "upload": uuid, "source_format": "raw" })
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

/// Names in a repository other than those of its label and lock.
fn files(daemon: &Taplined) -> Vec<String> {
    let names = fs::read_dir(daemon.room().join("vms")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.starts_with('.')).collect()
}

#[test]
fn a_file_sent_in_pieces_becomes_a_disk() {
    let daemon = start();
    let sr = daemon.repository("vms");
    let image = image();
    let upload = create(&daemon, &sr, image.len());
    assert_eq!(append(&daemon, &upload, 0, &image[..MIB + 5]).json()["received"], MIB + 5);
    // A received piece is not written again, and none may be skipped.
    for offset in [0, MIB, MIB + 6] {
        let refused = append(&daemon, &upload, offset, &image[offset..offset + 7]);
        assert_eq!(refused.refusal(), (409, "state".into(), "offset".into()));
        let detail = refused.json()["detail"].to_string();
        assert!(detail.contains(&format!("begins at {}", MIB + 5)), "{detail}");
    }
    let (status, refused) = daemon.post("/vdis/import", import(&sr, &upload));
    assert_eq!((status, &refused["field"]), (409, &json!("upload")), "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains(&format!("only {} of {}", MIB + 5, 3 * MIB)), "{refused}");
    let beyond = append(&daemon, &upload, MIB + 5, &format!("{}x", &image[MIB + 5..])).json()["detail"].to_string();
    assert!(beyond.contains("passes the end"), "{beyond}");
    assert_eq!(append(&daemon, &upload, MIB + 5, &image[MIB + 5..]).json()["received"], 3 * MIB);
    let shown = daemon.get("/uploads").1[0].clone();
    assert_eq!((&shown["name"], &shown["received"]), (&json!("disk.raw"), &json!(3 * MIB)));
    let vdi = daemon.done(daemon.post("/vdis/import", import(&sr, &upload)));
    assert!(content(&daemon, &vdi) == image.as_bytes());
    assert_eq!(daemon.get(&upload).0, 404);
    assert_eq!((files(&daemon).len(), daemon.get("/uploads").1), (1, json!([])));
}

#[test]
fn an_upload_leaves_nothing_behind() {
    let mut daemon = start();
    let sr = daemon.repository("vms");
    let upload = create(&daemon, &sr, MIB);
    append(&daemon, &upload, 0, "0123456789abcdef");
    daemon.kill();
    daemon.restart();
    assert_eq!((daemon.get(&upload).0, files(&daemon)), (404, Vec::new()));
    let removed = create(&daemon, &sr, MIB);
    assert_eq!((daemon.delete(&removed).0, daemon.get(&removed).0), (204, 404));
    let held = create(&daemon, &sr, MIB);
    daemon.done(daemon.post(&format!("/srs/{sr}/detach"), json!({})));
    assert_eq!(append(&daemon, &held, 0, "0123456789abcdef").status, 404);
}

#[test]
fn an_invalid_upload_is_refused() {
    let daemon = start();
    let sr = daemon.repository("vms");
    for (size, code) in [(json!(0), "invalid"), (json!(u64::MAX >> 1), "no-space"), (json!(-1), "invalid")] {
        let (_, refused) = daemon.post("/uploads", json!({ "sr": sr, "name": "disk.raw", "size": size }));
        assert_eq!(refused["code"], code, "{refused}");
    }
    let upload = create(&daemon, &sr, MIB);
    let path = format!("/v1{upload}/append?offset=0");
    let json = daemon.exchange("POST", &path, &[("content-type", "application/json")], "{}").refusal();
    assert_eq!((json.0, json.1.as_str()), (415, "media-type"), "{json:?}");
    let both = json!({ "sr": sr, "name": "sent", "upload": sr, "path": "/tmp/a", "source_format": "raw" });
    assert!(daemon.post("/vdis/import", both).1["detail"].as_str().unwrap().contains("not several"));
    let neither = json!({ "sr": sr, "name": "sent", "source_format": "raw" });
    assert!(daemon.post("/vdis/import", neither).1["detail"].as_str().unwrap().contains("one of them"));
}

#[test]
fn a_file_of_the_browsers_computer_is_imported_from_the_page() {
    let Some(mut page) = Browser::start() else { return };
    let daemon = start();
    let sr = daemon.repository("vms");
    let file = daemon.room().join("web.img");
    // Two pieces.
    let image = image().repeat(3);
    fs::write(&file, &image).unwrap();
    page.open(&format!("http://localhost:{}/#/sr/{sr}", forward(daemon.socket())));
    // The connection is lost twice: before a piece has arrived, and before its response has.
    page.value(
        "{ let lost = 0; const real = window.fetch;
           window.fetch = async (path, options) => {
               if (!path.includes('/append') || lost === 2) return real(path, options);
               lost += 1;
               if (lost === 2) await real(path, options);
               throw new TypeError('Failed to fetch');
           }; }",
    );
    page.click("Import a disk");
    page.wait_for("the dialog is open", "document.querySelector('dialog[open] input[type=file]')");
    let input = json!({ "expression": "document.querySelector('dialog input[type=file]')" });
    let input = page.ask("Runtime.evaluate", input)["result"]["objectId"].clone();
    page.ask("DOM.setFileInputFiles", json!({ "files": [file], "objectId": input }));
    page.wait_for("the name is that of the file", "document.querySelector('dialog input[name=name]').value === 'web'");
    assert_eq!(page.value("document.querySelector('dialog select').value"), "raw");
    page.value("document.querySelector('dialog button.primary').click()");
    page.wait_for("it is done", "notes.innerText.includes(\"Disk 'web': done\")");
    page.wait_for("it is listed", "document.querySelector('main').innerText.includes('web')");
    let vdi = daemon.get("/vdis").1[0].clone();
    assert!(content(&daemon, &vdi) == image.as_bytes());
    assert_eq!(page.errors(), Vec::<String>::new());
}
