//! Common properties of the API: problems, content types, locations, entity tags, keys, chosen UUIDs, and its
//! self-description.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{ABORT_AT, Exchange, Taplined, start, start_with};

const JSON: (&str, &str) = ("content-type", "application/json");

fn machine(name: &str) -> Value {
    json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })
}

fn refused(status: u16, code: &str, field: &str) -> (u16, String, String) {
    (status, code.into(), field.into())
}

fn post(daemon: &Taplined, path: &str, headers: &[(&str, &str)], body: &Value) -> Exchange {
    daemon.exchange("POST", path, &[headers, &[JSON]].concat(), &body.to_string())
}

fn tag(daemon: &Taplined, path: &str) -> String {
    daemon.exchange("GET", path, &[], "").header("etag").unwrap().to_owned()
}

/// Creates a VM; returns its path.
fn vm(daemon: &Taplined, name: &str) -> String {
    post(daemon, "/v1/vms", &[], &machine(name)).header("location").unwrap().to_owned()
}

#[test]
fn a_refusal_is_a_problem_whose_type_the_daemon_describes() {
    let daemon = start();
    let vm = vm(&daemon, "web");
    let nothing = uuid::Uuid::new_v4();
    let asked = [
        (daemon.exchange("GET", &format!("/v1/vms/{nothing}"), &[], ""), refused(404, "not-found", "")),
        (daemon.exchange("GET", "/v1/vms/7", &[], ""), refused(400, "invalid", "uuid")),
        (daemon.exchange("GET", "/v1/nothing", &[], ""), refused(404, "not-found", "")),
        (daemon.exchange("PUT", &vm, &[JSON], "{}"), refused(405, "method", "")),
        (daemon.exchange("PATCH", &vm, &[JSON], "{\"vcpus\":0}"), refused(400, "invalid", "vcpus")),
        (daemon.exchange("PATCH", &vm, &[JSON], "{"), refused(400, "malformed", "")),
    ];
    for (answer, expected) in asked {
        assert_eq!(answer.refusal(), expected, "{answer:?}");
        let problem = answer.json();
        let (status, known) = daemon.get(problem["type"].as_str().unwrap().strip_prefix("/v1").unwrap());
        assert_eq!((status, &known["type"], &known["status"]), (200, &problem["type"], &problem["status"]), "{known}");
        assert_eq!(known["title"], problem["title"]);
    }
    assert_eq!(daemon.exchange("GET", "/v1/problems/on-fire", &[], "").refusal(), refused(404, "not-found", ""));
}

#[test]
fn a_method_that_a_path_does_not_have_is_answered_with_those_that_it_has() {
    let daemon = start();
    let allowed = |path: &str| -> BTreeSet<String> {
        // Whatever else is wrong with the request.
        let headers = [("if-none-match", "\"a\""), ("if-match", "a"), ("idempotency-key", "k")];
        let answer = daemon.exchange("PUT", path, &headers, "");
        assert_eq!(answer.refusal(), refused(405, "method", ""));
        answer.header("allow").unwrap().split(',').map(|word| word.trim().to_owned()).collect()
    };
    let these = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(allowed("/v1/vdis"), these(&["GET", "HEAD", "POST"]));
    assert_eq!(allowed(&format!("/v1/vms/{}", uuid::Uuid::nil())), these(&["DELETE", "GET", "HEAD", "PATCH"]));
    assert_eq!(allowed("/v1/host/drain"), these(&["POST"]));
}

#[test]
fn a_body_must_be_json_and_an_operation_without_fields_takes_none() {
    let daemon = start();
    let body = machine("web").to_string();
    for wrong in ["text/plain", "application/x-www-form-urlencoded", "application/xml; charset=utf-8", "nonsense"] {
        let answer = daemon.exchange("POST", "/v1/vms", &[("content-type", wrong)], &body);
        assert_eq!(answer.refusal(), refused(415, "media-type", "content-type"), "{wrong}");
        assert_eq!(answer.header("accept"), Some("application/json"));
    }
    assert_eq!(daemon.get("/vms").1, json!([]));
    for right in [&[("content-type", "Application/JSON; charset=utf-8")][..], &[]] {
        let body = machine(&format!("web {}", right.len())).to_string();
        assert_eq!(daemon.exchange("POST", "/v1/vms", right, &body).status, 201);
    }
    let start = format!("{}/start", vm(&daemon, "db"));
    assert_eq!(post(&daemon, &start, &[], &json!({ "force": true })).refusal(), refused(400, "invalid", ""));
    assert_eq!(daemon.exchange("POST", &start, &[JSON], "force").refusal(), refused(400, "malformed", ""));
    assert_eq!(daemon.exchange("POST", &start, &[("content-type", "text/plain")], "x").status, 415);
}

#[test]
fn created_objects_and_tasks_have_a_location() {
    let daemon = start();
    let sr = daemon.repository("sr");
    let disk = json!({ "sr": sr, "name": "web", "size": 1 << 20 });
    for _ in 0..2 {
        // The second response is a replay of the first.
        let begun = post(&daemon, "/v1/vdis", &[("idempotency-key", "disk")], &disk);
        let location = begun.header("location").unwrap().to_owned();
        assert_eq!(location, format!("/v1/tasks/{}", begun.json()["uuid"].as_str().unwrap()));
        assert_eq!(daemon.exchange("GET", &location, &[], "").json()["verb"], "vdi-create");
        let made = post(&daemon, "/v1/vms", &[("idempotency-key", "machine")], &machine("web"));
        let location = made.header("location").unwrap();
        assert_eq!(location, format!("/v1/vms/{}", made.json()["uuid"].as_str().unwrap()));
        assert_eq!(daemon.exchange("GET", location, &[], "").json(), made.json());
        daemon.settle();
    }
    let made = post(&daemon, "/v1/tokens", &[], &json!({ "name": "backup" }));
    let shown = daemon.exchange("GET", made.header("location").unwrap(), &[], "");
    assert_eq!(shown.json(), made.json()["token"]);
}

/// Creates objects of each kind; returns their paths.
fn objects(daemon: &Taplined) -> Vec<String> {
    let sr = daemon.repository("sr");
    let begun = daemon.post("/vdis", json!({ "sr": sr, "name": "web", "size": 1 << 20 }));
    let task = begun.1["uuid"].as_str().unwrap().to_owned();
    let vdi = daemon.done(begun)["uuid"].as_str().unwrap().to_owned();
    daemon.settle();
    let vm = vm(daemon, "web");
    let vbd = post(daemon, "/v1/vbds", &[], &json!({ "vdi": vdi, "vm": vm.rsplit('/').next() }));
    let vbd = vbd.header("location").unwrap().to_owned();
    vec![format!("/v1/srs/{sr}"), format!("/v1/vdis/{vdi}"), vbd, vm, format!("/v1/tasks/{task}")]
}

#[test]
fn an_object_that_the_client_has_is_not_sent_again() {
    let daemon = start();
    for path in objects(&daemon) {
        // Repeated if the object has changed meanwhile: a repository does when its free space is measured.
        loop {
            let whole = daemon.exchange("GET", &path, &[], "");
            let tag = whole.header("etag").unwrap_or_else(|| panic!("{path}"));
            assert!(tag.starts_with('"') && tag.ends_with('"') && tag.len() > 16, "{tag}");
            let known = [tag.to_owned(), format!("W/{tag}"), format!("\"a,b\", {tag}"), "*".into()];
            let known = known.map(|known| daemon.exchange("GET", &path, &[("if-none-match", &known)], ""));
            let other = daemon.exchange("GET", &path, &[("if-none-match", "\"a\"")], "");
            let head = daemon.exchange("HEAD", &path, &[], "");
            let matched = daemon.exchange("GET", &path, &[("if-match", tag)], "").status;
            if daemon.exchange("GET", &path, &[], "").body != whole.body {
                continue;
            }
            for none in known {
                assert_eq!((none.status, none.header("etag"), &*none.body), (304, Some(tag), ""), "{path}");
            }
            assert_eq!((other.status, &other.body, matched), (200, &whole.body, 200));
            assert_eq!((head.status, head.header("etag"), &*head.body), (200, Some(tag), ""), "{path}");
            break;
        }
        let wrong = daemon.exchange("GET", &path, &[("if-none-match", "a")], "");
        assert_eq!(wrong.refusal(), refused(400, "invalid", "if-none-match"));
        assert_eq!(daemon.exchange("GET", &path, &[("if-match", "\"a\"")], "").refusal().0, 412);
    }
    assert_eq!(daemon.exchange("GET", "/v1/vdis", &[], "").header("etag"), None);
    assert!(daemon.exchange("GET", "/v1/openapi.json", &[], "").header("etag").is_some());
}

#[test]
fn a_change_of_an_object_that_has_changed_is_refused() {
    let daemon = start();
    let objects = objects(&daemon);
    let (vdi, vbd, vm) = (&objects[1], &objects[2], &objects[3]);
    let patches = [
        (&objects[0], json!({ "description": "new" })),
        (vdi, json!({ "description": "new" })),
        (vm, json!({ "description": "new" })),
    ];
    for (path, patch) in patches {
        let old = tag(&daemon, path);
        let patch = patch.to_string();
        for wrong in ["\"a\"", &format!("W/{old}"), "\"a\", \"b\""] {
            let answer = daemon.exchange("PATCH", path, &[JSON, ("if-match", wrong)], &patch);
            assert_eq!(answer.refusal(), refused(412, "changed", "if-match"), "{path} {wrong}");
            assert!(answer.json()["advice"].as_str().unwrap().contains("get it again"), "{answer:?}");
        }
        assert_eq!(tag(&daemon, path), old, "a refused change has changed {path}");
        let several = format!("\"a\", {old}");
        assert_eq!(daemon.exchange("PATCH", path, &[JSON, ("if-match", &several)], &patch).status, 200, "{path}");
        assert_eq!(daemon.exchange("PATCH", path, &[JSON, ("if-match", &old)], &patch).refusal().0, 412, "{path}");
        assert_eq!(daemon.exchange("PATCH", path, &[JSON, ("if-match", "*")], &patch).status, 200, "{path}");
    }
    // Verbs and destruction; only the last has the right tag.
    for (method, path) in
        [("POST", format!("{vdi}/snapshot")), ("POST", format!("{vbd}/plug")), ("DELETE", vbd.clone())]
    {
        assert_eq!(daemon.exchange(method, &path, &[("if-match", "\"a\"")], "").refusal().0, 412, "{path}");
    }
    let known = tag(&daemon, vdi);
    let begun = daemon.exchange("POST", &format!("{vdi}/snapshot"), &[("if-match", &known)], "");
    daemon.done((begun.status, begun.json()));
    let known = tag(&daemon, vbd);
    assert_eq!(daemon.exchange("DELETE", vbd, &[("if-match", &known)], "").status, 204);
    assert_eq!(daemon.exchange("DELETE", vbd, &[("if-match", "*")], "").refusal().0, 404);
}

#[test]
fn a_condition_where_there_is_no_tag_is_refused_and_not_ignored() {
    let daemon = start();
    let vm = vm(&daemon, "web");
    let field = |method: &str, path: &str, header: (&str, &str)| {
        let answer = daemon.exchange(method, path, &[header], "");
        let (status, code, field) = answer.refusal();
        assert_eq!((status, &*code), (400, "invalid"), "{method} {path}");
        field
    };
    assert_eq!(field("POST", "/v1/host/backups", ("if-match", "\"a\"")), "if-match");
    assert_eq!(field("GET", "/v1/vms", ("if-match", "\"a\"")), "if-match");
    assert_eq!(field("DELETE", &vm, ("if-match", "a")), "if-match");
    assert_eq!(field("DELETE", &vm, ("if-match", "\"a\" \"b\"")), "if-match");
    assert_eq!(field("DELETE", &vm, ("if-none-match", "*")), "if-none-match");
    assert_eq!(daemon.exchange("DELETE", &vm, &[], "").status, 204);
}

#[test]
fn of_changes_at_the_same_time_with_one_tag_one_is_made() {
    let daemon = start();
    let vm = vm(&daemon, "web");
    for round in 0..5 {
        let known = tag(&daemon, &vm);
        let statuses: Vec<u16> = std::thread::scope(|scope| {
            let ask = |at: usize| {
                let patch = json!({ "description": format!("{round} {at}") }).to_string();
                daemon.exchange("PATCH", &vm, &[JSON, ("if-match", &known)], &patch).status
            };
            let asking: Vec<_> = (0..8).map(|at| scope.spawn(move || ask(at))).collect();
            asking.into_iter().map(|asked| asked.join().unwrap()).collect()
        });
        let made = statuses.iter().filter(|status| **status == 200).count();
        assert!(made == 1 && statuses.iter().all(|status| [200, 412].contains(status)), "{statuses:?}");
    }
}

/// The daemon dies after a change is recorded and before it responds: a repeated request has been carried out,
/// although the object has changed or is gone.
#[test]
fn a_change_is_made_once_although_the_daemon_dies_before_it_answers() {
    let mut daemon = start_with("", &[(ABORT_AT, "request:answer")]);
    let vm = vm(&daemon, "web");
    let known = tag(&daemon, &vm);
    let made = json!({ "name": "db", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 }).to_string();
    let renamed = json!({ "name": "web2" }).to_string();
    let asked = [
        ("POST", "/v1/vms".to_owned(), vec![], made, 201),
        ("PATCH", vm.clone(), vec![("if-match", known.as_str())], renamed, 200),
        ("DELETE", vm.clone(), vec![], String::new(), 204),
    ];
    for (at, (method, path, mut headers, body, expected)) in asked.into_iter().enumerate() {
        let key = at.to_string();
        headers.extend([JSON, ("idempotency-key", key.as_str())]);
        assert_eq!(daemon.exchange(method, &path, &headers, &body).status, 0, "{method} was answered");
        daemon.wait_for_death();
        daemon.restart();
        let again = daemon.exchange(method, &path, &headers, &body);
        assert_eq!((again.status, again.header("idempotent-replayed")), (expected, Some("true")), "{method} {again:?}");
        let other = post(&daemon, "/v1/vms", &[("idempotency-key", key.as_str())], &machine("other"));
        assert_eq!(other.refusal(), refused(422, "key-reused", "idempotency-key"), "{method}");
        daemon.restart_with(&[(ABORT_AT, "request:answer")]);
    }
    let vms = daemon.get("/vms").1;
    assert_eq!(vms.as_array().unwrap().iter().map(|vm| &vm["name"]).collect::<Vec<_>>(), ["db"]);
}

#[test]
fn a_condition_that_fails_uses_up_no_key() {
    let daemon = start();
    let vm = vm(&daemon, "web");
    let patch = json!({ "name": "db" }).to_string();
    let key = ("idempotency-key", "k");
    assert_eq!(daemon.exchange("PATCH", &vm, &[JSON, key, ("if-match", "\"a\"")], &patch).status, 412);
    let known = tag(&daemon, &vm);
    let patched = daemon.exchange("PATCH", &vm, &[JSON, key, ("if-match", &known)], &patch);
    assert_eq!((patched.status, patched.header("idempotent-replayed")), (200, None));
}

#[test]
fn a_client_may_choose_the_uuid_of_what_it_creates() {
    let daemon = start();
    let [sr, vdi, copy, vbd, vm, token] = [(); 6].map(|()| uuid::Uuid::new_v4().to_string());
    let path = daemon.room().join("sr");
    std::fs::create_dir(&path).unwrap();
    let source = json!({ "type": "dir", "path": path });
    daemon.done(daemon.post("/srs", json!({ "uuid": sr, "name": "sr", "source": source })));
    let disk = |uuid: &str| json!({ "uuid": uuid, "sr": sr, "name": "web", "size": 1 << 20 });
    assert_eq!(daemon.done(daemon.post("/vdis", disk(&vdi)))["uuid"], vdi.as_str());
    let copied = daemon.post(&format!("/vdis/{vdi}/copy"), json!({ "uuid": copy, "sr": sr }));
    assert_eq!(daemon.done(copied)["uuid"], copy.as_str());
    let mut asked = machine("web");
    asked["uuid"] = json!(vm);
    assert_eq!(daemon.post("/vms", asked.clone()).1["uuid"], vm.as_str());
    assert_eq!(daemon.post("/vbds", json!({ "uuid": vbd, "vdi": vdi, "vm": vm })).1["uuid"], vbd.as_str());
    let made = daemon.post("/tokens", json!({ "uuid": token, "name": "backup" }));
    assert_eq!(made.1["token"]["uuid"], token.as_str());
    // Whatever object has the UUID or is to get it.
    for taken in [&sr, &vdi, &copy, &vbd, &vm, &token] {
        asked["uuid"] = json!(taken);
        let image = json!({ "uuid": taken });
        let all = [
            ("/v1/vms".to_owned(), asked.clone()),
            ("/v1/vdis".into(), disk(taken)),
            (format!("/v1/vdis/{vdi}/snapshot"), image.clone()),
            (format!("/v1/vdis/{vdi}/clone"), image),
            (format!("/v1/vdis/{vdi}/copy"), json!({ "uuid": taken, "sr": sr })),
            ("/v1/vbds".into(), json!({ "uuid": taken, "vdi": vdi })),
            ("/v1/tokens".into(), json!({ "uuid": taken, "name": "other" })),
        ];
        for (path, body) in all {
            assert_eq!(post(&daemon, &path, &[], &body).refusal(), refused(409, "exists", "uuid"), "{path}");
        }
    }
    for nothing in ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "7"] {
        let answer = post(&daemon, "/v1/vdis", &[], &disk(nothing));
        assert_eq!(answer.refusal(), refused(400, "invalid", "uuid"), "{nothing}");
    }
    daemon.settle();
    assert_eq!(daemon.get("/vdis").1.as_array().unwrap().len(), 2);
}

#[test]
fn of_two_disks_with_one_uuid_one_is_created() {
    let daemon = start();
    let sr = daemon.repository("sr");
    let disk = json!({ "uuid": uuid::Uuid::new_v4(), "sr": sr, "name": "web", "size": 1 << 20 });
    let answers: Vec<(u16, Value)> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| daemon.post("/vdis", disk.clone()))).collect();
        asking.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let begun: Vec<_> = answers.iter().filter(|(status, _)| *status == 202).collect();
    assert!(begun.len() == 1 && answers.iter().all(|(status, _)| [202, 409].contains(status)), "{answers:?}");
    assert_eq!(daemon.done(begun[0].clone())["uuid"], disk["uuid"]);
}

#[test]
fn the_daemon_describes_its_api_without_a_file() {
    let daemon = start();
    let (status, index) = daemon.get("");
    assert_eq!((status, index["name"].as_str()), (200, Some("taplined")));
    for (name, path) in index["links"].as_object().unwrap() {
        let path = path.as_str().unwrap();
        // The stream of events is endless.
        let limit = if name == "events" { "?after=0&limit=1" } else { "" };
        assert_eq!(daemon.exchange("GET", &format!("{path}{limit}"), &[], "").status, 200, "{path}");
    }
    let document = daemon.exchange("GET", "/v1/openapi.json", &[], "");
    assert_eq!(document.header("content-type"), Some("application/json"));
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    assert!(document.body == std::fs::read_to_string(committed).unwrap(), "it differs from {committed}");
    let page = daemon.exchange("GET", "/v1/docs", &[], "");
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(page.header("content-security-policy").unwrap().starts_with("default-src 'none'"));
    for foreign in ["http://", "https://", "src=", "@import", "innerHTML"] {
        assert!(!page.body.contains(foreign), "{foreign}");
    }
    assert_eq!(page.body.matches("fetch(").count(), 1);
}

#[test]
fn a_refusal_by_headers_is_received_whatever_the_body_length() {
    let daemon = start();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 1 << 20 });
    let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    let (path, long) = (format!("/v1/vdis/{vdi}"), json!({ "description": "x".repeat(32 << 20) }).to_string());
    for (header, status) in [(("If-Match", "\"another\""), 412), (("Content-Type", "text/plain"), 415)] {
        let answer = daemon.exchange("PATCH", &path, &[header], &long);
        assert_eq!(answer.refusal().0, status, "{header:?}");
    }
    // Also one that is too long for any request.
    let (status, code, _) = daemon.exchange("PATCH", &path, &[], &long).refusal();
    assert_eq!((status, code.as_str()), (400, "malformed"));
}
