//! Limits of disks: in the catalogue, in the process that serves a disk, and in each later process.

use serde_json::{Value, json};

use crate::harness::disks::{ask_disk, io, nbd, plug, state, unplug, with_disks};
use crate::harness::{self, Taplined, wait_until};

/// Creates a VBD with or without limits; returns its path in the API.
fn vbd(daemon: &Taplined, vdi: &str, limits: Value) -> String {
    let mut asked = json!({ "vdi": vdi, "transport": "nbd" });
    if !limits.is_null() {
        asked["limits"] = limits;
    }
    let (status, vbd) = daemon.post("/vbds", asked);
    assert_eq!(status, 201, "{vbd}");
    format!("/vbds/{}", vbd["uuid"].as_str().unwrap())
}

fn limit(daemon: &Taplined, vbd: &str, limits: Value) -> (u16, Value) {
    daemon.post(&format!("{vbd}/limit"), limits)
}

/// Number of requests delayed by a limit.
fn throttled(daemon: &Taplined, vbd: &str) -> u64 {
    let found = daemon.get(&format!("{vbd}/statistics")).1;
    found["throttled"].as_u64().unwrap_or_else(|| panic!("{found}"))
}

/// Whether a limit delays one of three reads of 64 KiB, which exceed the burst.
fn holds_back(daemon: &Taplined, vbd: &str) -> bool {
    let before = throttled(daemon, vbd);
    let (done, said) = io(&nbd(daemon, vbd), &["read 0 64k", "read 64k 64k", "read 128k 64k"]);
    assert!(done, "{said}");
    throttled(daemon, vbd) > before
}

/// Limits by which three of these reads take at least a quarter of a second.
fn slow() -> Value {
    json!({ "bandwidth": 512 << 10, "burst_ms": 100 })
}

#[test]
fn limits_hold_in_every_process_until_they_are_removed() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], slow());
    assert_eq!(daemon.get(&vbd).1["limits"], slow());
    plug(&daemon, &vbd);
    assert!(holds_back(&daemon, &vbd), "plugged with them");
    // Restarted.
    let before = daemon.get(&vbd).1;
    harness::kill(&before["pid"]);
    wait_until("it is served again", || {
        let pid = daemon.get(&vbd).1["pid"].clone();
        ![&before["pid"], &Value::Null].contains(&&pid) && state(&daemon, &vbd) == "plugged"
    });
    assert!(holds_back(&daemon, &vbd), "restarted with them");
    // Upgraded.
    daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})));
    assert!(holds_back(&daemon, &vbd), "upgraded with them");
    // Removed, in this process and in later ones.
    let (status, told) = limit(&daemon, &vbd, json!({}));
    assert_eq!((status, &told["limits"]), (200, &Value::Null), "{told}");
    assert!(!holds_back(&daemon, &vbd));
    daemon.done(daemon.post(&format!("{vbd}/upgrade"), json!({})));
    assert!(!holds_back(&daemon, &vbd));
    // Set while it is in use, and kept while it is not.
    assert_eq!(limit(&daemon, &vbd, slow()).1["limits"], slow());
    assert!(holds_back(&daemon, &vbd));
    unplug(&daemon, &vbd);
    assert_eq!(limit(&daemon, &vbd, slow()).0, 200);
    plug(&daemon, &vbd);
    assert!(holds_back(&daemon, &vbd));
    let metrics = daemon.exchange("GET", "/metrics", &[], "").body;
    let value = |name: &str| -> f64 {
        let line =
            metrics.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_else(|| panic!("{metrics}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    assert!(value("tapline_disk_throttled_requests_total") >= 1.0);
    assert!(value("tapline_disk_throttled_time_seconds_total") > 0.0);
    unplug(&daemon, &vbd);
}

#[test]
fn limits_that_cannot_be_kept_are_refused() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], Value::Null);
    assert_eq!(daemon.get(&vbd).1["limits"], Value::Null);
    for (limits, why) in [
        (json!({ "iops": 0 }), "would stop the disk"),
        (json!({ "iops": 9 }), "give 10 to"),
        (json!({ "iops": 100, "write_iops": 200 }), "more than iops"),
        (json!({ "burst_ms": 5 }), "no limit"),
    ] {
        let (status, refused) = limit(&daemon, &vbd, limits.clone());
        assert_eq!((status, &refused["code"]), (400, &json!("invalid")), "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains(why), "{refused}");
        let (status, refused) = daemon.post("/vbds", json!({ "vdi": vdis[0], "transport": "nbd", "limits": limits }));
        assert_eq!((status, &refused["field"]), (400, &json!("limits")), "{refused}");
    }
    assert_eq!(daemon.get(&vbd).1["limits"], Value::Null);
    assert_eq!(limit(&daemon, "/vbds/00000000-0000-0000-0000-000000000001", slow()).0, 404);
}

#[test]
fn limits_set_through_the_control_socket_are_refused() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], Value::Null);
    plug(&daemon, &vbd);
    let refused = ask_disk(&daemon, &vbd, json!({ "verb": "limit", "limits": { "iops": 100 } }));
    assert!(
        refused["error"]["advice"].as_str().is_some_and(|advice| advice.contains("tapline vbd limit")),
        "{refused}"
    );
    let reported = ask_disk(&daemon, &vbd, json!({ "verb": "limit" }));
    assert_eq!(reported["ok"]["limits"], json!({}));
    unplug(&daemon, &vbd);
}
