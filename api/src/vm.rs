//! VM: a virtual machine that the daemon starts itself.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, Autostart, Description, Name, Problem, Size};

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its identity.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// What runs it.
    pub driver: Driver,
    /// Its memory, in bytes.
    pub memory: u64,
    /// Its processors.
    pub vcpus: u32,
    /// What it boots; with the driver `xen` a kernel.
    pub boot: Boot,
    /// Hardware that is not there by default, by XenServer's names: `usb`, `parallel`, `hvm_serial`; with the driver `xen`: `type`, `tsc_mode`.
    pub platform: BTreeMap<String, String>,
    /// That it is started by itself when the host was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// Whether it runs.
    pub power: Power,
    /// The number of its process; while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Where it can be reached as the driver's users know it; while it runs: the socket of QMP, the domain of Xen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
    /// Why it does not run though it should, or how it ended last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When it was made.
    pub created: Timestamp,
}

/// What runs virtual machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// QEMU, started by the daemon and spoken to by QMP.
    Qemu,
    /// Xen, by xl and its store.
    Xen,
}

/// What a VM boots.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "from", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Boot {
    /// The first of its disks that is bootable.
    #[default]
    Disk,
    /// A kernel that lies on the host.
    Kernel {
        /// The kernel.
        kernel: AbsolutePath,
        /// Its first file system.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initrd: Option<AbsolutePath>,
        /// Its command line.
        #[serde(default)]
        cmdline: Description,
    },
}

/// Whether a VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Power {
    /// It does not.
    Halted,
    /// Its disks are plugged and it is started.
    Starting,
    /// It does.
    Running,
    /// It is held and can go on.
    Suspended,
    /// It was asked to end.
    Stopping,
}

/// Makes a VM, which does not run.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmCreate {
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// What runs it.
    pub driver: Driver,
    /// Its memory, in bytes: whole MiB.
    pub memory: Size,
    /// Its processors.
    #[schema(minimum = 1, maximum = 255)]
    pub vcpus: u8,
    /// What it boots.
    #[serde(default)]
    pub boot: Boot,
    /// Hardware that is not there by default.
    #[serde(default)]
    pub platform: BTreeMap<String, String>,
    /// That it is started by itself when the host was; not if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
}

/// Changes what is left out not at all; memory, processors, boot and platform only while it is halted.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Its memory, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    /// Its processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// What it boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// Hardware that is not there by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<BTreeMap<String, String>>,
    /// That it is started by itself when the host was; null: that it is not.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::autostart::change")]
    #[schema(value_type = Option<Autostart>)]
    pub autostart: Option<Option<Autostart>>,
}

/// Ends a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmShutdown {
    /// At once, without asking the guest.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take, in seconds; then it is ended with force. A day at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub timeout: Option<u32>,
}
