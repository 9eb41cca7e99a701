//! `/vms`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client};
use crate::{Problem, Vm, VmCreate, VmPatch, VmShutdown};

const VMS: &str = "vms";

impl Client {
    /// Lists all machines, or those whose name is `matching` or whose UUID starts with it.
    pub async fn vms(&self, matching: Option<&str>) -> Result<Vec<Vm>, Problem> {
        self.get(&Target::new(VMS).query("match", matching)).await
    }

    /// Gets a machine.
    pub async fn vm(&self, uuid: Uuid) -> Result<Vm, Problem> {
        self.get(&Target::object(VMS, uuid)).await
    }

    /// Creates a machine, which is halted.
    pub async fn vm_create(&self, asked: &VmCreate) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::new(VMS), asked).await
    }

    /// Changes a machine.
    pub async fn vm_set(&self, uuid: Uuid, asked: &VmPatch) -> Result<Vm, Problem> {
        self.change(Method::PATCH, &Target::object(VMS, uuid), asked).await
    }

    /// Plugs a machine's disks and starts it.
    pub async fn vm_start(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "start"), &()).await
    }

    /// Shuts a machine down.
    pub async fn vm_shutdown(&self, uuid: Uuid, asked: &VmShutdown) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "shutdown"), asked).await
    }

    /// Pauses a machine.
    pub async fn vm_suspend(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "suspend"), &()).await
    }

    /// Resumes a paused machine.
    pub async fn vm_resume(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "resume"), &()).await
    }

    /// Removes a machine and its block devices; its disks stay.
    pub async fn vm_destroy(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::object(VMS, uuid), &()).await
    }
}
