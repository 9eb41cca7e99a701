//! The saved memory of suspended VMs.
//!
//! It knows nothing about the file that it is in. Invariants: as long as a VM has memory, the VBDs that were plugged
//! when it was saved keep their leases, plugged or not, so that nothing else uses what the memory believes in; memory
//! that is forgotten is never loaded again.

use api::{Code, Mode, ObjectKind, Power, Problem, Suspended, VbdState};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::row::{Id, Json};
use super::{Tx, View};

/// What to do about a VM that is suspended.
pub const ADVICE: &str = "resume it (tapline vm start), or give its memory up (tapline vm drop-memory)";

/// The memory of a VM, and what is needed to continue with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmMemory {
    /// Its identity, which is in the file too.
    pub id: Uuid,
    /// The file.
    pub file: String,
    /// Bytes of the file.
    pub size: u64,
    /// When it was saved.
    pub since: Timestamp,
    /// Whether the guest ran, or was paused.
    pub ran: bool,
    /// The QEMU that has saved it.
    pub qemu: String,
    /// The machine, in the form of the driver.
    pub machine: Value,
    /// The disks that it had.
    pub disks: Vec<DiskOfMemory>,
}

/// A disk, as it was when nothing had it open any more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskOfMemory {
    /// The VBD.
    pub vbd: Uuid,
    /// The VDI.
    pub vdi: Uuid,
    /// Whether the guest may write it.
    pub mode: Mode,
    /// The images of its chain, from the leaf down; empty until they are recorded, after the unplug.
    pub images: Vec<ImageOfMemory>,
}

/// An image: which, and what tells that its file was written since.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageOfMemory {
    /// The image.
    pub image: Uuid,
    /// The file's size.
    pub size: u64,
    /// When it was last written to: seconds, and nanoseconds.
    pub written: (i64, i64),
}

impl VmMemory {
    /// As the API shows it.
    pub fn shown(&self) -> Suspended {
        Suspended { since: self.since, size: self.size, file: self.file.clone(), paused: !self.ran }
    }
}

impl View<'_> {
    /// The saved memory of a VM, if it has any.
    pub fn vm_memory(&self, vm: Uuid) -> Result<Option<VmMemory>, Problem> {
        let sql = "SELECT memory FROM vm_memory WHERE vm = ?1";
        self.row(sql, [Id(vm)], |row| Ok(row.get::<_, Json<_>>(0)?.0))
    }

    /// Refuses a VDI that belongs to the memory of a suspended VM, which could not continue if it were changed.
    pub fn check_not_of_memory(&self, vdi: Uuid, tried: &str) -> Result<(), Problem> {
        let sql = "SELECT vm.uuid, vm.name FROM lease JOIN vbd ON vbd.uuid = lease.holder JOIN vm ON vm.uuid = vbd.vm
                   JOIN vm_memory ON vm_memory.vm = vm.uuid
                   WHERE lease.vdi = ?1 AND vbd.state = 'unplugged' LIMIT 1";
        let found = self.row(sql, [Id(vdi)], |row| Ok((row.get::<_, Id>(0)?.0, row.get::<_, String>(1)?)))?;
        let Some((vm, name)) = found else { return Ok(()) };
        let what = format!(
            "VDI {vdi} cannot be {tried}: VM '{name}' ({vm}) is suspended, and its memory needs the disk \
                            as it is"
        );
        Err(Problem::new(Code::InUse, what).advise(ADVICE))
    }

    /// Refuses a change to the hardware or the disks of a VM that is suspended.
    pub fn check_not_suspended(&self, vm: Uuid, tried: &str) -> Result<(), Problem> {
        if self.vm(vm)?.power != Power::Suspended {
            return Ok(());
        }
        let what = format!("VM {vm} is suspended, so {tried}: its memory fits only the machine that it was saved from");
        Err(Problem::new(Code::State, what).advise(ADVICE))
    }
}

impl Tx<'_> {
    /// Records the memory of a VM.
    pub fn set_vm_memory(&mut self, vm: Uuid, memory: &VmMemory) -> Result<(), Problem> {
        self.vm(vm)?;
        self.execute("INSERT OR REPLACE INTO vm_memory VALUES (?1, ?2)", (Id(vm), Json(memory)))?;
        self.touch(ObjectKind::Vm, vm, api::Change::Changed);
        Ok(())
    }

    /// Forgets the memory of a VM: from here on it is never loaded. Its disks are released if they are not plugged.
    pub fn forget_vm_memory(&mut self, vm: Uuid) -> Result<Option<VmMemory>, Problem> {
        let memory = self.vm_memory(vm)?;
        self.execute("DELETE FROM vm_memory WHERE vm = ?1", [Id(vm)])?;
        for disk in memory.iter().flat_map(|memory| &memory.disks) {
            if self.find_vbd(disk.vbd)?.is_some_and(|vbd| vbd.state == VbdState::Unplugged) {
                self.drop_leases(disk.vbd)?;
            }
        }
        if memory.is_some() {
            self.touch(ObjectKind::Vm, vm, api::Change::Changed);
        }
        Ok(memory)
    }

    /// Releases the VDI of a VBD that is not plugged any more, unless the memory of its VM needs it.
    pub(super) fn release(&mut self, vbd: Uuid) -> Result<(), Problem> {
        let memory = self.vbd(vbd)?.vm.map(|vm| self.vm_memory(vm)).transpose()?.flatten();
        match memory.is_some_and(|memory| memory.disks.iter().any(|disk| disk.vbd == vbd)) {
            true => Ok(()),
            false => self.drop_leases(vbd),
        }
    }
}
