//! A panic of the daemon is reported with its running tasks, wherever its log goes, and ends it with a signal.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::{ABORT_AT, Taplined, start_with};

const POINT: (&str, &str) = (ABORT_AT, "sr-create:label:panic");

/// Makes it die while creating a repository; returns the task's UUID.
fn dies(daemon: &mut Taplined) -> String {
    let path = daemon.room().join("disks");
    fs::create_dir(&path).unwrap();
    let made = daemon.post("/srs", json!({ "name": "disks", "source": { "type": "dir", "path": path } }));
    // SIGABRT.
    assert_eq!(daemon.wait_for_death().signal(), Some(6), "{}", daemon.log());
    made.1["uuid"].as_str().unwrap_or_default().to_owned()
}

#[track_caller]
fn reports(said: &str, task: &str) {
    let parts = ["PANIC", "src/fault.rs:", ": a fault injected by a test; ", "tasks in progress: 1; "];
    assert!(parts.iter().all(|part| said.contains(part)), "{said}");
    assert!(said.contains(&format!("during the task {task}")) && said.contains(", sr-create; "), "{said}");
}

fn log_file(daemon: &Taplined) -> PathBuf {
    daemon.room().join("log/taplined.log")
}

/// The last line of the log file, a JSON object.
fn last_event(daemon: &Taplined) -> Value {
    let log = fs::read_to_string(log_file(daemon)).unwrap();
    serde_json::from_str(log.lines().last().unwrap()).unwrap()
}

#[test]
fn a_panic_reports_running_tasks_and_aborts_the_daemon() {
    let mut daemon = start_with("", &[POINT]);
    let task = dies(&mut daemon);
    let log = daemon.log();
    let line = log.lines().find(|line| line.starts_with("taplined: PANIC")).unwrap_or_else(|| panic!("{log}"));
    reports(line, &task);
    assert!(!log_file(&daemon).exists());
    // The interrupted task is in the journal, and is rolled back.
    daemon.restart();
    assert_eq!(daemon.get("/srs").1, json!([]));
}

#[test]
fn a_panic_is_reported_in_the_log_file_and_on_stderr() {
    let mut daemon = start_with("[log]\nto = \"file\"", &[POINT]);
    let task = dies(&mut daemon);
    reports(&daemon.log(), &task);
    let event = last_event(&daemon);
    assert_eq!(event["level"], "ERROR");
    reports(event["fields"]["message"].as_str().unwrap(), &task);
}

#[test]
fn a_panic_goes_to_a_file_if_stderr_is_full() {
    let mut daemon = start_with("", &[POINT]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    daemon.restart_logging_to(full.into());
    let task = dies(&mut daemon);
    reports(last_event(&daemon)["fields"]["message"].as_str().unwrap(), &task);
}
