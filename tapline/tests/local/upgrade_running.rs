//! Tests of `tools/upgrade-running`, which `make install` runs: when it acts on a daemon and its disks, and its message
//! otherwise. `systemctl` and `tapline` are scripts that record their arguments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::program;

/// A host with a daemon, in its own directories.
struct Host {
    room: tempfile::TempDir,
}

impl Host {
    /// A host whose daemon is from this directory, by default the one into which the programs are installed.
    fn with_daemon_of(bin: Option<&str>) -> Host {
        let host = Host { room: tempfile::tempdir().unwrap() };
        fs::create_dir(host.path("bin")).unwrap();
        let own = host.path("bin").display().to_string();
        let systemctl = format!(
            "case $1 in is-active) exit ${{INACTIVE:-0}};; show) echo '{{ path={}/taplined ; argv[]=taplined ; }}';;\n\
             restart) exit ${{NO_RESTART:-0}};; esac",
            bin.unwrap_or(&own)
        );
        host.script("systemctl", &systemctl);
        host.script("tapline", "exit ${NO_UPGRADE:-0}");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.room.path().join(name)
    }

    /// Creates a program that records its arguments.
    fn script(&self, name: &str, text: &str) {
        let records = format!("echo {name} \"$@\" >>{}", self.path("asked").display());
        program::script(&self.path("bin").join(name), &format!("{records}\n{text}"));
    }

    /// Runs the script; returns its output and the recorded arguments.
    fn run(&self, variables: &[(&str, &str)]) -> (String, Vec<String>) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/upgrade-running");
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(script);
        command.arg(self.path("bin")).env("PATH", path).env("TAPLINE_SYSTEMD", self.room.path());
        command.env_remove("TAPLINE_NO_UPGRADE").envs(variables.iter().copied());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let asked = fs::read_to_string(self.path("asked")).unwrap_or_default();
        (String::from_utf8(output.stdout).unwrap(), asked.lines().map(str::to_owned).collect())
    }
}

/// The same for a daemon from the installed programs.
fn own(variables: &[(&str, &str)]) -> (String, Vec<String>) {
    Host::with_daemon_of(None).run(variables)
}

#[test]
fn a_running_daemon_is_restarted_before_its_disks_are_upgraded() {
    let (said, asked) = own(&[]);
    let changes = ["systemctl daemon-reload", "systemctl restart taplined", "tapline vbd upgrade --all"];
    assert_eq!(asked[asked.len() - 3..], changes, "{asked:?}");
    assert!(said.contains("TAPLINE_NO_UPGRADE=1"), "{said}");
}

#[test]
fn declining_prints_how_to_do_it_later() {
    let (said, asked) = own(&[("TAPLINE_NO_UPGRADE", "1")]);
    assert!(said.contains("systemctl restart taplined && tapline vbd upgrade --all"), "{said}");
    assert!(!asked.iter().any(|asked| asked.contains("restart") || asked.contains("upgrade")), "{asked:?}");
}

#[test]
fn without_a_daemon_of_this_installation_nothing_is_done() {
    let (said, asked) = own(&[("INACTIVE", "3")]);
    assert_eq!((said.as_str(), asked.len()), ("", 1), "{asked:?}");
    let (said, asked) = Host::with_daemon_of(Some("/elsewhere/bin")).run(&[]);
    assert!(said.contains("is left alone") && asked.len() == 2, "{said} {asked:?}");
    let host = Host::with_daemon_of(Some("/elsewhere/bin"));
    let none = host.path("no systemd");
    assert_eq!(host.run(&[("TAPLINE_SYSTEMD", none.to_str().unwrap())]), (String::new(), Vec::new()));
}

#[test]
fn failures_are_reported_and_keep_the_installation() {
    let (said, asked) = own(&[("NO_RESTART", "1")]);
    assert!(said.contains("could not be started again"), "{said}");
    assert_eq!(asked.last().unwrap(), "systemctl restart taplined");
    let (said, _) = own(&[("NO_UPGRADE", "4")]);
    assert!(said.contains("not every disk was upgraded"), "{said}");
}
