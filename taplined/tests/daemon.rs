//! The daemon as a whole: that it starts, answers, ends and starts again.

mod harness;

use serde_json::json;

#[test]
fn it_answers_and_has_the_same_identity_after_a_restart() {
    let mut daemon = harness::start();
    let (status, host) = daemon.get("/host");
    assert_eq!((status, &host["tasks"]), (200, &json!(0)));
    daemon.restart();
    assert_eq!(daemon.get("/host").1["uuid"], host["uuid"]);
    daemon.kill();
    daemon.restart();
    assert_eq!(daemon.get("/host").1["uuid"], host["uuid"]);
    assert!(daemon.stop());
}

#[test]
fn what_is_not_known_is_refused_as_a_problem() {
    let daemon = harness::start();
    let (status, problem) = daemon.get("/nothing");
    assert_eq!((status, &problem["code"]), (404, &json!("not-found")));
    assert_eq!(daemon.post("/host", json!({})).0, 405);
}
