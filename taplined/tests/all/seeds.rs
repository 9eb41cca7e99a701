//! Cloud-init seeds of VMs: given to QEMU as a disk, kept over restarts, and never shown.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::Taplined;
use crate::harness::disks::nothing_leaked;
use crate::vm::{begin, shut_down, start};

/// Contained in every seed text here, and nowhere else.
const SECRET: &str = "hunter2";

fn seed() -> Value {
    json!({ "user_data": format!("#cloud-config\npassword: {SECRET}\n"), "network_config": format!("# {SECRET}\n") })
}

/// Creates a VM with a seed and an invalid kernel; returns its path.
#[track_caller]
fn seeded(daemon: &Taplined, name: &str, seed: Value) -> String {
    let kernel = daemon.room().join("kernel");
    fs::write(&kernel, vec![7; 1 << 20]).unwrap();
    let boot = json!({ "from": "kernel", "kernel": kernel });
    let asked = json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "boot": boot, "seed": seed });
    let (status, vm) = daemon.post("/vms", asked);
    assert_eq!((status, &vm["seed"]), (201, &json!(true)), "{vm}");
    format!("/vms/{}", vm["uuid"].as_str().unwrap())
}

/// The image that a machine has open, although its file is removed.
#[track_caller]
fn image_of(running: &Value) -> Option<String> {
    let descriptors = PathBuf::from(format!("/proc/{}/fd", running["pid"]));
    let mut open = fs::read_dir(descriptors).unwrap().flatten().map(|entry| entry.path());
    let is_seed = |path: &PathBuf| fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("seed.img"));
    let path = open.find(is_seed)?;
    assert!(fs::read_link(&path).unwrap().to_string_lossy().ends_with("seed.img (deleted)"), "{path:?}");
    Some(String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned())
}

fn uuid(vm: &str) -> &str {
    vm.trim_start_matches("/vms/")
}

#[test]
fn a_machine_has_the_seed_of_its_vm_also_after_a_restart_of_the_daemon() {
    let Some((mut daemon, _)) = begin("", &[]) else { return };
    let vm = seeded(&daemon, "Web 1", seed());
    let meta_data = format!("instance-id: {}\nlocal-hostname: \"web-1\"\n", uuid(&vm));
    for _ in 0..2 {
        let image = image_of(&start(&daemon, &vm)).unwrap();
        assert!(image.contains("cidata  ") && image.contains(&meta_data), "no label or no metadata");
        assert_eq!(image.matches(SECRET).count(), 2);
        shut_down(&daemon, &vm, json!({ "force": true }));
        daemon.restart();
    }
    let changed = json!({ "seed": { "user_data": "#!/bin/sh\n", "meta_data": "instance-id: mine\n" } });
    assert_eq!(daemon.patch(&vm, changed).1["seed"], true);
    let running = start(&daemon, &vm);
    let image = image_of(&running).unwrap();
    assert!(image.contains("instance-id: mine\n") && !image.contains(SECRET) && !image.contains("local-hostname"));
    assert_eq!(daemon.patch(&vm, json!({ "seed": null })).1["code"], "state");
    shut_down(&daemon, &vm, json!({ "force": true }));
    assert!(daemon.patch(&vm, json!({ "seed": null })).1.get("seed").is_none());
    let running = start(&daemon, &vm);
    assert_eq!(image_of(&running), None);
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
    assert_eq!(daemon.delete(&vm).0, 204);
}

#[test]
fn a_seed_is_in_no_answer_event_or_log() {
    let Some((daemon, _)) = begin("log.level = \"trace\"", &[]) else { return };
    let reset = daemon.text("/events?after=0&limit=1");
    let last = reset.lines().find_map(|line| line.strip_prefix("id: ")).unwrap();
    let vm = seeded(&daemon, "web", seed());
    start(&daemon, &vm);
    let pid = daemon.get(&vm).1["pid"].as_u64().unwrap();
    let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    // Its creation, the task, and its first state.
    let events = daemon.text(&format!("/events?after={last}&limit=3"));
    assert!(events.contains("\"seed\":true"), "{events}");
    let shown = [events, daemon.text("/vms"), daemon.text(&vm), daemon.text("/tasks"), daemon.log(), words];
    shut_down(&daemon, &vm, json!({ "force": true }));
    let clone = daemon.done(daemon.post(&format!("{vm}/clone"), json!({ "name": "second" })));
    let log = fs::read_dir(daemon.room().join("log")).unwrap().flatten();
    let logs = log.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let told = shown.into_iter().chain(logs).chain([clone.to_string(), daemon.text("/tasks"), daemon.log()]);
    for text in told {
        assert!(!text.contains(SECRET), "{text}");
    }
    let journal: Vec<Option<String>> = {
        let catalogue = daemon.catalogue();
        let mut statement = catalogue.prepare("SELECT intent FROM task").unwrap();
        statement.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    };
    assert!(journal.iter().flatten().all(|intent| !intent.contains(SECRET)), "{journal:?}");
}

#[test]
fn a_clone_has_the_seed_with_an_instance_id_of_its_own() {
    let Some((daemon, _)) = begin("", &[]) else { return };
    let vm = seeded(&daemon, "web", seed());
    let made = daemon.done(daemon.post(&format!("{vm}/clone"), json!({ "name": "second" })));
    assert!(made.get("note").is_none(), "{made}");
    let clone = format!("/vms/{}", made["uuid"].as_str().unwrap());
    assert_eq!(daemon.get(&clone).1["seed"], true);
    let image = image_of(&start(&daemon, &clone)).unwrap();
    assert!(image.contains(&format!("instance-id: {}\nlocal-hostname: \"second\"\n", uuid(&clone))));
    assert_eq!(image.matches(SECRET).count(), 2);
    shut_down(&daemon, &clone, json!({ "force": true }));
    // The original's meta-data has an instance ID that must not be the clone's.
    let mine = json!({ "user_data": "#!/bin/sh\n", "meta_data": "instance-id: mine\n" });
    assert_eq!(daemon.patch(&vm, json!({ "seed": mine })).0, 200);
    let made = daemon.done(daemon.post(&format!("{vm}/clone"), json!({ "name": "third" })));
    assert!(made["note"].as_str().unwrap().contains("meta-data of the cloud-init seed was not copied"), "{made}");
    let clone = format!("/vms/{}", made["uuid"].as_str().unwrap());
    let image = image_of(&start(&daemon, &clone)).unwrap();
    assert!(image.contains(&format!("instance-id: {}\n", uuid(&clone))) && !image.contains("instance-id: mine"));
    shut_down(&daemon, &clone, json!({ "force": true }));
    nothing_leaked(&daemon);
}

#[test]
fn a_deleted_seed_is_in_no_file_of_the_catalogue() {
    let mut daemon = crate::harness::start();
    let has_secret = |daemon: &Taplined| {
        let files = fs::read_dir(daemon.room().join("state")).unwrap().map(|entry| entry.unwrap().path());
        let mut files = files.filter(|path| path.is_file() && path.to_string_lossy().contains("catalogue.db"));
        files.any(|path| String::from_utf8_lossy(&fs::read(path).unwrap()).contains(SECRET))
    };
    let (vm, other) = (seeded(&daemon, "web", seed()), seeded(&daemon, "db", seed()));
    assert!(has_secret(&daemon));
    assert_eq!(daemon.patch(&vm, json!({ "seed": null })).0, 200);
    assert_eq!(daemon.delete(&other).0, 204);
    // While a reader is active, the log is left to the next commit.
    crate::harness::wait_until("it is gone", || {
        let words = json!({ "description": format!("{:?}", std::time::Instant::now()) });
        assert_eq!(daemon.patch(&vm, words).0, 200);
        !has_secret(&daemon)
    });
    daemon.restart();
    assert!(!has_secret(&daemon));
}

#[test]
fn an_invalid_seed_is_refused_without_being_shown() {
    let daemon = crate::harness::start();
    for seed in [json!(SECRET), json!([SECRET]), json!({ "user_data": { "password": SECRET } }), json!({ SECRET: 1 })] {
        let asked = json!({ "name": "x", "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "seed": seed });
        let (status, problem) = daemon.post("/vms", asked);
        assert_eq!((status, &problem["code"]), (400, &json!("invalid")), "{problem}");
        assert!(!problem.to_string().contains(SECRET) && problem["field"].as_str().unwrap().starts_with("seed"));
    }
    assert!(!daemon.log().contains(SECRET));
}

#[test]
fn an_impossible_seed_is_refused_by_its_field() {
    let Some((daemon, _)) = begin("", &[]) else { return };
    let make = |driver: &str, seed: Value| {
        let boot = json!({ "from": "kernel", "kernel": "/k" });
        let asked =
            json!({ "name": "x", "driver": driver, "memory": 64 << 20, "vcpus": 1, "boot": boot, "seed": seed });
        daemon.post("/vms", asked).1
    };
    let long = make("qemu", json!({ "user_data": "x".repeat((64 << 10) + 1) }));
    assert_eq!((&long["code"], &long["field"]), (&json!("invalid"), &json!("seed.user_data")), "{long}");
    // All texts at maximum length, with a character that JSON escapes as two.
    let most = "\n".repeat(64 << 10);
    let most = make("qemu", json!({ "user_data": most, "meta_data": most, "network_config": most }));
    assert_eq!(most["seed"], true, "{most}");
    let xen = make("xen", seed());
    assert_eq!((&xen["code"], &xen["field"]), (&json!("unsupported"), &json!("seed")), "{xen}");
    assert!(!xen.to_string().contains(SECRET));
}
