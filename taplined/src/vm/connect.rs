//! The configuration to paste for a machine that is managed elsewhere, to connect it to one of our VBDs.

use std::path::Path;

use ::vm::paste::{self, Monitor, Properties, Served, Unspeakable};
use ::vm::xen::vdev::Vdev;
use api::{Code, LogicalBlockSize, Mode, Problem, Transport, VbdState};
use serde::Deserialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::daemon::Daemon;

/// The program that reads the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reader {
    /// Arguments of QEMU before 10.2.
    Qemu,
    /// Arguments of QEMU 9.2 and later, which finds a disk again sooner when its process was started again.
    #[serde(rename = "qemu-9.2")]
    Qemu92,
    /// Elements of libvirt's domain XML.
    Libvirt,
    /// The disk's element of it alone, for `virsh attach-device`.
    LibvirtDevice,
    /// Arguments of Cloud Hypervisor.
    CloudHypervisor,
    /// A line of xl's configuration.
    Xl,
}

/// The text for a VBD.
pub async fn connect(daemon: &Daemon, vbd: Uuid, reader: Reader) -> Result<String, Problem> {
    match reader {
        Reader::Qemu => served(daemon, vbd, Monitor::Qemu).await,
        Reader::Qemu92 => served(daemon, vbd, Monitor::Qemu92).await,
        Reader::Libvirt => served(daemon, vbd, Monitor::Libvirt).await,
        Reader::LibvirtDevice => served(daemon, vbd, Monitor::LibvirtDevice).await,
        Reader::CloudHypervisor => served(daemon, vbd, Monitor::CloudHypervisor).await,
        Reader::Xl => by_xl(daemon, vbd).await,
    }
}

/// For a monitor that connects to the served disk.
async fn served(daemon: &Daemon, vbd: Uuid, monitor: Monitor) -> Result<String, Problem> {
    let found = daemon.catalogue.read(move |view| {
        let vbd = view.vbd(vbd)?;
        let block = view.vdi(vbd.vdi)?.logical_block_size;
        Ok((vbd, block))
    });
    let (vbd, block) = found.await?;
    let (VbdState::Plugged | VbdState::Restarting, Some(socket)) = (vbd.state, &vbd.socket) else {
        let what = format!("VBD {} is not plugged, so it has no socket to connect to", vbd.uuid);
        return Err(Problem::new(Code::State, what).advise("plug it first"));
    };
    let at: &Path = socket.as_path();
    let served = match vbd.transport {
        Transport::Nbd => Served::NbdUnix(at),
        Transport::VhostUser => Served::VhostUser(at, vbd.queues),
        Transport::Blkif => {
            let what = format!("VBD {} is served to a Xen guest by the daemon itself", vbd.uuid);
            return Err(Problem::new(Code::Unsupported, what).advise("no configuration is needed"));
        }
    };
    let disk = Properties { read_only: vbd.mode == Mode::ReadOnly, block: block.unwrap_or_default().into() };
    paste::text(monitor, served, disk).map_err(|error| unspeakable(&error))
}

/// For xl, whose block script serves the image itself, so the daemon must not.
async fn by_xl(daemon: &Daemon, vbd: Uuid) -> Result<String, Problem> {
    let found = daemon.catalogue.read(move |view| {
        let vbd = view.vbd(vbd)?;
        let (vdi, chain) = (view.vdi(vbd.vdi)?, view.chain(vbd.vdi)?);
        Ok((vbd, vdi, chain))
    });
    let (vbd, vdi, chain) = found.await?;
    if vbd.state != VbdState::Unplugged {
        let what = format!("VBD {} is plugged, but with xl the image is served by xl's own disk process", vbd.uuid);
        return Err(Problem::new(Code::State, what).advise("unplug it first"));
    }
    if vdi.logical_block_size == Some(LogicalBlockSize::Large) {
        let what = format!("VDI {} has sectors of 4096 bytes, which xl's configuration cannot say", vdi.uuid);
        let advice = "have the daemon serve it to the guest: tapline vdi attach, to a VM whose driver is xen";
        return Err(Problem::new(Code::Unsupported, what).advise(advice));
    }
    let directory = daemon.srs.directory(vdi.sr).await?;
    let layers = chain.iter().map(|image| format!("{}:{}", image.format, image.path(directory.path()).display()));
    let layers: Vec<String> = layers.collect();
    let layers: Vec<&str> = layers.iter().map(String::as_str).collect();
    paste::xl(&layers, &Vdev::of_position(vbd.position).to_string(), vbd.mode == Mode::ReadOnly)
        .map_err(|error| unspeakable(&error))
}

fn unspeakable(error: &Unspeakable) -> Problem {
    let problem = match error {
        Unspeakable::Way { monitor, served, .. } => {
            let what = format!("{monitor} cannot use a disk served over {served}");
            let advice =
                "unplug this VBD and create another of the same disk: tapline vbd create --transport vhost-user";
            Problem::new(Code::Unsupported, what).advise(advice)
        }
        other => Problem::new(Code::Unsupported, other.to_string()),
    };
    problem.field("for")
}
