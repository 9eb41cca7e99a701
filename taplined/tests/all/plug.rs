//! VBDs of the real daemon, with real disk processes on real files: plugged, unplugged, killed and reattached.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::Taplined;
use crate::harness::disks::{io, nbd, nothing_leaked, plug, processes, state, unplug, vbd, with_disks};
use crate::harness::mounted::Mounted;
use crate::harness::wait_until;

#[test]
fn a_plugged_disk_is_served_and_keeps_written_data() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let plugged = plug(&daemon, &vbd);
    assert_eq!((&plugged["state"], &plugged["restarts"]), (&json!("plugged"), &json!(0)));
    let (written, said) = io(&nbd(&daemon, &vbd), &["write -P 7 0 64k", "flush"]);
    assert!(written, "{said}");
    assert_eq!(daemon.get("/host").1["plugged"], 1);
    nothing_leaked(&daemon);
    let unplugged = unplug(&daemon, &vbd);
    assert_eq!((&unplugged["state"], &unplugged["pid"]), (&json!("unplugged"), &Value::Null));
    nothing_leaked(&daemon);
    plug(&daemon, &vbd);
    let (same, said) = io(&nbd(&daemon, &vbd), &["read -P 7 0 64k", "read -P 0 64k 64k"]);
    assert!(same, "{said}");
    assert_eq!(daemon.delete(&vbd).0, 409);
    unplug(&daemon, &vbd);
    assert_eq!(daemon.delete(&vbd).0, 204);
    assert_eq!(daemon.get(&vbd).0, 404);
}

#[test]
fn invalid_vbds_are_refused_with_the_reason() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let make = |body: Value| daemon.post("/vbds", body).1;
    assert_eq!(make(json!({ "vdi": vdis[0], "queues": 65 }))["field"], "queues");
    assert_eq!(make(json!({ "vdi": vdis[0], "position": 255 }))["field"], "position");
    assert_eq!(make(json!({ "vdi": vdis[0], "transport": "blkif" }))["code"], "unsupported");
    assert_eq!(make(json!({ "vdi": "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d" }))["field"], "vdi");
    assert_eq!(make(json!({ "vdi": vdis[0], "sise": 1 }))["field"], "sise");
    let (one, other) = (vbd(&daemon, &vdis[0], "nbd"), vbd(&daemon, &vdis[0], "nbd"));
    assert_eq!(daemon.post(&format!("{one}/unplug"), json!({})).1["code"], "state");
    plug(&daemon, &one);
    assert_eq!(daemon.post(&format!("{one}/plug"), json!({})).1["code"], "state");
    let (status, busy) = daemon.post(&format!("{other}/plug"), json!({}));
    assert_eq!((status, &busy["code"]), (409, &json!("in-use")));
    assert!(busy["detail"].as_str().unwrap().contains(one.trim_start_matches("/vbds/")), "{busy}");
    assert_eq!(daemon.post("/vbds/plug", json!({})).1["code"], "invalid");
    let found = daemon.get(&format!("/vbds?vdi={}&match={}", vdis[0], &one[6..14])).1;
    assert_eq!(found.as_array().unwrap().len(), 1, "{found}");
}

#[test]
fn a_failed_plug_leaves_nothing_and_quotes_the_disk() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let file = daemon.room().join("disks");
    std::fs::write(file.join("disk.qcow2"), [7; 4096]).unwrap();
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let problem = daemon.failed(daemon.post(&format!("{vbd}/plug"), json!({})));
    assert!(problem["detail"].as_str().unwrap().contains("qcow2"), "{problem}");
    assert_eq!(daemon.get(&vbd).1["problem"]["detail"], problem["detail"]);
    nothing_leaked(&daemon);
}

#[test]
fn a_killed_disk_process_is_restarted_at_the_same_socket() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let at = nbd(&daemon, &vbd);
    assert!(io(&at, &["write -P 9 1M 64k", "flush"]).0);
    let before = daemon.get(&vbd).1["pid"].clone();
    crate::harness::kill(&before);
    wait_until("another one serves", || {
        let now = daemon.get(&vbd).1;
        now["state"] == "plugged" && now["pid"] != before && now["restarts"] == 1
    });
    assert_eq!(nbd(&daemon, &vbd), at);
    let (same, said) = io(&at, &["read -P 9 1M 64k"]);
    assert!(same, "{said}");
    let problem = daemon.get(&vbd).1["problem"]["detail"].as_str().unwrap().to_owned();
    assert!(problem.contains("signal: 9"), "{problem}");
    nothing_leaked(&daemon);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

/// A connected client that has written without flushing.
fn write_without_flush(at: &str, write: &str) -> std::process::Child {
    let mut client = std::process::Command::new("qemu-io")
        .args(["-t", "writeback", "-f", "raw", at])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    writeln!(client.stdin.as_mut().unwrap(), "{write}").unwrap();
    let said = BufReader::new(client.stdout.take().unwrap());
    assert!(said.lines().map_while(Result::ok).any(|line| line.contains("wrote ")), "qemu-io has not written");
    client
}

#[test]
fn acknowledged_writes_survive_a_killed_disk_process() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let at = nbd(&daemon, &vbd);
    for (restarts, pattern) in [(1, 5), (2, 6)] {
        let mut client = write_without_flush(&at, &format!("write -P {pattern} {restarts}M 64k"));
        crate::harness::kill(&daemon.get(&vbd).1["pid"]);
        wait_until("another one serves", || {
            let now = daemon.get(&vbd).1;
            now["state"] == "plugged" && now["restarts"] == restarts
        });
        // It would flush on exit.
        client.kill().unwrap();
        client.wait().unwrap();
    }
    let (same, said) = io(&at, &["flush", "read -P 5 1M 64k", "read -P 6 2M 64k"]);
    assert!(same, "{said}");
    unplug(&daemon, &vbd);
    let left = std::fs::read_dir(daemon.room().join("run/redo")).unwrap().flatten();
    assert!(left.map(|log| log.metadata().unwrap().len()).all(|len| len == 0), "a log that nobody needs is not empty");
}

/// Moves the image of a plugged disk away, then kills the process, which cannot be restarted. Returns the old and new
/// path.
fn kill_without_image(daemon: &Taplined, vdi: &str, vbd: &str) -> (PathBuf, PathBuf) {
    let image = daemon.room().join("disks").join(daemon.get(&format!("/vdis/{vdi}")).1["file"].as_str().unwrap());
    let away = daemon.room().join("away");
    std::fs::rename(&image, &away).unwrap();
    crate::harness::kill(&daemon.get(vbd).1["pid"]);
    (image, away)
}

#[test]
fn a_failing_disk_is_retried_and_shows_the_next_try() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let (image, away) = kill_without_image(&daemon, &vdis[0], &vbd);
    // More retries than would be reasonable if it never recovered.
    wait_until("it was tried often", || daemon.get(&vbd).1["restarts"].as_u64() >= Some(6));
    let now = daemon.get(&vbd).1;
    assert_eq!((&now["state"], &now["pid"]), (&json!("restarting"), &Value::Null));
    let said = |field: &str, part: &str| now["problem"][field].as_str().is_some_and(|said| said.contains(part));
    assert!(said("detail", "No such file") && said("advice", "restarted at 20"), "{now}");
    std::fs::rename(&away, &image).unwrap();
    wait_until("it is served by itself", || state(&daemon, &vbd) == "plugged");
    let now = daemon.get(&vbd).1;
    assert!(!now["problem"]["advice"].as_str().unwrap_or_default().contains("restarted"), "{now}");
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

/// A separate test: a disk whose image vanishes right after a restart may be found diverged.
#[test]
fn plugging_a_disk_being_retried_avoids_the_wait() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let (image, away) = kill_without_image(&daemon, &vdis[0], &vbd);
    wait_until("its death is seen", || state(&daemon, &vbd) == "restarting");
    std::fs::rename(&away, &image).unwrap();
    let answer = daemon.post(&format!("{vbd}/plug"), json!({}));
    // It may have recovered by now.
    assert!([202, 409].contains(&answer.0), "{answer:?}");
    wait_until("it is served", || state(&daemon, &vbd) == "plugged");
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_being_retried_can_be_unplugged() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    std::fs::remove_dir_all(daemon.room().join("disks")).unwrap();
    crate::harness::kill(&daemon.get(&vbd).1["pid"]);
    wait_until("it was tried", || daemon.get(&vbd).1["restarts"].as_u64() >= Some(3));
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn disks_outlive_the_daemon_and_are_reattached() {
    let (mut daemon, vdis) = with_disks("", &["one", "other"]);
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    vbds.iter().for_each(|vbd| drop(plug(&daemon, vbd)));
    let before: Vec<Value> = vbds.iter().map(|vbd| daemon.get(vbd).1["pid"].clone()).collect();
    let at = nbd(&daemon, &vbds[0]);
    let client = std::thread::spawn(move || {
        let commands: Vec<String> = (0..200).map(|at| format!("write -P 3 {}k 64k", at * 64)).collect();
        io(&at, &commands.iter().map(String::as_str).collect::<Vec<_>>())
    });
    assert!(daemon.stop());
    assert_eq!(processes(&daemon).len(), 2);
    crate::harness::kill(&before[1]);
    daemon.restart();
    let (written, said) = client.join().unwrap();
    assert!(written, "{said}");
    wait_until("the dead one is served again", || daemon.get(&vbds[1]).1["restarts"] == 1);
    wait_until("both are plugged", || vbds.iter().all(|vbd| state(&daemon, vbd) == "plugged"));
    assert_eq!(daemon.get(&vbds[0]).1["pid"], before[0]);
    nothing_leaked(&daemon);
    // A reattached process is not a child, but its death and exit are noticed as well.
    crate::harness::kill(&before[0]);
    wait_until("it is started again", || {
        daemon.get(&vbds[0]).1["restarts"] == 1 && state(&daemon, &vbds[0]) == "plugged"
    });
    vbds.iter().for_each(|vbd| drop(unplug(&daemon, vbd)));
    nothing_leaked(&daemon);
}

/// The run directory is emptied under a running disk.
#[test]
fn a_disk_without_its_redo_log_is_not_restarted_silently() {
    let (daemon, vdis) = with_disks("", &["a"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    std::fs::remove_dir_all(daemon.room().join("run/redo")).unwrap();
    crate::harness::kill(&pid);
    wait_until("it says what is lost", || {
        let now = daemon.get(&vbd).1;
        let said = now["problem"]["detail"].as_str().unwrap_or_default().to_owned();
        now["state"] == "restarting" && said.contains("the redo log of") && said.contains("is gone")
    });
    // As after a power loss, once the user has confirmed it.
    daemon.done(daemon.post(&format!("{vbd}/unplug"), json!({})));
    plug(&daemon, &vbd);
    daemon.done(daemon.post(&format!("{vbd}/unplug"), json!({})));
}

/// The kernel sends SIGHUP to stopped processes whose parent dies.
#[test]
fn a_disk_stopped_while_its_daemon_died_continues() {
    let (mut daemon, vdis) = with_disks("", &["a"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    assert!(std::process::Command::new("kill").args(["-STOP", &pid.to_string()]).status().unwrap().success());
    daemon.kill();
    assert!(std::process::Command::new("kill").args(["-CONT", &pid.to_string()]).status().unwrap().success());
    daemon.restart();
    let now = daemon.get(&vbd).1;
    assert_eq!(
        (&now["state"], &now["pid"], &now["restarts"]),
        (&json!("plugged"), &pid, &json!(0)),
        "{}",
        daemon.log()
    );
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_daemon_killed_at_any_step_leaves_nothing_half_done() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    for step in ["open", "start", "hand", "answer"] {
        for after in ["", ":after"] {
            let at = format!("vbd-plug:{step}{after}");
            daemon.restart_with(&[("TAPLINED_ABORT_AT", &at)]);
            daemon.post_and_die(&format!("{vbd}/plug"), json!({}));
            daemon.restart();
            assert_eq!(state(&daemon, &vbd), "unplugged", "{at}");
            nothing_leaked(&daemon);
            plug(&daemon, &vbd);
            unplug(&daemon, &vbd);
        }
    }
    for (at, then) in [("wait", "plugged"), ("stop", "plugged"), ("clear", "unplugged")] {
        if state(&daemon, &vbd) == "unplugged" {
            plug(&daemon, &vbd);
        }
        daemon.restart_with(&[("TAPLINED_ABORT_AT", &format!("vbd-unplug:{at}"))]);
        daemon.post_and_die(&format!("{vbd}/unplug"), json!({}));
        daemon.restart();
        wait_until(then, || state(&daemon, &vbd) == then);
        nothing_leaked(&daemon);
    }
}

#[test]
fn a_plug_can_be_cancelled_while_queued_and_during_slow_storage() {
    let (daemon, vdis) = with_disks("[plug]\ninjected-delays = true\nworker-pool-size = 1", &["slow~60000ms", "fast"]);
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    let tasks: Vec<Value> = vbds.iter().map(|vbd| daemon.post(&format!("{vbd}/plug"), json!({})).1).collect();
    wait_until("the slow one is at it", || {
        daemon.get(&format!("/tasks/{}", tasks[0]["uuid"].as_str().unwrap())).1["step"] == "open"
    });
    assert_eq!(state(&daemon, &vbds[1]), "plugging");
    // One waits for the worker that the other occupies.
    unplug(&daemon, &vbds[1]);
    assert_eq!(daemon.wait(&tasks[1])["state"], "cancelled");
    let cancelled = daemon.post(&format!("/tasks/{}/cancel", tasks[0]["uuid"].as_str().unwrap()), json!({}));
    assert_eq!(cancelled.0, 200, "{}", cancelled.1);
    assert_eq!(daemon.wait(&tasks[0])["state"], "cancelled");
    vbds.iter().for_each(|vbd| assert_eq!(state(&daemon, vbd), "unplugged"));
    nothing_leaked(&daemon);
    plug(&daemon, &vbds[1]);
}

#[test]
fn a_step_that_takes_too_long_fails_by_name() {
    let (daemon, vdis) = with_disks("[plug]\ninjected-delays = true\nstep-timeout = 1", &["slow~60000ms"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let problem = daemon.failed(daemon.post(&format!("{vbd}/plug"), json!({})));
    assert_eq!(problem["code"], "timeout");
    assert!(problem["detail"].as_str().unwrap().contains("'open'"), "{problem}");
    nothing_leaked(&daemon);
}

#[test]
fn an_unplug_waits_for_clients_unless_forced() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let at = nbd(&daemon, &vbd);
    let client = std::thread::spawn(move || {
        let commands: Vec<String> = (0..5000).map(|at| format!("write -P 3 {}k 64k", at % 200 * 64)).collect();
        io(&at, &commands.iter().map(String::as_str).collect::<Vec<_>>())
    });
    let socket = daemon.get(&vbd).1["socket"].as_str().unwrap().to_owned();
    let idle = std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let task = daemon.post(&format!("{vbd}/unplug"), json!({})).1;
    wait_until("it waits", || daemon.get(&format!("/tasks/{}", task["uuid"].as_str().unwrap())).1["step"] == "wait");
    assert_eq!(state(&daemon, &vbd), "plugged");
    daemon.done(daemon.post(&format!("{vbd}/unplug"), json!({ "force": true })));
    assert_eq!(daemon.wait(&task)["state"], "cancelled");
    nothing_leaked(&daemon);
    drop((idle, client.join().unwrap()));
    // No client is connected the second time, and the image is consistent.
    plug(&daemon, &vbd);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_daemon_killed_while_plugging_fifty_disks_leaves_nothing_behind() {
    // Half of them take so long that the daemon is killed before they are plugged.
    let delay = |number| if number < 25 { "20ms" } else { "1000ms" };
    let names: Vec<String> = (0..50).map(|number| format!("disk {number}~{}", delay(number))).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (mut daemon, vdis) = with_disks("[plug]\ninjected-delays = true", &names);
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    let uuids: Vec<&str> = vbds.iter().map(|vbd| vbd.trim_start_matches("/vbds/")).collect();
    assert_eq!(daemon.post("/vbds/plug", json!({ "vbds": uuids })).0, 202);
    wait_until("some are plugged", || daemon.get("/host").1["plugged"].as_u64() > Some(10));
    daemon.kill();
    daemon.restart();
    nothing_leaked(&daemon);
    let rest: Vec<&str> =
        uuids.iter().copied().filter(|vbd| state(&daemon, &format!("/vbds/{vbd}")) == "unplugged").collect();
    assert!(!rest.is_empty());
    daemon.done(daemon.post("/vbds/plug", json!({ "vbds": rest })));
    assert_eq!(daemon.get("/host").1["plugged"], 50);
    nothing_leaked(&daemon);
    let drained = daemon.done(daemon.post("/host/drain", json!({ "timeout": 30 })));
    assert_eq!(drained["forced"], 0);
    assert_eq!(processes(&daemon).len(), 0);
    nothing_leaked(&daemon);
}

/// The forced unplugs of a drain meet unforced ones in any phase.
#[test]
fn a_drain_without_patience_leaves_no_process() {
    let names: Vec<String> = (0..6).map(|number| format!("disk {number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (daemon, vdis) = with_disks("", &names);
    let vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "nbd")).collect();
    let uuids: Vec<&str> = vbds.iter().map(|vbd| vbd.trim_start_matches("/vbds/")).collect();
    for _ in 0..12 {
        daemon.done(daemon.post("/vbds/plug", json!({ "vbds": uuids })));
        daemon.done(daemon.post("/host/drain", json!({ "timeout": 0 })));
        assert!(vbds.iter().all(|vbd| state(&daemon, vbd) == "unplugged"));
        nothing_leaked(&daemon);
    }
}

#[test]
fn after_a_reboot_nothing_is_plugged_and_each_vbd_says_why() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    assert!(daemon.stop());
    crate::harness::kill(&pid);
    wait_until("it is no more", || processes(&daemon).is_empty());
    harness::disks::reboot(&daemon);
    daemon.restart();
    let now = daemon.get(&vbd).1;
    assert_eq!(now["state"], "unplugged");
    assert!(now["problem"]["detail"].as_str().unwrap().contains("host was rebooted"), "{now}");
    nothing_leaked(&daemon);
    plug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn stale_vbd_directories_are_removed_at_start() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    assert!(daemon.stop());
    crate::harness::kill(&pid);
    wait_until("it is no more", || processes(&daemon).is_empty());
    // As if the catalogue had been restored from a backup.
    harness::disks::forget_plugs(&daemon);
    daemon.restart();
    assert_eq!(state(&daemon, &vbd), "unplugged");
    nothing_leaked(&daemon);
    plug(&daemon, &vbd);
}

#[test]
fn several_vbds_are_plugged_in_one_task_with_individual_errors() {
    let (daemon, vdis) = with_disks("", &["one", "two", "three"]);
    let mut vbds: Vec<String> = vdis.iter().map(|vdi| vbd(&daemon, vdi, "vhost-user")).collect();
    vbds.push(vbd(&daemon, &vdis[0], "vhost-user"));
    let uuids: Vec<&str> = vbds.iter().map(|vbd| vbd.trim_start_matches("/vbds/")).collect();
    let problem = daemon.failed(daemon.post("/vbds/plug", json!({ "vbds": uuids })));
    assert_eq!(problem["code"], "in-use");
    assert!(problem["detail"].as_str().unwrap().starts_with("1 of 4 VBDs were not plugged"), "{problem}");
    assert_eq!(daemon.get("/host").1["plugged"], 3);
    nothing_leaked(&daemon);
    let done = daemon.done(daemon.post("/vbds/unplug", json!({ "vbds": uuids })));
    assert_eq!(done["unplugged"].as_array().unwrap().len(), 4);
    nothing_leaked(&daemon);
}

/// Mounts a small file system over a new directory.
fn small(at: PathBuf) -> Option<Mounted> {
    std::fs::create_dir(&at).unwrap();
    Mounted::over(at, &["-t", "tmpfs", "-o", "size=12m", "tmpfs"])
}

#[test]
fn a_guest_waits_while_its_repository_is_full() {
    let daemon = harness::start_with("[storage]\nfull-interval = 1", &[]);
    let Some(small) = small(daemon.room().join("disks")) else {
        eprintln!("not run: this user may mount nothing");
        return;
    };
    let source = json!({ "type": "dir", "path": small.path() });
    let sr = daemon.done(daemon.post("/srs", json!({ "name": "disks", "source": source })))["uuid"].clone();
    let vdis = harness::disks::scanned(&daemon, sr.as_str().unwrap(), &["disk"]);
    std::fs::write(small.path().join("filler"), vec![1; 8 << 20]).unwrap();
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let at = nbd(&daemon, &vbd);
    let client = std::thread::spawn(move || io(&at, &["write -P 5 0 8M", "flush", "read -P 5 0 8M"]));
    wait_until("the guest waits", || daemon.get(&vbd).1["waits_for_space"] == true);
    let full = || daemon.get(&format!("/srs/{}", sr.as_str().unwrap())).1["space"]["full"].clone();
    wait_until("its repository is known to be full", || full() == true);
    std::fs::remove_file(small.path().join("filler")).unwrap();
    let (written, said) = client.join().unwrap();
    assert!(written, "{said}");
    wait_until("it waits no more", || daemon.get(&vbd).1["waits_for_space"] == false);
    wait_until("nor is its repository full", || full() == false);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_is_served_where_its_log_cannot_be_written() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let logs = daemon.room().join("log/vbd");
    std::fs::remove_dir(&logs).unwrap();
    std::fs::write(&logs, "").unwrap();
    plug(&daemon, &vbd);
    let (well, said) = io(&nbd(&daemon, &vbd), &["write 0 64k", "read 0 64k"]);
    assert!(well && daemon.log().contains("no log"), "{said}\n{}", daemon.log());
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_disk_has_its_oom_score_and_keeps_it() {
    // The default lowers it, which requires a capability.
    let (mut daemon, vdis) = with_disks("disk-oom-score-adj = 321", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let pid = |daemon: &harness::Taplined| daemon.get(&vbd).1["pid"].clone();
    let score = |pid: &Value| std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let first = pid(&daemon);
    assert_eq!(score(&first), "321\n");
    daemon.kill();
    daemon.restart();
    assert_eq!((pid(&daemon), score(&first).as_str()), (first.clone(), "321\n"));
    crate::harness::kill(&first);
    wait_until("another process serves", || {
        let now = daemon.get(&vbd).1;
        now["state"] == "plugged" && now["pid"] != first
    });
    assert_eq!(score(&pid(&daemon)), "321\n");
    unplug(&daemon, &vbd);

    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = harness::disks::vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let refused = daemon.log().contains("cannot set the OOM score of a disk process");
    assert_eq!(score(&daemon.get(&vbd).1["pid"]), if refused { "0\n" } else { "-500\n" });
}

#[test]
fn a_disk_with_a_full_log_recovers_and_reports_lost_lines() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let logs = daemon.room().join("log/vbd");
    std::fs::remove_dir(&logs).unwrap();
    let Some(_small) = small(logs.clone()) else {
        return harness::not_run("a disk whose log is full: this user may mount nothing");
    };
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let filler = logs.join("filler");
    assert!(std::fs::write(&filler, vec![1; 16 << 20]).is_err());
    let pid = || daemon.get(&vbd).1["pid"].clone();
    let log = || std::fs::read_to_string(logs.join(format!("{}.log", &vbd["/vbds/".len()..]))).unwrap();
    // The rest of the log's last page fills up soon: each signal writes a line of statistics.
    for _ in 0..32 {
        let told = std::process::Command::new("kill").args(["-USR1", &pid().to_string()]).status().unwrap();
        assert!(told.success() && io(&nbd(&daemon, &vbd), &["write 0 64k", "flush"]).0);
    }
    let before = pid();
    crate::harness::kill(&before);
    wait_until("another process serves", || {
        let now = daemon.get(&vbd).1;
        now["state"] == "plugged" && now["pid"] != before
    });
    assert!(io(&nbd(&daemon, &vbd), &["write 0 64k", "flush"]).0);
    // Read while it is full: the first line may be written as soon as there is space, by the client that has just
    // left.
    let (before, full) = (pid(), log());
    std::fs::remove_file(&filler).unwrap();
    assert!(io(&nbd(&daemon, &vbd), &["read 0 64k"]).0);
    wait_until("what is missing is said", || log().get(full.len()..).unwrap().contains("could not be logged"));
    assert_eq!(pid(), before);
    unplug(&daemon, &vbd);
    // Another plug creates a log, for which there is no space either.
    assert!(std::fs::write(&filler, vec![1; 16 << 20]).is_err());
    plug(&daemon, &vbd);
    unplug(&daemon, &vbd);
    nothing_leaked(&daemon);
}

#[test]
fn a_restart_does_not_queue_behind_plugs() {
    let settings = "[plug]\nworker-pool-size = 1\ninjected-delays = true";
    let (daemon, vdis) = with_disks(settings, &["disk", "slow~250000ms"]);
    let (served, slow) = (vbd(&daemon, &vdis[0], "nbd"), vbd(&daemon, &vdis[1], "nbd"));
    plug(&daemon, &served);
    let task = daemon.post(&format!("{slow}/plug"), json!({})).1;
    let path = format!("/tasks/{}", task["uuid"].as_str().unwrap());
    wait_until("the only worker is at work", || daemon.get(&path).1["step"] == "open");
    let before = daemon.get(&served).1["pid"].clone();
    crate::harness::kill(&before);
    wait_until("another process serves", || {
        let now = daemon.get(&served).1;
        now["state"] == "plugged" && now["pid"] != before
    });
    assert_eq!(daemon.get(&path).1["step"], "open");
    assert_eq!(daemon.post(&format!("{path}/cancel"), json!({})).0, 200);
    wait_until("it is cancelled", || daemon.get(&path).1["state"] == "cancelled");
    unplug(&daemon, &served);
    nothing_leaked(&daemon);
}
