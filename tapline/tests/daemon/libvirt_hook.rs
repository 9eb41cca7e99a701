//! Tests of `tapline libvirt-hook` with `taplined` itself. With libvirt: `testbed/libvirt/run`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::play::{err, out, run};
use crate::taplined::Daemon;

const WEB: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa0";
const OTHER: &str = "4dea22b3-1d52-d8f3-2516-782e98ab3fa1";

/// A daemon with a repository, and the socket of an unplugged disk in it.
fn daemon_with_disk() -> (Daemon, PathBuf) {
    let daemon = Daemon::start_with("");
    let disks = daemon.directory().join("disks");
    ok(&run(&daemon.socket(), &["sr", "create", "local", "--dir", disks.to_str().unwrap()]));
    let socket = attach(&daemon, "web");
    ok(&run(&daemon.socket(), &["vbd", "unplug", "web"]));
    (daemon, socket)
}

#[track_caller]
fn ok(output: &Output) {
    assert!(output.status.success(), "{}", err(output));
}

/// Creates and plugs a disk; returns its socket.
fn attach(daemon: &Daemon, name: &str) -> PathBuf {
    ok(&run(&daemon.socket(), &["vdi", "attach", name, "--new", "16M"]));
    vbd(daemon, name)["socket"].as_str().unwrap().into()
}

fn vbd(daemon: &Daemon, name: &str) -> Value {
    serde_json::from_str(&out(&run(&daemon.socket(), &["vbd", "show", name, "--json"]))).unwrap()
}

fn state(daemon: &Daemon, name: &str) -> String {
    vbd(daemon, name)["state"].as_str().unwrap().to_owned()
}

/// Runs the hook for a step in the life of a domain with disks at these sockets.
fn hook(daemon: &Daemon, step: &str, domain: &str, sockets: &[&Path]) -> Output {
    let disks: String = sockets
        .iter()
        .map(|socket| format!("<disk type='vhostuser'><source type='unix' path='{}'/></disk>", socket.display()))
        .collect();
    let xml = format!("<domain><name>of-{domain}</name><uuid>{domain}</uuid><devices>{disks}</devices></domain>");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tapline"));
    command.arg("--socket").arg(daemon.socket()).args(["libvirt-hook", "web", step, "begin", "-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(xml.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.stdout.is_empty(), "libvirt would take it for XML: {output:?}");
    output
}

#[test]
fn a_start_plugs_and_a_stop_unplugs() {
    let (daemon, web) = daemon_with_disk();
    ok(&hook(&daemon, "prepare", WEB, &[&web]));
    assert_eq!(state(&daemon, "web"), "plugged");
    ok(&hook(&daemon, "started", WEB, &[&web]));
    let hot = attach(&daemon, "data");
    // The first disk was removed from the domain meanwhile, but is still claimed for it.
    ok(&hook(&daemon, "release", WEB, &[&hot]));
    assert_eq!((state(&daemon, "web"), state(&daemon, "data")), ("unplugged".to_owned(), "unplugged".to_owned()));
}

#[test]
fn a_disk_of_another_domain_is_refused_and_stays() {
    let (daemon, web) = daemon_with_disk();
    ok(&hook(&daemon, "prepare", WEB, &[&web]));
    let refused = hook(&daemon, "prepare", OTHER, &[&web]);
    assert!(!refused.status.success());
    assert!(err(&refused).contains(&format!("is in use by domain of-{WEB} ({WEB})")), "{}", err(&refused));
    ok(&hook(&daemon, "release", OTHER, &[&web]));
    assert_eq!(state(&daemon, "web"), "plugged");
    ok(&run(&daemon.socket(), &["vbd", "unplug", "web"]));
    // A claim on an unplugged disk is void.
    ok(&hook(&daemon, "prepare", OTHER, &[&web]));
}

#[test]
fn a_start_plugs_all_disks_or_none() {
    let (daemon, web) = daemon_with_disk();
    let gone = web.to_str().unwrap().replace(vbd(&daemon, "web")["uuid"].as_str().unwrap(), WEB);
    for step in ["prepare", "migrate"] {
        let refused = hook(&daemon, step, WEB, &[&web, Path::new(&gone)]);
        assert!(!refused.status.success() && err(&refused).contains("this host has no VBD"), "{}", err(&refused));
        assert_eq!(state(&daemon, "web"), "unplugged");
    }
    let nbd = web.with_file_name("nbd.sock");
    let refused = hook(&daemon, "prepare", WEB, &[&nbd]);
    assert!(err(&refused).contains("but the socket of VBD"), "{}", err(&refused));
    assert_eq!(state(&daemon, "web"), "unplugged");
}

#[test]
fn disks_of_domains_running_before_the_hook_are_adopted() {
    let (daemon, _) = daemon_with_disk();
    let data = attach(&daemon, "data");
    ok(&hook(&daemon, "reconnect", WEB, &[&data]));
    assert!(!hook(&daemon, "prepare", OTHER, &[&data]).status.success());
    ok(&hook(&daemon, "release", WEB, &[&data]));
    assert_eq!(state(&daemon, "data"), "unplugged");
}

#[test]
fn running_domains_and_those_without_our_disks_need_no_daemon() {
    let (mut daemon, web) = daemon_with_disk();
    daemon.stop();
    ok(&hook(&daemon, "prepare", OTHER, &[Path::new("/run/spdk/vhost.0")]));
    // A failure would kill the domain.
    ok(&hook(&daemon, "reconnect", WEB, &[&web]));
    ok(&hook(&daemon, "stopped", WEB, &[&web]));
    let refused = hook(&daemon, "prepare", WEB, &[&web]);
    assert!(!refused.status.success() && err(&refused).contains("taplined"), "{}", err(&refused));
}
