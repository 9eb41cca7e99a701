//! `/vdis`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{
    ChangesFormat, Problem, Tag, Vdi, VdiChanges, VdiClone, VdiCopy, VdiCreate, VdiExport, VdiImport, VdiPatch,
    VdiReconcile, VdiResize, VdiRevert, VdiSnapshot,
};

const VDIS: &str = "vdis";

impl Client {
    /// Lists all disks, or those of a repository, and those whose name is `matching` or whose UUID starts with it.
    pub async fn vdis(&self, sr: Option<Uuid>, matching: Option<&str>) -> Result<Vec<Vdi>, Problem> {
        self.vdis_tagged(sr, matching, &[]).await
    }

    /// The same of those that have all of these tags.
    pub async fn vdis_tagged(
        &self,
        sr: Option<Uuid>,
        matching: Option<&str>,
        tags: &[Tag],
    ) -> Result<Vec<Vdi>, Problem> {
        self.get(&Target::new(VDIS).query("sr", sr).query("match", matching).queries("tag", tags)).await
    }

    /// Gets a VDI by its UUID.
    pub async fn vdi(&self, uuid: Uuid) -> Result<Vdi, Problem> {
        self.get(&Target::object(VDIS, uuid)).await
    }

    /// Creates an empty disk.
    pub async fn vdi_create(&self, asked: &VdiCreate) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::new(VDIS), asked).await
    }

    /// Creates a disk from a file.
    pub async fn vdi_import(&self, asked: &VdiImport) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::new("vdis/import"), asked).await
    }

    /// Changes a disk.
    pub async fn vdi_set(&self, uuid: Uuid, asked: &VdiPatch) -> Result<Vdi, Problem> {
        self.change(Method::PATCH, &Target::object(VDIS, uuid), asked).await
    }

    /// Grows a VDI; it cannot be made smaller.
    pub async fn vdi_resize(&self, uuid: Uuid, asked: &VdiResize) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "resize"), asked).await
    }

    /// Takes a snapshot, which is returned.
    pub async fn vdi_snapshot(&self, uuid: Uuid, asked: &VdiSnapshot) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "snapshot"), asked).await
    }

    /// Creates a clone, which is returned.
    pub async fn vdi_clone(&self, uuid: Uuid, asked: &VdiClone) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "clone"), asked).await
    }

    /// Reverts a disk to a snapshot.
    pub async fn vdi_revert(&self, uuid: Uuid, asked: &VdiRevert) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "revert"), asked).await
    }

    /// Copies a disk; returns the copy.
    pub async fn vdi_copy(&self, uuid: Uuid, asked: &VdiCopy) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "copy"), asked).await
    }

    /// Exports a disk to a file.
    pub async fn vdi_export(&self, uuid: Uuid, asked: &VdiExport) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "export"), asked).await
    }

    /// Shortens a disk's backing chain.
    pub async fn vdi_merge(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "merge"), &()).await
    }

    /// Destroys a disk; with `dry_run`, only reports what that would do.
    pub async fn vdi_destroy(&self, uuid: Uuid, dry_run: bool) -> Result<Answer<serde_json::Value>, Problem> {
        let target = Target::object(VDIS, uuid).query("dry_run", dry_run.then_some(true));
        self.begin(Method::DELETE, &target, &()).await
    }

    /// Destroys the data of a snapshot, which stays as the beginning of changes; returns it.
    pub async fn vdi_data_destroy(&self, uuid: Uuid) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "data-destroy"), &()).await
    }

    /// Records which blocks of a disk change from now on.
    pub async fn vdi_cbt_enable(&self, uuid: Uuid) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "cbt-enable"), &()).await
    }

    /// Stops recording which blocks of a disk change.
    pub async fn vdi_cbt_disable(&self, uuid: Uuid) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "cbt-disable"), &()).await
    }

    /// Lists the parts of a disk that may differ from an earlier snapshot.
    pub async fn vdi_changes(&self, to: Uuid, from: Uuid, format: ChangesFormat) -> Result<VdiChanges, Problem> {
        let format = match format {
            ChangesFormat::Extents => "extents",
            ChangesFormat::Xapi => "xapi",
        };
        self.get(&Target::verb(VDIS, to, "changes").query("from", Some(from)).query("format", Some(format))).await
    }

    /// Resolves a diverged disk, whose running process and catalogue entry disagree.
    pub async fn vdi_reconcile(&self, uuid: Uuid, asked: &VdiReconcile) -> Result<Vdi, Problem> {
        self.change(Method::POST, &Target::verb(VDIS, uuid, "reconcile"), asked).await
    }
}
