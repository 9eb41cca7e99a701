//! Tests of `tools/installed`: which files `make install` creates, and that `make uninstall` removes exactly these.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

/// A host: a prefix in a temporary directory, and a tree to install into it.
struct Host {
    room: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let host = Host { room: tempfile::tempdir().unwrap() };
        for file in [
            "bin/tapline",
            "bin/taplined",
            "bin/tapline-disk",
            "bin/tapline-backup",
            "share/man/man1/tapline.1",
            "share/tapline/guest/tapline-guest",
        ] {
            host.stage(file, file);
        }
        host
    }

    fn prefix(&self) -> PathBuf {
        self.room.path().join("prefix")
    }

    fn path(&self, file: &str) -> PathBuf {
        self.prefix().join(file)
    }

    /// Adds a file to the tree to install.
    fn stage(&self, file: &str, text: &str) {
        let path = self.staged(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn staged(&self, file: &str) -> PathBuf {
        self.room.path().join("stage").join(self.path(file).strip_prefix("/").unwrap())
    }

    /// Runs the script; returns whether it succeeded, and its messages.
    fn run(&self, words: &[&Path]) -> (bool, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/installed");
        let mut command = Command::new(script);
        command.args(words).env("TAPLINE_SYSTEMD", self.room.path().join("no systemd"));
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    }

    fn install(&self) {
        let (done, said) = self.run(&[Path::new("put"), &self.room.path().join("stage"), &self.prefix()]);
        assert!(done, "{said}");
    }

    fn uninstall(&self) -> (bool, String) {
        self.run(&[Path::new("remove"), &self.prefix()])
    }

    /// Starts a program in place of an installed one.
    fn running(&self, program: &str) -> Child {
        self.stage(program, "");
        testkit::program::copy(Path::new("/bin/sleep"), &self.staged(program));
        self.install();
        fs::set_permissions(self.path(program), fs::Permissions::from_mode(0o755)).unwrap();
        Command::new(self.path(program)).arg("60").spawn().unwrap()
    }
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn uninstall_removes_all_that_install_created() {
    let host = Host::new();
    host.install();
    assert_eq!(fs::read_to_string(host.path("bin/taplined")).unwrap(), "bin/taplined");
    let (done, said) = host.uninstall();
    assert!(done, "{said}");
    assert!(!host.prefix().exists(), "{said}");
}

#[test]
fn files_and_directories_of_others_stay() {
    let host = Host::new();
    fs::create_dir_all(host.path("share/man")).unwrap();
    fs::create_dir_all(host.path("bin")).unwrap();
    fs::write(host.path("bin/other"), "other").unwrap();
    host.install();
    fs::write(host.path("bin/tapline"), "of another package").unwrap();
    let (done, said) = host.uninstall();
    assert!(done && said.contains("bin/tapline was changed since and stays"), "{said}");
    let mut left: Vec<_> = fs::read_dir(host.path("bin")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["other", "tapline"]);
    assert!(host.path("share/man").is_dir() && !host.path("share/man/man1").exists());
}

#[test]
fn a_newer_version_removes_files_that_it_no_longer_has() {
    let host = Host::new();
    host.stage("share/man/man1/tapline-old.1", "old");
    host.install();
    fs::remove_file(host.staged("share/man/man1/tapline-old.1")).unwrap();
    host.install();
    assert!(!host.path("share/man/man1/tapline-old.1").exists() && host.path("share/man/man1/tapline.1").exists());
    assert!(host.uninstall().0 && !host.prefix().exists());
}

#[test]
fn a_running_daemon_keeps_the_installation() {
    let host = Host::new();
    let daemon = host.running("bin/taplined");
    let (done, said) = host.uninstall();
    assert!(!done && said.contains(&format!("(pid {})", daemon.id())), "{said}");
    assert!(host.path("bin/taplined").exists());
    end(daemon);
    assert!(host.uninstall().0);
}

#[test]
fn a_disk_of_a_replaced_program_keeps_the_installation() {
    let host = Host::new();
    let disk = host.running("bin/tapline-disk");
    host.stage("bin/tapline-disk", "a newer version");
    host.install();
    let (done, said) = host.uninstall();
    assert!(!done && said.contains(&format!("processes of tapline-disk: {}", disk.id())), "{said}");
    end(disk);
    assert!(host.uninstall().0 && !host.prefix().exists());
}

#[test]
fn without_a_record_nothing_is_removed() {
    let host = Host::new();
    fs::create_dir_all(host.path("bin")).unwrap();
    fs::write(host.path("bin/tapline"), "").unwrap();
    let (done, said) = host.uninstall();
    assert!(!done && said.contains("no record of an installation"), "{said}");
    assert!(host.path("bin/tapline").exists());
}
