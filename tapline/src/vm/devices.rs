//! Options for a guest's devices. Each is a platform key of the API, spelled as options.

use std::collections::BTreeMap;

use api::Problem;

use crate::session::Session;
use crate::word::{self, HostPath};

/// The devices; none is there unless it is asked for.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Devices")]
pub struct Devices {
    /// A DVD drive with this ISO image
    #[arg(long, value_name = "FILE", value_parser = word::path)]
    cdrom: Option<HostPath>,
    /// A network card: 'user' behind QEMU, or 'tap:INTERFACE/XX:XX:XX:XX:XX:XX' at a tap interface, with its address
    #[arg(long, value_name = "NETWORK")]
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

impl Devices {
    /// The platform keys.
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
