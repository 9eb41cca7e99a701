//! Backup targets, and backups of VDIs to them, as tasks.
//!
//! The daemon holds neither data nor keys. Each access to a target is a process `tapline-backup` ([`program`]), which
//! reads and writes disks over NBD: a snapshot through a VBD as clients of the NBD address have one, a new VDI through
//! a disk process that the task starts for it. The daemon knows what a target is called, where it is, and the ID by
//! which it is recognized at each use.

mod changes;
mod in_place;
mod machine;
mod machine_in_place;
mod machine_restore;
mod program;
mod restore;
mod snapshot;
mod target;
mod turns;
mod vdi;

use std::collections::HashSet;
use std::path::Path;
use std::{fs, io};

use api::{Description, LogicalBlockSize, Mode, Name, Problem, VmHardware};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::daemon::Daemon;

pub use in_place::{RestoreInPlace, restore_in_place};
pub use machine::back_up as back_up_vm;
pub use machine_in_place::{RestoreVmInPlace, restore_vm_in_place};
pub use machine_restore::{RestoreVm, restore_vm};
pub use restore::{Restore, restore};
pub use snapshot::sweep;
pub use target::{add, backups, prune, remove, verify};
pub use turns::Turns;
pub use vdi::back_up;

/// What a backup's maker keeps with it: what the content of a disk does not say.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Properties {
    /// The VDI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    vdi: Option<Uuid>,
    /// The size of the sectors that its guest addresses: with another one it does not find its partitions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    logical_block_size: Option<LogicalBlockSize>,
    /// The machine that it was backed up with, at one moment with its other disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    machine: Option<Machine>,
}

/// A machine, as it is kept with each of its disks. Its cloud-init seed is not: it has secrets.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Machine {
    /// The VM on the host that made the backup.
    vm: Uuid,
    /// The moment: the same with all of its disks, and never again.
    moment: Uuid,
    name: Name,
    #[serde(default)]
    description: Description,
    hardware: VmHardware,
    /// All disks, by position.
    disks: Vec<MachineDisk>,
}

impl Machine {
    /// The number of its disks that are backed up.
    fn backed_up(&self) -> usize {
        let writable = self.disks.iter().filter(|disk| disk.mode == Mode::ReadWrite);
        writable.map(|disk| disk.vdi).collect::<HashSet<_>>().len()
    }
}

/// A disk of a machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct MachineDisk {
    position: u8,
    mode: Mode,
    bootable: bool,
    queues: u16,
    /// The VDI. The backup of a disk that the guest may write has the same one in its properties; one that it may only
    /// read, such as an ISO image, is not backed up.
    vdi: Uuid,
}

/// Removes what the tasks of the previous daemon have left, before there are tasks of this one.
pub async fn remove_left_over(daemon: &Daemon) -> Result<(), Problem> {
    for directory in [restore::directory_of, changes::directory_of] {
        forget(&directory(&daemon.config.run_directory));
    }
    snapshot::remove_left_over(daemon).await
}

/// Removes what a daemon that was killed has left in a directory. Its processes have ended with it.
fn forget(directory: &Path) {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %directory.display(), %error, "old files cannot be removed");
        }
        _ => {}
    }
}

/// What identifies a VDI or a VM on all targets: never its name, which can be given to another one.
fn identity(daemon: &Daemon, object: Uuid) -> String {
    format!("{}/{object}", daemon.host())
}
