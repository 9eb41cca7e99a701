//! Statistics of plugged disks, and metrics: compared with the requests made.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness::disks::{io, nbd, plug, state, unplug, vbd, with_disks};
use crate::harness::mounted::Mounted;
use crate::harness::{self, Taplined, wait_until};

/// The counters of a kind of request.
fn of<'a>(disk: &'a Value, operation: &str) -> &'a Value {
    disk["operations"].as_array().unwrap().iter().find(|one| one["operation"] == operation).unwrap()
}

fn sum(stages: &Value) -> u64 {
    stages.as_object().unwrap().values().map(|ns| ns.as_u64().unwrap()).sum()
}

/// The value of a series whose line has this beginning and all of `labels`.
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

/// A file system in a directory, which can be frozen: writes to it then hang in the kernel.
struct Freezable(Mounted);

impl Freezable {
    /// None where this process cannot mount.
    fn mounted(at: PathBuf) -> Option<Freezable> {
        let image = at.with_extension("ext4");
        fs::create_dir(&at).unwrap();
        File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&image).output();
        made.ok().filter(|made| made.status.success())?;
        Mounted::over(at, &["-o", "loop", image.to_str().unwrap()]).map(Freezable)
    }

    fn freeze(&self, option: &str) -> bool {
        Command::new("fsfreeze").arg(option).arg(self.0.path()).output().unwrap().status.success()
    }
}

impl Drop for Freezable {
    fn drop(&mut self) {
        self.freeze("--unfreeze");
    }
}

#[test]
fn a_write_that_hangs_in_storage_is_seen_in_api_metrics_and_top_while_it_hangs() {
    let daemon = harness::start_with("", &[]);
    let Some(storage) = Freezable::mounted(daemon.room().join("storage")) else {
        harness::not_run("a write that hangs in storage: only root can mount, with mkfs.ext4");
        return;
    };
    let source = json!({ "type": "dir", "path": storage.0.path() });
    let sr = daemon.done(daemon.post("/srs", json!({ "name": "storage", "source": source })))["uuid"].clone();
    let asked = json!({ "sr": sr, "name": "disk", "size": 16 << 20, "format": "raw" });
    let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    let vbd = vbd(&daemon, &vdi, "nbd");
    let pid = plug(&daemon, &vbd)["pid"].clone();
    let socket = nbd(&daemon, &vbd);
    assert!(io(&socket, &["write -P 6 1M 64k"]).0);
    assert!(storage.freeze("--freeze"));
    let hanging = std::thread::spawn(move || io(&socket, &["write -P 7 1M 64k"]));
    // A short delay is not a hang: the age must reach a second, whether the disk's thread hangs as well or not.
    let mut disk = Value::Null;
    wait_until("the request that hangs is in the API's answer", || {
        disk = daemon.get(&format!("{vbd}/statistics")).1;
        disk["oldest_ns"].as_u64().is_some_and(|age| age > 1_000_000_000)
    });
    assert_eq!((&disk["in_flight"], &of(&disk, "write")["in_flight"]), (&json!(1), &json!(1)), "{disk}");
    let request = &disk["requests"][0];
    assert_eq!((&request["operation"], &request["offset"]), (&json!("write"), &json!(1 << 20)), "{disk}");
    assert_eq!(request["stage"], "storage", "{disk}");
    let text = metrics(&daemon);
    assert!(series(&text, "tapline_disk_oldest_inflight_seconds", &["operation=\"write\""]) > 1.0);
    assert_eq!(series(&text, "tapline_disk_inflight", &["operation=\"write\""]), 1.0);
    let page = daemon.room().join("run/vbd").join(vbd.trim_start_matches("/vbds/")).join("statistics.page");
    let reader = stats::Reader::open(&page).unwrap();
    let age = reader.snapshot().unwrap().oldest(stats::Kind::Write);
    assert!(age.is_some_and(|age| age > 1_000_000_000), "{age:?}: what `tapline top` reads has it, too");
    assert!(!hanging.is_finished());
    assert!(storage.freeze("--unfreeze"));
    let (done, said) = hanging.join().unwrap();
    assert!(done, "{said}");
    wait_until("nothing is in flight any more", || daemon.get(&format!("{vbd}/statistics")).1["in_flight"] == json!(0));
    assert_eq!(daemon.get(&vbd).1["pid"], pid, "the same process has served it");
    unplug(&daemon, &vbd);
}

/// A disk's layers, once available.
fn layers(daemon: &Taplined, vbd: &str) -> (Value, Value) {
    let disk = daemon.get(&format!("{vbd}/statistics")).1;
    (disk["guest"].clone(), disk["host"].clone())
}

#[test]
fn layers_around_a_disk_are_shown_on_request_or_with_a_reason() {
    let (daemon, vdis) = with_disks("", &["disk", "other"]);
    let (vbd, other) = (vbd(&daemon, &vdis[0], "nbd"), vbd(&daemon, &vdis[1], "nbd"));
    plug(&daemon, &vbd);
    plug(&daemon, &other);
    let (guest, host) = layers(&daemon, &vbd);
    assert_eq!(guest, json!({ "unknown": "no VM of this daemon has it" }));
    // Where tests run on a file system without a device, its type is reported.
    let devices = host["devices"].as_array().unwrap();
    assert_eq!(devices.is_empty(), host["unknown"].is_string(), "{host}");
    let text = metrics(&daemon);
    assert_eq!(series(&text, "tapline_guest_known", &["vdi=\"disk\""]), 0.0);
    assert!(!text.contains("tapline_guest_operations_total{"), "{text}");
    if let Some(device) = devices.first() {
        assert_eq!(host["shared_by"], 2);
        let name = format!("device={}", device["name"]);
        // One series for the device, however many disks are on it.
        let reads = series(&text, "tapline_host_device_operations_total", &[&name, "operation=\"read\""]);
        assert!(reads >= device["read"]["count"].as_f64().unwrap(), "{device}");
        assert_eq!(series(&text, "tapline_disk_host_device", &["vdi=\"other\"", &name]), 1.0);
    }
    let told = |path: &str| daemon.get(path).1.as_array().unwrap().iter().all(|disk| disk.get("guest").is_some());
    assert!(!told("/statistics") && told("/statistics?layers=true"));
}

#[test]
fn a_vm_has_a_port_for_its_guest_and_one_that_says_nothing_is_unknown() {
    let Some((daemon, vdis)) = crate::vm::begin("", &["a"]) else { return };
    let vm = crate::vm::machine(&daemon, &vdis);
    crate::vm::start(&daemon, &vm);
    let vbd = format!("/vbds/{}", daemon.get("/vbds").1[0]["uuid"].as_str().unwrap());
    let silent = json!({ "unknown": "no tapline-guest answers in the guest" });
    for _ in 0..3 {
        assert_eq!(layers(&daemon, &vbd).0, silent);
    }
    assert_eq!(series(&metrics(&daemon), "tapline_guest_known", &[]), 0.0);
    crate::vm::shut_down(&daemon, &vm, json!({ "force": true }));
}
