//! VMs of the real daemon, with real QEMUs without a system to boot: started with their disks, paused, stopped, killed
//! and reattached.
//!
//! The firmware looks for a system, finds none and idles; it ignores the power button and never releases a disk.
//! `TAPLINE_QEMU` names another QEMU.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::disks::{nothing_leaked, plug, processes, state, with_disks};
use crate::harness::{Taplined, wait_until};

const QEMU: &str = "qemu-system-x86_64";

/// The QEMU to test with; `None`, which is reported, if it is not installed.
pub fn qemu() -> Option<String> {
    let qemu = std::env::var("TAPLINE_QEMU").unwrap_or_else(|_| QEMU.into());
    if Command::new(&qemu).arg("--version").output().is_err() {
        eprintln!("not run: there is no {qemu}; `make prepare` installs it");
        return None;
    }
    Some(qemu)
}

/// A daemon with disks of these names; `None` without QEMU.
pub fn begin(settings: &str, names: &[&str]) -> Option<(Taplined, Vec<String>)> {
    let qemu = qemu()?;
    Some(with_disks(&format!("qemu-program = {qemu:?}\n{settings}"), names))
}

/// Creates a VM with these disks; returns its path in the API.
#[track_caller]
pub fn machine(daemon: &Taplined, vdis: &[String]) -> String {
    let name = match daemon.get("/vms").1.as_array().unwrap().len() {
        0 => "guest".to_owned(),
        others => format!("guest {others}"),
    };
    let asked = json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 2 });
    let (status, vm) = daemon.post("/vms", asked);
    assert_eq!(status, 201, "{vm}");
    let vm = format!("/vms/{}", vm["uuid"].as_str().unwrap());
    for vdi in vdis {
        add_disk(daemon, &vm, vdi);
    }
    vm
}

/// Creates a VBD of a VM; returns its path in the API.
#[track_caller]
fn add_disk(daemon: &Taplined, vm: &str, vdi: &str) -> String {
    let (status, vbd) = daemon.post("/vbds", json!({ "vdi": vdi, "vm": vm.trim_start_matches("/vms/") }));
    assert_eq!(status, 201, "{vbd}");
    format!("/vbds/{}", vbd["uuid"].as_str().unwrap())
}

#[track_caller]
pub fn start(daemon: &Taplined, vm: &str) -> Value {
    daemon.done(daemon.post(&format!("{vm}/start"), json!({})))
}

#[track_caller]
pub fn shut_down(daemon: &Taplined, vm: &str, how: Value) -> Value {
    daemon.done(daemon.post(&format!("{vm}/shutdown"), how))
}

pub fn power(daemon: &Taplined, vm: &str) -> String {
    daemon.get(vm).1["power"].as_str().unwrap().into()
}

/// The states of the VBDs of a VM.
fn states(daemon: &Taplined, vm: &str) -> Vec<String> {
    let vbds = daemon.get(&format!("/vbds?vm={}", vm.trim_start_matches("/vms/"))).1;
    vbds.as_array().unwrap().iter().map(|vbd| vbd["state"].as_str().unwrap().into()).collect()
}

fn said(problem: &Value) -> &str {
    problem["detail"].as_str().unwrap_or_else(|| panic!("{problem}"))
}

#[test]
fn a_vm_starts_pauses_resumes_and_ends_with_its_disks() {
    let Some((daemon, vdis)) = begin("", &["a", "b", "c"]) else { return };
    let vm = machine(&daemon, &vdis);
    assert_eq!(daemon.get("/vms?match=guest").1.as_array().unwrap().len(), 1);
    let running = start(&daemon, &vm);
    assert_eq!(running["power"], "running");
    assert!(Path::new(running["handle"].as_str().unwrap()).exists(), "{running}");
    assert_eq!(states(&daemon, &vm), ["plugged"; 3]);
    nothing_leaked(&daemon);
    let words = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
    let serial: String = vdis[0].replace('-', "").chars().take(20).collect();
    assert!(processes(&daemon).into_iter().any(|pid| words(pid).contains(&format!("--serial\0{serial}\0"))));
    let twice = daemon.post(&format!("{vm}/start"), json!({})).1;
    assert_eq!((&twice["code"], daemon.delete(&vm).1["code"].as_str()), (&json!("state"), Some("state")));
    assert_eq!(daemon.patch(&vm, json!({ "vcpus": 3 })).1["code"], "state");
    assert_eq!(daemon.done(daemon.post(&format!("{vm}/pause"), json!({})))["power"], "paused");
    assert_eq!(daemon.post(&format!("{vm}/pause"), json!({})).1["code"], "state");
    assert_eq!(daemon.post(&format!("{vm}/shutdown"), json!({})).1["code"], "state");
    assert_eq!(daemon.done(daemon.post(&format!("{vm}/resume"), json!({})))["power"], "running");
    assert_eq!(daemon.get(&vm).1["pid"], running["pid"]);
    let halted = shut_down(&daemon, &vm, json!({ "force": true }));
    assert_eq!((&halted["power"], &halted["problem"]), (&json!("halted"), &Value::Null));
    assert_eq!(states(&daemon, &vm), ["unplugged"; 3]);
    nothing_leaked(&daemon);
    assert_eq!(daemon.delete(&vm).0, 204);
    assert!(daemon.get("/vbds").1.as_array().unwrap().is_empty());
}

#[test]
fn invalid_vms_are_refused_by_field() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let good = json!({ "name": "x", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
    let make = |key: &str, value: Value| {
        let mut asked = good.clone();
        asked[key] = value;
        daemon.post("/vms", asked).1
    };
    let unknown = make("platform", json!({ "viridian": "true" }));
    assert_eq!((&unknown["code"], &unknown["field"]), (&json!("invalid"), &json!("platform.viridian")));
    assert!(said(&unknown).contains("known keys: usb, usb_tablet, parallel, hvm_serial"), "{unknown}");
    let value = make("platform", json!({ "usb": "yes" }));
    assert_eq!(value["field"], "platform.usb");
    assert!(said(&value).contains("allowed: true, false"), "{value}");
    assert_eq!(make("platform", json!({ "usb_tablet": "true" }))["field"], "platform");
    assert_eq!(make("memory", json!((64 << 20) + 512))["field"], "memory");
    assert_eq!(make("memory", json!(1 << 20))["field"], "memory");
    assert_eq!(make("vcpus", json!(0))["field"], "vcpus");
    let xen = make("driver", json!("xen"));
    assert_eq!((&xen["code"], &xen["field"]), (&json!("unsupported"), &json!("boot")));
    assert!(xen["advice"].as_str().unwrap().contains("give a kernel"), "{xen}");
    // With a missing kernel it can be created but not started.
    let vm = machine(&daemon, &[]);
    assert_eq!(daemon.post(&format!("{vm}/start"), json!({})).1["field"], "boot");
    let boot = json!({ "from": "kernel", "kernel": "/no/such/kernel" });
    assert_eq!(daemon.patch(&vm, json!({ "boot": boot })).0, 200);
    let missing = daemon.post(&format!("{vm}/start"), json!({})).1;
    assert_eq!((&missing["code"], &missing["field"]), (&json!("invalid"), &json!("boot.kernel")));
    let patched = daemon.patch(&vm, json!({ "name": "other", "platform": { "hvm_serial": "tcp:1" } })).1;
    assert_eq!(patched["field"], "platform.hvm_serial");
    assert_eq!(daemon.get(&vm).1["name"], "guest");
    assert_eq!(power(&daemon, &vm), "halted");
    let nbd = json!({ "vdi": vdis[0], "vm": vm.trim_start_matches("/vms/"), "transport": "nbd" });
    assert_eq!(daemon.post("/vbds", nbd).1["field"], "transport");
    for verb in ["pause", "resume", "shutdown"] {
        assert_eq!(daemon.post(&format!("{vm}/{verb}"), json!({})).1["code"], "state", "{verb}");
    }
}

#[test]
fn a_failed_start_is_rolled_back_and_says_why() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    let gone = daemon.room().join("disks/a.qcow2");
    let aside = gone.with_extension("aside");
    std::fs::rename(&gone, &aside).unwrap();
    let problem = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    assert!(said(&problem).contains("a.qcow2"), "{problem}");
    let now = daemon.get(&vm).1;
    assert_eq!((&now["power"], &now["problem"]["detail"]), (&json!("halted"), &problem["detail"]));
    nothing_leaked(&daemon);
    std::fs::rename(&aside, &gone).unwrap();
    // Also if all disks are available, but QEMU is not.
    let config = daemon.room().join("taplined.toml");
    let text = std::fs::read_to_string(&config).unwrap();
    let others = text.lines().filter(|line| !line.starts_with("qemu-program")).collect::<Vec<_>>().join("\n");
    std::fs::write(&config, format!("qemu-program = \"/no/such/qemu\"\n{others}\n")).unwrap();
    daemon.restart();
    let problem = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    assert!(said(&problem).contains("/no/such/qemu"), "{problem}");
    assert_eq!((power(&daemon, &vm).as_str(), states(&daemon, &vm)), ("halted", vec!["unplugged".to_owned(); 2]));
    nothing_leaked(&daemon);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_disk_is_hot_plugged_and_force_removed_only_if_needed() {
    let Some((daemon, vdis)) = begin("[plug]\nstep-timeout = 4", &["a", "b", "c"]) else { return };
    let vm = machine(&daemon, &vdis[..1]);
    start(&daemon, &vm);
    let hot = add_disk(&daemon, &vm, &vdis[1]);
    plug(&daemon, &hot);
    assert_eq!(states(&daemon, &vm), ["plugged"; 2]);
    let held = daemon.failed(daemon.post(&format!("{hot}/unplug"), json!({})));
    assert_eq!(held["code"], "in-use");
    assert_eq!(state(&daemon, &hot), "plugged");
    nothing_leaked(&daemon);
    daemon.done(daemon.post(&format!("{hot}/unplug"), json!({ "force": true })));
    assert_eq!(power(&daemon, &vm), "running");
    nothing_leaked(&daemon);
    // The guest has not released the disk: its requests in flight must not reach the disk later, and its slot must
    // stay taken.
    let taken = daemon.failed(daemon.post(&format!("{hot}/plug"), json!({})));
    assert_eq!(taken["code"], "in-use");
    assert_eq!(daemon.delete(&hot).0, 204);
    let other = add_disk(&daemon, &vm, &vdis[2]);
    assert_eq!(daemon.failed(daemon.post(&format!("{other}/plug"), json!({})))["code"], "in-use");
    shut_down(&daemon, &vm, json!({ "force": true }));
    start(&daemon, &vm);
    assert_eq!(states(&daemon, &vm), ["plugged"; 2]);
    nothing_leaked(&daemon);
    shut_down(&daemon, &vm, json!({ "force": true }));
}

#[test]
fn a_killed_qemu_halts_its_vm_with_the_reason() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    crate::harness::kill(&start(&daemon, &vm)["pid"]);
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(said(&daemon.get(&vm).1["problem"]).contains("signal: 9"));
    assert_eq!(states(&daemon, &vm), ["unplugged"; 2]);
    nothing_leaked(&daemon);
    assert_eq!(start(&daemon, &vm)["problem"], Value::Null);
    shut_down(&daemon, &vm, json!({ "force": true }));
}

#[test]
fn a_machine_outlives_the_daemon_and_is_reattached() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis[..1]);
    let before = start(&daemon, &vm);
    daemon.kill();
    daemon.restart();
    let now = daemon.get(&vm).1;
    assert_eq!((&now["power"], &now["pid"], &now["problem"]), (&json!("running"), &before["pid"], &Value::Null));
    nothing_leaked(&daemon);
    // Its monitor is used: a disk is plugged, and it is paused, which the next daemon detects.
    plug(&daemon, &add_disk(&daemon, &vm, &vdis[1]));
    daemon.done(daemon.post(&format!("{vm}/pause"), json!({})));
    daemon.restart();
    assert_eq!((power(&daemon, &vm).as_str(), &daemon.get(&vm).1["pid"]), ("paused", &before["pid"]));
    daemon.done(daemon.post(&format!("{vm}/resume"), json!({})));
    crate::harness::kill(&before["pid"]);
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(said(&daemon.get(&vm).1["problem"]).contains("exit status unknown"));
    nothing_leaked(&daemon);
    // The exit of a VM is reported with the reason, also by a daemon that has not started it.
    let again = start(&daemon, &vm);
    daemon.restart();
    assert!(Command::new("kill").arg(again["pid"].to_string()).status().unwrap().success());
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(said(&daemon.get(&vm).1["problem"]).contains("host-signal"), "{}", daemon.get(&vm).1);
}

/// The catalogue is older than the start of the VM, or no longer contains it.
#[test]
fn a_machine_unknown_to_the_catalogue_keeps_running() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    assert_eq!(daemon.post("/host/backups", json!({})).0, 201);
    let before = start(&daemon, &vm);
    daemon.kill();
    assert_eq!(daemon.command(&["--restore", "latest"]).0, 0);
    daemon.restart();
    let now = daemon.get(&vm).1;
    assert_eq!((&now["power"], &now["pid"], &now["problem"]), (&json!("running"), &before["pid"], &Value::Null));
    assert_eq!(states(&daemon, &vm), ["plugged"; 2]);
    nothing_leaked(&daemon);
    // It ran at that time, and has been restarted since.
    assert_eq!(daemon.post("/host/backups", json!({})).0, 201);
    shut_down(&daemon, &vm, json!({ "force": true }));
    let before = start(&daemon, &vm);
    daemon.kill();
    assert_eq!(daemon.command(&["--restore", "latest"]).0, 0);
    daemon.restart();
    let now = daemon.get(&vm).1;
    assert_eq!((&now["power"], &now["pid"], &now["problem"]), (&json!("running"), &before["pid"], &Value::Null));
    assert_eq!(states(&daemon, &vm), ["plugged"; 2]);
    nothing_leaked(&daemon);
    daemon.kill();
    std::fs::remove_dir_all(daemon.room().join("state")).unwrap();
    let disks = daemon.room().join("disks");
    assert_eq!(daemon.command(&["--rebuild", disks.to_str().unwrap()]).0, 0);
    daemon.restart();
    assert_eq!(daemon.get("/vms").1, json!([]));
    let vbds = daemon.get("/vbds").1;
    assert!(vbds.as_array().unwrap().iter().all(|vbd| vbd["state"] == "plugged"), "{vbds}\n{}", daemon.log());
    assert!(Path::new(&format!("/proc/{}", before["pid"])).exists());
    assert!(daemon.log().contains("not touching"), "{}", daemon.log());
    crate::harness::kill(&before["pid"]);
}

/// A backup may be taken at any time.
#[test]
fn a_backup_from_the_middle_of_a_start_or_shutdown_ends_no_machine() {
    let Some((mut daemon, vdis)) = begin("[plug]\ninjected-delays = true", &["slow~2000ms"]) else { return };
    let vm = machine(&daemon, &vdis);
    let copy = |state: &str| {
        wait_until(state, || power(&daemon, &vm) == state);
        let (status, made) = daemon.post("/host/backups", json!({}));
        assert_eq!(status, 201, "{made}");
        let kept = daemon.room().join(state);
        std::fs::copy(made["file"].as_str().unwrap(), &kept).unwrap();
        kept
    };
    let started = daemon.post(&format!("{vm}/start"), json!({}));
    let starting = copy("starting");
    let before = daemon.done(started);
    let asked = daemon.post(&format!("{vm}/shutdown"), json!({ "force_after": 600 })).1;
    let stopping = copy("stopping");
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", asked["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&asked)["state"], "cancelled");
    let disks = processes(&daemon);
    for older in [starting, stopping] {
        daemon.kill();
        assert_eq!(daemon.command(&["--restore", older.to_str().unwrap()]).0, 0);
        daemon.restart();
        let now = daemon.get(&vm).1;
        let case = format!("{} {now}: {}", older.display(), daemon.log());
        assert_eq!((&now["power"], &now["pid"]), (&json!("running"), &before["pid"]), "{case}");
        assert_eq!((states(&daemon, &vm), processes(&daemon)), (vec!["plugged".into()], disks.clone()), "{case}");
        nothing_leaked(&daemon);
    }
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}

/// According to the catalogue the VM runs and has the disk; since then it has ended, and the disk was plugged without
/// it.
#[test]
fn a_disk_plugged_after_its_vms_end_stays_plugged_with_an_older_catalogue() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    assert_eq!(daemon.post("/host/backups", json!({})).0, 201);
    shut_down(&daemon, &vm, json!({ "force": true }));
    let vbds = daemon.get(&format!("/vbds?vm={}", vm.trim_start_matches("/vms/"))).1;
    let (other, used) = (vbds[0].clone(), format!("/vbds/{}", vbds[1]["uuid"].as_str().unwrap()));
    let pid = plug(&daemon, &used)["pid"].clone();
    daemon.kill();
    assert_eq!(daemon.command(&["--restore", "latest"]).0, 0);
    daemon.restart();
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    let now = daemon.get(&used).1;
    assert_eq!((&now["state"], &now["pid"]), (&json!("plugged"), &pid), "{}", daemon.log());
    assert_eq!(daemon.get(&format!("/vbds/{}", other["uuid"].as_str().unwrap())).1["state"], "unplugged");
    // The VM starts with it.
    start(&daemon, &vm);
    assert_eq!(states(&daemon, &vm), ["plugged"; 2]);
    shut_down(&daemon, &vm, json!({ "force": true }));
    assert_eq!(states(&daemon, &vm), ["unplugged"; 2]);
    nothing_leaked(&daemon);
}

#[test]
fn a_machine_that_ended_without_daemon_is_halted_by_the_next() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    let pid = start(&daemon, &vm)["pid"].clone();
    daemon.kill();
    crate::harness::kill(&pid);
    daemon.restart();
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(said(&daemon.get(&vm).1["problem"]).contains("while the daemon was not running"));
    nothing_leaked(&daemon);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_machine_with_a_held_monitor_keeps_running_and_can_be_forced_off() {
    let Some((mut daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    for by_force in [true, false] {
        let running = start(&daemon, &vm);
        daemon.kill();
        let held = std::os::unix::net::UnixStream::connect(running["handle"].as_str().unwrap()).unwrap();
        daemon.restart();
        let now = daemon.get(&vm).1;
        assert_eq!((&now["power"], &now["pid"]), (&json!("running"), &running["pid"]));
        assert!(said(&now["problem"]).contains("another client holds its monitor"), "{now}");
        match by_force {
            true => drop(shut_down(&daemon, &vm, json!({ "force": true }))),
            false => crate::harness::kill(&running["pid"]),
        }
        wait_until("it is halted", || power(&daemon, &vm) == "halted");
        assert_eq!(states(&daemon, &vm), ["unplugged"]);
        nothing_leaked(&daemon);
        drop(held);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_daemon_that_dies_during_start_or_shutdown_leaves_nothing_half_done() {
    let Some((mut daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let vm = machine(&daemon, &vdis);
    for point in ["vm-start:plug", "vm-start:plug:after", "vm-start:start:after"] {
        daemon.restart_with(&[("TAPLINED_ABORT_AT", point)]);
        daemon.post(&format!("{vm}/start"), json!({}));
        daemon.wait_for_death();
        daemon.restart_with(&[]);
        wait_until("it is halted", || power(&daemon, &vm) == "halted");
        assert!(said(&daemon.get(&vm).1["problem"]).contains("the daemon stopped during the"), "{point}");
        nothing_leaked(&daemon);
    }
    for point in ["vm-shutdown:ask", "vm-shutdown:end", "vm-shutdown:end:after", "vm-end:unplug:after"] {
        daemon.restart_with(&[("TAPLINED_ABORT_AT", point)]);
        start(&daemon, &vm);
        daemon.post(&format!("{vm}/shutdown"), json!({ "force_after": 1 }));
        daemon.wait_for_death();
        daemon.restart_with(&[]);
        wait_until("it is halted", || power(&daemon, &vm) == "halted");
        assert_eq!(states(&daemon, &vm), ["unplugged"; 2], "{point}");
        nothing_leaked(&daemon);
    }
}

#[test]
fn a_shutdown_can_be_cancelled_until_the_guest_is_stopped() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    let asked = daemon.post(&format!("{vm}/shutdown"), json!({})).1;
    wait_until("it is asked", || power(&daemon, &vm) == "stopping");
    assert_eq!(daemon.post(&format!("{vm}/shutdown"), json!({})).1["code"], "busy");
    wait_until("the guest is waited for", || {
        daemon.get(&format!("/tasks/{}", asked["uuid"].as_str().unwrap())).1["step"] == "ask"
    });
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", asked["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&asked)["state"], "cancelled");
    assert_eq!(power(&daemon, &vm), "running");
    assert_eq!(shut_down(&daemon, &vm, json!({ "force_after": 1 }))["power"], "halted");
    // Force skips the wait.
    start(&daemon, &vm);
    let patient = daemon.post(&format!("{vm}/shutdown"), json!({ "force_after": 600 })).1;
    assert_eq!(shut_down(&daemon, &vm, json!({ "force": true }))["power"], "halted");
    assert_eq!(daemon.wait(&patient)["state"], "cancelled");
    nothing_leaked(&daemon);
}

#[test]
fn a_resumed_shutdown_can_still_be_cancelled() {
    let Some((mut daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    let asked = daemon.post(&format!("{vm}/shutdown"), json!({ "force_after": 600 })).1;
    wait_until("the guest is waited for", || {
        daemon.get(&format!("/tasks/{}", asked["uuid"].as_str().unwrap())).1["step"] == "ask"
    });
    daemon.kill();
    daemon.restart();
    let tasks = daemon.get("/tasks?open=true").1;
    let again = tasks.as_array().unwrap().iter().find(|task| task["verb"] == "vm-shutdown");
    let again = again.unwrap_or_else(|| panic!("{tasks}")).clone();
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", again["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&again)["state"], "cancelled");
    assert_eq!((power(&daemon, &vm), states(&daemon, &vm)), ("running".into(), vec!["plugged".into()]));
    assert_eq!(shut_down(&daemon, &vm, json!({ "force": true }))["power"], "halted");
    nothing_leaked(&daemon);
}

#[test]
fn a_guest_that_powers_off_halts_its_vm_without_a_problem() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    // mov dx, 0x604; mov ax, 0x2000; out dx, ax; hlt; jmp: the power management of the chipset, at the address set by
    // the firmware.
    let mut sector = vec![0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef, 0xf4, 0xeb, 0xfd];
    sector.resize(510, 0);
    sector.extend([0x55, 0xaa]);
    let file = daemon.room().join("sector");
    std::fs::write(&file, sector).unwrap();
    let write = format!("write -s {} 0 512", file.display());
    let image = daemon.room().join("disks/a.qcow2");
    let written = Command::new("qemu-io").args(["-f", "qcow2", "-c", &write]).arg(image).output().unwrap();
    assert!(written.status.success(), "{written:?}");
    let vm = machine(&daemon, &vdis);
    start(&daemon, &vm);
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert_eq!(daemon.get(&vm).1["problem"], Value::Null);
    assert_eq!(states(&daemon, &vm), ["unplugged"; 2]);
    nothing_leaked(&daemon);
}

#[test]
fn a_cancelled_start_is_rolled_back_without_separate_plugs() {
    let Some((daemon, vdis)) = begin("[plug]\ninjected-delays = true", &["a", "b~30000ms", "c"]) else { return };
    let vm = machine(&daemon, &vdis[..2]);
    let asked = daemon.post(&format!("{vm}/start"), json!({})).1;
    wait_until("one disk is plugged", || states(&daemon, &vm) == ["plugged", "plugging"]);
    let late = add_disk(&daemon, &vm, &vdis[2]);
    let (status, busy) = daemon.post(&format!("{late}/plug"), json!({}));
    assert_eq!((status, &busy["code"]), (409, &json!("busy")), "{busy}");
    assert_eq!(daemon.delete(&late).0, 204);
    assert_eq!(daemon.post(&format!("{vm}/start"), json!({})).1["code"], "busy");
    assert_eq!(daemon.post(&format!("/tasks/{}/cancel", asked["uuid"].as_str().unwrap()), json!({})).0, 200);
    assert_eq!(daemon.wait(&asked)["state"], "cancelled");
    let now = daemon.get(&vm).1;
    assert_eq!((&now["power"], &now["problem"]), (&json!("halted"), &Value::Null));
    nothing_leaked(&daemon);
    // The same by force, which does not wait for slow storage.
    let asked = daemon.post(&format!("{vm}/start"), json!({})).1;
    wait_until("one disk is plugged", || states(&daemon, &vm) == ["plugged", "plugging"]);
    assert_eq!(shut_down(&daemon, &vm, json!({ "force": true }))["power"], "halted");
    assert_eq!(daemon.wait(&asked)["state"], "cancelled");
    nothing_leaked(&daemon);
}

#[test]
fn a_dead_disk_process_is_replaced_under_a_guest() {
    let Some((daemon, vdis)) = begin("[plug]\nstep-timeout = 4", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    let pid = start(&daemon, &vm)["pid"].clone();
    let vbd = format!("/vbds/{}", daemon.get("/vbds").1[0]["uuid"].as_str().unwrap());
    let before = daemon.get(&vbd).1["pid"].clone();
    crate::harness::kill(&before);
    wait_until("another one serves", || {
        let now = daemon.get(&vbd).1;
        now["state"] == "plugged" && now["pid"] != before
    });
    assert_eq!(daemon.get(&vm).1["pid"], pid);
    // The guest is connected to it: it is only unplugged with force.
    assert_eq!(daemon.failed(daemon.post(&format!("{vbd}/unplug"), json!({})))["code"], "in-use");
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}

#[test]
fn a_machine_keeps_its_disk_connection_across_upgrades() {
    let Some((daemon, vdis)) = begin("", &["a"]) else { return };
    let vm = machine(&daemon, &vdis);
    let pid = start(&daemon, &vm)["pid"].clone();
    let vbd = format!("/vbds/{}", daemon.get("/vbds").1[0]["uuid"].as_str().unwrap());
    let connection = |vbd: &str| connections(&daemon.get(vbd).1["socket"]);
    let log = daemon.room().join(format!("log{}.log", vbd.replace("/vbds", "/vbd")));
    let said = || std::fs::read_to_string(&log).unwrap();
    wait_until("the firmware has started the disk", || said().contains("the front-end records requests in flight"));
    // The connection that checked whether the disk is served, before QEMU connected, disappears as soon as the kernel
    // has closed it.
    wait_until("QEMU alone is connected", || connection(&vbd).len() == 1);
    let first = connection(&vbd);
    for _ in 0..4 {
        daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})));
        // QEMU stops the disk's rings and starts them again, with whichever process serves by then.
        daemon.done(daemon.post(&format!("{vm}/pause"), json!({})));
        daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})));
        daemon.done(daemon.post(&format!("{vm}/resume"), json!({})));
        let (now, machine) = (daemon.get(&vbd).1, daemon.get(&vm).1);
        assert_eq!((&now["state"], &now["restarts"], &now["problem"]), (&json!("plugged"), &json!(0), &Value::Null));
        assert_eq!((&machine["power"], &machine["pid"]), (&json!("running"), &pid));
        assert_eq!(connection(&vbd), first, "QEMU has had to connect again");
        nothing_leaked(&daemon);
    }
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}

/// The inodes of connections accepted at a socket (proc(5), /proc/net/unix: state 3).
fn connections(socket: &Value) -> Vec<String> {
    let known = std::fs::read_to_string("/proc/net/unix").unwrap();
    let rows = known.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ours = rows.filter(|row| row.get(7).is_some_and(|path| socket == path) && row[5] == "03");
    ours.map(|row| row[6].to_owned()).collect()
}

#[test]
fn a_drain_shuts_down_vms_before_their_disks() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let (runs, held) = (machine(&daemon, &vdis[..1]), machine(&daemon, &vdis[1..]));
    start(&daemon, &runs);
    start(&daemon, &held);
    daemon.done(daemon.post(&format!("{held}/pause"), json!({})));
    let drained = daemon.done(daemon.post("/host/drain", json!({ "timeout": 1 })));
    assert_eq!(drained["forced"], 0, "a disk was taken from under a machine\n{}", daemon.log());
    assert_eq!([power(&daemon, &runs), power(&daemon, &held)], ["halted"; 2]);
    nothing_leaked(&daemon);
}

#[test]
fn configurations_for_external_machines_are_printed() {
    let Some((daemon, vdis)) = begin("", &["a", "b"]) else { return };
    let (vhost, nbd) = ("vhost-user", "nbd");
    let vbd = harness::disks::vbd(&daemon, &vdis[0], vhost);
    let text = |path: &str| daemon.text(path);
    assert_eq!(daemon.get(&format!("{vbd}/connect?for=qemu")).1["code"], "state");
    let xl = text(&format!("{vbd}/connect?for=xl"));
    assert!(xl.contains("vdev=xvda,access=rw,script=block-tapline,target=qcow2:/"), "{xl}");
    plug(&daemon, &vbd);
    assert_eq!(daemon.get(&format!("{vbd}/connect?for=xl")).1["code"], "state");
    let socket = daemon.get(&vbd).1["socket"].as_str().unwrap().to_owned();
    let words = [("qemu", "reconnect=1"), ("qemu-9.2", "reconnect-ms=100"), ("libvirt", "<disk")];
    for (reader, word) in words.into_iter().chain([("cloud-hypervisor", "vhost_user=on")]) {
        let said = text(&format!("{vbd}/connect?for={reader}"));
        assert!(said.contains(&socket) && said.contains(word), "{said}");
    }
    assert_eq!(daemon.get(&format!("{vbd}/connect?for=bhyve")).1["code"], "invalid");
    let other = harness::disks::vbd(&daemon, &vdis[1], nbd);
    plug(&daemon, &other);
    let refused = daemon.get(&format!("{other}/connect?for=cloud-hypervisor")).1;
    assert_eq!((&refused["code"], &refused["field"]), (&json!("unsupported"), &json!("for")));
}

#[test]
fn a_xen_guest_uses_blkif_and_a_failed_one_leaves_nothing() {
    let (daemon, vdis) = with_disks("xl-program = \"/there/is/no/xl\"", &["one", "two"]);
    let kernel = json!({ "from": "kernel", "kernel": std::env::current_exe().unwrap(), "cmdline": "console=hvc0" });
    let mut asked = json!({ "name": "guest", "driver": "xen", "memory": 64 << 20, "vcpus": 1, "boot": kernel });
    for (key, value, field) in [("usb", "true", "platform.usb"), ("type", "hvm", "platform.type")] {
        asked["platform"] = json!({ key: value });
        let (_, refused) = daemon.post("/vms", asked.clone());
        assert_eq!((&refused["code"], &refused["field"]), (&json!("invalid"), &json!(field)));
    }
    asked["platform"] = json!({ "type": "pv", "tsc_mode": "2" });
    let mut quoted = asked.clone();
    quoted["boot"]["cmdline"] = json!("it's");
    assert_eq!(daemon.post("/vms", quoted).1["field"], "boot.cmdline");
    let (status, vm) = daemon.post("/vms", asked);
    assert_eq!(status, 201, "{vm}");
    let vm = format!("/vms/{}", vm["uuid"].as_str().unwrap());

    let vbd = add_disk(&daemon, &vm, &vdis[0]);
    assert_eq!(daemon.get(&vbd).1["transport"], "blkif");
    for transport in ["nbd", "vhost-user"] {
        let vbd = json!({ "vdi": vdis[1], "vm": vm.trim_start_matches("/vms/"), "transport": transport });
        assert_eq!(daemon.post("/vbds", vbd).1["field"], "transport");
    }
    // No VM could use it.
    let (status, refused) = daemon.post(&format!("{vbd}/plug"), json!({}));
    assert!(status == 409 && said(&refused).contains("is not running"), "{status} {refused}");

    let failed = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    assert!(failed["advice"].as_str().unwrap().contains("of a Xen host"), "{failed}");
    assert_eq!(power(&daemon, &vm), "halted");
    assert_eq!(states(&daemon, &vm), ["unplugged"]);
    nothing_leaked(&daemon);
}
