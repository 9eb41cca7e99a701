//! Names of VDIs, SRs and VMs: refused, chosen and kept ones.

use std::collections::HashSet;
use std::fs;

use serde_json::{Value, json};

use crate::harness::{self, Taplined, disks};

const MIB: u64 = 1 << 20;

fn create(daemon: &Taplined, sr: &str, name: &str) -> (u16, Value) {
    daemon.post("/vdis", json!({ "sr": sr, "name": name, "size": MIB }))
}

fn made(daemon: &Taplined, sr: &str, name: &str) -> String {
    uuid(&daemon.done(create(daemon, sr, name)))
}

fn uuid(object: &Value) -> String {
    object["uuid"].as_str().unwrap().to_owned()
}

fn names(daemon: &Taplined, list: &str) -> Vec<String> {
    let list = daemon.get(list).1;
    list.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
}

#[track_caller]
fn taken(answer: &(u16, Value)) -> &str {
    let (status, problem) = answer;
    assert_eq!((*status, problem["code"].as_str()), (409, Some("name-taken")), "{problem}");
    assert_eq!((&problem["type"], &problem["field"]), (&json!("/v1/problems/name-taken"), &json!("name")));
    problem["detail"].as_str().unwrap()
}

#[test]
fn of_concurrent_creates_of_one_name_one_is_carried_out() {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let answers: Vec<(u16, Value)> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8).map(|_| scope.spawn(|| create(&daemon, &sr, "web"))).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let (begun, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(status, _)| *status == 202);
    assert_eq!((begun.len(), refused.len()), (1, 7));
    for refused in &refused {
        taken(refused);
    }
    begun.into_iter().for_each(|begun| drop(daemon.done(begun)));
    assert_eq!(names(&daemon, "/vdis"), ["web"]);
}

#[test]
fn a_taken_name_is_refused_whatever_would_have_it() {
    let daemon = harness::start();
    let (sr, other) = (daemon.repository("vms"), daemon.repository("other"));
    let web = made(&daemon, &sr, "web");
    let data = made(&daemon, &sr, "data");
    let out = daemon.room().join("out.raw");
    daemon.done(daemon.post(&format!("/vdis/{data}/export"), json!({ "path": out, "format": "raw" })));
    let created = daemon.get(&format!("/vdis/{web}")).1["created"].as_str().unwrap().to_owned();

    let refused = create(&daemon, &sr, "web");
    let detail = taken(&refused);
    let has = format!("cannot create VDI 'web': VDI {web} in SR 'vms' ({sr}), created {}", &created[..19]);
    assert!(detail.starts_with(&has) && detail.ends_with(", has that name"), "{detail}");
    let advice = refused.1["advice"].as_str().unwrap();
    assert!(advice.contains(&format!("tapline vdi set {web} --name NAME")), "{advice}");
    assert!(advice.ends_with("or allow_duplicate_name (--allow-duplicate-name)"), "{advice}");

    let verb = |verb: &str, body: Value| daemon.post(&format!("/vdis/{data}/{verb}"), body);
    let import = json!({ "sr": sr, "name": "web", "path": out, "source_format": "raw" });
    let tried = [
        (daemon.patch(&format!("/vdis/{data}"), json!({ "name": "web" })), format!("rename VDI {data} to 'web'")),
        (verb("snapshot", json!({ "name": "web" })), format!("snapshot VDI {data} as 'web'")),
        (verb("clone", json!({ "name": "web" })), format!("clone VDI {data} as 'web'")),
        (verb("copy", json!({ "sr": sr, "name": "web" })), format!("copy VDI {data} to 'web'")),
        (daemon.post("/vdis/import", import.clone()), format!("import {} as VDI 'web'", out.display())),
    ];
    for (answer, tried) in &tried {
        assert!(taken(answer).starts_with(&format!("cannot {tried}: VDI {web} ")), "{answer:?}");
    }
    assert_eq!(names(&daemon, "/vdis"), ["data", "web"]);

    // In other repositories the name is free, and it can be duplicated.
    made(&daemon, &other, "web");
    let mut import = import;
    import["allow_duplicate_name"] = true.into();
    daemon.done(daemon.post("/vdis/import", import));
    let asked = json!({ "sr": sr, "name": "web", "size": MIB, "allow_duplicate_name": true });
    daemon.done(daemon.post("/vdis", asked));
    assert_eq!(names(&daemon, &format!("/vdis?sr={sr}")), ["data", "web", "web", "web"]);
    // Refused requests leave nothing, and their own names are still free.
    assert_eq!(daemon.patch(&format!("/vdis/{web}"), json!({ "name": "web", "description": "the site" })).0, 200);
    disks::inventory_agrees(&daemon);
}

#[test]
fn a_name_is_free_again_when_its_task_was_rolled_back() {
    let mut daemon = harness::start();
    let sr = daemon.repository("vms");
    daemon.restart_with(&[(harness::ABORT_AT, "vdi-create:file")]);
    daemon.post_and_die("/vdis", json!({ "sr": sr, "name": "web", "size": MIB }));
    let held: u32 = daemon.catalogue().query_row("SELECT count(*) FROM name_claim", [], |row| row.get(0)).unwrap();
    assert_eq!(held, 1, "{}", daemon.log());
    daemon.restart_with(&[]);
    daemon.settle();
    made(&daemon, &sr, "web");
}

/// Default names are `NAME@MINUTE`, with seconds and a number where necessary.
#[test]
fn a_snapshot_without_a_name_is_called_by_its_disk_and_time() {
    let daemon = harness::start();
    let sr = daemon.repository("vms");
    let web = made(&daemon, &sr, "web");
    let mut known = HashSet::new();
    for _ in 0..6 {
        let snapshot = uuid(&daemon.done(daemon.post(&format!("/vdis/{web}/snapshot"), json!({}))));
        let shown = daemon.get(&format!("/vdis/{snapshot}")).1;
        let at = shown["snapshot_time"].as_str().unwrap();
        let (minute, second) = (format!("web@{}", &at[..16]), format!("web@{}", &at[..19]));
        let numbered = (2..).map(|n| format!("{second}-{n}"));
        let expected = [minute, second.clone()].into_iter().chain(numbered).find(|name| !known.contains(name)).unwrap();
        assert_eq!(shown["name"], expected.as_str());
        known.insert(expected);
    }
}

#[test]
fn clones_and_copies_without_a_name_get_one_that_is_free() {
    let daemon = harness::start();
    let (sr, other) = (daemon.repository("vms"), daemon.repository("other"));
    let web = made(&daemon, &sr, "web");
    for (verb, sr, expected) in [
        ("clone", &sr, "web-clone"),
        ("clone", &sr, "web-clone-2"),
        ("copy", &sr, "web-copy"),
        ("copy", &sr, "web-copy-2"),
        ("copy", &other, "web"),
        ("copy", &other, "web-copy"),
    ] {
        let body = if verb == "copy" { json!({ "sr": sr }) } else { json!({}) };
        let new = uuid(&daemon.done(daemon.post(&format!("/vdis/{web}/{verb}"), body)));
        assert_eq!(daemon.get(&format!("/vdis/{new}")).1["name"], expected);
    }
}

#[test]
fn names_of_repositories_and_of_machines_are_unique() {
    let daemon = harness::start();
    let fast = daemon.repository("fast");
    let path = daemon.room().join("second");
    fs::create_dir(&path).unwrap();
    let source = json!({ "type": "dir", "path": path });
    let refused = daemon.post("/srs", json!({ "name": "fast", "source": source }));
    assert!(taken(&refused).starts_with(&format!("cannot create SR 'fast': SR {fast}, created ")), "{refused:?}");
    // An empty directory is not a repository, whatever its name.
    fs::write(path.join("web.raw"), [0; 512]).unwrap();
    let refused = daemon.post("/srs/introduce", json!({ "name": "fast", "source": source }));
    assert!(taken(&refused).starts_with("cannot introduce SR 'fast'"), "{refused:?}");
    fs::remove_file(path.join("web.raw")).unwrap();
    let second = uuid(&daemon.done(daemon.post("/srs", json!({ "name": "slow", "source": source }))));
    taken(&daemon.patch(&format!("/srs/{second}"), json!({ "name": "fast" })));
    assert_eq!(daemon.patch(&format!("/srs/{second}"), json!({ "name": "slower" })).0, 200);

    let vm = |name: &str| json!({ "name": name, "driver": "qemu", "memory": 64 * MIB, "vcpus": 1 });
    assert_eq!(daemon.post("/vms", vm("web")).0, 201);
    let db = uuid(&daemon.post("/vms", vm("db")).1);
    assert!(taken(&daemon.post("/vms", vm("web"))).starts_with("cannot create VM 'web': VM "));
    taken(&daemon.patch(&format!("/vms/{db}"), json!({ "name": "web" })));
    assert_eq!(names(&daemon, "/vms"), ["db", "web"]);
}

#[test]
fn a_scan_gives_a_file_its_whole_name_where_the_short_one_is_taken() {
    let daemon = harness::start();
    let sr = daemon.repository("disks");
    made(&daemon, &sr, "web");
    let found = disks::scanned(&daemon, &sr, &["web", "data"]);
    let name = |vdi: &String| daemon.get(&format!("/vdis/{vdi}")).1["name"].as_str().unwrap().to_owned();
    assert_eq!(found.iter().map(name).collect::<Vec<_>>(), ["web.qcow2", "data"]);
}

/// Other hosts know it by that name.
#[test]
fn an_introduced_repository_keeps_the_name_that_it_has() {
    let daemon = harness::start();
    let first = daemon.repository("vms");
    made(&daemon, &first, "web");
    daemon.done(daemon.post(&format!("/srs/{first}/detach"), json!({})));
    assert_eq!(daemon.post(&format!("/srs/{first}/forget"), json!({})).0, 204);
    let other = daemon.room().join("other");
    fs::create_dir(&other).unwrap();
    daemon.done(daemon.post("/srs", json!({ "name": "vms", "source": { "type": "dir", "path": other } })));
    let source = json!({ "type": "dir", "path": daemon.room().join("vms") });
    let named = json!({ "uuid": first, "name": "vms", "source": source });
    taken(&daemon.post("/srs/introduce", named));
    daemon.done(daemon.post("/srs/introduce", json!({ "uuid": first, "source": source })));
    assert_eq!((names(&daemon, "/srs"), names(&daemon, "/vdis")), (vec!["vms".into(); 2], vec!["web".into()]));
}
