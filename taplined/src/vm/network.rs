//! The network card of a VM in a bridge of the host: its hardware address, and the tap interface between QEMU and the
//! bridge, which exists while the machine runs.
//!
//! 1. The interface is created for the user that QEMU runs as, given the alias `tapline VM`, and added to the bridge.
//!    *If killed in between:* its name is derived from its VM, and the next daemon removes it.
//! 2. QEMU opens it. *If killed:* the machine keeps it.
//! 3. The machine ends, and it is removed. *If killed before:* the next daemon removes it ([`sweep`]).
//!
//! All of this is done by ip(8), because netlink and ioctls would need unsafe code. Invariant: an interface that a
//! machine has open is not removed, whatever the catalogue has, because the kernel refuses that (`ip tuntap del`);
//! and neither is one that was not created here.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ::vm::qemu::account::Account;
use ::vm::qemu::platform::{Mac, Nic};
use api::{Code, Problem, Vm};
use ring::digest::{SHA256, digest};
use serde::Deserialize;
use uuid::Uuid;

use crate::config::Config;

/// The prefix of addresses that is customary for QEMU's guests; its first byte marks them as locally administered.
const PREFIX: [u8; 3] = [0x52, 0x54, 0x00];

/// The first byte of the interface's own address, which otherwise equals the guest's. A bridge without a configured
/// address takes the lowest one of its ports, which must not change with each machine.
const HIGHEST: u8 = 0xfe;

/// The output of ip(8) about a missing interface.
const NONE: &str = "does not exist";

/// The output of ip(8) about an interface that a program has open.
const BUSY: &str = "busy";

/// Time for a killed QEMU to exit.
const TO_CLOSE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(50);

/// The first word of an alias.
const OURS: &str = "tapline";

/// The field of the API.
const FIELD: &str = "platform.nic";

/// Gives the network card of a VM an address if it is in a bridge and has none: that of the VM in the catalogue, or a
/// new one. An address of another VM is refused.
pub fn settle_mac(view: &repo::View<'_>, vm: Uuid, platform: &mut BTreeMap<String, String>) -> Result<(), Problem> {
    let Some(Ok(Nic::Bridge { bridge, mac })) = platform.get("nic").map(|nic| Nic::parse(nic)) else { return Ok(()) };
    let vms = view.vms()?;
    let mac_of = |other: &Vm| mac_of(other.platform.get("nic")?);
    let taken = |mac: Mac| vms.iter().find(|other| other.uuid != vm && mac_of(other) == Some(mac));
    let mac = match mac {
        Some(mac) => match taken(mac) {
            None => mac,
            Some(other) => {
                let what = format!("VM '{}' ({}) has the hardware address {mac} already", other.name, other.uuid);
                let problem = Problem::new(Code::Exists, what).field(FIELD);
                return Err(problem.advise("choose another one, or leave it out"));
            }
        },
        None => {
            let had = vms.iter().find(|own| own.uuid == vm).and_then(mac_of);
            let random = std::iter::repeat_with(random).find(|mac| taken(*mac).is_none());
            had.or(random).unwrap_or_else(self::random)
        }
    };
    platform.insert("nic".into(), Nic::Bridge { bridge, mac: Some(mac) }.to_string());
    Ok(())
}

/// The hardware address of a card that is visible to others in the network; cards behind QEMU's NAT are not.
fn mac_of(nic: &str) -> Option<Mac> {
    match Nic::parse(nic) {
        Ok(Nic::Bridge { mac, .. }) => mac,
        Ok(Nic::Tap { mac, .. }) => Some(mac),
        _ => None,
    }
}

fn random() -> Mac {
    let [a, b, c, ..] = Uuid::new_v4().into_bytes();
    let [x, y, z] = PREFIX;
    Mac([x, y, z, a, b, c])
}

/// The card without its address, for another VM; `None` if it cannot be copied.
pub fn without_mac(nic: &str) -> Option<String> {
    match Nic::parse(nic) {
        Ok(Nic::Bridge { bridge, .. }) => Some(Nic::Bridge { bridge, mac: None }.to_string()),
        Ok(Nic::Tap { .. }) => None,
        _ => Some(nic.to_owned()),
    }
}

/// A network card in a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bridged {
    vm: Uuid,
    bridge: String,
    mac: Mac,
    /// The name of the tap interface.
    tap: String,
}

impl Bridged {
    /// The card of a VM, if it is in a bridge. Each one in the catalogue has an address.
    pub fn of(config: &Config, vm: &Vm) -> Option<Bridged> {
        let Ok(Nic::Bridge { bridge, mac: Some(mac) }) = Nic::parse(vm.platform.get("nic")?) else { return None };
        Some(Bridged { vm: vm.uuid, bridge, mac, tap: tap_of(&config.run_directory, vm.uuid) })
    }

    /// The card in the form for QEMU.
    pub fn nic(&self) -> Nic {
        Nic::Tap { name: self.tap.clone(), mac: self.mac }
    }

    /// Checks that the bridge exists; returns its MTU.
    pub fn check_bridge(&self) -> Result<u32, Problem> {
        let bridge = &self.bridge;
        let refused = |why: &str| {
            let what = format!("cannot connect the network card of VM {} to the bridge {bridge}: {why}", self.vm);
            let make = format!("ip link add {bridge} type bridge && ip link set {bridge} up");
            let advice = format!(
                "create it on the host ({make}), or choose another one: tapline vm set {} --nic bridge=NAME",
                self.vm
            );
            Problem::new(Code::State, what).field(FIELD).advise(advice)
        };
        let shown = ip(&["-json", "-details", "link", "show", "dev", bridge]).map_err(|failure| match failure {
            Failure::Said(said) if said.contains(NONE) => refused("there is no interface of that name"),
            failure => failure.problem(format!("look at the bridge {bridge}")),
        })?;
        let found = links(&shown)?.into_iter().next().ok_or_else(|| refused("there is no interface of that name"))?;
        match found.info.kind.as_deref() {
            Some("bridge") => Ok(found.mtu),
            _ => Err(refused("it is not a bridge of Linux")),
        }
    }

    /// Creates the tap interface, in the bridge, for a QEMU that runs as this user.
    pub fn connect(&self, account: Option<&Account>) -> Result<(), Problem> {
        // A port with a lower MTU would reduce the bridge's.
        let mtu = self.check_bridge()?.to_string();
        let Bridged { vm, bridge, tap, .. } = self;
        // A leftover may belong to another user.
        remove(tap)?;
        let tried = || format!("make the tap interface {tap} for VM {vm}");
        let user = account.map_or(rustix::process::geteuid().as_raw(), |account| account.uid).to_string();
        let made = ip(&["tuntap", "add", "dev", tap, "mode", "tap", "user", &user]);
        made.map_err(|failure| failure.problem(tried()))?;
        let Mac([_, rest @ ..]) = self.mac;
        let [a, b, c, d, e] = rest;
        let (alias, address) = (format!("{OURS} {vm}"), Mac([HIGHEST, a, b, c, d, e]).to_string());
        // The host itself must not be reachable from the guest's network through this interface.
        let words = ["alias", &alias, "address", &address, "mtu", &mtu, "addrgenmode", "none", "master", bridge, "up"];
        let set = ip(&[&["link", "set", "dev", tap], &words[..]].concat());
        set.map_err(|failure| failure.problem(format!("put the tap interface {tap} into the bridge {bridge}")))
            .map(drop)
    }

    /// Removes the tap interface, if it exists.
    pub fn disconnect(&self) -> Result<(), Problem> {
        remove(&self.tap)
    }
}

/// The name of the tap interface of a VM: different for each daemon of the host, and of the maximum length.
fn tap_of(run_directory: &Path, vm: Uuid) -> String {
    let hash = digest(&SHA256, format!("{} {vm}", run_directory.display()).as_bytes());
    let digits: String = hash.as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    format!("tl-{digits}")
}

/// Removes a tap interface, unless a program has it open. Not an error if it does not exist.
fn remove(tap: &str) -> Result<(), Problem> {
    // A daemon without the permission to remove it cannot have created one.
    if matches!(ip(&["link", "show", "dev", tap]), Err(Failure::Said(said)) if said.contains(NONE)) {
        return Ok(());
    }
    let deadline = Instant::now() + TO_CLOSE;
    let removed = loop {
        match ip(&["tuntap", "del", "dev", tap, "mode", "tap"]) {
            Err(Failure::Said(said)) if said.contains(BUSY) && Instant::now() < deadline => thread::sleep(POLL),
            removed => break removed,
        }
    };
    removed.map(drop).map_err(|failure| failure.problem(format!("remove the tap interface {tap}")))
}

/// Removes the interfaces of this daemon's machines, except those of the VMs in `run`.
pub fn sweep(config: &Config, known: &BTreeSet<Uuid>, run: &BTreeSet<Uuid>) {
    let found = match ip(&["-json", "-details", "link", "show", "type", "tun"]) {
        Ok(shown) => links(&shown),
        // Without the program no interface can have been created.
        Err(Failure::Missing) => return,
        Err(failure) => Err(failure.problem("look for tap interfaces of earlier machines")),
    };
    let found = match found {
        Ok(found) => found,
        Err(problem) => return tracing::warn!("{problem}"),
    };
    for tap in stale(&config.run_directory, &found, known, run) {
        match remove(tap) {
            Ok(()) => tracing::warn!(tap, "removed the tap interface of a machine that has ended"),
            Err(problem) => tracing::warn!("{problem}"),
        }
    }
}

fn stale<'a>(
    run_directory: &Path,
    found: &'a [Link],
    known: &BTreeSet<Uuid>,
    run: &BTreeSet<Uuid>,
) -> BTreeSet<&'a str> {
    let by_name: BTreeMap<String, Uuid> = known.iter().map(|vm| (tap_of(run_directory, *vm), *vm)).collect();
    let is_stale = |link: &&Link| {
        let named = link.alias.as_deref().and_then(|alias| alias.strip_prefix(OURS)).map(str::trim);
        let aliased = named.and_then(|vm| Uuid::parse_str(vm).ok());
        // Another daemon of this host has the same alias on its own, which have other names.
        let aliased = aliased.filter(|vm| tap_of(run_directory, *vm) == link.name);
        aliased.or_else(|| by_name.get(&link.name).copied()).is_some_and(|vm| !run.contains(&vm))
    };
    found.iter().filter(is_stale).map(|link| link.name.as_str()).collect()
}

/// An interface in the output of ip(8).
#[derive(Clone, Debug, Deserialize)]
struct Link {
    #[serde(rename = "ifname")]
    name: String,
    mtu: u32,
    #[serde(rename = "ifalias")]
    alias: Option<String>,
    #[serde(rename = "linkinfo", default)]
    info: LinkInfo,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct LinkInfo {
    #[serde(rename = "info_kind")]
    kind: Option<String>,
}

fn links(shown: &str) -> Result<Vec<Link>, Problem> {
    // The output is empty if there is none.
    let shown = if shown.trim().is_empty() { "[]" } else { shown };
    serde_json::from_str(shown).map_err(|error| Problem::failed("read what ip(8) says of interfaces", error))
}

/// Why ip(8) failed.
enum Failure {
    Missing,
    NotStarted(io::Error),
    Said(String),
}

impl Failure {
    fn problem(self, tried: impl std::fmt::Display) -> Problem {
        match self {
            Failure::Missing => Problem::failed(tried, "the program ip is not installed").advise("install iproute2"),
            Failure::NotStarted(error) => Problem::failed(format_args!("{tried}: start ip"), error),
            Failure::Said(said) => {
                let advice = advice(&said);
                Problem { advice, ..Problem::failed(tried, said) }
            }
        }
    }
}

fn advice(said: &str) -> Option<String> {
    let what = if said.contains("not permitted") {
        "run taplined with the capability CAP_NET_ADMIN, as its unit does; or make a tap interface by hand and use \
         --nic tap:INTERFACE/ADDRESS"
    } else if said.contains("/dev/net/tun") || said.contains("No such") {
        "load the kernel module tun (modprobe tun)"
    } else if said.contains(BUSY) {
        "a program has it open: end that program"
    } else {
        return None;
    };
    Some(what.into())
}

fn ip(words: &[&str]) -> Result<String, Failure> {
    let output = Command::new("ip").args(words).output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Failure::Missing,
        _ => Failure::NotStarted(error),
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Failure::Said(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

#[cfg(test)]
mod test {
    use super::*;

    fn link(name: &str, alias: Option<&str>) -> Link {
        Link { name: name.into(), mtu: 1500, alias: alias.map(str::to_owned), info: LinkInfo::default() }
    }

    #[test]
    fn only_interfaces_of_ended_machines_of_this_daemon_are_stale() {
        let here = Path::new("/run/tapline");
        let [ended, runs, forgotten, half_made] = [(); 4].map(|()| Uuid::new_v4());
        let alias = |vm: Uuid| format!("tapline {vm}");
        let taps = [ended, runs, forgotten, half_made].map(|vm| tap_of(here, vm));
        assert!(taps.iter().all(|tap| tap.len() == 15), "{taps:?}");
        let elsewhere = tap_of(Path::new("/run/other"), ended);
        let found = [
            link(&taps[0], Some(&alias(ended))),
            link(&taps[1], Some(&alias(runs))),
            link(&taps[2], Some(&alias(forgotten))),
            link(&taps[3], None),
            link(&elsewhere, Some(&alias(ended))),
            link("tap0", Some("tapline")),
            link("tl-0123456789ab", Some(&alias(ended))),
            link("vnet0", None),
        ];
        let known = BTreeSet::from([ended, runs, half_made]);
        let expected = BTreeSet::from([taps[0].as_str(), &taps[2], &taps[3]]);
        assert_eq!(stale(here, &found, &known, &BTreeSet::from([runs])), expected);
    }

    #[test]
    fn output_of_ip_is_parsed_and_its_errors_have_advice() {
        let shown = r#"[{"ifname":"br0","mtu":9000,"flags":["UP"],"linkinfo":{"info_kind":"bridge"}}]"#;
        let found = links(shown).unwrap();
        assert_eq!((found[0].mtu, found[0].info.kind.as_deref()), (9000, Some("bridge")));
        assert!(links("").unwrap().is_empty() && links("no").is_err());
        let problem = Failure::Said("ioctl(TUNSETIFF): Operation not permitted".into()).problem("make x");
        assert!(problem.detail.contains("TUNSETIFF") && problem.advice.unwrap().contains("CAP_NET_ADMIN"));
        let problem = Failure::Missing.problem("make x");
        assert_eq!(problem.advice.as_deref(), Some("install iproute2"));
    }

    #[test]
    fn a_clone_gets_a_card_without_the_address_of_the_original() {
        assert_eq!(without_mac("bridge:br0/52:54:00:00:00:01").as_deref(), Some("bridge:br0"));
        assert_eq!(without_mac("user").as_deref(), Some("user"));
        assert_eq!(without_mac("tap:tap0/52:54:00:00:00:01"), None);
    }
}
