//! The history of disks, which the daemon keeps for a day.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::harness::disks::{io, nbd, plug, unplug, vbd, with_disks};
use crate::harness::wait_until;

/// Longer than the rest of a minute and two full ones.
const THREE_MINUTES: Duration = Duration::from_secs(190);

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_minute_of_a_disk_survives_restart_and_unplug() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let path = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &path);
    let points = |daemon: &crate::harness::Taplined| {
        let (status, history) = daemon.get(&format!("{path}/history"));
        assert_eq!((status, &history["step"]), (200, &Value::from(60)), "{history}");
        history["points"].as_array().unwrap().clone()
    };
    assert_eq!(points(&daemon), Vec::<Value>::new());
    let began = Instant::now();
    let at = nbd(&daemon, &path);
    while points(&daemon).is_empty() {
        assert!(began.elapsed() < THREE_MINUTES, "there is no history after three minutes");
        io(&at, &["write -P 7 0 64k", "flush", "read -P 7 0 64k"]);
        thread::sleep(Duration::from_millis(500));
    }
    let first = points(&daemon)[0].clone();
    let number = |name: &str| first[name].as_u64().unwrap();
    assert!(number("writes") > 0 && number("written_bytes") >= 65536 / 60, "{first}");
    assert!(0 < number("mean_ns") && number("mean_ns") <= 2 * number("p99_ns"), "{first}");
    unplug(&daemon, &path);
    daemon.restart();
    wait_until("the history is read", || points(&daemon).first() == Some(&first));
    // A damaged file is set aside, and the daemon runs.
    daemon.kill();
    let file = daemon.room().join("state/history.jsonl");
    fs::write(&file, "damaged\n").unwrap();
    daemon.restart();
    wait_until("the damage is reported", || daemon.log().contains("is damaged and begun again"));
    assert!(file.with_extension("damaged").exists() && points(&daemon).is_empty());
    assert_eq!(daemon.get("/vbds/00000000-0000-4000-8000-000000000001/history").0, 404);
}
