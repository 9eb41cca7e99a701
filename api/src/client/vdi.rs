//! `/vdis`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{
    Problem, Vdi, VdiClone, VdiCopy, VdiCreate, VdiExport, VdiImport, VdiPatch, VdiReconcile, VdiResize, VdiRevert,
    VdiSnapshot,
};

const VDIS: &str = "vdis";

impl Client {
    /// The disks: all, or those of a repository, and those whose name `matching` is or whose UUID begins with it.
    pub async fn vdis(&self, sr: Option<Uuid>, matching: Option<&str>) -> Result<Vec<Vdi>, Problem> {
        self.get(&Target::new(VDIS).query("sr", sr).query("match", matching)).await
    }

    /// A disk.
    pub async fn vdi(&self, uuid: Uuid) -> Result<Vdi, Problem> {
        self.get(&Target::object(VDIS, uuid)).await
    }

    /// Makes an empty disk.
    pub async fn vdi_create(&self, asked: &VdiCreate) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::new(VDIS), asked).await
    }

    /// Makes a disk of a file.
    pub async fn vdi_import(&self, asked: &VdiImport) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::new("vdis/import"), asked).await
    }

    /// Changes a disk.
    pub async fn vdi_set(&self, uuid: Uuid, asked: &VdiPatch) -> Result<Vdi, Problem> {
        self.change(Method::PATCH, &Target::object(VDIS, uuid), asked).await
    }

    /// Lets it grow.
    pub async fn vdi_resize(&self, uuid: Uuid, asked: &VdiResize) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "resize"), asked).await
    }

    /// Keeps its state; the answer is the snapshot.
    pub async fn vdi_snapshot(&self, uuid: Uuid, asked: &VdiSnapshot) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "snapshot"), asked).await
    }

    /// Makes one that begins with its state; the answer is the clone.
    pub async fn vdi_clone(&self, uuid: Uuid, asked: &VdiClone) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "clone"), asked).await
    }

    /// Gives it the state of a snapshot.
    pub async fn vdi_revert(&self, uuid: Uuid, asked: &VdiRevert) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "revert"), asked).await
    }

    /// Copies it; the answer is the copy.
    pub async fn vdi_copy(&self, uuid: Uuid, asked: &VdiCopy) -> Result<Answer<Vdi>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "copy"), asked).await
    }

    /// Writes it into a file.
    pub async fn vdi_export(&self, uuid: Uuid, asked: &VdiExport) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "export"), asked).await
    }

    /// Makes fewer images of those that it consists of.
    pub async fn vdi_merge(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(VDIS, uuid, "merge"), &()).await
    }

    /// Destroys it; with `dry_run`, only tells what that would do.
    pub async fn vdi_destroy(&self, uuid: Uuid, dry_run: bool) -> Result<Answer<serde_json::Value>, Problem> {
        let target = Target::object(VDIS, uuid).query("dry_run", dry_run.then_some(true));
        self.begin(Method::DELETE, &target, &()).await
    }

    /// Decides what it is, when its running disk and the catalogue do not say the same.
    pub async fn vdi_reconcile(&self, uuid: Uuid, asked: &VdiReconcile) -> Result<Vdi, Problem> {
        self.change(Method::POST, &Target::verb(VDIS, uuid, "reconcile"), asked).await
    }
}
