//! Tags and `other_config` strings: given at creation, replaced by `PATCH`, and found by lists.

use serde_json::{Value, json};

use crate::harness::{Taplined, disks, start};

const MADE: (&str, &str) = (r#"["db","prod"]"#, r#"{"backup":"nightly"}"#);

/// Labels of an object, as text.
#[track_caller]
fn labels(daemon: &Taplined, path: &str) -> (String, String) {
    let (status, shown) = daemon.get(path);
    assert_eq!(status, 200, "{shown}");
    (shown["tags"].to_string(), shown["other_config"].to_string())
}

/// A request with labels.
fn labelled(mut asked: Value) -> Value {
    asked["tags"] = json!(["prod", "db", "prod"]);
    asked["other_config"] = json!({ "backup": "nightly" });
    asked
}

fn uuid(object: &Value) -> &str {
    object["uuid"].as_str().unwrap_or_else(|| panic!("{object}"))
}

/// A daemon with one object of each kind that has labels; returns their paths.
fn all_kinds() -> (Taplined, Vec<String>) {
    let daemon = start();
    let place = daemon.room().join("vms");
    std::fs::create_dir(&place).unwrap();
    let asked = labelled(json!({ "name": "vms", "source": { "type": "dir", "path": place } }));
    let sr = daemon.done(daemon.post("/srs", asked));
    let asked = labelled(json!({ "sr": uuid(&sr), "name": "web", "size": 8 << 20 }));
    let vdi = daemon.done(daemon.post("/vdis", asked));
    let vm = daemon.post("/vms", labelled(json!({ "name": "web", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })));
    let vbd = daemon.post("/vbds", labelled(json!({ "vm": uuid(&vm.1), "vdi": uuid(&vdi) })));
    let paths = [("srs", &sr), ("vdis", &vdi), ("vms", &vm.1), ("vbds", &vbd.1)];
    let paths = paths.map(|(noun, object)| format!("/{noun}/{}", uuid(object))).to_vec();
    (daemon, paths)
}

#[test]
fn labels_are_given_at_creation_replaced_by_patch_and_survive_a_restart() {
    let (mut daemon, paths) = all_kinds();
    for path in &paths {
        assert_eq!(labels(&daemon, path), (MADE.0.into(), MADE.1.into()), "{path}");
        assert_eq!(daemon.patch(path, json!({ "tags": ["test"] })).0, 200);
        assert_eq!(labels(&daemon, path), (r#"["test"]"#.into(), MADE.1.into()), "{path}");
        assert_eq!(daemon.patch(path, json!({ "other_config": {} })).1["tags"], json!(["test"]));
        assert_eq!(labels(&daemon, path), (r#"["test"]"#.into(), "{}".into()), "{path}");
    }
    disks::inventory_agrees(&daemon);
    daemon.restart();
    for path in &paths {
        assert_eq!(labels(&daemon, path), (r#"["test"]"#.into(), "{}".into()), "{path}");
    }
}

#[test]
fn invalid_labels_are_refused_by_field_and_change_nothing() {
    let (daemon, paths) = all_kinds();
    let long = "x".repeat(65);
    let many: Vec<String> = (0..65).map(|n| format!("t{n}")).collect();
    let wrong = [
        ("tags", json!(["two words"])),
        ("tags", json!([""])),
        ("tags", json!([long])),
        ("tags", json!(many)),
        ("other_config", json!({ "a": 1 })),
        ("other_config", json!({ "a=b": "" })),
        ("other_config", json!({ "a": "x".repeat(16 << 10) })),
    ];
    for path in &paths {
        for (field, value) in &wrong {
            let (status, problem) = daemon.patch(path, json!({ *field: value }));
            assert_eq!((status, &problem["code"]), (400, &json!("invalid")), "{path}: {problem}");
            assert!(problem["field"].as_str().unwrap().starts_with(field), "{path}: {problem}");
        }
        assert_eq!(labels(&daemon, path), (MADE.0.into(), MADE.1.into()), "{path}");
    }
}

#[test]
fn a_list_is_filtered_by_all_requested_tags() {
    let (daemon, paths) = all_kinds();
    for noun in ["srs", "vdis", "vms", "vbds"] {
        let count = |query: &str| daemon.get(&format!("/{noun}{query}")).1.as_array().unwrap().len();
        assert_eq!((count(""), count("?tag=prod"), count("?tag=prod&tag=db"), count("?tag=d")), (1, 1, 1, 0), "{noun}");
        assert_eq!(count("?tag=prod&tag=test"), 0, "{noun}");
        let refused = daemon.exchange("GET", &format!("/v1/{noun}?tag=a%20b"), &[], "");
        assert_eq!(refused.refusal(), (400, "invalid".into(), "tag".into()));
    }
    // The address of the next page has the filter.
    let vms = paths.iter().filter(|path| path.starts_with("/vms")).count();
    for name in ["a", "b"] {
        let asked = labelled(json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1 }));
        assert_eq!(daemon.post("/vms", asked).0, 201);
    }
    let page = daemon.exchange("GET", "/v1/vms?limit=2&tag=db&tag=prod", &[], "");
    assert_eq!(page.json().as_array().unwrap().len(), 1 + vms);
    assert!(page.header("link").unwrap().starts_with("</v1/vms?limit=2&tag=db&tag=prod&after="), "{page:?}");
}

#[test]
fn copies_of_a_disk_have_the_labels_of_their_request() {
    let (daemon, paths) = all_kinds();
    let (sr, vdi) = (paths[0].trim_start_matches("/srs/"), &paths[1]);
    for (verb, asked) in [("snapshot", json!({})), ("clone", json!({})), ("copy", json!({ "sr": sr }))] {
        let made = daemon.done(daemon.post(&format!("{vdi}/{verb}"), asked.clone()));
        assert_eq!(labels(&daemon, &format!("/vdis/{}", uuid(&made))), ("[]".into(), "{}".into()), "{verb}");
        let made = daemon.done(daemon.post(&format!("{vdi}/{verb}"), labelled(asked)));
        let path = format!("/vdis/{}", uuid(&made));
        assert_eq!(labels(&daemon, &path), (MADE.0.into(), MADE.1.into()), "{verb}");
    }
    disks::inventory_agrees(&daemon);
}
