//! The Python client (`clients/python`), with a daemon.

use std::path::Path;
use std::process::Command;

use crate::harness;

#[test]
fn the_python_clients_tests_pass() {
    if Command::new("python3").arg("--version").output().is_err() {
        return harness::not_run("there is no python3");
    }
    let daemon = harness::start();
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("../clients/python");
    let mut python = Command::new("python3");
    python.args(["-B", "-m", "unittest", "discover", "-s", "tests"]).current_dir(client).env("PYTHONPATH", ".");
    python.env("TAPLINE_SOCKET", daemon.socket()).env("TAPLINE_ROOM", daemon.room());
    let run = python.output().unwrap();
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    assert!(run.status.success(), "{said}\n{}", daemon.log());
    // A suite without tests would succeed, too.
    assert!(said.contains("Ran 9 tests"), "{said}");
}
