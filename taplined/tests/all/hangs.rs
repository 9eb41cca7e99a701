//! Hangs are reported and can be ended by an administrator: image jobs whose storage does not respond, and disks for
//! which only their guests wait.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{Taplined, disks};

const MIB: u64 = 1 << 20;

/// Storage counts as not responding after a second.
const IMPATIENT: &str = "[storage]\nanswer-timeout = 1\n[catalogue]\nbackup-interval = 1";

/// A daemon whose image jobs hang while a file `hang` exists, and one unplugged VDI.
struct Bed {
    daemon: Taplined,
    vdi: String,
}

fn bed() -> Bed {
    let mut daemon = harness::start_with(IMPATIENT, &[]);
    let room = daemon.room().to_owned();
    let program = room.join("tapline-disk");
    testkit::program::copy(&harness::disk_program(), &program);
    let script = room.join("hanging");
    let hang = format!("if [ \"$1\" = image ] && [ -e {0}/hang ]; then kill -STOP $$; fi", room.display());
    testkit::program::script(&script, &format!("{hang}\nexec {} \"$@\"", program.display()));
    let path = room.join("taplined.toml");
    let config = fs::read_to_string(&path).unwrap();
    let lines = config.lines().map(|line| match line.starts_with("disk-program") {
        true => format!("disk-program = {script:?}\n"),
        false => format!("{line}\n"),
    });
    fs::write(&path, lines.collect::<String>()).unwrap();
    daemon.restart();
    let sr = daemon.repository("vms");
    let asked = json!({ "sr": sr, "name": "disk", "size": 64 * MIB, "format": "qcow2" });
    let vdi = daemon.done(daemon.post("/vdis", asked))["uuid"].as_str().unwrap().to_owned();
    daemon.settle();
    Bed { daemon, vdi }
}

impl Bed {
    /// Starts growing the VDI, which hangs, and waits until the task reports that; returns the task's path.
    fn hanging_resize(&self) -> String {
        fs::write(self.daemon.room().join("hang"), "").unwrap();
        let (status, task) = self.resize();
        assert_eq!(status, 202, "{task}");
        let task = format!("/tasks/{}", task["uuid"].as_str().unwrap());
        self.wait_until_it_says_so(&task);
        task
    }

    fn resize(&self) -> (u16, Value) {
        self.daemon.post(&format!("/vdis/{}/resize", self.vdi), json!({ "size": 128 * MIB }))
    }

    fn wait_until_it_says_so(&self, task: &str) {
        harness::wait_until("it says that it makes no progress", || {
            let problem = &self.daemon.get(task).1["problem"]["detail"];
            problem.as_str().is_some_and(|said| said.contains("no progress") || said.contains("rolling back has taken"))
        });
    }

    /// Ends the hanging processes that a killed daemon has left.
    fn end_hanging(&self) {
        let script = self.daemon.room().join("hanging");
        Command::new("pkill").args(["-KILL", "-f"]).arg(script).status().unwrap();
    }
}

#[test]
fn a_hanging_image_job_is_reported_and_can_be_abandoned() {
    let bed = bed();
    let task = bed.hanging_resize();
    assert_eq!(bed.daemon.get(&task).1["state"], "running");
    let (status, cancelled) = bed.daemon.post(&format!("{task}/cancel"), json!({}));
    assert!(status == 200 && cancelled["state"] == "cancelling", "{status} {cancelled}");
    let (status, abandoned) = bed.daemon.post(&format!("{task}/abandon"), json!({}));
    assert_eq!((status, &abandoned["state"]), (200, &json!("failed")), "{abandoned}");
    assert!(abandoned["problem"]["detail"].as_str().unwrap().contains("no progress"), "{abandoned}");
    harness::wait_until("its process is ended", || {
        let script = bed.daemon.room().join("hanging");
        !Command::new("pgrep").arg("-f").arg(script).output().unwrap().status.success()
    });
    assert_eq!(bed.daemon.get(&format!("/vdis/{}", bed.vdi)).1["state"], "diverged");
    fs::remove_file(bed.daemon.room().join("hang")).unwrap();
    let decided = bed.daemon.post(&format!("/vdis/{}/reconcile", bed.vdi), json!({ "believe": "catalogue" }));
    assert_eq!(decided.0, 200, "{}", decided.1);
    assert_eq!(bed.daemon.done(bed.resize())["size"], 128 * MIB);
}

#[test]
fn a_job_that_only_waited_long_completes_without_a_problem() {
    let bed = bed();
    let task = bed.hanging_resize();
    let script = bed.daemon.room().join("hanging");
    fs::remove_file(bed.daemon.room().join("hang")).unwrap();
    assert!(Command::new("pkill").args(["-CONT", "-f"]).arg(script).status().unwrap().success());
    harness::wait_until("it is done", || bed.daemon.get(&task).1["state"] == "done");
    assert!(bed.daemon.get(&task).1["problem"].is_null());
    assert_eq!(bed.daemon.post(&format!("{task}/abandon"), json!({})).0, 409);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_rollback_that_hangs_does_not_keep_the_daemon_from_starting() {
    let mut bed = bed();
    let task = bed.hanging_resize();
    bed.daemon.kill();
    bed.end_hanging();
    bed.daemon.restart();
    bed.wait_until_it_says_so(&task);
    let sr = bed.daemon.get("/srs").1[0]["uuid"].clone();
    assert_eq!(bed.daemon.get(&format!("/srs/{}", sr.as_str().unwrap())).0, 200);
    fs::remove_file(bed.daemon.room().join("hang")).unwrap();
    bed.end_hanging();
    harness::wait_until("it is rolled back", || bed.daemon.get(&task).1["state"] == "failed");
    assert_eq!(bed.daemon.done(bed.resize())["size"], 128 * MIB);
}

/// Backups wait for idle moments, but not for a task that never ends.
#[test]
fn the_catalogue_is_backed_up_while_a_task_hangs() {
    let bed = bed();
    let newest = || bed.daemon.get("/host/backups").1[0].clone();
    let task = bed.hanging_resize();
    // A backup begun before the task may complete only now.
    std::thread::sleep(std::time::Duration::from_secs(1));
    let before = newest();
    let asked = json!({ "name": "a", "driver": "qemu", "memory": 64 * MIB, "vcpus": 1 });
    assert_eq!(bed.daemon.post("/vms", asked).0, 201);
    harness::wait_until("there is a new daily backup", || newest() != before);
    assert_eq!(newest()["reason"], "daily");
    assert_eq!(bed.daemon.post(&format!("{task}/abandon"), json!({})).0, 200);
}

/// No client queries the disk: only its guest waits.
#[test]
fn a_stopped_disk_is_reported_without_a_request() {
    let daemon = harness::start_with(IMPATIENT, &[]);
    let sr = daemon.repository("vms");
    let vdi = daemon.done(daemon.post("/vdis", json!({ "sr": sr, "name": "disk", "size": MIB })));
    let vbd = disks::vbd(&daemon, vdi["uuid"].as_str().unwrap(), "nbd");
    disks::plug(&daemon, &vbd);
    let pid = daemon.get(&vbd).1["pid"].to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    signal("-STOP");
    harness::wait_until("it is reported", || {
        let problem = &daemon.get(&vbd).1["problem"]["detail"];
        problem.as_str().is_some_and(|said| said.contains("has not responded") && said.contains("stopped"))
    });
    signal("-CONT");
    harness::wait_until("it responds again", || daemon.get(&vbd).1["problem"].is_null());
    disks::unplug(&daemon, &vbd);
}
