//! The program of disk processes, wherever it is installed: started as a user without access to its path; failures to
//! start it are explained.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::harness;
use crate::harness::Taplined;
use crate::harness::disks::{io, nbd, plug, scanned, unplug, vbd};
use crate::harness::mounted::Mounted;

/// A daemon with one disk, and that disk's VDI. From now on its disk processes run this program.
fn with_program(program: &Path) -> (Taplined, String) {
    let mut daemon = harness::start();
    let sr = daemon.repository("disks");
    let vdi = scanned(&daemon, &sr, &["disk"]).remove(0);
    let path = daemon.room().join("taplined.toml");
    let config = fs::read_to_string(&path).unwrap();
    let others: Vec<&str> = config.lines().filter(|line| !line.starts_with("disk-program")).collect();
    fs::write(&path, format!("disk-program = {program:?}\n{}\n", others.join("\n"))).unwrap();
    daemon.restart();
    (daemon, vdi)
}

/// A directory that only its owner may search, with a copy of the program in it.
fn closed() -> (tempfile::TempDir, std::path::PathBuf) {
    let closed = tempfile::tempdir().unwrap();
    fs::set_permissions(closed.path(), fs::Permissions::from_mode(0o700)).unwrap();
    fs::create_dir(closed.path().join("bin")).unwrap();
    let program = closed.path().join("bin/tapline-disk");
    testkit::program::copy(&harness::disk_program(), &program);
    (closed, program)
}

fn why_it_cannot_be_plugged(daemon: &Taplined, vdi: &str) -> Value {
    let vbd = vbd(daemon, vdi, "nbd");
    daemon.failed(daemon.post(&format!("{vbd}/plug"), json!({})))
}

#[track_caller]
fn reports(problem: &Value, message: &str, advice: &str) {
    let says = |field: &str, part: &str| problem[field].as_str().unwrap().contains(part);
    assert!(says("detail", message) && says("advice", advice), "{problem}");
}

#[test]
fn the_program_may_be_inaccessible_to_the_disks_user() {
    if !rustix::process::geteuid().is_root() {
        return harness::not_run("a program below a directory closed to the user of disks: it needs root");
    }
    let (_closed, program) = closed();
    let (daemon, vdi) = with_program(&program);
    let vbd = vbd(&daemon, &vdi, "nbd");
    plug(&daemon, &vbd);
    let pid = daemon.get(&vbd).1["pid"].as_u64().unwrap();
    // Its name and path are known to all users, but its process is not ours.
    let proc = |name: &str| Path::new("/proc").join(pid.to_string()).join(name);
    assert_eq!(fs::read_to_string(proc("comm")).unwrap(), "tapline-disk\n");
    assert_eq!(fs::read_link(proc("exe")).unwrap(), program);
    assert!(fs::read_to_string(proc("cmdline")).unwrap().starts_with(&format!("{}\0serve\0", program.display())));
    assert!(!fs::read_to_string(proc("status")).unwrap().contains("Uid:\t0"));
    let (well, said) = io(&nbd(&daemon, &vbd), &["write -P 7 0 64k", "read -P 7 0 64k"]);
    assert!(well, "{said}");
    unplug(&daemon, &vbd);
    // A job on an image that is not served.
    daemon.done(daemon.post(&format!("/vdis/{vdi}/resize"), json!({ "size": 32 << 20 })));
}

#[test]
fn a_program_that_cannot_start_is_reported_with_advice() {
    let room = tempfile::tempdir().unwrap();
    fs::set_permissions(room.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = room.path().join("tapline-disk");
    let (daemon, vdi) = with_program(&program);
    reports(&why_it_cannot_be_plugged(&daemon, &vdi), "No such file", "set disk-program");

    testkit::program::copy(&harness::disk_program(), &program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o644)).unwrap();
    reports(&why_it_cannot_be_plugged(&daemon, &vdi), "may not execute it", "chmod");

    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut bytes = fs::read(&program).unwrap();
    // For another processor: e_machine (ELF, "ELF Header").
    bytes[18] = 0xfe;
    fs::write(&program, bytes).unwrap();
    reports(&why_it_cannot_be_plugged(&daemon, &vdi), "another architecture", "for this architecture");

    fs::write(&program, "no program at all").unwrap();
    reports(&why_it_cannot_be_plugged(&daemon, &vdi), "not an executable", "set disk-program");
}

#[test]
fn a_noexec_mount_is_reported_as_the_cause() {
    let room = tempfile::tempdir().unwrap();
    let words = ["-t", "tmpfs", "-o", "noexec,mode=755", "none"];
    let Some(noexec) = Mounted::over(room.path().to_owned(), &words) else {
        return harness::not_run("a program on a file system that is mounted noexec: this user may mount nothing");
    };
    let program = noexec.path().join("tapline-disk");
    testkit::program::copy(&harness::disk_program(), &program);
    let (daemon, vdi) = with_program(&program);
    reports(&why_it_cannot_be_plugged(&daemon, &vdi), "mounted noexec", "with exec");
}
