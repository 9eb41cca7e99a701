//! VBD: a VDI as a block device of a VM, or of a machine that others manage.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{AbsolutePath, Autostart, Problem};

/// A virtual block device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Vbd {
    /// Its identity.
    pub uuid: Uuid,
    /// The VM; none if others manage it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The VDI.
    pub vdi: Uuid,
    /// Its place among the disks of its VM, from 0.
    pub position: u8,
    /// Whether the guest may write.
    pub mode: Mode,
    /// Whether the VM may boot from it.
    pub bootable: bool,
    /// How it is served.
    pub transport: Transport,
    /// Queues offered to the guest.
    pub queues: u16,
    /// That it is plugged by itself when the host was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
    /// Whether it is plugged.
    pub state: VbdState,
    /// Where it is served: a socket, or for a guest of Xen our end's node in the store; while it is plugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<AbsolutePath>,
    /// The number of its process; while it is plugged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How often its process has died and was started again since it was plugged.
    pub restarts: u32,
    /// The guest waits for space in the repository.
    pub waits_for_space: bool,
    /// Why it is not plugged though it should be, or why its process died last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// When it was made.
    pub created: Timestamp,
}

impl Vbd {
    /// One that no VM has and that is not plugged: to write, over one queue.
    pub fn unplugged(vdi: Uuid, transport: Transport) -> Vbd {
        Vbd {
            uuid: Uuid::new_v4(),
            vm: None,
            vdi,
            position: 0,
            mode: Mode::ReadWrite,
            bootable: false,
            transport,
            queues: 1,
            autostart: None,
            state: VbdState::Unplugged,
            socket: None,
            pid: None,
            restarts: 0,
            waits_for_space: false,
            problem: None,
            created: Timestamp::now(),
        }
    }
}

/// Whether something may be written, or read only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub enum Mode {
    /// Written and read.
    #[serde(rename = "RW")]
    ReadWrite,
    /// Only read.
    #[serde(rename = "RO")]
    ReadOnly,
}

/// How a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// vhost-user-blk, at a Unix socket: for QEMU and Cloud Hypervisor.
    VhostUser,
    /// NBD, at a Unix socket: for anything.
    Nbd,
    /// blkif: for a guest of Xen, of a VM with the driver `xen`.
    Blkif,
}

/// Whether a VBD is plugged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VbdState {
    /// It has no process and uses its VDI not at all.
    Unplugged,
    /// It becomes so.
    Plugging,
    /// It is served.
    Plugged,
    /// Its process has died and is being started again.
    Restarting,
    /// It ceases to be so.
    Unplugging,
}

/// A VBD that uses a VDI.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Use {
    /// The VBD.
    pub vbd: Uuid,
    /// Whether it may write.
    pub mode: Mode,
}

/// Makes a VBD, which is not plugged.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdCreate {
    /// The VM; none for a machine that others manage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// The VDI.
    pub vdi: Uuid,
    /// Its place among the disks of its VM, 0 to 254; the first that is free if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 254)]
    pub position: Option<u8>,
    /// Whether the guest may write; what the VDI allows if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Whether the VM may boot from it; its first disk may if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bootable: Option<bool>,
    /// How it is served; what the VM's driver needs if nothing is said, vhost-user without a VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Transport>,
    /// Queues offered to the guest, 1 to 64; as many as the VM has processors, but no more than 4, if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 64)]
    pub queues: Option<u16>,
    /// That it is plugged by itself when the host was started, if no VM has it; not if it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<Autostart>,
}

/// Changes a VBD; what is left out stays.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdPatch {
    /// That it is plugged by itself when the host was started, if no VM has it; null: that it is not.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::autostart::change")]
    #[schema(value_type = Option<Autostart>)]
    pub autostart: Option<Option<Autostart>>,
}

/// Unplugs a VBD.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VbdUnplug {
    /// Without waiting for the guest to let go: what it has not flushed is lost.
    #[serde(default)]
    pub force: bool,
}

/// What came of an upgrade: the VBD as it is now, and how it went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VbdUpgraded {
    /// The VBD, whose process is the new one.
    #[serde(flatten)]
    pub vbd: Vbd,
    /// The number of the process before it.
    pub replaced: u32,
    /// How long the guest's requests waited, in microseconds, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// What else there is to know of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Plugs or unplugs many VBDs: either those of a VM or those that are named.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Vbds {
    /// All of this VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<Uuid>,
    /// These.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vbds: Option<Vec<Uuid>>,
    /// When they are unplugged: without waiting for guests to let go.
    #[serde(default)]
    pub force: bool,
}
