//! `/vbds`.

use std::fmt;

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{Problem, Vbd, VbdCreate, VbdPatch, VbdUnplug, VbdUpgraded, Vbds};

const VBDS: &str = "vbds";

/// A machine monitor, or who manages one, that a disk can be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connector {
    /// The command line of QEMU before 10.2.
    Qemu,
    /// The command line of QEMU 9.2 and later.
    Qemu92,
    /// A domain of libvirt.
    Libvirt,
    /// Cloud Hypervisor's command line.
    CloudHypervisor,
    /// A domain of xl.
    Xl,
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Connector::Qemu => "qemu",
            Connector::Qemu92 => "qemu-9.2",
            Connector::Libvirt => "libvirt",
            Connector::CloudHypervisor => "cloud-hypervisor",
            Connector::Xl => "xl",
        })
    }
}

impl Client {
    /// The block devices: all, or those of a machine, of a disk, and those whose UUID begins with `matching`.
    pub async fn vbds(&self, vm: Option<Uuid>, vdi: Option<Uuid>, matching: Option<&str>) -> Result<Vec<Vbd>, Problem> {
        self.get(&Target::new(VBDS).query("vm", vm).query("vdi", vdi).query("match", matching)).await
    }

    /// A block device.
    pub async fn vbd(&self, uuid: Uuid) -> Result<Vbd, Problem> {
        self.get(&Target::object(VBDS, uuid)).await
    }

    /// Makes one, which is not plugged.
    pub async fn vbd_create(&self, asked: &VbdCreate) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::new(VBDS), asked).await
    }

    /// Changes one.
    pub async fn vbd_set(&self, uuid: Uuid, asked: &VbdPatch) -> Result<Vbd, Problem> {
        self.change(Method::PATCH, &Target::object(VBDS, uuid), asked).await
    }

    /// Serves it.
    pub async fn vbd_plug(&self, uuid: Uuid) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "plug"), &()).await
    }

    /// Serves it no more.
    pub async fn vbd_unplug(&self, uuid: Uuid, asked: &VbdUnplug) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "unplug"), asked).await
    }

    /// Has another process, of the program as it is installed now, serve it in the place of the present one.
    pub async fn vbd_upgrade(&self, uuid: Uuid) -> Result<Answer<VbdUpgraded>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "upgrade"), &()).await
    }

    /// Serves many; each that cannot be served says why itself.
    pub async fn vbds_plug(&self, asked: &Vbds) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("vbds/plug"), asked).await
    }

    /// Serves many no more.
    pub async fn vbds_unplug(&self, asked: &Vbds) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("vbds/unplug"), asked).await
    }

    /// Removes it, which is not plugged; its disk stays.
    pub async fn vbd_destroy(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::object(VBDS, uuid), &()).await
    }

    /// What to paste where the machine is managed.
    pub async fn vbd_connect(&self, uuid: Uuid, connector: Connector) -> Result<String, Problem> {
        self.text(&Target::verb(VBDS, uuid, "connect").query("for", Some(connector))).await
    }
}
