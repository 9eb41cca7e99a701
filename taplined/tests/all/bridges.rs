//! Network cards of VMs in a bridge of the host: their addresses, and their tap interfaces while machines run.
//!
//! Each test creates the bridge in its own network namespace. The firmware of its machines does not use the network.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};

use crate::harness;
use crate::harness::disks::nothing_leaked;
use crate::harness::{ABORT_AT, Taplined, wait_until};
use crate::vm::{begin, power, shut_down, start};

/// A network namespace with a bridge `br0`, entered by this thread and the programs that it starts.
struct Network {
    name: String,
}

impl Network {
    fn new(name: &str) -> Option<Network> {
        let network = Network { name: format!("taplined-{name}-{}", std::process::id()) };
        if !rustix::process::geteuid().is_root() || !run(&["netns", "add", &network.name]).0 {
            harness::not_run("machines in a bridge: that needs root, iproute2 and network name spaces");
            return None;
        }
        let space = File::open(format!("/run/netns/{}", network.name)).unwrap();
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        assert!(run(&["link", "add", "br0", "type", "bridge"]).0);
        assert!(run(&["link", "set", "br0", "mtu", "9000", "up"]).0);
        Some(network)
    }

    /// A namespace in which machines can run whose QEMU has its own user: udev opens the needed devices to all users.
    fn for_machines(name: &str) -> Option<Network> {
        let tun = "/dev/net/tun";
        if !std::fs::metadata(tun).is_ok_and(|tun| tun.permissions().mode() & 0o006 == 0o006) {
            harness::not_run(&format!("machines in a bridge: that needs {tun}, open to all users as udev makes it"));
            return None;
        }
        Network::new(name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        run(&["netns", "del", &self.name]);
    }
}

fn run(words: &[&str]) -> (bool, String) {
    let Ok(output) = Command::new("ip").args(words).output() else { return (false, String::new()) };
    (output.status.success(), String::from_utf8(output.stdout).unwrap())
}

/// The tap interfaces of this namespace.
fn taps() -> Vec<Value> {
    let (done, shown) = run(&["-json", "-details", "link", "show", "type", "tun"]);
    assert!(done);
    if shown.trim().is_empty() { Vec::new() } else { serde_json::from_str(&shown).unwrap() }
}

/// Requests a VM with this card and an invalid kernel; returns the response.
fn try_machine(daemon: &Taplined, name: &str, nic: &str) -> (u16, Value) {
    let kernel = daemon.room().join("kernel");
    std::fs::write(&kernel, vec![7; 1 << 20]).unwrap();
    let (boot, platform) = (json!({ "from": "kernel", "kernel": kernel }), json!({ "nic": nic }));
    let asked =
        json!({ "name": name, "driver": "qemu", "memory": 64 << 20, "vcpus": 1, "boot": boot, "platform": platform });
    daemon.post("/vms", asked)
}

#[track_caller]
fn machine(daemon: &Taplined, name: &str, nic: &str) -> String {
    let (status, vm) = try_machine(daemon, name, nic);
    assert_eq!(status, 201, "{vm}");
    format!("/vms/{}", vm["uuid"].as_str().unwrap())
}

#[track_caller]
fn nic(daemon: &Taplined, vm: &str) -> String {
    daemon.get(vm).1["platform"]["nic"].as_str().unwrap().to_owned()
}

#[test]
fn a_running_machine_has_a_tap_interface_in_the_bridge_of_its_card() {
    let Some(_network) = Network::for_machines("runs") else { return };
    let Some((mut daemon, _)) = begin("", &[]) else { return };
    let vm = machine(&daemon, "web", "bridge:br0");
    let card = nic(&daemon, &vm);
    let mac = card.strip_prefix("bridge:br0/52:54:00:").unwrap_or_else(|| panic!("{card}")).to_owned();
    let running = start(&daemon, &vm);
    let (found, words) = (taps(), std::fs::read_to_string(format!("/proc/{}/cmdline", running["pid"])).unwrap());
    assert!(words.contains(&format!("mac=52:54:00:{mac}")), "{words}");
    assert_eq!(found.len(), 1, "{found:?}");
    let tap = &found[0];
    assert_eq!((&tap["master"], &tap["mtu"]), (&json!("br0"), &json!(9000)), "{tap}");
    assert_eq!(tap["address"], format!("fe:54:00:{mac}"));
    assert_eq!(tap["ifalias"], format!("tapline {}", vm.trim_start_matches("/vms/")));
    // QEMU has opened it.
    assert!(tap["flags"].as_array().unwrap().contains(&json!("LOWER_UP")), "{tap}");
    daemon.restart();
    assert_eq!((power(&daemon, &vm), taps().len()), ("running".into(), 1));
    shut_down(&daemon, &vm, json!({ "force": true }));
    assert!(taps().is_empty(), "{:?}", taps());
    // The address stays.
    assert_eq!(nic(&daemon, &vm), card);
    assert_eq!(daemon.patch(&vm, json!({ "platform": { "nic": "bridge:br1" } })).0, 200);
    assert_eq!(nic(&daemon, &vm), card.replace("br0", "br1"));
    nothing_leaked(&daemon);
}

#[test]
fn the_tap_interface_goes_when_the_machine_or_the_daemon_is_killed() {
    let Some(_network) = Network::for_machines("ends") else { return };
    let Some((mut daemon, _)) = begin("", &[]) else { return };
    let vm = machine(&daemon, "web", "bridge:br0");
    crate::harness::kill(&start(&daemon, &vm)["pid"]);
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(taps().is_empty(), "{:?}", taps());
    // While there is no daemon.
    let running = start(&daemon, &vm);
    daemon.kill();
    crate::harness::kill(&running["pid"]);
    assert_eq!(taps().len(), 1);
    daemon.restart();
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(taps().is_empty(), "{:?}", taps());
    // Together with the daemon, before the running machine is recorded.
    daemon.restart_with(&[(ABORT_AT, "vm-start:start:after")]);
    daemon.post_and_die(&format!("{vm}/start"), json!({}));
    assert_eq!(taps().len(), 1);
    daemon.restart();
    wait_until("it is halted", || power(&daemon, &vm) == "halted");
    assert!(taps().is_empty(), "{:?}", taps());
    nothing_leaked(&daemon);
}

#[test]
fn a_daemon_removes_the_stale_tap_interfaces_of_its_own_and_no_others() {
    let Some(_network) = Network::for_machines("stale") else { return };
    let Some((mut daemon, _)) = begin("", &[]) else { return };
    let vm = machine(&daemon, "web", "bridge:br0");
    start(&daemon, &vm);
    let (name, alias) = (taps()[0]["ifname"].clone(), taps()[0]["ifalias"].clone());
    let (name, alias) = (name.as_str().unwrap(), alias.as_str().unwrap());
    shut_down(&daemon, &vm, json!({ "force": true }));
    // The leftover of a daemon killed before it set an alias, and an interface of another daemon.
    for tap in [name, "other"] {
        assert!(run(&["tuntap", "add", "dev", tap, "mode", "tap"]).0);
    }
    assert!(run(&["link", "set", "dev", "other", "alias", alias]).0);
    daemon.restart();
    let left: Vec<Value> = taps().iter().map(|tap| tap["ifname"].clone()).collect();
    assert_eq!(left, ["other"]);
    assert!(daemon.log().contains("removed the tap interface of a machine that has ended"), "{}", daemon.log());
    // An interface in the way of a start is recreated.
    assert!(run(&["tuntap", "add", "dev", name, "mode", "tap", "user", "1"]).0);
    start(&daemon, &vm);
    shut_down(&daemon, &vm, json!({ "force": true }));
    nothing_leaked(&daemon);
}

#[test]
fn addresses_are_unique_and_a_clone_gets_another_one() {
    let Some((daemon, _)) = begin("", &[]) else { return };
    let mine = "bridge:br0/52:54:00:00:00:01";
    let vm = machine(&daemon, "web", mine);
    let (status, taken) = try_machine(&daemon, "db", mine);
    assert_eq!((status, &taken["code"], &taken["field"]), (409, &json!("exists"), &json!("platform.nic")), "{taken}");
    assert!(taken["detail"].as_str().unwrap().contains("VM 'web'"), "{taken}");
    let other = machine(&daemon, "db", "bridge:br0");
    assert_ne!(nic(&daemon, &other), mine);
    assert_eq!(daemon.patch(&other, json!({ "platform": { "nic": mine } })).1["code"], "exists");
    assert_eq!(daemon.patch(&vm, json!({ "platform": { "nic": mine } })).0, 200);
    let made = daemon.done(daemon.post(&format!("{vm}/clone"), json!({ "name": "second" })));
    let cloned = nic(&daemon, &format!("/vms/{}", made["uuid"].as_str().unwrap()));
    assert!(cloned.starts_with("bridge:br0/52:54:00:") && cloned != mine && made.get("note").is_none(), "{cloned}");
    // A user's own tap interface is not shared.
    let third = machine(&daemon, "third", "tap:tap0/52:54:00:00:00:03");
    let made = daemon.done(daemon.post(&format!("{third}/clone"), json!({ "name": "fourth" })));
    assert!(made["note"].as_str().unwrap().contains("nic=tap:tap0/"), "{made}");
    assert!(daemon.get(&format!("/vms/{}", made["uuid"].as_str().unwrap())).1["platform"].get("nic").is_none());
}

#[test]
fn a_bridge_that_is_not_there_is_refused_at_the_start_with_advice() {
    let Some(_network) = Network::new("none") else { return };
    let Some((daemon, _)) = begin("", &[]) else { return };
    let missing = machine(&daemon, "web", "bridge:br7");
    let refused = |vm: &str| daemon.post(&format!("{vm}/start"), json!({})).1;
    let problem = refused(&missing);
    assert_eq!((&problem["code"], &problem["field"]), (&json!("state"), &json!("platform.nic")), "{problem}");
    assert!(problem["advice"].as_str().unwrap().contains("ip link add br7 type bridge"), "{problem}");
    let none = refused(&machine(&daemon, "db", "bridge:lo"));
    assert!(none["detail"].as_str().unwrap().contains("not a bridge"), "{none}");
}

#[test]
fn a_daemon_without_the_right_says_which_it_needs() {
    let Some(_network) = Network::new("right") else { return };
    let Some((mut daemon, _)) = begin("", &[]) else { return };
    let vm = machine(&daemon, "web", "bridge:br0");
    daemon.restart_through(&["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin", "--"]);
    let problem = daemon.failed(daemon.post(&format!("{vm}/start"), json!({})));
    assert!(problem["advice"].as_str().unwrap().contains("CAP_NET_ADMIN"), "{problem}");
    assert!(taps().is_empty());
    nothing_leaked(&daemon);
}
