//! `/srs`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{Inventory, Problem, Scan, Sr, SrBelieve, SrCreate, SrFound, SrIntroduce, SrPatch, SrProbe};

const SRS: &str = "srs";

impl Client {
    /// The repositories: all, or those whose name `matching` is or whose UUID begins with it.
    pub async fn srs(&self, matching: Option<&str>) -> Result<Vec<Sr>, Problem> {
        self.get(&Target::new(SRS).query("match", matching)).await
    }

    /// A repository.
    pub async fn sr(&self, uuid: Uuid) -> Result<Sr, Problem> {
        self.get(&Target::object(SRS, uuid)).await
    }

    /// Makes a repository.
    pub async fn sr_create(&self, asked: &SrCreate) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::new(SRS), asked).await
    }

    /// Looks for repositories.
    pub async fn sr_probe(&self, asked: &SrProbe) -> Result<Answer<Vec<SrFound>>, Problem> {
        self.begin(Method::POST, &Target::new("srs/probe"), asked).await
    }

    /// Makes a repository known that exists.
    pub async fn sr_introduce(&self, asked: &SrIntroduce) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::new("srs/introduce"), asked).await
    }

    /// Changes a repository.
    pub async fn sr_set(&self, uuid: Uuid, asked: &SrPatch) -> Result<Sr, Problem> {
        self.change(Method::PATCH, &Target::object(SRS, uuid), asked).await
    }

    /// Makes a repository usable; says whose word counts if it and the catalogue have diverged.
    pub async fn sr_attach(&self, uuid: Uuid, believe: Option<SrBelieve>) -> Result<Answer<Sr>, Problem> {
        let target = Target::verb(SRS, uuid, "attach").query("believe", believe.map(SrBelieve::word));
        self.begin(Method::POST, &target, &()).await
    }

    /// Lets what it lies on go.
    pub async fn sr_detach(&self, uuid: Uuid) -> Result<Answer<Sr>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "detach"), &()).await
    }

    /// What it says of itself.
    pub async fn sr_inventory(&self, uuid: Uuid) -> Result<Inventory, Problem> {
        self.get(&Target::verb(SRS, uuid, "inventory")).await
    }

    /// What the repository at a place says of itself.
    pub async fn sr_inventory_at(&self, asked: &SrProbe) -> Result<Inventory, Problem> {
        self.change(Method::POST, &Target::new("srs/inventory"), asked).await
    }

    /// Looks at all its files.
    pub async fn sr_scan(&self, uuid: Uuid) -> Result<Answer<Scan>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "scan"), &()).await
    }

    /// Makes it unknown, with all that it holds untouched.
    pub async fn sr_forget(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::POST, &Target::verb(SRS, uuid, "forget"), &()).await
    }

    /// Destroys it; with `dry_run`, only tells what that would do.
    pub async fn sr_destroy(&self, uuid: Uuid, dry_run: bool) -> Result<Answer<serde_json::Value>, Problem> {
        let target = Target::object(SRS, uuid).query("dry_run", dry_run.then_some(true));
        self.begin(Method::DELETE, &target, &()).await
    }
}
