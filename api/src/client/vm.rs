//! `/vms`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{Problem, Vm, VmCreate, VmPatch, VmShutdown};

const VMS: &str = "vms";

impl Client {
    /// The machines: all, or those whose name `matching` is or whose UUID begins with it.
    pub async fn vms(&self, matching: Option<&str>) -> Result<Vec<Vm>, Problem> {
        self.get(&Target::new(VMS).query("match", matching)).await
    }

    /// A machine.
    pub async fn vm(&self, uuid: Uuid) -> Result<Vm, Problem> {
        self.get(&Target::object(VMS, uuid)).await
    }

    /// Makes one, which does not run.
    pub async fn vm_create(&self, asked: &VmCreate) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::new(VMS), asked).await
    }

    /// Changes one.
    pub async fn vm_set(&self, uuid: Uuid, asked: &VmPatch) -> Result<Vm, Problem> {
        self.change(Method::PATCH, &Target::object(VMS, uuid), asked).await
    }

    /// Plugs its disks and starts it.
    pub async fn vm_start(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "start"), &()).await
    }

    /// Ends it.
    pub async fn vm_shutdown(&self, uuid: Uuid, asked: &VmShutdown) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "shutdown"), asked).await
    }

    /// Holds it.
    pub async fn vm_suspend(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "suspend"), &()).await
    }

    /// Lets it go on.
    pub async fn vm_resume(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "resume"), &()).await
    }

    /// Removes it and its block devices; its disks stay.
    pub async fn vm_destroy(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::object(VMS, uuid), &()).await
    }
}
