//! Autostart after a boot of the host. A boot is simulated: all processes are killed, and the boot ID recorded in the
//! catalogue is replaced.

use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::disks::{disks_of, machines_of, plug, reboot, state, unplug, vbd, with_disks};
use crate::harness::{Taplined, wait_until};

/// Simulates a power loss and a boot of the host.
fn lose_power(daemon: &mut Taplined) {
    daemon.kill();
    go_down(daemon);
    daemon.restart();
}

/// Kills the disks and VMs of a daemon that has ended.
fn go_down(daemon: &Taplined) {
    let run = daemon.room().join("run");
    for pid in disks_of(&run.join("vbd")).into_iter().chain(machines_of(&run.join("vm"))) {
        Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    wait_until("all have ended", || disks_of(&run.join("vbd")).is_empty() && machines_of(&run.join("vm")).is_empty());
    reboot(daemon);
    // Including everything that is only in memory.
    std::fs::remove_file(run.join("boot")).unwrap();
}

fn set(daemon: &Taplined, object: &str, autostart: Value) {
    let (status, set) = daemon.patch(object, json!({ "autostart": autostart }));
    assert_eq!(status, 200, "{set}");
}

fn becomes(daemon: &Taplined, vbd: &str, wanted: &str) {
    wait_until(&format!("{vbd} is {wanted}"), || state(daemon, vbd) == wanted);
}

#[test]
fn autostart_plugs_a_disk_after_a_reboot_but_not_after_a_daemon_restart() {
    let (mut daemon, vdis) = with_disks("", &["a", "b", "c"]);
    let [with, without, plugged] = [0, 1, 2].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    set(&daemon, &with, json!({ "order": 3 }));
    assert_eq!(daemon.get(&with).1["autostart"], json!({ "order": 3, "delay": 0, "tries": 5 }));
    plug(&daemon, &with);
    plug(&daemon, &plugged);
    // A disk unplugged on purpose stays unplugged when the daemon is restarted, however it ended.
    unplug(&daemon, &with);
    daemon.restart();
    daemon.kill();
    daemon.restart();
    daemon.settle();
    assert_eq!([&with, &without, &plugged].map(|vbd| state(&daemon, vbd)), ["unplugged", "unplugged", "plugged"]);
    lose_power(&mut daemon);
    becomes(&daemon, &with, "plugged");
    daemon.settle();
    assert_eq!([&without, &plugged].map(|vbd| state(&daemon, vbd)), ["unplugged", "unplugged"]);
    assert!(daemon.get(&plugged).1["problem"]["detail"].as_str().unwrap().contains("the host was rebooted"));
    // Only once: not again by the next daemon.
    unplug(&daemon, &with);
    daemon.kill();
    daemon.restart();
    daemon.settle();
    assert_eq!(state(&daemon, &with), "unplugged");
    // Nor after the setting is withdrawn.
    set(&daemon, &with, Value::Null);
    lose_power(&mut daemon);
    daemon.settle();
    assert_eq!(state(&daemon, &with), "unplugged");
}

/// The boot ID recorded in the catalogue differs although the host was not booted.
#[test]
fn a_catalogue_restored_from_before_the_boot_starts_nothing() {
    let (mut daemon, vdis) = with_disks("[autostart]\nplugged = true", &["a", "b"]);
    let [with, plugged] = [0, 1].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    set(&daemon, &with, json!({}));
    plug(&daemon, &plugged);
    daemon.kill();
    reboot(&daemon);
    daemon.restart();
    daemon.settle();
    assert_eq!([&with, &plugged].map(|vbd| state(&daemon, vbd)), ["unplugged", "plugged"]);
}

#[test]
fn disks_plugged_before_a_reboot_are_plugged_again_if_configured() {
    let (mut daemon, vdis) = with_disks("[autostart]\nplugged = true", &["a", "b", "c"]);
    let [stays, stopped, last] = [0, 1, 2].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    [&stays, &stopped, &last].into_iter().for_each(|vbd| drop(plug(&daemon, vbd)));
    unplug(&daemon, &stopped);
    lose_power(&mut daemon);
    becomes(&daemon, &stays, "plugged");
    becomes(&daemon, &last, "plugged");
    assert_eq!(state(&daemon, &stopped), "unplugged");
    // As the service does at an orderly shutdown of the host. One disk is plugged and unplugged again after the
    // drain.
    daemon.done(daemon.post("/host/drain", json!({ "timeout": 0 })));
    plug(&daemon, &last);
    unplug(&daemon, &last);
    assert!(daemon.stop());
    go_down(&daemon);
    daemon.restart();
    becomes(&daemon, &stays, "plugged");
    daemon.settle();
    assert_eq!([&stopped, &last].map(|vbd| state(&daemon, vbd)), ["unplugged", "unplugged"]);
}

#[test]
fn autostart_follows_order_and_delays() {
    let (mut daemon, vdis) = with_disks("", &["a", "b", "c"]);
    let vbds = [0, 1, 2].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    for (vbd, order) in vbds.iter().zip([7, 1, 4]) {
        set(&daemon, vbd, json!({ "order": order, "delay": u8::from(order == 1) }));
    }
    lose_power(&mut daemon);
    vbds.iter().for_each(|vbd| becomes(&daemon, vbd, "plugged"));
    daemon.settle();
    let tasks = daemon.get("/tasks").1;
    let plugs: Vec<&Value> = tasks.as_array().unwrap().iter().filter(|task| task["verb"] == "vbd-plug").rev().collect();
    let of = |task: &Value| format!("/vbds/{}", task["about"][0]["uuid"].as_str().unwrap());
    assert_eq!(plugs.iter().map(|task| of(task)).collect::<Vec<_>>(), [1, 2, 0].map(|at| vbds[at].clone()));
    let at = |task: &Value, key: &str| task[key].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    assert!(at(plugs[1], "created").duration_since(at(plugs[0], "ended")).as_millis() >= 900, "{plugs:?}");
    assert!(at(plugs[2], "created") >= at(plugs[1], "ended"));
}

#[test]
fn a_failed_autostart_is_retried_and_finally_reported() {
    let settings = "[autostart]\nretry-after = 1\n[storage]\nlost-interval = 1";
    let (mut daemon, vdis) = with_disks(settings, &["a", "b"]);
    let [patient, hasty] = [0, 1].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    set(&daemon, &patient, json!({ "tries": 100 }));
    set(&daemon, &hasty, json!({ "tries": 2 }));
    // The storage becomes available later than the host.
    let (here, aside) = (daemon.room().join("disks"), daemon.room().join("aside"));
    daemon.kill();
    std::fs::rename(&here, &aside).unwrap();
    go_down(&daemon);
    daemon.restart();
    let problem = || daemon.get(&hasty).1["problem"]["detail"].as_str().unwrap_or_default().to_owned();
    wait_until("it says why", || problem().contains("autostart failed after 2 tries"));
    // If the daemon dies in the meantime, the next one continues.
    daemon.kill();
    std::fs::rename(&aside, &here).unwrap();
    daemon.restart();
    becomes(&daemon, &patient, "plugged");
    daemon.settle();
    assert_eq!(state(&daemon, &hasty), "unplugged");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_withdrawn_autostart_is_not_retried() {
    let settings = "[autostart]\nretry-after = 1\n[storage]\nlost-interval = 1";
    let (mut daemon, vdis) = with_disks(settings, &["a", "b", "c"]);
    let [wanted, unwanted, hasty] = [0, 1, 2].map(|at| vbd(&daemon, &vdis[at], "nbd"));
    for (vbd, tries) in [(&wanted, 100), (&unwanted, 100), (&hasty, 1)] {
        set(&daemon, vbd, json!({ "tries": tries }));
    }
    let (here, aside) = (daemon.room().join("disks"), daemon.room().join("aside"));
    daemon.kill();
    std::fs::rename(&here, &aside).unwrap();
    go_down(&daemon);
    daemon.restart();
    wait_until("all were tried", || daemon.get(&hasty).1["problem"].is_object());
    set(&daemon, &unwanted, Value::Null);
    std::fs::rename(&aside, &here).unwrap();
    becomes(&daemon, &wanted, "plugged");
    // As long as the other was retried.
    std::thread::sleep(std::time::Duration::from_secs(3));
    daemon.settle();
    assert_eq!(state(&daemon, &unwanted), "unplugged");
}

#[test]
fn a_vms_disk_is_started_only_with_the_vm() {
    let (daemon, vdis) = with_disks("", &["a"]);
    let asked = json!({ "name": "vm", "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "autostart": { "delay": 5 } });
    let vm = daemon.post("/vms", asked).1;
    assert_eq!(vm["autostart"], json!({ "order": 0, "delay": 5, "tries": 5 }));
    let refused = daemon.post("/vbds", json!({ "vdi": vdis[0], "vm": vm["uuid"], "autostart": {} })).1;
    assert_eq!((&refused["code"], &refused["field"]), (&json!("unsupported"), &json!("autostart")));
    let made = daemon.post("/vbds", json!({ "vdi": vdis[0], "vm": vm["uuid"] })).1;
    let vbd = format!("/vbds/{}", made["uuid"].as_str().unwrap());
    assert_eq!(daemon.patch(&vbd, json!({ "autostart": {} })).1["code"], "unsupported");
    assert_eq!(daemon.patch(&vbd, json!({ "autostart": { "tries": 0 } })).1["field"], "autostart.tries");
}

#[test]
fn only_vms_with_autostart_are_started_with_the_host() {
    let qemu = std::env::var("TAPLINE_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".into());
    if Command::new(&qemu).arg("--version").output().is_err() {
        return harness::not_run(&format!("there is no {qemu}; `make prepare` installs it"));
    }
    let (mut daemon, vdis) = with_disks(&format!("qemu-program = {qemu:?}"), &["a", "b"]);
    let vms = [0, 1].map(|at| {
        let asked = json!({ "name": format!("guest {at}"), "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
        let vm = daemon.post("/vms", asked).1["uuid"].as_str().unwrap().to_owned();
        assert_eq!(daemon.post("/vbds", json!({ "vdi": vdis[at], "vm": vm })).0, 201);
        format!("/vms/{vm}")
    });
    vms.iter().for_each(|vm| drop(daemon.done(daemon.post(&format!("{vm}/start"), json!({})))));
    set(&daemon, &vms[0], json!({}));
    lose_power(&mut daemon);
    wait_until("the VM runs", || daemon.get(&vms[0]).1["power"] == "running");
    daemon.settle();
    assert_eq!(daemon.get(&vms[1]).1["power"], "halted");
    // It is shut down on purpose, and the daemon is restarted.
    daemon.done(daemon.post(&format!("{}/shutdown", vms[0]), json!({ "force": true })));
    daemon.restart();
    daemon.settle();
    assert_eq!(daemon.get(&vms[0]).1["power"], "halted");
}
