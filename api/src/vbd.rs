//! VBD: a VDI as a block device of a VM, or of a machine that is managed elsewhere.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, Autostart, DiskLimits, Health, OtherConfig, Problem, SHARE_WEIGHT, Tags};

/// A virtual block device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vbd {
    /// Its identity.
    pub uuid: Uuid,
    /// The VM; absent if the machine is managed elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The VDI.
    pub vdi: Uuid,
    /// Position among the disks of its VM, from 0.
    pub position: u8,
    /// Whether the guest may write.
    pub mode: Mode,
    /// Whether the VM may boot from it.
    pub bootable: bool,
    /// The transport over which the disk is served.
    pub transport: Transport,
    /// Whether it is for clients of the daemon's NBD address; it is removed after the last one.
    #[serde(default)]
    pub for_nbd_address: bool,
    /// Number of queues offered to the guest.
    pub queues: u16,
    /// Words to find it by.
    pub tags: Tags,
    /// Strings that programs keep with it.
    pub other_config: OtherConfig,
    /// Autostart when the host boots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// The limits of its disk; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<DiskLimits>,
    /// Its disk's weight among those that share its storage.
    pub share_weight: u32,
    /// Whether the VBD is plugged.
    pub state: VbdState,
    /// Where the disk is served: a socket, or for a Xen guest the backend's node in xenstore; present while plugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<AbsolutePath>,
    /// The pid of its process; present while plugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How many times its process has died and been restarted since it was plugged.
    pub restarts: u32,
    /// Whether the guest is waiting for space in the repository.
    pub waits_for_space: bool,
    /// Whether it does its work; if not, since when, why, and what to do.
    pub health: Health,
    /// Why it is not plugged although it should be, or why its process last died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When the VBD was created.
    pub created: Timestamp,
}

impl Vbd {
    /// An unplugged read-write VBD of no VM, with one queue.
    pub fn unplugged(vdi: Uuid, transport: Transport) -> Vbd {
        Vbd {
            uuid: Uuid::new_v4(),
            vm: None,
            vdi,
            position: 0,
            mode: Mode::ReadWrite,
            bootable: false,
            transport,
            for_nbd_address: false,
            queues: 1,
            tags: Tags::default(),
            other_config: OtherConfig::default(),
            autostart: None,
            limits: None,
            share_weight: SHARE_WEIGHT,
            state: VbdState::Unplugged,
            socket: None,
            pid: None,
            restarts: 0,
            waits_for_space: false,
            health: Health::healthy(),
            problem: None,
            created: Timestamp::now(),
        }
    }
}

/// Whether the guest may write to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub enum Mode {
    /// Read-write.
    #[serde(rename = "RW")]
    ReadWrite,
    /// Read-only.
    #[serde(rename = "RO")]
    ReadOnly,
}

/// The transport over which a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// vhost-user-blk at a Unix socket, for QEMU and Cloud Hypervisor.
    VhostUser,
    /// NBD at a Unix socket, for any NBD client.
    Nbd,
    /// blkif, for a Xen guest, whose VM has the driver `xen`.
    Blkif,
}

/// The state of a VBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VbdState {
    /// It has no process and does not use its VDI.
    Unplugged,
    /// It is being plugged.
    Plugging,
    /// It is being served.
    Plugged,
    /// Its process died and is being restarted.
    Restarting,
    /// It is being unplugged.
    Unplugging,
}

/// A VBD that uses a VDI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Use {
    /// The VBD.
    pub vbd: Uuid,
    /// Its access mode.
    pub mode: Mode,
}

/// Creates a VBD, which is not plugged yet.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// The VM; omitted for a machine that is managed elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The VDI.
    pub vdi: Uuid,
    /// Position among the disks of its VM, 0 to 254; the first free one by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 254)]
    pub position: Option<u8>,
    /// Access mode; by default what the VDI allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Whether the VM may boot from it; by default only from its first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootable: Option<bool>,
    /// Transport; by default what the VM's driver needs, or vhost-user without a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Number of queues offered to the guest, 1 to 64; by default one per processor of the VM, at most 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub queues: Option<u16>,
    /// Autostart when the host boots, only for VBDs that belong to no VM; disabled by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// The limits of its disk; none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<DiskLimits>,
    /// Its disk's weight among those that share its storage: 100 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10_000)]
    pub share_weight: Option<u32>,
    /// Words to find it by.
    #[serde(default, skip_serializing_if = "Tags::is_empty", deserialize_with = "crate::label::given_tags")]
    pub tags: Tags,
    /// Strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// Changes a VBD; omitted fields are not changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdPatch {
    /// Autostart when the host boots, only for VBDs that belong to no VM; null disables it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::change")]
    #[schema(value_type = Option<Autostart>)]
    pub autostart: Option<Option<Autostart>>,
    /// Words to find it by, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::label::given_tags_if")]
    pub tags: Option<Tags>,
    /// Strings that programs keep with it, instead of those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_config: Option<OtherConfig>,
}

/// Options for unplugging a VBD.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdUnplug {
    /// Do not wait for the guest to release the disk; unflushed data is lost.
    #[serde(default)]
    pub force: bool,
}

/// The result of an upgrade: the VBD after it, and how it went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VbdUpgraded {
    /// The VBD, with its new process.
    #[serde(flatten)]
    pub vbd: Vbd,
    /// The pid of the previous process.
    pub replaced: u32,
    /// How long the guest's requests waited, in microseconds, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// A remark, if there is anything else to report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Plugs or unplugs several VBDs: either all of a VM or those listed.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Vbds {
    /// The VM whose VBDs are meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The VBDs that are meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vbds: Option<Vec<Uuid>>,
    /// For unplug: do not wait for guests to release their disks.
    #[serde(default)]
    pub force: bool,
}
