//! Bases of incremental backups: snapshots without data of which a backup has the content.
//!
//! Which snapshot is one is in its record of tracking, and so in the inventory of its repository: it is right or gone
//! together with the maps that the next backup needs. Invariant: a snapshot that is no longer a base is recorded as one
//! that the daemon is to destroy, in the same commit.

use api::{BackupBase, Code, Problem, VdiState};
use uuid::Uuid;

use super::row::{Id, Json};
use super::{Tx, View};

/// A snapshot that is a base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBase {
    /// The snapshot.
    pub snapshot: Uuid,
    /// Its disk.
    pub disk: Uuid,
    /// The backup.
    pub base: BackupBase,
}

impl View<'_> {
    /// The bases of all disks, or of one, the newest first.
    pub fn backup_bases(&self, disk: Option<Uuid>) -> Result<Vec<KeptBase>, Problem> {
        let sql = "SELECT uuid, snapshot_of, cbt ->> 'base' AS base FROM vdi
                   WHERE base IS NOT NULL AND snapshot_of IS NOT NULL AND (?1 IS NULL OR snapshot_of = ?1)
                   ORDER BY snapshot_time DESC, uuid";
        self.rows(sql, [disk.map(Id)], |row| {
            let (snapshot, disk) = (row.get::<_, Id>("uuid")?.0, row.get::<_, Id>("snapshot_of")?.0);
            Ok(KeptBase { snapshot, disk, base: row.get::<_, Json<_>>("base")?.0 })
        })
    }

    /// Whether the changes of a VDI are recorded.
    pub fn is_tracked(&self, vdi: Uuid) -> Result<bool, Problem> {
        Ok(self.find_vdi(vdi)?.and_then(|vdi| vdi.cbt).is_some_and(|tracking| tracking.enabled))
    }

    /// The bases in attached repositories that no backup can use any more, and that can be destroyed: their target is
    /// not registered, their disk is gone or not tracked, or there is a newer one, as after a catalogue was restored.
    pub fn useless_backup_bases(&self) -> Result<Vec<Uuid>, Problem> {
        let targets: Vec<Uuid> = self.backup_targets()?.into_iter().map(|target| target.uuid).collect();
        let (mut seen, mut useless) = (Vec::new(), Vec::new());
        for KeptBase { snapshot, disk, base } in self.backup_bases(None)? {
            let vdi = self.vdi(snapshot)?;
            // Of others it is not certain that they were not taken for something else.
            let is_own = vdi.for_backup || vdi.state == VdiState::NoData;
            if !is_own || !self.can_destroy_in(vdi.sr) {
                continue;
            }
            if seen.contains(&(disk, base.target)) || !targets.contains(&base.target) || !self.is_tracked(disk)? {
                useless.push(snapshot);
            } else {
                seen.push((disk, base.target));
            }
        }
        Ok(useless)
    }

    /// Whether something in a repository can be destroyed now.
    fn can_destroy_in(&self, sr: Uuid) -> bool {
        self.attached_sr(sr).is_ok_and(|sr| !sr.is_read_only())
    }

    /// The snapshots in attached repositories that were taken for a backup, and that nothing keeps: no record says that
    /// they are to be destroyed. The backup was one of another catalogue, or their repository was forgotten meanwhile.
    pub fn stray_backup_snapshots(&self) -> Result<Vec<Uuid>, Problem> {
        let sql = "SELECT uuid FROM vdi WHERE for_backup
                   AND uuid NOT IN (SELECT snapshot FROM backup_snapshot
                                    UNION ALL SELECT value FROM backup_snapshot, json_each(disks))";
        let mut stray = Vec::new();
        for uuid in self.rows(sql, [], |row| Ok(row.get::<_, Id>(0)?.0))? {
            let vdi = self.vdi(uuid)?;
            let is_base = vdi.state == VdiState::NoData && vdi.is_backup_base();
            if !is_base && self.can_destroy_in(vdi.sr) && self.vm_snapshot_with(uuid)?.is_none() {
                stray.push(uuid);
            }
        }
        Ok(stray)
    }
}

impl Tx<'_> {
    /// A snapshot that was taken for a backup is the base of the next one of its disk to that target. Returns the bases
    /// before, which are to be destroyed. Refused if the changes since could not be listed.
    pub fn set_backup_base(&mut self, snapshot: Uuid, base: &BackupBase) -> Result<Vec<Uuid>, Problem> {
        self.check_data_destroyable(snapshot)?;
        let disk = self.vdi(snapshot)?.disk();
        if !self.is_tracked(disk)? {
            return Err(Problem::new(Code::State, format!("the changed blocks of VDI {disk} are not recorded")));
        }
        let all = self.backup_bases(Some(disk))?;
        let before = all.into_iter().filter(|known| known.base.target == base.target && known.snapshot != snapshot);
        let before: Vec<Uuid> = before.map(|known| known.snapshot).collect();
        before.iter().try_for_each(|known| self.drop_backup_base(*known))?;
        let description = format!("kept without data for the backup after {}", base.backup);
        self.execute("UPDATE vdi SET description = ?2 WHERE uuid = ?1", (Id(snapshot), description))?;
        self.change_tracking(snapshot, |tracking| tracking.base = Some(base.clone()))?;
        Ok(before)
    }

    /// A snapshot is no longer a base, and is to be destroyed.
    pub fn drop_backup_base(&mut self, snapshot: Uuid) -> Result<(), Problem> {
        self.change_tracking(snapshot, |tracking| tracking.base = None)?;
        self.add_backup_snapshot(snapshot, None)
    }

    /// The snapshots of the disks of a VM that were taken for a backup are to be destroyed one by one, and not as one
    /// snapshot of the VM.
    pub fn split_backup_snapshot(&mut self, snapshot: Uuid) -> Result<(), Problem> {
        let Some(found) = self.find_vm_snapshot(snapshot)? else { return Ok(()) };
        for vdi in found.disks.iter().filter_map(|disk| disk.snapshot) {
            self.add_backup_snapshot(vdi, None)?;
        }
        self.remove_vm_snapshot(snapshot)?;
        let recorded = self.find_backup_snapshot(snapshot)?;
        recorded.map_or(Ok(()), |recorded| self.forget_backup_snapshot(&recorded).map(drop))
    }
}

#[cfg(test)]
mod test;
