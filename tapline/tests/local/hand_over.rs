//! `tapline` passes its arguments on to the `tapline-disk` in the same directory, and exits with its exit code.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use testkit::program;

/// A copy of `tapline` in its own directory, next to a program that only prints its arguments.
fn installed(directory: &tempfile::TempDir, with_disk_program: bool) -> PathBuf {
    let tapline = directory.path().join("tapline");
    program::copy(Path::new(env!("CARGO_BIN_EXE_tapline")), &tapline);
    if with_disk_program {
        program::script(&directory.path().join("tapline-disk"), "printf '<%s>' \"$@\"\nexit 3");
    }
    tapline
}

fn run(tapline: &PathBuf, words: &[&str]) -> Output {
    Command::new(tapline).args(words).env("PATH", "").output().unwrap()
}

#[test]
fn words_and_exit_code_pass_through_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let tapline = installed(&directory, true);
    let output = run(&tapline, &["image", "check", "vhd:a b", "--repair"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "<image><check><vhd:a b><--repair>");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn help_of_a_command_of_the_disk_program_is_printed_by_it() {
    let directory = tempfile::tempdir().unwrap();
    let tapline = installed(&directory, true);
    let output = run(&tapline, &["help", "image", "create"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "<image><create><--help>");
    assert!(String::from_utf8_lossy(&run(&tapline, &["help", "vdi", "attach"]).stdout).contains("--new <SIZE>"));
}

#[test]
fn a_missing_disk_program_is_reported_with_its_location() {
    let directory = tempfile::tempdir().unwrap();
    let tapline = installed(&directory, false);
    let output = run(&tapline, &["serve", "vhd:a"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4));
    assert!(err.contains("tapline-disk") && err.contains("in the directory of tapline"), "{err}");
}

#[test]
fn wrong_words_are_refused_without_any_other_program() {
    let directory = tempfile::tempdir().unwrap();
    let tapline = installed(&directory, false);
    assert_eq!(run(&tapline, &["frobnicate"]).status.code(), Some(64));
    assert_eq!(run(&tapline, &["--help"]).status.code(), Some(0));
    assert_eq!(run(&tapline, &["--version"]).status.code(), Some(0));
}

#[test]
fn words_about_backups_go_to_the_backup_program() {
    let directory = tempfile::tempdir().unwrap();
    let tapline = installed(&directory, true);
    let missing = run(&tapline, &["backup", "list", "/t"]);
    let err = String::from_utf8_lossy(&missing.stderr);
    assert!(missing.status.code() == Some(4) && err.contains("install tapline-backup"), "{err}");
    program::script(&directory.path().join("tapline-backup"), "printf '{%s}' \"$@\"\nexit 2");
    let output = run(&tapline, &["backup", "verify", "/a b", "--json"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "{backup}{verify}{/a b}{--json}");
    assert_eq!(output.status.code(), Some(2));
    let output = run(&tapline, &["help", "backup", "create"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "{backup}{create}{--help}");
}
