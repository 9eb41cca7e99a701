//! Schedules of snapshots of whole VMs, with a clock that the test sets.

use serde_json::{Value, json};

use crate::harness::disks::inventory_agrees;
use crate::harness::wait_until;
use crate::retention::Bed;
use crate::vm::{machine, power, qemu, start};

/// A halted VM with a schedule and a disk in each of two repositories; returns its path and the second disk.
fn bed(settings: &str) -> (Bed, String, String) {
    let mut bed = Bed::with(settings);
    let second = disk(&bed, &bed.daemon.repository("second"), "data");
    let vm = machine(&bed.daemon, &[bed.vdi.clone(), second.clone()]);
    bed.of = (vm.clone(), "vm-schedule");
    (bed, vm, second)
}

fn disk(bed: &Bed, sr: &str, name: &str) -> String {
    let made = bed.daemon.done(bed.daemon.post("/vdis", json!({ "sr": sr, "name": name, "size": 8 << 20 })));
    made["uuid"].as_str().unwrap().into()
}

/// The snapshots of the VM.
fn snapshots(bed: &Bed) -> Vec<Value> {
    bed.daemon.get(&format!("{}/snapshots", bed.of.0)).1.as_array().unwrap().clone()
}

/// The hours of its scheduled snapshots.
fn hours(bed: &Bed) -> Vec<i64> {
    let scheduled = snapshots(bed).into_iter().filter(|snapshot| snapshot["scheduled"] == true);
    scheduled.map(|snapshot| bed.hour(&snapshot["created"])).collect()
}

/// The scheduled snapshot of an hour: its path in the API, and the snapshots of its disks.
#[track_caller]
fn at(bed: &Bed, hour: i64) -> (String, Vec<String>) {
    let found = snapshots(bed).into_iter().find(|one| one["scheduled"] == true && bed.hour(&one["created"]) == hour);
    let found = found.unwrap_or_else(|| panic!("no snapshot of hour {hour}"));
    let disks = found["disks"].as_array().unwrap().iter().map(|disk| disk["snapshot"].as_str().unwrap().into());
    (format!("{}/snapshots/{}", bed.of.0, found["uuid"].as_str().unwrap()), disks.collect())
}

/// The existing snapshots of a disk.
fn of_disk(bed: &Bed, vdi: &str) -> Vec<Value> {
    bed.daemon.get(&format!("/vdis?snapshot_of={vdi}")).1.as_array().unwrap().clone()
}

fn reserve(bed: &Bed, sr: &str, bytes: u64) {
    assert_eq!(bed.daemon.patch(&format!("/srs/{sr}"), json!({ "reserve": bytes })).0, 200);
}

fn sr_of(bed: &Bed, vdi: &str) -> String {
    bed.daemon.get(&format!("/vdis/{vdi}")).1["sr"].as_str().unwrap().into()
}

#[test]
fn a_scheduled_vm_gets_hourly_snapshots_and_keeps_their_number() {
    let (mut bed, vm, second) = bed("");
    let by_hand = bed.daemon.done(bed.daemon.post(&format!("{vm}/snapshot"), json!({ "name": "mine" })));
    let of_one = bed.daemon.done(bed.daemon.post(&format!("/vdis/{second}/snapshot"), json!({ "name": "mine" })));
    for hour in 0..4 {
        bed.set_clock(hour, u64::from(hour > 0));
        let task = bed.keep_and_take(json!({ "hourly": 2 }));
        assert_eq!(task["state"], "done", "{task}");
        let (path, disks) = at(&bed, hour);
        assert!(path.ends_with(task["result"]["uuid"].as_str().unwrap()), "{task}");
        assert_eq!(disks.len(), 2);
    }
    assert_eq!(hours(&bed), [2, 3]);
    // For each disk: those of both snapshots, and the manual ones. None belongs to a schedule of the disk.
    assert_eq!((of_disk(&bed, &bed.vdi).len(), of_disk(&bed, &second).len()), (3, 4));
    assert!(bed.taken().is_empty());
    assert!(snapshots(&bed).iter().any(|one| one["uuid"] == by_hand["uuid"] && one["name"] == "mine"));
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", of_one["uuid"].as_str().unwrap())).1["name"], "mine");
    let shown = bed.daemon.get(&vm).1;
    assert!(shown["retention"] == json!({ "hourly": 2 }) && shown.get("retention_problem").is_none(), "{shown}");
    bed.keep_and_take_none(json!({ "hourly": 1 }));
    assert_eq!(hours(&bed), [2, 3]);
    inventory_agrees(&bed.daemon);
    // A starting daemon takes a snapshot that is due.
    bed.set_clock(4, 1);
    bed.daemon.restart();
    wait_until("a snapshot was taken, and others destroyed", || hours(&bed) == [4]);
}

#[test]
fn a_disk_with_a_schedule_of_its_own_and_its_vm_do_not_disturb_each_other() {
    let (mut bed, _, _) = bed("");
    let own = json!({ "retention": { "hourly": 1 } });
    assert_eq!(bed.daemon.patch(&format!("/vdis/{}", bed.vdi), own).0, 200);
    wait_until("the disk has its first snapshot", || bed.taken() == [0]);
    bed.keep_and_take(json!({ "hourly": 2 }));
    for hour in 1..4 {
        bed.set_clock(hour, 1);
        // Both are due at once.
        bed.keep(json!({ "hourly": 2 }));
        wait_until("both have their snapshots", || bed.taken() == [hour] && hours(&bed) == [hour - 1, hour]);
    }
    let tasks = bed.daemon.get("/tasks").1;
    // A merge that gives way is cancelled.
    let failed: Vec<&Value> = tasks.as_array().unwrap().iter().filter(|task| task["state"] == "failed").collect();
    assert!(failed.is_empty(), "{failed:?}");
    // The disk's own, and those in the two snapshots of the VM.
    assert_eq!(of_disk(&bed, &bed.vdi).len(), 3);
}

#[test]
fn a_disk_is_in_those_snapshots_that_were_taken_while_the_vm_had_it() {
    let (mut bed, vm, second) = bed("");
    bed.keep_and_take(json!({ "hourly": 2 }));
    let third = disk(&bed, &bed.sr, "more");
    let (status, made) = bed.daemon.post("/vbds", json!({ "vdi": third, "vm": vm.trim_start_matches("/vms/") }));
    assert_eq!(status, 201, "{made}");
    bed.set_clock(1, 1);
    bed.keep_and_take(json!({ "hourly": 2 }));
    let vbds = bed.daemon.get(&format!("/vbds?vm={}", vm.trim_start_matches("/vms/"))).1;
    let gone = vbds.as_array().unwrap().iter().find(|vbd| vbd["vdi"] == second.as_str()).unwrap();
    assert_eq!(bed.daemon.delete(&format!("/vbds/{}", gone["uuid"].as_str().unwrap())).0, 204);
    bed.set_clock(2, 1);
    bed.keep_and_take(json!({ "hourly": 2 }));
    assert_eq!((at(&bed, 1).1.len(), at(&bed, 2).1.len()), (3, 2));
    assert_eq!((of_disk(&bed, &second).len(), of_disk(&bed, &third).len()), (1, 2));
    // The last snapshot that contains it also has one of a disk that the VM no longer has.
    bed.set_clock(3, 1);
    bed.keep_and_take(json!({ "hourly": 2 }));
    assert_eq!((hours(&bed), of_disk(&bed, &second).len()), (vec![2, 3], 0));
    assert_eq!(bed.daemon.get(&format!("/vdis/{second}")).0, 200);
}

#[test]
fn a_snapshot_that_one_disk_refuses_leaves_nothing_and_is_shown_with_the_vm() {
    let (mut bed, vm, second) = bed("");
    bed.keep_and_take(json!({ "hourly": 3 }));
    let sr = sr_of(&bed, &second);
    let shown = bed.daemon.get(&format!("/srs/{sr}")).1;
    let all = shown["space"]["physical_size"].as_u64().unwrap_or_else(|| panic!("{shown}")) - 1;
    reserve(&bed, &sr, all);
    bed.set_clock(1, 1);
    let failed = bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!((&failed["state"], &failed["problem"]["code"]), (&json!("failed"), &json!("no-space")), "{failed}");
    assert_eq!(failed["about"][0]["uuid"], vm.trim_start_matches("/vms/"));
    wait_until("the VM shows it", || bed.daemon.get(&vm).1["retention_problem"]["code"] == "no-space");
    assert_eq!((of_disk(&bed, &bed.vdi).len(), of_disk(&bed, &second).len()), (1, 1));
    reserve(&bed, &sr, 0);
    // Not before the next hour, by a daemon that has not seen another schedule in the meantime.
    bed.keep_and_take_none(json!({ "hourly": 3 }));
    bed.set_clock(2, 1);
    bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!(hours(&bed), [0, 2]);
    assert_eq!(bed.daemon.get(&vm).1.get("retention_problem"), None);
    inventory_agrees(&bed.daemon);
}

#[test]
fn a_vm_waits_for_its_repositories_and_shows_that() {
    let (mut bed, vm, second) = bed("");
    bed.keep_and_take(json!({ "hourly": 3 }));
    let sr = sr_of(&bed, &second);
    bed.daemon.done(bed.daemon.post(&format!("/srs/{sr}/detach"), json!({})));
    bed.set_clock(1, 1);
    bed.keep_and_take_none(json!({ "hourly": 3 }));
    let why = |bed: &Bed| bed.daemon.get(&vm).1["retention_problem"].clone();
    wait_until("the VM shows it", || why(&bed)["detail"].as_str().is_some_and(|detail| detail.contains(&sr)));
    assert_eq!(bed.kept_tasks().len(), 1);
    bed.daemon.done(bed.daemon.post(&format!("/srs/{sr}/attach"), json!({})));
    wait_until("the snapshot was taken", || hours(&bed) == [0, 1]);
    wait_until("the VM shows nothing any more", || why(&bed).is_null());
}

#[test]
fn a_snapshot_in_use_or_pinned_is_kept_whole() {
    let (mut bed, _, _) = bed("");
    for hour in 0..3 {
        bed.set_clock(hour, u64::from(hour > 0));
        bed.keep_and_take(json!({ "hourly": 5 }));
    }
    let [(_, cloned), (_, attached), (chosen, disks)] = [0, 1, 2].map(|hour| at(&bed, hour));
    let clone = bed.daemon.done(bed.daemon.post(&format!("/vdis/{}/clone", cloned[1]), json!({ "name": "clone" })));
    let read = json!({ "vdi": attached[0], "mode": "RO", "transport": "nbd" });
    assert_eq!(bed.daemon.post("/vbds", read).0, 201);
    // A single disk's snapshot cannot be pinned.
    let (status, refused) = bed.daemon.patch(&format!("/vdis/{}", disks[0]), json!({ "scheduled": false }));
    assert_eq!((status, &refused["field"]), (409, &json!("scheduled")), "{refused}");
    let (status, stays) = bed.daemon.patch(&chosen, json!({ "scheduled": false }));
    assert!(status == 200 && stays.get("scheduled").is_none(), "{stays}");
    let (_, refused) = bed.daemon.patch(&chosen, json!({ "scheduled": true }));
    assert_eq!((&refused["code"], &refused["field"]), (&json!("state"), &json!("scheduled")), "{refused}");
    bed.set_clock(3, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(hours(&bed), [0, 1, 3]);
    bed.daemon.done(bed.daemon.delete(&format!("/vdis/{}", clone["uuid"].as_str().unwrap())));
    bed.daemon.settle();
    bed.set_clock(4, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(hours(&bed), [1, 4]);
    assert_eq!(snapshots(&bed).len(), 3);
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", disks[0])).0, 200);
}

#[test]
fn a_running_vm_that_another_task_works_on_is_waited_for() {
    let Some(qemu) = qemu() else { return };
    let (mut bed, vm, _) = bed(&format!("qemu-program = {qemu:?}\n"));
    start(&bed.daemon, &vm);
    bed.keep_and_take(json!({ "hourly": 3 }));
    assert_eq!((hours(&bed), power(&bed.daemon, &vm)), (vec![0], "running".into()));
    // The firmware ignores the power button.
    let (status, ending) = bed.daemon.post(&format!("{vm}/shutdown"), json!({ "force_after": 3600 }));
    assert_eq!(status, 202, "{ending}");
    bed.set_clock(1, 1);
    bed.keep_and_take_none(json!({ "hourly": 3 }));
    let path = format!("/tasks/{}/cancel", ending["uuid"].as_str().unwrap());
    assert_eq!(bed.daemon.post(&path, json!({})).0, 200);
    wait_until("the snapshot was taken", || hours(&bed) == [0, 1]);
    assert_eq!(power(&bed.daemon, &vm), "running");
    assert_eq!(bed.kept_tasks().iter().filter(|task| task["state"] == "failed").count(), 0);
}

#[test]
fn a_schedule_ends_with_its_vm_and_the_snapshots_of_its_disks_stay() {
    let (mut bed, vm, second) = bed("");
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!(bed.daemon.delete(&vm).0, 204);
    bed.set_clock(1, 1);
    bed.daemon.restart();
    // The disk's own schedule neither counts nor destroys them.
    bed.of = (format!("/vdis/{}", bed.vdi), "vdi-schedule");
    bed.keep_and_take(json!({ "hourly": 1 }));
    bed.set_clock(2, 1);
    bed.keep_and_take(json!({ "hourly": 1 }));
    assert_eq!((bed.taken(), of_disk(&bed, &bed.vdi).len(), of_disk(&bed, &second).len()), (vec![2], 2, 1));
    let tasks = bed.daemon.get("/tasks").1;
    assert_eq!(tasks.as_array().unwrap().iter().filter(|task| task["verb"] == "vm-schedule").count(), 1, "{tasks}");
}

#[test]
fn a_scheduled_vm_without_writable_disk_shows_why_none_is_taken() {
    let mut bed = Bed::new();
    let vm = machine(&bed.daemon, &[]);
    bed.of = (vm.clone(), "vm-schedule");
    let refused = bed.daemon.patch(&vm, json!({ "retention": {} })).1;
    assert_eq!((&refused["code"], &refused["field"]), (&json!("invalid"), &json!("retention")), "{refused}");
    bed.keep_and_take(json!({ "daily": 1 }));
    wait_until("the VM shows it", || bed.daemon.get(&vm).1["retention_problem"]["code"] == "state");
    // A new or removed schedule has no problem yet.
    assert_eq!(bed.daemon.patch(&vm, json!({ "retention": null })).0, 200);
    assert_eq!(bed.daemon.get(&vm).1.get("retention_problem"), None);
}
