//! Tests of snapshots, reverts and clones of machines.

use serde_json::json;

use crate::objects::{done, task, vm};
use crate::play::{Played, begun, err, ok, out};

const VM: &str = "00004a00-0000-0000-0000-000000000001";
const TASK: &str = "00007a00-0000-0000-0000-000000000001";
const SNAPSHOT: &str = "0000aa00-0000-0000-0000-000000000001";

fn snapshot(name: &str) -> serde_json::Value {
    let disk = |position: u8, snapshot: Option<&str>| {
        let mode = if snapshot.is_some() { "RW" } else { "RO" };
        let mut disk = json!({ "position": position, "mode": mode, "bootable": false, "queues": 1, "vdi": VM });
        if let Some(snapshot) = snapshot {
            disk["snapshot"] = json!(snapshot);
        }
        disk
    };
    json!({
        "uuid": SNAPSHOT, "vm": VM, "name": name, "description": "before", "created": "2026-11-23T02:07:31Z",
        "hardware": {
            "driver": "qemu", "memory": 1 << 30, "vcpus": 2, "boot": { "from": "disk" }, "platform": {}
        },
        "disks": [disk(0, Some(VM)), disk(1, Some(TASK)), disk(2, None)],
    })
}

#[test]
fn snapshots_are_taken_listed_and_destroyed() {
    let of_vm = |verb: &str| format!("vms/{VM}/{verb}");
    let played = Played::new([
        begun("POST", &of_vm("snapshot"), &task(1, api::TaskState::Running, 0.0, None)),
        ok("GET", &format!("tasks/{TASK}?wait=1"), &done(1, json!({ "uuid": SNAPSHOT }))),
        ok("GET", "vms?match=web", &[vm(1, "web")]),
        ok("GET", &of_vm("snapshots"), &[snapshot("web@2026-11-23T02:07")]),
        ok("GET", &of_vm("snapshots?match=old"), &[snapshot("old")]),
        begun("DELETE", &of_vm(&format!("snapshots/{SNAPSHOT}")), &task(1, api::TaskState::Running, 0.0, None)),
        ok("GET", &format!("tasks/{TASK}?wait=1"), &done(1, json!({ "uuid": SNAPSHOT }))),
    ]);
    assert_eq!(out(&played.run(&["vm", "snapshot", VM, "--name", "old"])), format!("{SNAPSHOT}\n"));
    let table = "\
UUID      NAME                  CREATED               DISKS  MEMORY  VCPUS  DESCRIPTION
0000aa00  web@2026-11-23T02:07  2026-11-23T02:07:31Z      2   1 GiB      2  before
";
    assert_eq!(out(&played.run(&["vm", "snapshots", "web"])), table);
    assert_eq!(out(&played.run(&["vm", "snapshot-destroy", VM, "--snapshot", "old", "--yes"])), "");
    assert_eq!(played.received()[0].body, json!({ "name": "old", "description": "" }));
}

#[test]
fn a_machine_has_a_schedule_of_backups() {
    const TARGET: &str = "6f0d3c2e-41b7-4a86-9a55-0c8be7a0d1f2";
    let schedule = json!({ "target": TARGET, "daily": 7, "weekly": 4 });
    let shown = api::Vm {
        backup_schedule: Some(serde_json::from_value(schedule.clone()).unwrap()),
        last_backup: Some("2026-11-30T00:00:00Z".parse().unwrap()),
        backup_problem: Some(api::Problem::new(api::Code::NotFound, "it is away").advise("mount it")),
        ..vm(1, "web")
    };
    let path = format!("vms/{VM}");
    let played = Played::new([
        ok("GET", &path, &vm(1, "web")),
        ok("PATCH", &path, &shown),
        ok("GET", &path, &shown),
        ok("GET", &path, &shown),
        ok("GET", &path, &shown),
        ok("PATCH", &path, &vm(1, "web")),
        ok("GET", &path, &vm(1, "web")),
    ]);
    assert_eq!(out(&played.run(&["vm", "schedule", VM, "--to", TARGET, "--daily", "7", "--weekly", "4"])), "");
    let lines = out(&played.run(&["vm", "show", VM]));
    for line in [
        format!("backed up: 7 daily, 4 weekly, to {TARGET}\n"),
        "last backup: 2026-11-30T00:00:00Z\n".into(),
        "not backed up: it is away\n".into(),
        "mount it\n".into(),
    ] {
        assert!(lines.contains(&line), "{line}: {lines}");
    }
    // One target each: another schedule does not silently take its place.
    let other = played.run(&["vm", "schedule", VM, "--to", VM, "--daily", "7"]);
    assert!(!other.status.success() && String::from_utf8_lossy(&other.stderr).contains("to another target"));
    let none = ["vm", "schedule", VM, "--to", TARGET, "--none"];
    assert_eq!(out(&played.run(&none)), "");
    let refused = played.run(&none);
    assert!(!refused.status.success());
    let asked = played.received();
    assert_eq!(asked[1].body, json!({ "backup_schedule": schedule }));
    assert_eq!(asked[5].body, json!({ "backup_schedule": null }));
    assert_eq!(asked.len(), 7);
}

#[test]
fn a_machine_has_a_schedule_and_a_pinned_snapshot() {
    let kept = api::Retention::new(24, 7, 0, 0).unwrap();
    let why = api::Problem::new(api::Code::NoSpace, "there is no space").advise("free some");
    let shown = api::Vm { retention: Some(kept), retention_problem: Some(why), ..vm(1, "web") };
    let mut old = snapshot("old");
    old["scheduled"] = json!(true);
    let played = Played::new([
        ok("PATCH", &format!("vms/{VM}"), &vm(1, "web")),
        ok("PATCH", &format!("vms/{VM}"), &vm(1, "web")),
        ok("GET", &format!("vms/{VM}/snapshots?match=old"), &[old.clone()]),
        ok("PATCH", &format!("vms/{VM}/snapshots/{SNAPSHOT}"), &snapshot("old")),
        ok("GET", &format!("vms/{VM}"), &shown),
        ok("GET", &format!("vms/{VM}/snapshots"), &[old]),
    ]);
    assert_eq!(out(&played.run(&["vm", "schedule", VM, "--hourly", "24", "--daily", "7"])), "");
    assert_eq!(out(&played.run(&["vm", "schedule", VM, "--none"])), "");
    assert_eq!(out(&played.run(&["vm", "pin", VM, "--snapshot", "old"])), "");
    let lines = out(&played.run(&["vm", "show", VM]));
    assert!(lines.contains("keeps: 24 hourly, 7 daily\n"), "{lines}");
    assert!(lines.contains("not kept: there is no space\n"), "{lines}");
    assert!(out(&played.run(&["vm", "snapshots", VM, "--wide"])).contains("its schedule"));
    let asked = played.received();
    assert_eq!(asked[0].body, json!({ "retention": { "hourly": 24, "daily": 7 } }));
    assert_eq!(asked[1].body, json!({ "retention": null }));
    assert_eq!(asked[3].body, json!({ "scheduled": false }));
    for wrong in [&["--none", "--daily", "1"][..], &[], &["--snapshot", "old", "--hourly", "1"]] {
        assert_eq!(played.run(&[&["vm", "schedule", VM], wrong].concat()).status.code(), Some(64), "{wrong:?}");
    }
}

#[test]
fn a_machine_is_reverted_and_cloned_by_the_name_of_a_snapshot() {
    let of_vm = |verb: &str| format!("vms/{VM}/{verb}");
    let result = json!({ "uuid": VM, "note": "the network card was not copied" });
    let played = Played::new([
        ok("GET", &format!("vms/{VM}"), &vm(1, "web")),
        ok("GET", &of_vm("snapshots?match=old"), &[snapshot("old")]),
        ok("POST", &of_vm("revert"), &vm(1, "web")),
        ok("GET", &of_vm("snapshots?match=old"), &[snapshot("old")]),
        begun("POST", &of_vm("clone"), &task(1, api::TaskState::Running, 0.0, None)),
        ok("GET", &format!("tasks/{TASK}?wait=1"), &done(1, result)),
        ok("POST", &of_vm("clone"), &vm(1, "web")),
    ]);
    assert_eq!(out(&played.run(&["vm", "revert", VM, "--snapshot", "old", "--yes"])), "");
    let cloned = played.run(&["vm", "clone", VM, "web2", "--snapshot", "old"]);
    assert!(err(&cloned).contains("the network card was not copied"), "{cloned:?}");
    assert_eq!(out(&cloned), format!("{VM}\n"));
    assert_eq!(out(&played.run(&["vm", "clone", VM, "web3"])), format!("{VM}\n"));
    let asked = played.received();
    assert_eq!(asked[2].body, json!({ "snapshot": SNAPSHOT }));
    assert_eq!(asked[4].body, json!({ "name": "web2", "description": "", "snapshot": SNAPSHOT }));
    assert_eq!(asked[6].body, json!({ "name": "web3", "description": "" }));
}

#[test]
fn a_snapshot_that_is_not_there_is_refused_with_advice() {
    let none: [serde_json::Value; 0] = [];
    let played = Played::new([ok("GET", &format!("vms/{VM}/snapshots?match=old"), &none)]);
    let refused = played.run(&["vm", "clone", VM, "web2", "--snapshot", "old"]);
    assert_eq!(refused.status.code(), Some(6));
    assert!(err(&refused).contains("has no snapshot named 'old'") && err(&refused).contains("tapline vm snapshots"));
}
