//! The README's story, typed into a terminal as it is printed (`story.sh`).

use std::path::Path;
use std::process::Command;

/// `story.sh` takes them from the same place.
#[test]
fn the_readmes_story_has_at_most_eight_commands_with_make_install() {
    let readme = include_str!("../../../README.md");
    let story = readme.split("## The same by name").nth(1).and_then(|rest| rest.split("`--disk data").next()).unwrap();
    let commands = story.lines().filter(|line| line.starts_with("    # ")).count();
    assert!((5..=7).contains(&commands), "the story has {commands} commands");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn the_readmes_story_ends_with_a_machine_that_answers() {
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
