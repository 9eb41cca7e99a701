//! One repository and two hosts, one after the other: the first host's records about its disks when it died do not
//! conflict with the second host's writes.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::nbd::Client;
use crate::harness::{Taplined, disks, wait_until};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 64 << 10;

/// A host with a repository and a plugged disk with unflushed writes.
struct First {
    daemon: Taplined,
    sr: String,
    vdi: String,
    vbd: String,
}

fn first(settings: &str, format: &str) -> First {
    let daemon = harness::start_with(settings, &[]);
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 64 * MIB, "format": format });
    let vdi: String = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().into();
    let vbd = disks::vbd(&daemon, &vdi, "nbd");
    disks::plug(&daemon, &vbd);
    let mut client = Client::connect(daemon.get(&vbd).1["socket"].as_str().unwrap());
    for at in 0..16 {
        assert!(client.try_write(at * 4 * MIB, BLOCK, 1));
    }
    First { daemon, sr, vdi, vbd }
}

impl First {
    fn kill_disk(&self) {
        let pid = self.daemon.get(&self.vbd).1["pid"].to_string();
        crate::harness::kill(&pid);
        wait_until("it has ended", || !PathBuf::from(format!("/proc/{pid}")).exists());
    }

    /// Another host attaches the repository at `path`, overwrites the disk and detaches it.
    fn used_elsewhere(&self, path: &str) -> Taplined {
        let other = harness::start();
        let source = json!({ "type": "dir", "path": path });
        other.done(other.post("/srs/introduce", json!({ "uuid": self.sr, "source": source })));
        let vbd = disks::vbd(&other, &self.vdi, "nbd");
        disks::plug(&other, &vbd);
        let (well, said) = disks::io(&disks::nbd(&other, &vbd), &["write -P 2 0 64M", "flush"]);
        assert!(well, "{said}");
        disks::unplug(&other, &vbd);
        assert_eq!(other.delete(&vbd).0, 204);
        other.done(other.post(&format!("/srs/{}/detach", self.sr), json!({})));
        other
    }

    fn path(&self) -> String {
        self.daemon.room().join("vms").to_str().unwrap().into()
    }

    /// Checks that the disk is unplugged with a reason, and has the contents written by the other host.
    #[track_caller]
    fn is_the_others(&self) {
        let now = self.daemon.get(&self.vbd).1;
        assert_eq!(now["state"], "unplugged", "{now}\n{}", self.daemon.log());
        assert!(now["problem"]["detail"].as_str().unwrap().contains("has used its repository, 'vms', since"), "{now}");
        disks::plug(&self.daemon, &self.vbd);
        let (well, said) = disks::io(&disks::nbd(&self.daemon, &self.vbd), &["read -P 2 0 64M"]);
        assert!(well, "{said}");
        disks::unplug(&self.daemon, &self.vbd);
        disks::nothing_leaked(&self.daemon);
        disks::inventory_agrees(&self.daemon);
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_returning_host_does_not_overwrite_another_hosts_writes() {
    for format in ["qcow2", "vhd", "raw"] {
        let mut first = first("", format);
        first.daemon.kill();
        let pid = catalogue_pid(&first);
        crate::harness::kill(&pid);
        wait_until("it has ended", || !PathBuf::from(format!("/proc/{pid}")).exists());
        let _other = first.used_elsewhere(&first.path());
        first.daemon.restart();
        first.is_the_others();
    }
}

/// The process of the disk, while no daemon runs.
fn catalogue_pid(first: &First) -> String {
    let catalogue = rusqlite::Connection::open(first.daemon.room().join("state/catalogue.db")).unwrap();
    let pid: i64 = catalogue.query_row("SELECT pid FROM vbd", [], |row| row.get(0)).unwrap();
    pid.to_string()
}

/// The daemon stays alive in the meantime, and finds the repository again.
#[test]
fn a_disk_that_died_while_its_repository_was_elsewhere_is_not_restarted() {
    let first = first("[storage]\nlost-interval = 1", "qcow2");
    let (here, there) = (first.path(), first.daemon.room().join("there").to_str().unwrap().to_owned());
    std::fs::rename(&here, &there).unwrap();
    let scan = first.daemon.post(&format!("/srs/{}/scan", first.sr), json!({})).1;
    first.daemon.wait(&scan);
    let state = || first.daemon.get(&format!("/srs/{}", first.sr)).1["state"].clone();
    wait_until("the repository is lost", || state() == "lost");
    first.kill_disk();
    let _other = first.used_elsewhere(&there);
    std::fs::rename(&there, &here).unwrap();
    wait_until("it is found again", || state() == "attached");
    wait_until("it is unplugged", || first.daemon.get(&first.vbd).1["state"] == "unplugged");
    // This state is stable.
    std::thread::sleep(std::time::Duration::from_secs(2));
    first.is_the_others();
}

/// The daemon dies in a job past its point of no return; the other host uses the disk in its earlier state.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn an_unfinished_job_is_dropped_after_another_hosts_use() {
    for step in ["vdi-destroy:forget", "vdi-revert:record", "vdi-revert:record:after"] {
        let mut first = first("", "qcow2");
        let snapshot = first.daemon.done(first.daemon.post(&format!("/vdis/{}/snapshot", first.vdi), json!({})));
        disks::unplug(&first.daemon, &first.vbd);
        assert_eq!(first.daemon.delete(&first.vbd).0, 204);
        first.daemon.restart_with(&[("TAPLINED_ABORT_AT", step)]);
        let vdi = format!("/vdis/{}", first.vdi);
        match step.starts_with("vdi-destroy") {
            true => first.daemon.ask_and_die("DELETE", &vdi, None),
            false => first.daemon.post_and_die(&format!("{vdi}/revert"), json!({ "snapshot": snapshot["uuid"] })),
        }
        let _other = first.used_elsewhere(&first.path());
        first.daemon.restart();
        first.daemon.settle();
        let vbd = disks::vbd(&first.daemon, &first.vdi, "nbd");
        disks::plug(&first.daemon, &vbd);
        let (well, said) = disks::io(&disks::nbd(&first.daemon, &vbd), &["read -P 2 0 64M"]);
        assert!(well, "{step}: {said}");
        disks::unplug(&first.daemon, &vbd);
        disks::inventory_agrees(&first.daemon);
    }
}

/// The daemon dies after switching the leaf for a snapshot: its catalogue has recorded that, but the repository has
/// not.
#[test]
fn a_disk_with_an_unknown_child_is_blocked_until_resolved() {
    for (step, rebuilt) in [("vdi-snapshot:leaf:after", false), ("vdi-clone:record", true)] {
        let mut first = first("", "qcow2");
        first.daemon.restart_with(&[("TAPLINED_ABORT_AT", step)]);
        let verb = if step.contains("clone") { "clone" } else { "snapshot" };
        first.daemon.post_and_die(&format!("/vdis/{}/{verb}", first.vdi), json!({}));
        let socket = first.daemon.room().join("run/vbd").join(first.vbd.trim_start_matches("/vbds/")).join("nbd.sock");
        let at = format!("nbd+unix:///?socket={}", socket.display());
        let (well, said) = disks::io(&at, &["write -P 3 0 1M", "flush"]);
        assert!(well, "{said}");
        let pid = catalogue_pid(&first);
        crate::harness::kill(&pid);
        let other;
        let daemon = if rebuilt {
            std::fs::remove_dir_all(first.daemon.room().join("state")).unwrap();
            assert_eq!(first.daemon.command(&["--rebuild", &first.path()]).0, 0);
            first.daemon.restart();
            &first.daemon
        } else {
            other = harness::start();
            let source = json!({ "type": "dir", "path": first.path() });
            other.done(other.post("/srs/introduce", json!({ "uuid": first.sr, "source": source })));
            &other
        };
        let vdi = format!("/vdis/{}", first.vdi);
        assert_eq!(daemon.get(&vdi).1["state"], "diverged", "{step} {}", daemon.log());
        assert!(daemon.log().contains("is a child of the VDI's image"), "{}", daemon.log());
        let vbd = disks::vbd(daemon, &first.vdi, "nbd");
        assert_eq!(daemon.post(&format!("{vbd}/plug"), json!({})).0, 409);
        assert_eq!(daemon.delete(&vbd).0, 204);
        if verb == "snapshot" {
            // As advised: the last written state becomes a VDI.
            assert_eq!(daemon.post(&format!("{vdi}/reconcile"), json!({ "believe": "catalogue" })).0, 200);
            assert_eq!(daemon.patch(&vdi, json!({ "read_only": true })).0, 200);
            let scan = daemon.done(daemon.post(&format!("/srs/{}/scan", first.sr), json!({})));
            let found = scan["appeared"][0]["vdi"].as_str().unwrap_or_else(|| panic!("{scan}"));
            let vbd = disks::vbd(daemon, found, "nbd");
            disks::plug(daemon, &vbd);
            let (well, said) = disks::io(&disks::nbd(daemon, &vbd), &["read -P 3 0 1M", "read -P 1 4M 64k"]);
            assert!(well, "{said}");
            disks::unplug(daemon, &vbd);
        }
    }
}

/// A running disk has its image locked: no other host can have written to it.
#[test]
fn a_disk_that_kept_running_keeps_running() {
    let mut first = first("", "qcow2");
    let before = first.daemon.get(&first.vbd).1["pid"].clone();
    first.daemon.kill();
    let other = harness::start();
    let source = json!({ "type": "dir", "path": first.path() });
    other.done(other.post("/srs/introduce", json!({ "uuid": first.sr, "source": source })));
    let vbd = disks::vbd(&other, &first.vdi, "nbd");
    let plugged = other.wait(&other.post(&format!("{vbd}/plug"), json!({})).1);
    assert_eq!(plugged["state"], "failed", "{plugged}");
    assert_eq!(other.delete(&vbd).0, 204);
    other.done(other.post(&format!("/srs/{}/detach", first.sr), json!({})));
    first.daemon.restart();
    let now = first.daemon.get(&first.vbd).1;
    assert_eq!((&now["state"], &now["pid"]), (&json!("plugged"), &before), "{}", first.daemon.log());
    // Its redo log still exists: if it is killed now, no acknowledged write is lost.
    first.kill_disk();
    wait_until("it is served again", || first.daemon.get(&first.vbd).1["state"] == "plugged");
    let (well, said) = disks::io(&disks::nbd(&first.daemon, &first.vbd), &["read -P 1 60M 64k"]);
    assert!(well, "{said}");
}

/// The catalogue was copied to another machine, or its backup was restored there.
#[test]
fn a_catalogue_from_another_machine_starts_nothing() {
    let mut first = first("", "qcow2");
    let (status, set) = first.daemon.patch(&first.vbd, json!({ "autostart": {} }));
    assert_eq!(status, 200, "{set}");
    let host = first.daemon.get("/host").1["uuid"].clone();
    first.daemon.kill();
    let pid = catalogue_pid(&first);
    crate::harness::kill(&pid);
    let catalogue = rusqlite::Connection::open(first.daemon.room().join("state/catalogue.db")).unwrap();
    let set = catalogue.execute("UPDATE meta SET value = 'another' WHERE key = 'machine'", []);
    drop(catalogue);
    if set.unwrap() == 0 || std::fs::read_to_string("/etc/machine-id").unwrap_or_default().trim().is_empty() {
        eprintln!("not run: this machine has no machine-id");
        return;
    }
    std::fs::remove_file(first.daemon.room().join("run/boot")).unwrap();
    first.daemon.restart();
    assert_ne!(first.daemon.get("/host").1["uuid"], host);
    assert!(first.daemon.log().contains("the catalogue comes from another machine"), "{}", first.daemon.log());
    first.daemon.settle();
    let now: Value = first.daemon.get(&first.vbd).1;
    assert_eq!(now["state"], "unplugged", "{now}");
    // Only once: after that it belongs to this machine.
    let host = first.daemon.get("/host").1["uuid"].clone();
    first.daemon.restart();
    assert_eq!(first.daemon.get("/host").1["uuid"], host);
}
