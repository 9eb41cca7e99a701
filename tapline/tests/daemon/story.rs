//! Types the README's examples into a terminal as printed (`story.sh`).

use std::path::Path;
use std::process::Command;

/// `story.sh` reads the same lines.
#[test]
fn the_readmes_two_examples_have_four_commands_each() {
    let readme = include_str!("../../../README.md");
    let sections: Vec<_> = readme.split("\n## ").collect();
    for title in ["A disk without a daemon", "Machines by name"] {
        let section = sections.iter().find(|section| section.starts_with(title)).unwrap();
        let commands = section.lines().filter(|line| line.starts_with("    # ")).count();
        assert_eq!(commands, 4, "{title}");
    }
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_readmes_examples_work_one_after_the_other() {
    let room = tempfile::tempdir().unwrap();
    let image = room.path().join("guest.raw");
    let mut bytes = testkit::firmware::answers_at_the_serial_port().to_vec();
    bytes.resize(1 << 20, 0);
    std::fs::write(&image, bytes).unwrap();
    let built = Path::new(env!("CARGO_BIN_EXE_tapline")).parent().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/daemon/story.sh");
    let told = Command::new("sh").arg(script).arg(built).arg(&image).output().unwrap();
    let output = String::from_utf8_lossy(&told.stdout).into_owned() + &String::from_utf8_lossy(&told.stderr);
    match told.status.code() {
        Some(77) => eprintln!("{output}"),
        code => assert_eq!(code, Some(0), "{output}"),
    }
}
