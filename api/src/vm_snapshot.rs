//! Snapshots of all disks of a VM at one moment, and what is made of them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{Description, Mode, Name, VmHardware};

/// A snapshot of all disks of a VM at one moment, with the hardware that the VM had then.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmSnapshot {
    /// Its identity.
    pub uuid: Uuid,
    /// The VM.
    pub vm: Uuid,
    /// Its name, unique among the snapshots of the VM.
    pub name: Name,
    /// Its description.
    pub description: Description,
    /// When it was taken.
    pub created: Timestamp,
    /// The hardware of the VM at that time.
    pub hardware: VmHardware,
    /// The VM's disks, by position.
    pub disks: Vec<VmSnapshotDisk>,
    /// Whether it was taken by the schedule of its VM, which also destroys it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scheduled: bool,
}

/// A disk of a VM at the moment of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmSnapshotDisk {
    /// Position among the disks of the VM.
    pub position: u8,
    /// Whether the guest could write.
    pub mode: Mode,
    /// Whether the VM could boot from it.
    pub bootable: bool,
    /// Number of queues offered to the guest.
    pub queues: u16,
    /// The disk.
    pub vdi: Uuid,
    /// The disk's snapshot, which may have been destroyed since; absent for a disk that the guest could only read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Uuid>,
}

/// Takes snapshots of all writable disks of a VM at one moment. A running guest is paused for it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSnapshotCreate {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its name; if omitted, the VM's name and the time in UTC: `web@2026-11-23T02:07`.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::given_if")]
    pub name: Option<Name>,
    /// Its description.
    #[serde(default)]
    pub description: Description,
}

/// Changes a snapshot of a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSnapshotPatch {
    /// False has a scheduled snapshot stay that its schedule would destroy one day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduled: Option<bool>,
}

/// Reverts all disks of a halted VM to a snapshot of it. Data written since then is lost.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmRevert {
    /// The snapshot of the VM.
    pub snapshot: Uuid,
}

/// Creates a halted VM with the hardware of another and thin clones of its disks.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmClone {
    /// Its identity; a random one if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "crate::value::chosen")]
    pub uuid: Option<Uuid>,
    /// Its name.
    #[serde(deserialize_with = "crate::value::given")]
    pub name: Name,
    /// Its description.
    #[serde(default)]
    pub description: Description,
    /// The snapshot of the VM to clone; the VM as it is now if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Uuid>,
}
