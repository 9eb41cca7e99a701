//! Handling of journal entries that the daemon does not understand, left by a newer daemon or by damage.

use serde_json::{Value, json};

use crate::harness;
use crate::harness::{Taplined, disks};

const TASK: &str = "7a500000-0000-4000-8000-000000000001";

/// Inserts a task that holds a VDI.
fn plant(daemon: &mut Taplined, verb: &str, vdi: &str, intent: &str) {
    assert!(daemon.stop());
    let catalogue = daemon.catalogue();
    let about = json!([{ "kind": "vdi", "uuid": vdi }]).to_string();
    let task = "INSERT INTO task (uuid, verb, about, state, step, cancellable, intent, created, requester)
                VALUES (?1, ?2, ?3, 'running', 'resize', 1, ?4, '2026-11-22T12:00:00Z', '{\"type\":\"daemon\"}')";
    catalogue.execute(task, (TASK, verb, about, intent)).unwrap();
    catalogue.execute("INSERT INTO claim VALUES (?1, ?2)", (vdi, TASK)).unwrap();
    catalogue.execute("INSERT INTO lease VALUES (?1, ?2, 'RW')", (vdi, TASK)).unwrap();
    drop(catalogue);
    daemon.restart();
}

/// The intent of a job that resizes a VDI.
fn intent(daemon: &Taplined, vdi: &str) -> String {
    let sr = &daemon.get(&format!("/vdis/{vdi}")).1["sr"];
    json!({ "vdi": vdi, "sr": sr, "size": 48 << 20, "vbd": null }).to_string()
}

fn task(daemon: &Taplined) -> Value {
    daemon.get(&format!("/tasks/{TASK}")).1
}

fn resize(daemon: &Taplined, vdi: &str) -> (u16, Value) {
    daemon.post(&format!("/vdis/{vdi}/resize"), json!({ "size": 32 << 20 }))
}

#[test]
fn a_stuck_task_is_reported_and_keeps_its_objects() {
    let foreign = r#"{"from":"the future"}"#;
    for (verb, intent) in
        [("vdi-resize", foreign), ("vdi-resize", "not JSON"), ("vdi-merge", foreign), ("vdi-bend", "{}")]
    {
        let (mut daemon, vdis) = disks::with_disks("", &["held", "other"]);
        plant(&mut daemon, verb, &vdis[0], intent);
        // After every start.
        daemon.restart();
        let stuck = task(&daemon);
        assert_eq!(stuck["state"], "stuck", "{stuck}");
        let message = stuck["problem"]["detail"].as_str().unwrap();
        assert!(message.contains(verb) && message.contains(TASK), "{message}");
        let advice = &stuck["problem"]["advice"];
        assert!(advice.as_str().unwrap().contains("taplined version"), "{advice}");
        assert_eq!(daemon.get("/tasks?open=true").1[0]["uuid"], TASK);

        let (status, refused) = resize(&daemon, &vdis[0]);
        assert_eq!((status, &refused["code"], &refused["advice"]), (409, &json!("busy"), advice), "{refused}");
        let vbd = disks::vbd(&daemon, &vdis[0], "nbd");
        let (status, refused) = daemon.post(&format!("{vbd}/plug"), json!({}));
        assert_eq!((status, &refused["advice"]), (409, advice), "{refused}");
        let (status, refused) = daemon.post(&format!("/tasks/{TASK}/cancel"), json!({}));
        assert_eq!((status, &refused["advice"]), (409, advice), "{refused}");
        assert_eq!(daemon.done(resize(&daemon, &vdis[1]))["size"], 32 << 20);
    }
}

#[test]
fn a_daemon_that_knows_the_job_resumes_it() {
    let (mut daemon, vdis) = disks::with_disks("", &["held"]);
    plant(&mut daemon, "vdi-resize", &vdis[0], "{}");
    assert_eq!(task(&daemon)["state"], "stuck");
    let intent = intent(&daemon, &vdis[0]);
    assert!(daemon.stop());
    daemon.catalogue().execute("UPDATE task SET intent = ?1", [intent]).unwrap();
    daemon.restart();
    harness::wait_until("it has ended", || ["done", "failed"].contains(&task(&daemon)["state"].as_str().unwrap()));
    daemon.done(resize(&daemon, &vdis[0]));
}

#[test]
fn a_disk_with_a_stuck_task_can_be_unplugged() {
    let (mut daemon, vdis) = disks::with_disks("", &["held"]);
    let vbd = disks::vbd(&daemon, &vdis[0], "nbd");
    disks::plug(&daemon, &vbd);
    assert!(daemon.stop());
    let insert = "INSERT INTO task (uuid, verb, about, state, cancellable, intent, created, requester)
                  VALUES (?1, 'vdi-snapshot', '[]', 'running', 0, '{}', '2026-11-22T12:00:00Z',
                  '{\"type\":\"daemon\"}')";
    daemon.catalogue().execute(insert, [TASK]).unwrap();
    daemon.catalogue().execute("INSERT INTO claim VALUES (?1, ?2)", (&vdis[0], TASK)).unwrap();
    daemon.restart();
    assert_eq!(task(&daemon)["state"], "stuck");
    disks::unplug(&daemon, &vbd);
    assert_eq!(daemon.post(&format!("{vbd}/plug"), json!({})).0, 409);
}

/// A step of a newer daemon, whose name this one does not know.
#[test]
fn a_task_at_an_unknown_step_is_stuck() {
    let (mut daemon, vdis) = disks::with_disks("", &["held"]);
    plant(&mut daemon, "vdi-resize", &vdis[0], "{}");
    let intent = intent(&daemon, &vdis[0]);
    assert!(daemon.stop());
    daemon.catalogue().execute("UPDATE task SET intent = ?1, step = 'stretch', state = 'running'", [intent]).unwrap();
    daemon.restart();
    let stuck = task(&daemon);
    assert_eq!(stuck["state"], "stuck", "{stuck}");
    assert!(stuck["problem"]["detail"].as_str().unwrap().contains("its step 'stretch'"), "{stuck}");
    assert_eq!(resize(&daemon, &vdis[0]).0, 409);
}
