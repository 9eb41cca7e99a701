//! Tests of waiting for tasks until they succeed, fail, or the user interrupts.

use std::process::{Child, Output};

use crate::objects::{done, task, vbd, vdi, vm};
use crate::play::{self, Played, begun, err, held, ok, out, refused, scene};
use api::{Code, Problem, Task, TaskState};
use rustix::process::{Pid, Signal, kill_process};

const SR: &str = "00005e00-0000-0000-0000-000000000001";
const VDI: &str = "0000d100-0000-0000-0000-000000000001";
const TASK: &str = "00007a00-0000-0000-0000-000000000001";
const COPY: [&str; 5] = ["vdi", "copy", VDI, "--sr", SR];

fn copy_begins() -> play::Scene {
    begun("POST", &format!("vdis/{VDI}/copy"), &task(1, TaskState::Pending, 0.0, None))
}

fn step() -> String {
    format!("tasks/{TASK}?wait=1")
}

fn cancel() -> String {
    format!("tasks/{TASK}/cancel")
}

fn interrupt(tapline: &Child) {
    let pid = Pid::from_raw(tapline.id().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
}

fn ended(tapline: Child) -> Output {
    tapline.wait_with_output().unwrap()
}

#[test]
fn a_long_running_verb_is_followed_step_by_step() {
    let played = Played::new([
        copy_begins(),
        ok("GET", &step(), &task(1, TaskState::Running, 0.1, Some("copy"))),
        ok("GET", &step(), &task(1, TaskState::Running, 0.5, Some("copy"))),
        ok("GET", &step(), &done(1, vdi(7, "root"))),
    ]);
    let output = played.run(&COPY);
    assert_eq!(out(&output), "0000d100-0000-0000-0000-000000000007\n");
    assert_eq!(err(&output), "vdi-copy: pending\nvdi-copy: running, copy\nvdi-copy: done\n");
    played.received();
}

#[test]
fn a_long_shutdown_prints_how_to_force_it() {
    const VM: &str = "00004a00-0000-0000-0000-000000000001";
    let waits = || task(1, TaskState::Running, 0.5, Some("ask"));
    let shutdown = || begun("POST", &format!("vms/{VM}/shutdown"), &waits());
    let over = || ok("GET", &step(), &done(1, serde_json::json!({})));
    let played = Played::new([shutdown(), ok("GET", &step(), &waits()), over(), shutdown(), over()]);
    let said = err(&played.run(&["vm", "shutdown", VM]));
    assert!(said.contains(&format!("waiting for the guest of {VM} to power off")), "{said}");
    assert!(said.contains("--force-after SECONDS"), "{said}");
    let said = err(&played.run(&["vm", "shutdown", VM]));
    assert!(!said.contains("power off"), "{said}");
    assert!(
        played
            .received()
            .iter()
            .filter(|asked| asked.what.starts_with("POST"))
            .all(|asked| asked.body["force_after"].is_null())
    );
}

#[test]
fn an_unplug_prints_the_guest_that_it_waits_for() {
    const VBD: &str = "0000bd00-0000-0000-0000-000000000001";
    const VM: &str = "00004a00-0000-0000-0000-000000000001";
    let running = api::Vm { power: api::Power::Running, ..vm(1, "web") };
    let plugged = api::Vbd { vm: Some(running.uuid), ..vbd(1) };
    let asked_for = || {
        [
            ok("GET", &format!("vbds/{VBD}"), &plugged),
            ok("GET", &format!("vms/{VM}"), &running),
            ok("GET", &format!("vdis/{VDI}"), &vdi(1, "root")),
        ]
    };
    let unplugged = [ok("POST", &format!("vbds/{VBD}/unplug"), &plugged)];
    let played = Played::new(asked_for().into_iter().chain(asked_for()).chain(unplugged));
    let refused = played.run(&["vbd", "unplug", VBD]);
    let what = "unplug 'root', the boot disk of the running machine 'web': not confirmed";
    assert!(err(&refused).contains(what) && refused.status.code() == Some(64), "{}", err(&refused));
    let said = err(&played.run(&["vbd", "unplug", VBD, "--yes"]));
    assert_eq!(said, "tapline: waiting for the guest of 'web' to release 'root' (--force does not wait)\n");
    played.received();
}

#[test]
fn the_uuid_of_a_created_object_is_printed() {
    let named = |result: serde_json::Value| [copy_begins(), ok("GET", &step(), &done(1, result))];
    let made = named(serde_json::json!({ "uuid": VDI }));
    let nameless = named(serde_json::json!({}));
    let played = Played::new(made.into_iter().chain(nameless));
    assert_eq!(out(&played.run(&COPY)), format!("{VDI}\n"));
    assert_eq!(out(&played.run(&COPY)), "");
    played.received();
}

#[test]
fn no_wait_returns_at_once() {
    let played = Played::new([copy_begins(), copy_begins()]);
    assert_eq!(out(&played.run(&[&COPY[..], &["--no-wait"]].concat())), format!("{TASK}\n"));
    let task: Task = serde_json::from_str(&out(&played.run(&[&COPY[..], &["--no-wait", "--json"]].concat()))).unwrap();
    assert_eq!(task.state, TaskState::Pending);
    played.received();
}

#[test]
fn a_task_that_fails_is_a_command_that_fails() {
    let problem = Problem::new(Code::NoSpace, "the sr is full").advise("free some");
    let failed = Task { problem: Some(problem), ..task(1, TaskState::Failed, 0.5, Some("copy")) };
    let played = Played::new([copy_begins(), ok("GET", &step(), &failed), copy_begins(), ok("GET", &step(), &failed)]);
    let output = played.run(&COPY);
    assert_eq!(output.status.code(), Some(9));
    assert!(err(&output).ends_with("vdi-copy: failed\ntapline: the sr is full\n  free some\n"), "{}", err(&output));
    let output = played.run(&[&COPY[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(9));
    assert_eq!(serde_json::from_slice::<Task>(&output.stdout).unwrap(), failed);
}

#[test]
fn an_interrupt_cancels_the_task_and_waits() {
    let played = Played::new([
        copy_begins(),
        held("GET", &step()),
        ok("POST", &cancel(), &task(1, TaskState::Cancelling, 0.5, Some("copy"))),
        ok("GET", &step(), &task(1, TaskState::Cancelled, 0.5, Some("copy"))),
    ]);
    let tapline = played.start(&COPY);
    played.wait_for(2);
    interrupt(&tapline);
    let output = ended(tapline);
    assert_eq!(output.status.code(), Some(4));
    let text = "vdi-copy: pending\n\
                vdi-copy: cancelling; Ctrl-C again to stop waiting\n\
                vdi-copy: cancelled\n\
                tapline: vdi-copy was cancelled at step copy\n";
    assert_eq!(err(&output), text);
    played.received();
}

#[test]
fn a_second_interrupt_stops_waiting() {
    let problem = Problem::new(Code::State, "it cannot be cancelled at the step switch");
    let played =
        Played::new([copy_begins(), held("GET", &step()), refused("POST", &cancel(), &problem), held("GET", &step())]);
    let tapline = played.start(&COPY);
    played.wait_for(2);
    interrupt(&tapline);
    played.wait_for(4);
    interrupt(&tapline);
    let output = ended(tapline);
    assert_eq!(output.status.code(), Some(4));
    let err = err(&output);
    assert!(err.contains("vdi-copy: cannot be cancelled: it cannot be cancelled at the step switch"), "{err}");
    let end = format!("vdi-copy is still running in the background\n  wait for it with 'tapline task wait {TASK}'\n");
    assert!(err.ends_with(&end), "{err}");
}

#[test]
fn a_wait_survives_a_daemon_restart() {
    let played = Played::new([copy_begins(), play::cut("GET", &step()), ok("GET", &step(), &done(1, vdi(7, "root")))]);
    assert_eq!(out(&played.run(&COPY)), "0000d100-0000-0000-0000-000000000007\n");
    played.received();
}

#[test]
fn tasks_are_listed_shown_waited_for_and_cancelled() {
    let (running, over) = (task(1, TaskState::Running, 0.254, Some("copy")), done(1, vdi(7, "root")));
    let played = Played::new([
        ok("GET", "tasks?open=true", &vec![running.clone()]),
        ok("GET", "srs", &Vec::<api::Sr>::new()),
        ok("GET", "vdis", &[vdi(1, "root")]),
        ok("GET", "vms", &Vec::<api::Vm>::new()),
        ok("GET", "tasks", &[running.clone(), task(0x0000_7b00 << 96, TaskState::Done, 1.0, None)]),
        ok("GET", &format!("tasks/{TASK}"), &running),
        ok("GET", &step(), &over),
        ok("POST", &cancel(), &running),
    ]);
    let table = "UUID      VERB      STATE    DONE  STEP  CREATED               ABOUT\n\
                 00007a00  vdi-copy  running  25 %  copy  2026-11-22T10:00:00Z  vdi root\n";
    assert_eq!(out(&played.run(&["task", "list"])), table);
    let waited = out(&played.run(&["task", "wait", "00007a00"]));
    assert!(waited.contains("      state: done\n") && waited.contains("\"uuid\": \"0000d100-"), "{waited}");
    assert_eq!(out(&played.run(&["task", "cancel", TASK])), "");
    played.received();
}

#[test]
fn an_unreachable_daemon_is_reported_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("none.sock");
    let output = play::run(&socket, &["host", "show"]);
    assert_eq!(output.status.code(), Some(10));
    let text = format!(
        "tapline: cannot reach taplined at {}: No such file or directory (os error 2)\n  \
         start it with 'systemctl start taplined'; if it listens elsewhere, give its socket with --socket PATH or TAPLINE_SOCKET\n",
        socket.display()
    );
    assert_eq!(err(&output), text);
}

#[test]
fn an_invalid_response_is_an_error() {
    let unreadable = || scene("GET", "host", 200, "{\"uuid\": 7}");
    let played = Played::new([unreadable(), unreadable()]);
    let output = played.run(&["host", "show"]);
    assert_eq!(output.status.code(), Some(4));
    let said = err(&output);
    assert!(said.contains("cannot read the response") && said.contains("different versions"), "{said}");
    // Another version of the daemon is named.
    let played = Played::new([unreadable(), ok("GET", "host", &serde_json::json!({ "version": "0.0.9", "new": 1 }))]);
    let said = err(&played.run(&["host", "show"]));
    assert!(said.contains("taplined is version 0.0.9") && said.contains("restart taplined"), "{said}");
}
