//! `/vms`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client, Stream};
use crate::{CONSOLE_PROTOCOL, Problem, Vm, VmCreate, VmPatch, VmShutdown};

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
    pub async fn vm_pause(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "pause"), &()).await
    }

    /// Resumes a paused machine.
    pub async fn vm_resume(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "resume"), &()).await
    }

    /// Gets what a machine's guest has written to its console lately.
    pub async fn vm_console_log(&self, uuid: Uuid) -> Result<Vec<u8>, Problem> {
        self.bytes(&Target::verb(VMS, uuid, "console")).await
    }

    /// Connects to a machine's console. The last `recent` bytes that its guest has written come first.
    pub async fn vm_console(&self, uuid: Uuid, recent: Option<u32>) -> Result<Stream, Problem> {
        self.upgrade(&Target::verb(VMS, uuid, "console").query("recent", recent), CONSOLE_PROTOCOL).await
    }

    /// Removes a machine and its block devices; its disks stay.
    pub async fn vm_destroy(&self, uuid: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        self.begin(Method::DELETE, &Target::object(VMS, uuid), &()).await
    }
}
