//! Tests of `tapline top` with names from the daemon, and with a daemon that does not respond.

use std::fs::File;
use std::os::unix::net::UnixListener;

use serde_json::Value;
use stats::{Page, Source};

use crate::objects::{sr, vbd, vdi, vm};
use crate::play::{Played, err, ok, out, run};

/// A directory with the page of VBD 1, whose writer is this process.
fn place() -> (tempfile::TempDir, Page) {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("vbd").join(vbd(1).uuid.to_string());
    std::fs::create_dir_all(&directory).unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(stats::of_daemon(&directory)).unwrap();
    let page = Page::begin(file, Source::Kernel, r#"{"image":"qcow2:/srv/vms/root.qcow2"}"#).unwrap();
    (place, page)
}

fn sampled(text: &str) -> Value {
    serde_json::from_str::<Value>(text).unwrap()["disks"][0].clone()
}

#[test]
fn a_disk_has_the_names_that_the_daemon_knows_and_is_found_by_them() {
    let attached = api::Vbd { vm: Some(vm(1, "web").uuid), ..vbd(1) };
    let played = Played::lasting([
        ok("GET", "vbds", &[attached]),
        ok("GET", "vms", &[vm(1, "web")]),
        ok("GET", "vdis", &[vdi(1, "root")]),
        ok("GET", "srs", &[sr(1, "fast")]),
    ]);
    let (place, _page) = place();
    let top = |words: &str| {
        let common = format!("top --pages {} -n 1 -i 0.01 {words}", place.path().display());
        played.run(&common.split_whitespace().collect::<Vec<_>>())
    };
    let disk = sampled(&out(&top("--json")));
    let names = ["name", "vm", "device", "vdi", "sr"].map(|field| disk[field].as_str().unwrap_or_default().to_owned());
    assert_eq!(names, ["web/vdd", "web", "vdd", "root", "fast"]);
    let uuid = vbd(1).uuid.to_string();
    for word in ["web/vdd", "root", &uuid, &uuid[..8], "root.qcow2"] {
        assert_eq!(sampled(&out(&top(&format!("--json {word}"))))["name"], "web/vdd", "{word}");
    }
    for word in ["web/vda", "other/vdd", "roo"] {
        let refused = top(&format!("--batch {word}"));
        assert_eq!(refused.status.code(), Some(6), "{word}: {}", err(&refused));
    }
    let sum = sampled(&out(&top("--json --by vm")));
    assert_eq!((&sum["name"], sum.get("vbd")), (&"web".into(), None), "a sum has no fields of a disk: {sum}");
    assert_eq!(sampled(&out(&top("--json --by sr")))["name"], "fast");
}

#[test]
fn a_daemon_that_does_not_answer_costs_names_only() {
    let (place, _page) = place();
    let socket = place.path().join("silent.sock");
    // It accepts connections but never responds.
    let _silent = UnixListener::bind(&socket).unwrap();
    let pages = place.path().display().to_string();
    let output = run(&socket, &["top", "--json", "-n", "1", "-i", "0.01", "--pages", &pages]);
    let disk = sampled(&out(&output));
    let short = vbd(1).uuid.to_string()[..8].to_owned();
    assert_eq!((disk["name"].as_str(), &disk["vm"]), (Some(format!("{short} root.qcow2").as_str()), &Value::Null));
}

#[test]
fn pages_are_those_of_the_daemon_that_is_named() {
    let (place, _page) = place();
    // No daemon listens: the page is read without it.
    let socket = place.path().join("taplined.sock");
    let disk = sampled(&out(&run(&socket, &["top", "--json", "-n", "1", "-i", "0.01", "root.qcow2"])));
    assert_eq!(disk["vbd"], vbd(1).uuid.to_string());
    let option = ["top", "--json", "-n", "1", "-i", "0.01", "root.qcow2", "--socket", socket.to_str().unwrap()];
    assert_eq!(sampled(&out(&run("/nonexistent/taplined.sock".as_ref(), &option)))["vbd"], vbd(1).uuid.to_string());
    let found = out(&run(&socket, &["doctor"]));
    assert!(!found.contains("no disk is served"), "{found}");
    // If nothing is found, the message names the directory.
    let other = tempfile::tempdir().unwrap();
    let read = other.path().join("vbd").display().to_string();
    let socket = other.path().join("taplined.sock");
    let refused = run(&socket, &["top", "--batch", "-n", "1", "-i", "0.01", "root.qcow2"]);
    assert!(err(&refused).contains(&read) || !err(&refused).contains("no disk is served"), "{}", err(&refused));
    let found = out(&run(&socket, &["doctor", "--json"]));
    assert!(found.contains(&read) || !found.contains("no disk is served"), "{found}");
}
