//! Without Xen: the messages of `serve --xen`, which leaves nothing behind.

use std::process::Command;

use crate::tool::{Room, TAPLINE};

/// Runs a command with a path to xenstore that does not exist.
fn run(room: &Room, words: &str) -> (Option<i32>, String) {
    let output = Command::new(TAPLINE)
        .args(words.split_whitespace())
        .current_dir(room.path())
        .env("XENSTORED_PATH", room.file("no-store"))
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn without_xenstore_every_command_fails_with_a_message() {
    let room = Room::new();
    room.write("disk.raw", &[0; 4096]);
    let commands = ["serve raw:disk.raw --xen 7/xvdb", "serve raw:disk.raw --xen 7/xvdb --nbd s"];
    for words in commands {
        let (code, said) = run(&room, words);
        assert_eq!(code, Some(4), "{words}: {said}");
        assert!(said.contains("no-store") && said.contains("this is not a Xen domain"), "{words}: {said}");
        assert!(said.contains("in domain 0 of a Xen host"), "{words}: {said}");
    }
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 1);
}

#[test]
fn invalid_arguments_are_refused_before_xenstore_is_used() {
    let room = Room::new();
    let all = [
        "serve raw:a --xen 7",
        "serve raw:a --xen 7/xvda --vhost-user s",
        "serve raw:a --nbd s --vhost-user t",
        "serve raw:a --nbd s --on-stop leave",
        "serve raw:a --vhost-user s --grants map",
    ];
    for words in all {
        let (code, said) = run(&room, words);
        assert_eq!(code, Some(64), "{words}: {said}");
        assert!(!said.contains("no-store"), "{words}: {said}");
    }
}
