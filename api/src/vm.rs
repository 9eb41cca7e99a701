//! VM: a virtual machine that the daemon runs itself.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    AbsolutePath, Autostart, BackupSchedule, Description, Name, OtherConfig, Problem, Retention, Seed, Size, Tags,
    Transport,
};

/// The word of the header `Upgrade` (RFC 9110, 7.8) by which a connection becomes the console of a machine.
pub const CONSOLE_PROTOCOL: &str = "tapline-console";

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vm {
    /// Its identity.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// Words to find it by.
    pub tags: Tags,
    /// Strings that programs keep with it.
    pub other_config: OtherConfig,
    /// The driver that runs the VM.
    pub driver: Driver,
    /// Memory in bytes.
    pub memory: u64,
    /// Number of processors.
    pub vcpus: u32,
    /// Boot source; a kernel with the driver `xen`.
    pub boot: Boot,
    /// Optional hardware by XenServer's names: `usb`, `parallel`, `hvm_serial`; with the driver `xen`: `type`,
    /// `tsc_mode`.
    pub platform: BTreeMap<String, String>,
    /// Autostart when the host boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// The schedule by which snapshots of all its disks are taken, and how many are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention: Option<Retention>,
    /// Why there is no snapshot by the schedule since the last one that was due; absent when one has been taken again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_problem: Option<Problem>,
    /// The schedule by which it is backed up with all of its disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_schedule: Option<BackupSchedule>,
    /// When the last backup by this schedule was due; absent until one has been made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_backup: Option<Timestamp>,
    /// Why there is no backup by the schedule since the last one that was due; absent when one has been made again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_problem: Option<Problem>,
    /// Whether it has a cloud-init seed, whose texts are not shown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub seed: bool,
    /// The power state.
    pub power: Power,
    /// Its saved memory; present while it is suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended: Option<Suspended>,
    /// The pid of its process; present while it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The driver's own handle, present while it runs: the QMP socket or the Xen domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
    /// Why it is not running although it should be, or how it last ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When the VM was created.
    pub created: Timestamp,
}

/// The hardware of a VM without its disks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmHardware {
    /// The driver that runs the VM.
    pub driver: Driver,
    /// Memory in bytes.
    pub memory: u64,
    /// Number of processors.
    pub vcpus: u32,
    /// Boot source.
    pub boot: Boot,
    /// Optional hardware.
    pub platform: BTreeMap<String, String>,
}

impl Vm {
    /// A new VM with a random UUID, halted and without labels.
    pub fn halted(name: Name, hardware: VmHardware) -> Vm {
        let VmHardware { driver, memory, vcpus, boot, platform } = hardware;
        Vm {
            uuid: Uuid::new_v4(),
            name,
            description: Description::default(),
            tags: Tags::default(),
            other_config: OtherConfig::default(),
            driver,
            memory,
            vcpus,
            boot,
            platform,
            autostart: None,
            retention: None,
            retention_problem: None,
            backup_schedule: None,
            last_backup: None,
            backup_problem: None,
            seed: false,
            power: Power::Halted,
            suspended: None,
            pid: None,
            handle: None,
            problem: None,
            created: Timestamp::now(),
        }
    }
}

/// Drivers of virtual machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Driver {
    /// QEMU, started by the daemon and controlled over QMP.
    Qemu,
    /// Xen, through xl and xenstore.
    Xen,
}

impl Driver {
    /// The transport of a VM's VBDs unless another one is requested.
    pub fn transport(self) -> Transport {
        match self {
            Driver::Qemu => Transport::VhostUser,
            Driver::Xen => Transport::Blkif,
        }
    }
}

/// The boot source of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "from", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Boot {
    /// The first bootable disk.
    #[default]
    Disk,
    /// A kernel file on the host.
    Kernel {
        /// The kernel.
        kernel: AbsolutePath,
        /// The initial ramdisk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        initrd: Option<AbsolutePath>,
        /// The kernel's command line.
        #[serde(default)]
        cmdline: Description,
    },
}

/// The power state of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Power {
    /// Not running.
    Halted,
    /// Its disks are being plugged and it is being started.
    Starting,
    /// Running.
    Running,
    /// Paused; it can be resumed.
    Paused,
    /// Its guest was requested to shut down, or its memory was saved.
    Stopping,
    /// Not running, with its memory in a file: a start continues from there.
    Suspended,
}

/// The saved memory of a suspended VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Suspended {
    /// When it was saved.
    pub since: Timestamp,
    /// Bytes of the file.
    pub size: u64,
    /// The file on the daemon's host.
    pub file: String,
    /// Whether the guest was paused; it is again when it is resumed.
    pub paused: bool,
}

/// Creates a VM, which is halted.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// The driver that runs the VM.
    pub driver: Driver,
    /// Memory in bytes, a multiple of 1 MiB.
    pub memory: Size,
    /// Number of processors.
    #[schema(minimum = 1, maximum = 255)]
    pub vcpus: u8,
    /// Boot source.
    #[serde(default)]
    pub boot: Boot,
    /// Optional hardware.
    #[serde(default)]
    pub platform: BTreeMap<String, String>,
    /// Autostart when the host boots; disabled by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// The data that cloud-init in the guest reads at its first boot. QEMU only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<Seed>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Changes a VM; omitted fields are not changed. Memory, processors, boot, platform and seed can only be changed while
/// it is halted.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmPatch {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<Description>,
    /// Memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Size>,
    /// Number of processors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Boot source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Boot>,
    /// Optional hardware.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<BTreeMap<String, String>>,
    /// Autostart when the host boots; null disables it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<Autostart>)]
    pub autostart: Option<Option<Autostart>>,
    /// The schedule by which snapshots of all its disks are taken, and how many are kept; null ends it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<Retention>)]
    pub retention: Option<Option<Retention>>,
    /// The schedule by which it is backed up with all of its disks, and how many backups are retained; null ends it.
    /// The backups stay.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<BackupSchedule>)]
    pub backup_schedule: Option<Option<BackupSchedule>>,
    /// Another cloud-init seed; null removes it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<Seed>)]
    pub seed: Option<Option<Seed>>,
    /// Words to find it by, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::label::given_tags_if")]
    pub tags: Option<Tags>,
    /// Strings that programs keep with it, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_config: Option<OtherConfig>,
}

/// Shuts a VM down. Without `force` and `force_after` the guest may take as long as it needs.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmShutdown {
    /// Stop it at once, as if its power were cut.
    #[serde(default)]
    pub force: bool,
    /// Seconds that the guest may take before it is stopped by force, at most one day. By default it is never stopped
    /// by force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub force_after: Option<u32>,
}
