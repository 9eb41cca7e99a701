//! Shares of storage: weights in the catalogue and in the process that serves a disk, and one page for all disks of a
//! repository, whatever happens to the daemon and the processes.

use serde_json::{Value, json};

use crate::harness::disks::{ask_disk, io, nbd, plug, state, unplug, vbd, with_disks};
use crate::harness::{self, Taplined, wait_until};

fn share(daemon: &Taplined, vbd: &str) -> Value {
    ask_disk(daemon, vbd, json!({ "verb": "share" }))["ok"].take()
}

fn set(daemon: &Taplined, vbd: &str, weight: u32) -> (u16, Value) {
    daemon.post(&format!("{vbd}/share"), json!({ "weight": weight }))
}

/// A process is notified when it serves.
fn wait_for_weight(daemon: &Taplined, vbd: &str, weight: u32) {
    wait_until(&format!("its weight is {weight}"), || {
        let told = share(daemon, vbd);
        told["shared"] == true && told["weight"] == weight
    });
}

/// Checks that all these disks have the daemon's page: they see a depth that is set now.
fn assert_one_page(daemon: &Taplined, vbds: &[&str], depth: u32) {
    let srs = daemon.get("/srs").1;
    let sr = srs[0]["uuid"].as_str().unwrap();
    let (status, told) = daemon.patch(&format!("/srs/{sr}"), json!({ "share_depth": depth }));
    assert_eq!((status, &told["share_depth"]), (200, &json!(depth)), "{told}");
    for vbd in vbds {
        wait_until(&format!("{vbd} sees the depth {depth}"), || share(daemon, vbd)["depth"] == depth);
    }
}

fn kill(daemon: &Taplined, vbd: &str) {
    let pid = || daemon.get(vbd).1["pid"].clone();
    let before = pid();
    harness::kill(&before);
    wait_until("it is served again", || ![&before, &Value::Null].contains(&&pid()) && state(daemon, vbd) == "plugged");
}

#[test]
fn a_weight_holds_in_every_process_and_all_have_one_page() {
    let (mut daemon, vdis) = with_disks("", &["a", "b", "c"]);
    let asked = json!({ "vdi": vdis[0], "transport": "nbd", "share_weight": 200 });
    let (status, created) = daemon.post("/vbds", asked);
    assert_eq!((status, &created["share_weight"]), (201, &json!(200)), "{created}");
    let a = format!("/vbds/{}", created["uuid"].as_str().unwrap());
    let (b, c) = (vbd(&daemon, &vdis[1], "nbd"), vbd(&daemon, &vdis[2], "nbd"));
    plug(&daemon, &a);
    plug(&daemon, &b);
    wait_for_weight(&daemon, &a, 200);
    wait_for_weight(&daemon, &b, 100);
    assert_one_page(&daemon, &[&a, &b], 33);
    kill(&daemon, &a);
    wait_for_weight(&daemon, &a, 200);
    daemon.done(daemon.post(&format!("{a}/upgrade"), json!({})));
    assert_eq!(share(&daemon, &a)["weight"], 200, "it is handed over");
    assert_eq!(set(&daemon, &a, 300).1["share_weight"], 300);
    assert_eq!(share(&daemon, &a)["weight"], 300, "at once");
    assert_one_page(&daemon, &[&a, &b], 34);
    // A new daemon creates another page, and passes it to the processes that it finds.
    daemon.kill();
    daemon.restart();
    plug(&daemon, &c);
    wait_for_weight(&daemon, &a, 300);
    assert_one_page(&daemon, &[&a, &b, &c], 35);
    kill(&daemon, &b);
    wait_for_weight(&daemon, &b, 100);
    daemon.done(daemon.post(&format!("{a}/upgrade"), json!({})));
    assert_one_page(&daemon, &[&a, &b, &c], 36);
    // Set while it is not plugged.
    unplug(&daemon, &a);
    assert_eq!(set(&daemon, &a, 50).0, 200);
    plug(&daemon, &a);
    wait_for_weight(&daemon, &a, 50);
    for vbd in [&a, &b, &c] {
        unplug(&daemon, vbd);
    }
}

/// The next process is notified again, whether or not the previous one was.
#[test]
fn the_next_daemon_sends_a_weight_recorded_before_a_crash() {
    let (mut daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    wait_for_weight(&daemon, &vbd, 100);
    daemon.kill();
    daemon.catalogue().execute("UPDATE vbd SET share_weight = 77", ()).unwrap();
    daemon.restart();
    wait_for_weight(&daemon, &vbd, 77);
    unplug(&daemon, &vbd);
}

#[test]
fn weights_and_depths_out_of_range_are_refused() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    for weight in [0, 10_001] {
        let (status, refused) = set(&daemon, &vbd, weight);
        assert_eq!((status, &refused["field"]), (400, &json!("weight")), "{refused}");
        let asked = json!({ "vdi": vdis[0], "transport": "nbd", "share_weight": weight });
        let (status, refused) = daemon.post("/vbds", asked);
        assert_eq!((status, &refused["field"]), (400, &json!("share_weight")), "{refused}");
        assert!(refused["detail"].as_str().unwrap().contains("give 1 to 10000"), "{refused}");
    }
    let srs = daemon.get("/srs").1;
    let sr = format!("/srs/{}", srs[0]["uuid"].as_str().unwrap());
    assert_eq!(srs[0]["share_depth"], 128);
    let (status, refused) = daemon.patch(&sr, json!({ "share_depth": 0 }));
    assert_eq!((status, &refused["field"]), (400, &json!("share_depth")), "{refused}");
    assert_eq!(daemon.get(&vbd).1["share_weight"], 100);
    assert_eq!(set(&daemon, "/vbds/00000000-0000-0000-0000-000000000001", 100).0, 404);
}

#[test]
fn weights_set_through_the_control_socket_are_refused() {
    let (daemon, vdis) = with_disks("", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    wait_for_weight(&daemon, &vbd, 100);
    let refused = ask_disk(&daemon, &vbd, json!({ "verb": "share", "weight": 500 }));
    let advice = refused["error"]["advice"].as_str().unwrap_or_default();
    assert!(advice.contains("tapline vbd share"), "{refused}");
    assert_eq!(share(&daemon, &vbd)["weight"], 100);
    unplug(&daemon, &vbd);
}

#[test]
fn disks_of_a_daemon_without_shares_have_none() {
    let (daemon, vdis) = with_disks("[plug]\nshares = false\n", &["disk"]);
    let vbd = vbd(&daemon, &vdis[0], "nbd");
    plug(&daemon, &vbd);
    let (status, refused) = set(&daemon, &vbd, 300);
    let detail = refused["detail"].as_str().unwrap_or_default();
    assert!(status == 409 && detail.contains("recorded, but not in force"), "{refused}");
    assert_eq!(daemon.get(&vbd).1["share_weight"], 300);
    assert_eq!(share(&daemon, &vbd)["shared"], false);
    unplug(&daemon, &vbd);
}

#[test]
fn a_daemon_without_shares_withdraws_its_predecessors_pages() {
    let (mut daemon, vdis) = with_disks("", &["a", "b"]);
    let (a, b) = (vbd(&daemon, &vdis[0], "nbd"), vbd(&daemon, &vdis[1], "nbd"));
    plug(&daemon, &a);
    plug(&daemon, &b);
    wait_for_weight(&daemon, &a, 100);
    let config = daemon.room().join("taplined.toml");
    let with = std::fs::read_to_string(&config).unwrap();
    daemon.kill();
    std::fs::write(&config, format!("{with}\n[plug]\nshares = false\n")).unwrap();
    daemon.restart();
    for vbd in [&a, &b] {
        wait_until("it has no page", || share(&daemon, vbd)["shared"] == false);
        let (done, said) = io(&nbd(&daemon, vbd), &["write 0 64k", "read 0 64k"]);
        assert!(done, "{said}");
    }
    // The next process has none, either.
    daemon.done(daemon.post(&format!("{a}/upgrade"), json!({})));
    assert_eq!(share(&daemon, &a)["shared"], false);
    assert_eq!(set(&daemon, &a, 300).0, 409);
    daemon.kill();
    std::fs::write(&config, with).unwrap();
    daemon.restart();
    wait_for_weight(&daemon, &a, 300);
    assert_one_page(&daemon, &[&a, &b], 33);
    unplug(&daemon, &a);
    unplug(&daemon, &b);
}
