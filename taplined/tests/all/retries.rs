//! Repeated requests, and requests whose client does not wait for the response.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{ABORT_AT, Taplined, start, start_with};

/// The complete head of a request.
fn request(path: &str, key: Option<&str>, body: &Value) -> String {
    let body = body.to_string();
    let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
    let head =
        format!("POST /v1{path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n{key}content-length: {}", body.len());
    format!("{head}\r\n\r\n{body}")
}

/// Sends a request with a key; returns the status, whether it was a replay, and the response. Status 0: the daemon
/// has died.
fn ask(daemon: &Taplined, path: &str, key: &str, body: &Value) -> (u16, bool, Value) {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    stream.write_all(request(path, Some(key), body).as_bytes()).unwrap();
    let mut answer = String::new();
    if stream.read_to_string(&mut answer).is_err() || answer.is_empty() {
        return (0, false, Value::Null);
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.contains("idempotent-replayed: true"), serde_json::from_str(body).unwrap_or_default())
}

fn names(daemon: &Taplined) -> Vec<String> {
    let list = daemon.get("/vdis").1;
    list.as_array().unwrap().iter().map(|vdi| vdi["name"].as_str().unwrap().to_owned()).collect()
}

/// A client that is killed or disconnected must not leave a task that never runs and keeps its objects locked.
#[test]
fn a_request_is_executed_although_its_client_has_disconnected() {
    let daemon = start();
    let sr = daemon.repository("sr");
    for at in 0..60 {
        let asked = json!({ "sr": sr, "name": format!("a{at}"), "size": 1 << 20 });
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream.write_all(request("/vdis", None, &asked).as_bytes()).unwrap();
        std::thread::sleep(std::time::Duration::from_micros(100 * at));
    }
    harness::wait_until("all tasks are over", || daemon.get("/tasks?open=true").1 == json!([]));
    let vdis = daemon.get("/vdis").1;
    for vdi in vdis.as_array().unwrap() {
        daemon.done(daemon.delete(&format!("/vdis/{}", vdi["uuid"].as_str().unwrap())));
    }
}

#[test]
fn a_repeated_request_gets_the_first_response_without_being_executed() {
    let mut daemon = start();
    let sr = daemon.repository("sr");
    let disk = json!({ "sr": sr, "name": "web", "size": 1 << 20 });
    let (status, replayed, first) = ask(&daemon, "/vdis", "k1", &disk);
    assert_eq!((status, replayed), (202, false), "{first}");
    let vdi = daemon.done((202, first.clone()))["uuid"].clone();
    let again = |daemon: &Taplined| {
        let (status, replayed, second) = ask(daemon, "/vdis", "k1", &disk);
        assert_eq!((status, replayed, &second["uuid"]), (202, true, &first["uuid"]), "{second}");
        assert_eq!((&second["state"], &second["result"]["uuid"]), (&json!("done"), &vdi));
    };
    again(&daemon);
    // Also for synchronously created objects, and for a response that consists of a status only.
    let (status, _, vbd) = ask(&daemon, "/vbds", "k2", &json!({ "vdi": vdi }));
    assert_eq!(status, 201, "{vbd}");
    assert_eq!(ask(&daemon, "/vbds", "k2", &json!({ "vdi": vdi })), (201, true, vbd.clone()));
    let vm = json!({ "name": "vm", "driver": "qemu", "memory": 64 << 20, "vcpus": 1 });
    let (status, _, made) = ask(&daemon, "/vms", "k3", &vm);
    assert_eq!(status, 201, "{made}");
    // A different request with the key is an error of the client.
    let (status, _, problem) = ask(&daemon, "/vdis", "k1", &json!({ "sr": sr, "name": "other", "size": 1 << 20 }));
    assert_eq!((status, &problem["code"], &problem["field"]), (422, &json!("key-reused"), &json!("idempotency-key")));
    let (status, _, problem) = ask(&daemon, "/vdis", &"k".repeat(256), &disk);
    assert_eq!((status, &problem["field"]), (400, &json!("idempotency-key")));
    // Also by the next daemon, however this one ended.
    daemon.kill();
    daemon.restart();
    again(&daemon);
    assert_eq!(ask(&daemon, "/vbds", "k2", &json!({ "vdi": vdi })), (201, true, vbd));
    assert_eq!(ask(&daemon, "/vms", "k3", &vm), (201, true, made));
    assert_eq!(names(&daemon), ["web"]);
    assert_eq!(daemon.get("/vbds").1.as_array().unwrap().len(), 1);
    assert_eq!(daemon.get("/vms").1.as_array().unwrap().len(), 1);
}

#[test]
fn a_repeated_request_is_executed_if_the_first_was_refused() {
    let daemon = start();
    let sr = daemon.repository("sr");
    let iso = daemon.room().join("a.img");
    let asked = json!({ "sr": sr, "name": "a", "path": iso, "source_format": "raw" });
    assert_eq!(ask(&daemon, "/vdis/import", "k", &asked).0, 404);
    std::fs::write(&iso, vec![1; 4096]).unwrap();
    let (status, replayed, task) = ask(&daemon, "/vdis/import", "k", &asked);
    assert_eq!((status, replayed), (202, false), "{task}");
    daemon.done((202, task));
}

/// Two at once, as when a client times out and retries before the first is answered.
#[test]
fn concurrent_requests_with_one_key_are_executed_once() {
    let daemon = start();
    let sr = daemon.repository("sr");
    let disk = json!({ "sr": sr, "name": "web", "size": 1 << 20 });
    let answers: Vec<Value> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| ask(&daemon, "/vdis", "k", &disk).2)).collect();
        asking.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|answer| answer["uuid"].is_string() && answer["uuid"] == answers[0]["uuid"]));
    daemon.done((202, answers[0].clone()));
    assert_eq!(names(&daemon), ["web"]);
}

/// The daemon dies during a task: the second request returns the outcome of that task, and does not start another.
#[test]
fn a_retry_after_a_crash_returns_the_outcome_of_the_first_request() {
    for (at, state) in [("vdi-create:file:after", "failed"), ("vdi-create:record:after", "done")] {
        let mut daemon = start_with("", &[(ABORT_AT, at)]);
        let sr = daemon.repository("sr");
        let disk = json!({ "sr": sr, "name": "web", "size": 1 << 20 });
        let (status, _, _) = ask(&daemon, "/vdis", "k", &disk);
        assert!([0, 202].contains(&status));
        daemon.wait_for_death();
        daemon.restart();
        let (status, replayed, task) = ask(&daemon, "/vdis", "k", &disk);
        assert_eq!((status, replayed), (202, true), "{task}");
        assert_eq!(daemon.wait(&task)["state"], state, "{at}: {task}");
        assert_eq!(names(&daemon).len(), usize::from(state == "done"));
    }
}
