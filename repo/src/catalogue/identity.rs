//! UUIDs that clients choose for what they create.
//!
//! Invariant: a UUID names one thing in the catalogue, whatever its kind, or one that a task is creating.

use api::{Code, Problem};
use uuid::Uuid;

use super::row::Id;
use super::{Tx, View};

/// All that has a UUID.
const TAKEN: &str = "SELECT 'an SR' FROM sr WHERE uuid = ?1
     UNION ALL SELECT 'a VDI' FROM vdi WHERE uuid = ?1
     UNION ALL SELECT 'an image' FROM image WHERE uuid = ?1
     UNION ALL SELECT 'a VBD' FROM vbd WHERE uuid = ?1
     UNION ALL SELECT 'a VM' FROM vm WHERE uuid = ?1
     UNION ALL SELECT 'a snapshot of a VM' FROM vm_snapshot WHERE uuid = ?1
     UNION ALL SELECT 'a task' FROM task WHERE uuid = ?1
     UNION ALL SELECT 'a backup target' FROM backup_target WHERE uuid = ?1
     UNION ALL SELECT 'a snapshot for a backup' FROM backup_snapshot
         WHERE snapshot = ?1 OR ?1 IN (SELECT value FROM json_each(disks))
     UNION ALL SELECT 'a token' FROM token WHERE uuid = ?1
     UNION ALL SELECT 'something that a task is creating' FROM claim WHERE object = ?1";

impl View<'_> {
    /// Refuses a UUID that something has.
    pub fn check_uuid_free(&self, uuid: Uuid) -> Result<(), Problem> {
        let taken: Option<String> = self.row(TAKEN, [Id(uuid)], |row| row.get(0))?;
        let Some(what) = taken else { return Ok(()) };
        Err(Problem::new(Code::Exists, format!("the UUID {uuid} is taken by {what}"))
            .field("uuid")
            .advise("leave out the UUID, or choose a random one"))
    }
}

impl Tx<'_> {
    /// Keeps a UUID that a client has chosen for what a task creates, until the task ends.
    pub fn take_uuid(&mut self, uuid: Uuid, task: Uuid) -> Result<(), Problem> {
        self.check_uuid_free(uuid)?;
        self.claim(uuid, task)
    }

    /// Keeps the UUID that was recorded for a backup's snapshot ([`Tx::add_backup_snapshot`]) until the task that takes
    /// it ends.
    pub fn take_backup_uuid(&mut self, uuid: Uuid, task: Uuid) -> Result<(), Problem> {
        match self.find_backup_snapshot(uuid)? {
            Some(_) => self.claim(uuid, task),
            None => Err(Problem::new(Code::State, format!("the backup that snapshot {uuid} is taken for has ended"))),
        }
    }
}
