//! Options for a guest's devices. Each sets a platform key of the API.

use std::collections::BTreeMap;

use api::Problem;

use crate::session::Session;
use crate::word::{self, HostPath};

/// Options of the devices; a guest has none by default.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Devices")]
pub struct Devices {
    /// A DVD drive with this ISO image
    #[arg(long, value_name = "FILE", value_parser = word::path)]
    cdrom: Option<HostPath>,
    /// A network card: bridge=NAME in a bridge of the host, user behind QEMU, tap=INTERFACE at a tap interface that is
    /// there, or none [default address in a bridge: a random one, which stays]
    #[arg(long, value_name = "bridge=NAME|user|tap=INTERFACE|none[,mac=ADDRESS]", value_parser = nic)]
    nic: Option<String>,
    /// A graphics card
    #[arg(long, value_name = "CARD", value_parser = ["std", "cirrus", "virtio"])]
    vga: Option<String>,
    /// A VNC server at this Unix socket, for the graphics card [card by default: std]
    #[arg(long, value_name = "SOCKET", value_parser = word::path)]
    vnc: Option<HostPath>,
    /// Where the serial port goes: none, pty, null, file:PATH or unix:PATH [default: to 'tapline vm console']
    #[arg(long, value_name = "TO")]
    serial: Option<String>,
    /// A USB tablet, by which the pointer of a remote screen is where the user's is
    #[arg(long)]
    tablet: bool,
}

/// Parses a network card into the value of the platform key; that value itself is accepted as well.
fn nic(word: &str) -> Result<String, String> {
    let (network, mac) = match word.split_once(",mac=") {
        Some((network, mac)) => (network, Some(mac)),
        None => (word, None),
    };
    let value = match (network.split_once('='), mac) {
        (None, None) if matches!(word, "none" | "user") || word.contains(':') => word.to_owned(),
        (None, _) if matches!(network, "bridge" | "tap") => {
            return Err(format!("which {network} is missing: use {network}=NAME"));
        }
        (None, _) if network.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') && network != "user" => {
            return Err(format!(
                "'{network}' is not a kind of network; for a bridge of that name use bridge={network}"
            ));
        }
        (Some((kind @ ("bridge" | "tap"), name)), None) if !name.contains(',') => format!("{kind}:{name}"),
        (Some((kind @ ("bridge" | "tap"), name)), Some(mac)) if !name.contains(',') => format!("{kind}:{name}/{mac}"),
        (None, Some(mac)) if network == "user" => format!("user/{mac}"),
        _ => return Err("use bridge=NAME, user, tap=INTERFACE or none; ',mac=ADDRESS' may follow".into()),
    };
    if value.starts_with("tap:") && !value.contains('/') {
        return Err("a tap interface needs the address of the card: tap=INTERFACE,mac=ADDRESS".into());
    }
    Ok(value)
}

impl Devices {
    /// The platform keys of the options.
    pub fn platform(self, session: &Session) -> Result<BTreeMap<String, String>, Problem> {
        let Devices { cdrom, nic, vga, vnc, serial, tablet } = self;
        let path = |kind: &str, path: Option<HostPath>| {
            path.map(|path| Ok::<_, Problem>(format!("{kind}:{}", session.path(path)?))).transpose()
        };
        let vga = vga.or_else(|| vnc.is_some().then(|| "std".to_owned()));
        let on = |on: bool| on.then(|| "true".to_owned());
        let keys = [
            ("dvd", path("file", cdrom)?),
            ("nic", nic),
            ("vga", vga),
            ("vnc", path("unix", vnc)?),
            ("hvm_serial", serial),
            ("usb", on(tablet)),
            ("usb_tablet", on(tablet)),
        ];
        Ok(keys.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_network_card_becomes_the_value_of_its_platform_key() {
        let mac = "52:54:00:00:00:01";
        for (word, expected) in [
            ("none".to_owned(), "none".to_owned()),
            ("user".into(), "user".into()),
            ("bridge=br0".into(), "bridge:br0".into()),
            (format!("bridge=br0,mac={mac}"), format!("bridge:br0/{mac}")),
            (format!("user,mac={mac}"), format!("user/{mac}")),
            (format!("tap=tap0,mac={mac}"), format!("tap:tap0/{mac}")),
            (format!("tap:tap0/{mac}"), format!("tap:tap0/{mac}")),
        ] {
            assert_eq!(nic(&word), Ok(expected), "{word}");
        }
        for wrong in ["br0", "br=br0", "bridge=br0,model=e1000", "none,mac=52:54:00:00:00:01", "tap=tap0"] {
            assert!(nic(wrong).is_err(), "{wrong}");
        }
    }
}
