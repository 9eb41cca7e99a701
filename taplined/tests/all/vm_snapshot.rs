//! Snapshots of all disks of a VM at one moment, and reverts and clones of VMs: with real QEMUs without a system to
//! boot.

use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{io, nbd, nothing_leaked, plug, unplug, vbd};
use crate::harness::{ABORT_AT, Taplined};
use crate::vm::{begin, machine, power, shut_down, start};

/// The snapshots of a VM in the API.
fn snapshots(daemon: &Taplined, vm: &str) -> Vec<Value> {
    daemon.get(&format!("{vm}/snapshots")).1.as_array().unwrap().clone()
}

/// The VDIs that are snapshots.
fn of_disks(daemon: &Taplined) -> Vec<Value> {
    let vdis = daemon.get("/vdis").1;
    vdis.as_array().unwrap().iter().filter(|vdi| vdi["snapshot_of"].is_string()).cloned().collect()
}

fn take(daemon: &Taplined, vm: &str, asked: Value) -> String {
    daemon.done(daemon.post(&format!("{vm}/snapshot"), asked))["uuid"].as_str().unwrap().into()
}

/// Whether the guest runs, according to its machine, after a restart of the daemon, which alone could resume it.
#[track_caller]
fn power_of_machine(daemon: &mut Taplined, vm: &str) -> String {
    let before = daemon.log().len();
    daemon.restart();
    assert!(!daemon.log()[before..].contains("resuming its guest"), "{}", daemon.log());
    power(daemon, vm)
}

/// Writes a pattern to the first MiB of VDIs that are not plugged.
fn write(daemon: &Taplined, vdis: &[String], pattern: u8) {
    on_each(daemon, vdis, &format!("write -P {pattern} 0 1M"));
}

/// Checks that the VDIs have the pattern.
#[track_caller]
fn have(daemon: &Taplined, vdis: &[String], pattern: u8) {
    on_each(daemon, vdis, &format!("read -P {pattern} 0 1M"));
}

#[track_caller]
fn on_each(daemon: &Taplined, vdis: &[String], command: &str) {
    for vdi in vdis {
        let vbd = vbd(daemon, vdi, "nbd");
        plug(daemon, &vbd);
        let (well, said) = io(&nbd(daemon, &vbd), &[command, "flush"]);
        assert!(well, "{command}: {said}");
        unplug(daemon, &vbd);
        assert_eq!(daemon.delete(&vbd).0, 204);
    }
}

/// An immutable file, or a directory in which no file can be created or removed.
pub struct Sealed(PathBuf);

impl Sealed {
    /// Makes it immutable; `None` where the file system has no such flag, which is reported.
    pub fn new(path: PathBuf) -> Option<Sealed> {
        if Command::new("chattr").arg("+i").arg(&path).status().is_ok_and(|status| status.success()) {
            return Some(Sealed(path));
        }
        eprintln!("not run: chattr +i {} does not work", path.display());
        None
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        assert!(Command::new("chattr").arg("-i").arg(&self.0).status().unwrap().success());
    }
}

/// A VM with two disks, the second in its own repository: the daemon, the VM and that repository's directory.
fn in_two_repositories() -> Option<(Taplined, String, PathBuf)> {
    let (daemon, mut vdis) = begin("", &["a"])?;
    let sr = daemon.repository("second");
    let made = daemon.done(daemon.post("/vdis", json!({ "sr": sr, "name": "b", "size": 16 << 20 })));
    vdis.push(made["uuid"].as_str().unwrap().into());
    let vm = machine(&daemon, &vdis);
    let path = daemon.room().join("second");
    Some((daemon, vm, path))
}

#[test]
fn all_disks_of_a_running_vm_have_a_snapshot_and_its_guest_continues() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b", "iso"]) else { return };
    assert_eq!(daemon.patch(&format!("/vdis/{}", vdis[2]), json!({ "read_only": true })).0, 200);
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    let uuid = take(&daemon, &vm, json!({ "description": "before" }));
    let found = snapshots(&daemon, &vm);
    assert_eq!(found.len(), 1, "{found:?}");
    let found = &found[0];
    assert_eq!((&found["uuid"], &found["description"]), (&json!(uuid), &json!("before")), "{found}");
    let name = found["name"].as_str().unwrap();
    assert!(name.starts_with("guest@20") && name.len() == "guest@2026-11-23T02:07".len(), "{name}");
    let hardware = json!({
        "driver": "qemu", "memory": 64 << 20, "vcpus": 2, "boot": { "from": "disk" }, "platform": {}
    });
    assert_eq!(found["hardware"], hardware);
    let disks = found["disks"].as_array().unwrap();
    assert_eq!(disks.iter().map(|disk| disk["vdi"].clone()).collect::<Vec<_>>(), vdis);
    assert!(disks[2]["mode"] == "RO" && disks[2].get("snapshot").is_none(), "{found}");
    let kept = of_disks(&daemon);
    assert_eq!(kept.len(), 2, "{kept:?}");
    for disk in &disks[..2] {
        let vdi = daemon.get(&format!("/vdis/{}", disk["snapshot"].as_str().unwrap())).1;
        assert_eq!((&vdi["snapshot_of"], &vdi["read_only"]), (&disk["vdi"], &json!(true)), "{vdi}");
        assert_eq!(vdi["snapshot_time"], found["created"]);
    }
    assert_eq!(power_of_machine(&mut daemon, &vm), "running");
    let taken = daemon.post(&format!("{vm}/snapshot"), json!({ "name": name })).1;
    assert_eq!((&taken["code"], &taken["field"]), (&json!("name-taken"), &json!("name")), "{taken}");
    // A snapshot without a name gets one.
    take(&daemon, &vm, json!({}));
    let names: Vec<Value> = snapshots(&daemon, &vm).iter().map(|one| one["name"].clone()).collect();
    assert!(names.len() == 2 && names[0] != names[1], "{names:?}");
    daemon.settle();
    nothing_leaked(&daemon);
}

#[test]
fn a_paused_guest_stays_paused() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    daemon.done(daemon.post(&format!("{vm}/pause"), json!({})));
    take(&daemon, &vm, json!({}));
    assert_eq!(power(&daemon, &vm), "paused");
    assert_eq!(power_of_machine(&mut daemon, &vm), "paused");
    assert_eq!(of_disks(&daemon).len(), 2);
    // An earlier pause by a snapshot has no influence on a later daemon.
    daemon.done(daemon.post(&format!("{vm}/resume"), json!({})));
    take(&daemon, &vm, json!({}));
    daemon.done(daemon.post(&format!("{vm}/pause"), json!({})));
    assert_eq!(power_of_machine(&mut daemon, &vm), "paused");
}

/// Points at which the daemon dies, whether the guest is paused then, and whether the snapshot exists afterwards.
const POINTS: [(&str, bool, bool); 11] = [
    ("disks", false, false),
    ("pause:after", true, false),
    ("first:after", true, false),
    ("resume", true, false),
    ("resume:after", false, false),
    ("disks:after", false, false),
    ("undo", false, false),
    ("record", false, true),
    ("record:after", false, true),
    ("seal", false, true),
    ("seal:after", false, true),
];

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_kill_of_the_daemon_leaves_all_or_no_snapshots_and_a_guest_that_runs() {
    for (point, held, taken) in POINTS {
        let Some((mut daemon, vm, second)) = in_two_repositories() else { return };
        let pid = start(&daemon, &vm)["pid"].clone();
        daemon.restart_with(&[(ABORT_AT, &format!("vm-snapshot:{point}"))]);
        // The rollback of a failed one is interrupted by the death of the daemon as well.
        let sealed = if point == "undo" { Sealed::new(second) } else { None };
        if point == "undo" && sealed.is_none() {
            continue;
        }
        daemon.post_and_die(&format!("{vm}/snapshot"), json!({}));
        drop(sealed);
        let before = daemon.log().len();
        daemon.restart();
        daemon.settle();
        let said = daemon.log()[before..].to_owned();
        assert_eq!(said.contains("resuming its guest"), held, "{point}: {said}");
        let now = daemon.get(&vm).1;
        assert_eq!((&now["power"], &now["pid"]), (&json!("running"), &pid), "{point}: {said}");
        assert_eq!(power_of_machine(&mut daemon, &vm), "running", "{point}");
        let (groups, single) = if taken { (1, 2) } else { (0, 0) };
        assert_eq!((snapshots(&daemon, &vm).len(), of_disks(&daemon).len()), (groups, single), "{point}: {said}");
        // Nothing remains that prevents the next one.
        take(&daemon, &vm, json!({}));
        assert_eq!(snapshots(&daemon, &vm).len(), groups + 1, "{point}");
        assert_eq!(power_of_machine(&mut daemon, &vm), "running", "{point}");
        shut_down(&daemon, &vm, json!({ "force": true }));
        daemon.settle();
        nothing_leaked(&daemon);
    }
}

#[test]
fn when_one_disk_fails_there_is_no_snapshot_and_the_guest_continues() {
    let Some((mut daemon, vm, second)) = in_two_repositories() else { return };
    start(&daemon, &vm);
    // The second disk cannot be kept: no new image can be created in its repository.
    let Some(sealed) = Sealed::new(second) else { return };
    let why = daemon.failed(daemon.post(&format!("{vm}/snapshot"), json!({})));
    assert!(why["detail"].as_str().unwrap().contains("/second/"), "{why}");
    drop(sealed);
    assert_eq!((snapshots(&daemon, &vm).len(), of_disks(&daemon).len()), (0, 0), "{}", daemon.log());
    assert_eq!(power_of_machine(&mut daemon, &vm), "running");
    // Nothing remains that prevents the next one.
    take(&daemon, &vm, json!({}));
    assert_eq!(of_disks(&daemon).len(), 2);
    shut_down(&daemon, &vm, json!({ "force": true }));
    daemon.settle();
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_that_cannot_be_kept_is_refused_before_the_guest_is_paused() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    let empty = daemon.post("/vms", json!({ "name": "empty", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 })).1;
    let none = daemon.post(&format!("/vms/{}/snapshot", empty["uuid"].as_str().unwrap()), json!({})).1;
    assert_eq!(none["code"], "state", "{none}");
    take(&daemon, &vm, json!({}));
    let sr = daemon.get("/srs").1[0]["uuid"].clone();
    daemon.done(daemon.post(&format!("/srs/{}/detach", sr.as_str().unwrap()), json!({})));
    let refused = daemon.post(&format!("{vm}/snapshot"), json!({})).1;
    assert_eq!(refused["code"], "state", "{refused}");
    assert_eq!(snapshots(&daemon, &vm).len(), 1);
    // The VM is not reserved by a refused request.
    assert_eq!(daemon.delete(&vm).0, 204);
}

#[test]
fn a_revert_brings_all_disks_back_or_none() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    write(&daemon, &vdis, 1);
    let first = take(&daemon, &vm, json!({ "name": "first" }));
    write(&daemon, &vdis, 2);
    let second = take(&daemon, &vm, json!({ "name": "second" }));
    write(&daemon, &vdis, 3);
    let revert = |snapshot: &str| daemon.post(&format!("{vm}/revert"), json!({ "snapshot": snapshot }));
    start(&daemon, &vm);
    assert_eq!(revert(&first).1["code"], "state");
    shut_down(&daemon, &vm, json!({ "force": true }));
    have(&daemon, &vdis, 3);
    daemon.done(revert(&first));
    have(&daemon, &vdis, 1);
    // The second snapshot lacks a disk: the other disk stays as it is.
    let gone = snapshots(&daemon, &vm)[1]["disks"][1]["snapshot"].as_str().unwrap().to_owned();
    daemon.done(daemon.delete(&format!("/vdis/{gone}")));
    let refused = revert(&second).1;
    assert_eq!((&refused["code"], &refused["field"]), (&json!("state"), &json!("snapshot")), "{refused}");
    have(&daemon, &vdis, 1);
    assert_eq!(revert(&uuid::Uuid::new_v4().to_string()).0, 404);
    // Such a snapshot can still be destroyed.
    daemon.done(daemon.delete(&format!("{vm}/snapshots/{second}")));
    daemon.done(daemon.delete(&format!("{vm}/snapshots/{first}")));
    assert_eq!((snapshots(&daemon, &vm).len(), of_disks(&daemon).len()), (0, 0));
    have(&daemon, &vdis, 1);
    daemon.settle();
    nothing_leaked(&daemon);
}

#[test]
fn a_clone_has_the_hardware_and_the_disks_of_the_vm_or_of_a_snapshot() {
    let Some((daemon, vdis)) = begin("", &["a", "b", "iso"]) else { return };
    assert_eq!(daemon.patch(&format!("/vdis/{}", vdis[2]), json!({ "read_only": true })).0, 200);
    let vm = machine(&daemon, &vdis);
    let nic = json!({ "platform": { "nic": "tap:tap0/52:54:00:ab:cd:ef", "usb": "true" } });
    assert_eq!(daemon.patch(&vm, nic).0, 200);
    write(&daemon, &vdis[..2], 1);
    let snapshot = take(&daemon, &vm, json!({}));
    write(&daemon, &vdis[..2], 2);
    assert_eq!(daemon.patch(&vm, json!({ "vcpus": 1, "platform": {} })).0, 200);
    let clone = |asked: Value| daemon.post(&format!("{vm}/clone"), asked);
    assert_eq!(clone(json!({ "name": "guest" })).1["code"], "name-taken");
    let mut disks = Vec::new();
    for (name, snapshot, vcpus, pattern) in [("old", Some(&snapshot), 2, 1), ("now", None, 1, 2)] {
        let mut asked = json!({ "name": name });
        if let Some(snapshot) = snapshot {
            asked["snapshot"] = json!(snapshot);
        }
        let made = daemon.done(clone(asked));
        let note = made["note"].as_str().unwrap_or_default();
        assert_eq!(note.contains("52:54:00:ab:cd:ef"), snapshot.is_some(), "{made}");
        let new = daemon.get(&format!("/vms/{}", made["uuid"].as_str().unwrap())).1;
        assert_eq!((&new["name"], &new["power"]), (&json!(name), &json!("halted")));
        let platform = if snapshot.is_some() { json!({ "usb": "true" }) } else { json!({}) };
        assert_eq!((&new["vcpus"], &new["memory"], &new["platform"]), (&json!(vcpus), &json!(64 << 20), &platform));
        let vbds = daemon.get(&format!("/vbds?vm={}", made["uuid"].as_str().unwrap())).1;
        let vbds = vbds.as_array().unwrap();
        let of = |key: &str| vbds.iter().map(|vbd| vbd[key].clone()).collect::<Vec<_>>();
        assert_eq!(
            (of("position"), of("mode")),
            (vec![json!(0), json!(1), json!(2)], vec!["RW".into(), "RW".into(), "RO".into()])
        );
        let clones: Vec<String> = of("vdi").iter().map(|vdi| vdi.as_str().unwrap().to_owned()).collect();
        assert_eq!(clones[2], vdis[2]);
        have(&daemon, &clones[..2], pattern);
        disks.extend(clones[..2].iter().map(|vdi| daemon.get(&format!("/vdis/{vdi}")).1["name"].clone()));
    }
    assert_eq!(disks, ["a-clone", "b-clone", "a-clone-2", "b-clone-2"]);
    daemon.settle();
    nothing_leaked(&daemon);
}

/// Each of the other jobs, killed before and after each of its steps: all or nothing is done.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn reverts_clones_and_destructions_are_done_or_undone_after_a_kill() {
    let jobs: [(&str, &[&str], &str); 3] = [
        ("vm-revert", &["files", "record", "remove"], "record"),
        ("vm-clone", &["disks", "record", "seal"], "record"),
        ("vm-snapshot-destroy", &["forget", "remove"], "forget"),
    ];
    for (verb, steps, no_return) in jobs {
        let turns = steps.iter().position(|step| *step == no_return).unwrap();
        for (at, point) in steps
            .iter()
            .enumerate()
            .flat_map(|(at, step)| [(at, format!("{verb}:{step}")), (at, format!("{verb}:{step}:after"))])
        {
            let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
            let vm = machine(&daemon, &vdis);
            write(&daemon, &vdis, 1);
            let snapshot = take(&daemon, &vm, json!({}));
            write(&daemon, &vdis, 2);
            daemon.settle();
            daemon.restart_with(&[(ABORT_AT, &point)]);
            match verb {
                "vm-revert" => daemon.post_and_die(&format!("{vm}/revert"), json!({ "snapshot": snapshot })),
                "vm-clone" => daemon.post_and_die(&format!("{vm}/clone"), json!({ "name": "new" })),
                _ => daemon.ask_and_die("DELETE", &format!("{vm}/snapshots/{snapshot}"), None),
            }
            daemon.restart();
            daemon.settle();
            let done = at >= turns;
            let pattern = if done && verb == "vm-revert" { 1 } else { 2 };
            have(&daemon, &vdis, pattern);
            let (vms, disks) = if done && verb == "vm-clone" { (2, 6) } else { (1, 4) };
            let disks = if done && verb == "vm-snapshot-destroy" { 2 } else { disks };
            let count = |path: &str| daemon.get(path).1.as_array().unwrap().len();
            assert_eq!((count("/vms"), count("/vdis")), (vms, disks), "{point}: {}", daemon.log());
            assert_eq!(snapshots(&daemon, &vm).len(), usize::from(disks != 2), "{point}");
            daemon.settle();
            nothing_leaked(&daemon);
        }
    }
}
