//! Statistics of plugged disks, and metrics: what they say beside what was done.

use serde_json::{Value, json};

use crate::harness::disks::{io, nbd, plug, state, unplug, vbd, with_disks};
use crate::harness::{Taplined, wait_until};

/// The counters of a kind of request.
fn of<'a>(disk: &'a Value, operation: &str) -> &'a Value {
    disk["operations"].as_array().unwrap().iter().find(|one| one["operation"] == operation).unwrap()
}

fn sum(stages: &Value) -> u64 {
    stages.as_object().unwrap().values().map(|ns| ns.as_u64().unwrap()).sum()
}

/// The value of a series whose line begins so and has all of `labels`.
fn series(text: &str, name: &str, labels: &[&str]) -> f64 {
    let is_it = |line: &&str| line.starts_with(&format!("{name}{{")) && labels.iter().all(|label| line.contains(label));
    let found: Vec<&str> = text.lines().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?} in\n{text}");
    found[0].rsplit_once(' ').unwrap().1.parse().unwrap()
}

fn metrics(daemon: &Taplined) -> String {
    let answer = daemon.exchange("GET", "/metrics", &[], "");
    assert!(answer.status == 200 && answer.body.ends_with("# EOF\n"), "{}", answer.body);
    assert!(answer.header("content-type").unwrap().starts_with("application/openmetrics-text; version=1.0.0"));
    answer.body
}

#[test]
fn statistics_and_metrics_have_what_was_done() {
    let (daemon, vdis) = with_disks("", &["disk", "other"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    assert_eq!(daemon.get(&format!("{vbd}/statistics")).1["code"], "state");
    assert_eq!(daemon.get("/statistics").1, json!([]));
    plug(&daemon, &vbd);
    let (done, said) = io(&nbd(&daemon, &vbd), &["write -P 7 0 64k", "write -P 8 1M 64k", "flush", "read -P 7 0 4k"]);
    assert!(done, "{said}");
    let read = |what: &str, operation: &str, count: u64| {
        let mut found = Value::Null;
        wait_until(what, || {
            found = daemon.get(&format!("{vbd}/statistics")).1;
            of(&found, operation)["count"].as_u64().unwrap() >= count
        });
        found
    };
    let disk = read("the read is counted", "read", 1);
    let writes = of(&disk, "write");
    assert_eq!((&writes["count"], &writes["size"], &writes["errors"]), (&json!(2), &json!(131_072), &json!(0)));
    assert_eq!((&disk["vdi_name"], &disk["position"], &disk["in_flight"]), (&json!("disk"), &json!(0), &json!(0)));
    let told: u64 =
        writes["latencies"].as_array().unwrap().iter().map(|bucket| bucket["count"].as_u64().unwrap()).sum();
    assert_eq!(told, 2);
    assert!(sum(&writes["stages"]) > 0 && writes["longest_ns"].as_u64().unwrap() <= sum(&writes["stages"]));
    let list = daemon.get("/statistics").1;
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(
        (of(&list[0], "write"), &list[0]["requests"]),
        (
            &{
                let mut plain = writes.clone();
                let fields = plain.as_object_mut().unwrap();
                fields.remove("latencies");
                fields.remove("storage_latencies");
                plain
            },
            &json!([])
        )
    );
    let text = metrics(&daemon);
    let uuid = vbd.trim_start_matches("/vbds/");
    let disk = |name: &str, more: &str| series(&text, name, &[&format!("vbd=\"{uuid}\""), more]);
    assert_eq!(disk("tapline_disk_operations_total", "operation=\"write\""), 2.0);
    assert_eq!(disk("tapline_disk_transferred_bytes_total", "operation=\"write\""), 131_072.0);
    assert_eq!(disk("tapline_disk_latency_seconds_count", "operation=\"write\""), 2.0);
    assert_eq!(disk("tapline_disk_inflight", "operation=\"flush\""), 0.0);
    assert_eq!(series(&text, "tapline_vbds", &["state=\"plugged\""]), 1.0);
    assert!(series(&text, "tapline_sr_space_bytes", &["state=\"free\""]) > 0.0);
    // One series for each kind, error and stage: a closed list.
    let count = |name: &str| text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).count();
    assert_eq!((count("tapline_disk_errors_total"), count("tapline_disk_operation_time_seconds_total")), (20, 35));
    unplug(&daemon, &vbd);
    assert_eq!(daemon.get("/statistics").1, json!([]));
    assert!(!metrics(&daemon).contains("tapline_disk_operations_total{"));
}

#[test]
fn counters_do_not_go_back_when_a_process_dies() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    assert!(io(&nbd(&daemon, &vbd), &["write -P 7 0 64k", "flush"]).0);
    let of_writes = || {
        let disk = daemon.get(&format!("{vbd}/statistics")).1;
        (of(&disk, "write")["count"].clone(), disk["processes"].clone())
    };
    wait_until("the write is counted", || of_writes() == (json!(1), json!(1)));
    crate::harness::kill(&pid);
    wait_until("another process serves it", || {
        state(&daemon, &vbd) == "plugged" && daemon.get(&vbd).1["pid"] != pid && of_writes().1 == json!(2)
    });
    assert_eq!(of_writes().0, json!(1));
    assert!(io(&nbd(&daemon, &vbd), &["write -P 8 0 64k"]).0);
    wait_until("the next write is counted", || of_writes().0 == json!(2));
    assert_eq!(series(&metrics(&daemon), "tapline_disk_processes_total", &[]), 2.0);
}
