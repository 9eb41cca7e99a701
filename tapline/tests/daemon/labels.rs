//! Tests of tags and `other_config` strings on the command line.

use serde_json::{Value, json};

use crate::objects::{sr, vbd, vdi, vm};
use crate::play::{Played, ok, out};

const SR: &str = "00005e00-0000-0000-0000-000000000001";
const VDI: &str = "0000d100-0000-0000-0000-000000000001";
const VBD: &str = "0000bd00-0000-0000-0000-000000000001";
const VM: &str = "00004a00-0000-0000-0000-000000000001";

fn tags(tags: &[&str]) -> api::Tags {
    serde_json::from_value(json!(tags)).unwrap()
}

#[test]
fn lists_request_objects_with_all_tags() {
    let query = "tag=prod&tag=db";
    let played = Played::new([
        ok("GET", &format!("srs?{query}"), &[sr(1, "fast")]),
        ok("GET", &format!("vdis?match=web&{query}"), &[vdi(1, "web")]),
        ok("GET", &format!("vbds?{query}"), &[vbd(1)]),
        ok("GET", &format!("vms?{query}"), &[vm(1, "web")]),
    ]);
    for words in [&["sr", "list"][..], &["vdi", "list", "web"], &["vbd", "list"], &["vm", "list"]] {
        let words = [words, &["--tag", "prod", "--tag", "db", "--output", "uuid"]].concat();
        assert!(out(&played.run(&words)).ends_with("0001\n"), "{words:?}");
    }
    played.received();
}

#[test]
fn wide_tables_and_show_have_the_tags() {
    let other_config = serde_json::from_value(json!({ "backup": "nightly", "owner": "ops" })).unwrap();
    let web = api::Vm { tags: tags(&["prod", "db"]), other_config, ..vm(1, "web") };
    let path = format!("vms/{VM}");
    let played = Played::new([ok("GET", "vms", &[&web]), ok("GET", "vms", &[&web]), ok("GET", &path, &web)]);
    assert!(out(&played.run(&["vm", "list", "--wide"])).contains("db,prod"));
    assert_eq!(out(&played.run(&["vm", "list", "--columns", "name,tags"])), "NAME  TAGS\nweb   db,prod\n");
    let shown = out(&played.run(&["vm", "show", VM]));
    let lines = ["        tags: db,prod\n", "other config: backup=nightly\n              owner=ops\n"];
    assert!(lines.iter().all(|line| shown.contains(line)), "{shown}");
}

#[test]
fn set_changes_single_tags_and_keys_of_an_object() {
    let labelled = tags(&["a", "b"]);
    let other_config: api::OtherConfig = serde_json::from_value(json!({ "k": "1" })).unwrap();
    let vdi = api::Vdi { tags: labelled.clone(), other_config: other_config.clone(), ..vdi(1, "web") };
    let sr = api::Sr { tags: labelled.clone(), other_config: other_config.clone(), ..sr(1, "fast") };
    let vbd = api::Vbd { tags: labelled.clone(), other_config: other_config.clone(), ..vbd(1) };
    let vm = api::Vm { tags: labelled, other_config, ..vm(1, "web") };
    let twice = |path: String, object: Value| [ok("GET", &path, &object), ok("PATCH", &path, &object)];
    let all = [("sr", SR, json!(sr)), ("vdi", VDI, json!(vdi)), ("vbd", VBD, json!(vbd)), ("vm", VM, json!(vm))];
    for (noun, uuid, object) in all {
        let path = format!("{noun}s/{uuid}");
        let played = Played::new([twice(path.clone(), object.clone()), twice(path, object)].into_iter().flatten());
        assert_eq!(out(&played.run(&[noun, "set", uuid, "--tag", "c", "--no-tag", "a"])), "");
        assert_eq!(out(&played.run(&[noun, "set", uuid, "--config", "x=a=b", "--no-config", "k"])), "");
        let asked = played.received();
        assert_eq!(asked[1].body, json!({ "tags": ["b", "c"] }), "{noun}");
        assert_eq!(asked[3].body, json!({ "other_config": { "x": "a=b" } }), "{noun}");
    }
}

#[test]
fn new_objects_have_the_given_labels() {
    let made = |target: &str, object: Value| ok("POST", target, &object);
    let played = Played::new([
        made("srs", json!(sr(1, "fast"))),
        made("vdis", json!(vdi(1, "web"))),
        made(&format!("vdis/{VDI}/snapshot"), json!(vdi(1, "web"))),
        made("vbds", json!(vbd(1))),
        made("vms", json!(vm(1, "web"))),
    ]);
    let words: [&[&str]; 5] = [
        &["sr", "create", "fast", "--dir", "/srv"],
        &["vdi", "create", "web", "--sr", SR, "--size", "1G"],
        &["vdi", "snapshot", VDI],
        &["vbd", "create", "--vdi", VDI],
        &["vm", "create", "web"],
    ];
    for words in words {
        out(&played.run(&[words, &["--tag", "b", "--tag", "a", "--config", "k=v"]].concat()));
    }
    for asked in played.received() {
        let labels = (&asked.body["tags"], &asked.body["other_config"]);
        assert_eq!(labels, (&json!(["a", "b"]), &json!({ "k": "v" })), "{}", asked.what);
    }
}

#[test]
fn invalid_tags_are_refused_before_any_request() {
    let played = Played::new([]);
    for words in [["vm", "list", "--tag", "a b"], ["vdi", "list", "--tag", ""], ["sr", "list", "--tag", "a,b"]] {
        assert_eq!(played.run(&words).status.code(), Some(64), "{words:?}");
    }
    assert!(played.received().is_empty());
}
