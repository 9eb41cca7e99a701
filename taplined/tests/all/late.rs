//! Cancellations before, in and after a step, and programs that obey after the time limit: the reported state is the
//! real one.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{nothing_leaked, plug, processes, state, vbd, with_disks};
use crate::harness::{Taplined, wait_until};
use crate::vm::{begin, machine, power, qemu, shut_down, start};
use crate::vm_snapshot::Sealed;

#[track_caller]
fn signal(name: &str, pid: &Value) {
    assert!(Command::new("kill").args([name, &pid.to_string()]).status().unwrap().success());
}

fn path_of(task: &Value) -> String {
    format!("/tasks/{}", task["uuid"].as_str().unwrap())
}

/// Starts destroying a VDI while the inventory of its repository is behind and cannot be written: the task waits
/// before its first step. Returns the task, and a value that makes the inventory writable when dropped; `None` where
/// it is always writable.
fn waiting_destroy(daemon: &Taplined, vdi: &str) -> Option<(Value, Sealed)> {
    let sealed = Sealed::new(daemon.room().join("disks/.tapline-inventory.jsonl"))?;
    assert_eq!(daemon.patch(&format!("/vdis/{vdi}"), json!({ "description": "a change" })).0, 200);
    let (status, task) = daemon.delete(&format!("/vdis/{vdi}"));
    assert_eq!(status, 202, "{task}");
    wait_until("the task says why it waits", || daemon.get(&path_of(&task)).1["problem"].is_object());
    let waiting = daemon.get(&path_of(&task)).1;
    assert_eq!((&waiting["state"], &waiting["step"]), (&json!("pending"), &Value::Null), "{waiting}");
    Some((task, sealed))
}

#[test]
fn a_destroy_cancelled_before_its_first_step_destroys_nothing() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let Some((task, sealed)) = waiting_destroy(&daemon, &vdis[0]) else { return };
    let (status, cancelled) = daemon.post(&format!("{}/cancel", path_of(&task)), json!({}));
    assert_eq!((status, &cancelled["state"]), (200, &json!("cancelling")), "{cancelled}");
    assert_eq!(daemon.wait(&task)["state"], "cancelled");
    drop(sealed);
    assert_eq!(daemon.get(&format!("/vdis/{}", vdis[0])).0, 200);
    daemon.done(daemon.delete(&format!("/vdis/{}", vdis[0])));
    let (status, late) = daemon.post(&format!("{}/cancel", path_of(&task)), json!({}));
    assert_eq!((status, &late["code"]), (409, &json!("state")));
    assert!(late["detail"].as_str().unwrap().contains("has ended"), "{late}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_waiting_destroy_fails_if_its_vdi_got_a_vbd() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let Some((task, sealed)) = waiting_destroy(&daemon, &vdis[0]) else { return };
    vbd(&daemon, &vdis[0], "nbd");
    drop(sealed);
    let failed = daemon.wait(&task);
    assert_eq!((&failed["state"], &failed["problem"]["code"]), (&json!("failed"), &json!("in-use")), "{failed}");
    assert_eq!(daemon.get(&format!("/vdis/{}", vdis[0])).0, 200);
}

/// A daemon killed in the first step of a destroy resumes it; one killed before that step rolls it back.
#[test]
fn a_destroy_is_resumed_only_if_its_first_step_has_begun() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let Some((task, sealed)) = waiting_destroy(&daemon, &vdis[0]) else { return };
    daemon.kill();
    drop(sealed);
    daemon.restart();
    assert_eq!(daemon.wait(&task)["state"], "failed");
    assert_eq!(daemon.get(&format!("/vdis/{}", vdis[0])).0, 200);
    daemon.restart_with(&[(crate::harness::ABORT_AT, "vdi-destroy:forget")]);
    daemon.ask_and_die("DELETE", &format!("/vdis/{}", vdis[0]), None);
    daemon.restart();
    wait_until("it is destroyed", || daemon.get(&format!("/vdis/{}", vdis[0])).0 == 404);
    daemon.settle();
}

/// A cancellation takes effect when the copying process has exited: until then its file cannot be removed.
#[test]
fn a_cancelled_copy_is_rolled_back_at_the_first_attempt() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let sr = daemon.get("/srs").1[0]["uuid"].clone();
    for _ in 0..8 {
        let (status, task) = daemon.post(&format!("/vdis/{}/copy", vdis[0]), json!({ "sr": sr, "name": "copy" }));
        assert_eq!(status, 202, "{task}");
        wait_until("its first step has begun", || !daemon.get(&path_of(&task)).1["step"].is_null());
        daemon.post(&format!("{}/cancel", path_of(&task)), json!({}));
        let ended = daemon.wait(&task);
        if ended["state"] == "done" {
            daemon.done(daemon.delete(&format!("/vdis/{}", ended["result"]["uuid"].as_str().unwrap())));
        }
    }
    daemon.settle();
    assert!(!daemon.log().contains("did not succeed"), "{}", daemon.log());
    let files = fs::read_dir(daemon.room().join("disks")).unwrap().flatten();
    let names = files.map(|entry| entry.file_name().into_string().unwrap());
    let images: Vec<_> = names.filter(|name| name.ends_with("qcow2")).collect();
    assert_eq!(images.len(), 1, "{images:?}");
}

#[test]
fn a_forced_unplug_that_kills_the_process_is_done() {
    let (daemon, vdis) = with_disks("[plug]\nstep-timeout = 2", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let plugged = plug(&daemon, &vbd);
    signal("-STOP", &plugged["pid"]);
    let unplugged = daemon.done(daemon.post(&format!("{vbd}/unplug"), json!({ "force": true })));
    assert_eq!(unplugged["state"], "unplugged");
    // It still reports the possible loss.
    assert!(unplugged["problem"]["detail"].as_str().unwrap().contains("did not exit cleanly"), "{unplugged}");
    nothing_leaked(&daemon);
}

/// A daemon whose machines hang before they respond, and the directory of their program.
fn hesitant(names: &[&str]) -> Option<(tempfile::TempDir, Taplined, Vec<String>)> {
    let qemu = qemu()?;
    let room = tempfile::Builder::new().prefix("qemu-").tempdir().unwrap();
    let script = room.path().join("qemu");
    let hangs = "case \"$*\" in *id=monitor*) kill -STOP $$;; esac";
    testkit::program::script(&script, &format!("{hangs}\nexec {qemu} \"$@\""));
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (daemon, vdis) = with_disks(&format!("qemu-program = {script:?}"), names);
    Some((room, daemon, vdis))
}

#[test]
fn a_starting_vm_keeps_its_disk_and_can_be_cancelled() {
    let Some((_room, daemon, vdis)) = hesitant(&["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    let (status, task) = daemon.post(&format!("{vm}/start"), json!({}));
    assert_eq!(status, 202, "{task}");
    let disk = daemon.get("/vbds").1[0]["uuid"].as_str().map(|uuid| format!("/vbds/{uuid}")).unwrap();
    wait_until("QEMU hangs", || daemon.get(&path_of(&task)).1["step"] == "start" && state(&daemon, &disk) == "plugged");
    for force in [false, true] {
        let (status, busy) = daemon.post(&format!("{disk}/unplug"), json!({ "force": force }));
        assert_eq!((status, &busy["code"]), (409, &json!("busy")), "{busy}");
        assert!(busy["advice"].as_str().unwrap().contains("cancel"), "{busy}");
    }
    assert_eq!(state(&daemon, &disk), "plugged");
    assert_eq!(daemon.post(&format!("{}/cancel", path_of(&task)), json!({})).0, 200);
    assert_eq!(daemon.wait(&task)["state"], "cancelled");
    assert_eq!(power(&daemon, &vm), "halted");
    nothing_leaked(&daemon);
    assert!(processes(&daemon).is_empty());
}

/// Requests a change of the power of a VM whose QEMU hangs; it takes effect when QEMU continues.
fn late(verb: &str, before: &str, after: &str) {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    let pid = start(&daemon, &vm)["pid"].clone();
    if before == "paused" {
        daemon.done(daemon.post(&format!("{vm}/pause"), json!({})));
    }
    signal("-STOP", &pid);
    let failed = daemon.failed(daemon.post(&format!("{vm}/{verb}"), json!({})));
    assert_eq!(failed["code"], "timeout", "{failed}");
    let unknown = daemon.get(&vm).1;
    assert_eq!(unknown["power"], before);
    assert!(unknown["problem"]["detail"].as_str().unwrap().contains("unknown"), "{unknown}");
    signal("-CONT", &pid);
    wait_until("it is recorded what QEMU did", || power(&daemon, &vm) == after);
    assert_eq!(daemon.get(&vm).1["problem"], Value::Null);
    let opposite = if verb == "pause" { "resume" } else { "pause" };
    assert_eq!(daemon.done(daemon.post(&format!("{vm}/{opposite}"), json!({})))["power"], before);
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_pause_that_qemu_obeys_late_is_recorded() {
    late("pause", "running", "paused");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_resume_that_qemu_obeys_late_is_recorded() {
    late("resume", "paused", "running");
}

#[test]
fn a_wrong_recorded_power_does_not_refuse_a_pause() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    let pid = start(&daemon, &vm)["pid"].clone();
    daemon.catalogue().execute("UPDATE vm SET power = 'paused'", []).unwrap();
    assert_eq!(daemon.get(&vm).1["pid"], pid);
    assert_eq!(daemon.done(daemon.post(&format!("{vm}/pause"), json!({})))["power"], "paused");
    shut_down(&daemon, &vm, json!({ "force": true }));
}

#[test]
fn a_running_guest_recorded_as_paused_is_held_for_a_snapshot() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    daemon.restart_with(&[(crate::harness::ABORT_AT, "vm-snapshot:pause:after")]);
    daemon.catalogue().execute("UPDATE vm SET power = 'paused'", []).unwrap();
    daemon.post_and_die(&format!("{vm}/snapshot"), json!({}));
    let held: Option<String> = daemon.catalogue().query_row("SELECT held_for FROM vm", [], |row| row.get(0)).unwrap();
    assert!(held.is_some());
    daemon.restart();
    assert_eq!(power(&daemon, &vm), "running");
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}
