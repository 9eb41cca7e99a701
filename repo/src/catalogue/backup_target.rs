//! Backup targets, and the snapshots that the daemon takes for backups.
//!
//! It knows nothing of what is on a target. Invariant: no column holds a key or other secret, only the paths of files.

use api::{BackupTarget, Code, Problem};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::row::{Id, Json, Time, text};
use super::{Tx, View};

/// A snapshot that exists for a backup only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupSnapshot {
    /// The VDI, or the snapshot of a VM.
    pub snapshot: Uuid,
    /// The VM, for the snapshot of one.
    pub vm: Option<Uuid>,
    /// The VDIs in the snapshot of a VM, from the commit on in which the job begins that creates them.
    pub disks: Vec<Uuid>,
}

fn of_row(row: &Row<'_>) -> rusqlite::Result<BackupTarget> {
    let key_file = row.get::<_, Option<String>>("key_file")?;
    Ok(BackupTarget {
        uuid: row.get::<_, Id>("uuid")?.0,
        name: text(row, "name")?,
        path: text(row, "path")?,
        s3: row.get::<_, Option<Json<_>>>("s3")?.map(|json| json.0),
        target_id: row.get("target_id")?,
        key_file: key_file.map(|_| text(row, "key_file")).transpose()?,
        created: row.get::<_, Time>("created")?.0,
    })
}

fn snapshot_of_row(row: &Row<'_>) -> rusqlite::Result<BackupSnapshot> {
    Ok(BackupSnapshot {
        snapshot: row.get::<_, Id>("snapshot")?.0,
        vm: row.get::<_, Option<Id>>("vm")?.map(|vm| vm.0),
        disks: row.get::<_, Json<_>>("disks")?.0,
    })
}

impl View<'_> {
    /// All backup targets, by name.
    pub fn backup_targets(&self) -> Result<Vec<BackupTarget>, Problem> {
        self.rows("SELECT * FROM backup_target ORDER BY name", [], of_row)
    }

    /// A backup target; an error if there is none with this UUID.
    pub fn backup_target(&self, uuid: Uuid) -> Result<BackupTarget, Problem> {
        let found = self.row("SELECT * FROM backup_target WHERE uuid = ?1", [Id(uuid)], of_row)?;
        found.ok_or_else(|| missing(uuid))
    }

    /// The snapshots that exist for backups only ([`Tx::add_backup_snapshot`]).
    pub fn backup_snapshots(&self) -> Result<Vec<BackupSnapshot>, Problem> {
        self.rows("SELECT * FROM backup_snapshot", [], snapshot_of_row)
    }

    /// The record of a snapshot that exists for a backup only, if there is one.
    pub fn find_backup_snapshot(&self, snapshot: Uuid) -> Result<Option<BackupSnapshot>, Problem> {
        self.row("SELECT * FROM backup_snapshot WHERE snapshot = ?1", [Id(snapshot)], snapshot_of_row)
    }
}

impl Tx<'_> {
    /// Registers a backup target. Neither two names nor two entries of one target are the same: what is done with one
    /// of them would be done with the other.
    pub fn add_backup_target(&mut self, target: &BackupTarget) -> Result<(), Problem> {
        for known in self.backup_targets()? {
            let (what, field) = match (known.name == target.name, known.target_id == target.target_id) {
                (true, _) => (format!("a backup target named '{}' is registered already", known.name), "name"),
                (_, true) => (format!("this backup target is registered already, as '{}'", known.name), "path"),
                _ => continue,
            };
            return Err(Problem::new(Code::Exists, what)
                .field(field)
                .advise("choose another one, or remove that one: tapline target remove"));
        }
        self.execute(
            "INSERT INTO backup_target VALUES (:uuid, :name, :path, :target_id, :key_file, :created, :s3)",
            named_params! {
                ":uuid": Id(target.uuid), ":name": target.name.as_str(), ":path": target.path.as_str(),
                ":target_id": target.target_id, ":key_file": target.key_file.as_ref().map(api::AbsolutePath::as_str),
                ":created": Time(target.created), ":s3": target.s3.as_ref().map(Json),
            },
        )?;
        Ok(())
    }

    /// Forgets a backup target, unless a schedule backs up to it. What is on it stays.
    pub fn remove_backup_target(&mut self, uuid: Uuid) -> Result<(), Problem> {
        self.check_target_not_scheduled(uuid)?;
        match self.execute("DELETE FROM backup_target WHERE uuid = ?1", [Id(uuid)])? {
            0 => Err(missing(uuid)),
            _ => Ok(()),
        }
    }

    /// Records that a snapshot of this identity is to be destroyed by the daemon: one that is about to be taken for a
    /// backup, or that is not needed for backups any more.
    pub fn add_backup_snapshot(&mut self, snapshot: Uuid, vm: Option<Uuid>) -> Result<(), Problem> {
        let sql = "INSERT OR IGNORE INTO backup_snapshot (snapshot, vm) VALUES (?1, ?2)";
        self.execute(sql, (Id(snapshot), vm.map(Id))).map(drop)
    }

    /// Records the VDIs that a snapshot of a VM consists of, if that was recorded as one for a backup. The VM's
    /// snapshot may never be recorded, or go with its VM; these do not.
    pub fn note_backup_disks(&mut self, snapshot: Uuid, disks: &[Uuid]) -> Result<(), Problem> {
        let sql = "UPDATE backup_snapshot SET disks = ?2 WHERE snapshot = ?1 AND vm IS NOT NULL";
        self.execute(sql, (Id(snapshot), Json(disks))).map(drop)
    }

    /// Forgets a snapshot that was destroyed. Returns false if its record has changed since it was read.
    pub fn forget_backup_snapshot(&mut self, destroyed: &BackupSnapshot) -> Result<bool, Problem> {
        match self.find_backup_snapshot(destroyed.snapshot)? {
            Some(found) if found != *destroyed => Ok(false),
            _ => {
                self.execute("DELETE FROM backup_snapshot WHERE snapshot = ?1", [Id(destroyed.snapshot)])?;
                Ok(true)
            }
        }
    }
}

fn missing(uuid: Uuid) -> Problem {
    Problem::new(Code::NotFound, format!("there is no backup target {uuid}")).advise("list them: tapline target list")
}

#[cfg(test)]
mod test;
