//! A machine's `platform` keys, as known to XenServer's users: optional emulated devices, all off by default.
//!
//! It knows nothing about QEMU's syntax. Invariant: an unknown key, an invalid value and contradicting keys are
//! rejected by name, with the allowed values.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The emulated devices. Each one wakes up an idle guest: docs/decisions/0010-qemu-hardware.md.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Platform {
    /// A USB controller.
    pub usb: bool,
    /// A tablet at it, by which the pointer of a remote screen is where the user's is.
    pub usb_tablet: bool,
    /// The parallel port.
    pub parallel: Port,
    /// The serial port.
    pub hvm_serial: Port,
    /// An IDE DVD drive.
    pub dvd: Dvd,
    /// The graphics card.
    pub vga: Vga,
    /// A VNC server at this Unix socket, for the graphics card.
    pub vnc: Option<PathBuf>,
    /// The high precision event timer.
    pub hpet: bool,
    /// The network card.
    pub nic: Nic,
}

/// Where the output of a port goes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Port {
    /// There is no port.
    #[default]
    None,
    /// Nowhere.
    Null,
    /// To a new pseudo-terminal.
    Pty,
    /// To a file.
    File(PathBuf),
    /// To who connects to this Unix socket.
    Unix(PathBuf),
}

/// The medium in the DVD drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dvd {
    /// There is no drive.
    #[default]
    None,
    /// Nothing.
    Empty,
    /// An ISO image.
    File(PathBuf),
}

/// Graphics cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vga {
    /// None.
    #[default]
    None,
    /// The standard one, for everything.
    Std,
    /// Cirrus Logic's, for systems of the nineties.
    Cirrus,
    /// virtio's.
    Virtio,
}

/// How a machine is in a network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nic {
    /// Not at all.
    #[default]
    None,
    /// Behind QEMU, which responds in place of the guest.
    User {
        /// The card's address, if it is not QEMU's default.
        mac: Option<Mac>,
    },
    /// By a tap interface that is there.
    Tap {
        /// The interface.
        name: String,
        /// The card's address.
        mac: Mac,
    },
    /// In a bridge of the host. QEMU is given the tap interface that was put into it.
    Bridge {
        /// The bridge.
        bridge: String,
        /// The card's address, if it has one yet.
        mac: Option<Mac>,
    },
}

/// The hardware address of a network card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mac([a, b, c, d, e, g]) = self;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// Why a key is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum PlatformError {
    /// There is none of this name.
    #[error("platform:{key} is unknown; known keys: {}", KEYS.join(", "))]
    Unknown {
        /// The key.
        key: String,
    },
    /// Its value means nothing.
    #[error("platform:{key}={value} is invalid; allowed: {allowed}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// The allowed values.
        allowed: &'static str,
    },
    /// The key requires another key.
    #[error("platform:{key} needs platform:{needs}")]
    Alone {
        /// The key.
        key: &'static str,
        /// The other, with its value.
        needs: &'static str,
    },
}

/// All keys, in the order in which they are listed.
pub const KEYS: [&str; 9] = ["usb", "usb_tablet", "parallel", "hvm_serial", "dvd", "vga", "vnc", "hpet", "nic"];

const BOOL: &str = "true, false";
const PARALLEL: &str = "none, null, file:PATH";
const SERIAL: &str = "none, null, pty, file:PATH, unix:PATH";
const DVD: &str = "none, empty, file:PATH";
const VGA: &str = "none, std, cirrus, virtio";
const VNC: &str = "none, private, unix:PATH";
const NIC: &str =
    "none, user[/ADDRESS], bridge:BRIDGE[/ADDRESS], tap:INTERFACE/ADDRESS; an address is XX:XX:XX:XX:XX:XX";

/// The longest name of an interface, from linux/if.h.
const INTERFACE_LEN_MAX: usize = 15;

impl Platform {
    /// The meaning of these keys together.
    pub fn parse<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, PlatformError> {
        let mut platform = Self::default();
        for (key, value) in pairs {
            platform.set(key, value)?;
        }
        platform.agree()?;
        Ok(platform)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), PlatformError> {
        match key {
            "usb" => self.usb = flag("usb", value)?,
            "usb_tablet" => self.usb_tablet = flag("usb_tablet", value)?,
            "hpet" => self.hpet = flag("hpet", value)?,
            "parallel" => self.parallel = port("parallel", value, PARALLEL)?,
            "hvm_serial" => self.hvm_serial = port("hvm_serial", value, SERIAL)?,
            "dvd" => self.dvd = dvd(value)?,
            "vga" => self.vga = vga(value)?,
            "vnc" => self.vnc = vnc(value)?,
            "nic" => self.nic = Nic::parse(value)?,
            _ => return Err(PlatformError::Unknown { key: key.to_owned() }),
        }
        Ok(())
    }

    /// Whether the keys go together.
    pub fn agree(&self) -> Result<(), PlatformError> {
        if self.usb_tablet && !self.usb {
            return Err(PlatformError::Alone { key: "usb_tablet=true", needs: "usb=true" });
        }
        if self.vnc.is_some() && self.vga == Vga::None {
            return Err(PlatformError::Alone { key: "vnc", needs: "vga=std" });
        }
        Ok(())
    }
}

fn bad(key: &'static str, value: &str, allowed: &'static str) -> PlatformError {
    PlatformError::Value { key, value: value.to_owned(), allowed }
}

fn flag(key: &'static str, value: &str) -> Result<bool, PlatformError> {
    match value {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad(key, value, BOOL)),
    }
}

/// The path after `prefix`, if it is absolute and normalized.
fn path(value: &str, prefix: &str) -> Option<PathBuf> {
    let path = value.strip_prefix(prefix)?;
    (path.starts_with('/') && !path.contains(char::is_control)).then(|| PathBuf::from(path))
}

fn port(key: &'static str, value: &str, allowed: &'static str) -> Result<Port, PlatformError> {
    let parsed = match value {
        "none" => Some(Port::None),
        "null" => Some(Port::Null),
        "pty" => Some(Port::Pty),
        _ => path(value, "file:").map(Port::File).or_else(|| path(value, "unix:").map(Port::Unix)),
    };
    match parsed {
        Some(Port::Pty | Port::Unix(_)) if key == "parallel" => Err(bad(key, value, allowed)),
        Some(port) => Ok(port),
        None => Err(bad(key, value, allowed)),
    }
}

fn dvd(value: &str) -> Result<Dvd, PlatformError> {
    match value {
        "none" => Ok(Dvd::None),
        "empty" => Ok(Dvd::Empty),
        _ => path(value, "file:").map(Dvd::File).ok_or_else(|| bad("dvd", value, DVD)),
    }
}

fn vga(value: &str) -> Result<Vga, PlatformError> {
    match value {
        "none" => Ok(Vga::None),
        "std" => Ok(Vga::Std),
        "cirrus" => Ok(Vga::Cirrus),
        "virtio" => Ok(Vga::Virtio),
        _ => Err(bad("vga", value, VGA)),
    }
}

fn vnc(value: &str) -> Result<Option<PathBuf>, PlatformError> {
    match value {
        "none" => Ok(None),
        _ => path(value, "unix:").map(Some).ok_or_else(|| bad("vnc", value, VNC)),
    }
}

impl Nic {
    /// The meaning of the key's value.
    pub fn parse(value: &str) -> Result<Nic, PlatformError> {
        let parsed = match value.split_once(':') {
            Some(("tap", rest)) => with_mac(rest).and_then(|(name, mac)| Some(Nic::Tap { name, mac: mac? })),
            Some(("bridge", rest)) => with_mac(rest).map(|(bridge, mac)| Nic::Bridge { bridge, mac }),
            _ if value == "none" => Some(Nic::None),
            _ if value == "user" => Some(Nic::User { mac: None }),
            _ => value.strip_prefix("user/").and_then(mac).map(|mac| Nic::User { mac: Some(mac) }),
        };
        parsed.ok_or_else(|| bad("nic", value, NIC))
    }
}

/// As the value of the key.
impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Nic::None => f.write_str("none"),
            Nic::User { mac: None } => f.write_str("user"),
            Nic::User { mac: Some(mac) } => write!(f, "user/{mac}"),
            Nic::Tap { name, mac } => write!(f, "tap:{name}/{mac}"),
            Nic::Bridge { bridge, mac: None } => write!(f, "bridge:{bridge}"),
            Nic::Bridge { bridge, mac: Some(mac) } => write!(f, "bridge:{bridge}/{mac}"),
        }
    }
}

/// `NAME[/ADDRESS]`, the name of an interface.
fn with_mac(text: &str) -> Option<(String, Option<Mac>)> {
    let (name, address) = text.split_once('/').map_or((text, None), |(name, address)| (name, Some(address)));
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    // A name of a program's own is not taken for an option of ip(8).
    let first = name.bytes().next().is_some_and(|byte| byte != b'-');
    if !first || name.len() > INTERFACE_LEN_MAX || !name.bytes().all(plain) {
        return None;
    }
    Some((name.to_owned(), address.map(|address| mac(address).ok_or(())).transpose().ok()?))
}

/// A hardware address of a single card, not of a group.
fn mac(text: &str) -> Option<Mac> {
    let bytes = text.split(':').map(|byte| (byte.len() == 2).then(|| u8::from_str_radix(byte, 16).ok())?);
    let mac: [u8; 6] = bytes.collect::<Option<Vec<u8>>>()?.try_into().ok()?;
    let of_a_group = mac.first().is_some_and(|first| first & 1 == 1);
    (!of_a_group).then_some(Mac(mac))
}

#[cfg(test)]
mod test {
    use super::*;

    fn refused(key: &str, value: &str) -> String {
        Platform::parse([(key, value)]).unwrap_err().to_string()
    }

    #[test]
    fn all_devices_are_off_by_default() {
        let quiet = Platform::parse([]).unwrap();
        assert_eq!(quiet, Platform::default());
        assert!(!quiet.usb && !quiet.usb_tablet && !quiet.hpet);
        assert_eq!((&quiet.parallel, &quiet.hvm_serial), (&Port::None, &Port::None));
        assert_eq!((quiet.dvd, quiet.vga, quiet.nic), (Dvd::None, Vga::None, Nic::None));
    }

    #[test]
    fn keys_are_taken_as_xenservers_users_write_them() {
        let pairs = [("usb", "true"), ("usb_tablet", "true"), ("parallel", "null"), ("hvm_serial", "file:/run/a.log")];
        let platform = Platform::parse(pairs).unwrap();
        assert!(platform.usb && platform.usb_tablet);
        assert_eq!(platform.parallel, Port::Null);
        assert_eq!(platform.hvm_serial, Port::File("/run/a.log".into()));
        let nic = Platform::parse([("nic", "tap:tap0/52:54:00:ab:cd:ef")]).unwrap().nic;
        assert_eq!(nic, Nic::Tap { name: "tap0".into(), mac: Mac([0x52, 0x54, 0, 0xab, 0xcd, 0xef]) });
    }

    #[test]
    fn a_network_card_is_printed_as_it_is_parsed() {
        let address = "52:54:00:ab:cd:0f";
        let plain = ["none", "user", "bridge:br0"].map(str::to_owned);
        let with_address = ["user", "bridge:br-lan.7", "tap:tap0"].map(|nic| format!("{nic}/{address}"));
        for text in plain.into_iter().chain(with_address) {
            assert_eq!(Nic::parse(&text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn unknown_keys_and_bad_values_are_refused_by_name_with_what_is_allowed() {
        let said = refused("viridian", "true");
        assert!(said.starts_with("platform:viridian is unknown; known keys: usb, usb_tablet, parallel"), "{said}");
        assert_eq!(refused("usb", "yes"), "platform:usb=yes is invalid; allowed: true, false");
        assert_eq!(refused("parallel", "pty"), "platform:parallel=pty is invalid; allowed: none, null, file:PATH");
        for (key, value) in [
            ("dvd", "file:relative.iso"),
            ("vnc", "unix:"),
            ("hvm_serial", "tcp:1"),
            ("vga", "qxl"),
            ("nic", "tap:tap0"),
            ("nic", "tap:a,script=x/52:54:00:ab:cd:ef"),
            ("nic", "tap:tap0/53:54:00:ab:cd:ef"),
            ("nic", "tap:tap0/52:54:00:ab:cd"),
            ("nic", "tap:interface-of-16ch/52:54:00:ab:cd:ef"),
            ("nic", "user/52:54:00:ab:cd"),
            ("nic", "bridge:"),
            ("nic", "bridge:-br0"),
            ("nic", "bridge:br0/"),
            ("nic", "bridge:br 0"),
            ("hpet", ""),
        ] {
            assert!(refused(key, value).contains("allowed: "), "{key}={value}");
        }
    }

    #[test]
    fn a_key_without_its_required_key_is_refused() {
        assert_eq!(refused("usb_tablet", "true"), "platform:usb_tablet=true needs platform:usb=true");
        assert_eq!(refused("vnc", "unix:/run/vnc"), "platform:vnc needs platform:vga=std");
    }

    #[test]
    fn every_listed_key_is_supported() {
        for key in KEYS {
            assert!(!matches!(Platform::parse([(key, "?")]), Err(PlatformError::Unknown { .. })), "{key}");
        }
    }
}
