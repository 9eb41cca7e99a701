//! A target that is full, that goes away, or that others use at the same time.

use std::fs;
use std::process::{Command, Stdio};

use crate::room::{Ran, Room, begun, id};

/// A file system in memory, unmounted at the end.
struct Mounted(std::path::PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(&self.0).status().map(drop).unwrap_or_default();
    }
}

#[test]
fn a_full_target_says_so_and_goes_on_when_there_is_space() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let room = Room::without_target();
    fs::create_dir(room.path("t")).unwrap();
    let place = room.path("t").display().to_string();
    room.tool("mount", &["-t", "tmpfs", "-o", "size=24M", "none", &place]);
    let _mounted = Mounted(room.path("t"));
    assert_eq!(room.run(&["target", "create", "t"]).code, 0);
    room.image("a.raw", 16, 1);
    let small = room.back_up("raw:a.raw", "a", &[]);
    room.image("b.raw", 160, 2);
    room.run(&["create", "t", "raw:b.raw", "--name", "b"]).failed(9, "the target is full");
    assert_eq!(room.list().len(), 1);
    room.restores(id(&small), "a.raw");
    room.verify();
    room.tool("mount", &["-o", "remount,size=80M", &place]);
    let made = room.back_up("raw:b.raw", "b", &[]);
    assert!(made["statistics"]["sent"].as_u64().unwrap() < 40 << 20, "what was sent before was sent again: {made}");
    room.restores(id(&made), "b.raw");
}

#[test]
fn a_target_that_goes_away_is_an_error_and_no_backup() {
    let room = Room::new();
    room.image("a.raw", 400, 1);
    let mut child = begun(&room, &["create", "t", "raw:a.raw", "--name", "a"], 2);
    fs::rename(room.path("t"), room.path("gone")).unwrap();
    // The open directory is removed: nothing can be created in it any more.
    while fs::remove_dir_all(room.path("gone")).is_err() {}
    assert!(!child.wait().unwrap().success());
    assert!(!room.path("t").exists());
}

#[test]
fn two_hosts_back_up_while_a_third_prunes() {
    back_up_and_prune_at_once(&Room::new());
}

/// Two hosts back up while a third one prunes.
pub fn back_up_and_prune_at_once(room: &Room) {
    // Without a period of grace prunes take what is being sent, and a backup may give up: but never lose anything.
    for (round, grace) in [(0, "1"), (1, "0"), (2, "1")] {
        for (seed, name) in [(1, "a"), (2, "b")] {
            room.image(&format!("{name}.raw"), 96, round * 2 + seed);
        }
        let start = |name: &str| {
            let mut command = room.command(&["create", &room.target, &format!("raw:{name}.raw"), "--name", name]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let mut children = ["a", "b"].map(|name| (name, start(name)));
        while children.iter_mut().any(|(_, child)| child.try_wait().unwrap().is_none()) {
            let pruned = room.run(&["prune", &room.target, "--grace", grace, "--keep-last", "1"]);
            assert_eq!(pruned.code, 0, "{pruned:?}");
        }
        for (name, child) in children {
            let ran = Ran::of(&child.wait_with_output().unwrap());
            if ran.code != 0 {
                assert_eq!(grace, "0", "{ran:?}");
                ran.failed(4, "other hosts");
            }
            let made = room.back_up(&format!("raw:{name}.raw"), name, &[]);
            room.restores(id(&made), &format!("{name}.raw"));
        }
        room.verify();
    }
}
