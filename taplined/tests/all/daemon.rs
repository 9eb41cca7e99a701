//! The daemon as a whole: start, requests, stop and restart.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::json;

use crate::harness;

#[test]
fn the_daemon_responds_with_the_same_identity_after_a_restart() {
    let mut daemon = harness::start();
    let (status, host) = daemon.get("/host");
    assert_eq!((status, &host["tasks"]), (200, &json!(0)));
    daemon.restart();
    assert_eq!(daemon.get("/host").1["uuid"], host["uuid"]);
    daemon.kill();
    daemon.restart();
    assert_eq!(daemon.get("/host").1["uuid"], host["uuid"]);
    assert!(daemon.stop());
}

#[test]
fn unknown_requests_are_refused_as_problems() {
    let daemon = harness::start();
    let (status, problem) = daemon.get("/nothing");
    assert_eq!((status, &problem["code"]), (404, &json!("not-found")));
    assert_eq!(daemon.post("/host", json!({})).0, 405);
}

#[test]
fn invalid_requests_are_refused_without_internal_errors() {
    let daemon = harness::start();
    let (_, task) = daemon.post("/host/drain", json!({}));
    daemon.wait(&task);
    let wait = |seconds: u32| daemon.get(&format!("/tasks/{}?wait={seconds}", task["uuid"].as_str().unwrap()));
    assert_eq!(wait(60).0, 200);
    let (status, problem) = wait(61);
    assert_eq!((status, &problem["code"], &problem["field"]), (400, &json!("invalid"), &json!("wait")));
    assert_eq!(daemon.post("/host/drain", json!({ "timeout": 86_401 })).1["field"], "timeout");
    let sr = daemon.repository("sr");
    let image = daemon.room().join("no.vhd");
    std::fs::write(&image, "").unwrap();
    let asked = json!({ "sr": sr, "name": "a", "path": image, "source_format": "vhd" });
    let (status, problem) = daemon.post("/vdis/import", asked);
    assert_eq!((status, &problem["code"], &problem["field"]), (400, &json!("invalid"), &json!("path")), "{problem}");
    for (path, status) in [("/nowhere/at/all".to_owned(), 404), (format!("/{}", "a".repeat(300)), 400)] {
        let source = json!({ "type": "iso", "path": path });
        let (probed, problem) = daemon.post("/srs/probe", json!({ "source": source }));
        assert_eq!(probed, status, "{problem}");
        let asked = json!({ "sr": sr, "name": "a", "path": path, "source_format": "raw" });
        let (imported, problem) = daemon.post("/vdis/import", asked);
        assert_eq!(imported, status, "{problem}");
    }
}

#[test]
fn the_daemon_survives_any_failure_of_its_log() {
    let mut daemon = harness::start_with("[log]\nlevel = \"debug\"", &[]);
    // Each request creates a task and its log lines.
    let use_it = |daemon: &harness::Taplined| {
        for _ in 0..20 {
            daemon.done(daemon.post("/host/drain", json!({})));
        }
    };
    daemon.restart_logging_to(File::options().write(true).open("/dev/full").unwrap().into());
    use_it(&daemon);
    let (unread, stopped) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    rustix::pipe::fcntl_setpipe_size(&stopped, 4096).unwrap();
    daemon.restart_logging_to(stopped.into());
    use_it(&daemon);
    // It also stops if nothing reads its log.
    let (gone, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    daemon.restart_logging_to(writer.into());
    drop((unread, gone));
    use_it(&daemon);
    assert!(daemon.stop());
}

/// Two with one state directory would start each other's disks; two with one run directory would take each other's
/// sockets.
#[test]
fn only_one_daemon_runs_per_state_or_run_directory() {
    let daemon = harness::start();
    let room = tempfile::tempdir().unwrap();
    for shared in ["state", "run"] {
        let directory = |name: &str| if name == shared { daemon.room() } else { room.path() }.join(name);
        let config = format!(
            "state-directory = {:?}\nrun-directory = {:?}\nlog-directory = {:?}\n",
            directory("state"),
            directory("run"),
            directory("log"),
        );
        let path = room.path().join("taplined.toml");
        std::fs::write(&path, config).unwrap();
        // A daemon that is not refused would run until stopped.
        let mut second = Command::new("timeout");
        second.arg("60").arg(env!("CARGO_BIN_EXE_taplined")).arg("--config").arg(&path);
        let ended = second.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success(), "{said}");
        assert!(said.contains(&format!("another taplined is running with this {shared} directory")), "{said}");
        assert_eq!(daemon.get("/host").0, 200);
        let lock = daemon.room().join(shared).join("lock");
        assert_eq!(std::fs::metadata(lock).unwrap().permissions().mode() & 0o777, 0o600);
    }
}

/// A child that a killed daemon has just forked holds its locks for a moment longer.
#[test]
fn a_daemon_waits_for_the_locks_of_a_killed_one() {
    let mut daemon = harness::start();
    daemon.kill();
    let lock = File::open(daemon.room().join("state/lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let held = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        drop(lock);
    });
    daemon.restart();
    held.join().unwrap();
    assert_eq!(daemon.get("/host").0, 200);
}
