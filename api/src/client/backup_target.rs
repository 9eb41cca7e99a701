//! `/backup-targets`, and backups of VDIs.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{
    BackupPrune, BackupRemove, BackupTarget, BackupTargetAdd, DiskBackup, Problem, Vdi, VdiBackup, VdiRestore,
    VdiRestoreInPlace, Vm, VmBackup, VmRestore, VmRestoreInPlace,
};

const TARGETS: &str = "backup-targets";

impl Client {
    /// Lists the backup targets, or those whose name is `matching` or whose UUID starts with it.
    pub async fn backup_targets(&self, matching: Option<&str>) -> Result<Vec<BackupTarget>, Problem> {
        self.get(&Target::new(TARGETS).query("match", matching)).await
    }

    /// Gets a backup target by its UUID.
    pub async fn backup_target(&self, uuid: Uuid) -> Result<BackupTarget, Problem> {
        self.get(&Target::object(TARGETS, uuid)).await
    }

    /// Registers a backup target.
    pub async fn backup_target_add(&self, asked: &BackupTargetAdd) -> Result<BackupTarget, Problem> {
        self.change(Method::POST, &Target::new(TARGETS), asked).await
    }

    /// Forgets a backup target; what is on it stays.
    pub async fn backup_target_remove(&self, uuid: Uuid) -> Result<(), Problem> {
        self.change(Method::DELETE, &Target::object(TARGETS, uuid), &()).await
    }

    /// Lists the backups on a target, or those of one VDI.
    pub async fn backups(&self, target: Uuid, vdi: Option<Uuid>) -> Result<Vec<DiskBackup>, Problem> {
        self.get(&Target::verb(TARGETS, target, "backups").query("vdi", vdi)).await
    }

    /// Reads and proves everything on a target.
    pub async fn backup_verify(&self, target: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(TARGETS, target, "verify"), &()).await
    }

    /// Removes backups.
    pub async fn backup_remove(
        &self,
        target: Uuid,
        asked: &BackupRemove,
    ) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(TARGETS, target, "remove-backups"), asked).await
    }

    /// Removes superfluous backups.
    pub async fn backup_prune(&self, target: Uuid, asked: &BackupPrune) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(TARGETS, target, "prune"), asked).await
    }

    /// Backs up a machine.
    pub async fn vm_backup(&self, vm: Uuid, asked: &VmBackup) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb("vms", vm, "backup"), asked).await
    }

    /// Restores a backup of a machine to a new one.
    pub async fn vm_restore(&self, target: Uuid, asked: &VmRestore) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(TARGETS, target, "restore-vm"), asked).await
    }

    /// Replaces the contents of the disks of a machine by those of a backup of it.
    pub async fn vm_restore_in_place(&self, vm: Uuid, asked: &VmRestoreInPlace) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb("vms", vm, "restore"), asked).await
    }

    /// Backs a disk up.
    pub async fn vdi_backup(&self, vdi: Uuid, asked: &VdiBackup) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb("vdis", vdi, "backup"), asked).await
    }

    /// Restores a backup to a new disk.
    pub async fn vdi_restore(&self, target: Uuid, asked: &VdiRestore) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(TARGETS, target, "restore"), asked).await
    }

    /// Replaces the contents of a disk by those of a backup.
    pub async fn vdi_restore_in_place(&self, vdi: Uuid, asked: &VdiRestoreInPlace) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb("vdis", vdi, "restore"), asked).await
    }
}
