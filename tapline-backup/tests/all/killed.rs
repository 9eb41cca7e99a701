//! Killed at any moment, nothing half is left, and a repeated command succeeds.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::ioctl_fionread;
use rustix::pipe::{fcntl_setpipe_size, pipe};
use rustix::process::{Pid, Signal, kill_process};

use crate::room::{Room, begun, id};

fn kill(child: &mut std::process::Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap_or_default();
}

#[test]
fn a_killed_backup_does_not_count_and_its_repetition_does() {
    kill_backups(&Room::new());
}

/// Kills backups at several moments.
pub fn kill_backups(room: &Room) {
    room.image("a.raw", 160, 1);
    for lines in [1, 2, 4, 8, 16, 30] {
        let mut child = begun(room, &["create", &room.target, "raw:a.raw", "--name", "a"], lines);
        kill(&mut child, Signal::KILL);
        child.wait().unwrap();
        for backup in room.list() {
            room.restores(id(&backup), "a.raw");
        }
        room.verify();
    }
    let made = room.back_up("raw:a.raw", "a", &[]);
    let sent = made["statistics"]["sent"].as_u64().unwrap();
    assert!(sent < 40 << 20, "{sent} bytes were sent though most were on the target");
    room.restores(id(&made), "a.raw");
}

#[test]
fn an_interrupted_backup_keeps_what_it_has_sent() {
    let room = Room::new();
    room.image("a.raw", 400, 1);
    let mut child = begun(&room, &["create", "t", "raw:a.raw", "--name", "a"], 30);
    kill(&mut child, Signal::INT);
    let status = child.wait().unwrap();
    assert!(status.code() == Some(4) || status.success(), "{status}");
    assert_eq!(room.list().len(), usize::from(status.success()));
    let made = room.back_up("raw:a.raw", "a", &[]);
    assert!(made["statistics"]["deduplicated"].as_u64().unwrap() >= 16 << 20, "{made}");
    room.restores(id(&made), "a.raw");
}

#[test]
fn a_killed_restore_leaves_no_image_under_its_name() {
    let room = Room::new();
    room.image("a.raw", 160, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    for (destination, name) in [("raw:b.raw", "b.raw"), ("qcow2:b.qcow2", "b.qcow2")] {
        for (lines, signal) in [(1, Signal::KILL), (3, Signal::KILL), (5, Signal::TERM), (8, Signal::KILL)] {
            let mut child = begun(&room, &["restore", "t", id(&made), destination], lines);
            kill(&mut child, signal);
            let status = child.wait().unwrap();
            assert_eq!(room.path(name).exists(), status.success(), "{destination}: {status}");
            if status.success() {
                room.same(name, "a.raw");
                fs::remove_file(room.path(name)).unwrap();
            }
        }
        assert_eq!(room.run(&["restore", "t", id(&made), destination]).code, 0);
        room.same(name, "a.raw");
    }
}

#[test]
fn a_killed_prune_loses_nothing_and_is_repeated() {
    let room = Room::new();
    room.image("a.raw", 48, 1);
    let kept = room.back_up("raw:a.raw", "a", &[]);
    for round in 0..8 {
        room.image("b.raw", 48, 100 + round);
        let gone = room.back_up("raw:b.raw", "b", &[]);
        let mut child = room.command(&["remove", "t", id(&gone), "--grace", "0"]).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_micros(fastrand::u64(..20_000)));
        kill(&mut child, Signal::KILL);
        child.wait().unwrap();
        room.verify();
        let listed = room.list();
        assert!(listed.iter().any(|backup| backup["id"] == kept["id"]), "{listed:?}");
        if listed.iter().any(|backup| backup["id"] == gone["id"]) {
            room.restores(id(&gone), "b.raw");
            assert_eq!(room.run(&["remove", "t", id(&gone), "--grace", "0"]).code, 0);
        }
    }
    room.restores(id(&kept), "a.raw");
    // What was left is an orphan at first, and deleted by the next one.
    for _ in 0..2 {
        assert_eq!(room.run(&["prune", "t", "--grace", "0"]).code, 0);
    }
    let shown = room.run(&["target", "show", "t", "--json"]).json();
    assert!(shown["stored"].as_u64().unwrap() < 14 << 20, "{shown}");
}

/// The children of a process, of any of its threads.
pub fn children(child: &std::process::Child) -> Vec<Pid> {
    let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let listed = threads.filter_map(|thread| fs::read_to_string(thread.unwrap().path().join("children")).ok());
    let listed: String = listed.collect();
    listed.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect()
}

#[test]
fn the_process_that_serves_an_image_ends_with_a_killed_command() {
    let room = Room::new();
    room.image("a.raw", 400, 1);
    let mut child = begun(&room, &["create", "t", "raw:a.raw", "--name", "a"], 1);
    let serving = children(&child);
    assert_eq!(serving.len(), 1);
    kill(&mut child, Signal::KILL);
    child.wait().unwrap();
    for pid in serving {
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        // Gone, or ended and not yet waited for.
        while fs::read_to_string(&stat).is_ok_and(|stat| !stat.contains(") Z ")) {
            std::thread::yield_now();
        }
    }
    room.back_up("raw:a.raw", "a", &[]);
}

#[test]
fn a_restore_whose_image_is_no_longer_served_fails() {
    let room = Room::new();
    room.image("a.raw", 400, 1);
    let made = room.back_up("raw:a.raw", "a", &[]);
    let mut child = begun(&room, &["restore", "t", id(&made), "qcow2:b.qcow2"], 1);
    for pid in children(&child) {
        kill_process(pid, Signal::KILL).unwrap_or_default();
    }
    let status = child.wait().unwrap();
    assert_eq!(room.path("b.qcow2").exists(), status.success(), "{status}");
}

/// More bytes than a line of progress has, and less than two have.
const LINE: usize = 200;

/// The value of a line of /proc/PID/status of the process that serves an image of a backup that runs.
fn status_while_backing_up(room: &Room, words: &[&str], environment: &[(&str, &str)], line: &str) -> String {
    let mut command = room.command(&[&["create", "t", "--name", "a", "--json"], words].concat());
    // A pipe with room for one line of progress: at the second one the backup waits until it is killed.
    let (read, write) = pipe().unwrap();
    let mut write = fs::File::from(write);
    let size = fcntl_setpipe_size(&write, 4096).unwrap();
    let filled = vec![b'\n'; size - LINE];
    write.write_all(&filled).unwrap();
    let mut child = command.envs(environment.iter().copied()).stderr(write).spawn().unwrap();
    drop(command);
    // Something was read of the image.
    while ioctl_fionread(&read).unwrap() <= filled.len() as u64 {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::yield_now();
    }
    let serving = children(&child);
    let status = fs::read_to_string(format!("/proc/{}/status", serving[0].as_raw_nonzero())).unwrap();
    kill(&mut child, Signal::KILL);
    child.wait().unwrap();
    status.lines().find_map(|found| found.strip_prefix(line)).unwrap_or_default().trim().to_owned()
}

#[test]
fn the_process_that_serves_an_image_is_confined_unless_a_redo_log_was_left() {
    let room = Room::new();
    room.image("a.raw", 400, 1);
    room.tool("qemu-img", &["convert", "-O", "qcow2", "a.raw", "a.qcow2"]);
    room.tool("qemu-img", &["create", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", "b.qcow2"]);
    let redo = room.path("redo");
    fs::create_dir(&redo).unwrap();
    fs::set_permissions(&redo, fs::Permissions::from_mode(0o700)).unwrap();
    let environment = [("TAPLINE_REDO_DIR", redo.to_str().unwrap())];
    for words in [&["raw:a.raw"][..], &["qcow2:b.qcow2", "--parent", "qcow2:a.qcow2"]] {
        // 2 is a filter of system calls.
        for (line, value) in [("Seccomp:", "2"), ("NoNewPrivs:", "1"), ("CapEff:", "0000000000000000")] {
            assert_eq!(status_while_backing_up(&room, words, &environment, line), value, "{words:?} {line}");
        }
    }
    fs::write(redo.join("0-0.redo"), "of a process that was killed").unwrap();
    assert_eq!(status_while_backing_up(&room, &["raw:a.raw"], &environment, "Seccomp:"), "0");
}

#[test]
fn a_raw_image_that_looks_like_another_format_is_refused() {
    let room = Room::new();
    room.image("a.raw", 4, 1);
    room.tool("qemu-img", &["convert", "-O", "qcow2", "a.raw", "a.qcow2"]);
    room.run(&["create", "t", "raw:a.qcow2", "--name", "a"]).failed(4, "qcow2");
}

#[test]
fn other_processes_of_its_user_cannot_read_its_memory() {
    let room = Room::new();
    let user = 65534;
    fs::set_permissions(room.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    assert!(Command::new("mkfifo").args(["-m", "666"]).arg(room.path("key")).status().unwrap().success());
    let mut command = room.command(&["list", "t", "--key-file", "key"]);
    if rustix::process::geteuid().is_root() {
        command.uid(user).gid(user);
    }
    let Ok(mut child) = command.spawn() else { return eprintln!("not run: another user cannot execute it") };
    // It waits for the key.
    let key = fs::OpenOptions::new().write(true).open(room.path("key")).unwrap();
    let owner = fs::metadata(format!("/proc/{}/environ", child.id())).unwrap().uid();
    drop(key);
    child.wait().unwrap();
    assert_eq!(owner, 0);
}
