//! The client with peers that are wrong in every way; tests with a real one are in `tests/`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::thread;

use super::*;

const SOON: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(200);
const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";

/// A monitor that agrees on the protocol, and then is handed over line by line: `answer` is given each, and says what
/// comes back.
fn monitor(answer: impl Fn(&Value) -> String + Send + 'static) -> (tempfile::TempDir, PathBuf) {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(GREETING.as_bytes()).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        for line in reader.lines().map_while(Result::ok) {
            let line: Value = serde_json::from_str(&line).unwrap();
            let said = match line["execute"].as_str() {
                Some("qmp_capabilities") => format!("{{\"return\": {{}}, \"id\": {}}}\r\n", line["id"]),
                _ => answer(&line),
            };
            if said == "end" || stream.write_all(said.as_bytes()).is_err() {
                return;
            }
        }
    });
    (room, path)
}

fn client(answer: impl Fn(&Value) -> String + Send + 'static) -> (tempfile::TempDir, Client) {
    let (room, path) = monitor(answer);
    (room, Client::connect(&path, SOON).unwrap())
}

#[test]
fn events_between_are_kept_and_the_answer_is_found() {
    let (_room, mut client) = client(|line| {
        format!("{{\"event\": \"STOP\", \"data\": {{\"n\": 1}}}}\r\n{{\"return\": 7, \"id\": {}}}\r\n", line["id"])
    });
    assert_eq!(client.execute("stop", &json!({}), SOON).unwrap(), json!(7));
    assert_eq!(client.take_events(), [Event { name: "STOP".into(), data: json!({ "n": 1 }) }]);
    assert!(client.take_events().is_empty());
}

#[test]
fn waiting_for_an_event_keeps_others() {
    let (_room, mut client) = client(|line| {
        let other = "{\"event\": \"RTC_CHANGE\"}\r\n";
        format!("{other}{{\"return\": 0, \"id\": {}}}\r\n{other}{{\"event\": \"RESET\"}}\r\n", line["id"])
    });
    client.execute("system_reset", &json!({}), SOON).unwrap();
    let event = client.wait_event(SOON, |event| event.name == "RESET").unwrap();
    assert_eq!(event.unwrap().name, "RESET");
    assert_eq!(client.take_events().len(), 2);
    assert_eq!(client.wait_event(SHORT, |_| true).unwrap(), None);
}

#[test]
fn a_refusal_is_an_error_and_the_monitor_stays_usable() {
    let (_room, mut client) = client(|line| match line["execute"].as_str() {
        Some("device_del") => format!(
            "{{\"error\": {{\"class\": \"DeviceNotFound\", \"desc\": \"Device 'x' not found\"}}, \"id\": {}}}\r\n",
            line["id"]
        ),
        _ => format!("{{\"return\": true, \"id\": {}}}\r\n", line["id"]),
    });
    let error = client.execute("device_del", &json!({ "id": "x" }), SOON).unwrap_err();
    assert!(error.is_refusal("DeviceNotFound"), "{error:?}");
    assert_eq!(error.to_string(), "QEMU refused device_del: Device 'x' not found");
    assert_eq!(client.execute("stop", &json!({}), SOON).unwrap(), json!(true));
}

#[test]
fn a_late_reply_is_not_mistaken_for_the_next() {
    let (_room, mut client) = client(|line| match line["execute"].as_str() {
        Some("slow") => "\r\n".trim_start().to_owned(),
        _ => format!("{{\"return\": \"late\", \"id\": 2}}\r\n{{\"return\": \"mine\", \"id\": {}}}\r\n", line["id"]),
    });
    let error = client.execute("slow", &json!({}), SHORT).unwrap_err();
    assert!(matches!(error, QmpError::Late { .. }), "{error:?}");
    assert!(error.to_string().contains("has not answered slow in 0.2 s"), "{error}");
    assert_eq!(client.execute("next", &json!({}), SOON).unwrap(), json!("mine"));
}

#[test]
fn a_dead_monitor_is_reported_then_and_later() {
    let (_room, mut client) = client(|_| "end".to_owned());
    let error = client.execute("quit", &json!({}), SOON).unwrap_err();
    assert!(matches!(error, QmpError::Gone { .. }) && error.is_gone(), "{error:?}");
    let error = client.execute("stop", &json!({}), SOON).unwrap_err();
    assert!(error.to_string().contains("was lost earlier") && error.is_gone(), "{error}");
}

#[test]
fn invalid_and_endless_lines_are_rejected() {
    let (_room, mut first) = client(|_| "no json\r\n".to_owned());
    let error = first.execute("stop", &json!({}), SOON).unwrap_err();
    assert!(error.to_string().contains("(not JSON): no json"), "{error}");
    let (_room, mut second) = client(|_| "x".repeat(wire::LINE_MAX + (64 << 10)));
    let error = second.execute("stop", &json!({}), SOON).unwrap_err();
    assert!(error.to_string().contains("an overlong line"), "{error}");
    let (_room, mut third) = client(|_| "{\"return\": 1, \"id\": 99}\r\n".to_owned());
    let error = third.execute("stop", &json!({}), SOON).unwrap_err();
    assert!(error.to_string().contains("an unexpected reply"), "{error}");
    assert!(third.execute("stop", &json!({}), SOON).unwrap_err().to_string().contains("lost earlier"));
}

#[test]
fn untaken_events_are_bounded_and_losses_counted() {
    let (_room, mut client) = client(|line| {
        let flood = "{\"event\": \"RTC_CHANGE\"}\r\n".repeat(EVENTS_MAX + 5);
        format!("{flood}{{\"return\": 0, \"id\": {}}}\r\n", line["id"])
    });
    client.execute("stop", &json!({}), SOON).unwrap();
    assert_eq!(client.events_lost(), 5);
    assert_eq!(client.take_events().len(), EVENTS_MAX);
}

#[test]
fn a_monitor_without_a_greeting_or_without_a_listener_is_an_error_in_time() {
    let room = tempfile::tempdir().unwrap();
    let path = room.path().join("qmp");
    let error = Client::connect(&path, SHORT).unwrap_err();
    assert!(matches!(error, QmpError::Connect { .. }), "{error:?}");
    let listener = UnixListener::bind(&path).unwrap();
    let error = Client::connect(&path, SHORT).unwrap_err();
    assert!(error.to_string().contains("has not answered its greeting"), "{error}");
    // The queue is full now, and connecting to it must not block.
    let mut held = Vec::new();
    let full = loop {
        match connected(&path, Deadline::after(SHORT)) {
            Ok(stream) => held.push(stream),
            Err(error) => break error,
        }
    };
    assert!(full.to_string().contains("has not answered the connection"), "{full}");
    drop(listener);
}
