//! `/srs`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{
    Inventory, Problem, Scan, Sr, SrAttach, SrBelieve, SrCalibrate, SrCalibrated, SrCreate, SrFound, SrIntroduce,
    SrPatch, SrProbe, Tag,
};

const SRS: &str = "srs";

impl Client {
    /// Lists all repositories, or those whose name is `matching` or whose UUID starts with it.
    pub async fn srs(&self, matching: Option<&str>) -> Result<Vec<Sr>, Problem> {
        self.srs_tagged(matching, &[]).await
    }

    /// The same of those that have all of these tags.
    pub async fn srs_tagged(&self, matching: Option<&str>, tags: &[Tag]) -> Result<Vec<Sr>, Problem> {
        self.get(&Target::new(SRS).query("match", matching).queries("tag", tags)).await
    }

    /// Gets a repository.
    pub async fn sr(&self, uuid: Uuid) -> Result<Sr, Problem> {
        self.get(&Target::object(SRS, uuid)).await
    }

    /// Creates a repository.
    pub async fn sr_create(&self, asked: &SrCreate) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::new(SRS), asked).await
    }

    /// Looks for repositories on a storage.
    pub async fn sr_probe(&self, asked: &SrProbe) -> Result<Answer<Vec<SrFound>>, Problem> {
        self.begin(Method::POST, &Target::new("srs/probe"), asked).await
    }

    /// Adds an existing repository.
    pub async fn sr_introduce(&self, asked: &SrIntroduce) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::new("srs/introduce"), asked).await
    }

    /// Changes a repository.
    pub async fn sr_set(&self, uuid: Uuid, asked: &SrPatch) -> Result<Sr, Problem> {
        self.change(Method::PATCH, &Target::object(SRS, uuid), asked).await
    }

    /// Attaches a repository; `believe` says which side to keep if it and the catalogue have diverged.
    pub async fn sr_attach(&self, uuid: Uuid, believe: Option<SrBelieve>) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "attach"), &SrAttach { believe }).await
    }

    /// Detaches a repository.
    pub async fn sr_detach(&self, uuid: Uuid) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "detach"), &()).await
    }

    /// Gets a repository's inventory.
    pub async fn sr_inventory(&self, uuid: Uuid) -> Result<Inventory, Problem> {
        self.get(&Target::verb(SRS, uuid, "inventory")).await
    }

    /// Gets the inventory of the repository on a storage.
    pub async fn sr_inventory_at(&self, asked: &SrProbe) -> Result<Inventory, Problem> {
        self.change(Method::POST, &Target::new("srs/inventory"), asked).await
    }

    /// Scans all files of a repository.
    pub async fn sr_scan(&self, uuid: Uuid) -> Result<Answer<Scan>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "scan"), &()).await
    }

    /// Measures which sizes of transfers suit a repository's storage.
    pub async fn sr_calibrate(&self, uuid: Uuid, asked: &SrCalibrate) -> Result<Answer<SrCalibrated>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "calibrate"), asked).await
    }

    /// Forgets what a calibration has found.
    pub async fn sr_policy_forget(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::verb(SRS, uuid, "policy"), &()).await
    }

    /// Forgets a repository; its contents stay untouched.
    pub async fn sr_forget(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "forget"), &()).await
    }

    /// Destroys a repository; with `dry_run`, only reports what that would do.
    pub async fn sr_destroy(&self, uuid: Uuid, dry_run: bool) -> Result<Answer<serde_json::Value>, Problem> {
        let target = Target::object(SRS, uuid).query("dry_run", dry_run.then_some(true));
        self.begin(Method::DELETE, &target, &()).await
    }
}
