//! Roles of tokens, and requesters: on each operation of the document, and in tasks and events.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::disks;
use crate::harness::tls::{Authority, token};
use crate::harness::{Taplined, start};

/// Operations that an operator may perform on objects with its tag. Each new one is a decision.
const OPERATED: [&str; 11] = [
    "vbd_limit",
    "vbd_plug",
    "vbd_unplug",
    "vdi_resize",
    "vdi_snapshot",
    "vm_pause",
    "vm_resume",
    "vm_shutdown",
    "vm_snapshot",
    "vm_start",
    "vm_suspend",
];

/// Operations that no token permits.
const OF_ROOT: [&str; 4] = ["token_create", "token_list", "token_revoke", "token_show"];

/// All operations of the document: method, path and operation ID.
fn operations(daemon: &Taplined) -> Vec<(String, String, String)> {
    let document = daemon.get("/openapi.json").1;
    let paths = document["paths"].as_object().unwrap().clone();
    let of_path = |(path, item): (String, Value)| {
        let methods = item.as_object().unwrap().clone();
        methods.into_iter().map(move |(method, one)| {
            (method.to_uppercase(), path.clone(), one["operationId"].as_str().unwrap().to_owned())
        })
    };
    paths.into_iter().flat_map(of_path).collect()
}

/// Objects of each kind, with or without a tag: their UUIDs, by their lists.
struct Objects([(&'static str, String); 3]);

impl Objects {
    fn new(daemon: &Taplined, sr: &str, name: &str, tags: &Value) -> Objects {
        let uuid = |object: &Value| object["uuid"].as_str().unwrap_or_else(|| panic!("{object}")).to_owned();
        let vdi = json!({ "sr": sr, "name": name, "size": 8 << 20, "tags": tags });
        let vdi = uuid(&daemon.done(daemon.post("/vdis", vdi)));
        let vm = json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "tags": tags });
        let vm = uuid(&daemon.post("/vms", vm).1);
        let vbd = uuid(&daemon.post("/vbds", json!({ "vdi": vdi, "vm": vm })).1);
        Objects([("vdis", vdi), ("vms", vm), ("vbds", vbd)])
    }

    /// A path of the document, filled with these objects.
    fn path(&self, path: &str) -> String {
        let of = self.0.iter().find(|(list, _)| path.starts_with(&format!("/v1/{list}/")));
        let other = "00000000-0000-4000-8000-000000000001";
        let uuid = of.map_or(other, |(_, uuid)| uuid);
        path.trim_start_matches("/v1").replace("{uuid}", uuid).replace("{snapshot}", other).replace("{code}", "busy")
    }
}

#[test]
fn each_operation_is_done_for_the_roles_that_may_and_refused_for_the_others() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let sr = daemon.repository("disks");
    let own = Objects::new(&daemon, &sr, "web", &json!(["prod", "web"]));
    let other = Objects::new(&daemon, &sr, "db", &json!(["prod"]));
    let secret = |asked: Value| token(&daemon, asked).1;
    let admin = secret(json!({ "name": "admin", "role": "admin" }));
    let operator = secret(json!({ "name": "ops", "role": "operator", "tag": "web" }));
    let reader = secret(json!({ "name": "monitor", "role": "reader" }));
    let all = operations(&daemon);
    assert!(all.len() > 70, "{}", all.len());
    for (method, path, operation) in &all {
        // It shows what is in a disk.
        let may_read = method == "GET" && !OF_ROOT.contains(&operation.as_str()) && operation != "download_read";
        let operates = OPERATED.contains(&operation.as_str());
        let cases = [
            (&admin, &own, !OF_ROOT.contains(&operation.as_str())),
            (&operator, &own, may_read || operates),
            (&operator, &other, may_read),
            (&reader, &own, may_read),
        ];
        for (number, (secret, objects, may)) in cases.into_iter().enumerate() {
            // Nothing is executed: an unknown parameter is checked after the role.
            let request = format!("{method} {}?no-such-parameter=1", objects.path(path));
            let answer = authority.ask(&daemon, Some(secret), &request, &Value::Null);
            let expected = match (may, OF_ROOT.contains(&operation.as_str())) {
                (true, _) => (400, "invalid"),
                (false, true) => (403, "forbidden"),
                (false, false) => (403, "missing-role"),
            };
            assert_eq!((answer.status, answer.code().as_str()), expected, "{operation}, case {number}: {answer:?}");
            assert_eq!(answer.head.contains("error=\"insufficient_scope\""), !may, "{answer:?}");
        }
    }
    let names: BTreeSet<&str> = all.iter().map(|(.., operation)| operation.as_str()).collect();
    assert!(OPERATED.iter().chain(&OF_ROOT).all(|operation| names.contains(operation)));
}

#[test]
fn an_operator_gives_no_tag_that_the_object_does_not_have() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let sr = daemon.repository("disks");
    let own = Objects::new(&daemon, &sr, "web", &json!(["web", "prod"]));
    let (_, secret) = token(&daemon, json!({ "name": "ops", "role": "operator", "tag": "web" }));
    let (_, vdi) = &own.0[0];
    let snapshot = |body: Value| authority.ask(&daemon, Some(&secret), &format!("POST /vdis/{vdi}/snapshot"), &body);
    for tags in [json!(["db"]), json!(["web", "db"])] {
        let refused = snapshot(json!({ "tags": tags }));
        assert_eq!((refused.status, refused.code().as_str()), (403, "missing-role"), "{refused:?}");
        assert!(refused.json()["detail"].as_str().unwrap().contains("'db'"), "{refused:?}");
    }
    let made = snapshot(json!({ "tags": ["prod", "web"] }));
    let made = daemon.done((made.status, made.json()));
    assert_eq!(daemon.get(&format!("/vdis/{}", made["uuid"].as_str().unwrap())).1["tags"], json!(["prod", "web"]));
    assert_eq!(snapshot(json!({ "tags": "db" })).code(), "invalid");
}

#[test]
fn an_operator_may_use_objects_with_its_tag_only() {
    let authority = Authority::new();
    let daemon = authority.start("");
    let sr = daemon.repository("disks");
    let own = Objects::new(&daemon, &sr, "web", &json!(["web"]));
    let (_, secret) = token(&daemon, json!({ "name": "ops", "role": "operator", "tag": "web" }));
    let ask = |request: &str, body: Value| authority.ask(&daemon, Some(&secret), request, &body);
    let [(_, vdi), (_, vm), (_, vbd)] = &own.0;
    let done = ask(&format!("POST /vdis/{vdi}/snapshot"), json!({}));
    daemon.done((done.status, done.json()));
    // A VBD without tags has those of its VM.
    let done = ask(&format!("POST /vbds/{vbd}/plug"), json!({}));
    daemon.done((done.status, done.json()));
    let done = ask(&format!("POST /vbds/{vbd}/unplug"), json!({}));
    daemon.done((done.status, done.json()));
    let refused = ask(&format!("DELETE /vms/{vm}"), json!({}));
    let problem = refused.json();
    assert_eq!((refused.status, &problem["type"]), (403, &json!("/v1/problems/missing-role")), "{problem}");
    let detail = "the token 'ops' has the role operator of objects with the tag 'web'; this needs the role admin";
    assert_eq!(problem["detail"], detail);
    // A connection to a console can type; its output may be read.
    assert_eq!(daemon.patch(&format!("/vms/{vm}"), json!({ "tags": [] })).0, 200);
    let mut talk = authority.connect(&daemon);
    let upgrade = "connection: Upgrade\r\nupgrade: tapline-console\r\n";
    crate::harness::tls::send(&mut talk, Some(&secret), &format!("GET /vms/{vm}/console"), &Value::Null, upgrade);
    let mut head = [0; 12];
    std::io::Read::read_exact(&mut talk, &mut head).unwrap();
    assert_eq!(&head, b"HTTP/1.1 403");
    assert_eq!(ask(&format!("GET /vms/{vm}/console"), Value::Null).code(), "state");
    assert_eq!(ask("POST /vdis/00000000-0000-4000-8000-000000000001/snapshot", json!({})).status, 404);
    // A foreign object, whose UUID is encoded so that it is not recognized.
    let other = Objects::new(&daemon, &sr, "db", &json!([]));
    let [(_, vdi), ..] = &other.0;
    let digit = u32::from(vdi.as_bytes()[0]);
    let path = format!("/vdis/%{digit:x}{}/snapshot", &vdi[1..]);
    assert_eq!(ask(&format!("POST {path}"), json!({})).code(), "missing-role");
    assert_eq!(daemon.get(&format!("/vdis?snapshot_of={vdi}")).1, json!([]));
    disks::nothing_leaked(&daemon);
}

#[test]
fn tasks_and_events_have_a_requester_even_after_a_restart() {
    let authority = Authority::new();
    let mut daemon = authority.start("");
    let sr = daemon.repository("disks");
    let (_, secret) = token(&daemon, json!({ "name": "ci" }));
    let reset = daemon.text("/events?after=0&limit=1");
    let last = reset.lines().find_map(|line| line.strip_prefix("id: ")).unwrap().to_owned();
    let asked = json!({ "sr": sr, "name": "web", "size": 8 << 20 });
    let made = authority.ask(&daemon, Some(&secret), "POST /vdis", &asked);
    let by_token = made.json();
    let vdi = daemon.done((made.status, by_token.clone()));
    let by_root = daemon.post(&format!("/vdis/{}/snapshot", vdi["uuid"].as_str().unwrap()), json!({})).1;
    daemon.wait(&by_root);
    assert_eq!(daemon.patch(&format!("/srs/{sr}"), json!({ "description": "fast" })).0, 200);
    let uid = rustix::process::geteuid().as_raw();
    let user = &by_root["requester"];
    assert_eq!((&user["type"], &user["uid"]), (&json!("user"), &json!(uid)), "{by_root}");
    assert!(uid != 0 || user["name"] == "root", "{user}");
    let token = json!({ "type": "token", "name": "ci" });
    assert_eq!(by_token["requester"], token);
    let seen = daemon.text(&format!("/events?after={last}&limit=12"));
    let events: Vec<Value> = seen
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let of = |uuid: &str| events.iter().filter(move |event| event["uuid"] == uuid).collect::<Vec<_>>();
    // Created by the task, on behalf of the token.
    let made = of(vdi["uuid"].as_str().unwrap());
    assert!(made.first().is_some_and(|event| event["requester"] == token), "{events:?}");
    for (task, requester) in [(&by_token, &token), (&by_root, user)] {
        let path = format!("/tasks/{}", task["uuid"].as_str().unwrap());
        assert_eq!(&daemon.get(&path).1["requester"], requester);
    }
    daemon.restart();
    let path = format!("/tasks/{}", by_token["uuid"].as_str().unwrap());
    assert_eq!(daemon.get(&path).1["requester"], token);
}

#[test]
fn a_token_has_one_role_and_an_operator_a_tag() {
    let daemon = start();
    let refused = |asked: Value| {
        let (status, problem) = daemon.post("/tokens", asked);
        (status, problem["field"].as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(refused(json!({ "name": "a", "role": "operator" })), (400, "tag".into()));
    assert_eq!(refused(json!({ "name": "a", "role": "reader", "tag": "web" })), (400, "tag".into()));
    assert_eq!(refused(json!({ "name": "a", "role": "admin", "read_only": true })), (400, "read_only".into()));
    assert_eq!(refused(json!({ "name": "a", "role": "root" })), (400, "role".into()));
    let made = |asked: Value| daemon.post("/tokens", asked).1["token"].clone();
    let reader = made(json!({ "name": "a", "read_only": true }));
    assert_eq!((&reader["role"], &reader["read_only"]), (&json!("reader"), &json!(true)));
    let admin = made(json!({ "name": "b" }));
    assert_eq!((&admin["role"], &admin["read_only"]), (&json!("admin"), &json!(false)));
    let operator = made(json!({ "name": "c", "role": "operator", "tag": "web" }));
    assert_eq!((&operator["role"], &operator["tag"]), (&json!("operator"), &json!("web")));
}
