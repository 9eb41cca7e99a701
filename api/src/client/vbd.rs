//! `/vbds`.

use std::fmt;

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{DiskLimits, DiskShare, Problem, Tag, Vbd, VbdCreate, VbdPatch, VbdUnplug, VbdUpgraded, Vbds};

const VBDS: &str = "vbds";

/// A machine monitor or manager that a disk can be connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connector {
    /// QEMU before 10.2, as command-line options.
    Qemu,
    /// QEMU 9.2 and later, as command-line options.
    Qemu92,
    /// libvirt, as domain XML.
    Libvirt,
    /// libvirt, as a device's XML for `virsh attach-device`.
    LibvirtDevice,
    /// Cloud Hypervisor, as command-line options.
    CloudHypervisor,
    /// xl, as a line of the domain's configuration.
    Xl,
}

impl fmt::Display for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Connector::Qemu => "qemu",
            Connector::Qemu92 => "qemu-9.2",
            Connector::Libvirt => "libvirt",
            Connector::LibvirtDevice => "libvirt-device",
            Connector::CloudHypervisor => "cloud-hypervisor",
            Connector::Xl => "xl",
        })
    }
}

impl Client {
    /// Lists all block devices, or those of a machine or a disk, and those whose UUID starts with `matching`.
    pub async fn vbds(&self, vm: Option<Uuid>, vdi: Option<Uuid>, matching: Option<&str>) -> Result<Vec<Vbd>, Problem> {
        self.vbds_tagged(vm, vdi, matching, &[]).await
    }

    /// The same of those that have all of these tags.
    pub async fn vbds_tagged(
        &self,
        vm: Option<Uuid>,
        vdi: Option<Uuid>,
        matching: Option<&str>,
        tags: &[Tag],
    ) -> Result<Vec<Vbd>, Problem> {
        let target = Target::new(VBDS).query("vm", vm).query("vdi", vdi).query("match", matching);
        self.get(&target.queries("tag", tags)).await
    }

    /// Gets a block device.
    pub async fn vbd(&self, uuid: Uuid) -> Result<Vbd, Problem> {
        self.get(&Target::object(VBDS, uuid)).await
    }

    /// Creates a block device, which is not plugged yet.
    pub async fn vbd_create(&self, asked: &VbdCreate) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::new(VBDS), asked).await
    }

    /// Changes a block device.
    pub async fn vbd_set(&self, uuid: Uuid, asked: &VbdPatch) -> Result<Vbd, Problem> {
        self.change(Method::PATCH, &Target::object(VBDS, uuid), asked).await
    }

    /// Limits the disk of a block device, at once if it is plugged.
    pub async fn vbd_limit(&self, uuid: Uuid, asked: &DiskLimits) -> Result<Vbd, Problem> {
        self.change(Method::POST, &Target::verb(VBDS, uuid, "limit"), asked).await
    }

    /// Sets the weight of the disk of a block device among those that share its storage.
    pub async fn vbd_share(&self, uuid: Uuid, asked: &DiskShare) -> Result<Vbd, Problem> {
        self.change(Method::POST, &Target::verb(VBDS, uuid, "share"), asked).await
    }

    /// Plugs a block device.
    pub async fn vbd_plug(&self, uuid: Uuid) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "plug"), &()).await
    }

    /// Unplugs a block device.
    pub async fn vbd_unplug(&self, uuid: Uuid, asked: &VbdUnplug) -> Result<Answer<Vbd>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "unplug"), asked).await
    }

    /// Replaces the process that serves a block device with the installed program.
    pub async fn vbd_upgrade(&self, uuid: Uuid) -> Result<Answer<VbdUpgraded>, Problem> {
        self.begin(Method::POST, &Target::verb(VBDS, uuid, "upgrade"), &()).await
    }

    /// Plugs several block devices; each reports its own failure.
    pub async fn vbds_plug(&self, asked: &Vbds) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("vbds/plug"), asked).await
    }

    /// Unplugs several block devices.
    pub async fn vbds_unplug(&self, asked: &Vbds) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::new("vbds/unplug"), asked).await
    }

    /// Removes an unplugged block device; its disk stays.
    pub async fn vbd_destroy(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::object(VBDS, uuid), &()).await
    }

    /// The configuration to paste where the machine is managed.
    pub async fn vbd_connect(&self, uuid: Uuid, connector: Connector) -> Result<String, Problem> {
        self.text(&Target::verb(VBDS, uuid, "connect").query("for", Some(connector))).await
    }
}
