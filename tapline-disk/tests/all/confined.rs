//! A confined disk process: another user's, without capabilities, in directories that it may not even search. It works
//! only on files that were passed to it.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use fastrand::Rng;
use serde_json::json;
use tempfile::TempDir;

use crate::tool::control::Control;
use crate::tool::guest::Guest;
use crate::tool::handed::{Hand, Handed, NOWHERE};
use crate::tool::nbd::{Nbd, Peer, Versions};
use crate::tool::served::Disk;
use crate::tool::vhost::Vhost;
use crate::tool::{Room, TAPLINE};

const FORMATS: [&str; 2] = ["vhd", "qcow2"];
const NOBODY: u32 = 65534;
const MIB: u64 = 1 << 20;

thread_local! {
    /// A copy of the program in a directory that other users can access, unlike perhaps the build directory.
    static PROGRAM: (TempDir, PathBuf) = {
        let place = tempfile::tempdir().unwrap();
        std::fs::set_permissions(place.path(), Permissions::from_mode(0o755)).unwrap();
        let program = place.path().join("tapline-disk");
        testkit::program::copy(Path::new(TAPLINE), &program);
        (place, program)
    };
}

/// A directory that only root may enter; `None`, with a message, for other users.
pub fn room() -> Option<Room> {
    if !rustix::process::getuid().is_root() {
        println!("not run: only root starts processes of another user");
        return None;
    }
    let room = Room::new();
    std::fs::set_permissions(room.path(), Permissions::from_mode(0o700)).unwrap();
    Some(room)
}

/// A command as user nobody, confined.
pub fn by_nobody(words: &str) -> Hand {
    let mut hand = PROGRAM.with(|(_, program)| Hand::to_program(program, &format!("{words} --confine")));
    hand.command.uid(NOBODY).gid(NOBODY).current_dir("/");
    hand
}

fn name(format: &str, file: &str) -> String {
    format!("{format}:{NOWHERE}/{file}")
}

fn serve(room: &Room, format: &str, transport: &str) -> Disk {
    let create = format!("image create {} --size 64M", name(format, "a"));
    by_nobody(&create).file(&Handed::create(room, "a")).done();
    let image = name(format, "a");
    let words = format!("serve {image} --{transport} {NOWHERE}/disk.sock --control {NOWHERE}/control.sock");
    let hand = by_nobody(&words).file(&Handed::open(room, "a", true));
    hand.listen(room, transport, "disk.sock").listen(room, "control", "control.sock").serve()
}

/// A field of the process's status.
fn status(disk: &Disk, field: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{}/status", disk.child.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').split_whitespace().next().unwrap().to_owned()
}

fn works<P: Peer + 'static>(format: &str, transport: &str, connect: fn(&std::path::Path) -> P) {
    let Some(room) = room() else { return };
    let disk = serve(&room, format, transport);
    assert_eq!([status(&disk, "Uid"), status(&disk, "Gid")], [NOBODY.to_string(), NOBODY.to_string()]);
    assert_eq!((status(&disk, "NoNewPrivs"), status(&disk, "Seccomp")), ("1".into(), "2".into()));
    // What polling needs to leave the processor to others was opened in time.
    let open = std::fs::read_dir(format!("/proc/{}/fd", disk.child.id())).unwrap().flatten();
    let paths: Vec<_> = open.filter_map(|entry| std::fs::read_link(entry.path()).ok()).collect();
    assert!(paths.iter().any(|path| path.ends_with("status") && path.starts_with("/proc")), "{paths:?}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&status(&disk, set), 16), Ok(0), "{set}");
    }
    let path = room.file("disk.sock");
    let guest = Guest::start(move || connect(&path), Versions::new(96, MIB / 2 + 4096), Rng::with_seed(1));
    let mut control = Control::connect(&room.file("control.sock"));
    for (old, new) in [("a", "b"), ("b", "c")] {
        guest.work(100);
        let files = [Handed::create(&room, new), Handed::open(&room, old, false)];
        control.done_with(&json!({ "verb": "snapshot", "to": name(format, new) }), &files);
    }
    guest.work(100);
    let files = ["a", "b"].map(|file| Handed::open(&room, file, true));
    control.done_with(&json!({ "verb": "merge", "from": 0, "into": 2, "follow": true }), &files);
    drop(files);
    guest.work(100);
    control.done(&json!({ "verb": "resize", "size": 96 * MIB }));
    let mut versions = guest.stop();
    let (code, said) = disk.stop();
    assert_eq!(code, Some(0), "{said}");
    let image = name(format, "a");
    by_nobody(&format!("image check {image} --repair")).file(&Handed::open(&room, "a", true)).done();
    room.done(&format!("image check {format}:a"));
    let _disk = Disk::serve(&room, &format!("{format}:a --nbd again.sock"));
    versions.check(&mut Nbd::connect(&room.file("again.sock")).unwrap());
}

#[test]
fn a_confined_nbd_disk_survives_snapshot_and_merge_under_load() {
    FORMATS.iter().for_each(|format| works(format, "nbd", |path| Nbd::connect(path).unwrap()));
}

#[test]
fn a_confined_vhost_user_disk_survives_snapshot_and_merge_under_load() {
    FORMATS.iter().for_each(|format| works(format, "vhost-user", Vhost::connect));
}

#[test]
fn confined_processes_run_jobs() {
    let Some(room) = room() else { return };
    room.make_raw("raw", 32 * MIB);
    let read = |file: &str| Handed::open(&room, file, false);
    let [raw, a, b] = [name("raw", "raw"), name("qcow2", "a"), name("qcow2", "b")];
    by_nobody(&format!("image convert {raw} {a} --verify")).files(&[read("raw"), Handed::create(&room, "a")]).done();
    by_nobody(&format!("image create {b} --parent {a}")).files(&[Handed::create(&room, "b"), read("a")]).done();
    by_nobody(&format!("image compare {b} {raw} --parent {a}")).files(&[read("a"), read("b"), read("raw")]).done();
    let write = |file: &str| Handed::open(&room, file, true);
    by_nobody(&format!("image merge {b} --parent {a} --from 0 --into 1")).files(&[write("a"), write("b")]).done();
    by_nobody(&format!("image resize {a} --size 40M")).file(&write("a")).done();
    by_nobody(&format!("image map {a}")).file(&read("a")).done();
    by_nobody(&format!("image info {a}")).file(&read("a")).done();
}

#[test]
fn confinement_requires_passed_files() {
    let said = Room::new().tapline("image info vhd:/a --confine");
    assert_eq!(said.code, Some(64), "{said:?}");
    assert!(said.err.contains("--handed"), "{said:?}");
}
