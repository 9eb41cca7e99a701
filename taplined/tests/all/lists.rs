//! Pages and filters of lists, and of the stream of events.

use serde_json::{Value, json};

use crate::harness::{Taplined, start};

/// All objects of a list, page by page, and the number of pages.
fn pages(daemon: &Taplined, first: &str) -> (Vec<Value>, usize) {
    let (mut all, mut count, mut at) = (Vec::new(), 0, Some(first.to_owned()));
    while let Some(path) = at {
        let page = daemon.exchange("GET", &path, &[], "");
        assert_eq!(page.status, 200, "{page:?}");
        let link = page.header("link");
        all.extend(page.json().as_array().unwrap().clone());
        count += 1;
        at = link.map(|link| {
            let (path, rest) = link.strip_prefix('<').unwrap().split_once('>').unwrap();
            assert_eq!(rest, "; rel=\"next\"");
            path.to_owned()
        });
    }
    (all, count)
}

#[track_caller]
fn refused(daemon: &Taplined, path: &str, field: &str) {
    let answer = daemon.exchange("GET", path, &[], "");
    let (status, code, named) = answer.refusal();
    assert_eq!((status, &*code), (400, "invalid"), "{path}: {answer:?}");
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(named == field || detail.contains(field), "{path}: {answer:?}");
}

/// Every list of the document, with a valid path.
fn lists(daemon: &Taplined) -> Vec<String> {
    let document = daemon.get("/openapi.json").1;
    let paths = document["paths"].as_object().unwrap().iter();
    let has_limit = |item: &Value| {
        let parameters = item["get"]["parameters"].as_array();
        parameters.is_some_and(|all| all.iter().any(|one| one["name"] == "limit"))
    };
    let vm = daemon.post("/vms", json!({ "name": "guest", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })).1;
    let vm = vm["uuid"].as_str().unwrap();
    paths.filter(|(_, item)| has_limit(item)).map(|(path, _)| path.replace("{uuid}", vm)).collect()
}

#[test]
fn every_list_has_pages_and_refuses_invalid_parameters() {
    let daemon = start();
    let lists = lists(&daemon);
    let known = ["host/backups", "problems", "srs", "tasks", "tokens", "vbds", "vdis", "vms"];
    for noun in known {
        assert!(lists.contains(&format!("/v1/{noun}")), "{noun} is no list in {lists:?}");
    }
    for path in lists {
        for wrong in ["0", "1001", "-1", "x", ""] {
            refused(&daemon, &format!("{path}?limit={wrong}"), "limit");
        }
        refused(&daemon, &format!("{path}?limit=1&limit=2"), "limit");
        refused(&daemon, &format!("{path}?sise=1"), "sise");
        refused(&daemon, &format!("{path}?after={}&sise", uuid::Uuid::nil()), "sise");
        // A position among backups is sought on the target, which does not exist here.
        if path != "/v1/events" && !path.starts_with("/v1/backup-targets/") {
            refused(&daemon, &format!("{path}?after={}", uuid::Uuid::new_v4()), "after");
        }
    }
    // Other operations have their own parameters or none, whatever the method.
    refused(&daemon, "/v1/host?limit=1", "limit");
    refused(&daemon, &format!("/v1/vdis/{}?wait=1", uuid::Uuid::nil()), "wait");
    let made = daemon.exchange("POST", "/v1/host/backups?dry_run=true", &[], "");
    assert_eq!(made.refusal(), (400, "invalid".into(), "dry_run".into()));
}

#[test]
fn pages_together_are_the_list() {
    let daemon = start();
    let vm = |name: &str| json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
    for at in 0..7 {
        assert_eq!(daemon.post("/vms", vm(&format!("vm{at}"))).0, 201);
    }
    let whole = daemon.get("/vms").1;
    for (limit, count) in [(1, 7), (3, 3), (7, 1), (1000, 1)] {
        let (all, pages) = pages(&daemon, &format!("/v1/vms?limit={limit}"));
        assert_eq!((&Value::Array(all), pages), (&whole, count), "{limit}");
    }
    // The links keep the filter.
    let (some, count) = pages(&daemon, "/v1/vms?power=halted&limit=4");
    assert_eq!((some.len(), count), (7, 2));
    // An object created between two pages neither repeats nor hides others.
    let first = daemon.get("/vms?limit=3").1;
    let last = first[2]["uuid"].as_str().unwrap().to_owned();
    assert_eq!(daemon.post("/vms", vm("a")).0, 201);
    let rest = daemon.get(&format!("/vms?after={last}")).1;
    assert_eq!(rest.as_array().unwrap()[..], whole.as_array().unwrap()[3..]);
    assert_eq!(daemon.delete(&format!("/vms/{last}")).0, 204);
    refused(&daemon, &format!("/v1/vms?after={last}"), "after");
    // Backups are identified by their files.
    for _ in 0..2 {
        assert_eq!(daemon.post("/host/backups", json!({})).0, 201);
    }
    let (backups, _) = pages(&daemon, "/v1/host/backups?limit=1");
    assert_eq!(Value::Array(backups), daemon.get("/host/backups").1);
}

#[test]
fn lists_are_filtered_by_what_objects_have() {
    let daemon = start();
    let (one, two) = (daemon.repository("one"), daemon.repository("two"));
    let disk = |sr: &str, name: &str| {
        let made = daemon.post("/vdis", json!({ "sr": sr, "name": name, "size": 1 << 20 }));
        daemon.done(made)["uuid"].as_str().unwrap().to_owned()
    };
    let (web, db) = (disk(&one, "web"), disk(&two, "db"));
    let kept = daemon.done(daemon.post(&format!("/vdis/{web}/snapshot"), json!({ "name": "kept" })));
    let vm = daemon.post("/vms", json!({ "name": "web", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })).1;
    let vm = vm["uuid"].as_str().unwrap();
    let (of_vm, free) =
        (daemon.post("/vbds", json!({ "vdi": web, "vm": vm })), daemon.post("/vbds", json!({ "vdi": db })));
    let found = |path: &str| -> Vec<Value> {
        let (status, list) = daemon.get(path);
        assert_eq!(status, 200, "{path}: {list}");
        list.as_array().unwrap().iter().map(|one| one["uuid"].clone()).collect()
    };
    let (of_vm, free) = (&of_vm.1["uuid"], &free.1["uuid"]);
    let cases = [
        ("/srs?name=one".into(), vec![json!(one)]),
        ("/srs?state=lost".into(), vec![]),
        ("/srs?type=dir&match=two".into(), vec![json!(two)]),
        ("/srs?type=nfs".into(), vec![]),
        (format!("/vdis?sr={two}"), vec![json!(db)]),
        (format!("/vdis?vm={vm}"), vec![json!(web)]),
        (format!("/vdis?snapshot_of={web}"), vec![kept["uuid"].clone()]),
        (format!("/vdis?name=web&sr={two}"), vec![]),
        ("/vdis?name=we".into(), vec![]),
        ("/vdis?state=damaged".into(), vec![]),
        (format!("/vbds?vm={vm}&state=unplugged"), vec![of_vm.clone()]),
        (format!("/vbds?vdi={db}"), vec![free.clone()]),
        (format!("/vbds?sr={one}"), vec![of_vm.clone()]),
        ("/vbds?state=plugged".into(), vec![]),
        ("/vms?power=halted&name=web".into(), vec![json!(vm)]),
        ("/vms?power=running".into(), vec![]),
        ("/tasks?state=failed".into(), vec![]),
    ];
    for (path, expected) in cases {
        assert_eq!(found(&path), expected, "{path}");
    }
    daemon.settle();
    assert_eq!(found(&format!("/tasks?about={web}&verb=vdi-snapshot&state=done")).len(), 1);
    assert_eq!(found("/tasks?open=true"), Vec::<Value>::new());
    for (path, field) in
        [("/srs?state=gone", "state"), ("/vbds?vm=7", "vm"), ("/tasks?open=maybe", "open"), ("/vms?name=", "name")]
    {
        refused(&daemon, &format!("/v1{path}"), field);
    }
}

#[test]
fn the_stream_of_events_is_filtered_and_ends_with_its_limit() {
    let daemon = start();
    let vm = |name: &str| json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
    let sr = daemon.repository("sr");
    let made = daemon.post("/vms", vm("web")).1;
    let uuid = made["uuid"].as_str().unwrap();
    assert_eq!(daemon.patch(&format!("/vms/{uuid}"), json!({ "name": "db" })).0, 200);
    let events = |query: &str| -> Vec<Value> {
        let text = daemon.text(&format!("/events?after={query}"));
        let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|data| serde_json::from_str(data).unwrap()).collect()
    };
    // Before the first event of this daemon: a stream with any other start begins with the number of the last one.
    let reset = daemon.text("/events?after=0&limit=1");
    assert!(reset.contains("event: reset"), "{reset}");
    let last = reset.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
    let all = last.trim().parse::<u64>().unwrap() & !u64::from(u32::MAX);
    let of_vm = events(&format!("{all}&kind=vm&limit=2"));
    assert_eq!(of_vm.iter().map(|event| &event["change"]).collect::<Vec<_>>(), ["added", "changed"]);
    assert!(of_vm.iter().all(|event| event["uuid"] == uuid && event["kind"] == "vm"), "{of_vm:?}");
    let of_sr = events(&format!("{all}&uuid={sr}&limit=1"));
    assert_eq!((&of_sr[0]["kind"], &of_sr[0]["uuid"]), (&json!("sr"), &json!(sr)));
    for (query, field) in [("behind=1", "behind"), ("kind=disk", "kind"), ("limit=0", "limit"), ("after=x", "after")] {
        refused(&daemon, &format!("/v1/events?{query}"), field);
    }
}
