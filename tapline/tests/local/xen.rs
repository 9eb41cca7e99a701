//! Tests of `tapline xen` without Xen: its messages, and that it leaves nothing behind.

use std::process::Command;

/// Runs a command that finds no xenstore.
fn run(room: &tempfile::TempDir, words: &str) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tapline"))
        .args(words.split_whitespace())
        .current_dir(room.path())
        .env("XENSTORED_PATH", room.path().join("no-store"))
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn without_xenstore_every_command_fails_with_a_message() {
    let room = tempfile::tempdir().unwrap();
    let commands = [
        "xen attach vm raw:disk.raw --vdev xvdb",
        "xen detach vm xvdb --force",
        "xen list --json",
        "xen upgrade vm xvdb",
    ];
    for words in commands {
        let (code, said) = run(&room, words);
        assert_eq!(code, Some(4), "{words}: {said}");
        assert!(said.contains("no-store") && said.contains("this is not a Xen domain"), "{words}: {said}");
        assert!(said.contains("in domain 0 of a Xen host"), "{words}: {said}");
    }
    assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 0);
}

#[test]
fn invalid_arguments_are_refused_before_xenstore_is_used() {
    let room = tempfile::tempdir().unwrap();
    for words in ["xen", "xen attach vm", "xen attach vm raw:a --no-serve --grants map", "xen detach vm vdb"] {
        let (code, said) = run(&room, words);
        assert_eq!(code, Some(64), "{words}: {said}");
        assert!(!said.contains("no-store"), "{words}: {said}");
    }
}
