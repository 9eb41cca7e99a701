//! Tests of `tapline vbd upgrade` of one or several disks: output and failures.

use api::{Code, Problem, Task, TaskState, Vbd, VbdState, VbdUpgraded};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::objects::{done, task, vbd};
use crate::play::{Played, Scene, begun, err, held, ok, out, refused, run};
use crate::taplined::Daemon;

fn uuid(number: u128) -> String {
    vbd(number).uuid.to_string()
}

fn route(number: u128) -> String {
    format!("vbds/{}/upgrade", uuid(number))
}

fn begins(number: u128) -> Scene {
    begun("POST", &route(number), &task(number, TaskState::Pending, 0.0, None))
}

fn waited(number: u128) -> String {
    format!("tasks/{}?wait=10", task(number, TaskState::Running, 0.0, None).uuid)
}

fn is_done(number: u128, note: Option<&str>) -> Scene {
    let upgraded = VbdUpgraded {
        vbd: Vbd { pid: Some(80), ..vbd(number) },
        replaced: 77,
        pause_us: Some(8123),
        note: note.map(str::to_owned),
    };
    ok("GET", &waited(number), &done(number, upgraded))
}

fn has_failed(number: u128) -> Scene {
    let problem = Problem::new(Code::Failed, "its old process continues").advise("see its log");
    let failed = Task { problem: Some(problem), ..task(number, TaskState::Failed, 0.0, Some("ask")) };
    ok("GET", &waited(number), &failed)
}

fn squeezed(text: &str) -> String {
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
}

#[test]
fn an_upgrade_reports_how_long_the_guest_waited() {
    let running = ok("GET", &waited(1), &task(1, TaskState::Running, 0.0, Some("ask")));
    let played = Played::new([
        ok("GET", "vbds?match=0000bd", &[vbd(1)]),
        begins(1),
        running,
        is_done(1, Some("the previous process had the same version 0.1.0")),
    ]);
    let table = "UUID PAUSE PID REPLACED NOTE\n\
                 0000bd00 8.1 ms 80 77 the previous process had the same version 0.1.0\n";
    assert_eq!(squeezed(&out(&played.run(&["vbd", "upgrade", "0000bd"]))), table);
    played.received();
}

#[test]
fn a_single_failed_upgrade_prints_its_error() {
    let played = Played::new([
        begins(1),
        has_failed(1),
        refused("POST", &route(1), &Problem::new(Code::State, "it is not plugged").advise("there is nothing to do")),
    ]);
    let output = played.run(&["vbd", "upgrade", &uuid(1)]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(4), 0));
    assert_eq!(err(&output), "tapline: its old process continues\n  see its log\n");
    let output = played.run(&["vbd", "upgrade", &uuid(1)]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(err(&output), "tapline: it is not plugged\n  there is nothing to do\n");
    played.received();
}

fn four() -> Vec<Vbd> {
    let unplugged = Vbd { state: VbdState::Unplugged, ..vbd(4) };
    vec![vbd(1), vbd(2), vbd(3), unplugged]
}

fn all_but_one() -> Vec<Scene> {
    let busy = Problem::new(Code::Busy, "it is being unplugged").advise("wait");
    vec![
        ok("GET", "vbds", &four()),
        begins(1),
        refused("POST", &route(2), &busy),
        begins(3),
        has_failed(1),
        is_done(3, None),
    ]
}

#[test]
fn one_failed_upgrade_does_not_stop_the_others() {
    let played = Played::new(all_but_one());
    let output = played.run(&["vbd", "upgrade", "--all"]);
    let table = "UUID PAUSE PID REPLACED NOTE\n\
                 0000bd00 failed: its old process continues\n\
                 0000bd00 failed: it is being unplugged\n\
                 0000bd00 8.1 ms 80 77\n";
    assert_eq!(squeezed(&String::from_utf8(output.stdout.clone()).unwrap()), table);
    assert_eq!(output.status.code(), Some(4));
    assert_eq!(err(&output), "tapline: 2 of 3 block devices were not upgraded\n  for the first one: see its log\n");
    played.received();
}

#[test]
fn json_output_contains_each_response() {
    let played = Played::new(all_but_one());
    let output = played.run(&["vbd", "upgrade", "--all", "--json"]);
    assert_eq!(output.status.code(), Some(4));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(told[0]["vbd"], uuid(1).as_str());
    assert_eq!(told[0]["problem"], told[0]["task"]["problem"]);
    assert_eq!((&told[1]["task"], &told[1]["problem"]["code"]), (&Value::Null, &json!("busy")));
    assert_eq!(told[2]["task"]["result"]["pause_us"], 8123);
    assert_eq!(told[2].get("problem"), None);
}

#[test]
fn without_plugged_disks_there_is_nothing_to_do() {
    let played = Played::new([ok("GET", "vbds", &four()[3..].to_vec()), ok("GET", "vbds", &Vec::<Vbd>::new())]);
    let output = played.run(&["vbd", "upgrade", "--all"]);
    assert_eq!((out(&output).as_str(), err(&output).as_str()), ("", "tapline: no block device is plugged\n"));
    assert_eq!(out(&played.run(&["vbd", "upgrade", "--all", "--json"])), "[]\n");
}

#[test]
fn without_waiting_the_tasks_are_printed() {
    let played = Played::new([begins(1), begins(2)]);
    let tasks = [1, 2].map(|number| format!("{}\n", task(number, TaskState::Pending, 0.0, None).uuid)).concat();
    assert_eq!(out(&played.run(&["vbd", "upgrade", &uuid(1), &uuid(2), "--no-wait"])), tasks);
}

#[test]
fn upgrade_requires_a_selection() {
    let played = Played::new([]);
    for words in [&["vbd", "upgrade"][..], &["vbd", "upgrade", "--all", "0000bd"]] {
        assert_eq!(played.run(words).status.code(), Some(64), "{words:?}");
    }
}

#[test]
fn the_first_interrupt_cancels_and_the_second_stops_waiting() {
    let cancel = |number: u128| format!("tasks/{}/cancel", task(number, TaskState::Running, 0.0, None).uuid);
    let late = Problem::new(Code::State, "the task cannot be cancelled now");
    let played = Played::new([
        begins(1),
        begins(2),
        held("GET", &waited(1)),
        refused("POST", &cancel(1), &late),
        ok("POST", &cancel(2), &task(2, TaskState::Cancelling, 0.0, None)),
        held("GET", &waited(1)),
    ]);
    let tapline = played.start(&["vbd", "upgrade", &uuid(1), &uuid(2)]);
    let pid = Pid::from_raw(tapline.id().try_into().unwrap()).unwrap();
    for asked in [3, 6] {
        played.wait_for(asked);
        kill_process(pid, Signal::INT).unwrap();
    }
    let output = tapline.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(err(&output).contains(&format!("tapline: {} continues: the task cannot be cancelled now\n", uuid(1))));
    assert!(err(&output).contains("still running in the background"), "{}", err(&output));
    played.received();
}

#[test]
fn disks_of_the_real_daemon_are_upgraded() {
    let daemon = Daemon::start_with("");
    let room = tempfile::tempdir().unwrap();
    let tapline = |words: &[&str]| out(&run(&daemon.socket(), words)).trim().to_owned();
    let pids = || -> Vec<Vbd> {
        let listed: Vec<Vbd> = serde_json::from_str(&tapline(&["vbd", "list", "--json"])).unwrap();
        listed.into_iter().filter(|vbd| vbd.pid.is_some()).collect()
    };
    let sr = tapline(&["sr", "create", "disks", "--dir", room.path().to_str().unwrap()]);
    for name in ["one", "two"] {
        let vdi = tapline(&["vdi", "create", name, "--sr", &sr, "--size", "16M"]);
        let vbd = tapline(&["vbd", "create", "--vdi", &vdi, "--transport", "nbd"]);
        tapline(&["vbd", "plug", &vbd]);
    }
    let before = pids();
    let output = run(&daemon.socket(), &["vbd", "upgrade", "--all", "--wide"]);
    let after = pids();
    // Before anything can fail, because disks outlive their daemon.
    tapline(&["host", "drain", "--timeout", "0"]);
    let table = out(&output);
    assert_eq!((before.len(), after.len(), table.lines().count()), (2, 2, 3), "{table}");
    for (before, after) in before.iter().zip(&after) {
        assert!(before.pid != after.pid && after.restarts == 0, "{before:?} {after:?}");
        let row = table.lines().find(|row| row.starts_with(&after.uuid.to_string())).unwrap();
        let pids = format!("{}  {}", after.pid.unwrap(), before.pid.unwrap());
        assert!(row.contains(" ms ") && squeezed(row).contains(&squeezed(&pids).replace('\n', "")), "{table}");
    }
}
