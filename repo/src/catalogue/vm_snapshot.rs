//! Snapshots of all disks of a VM at one moment; and which guests are paused for that.
//!
//! They name VDIs, which are in repositories of their own: a VDI may be destroyed or forgotten, and come back.

use api::{Change, Code, ObjectKind, Problem, VmSnapshot, VmSnapshotPatch};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::row::{Id, Json, Time, text};
use super::{Tx, View};

fn of_row(row: &Row<'_>) -> rusqlite::Result<VmSnapshot> {
    Ok(VmSnapshot {
        uuid: row.get::<_, Id>("uuid")?.0,
        vm: row.get::<_, Id>("vm")?.0,
        name: text(row, "name")?,
        description: text(row, "description")?,
        created: row.get::<_, Time>("created")?.0,
        hardware: row.get::<_, Json<_>>("hardware")?.0,
        disks: row.get::<_, Json<_>>("disks")?.0,
        scheduled: row.get("scheduled")?,
    })
}

impl View<'_> {
    /// The snapshot of a VM that a VDI is in, if it is in one.
    pub fn vm_snapshot_with(&self, vdi: Uuid) -> Result<Option<VmSnapshot>, Problem> {
        let has = |snapshot: &VmSnapshot| snapshot.disks.iter().any(|disk| disk.snapshot == Some(vdi));
        Ok(self.vm_snapshots(None)?.into_iter().find(has))
    }

    /// The snapshots of all VMs, or of one, the oldest first.
    pub fn vm_snapshots(&self, vm: Option<Uuid>) -> Result<Vec<VmSnapshot>, Problem> {
        let sql = "SELECT * FROM vm_snapshot WHERE ?1 IS NULL OR vm = ?1 ORDER BY created, uuid";
        self.rows(sql, [vm.map(Id)], of_row)
    }

    /// A snapshot of a VM, if there is one.
    pub fn find_vm_snapshot(&self, uuid: Uuid) -> Result<Option<VmSnapshot>, Problem> {
        self.row("SELECT * FROM vm_snapshot WHERE uuid = ?1", [Id(uuid)], of_row)
    }

    /// A snapshot of this VM.
    pub fn vm_snapshot(&self, vm: Uuid, uuid: Uuid) -> Result<VmSnapshot, Problem> {
        self.vm(vm)?;
        let found = self.find_vm_snapshot(uuid)?.filter(|found| found.vm == vm);
        found.ok_or_else(|| {
            let what = format!("VM {vm} has no snapshot {uuid}");
            Problem::new(Code::NotFound, what).advise("list its snapshots: tapline vm snapshots")
        })
    }

    /// For what the guest of a VM is paused, if that is for a moment only.
    pub fn vm_held(&self, vm: Uuid) -> Result<Option<Uuid>, Problem> {
        let held = self.row("SELECT held_for FROM vm WHERE uuid = ?1", [Id(vm)], |row| row.get::<_, Option<Id>>(0))?;
        Ok(held.flatten().map(|id| id.0))
    }
}

impl Tx<'_> {
    /// Adds a snapshot of a VM.
    pub fn add_vm_snapshot(&mut self, snapshot: &VmSnapshot) -> Result<(), Problem> {
        self.execute(
            "INSERT INTO vm_snapshot VALUES (:uuid, :vm, :name, :description, :created, :hardware, :disks,
             :scheduled)",
            named_params! {
                ":uuid": Id(snapshot.uuid), ":vm": Id(snapshot.vm), ":name": snapshot.name.as_str(),
                ":description": snapshot.description.as_str(), ":created": Time(snapshot.created),
                ":hardware": Json(&snapshot.hardware), ":disks": Json(&snapshot.disks),
                ":scheduled": snapshot.scheduled,
            },
        )?;
        self.touch(ObjectKind::Vm, snapshot.vm, Change::Changed);
        Ok(())
    }

    /// Changes a snapshot of a VM. Only the schedule marks one as its own.
    pub fn patch_vm_snapshot(&mut self, vm: Uuid, uuid: Uuid, patch: &VmSnapshotPatch) -> Result<VmSnapshot, Problem> {
        let mut snapshot = self.vm_snapshot(vm, uuid)?;
        if patch.scheduled == Some(true) && !snapshot.scheduled {
            let what = format!("snapshot {uuid} of VM {vm} was not taken by a schedule");
            let advice = "destroy it when it is not needed any more";
            return Err(Problem::new(Code::State, what).field("scheduled").advise(advice));
        }
        if patch.scheduled.is_some_and(|wanted| wanted != snapshot.scheduled) {
            snapshot.scheduled = false;
            self.execute("UPDATE vm_snapshot SET scheduled = FALSE WHERE uuid = ?1", [Id(uuid)])?;
            self.touch(ObjectKind::Vm, vm, Change::Changed);
        }
        Ok(snapshot)
    }

    /// Forgets a snapshot of a VM, if it is there. The snapshots of its disks stay.
    pub fn remove_vm_snapshot(&mut self, uuid: Uuid) -> Result<(), Problem> {
        if let Some(snapshot) = self.find_vm_snapshot(uuid)? {
            self.execute("DELETE FROM vm_snapshot WHERE uuid = ?1", [Id(uuid)])?;
            self.touch(ObjectKind::Vm, snapshot.vm, Change::Changed);
        }
        Ok(())
    }

    /// The guest of a VM is about to be paused for a moment, or is not any longer.
    pub fn set_vm_held(&mut self, vm: Uuid, held_for: Option<Uuid>) -> Result<(), Problem> {
        self.execute("UPDATE vm SET held_for = ?2 WHERE uuid = ?1", (Id(vm), held_for.map(Id))).map(drop)
    }
}

#[cfg(test)]
mod test;
