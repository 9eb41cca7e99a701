//! `/vms`.

use hyper::Method;
use uuid::Uuid;

use super::target::Target;
use super::{Answer, Client, Stream};
use crate::{
    CONSOLE_PROTOCOL, Problem, Tag, Vm, VmClone, VmCreate, VmPatch, VmRevert, VmShutdown, VmSnapshot, VmSnapshotCreate,
    VmSnapshotPatch,
};

const VMS: &str = "vms";

impl Client {
    /// Lists all machines, or those whose name is `matching` or whose UUID starts with it.
    pub async fn vms(&self, matching: Option<&str>) -> Result<Vec<Vm>, Problem> {
        self.vms_tagged(matching, &[]).await
    }

    /// The same of those that have all of these tags.
    pub async fn vms_tagged(&self, matching: Option<&str>, tags: &[Tag]) -> Result<Vec<Vm>, Problem> {
        self.get(&Target::new(VMS).query("match", matching).queries("tag", tags)).await
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

    /// Saves a machine's memory to a file and ends it.
    pub async fn vm_suspend(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "suspend"), &()).await
    }

    /// Gives up the saved memory of a suspended machine, which is halted then.
    pub async fn vm_drop_memory(&self, uuid: Uuid) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::DELETE, &Target::verb(VMS, uuid, "memory"), &()).await
    }

    /// Takes snapshots of all writable disks of a machine at one moment.
    pub async fn vm_snapshot(&self, uuid: Uuid, asked: &VmSnapshotCreate) -> Result<Answer<VmSnapshot>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "snapshot"), asked).await
    }

    /// Lists the snapshots of a machine.
    pub async fn vm_snapshots(&self, uuid: Uuid, matching: Option<&str>) -> Result<Vec<VmSnapshot>, Problem> {
        self.get(&Target::verb(VMS, uuid, "snapshots").query("match", matching)).await
    }

    /// Changes a snapshot of a machine.
    pub async fn vm_snapshot_set(
        &self,
        vm: Uuid,
        snapshot: Uuid,
        asked: &VmSnapshotPatch,
    ) -> Result<VmSnapshot, Problem> {
        self.change(Method::PATCH, &Target::verb(VMS, vm, &format!("snapshots/{snapshot}")), asked).await
    }

    /// Destroys a snapshot of a machine, and those of its disks.
    pub async fn vm_snapshot_destroy(&self, vm: Uuid, snapshot: Uuid) -> Result<Answer<serde_json::Value>, Problem> {
        let target = Target::verb(VMS, vm, &format!("snapshots/{snapshot}"));
        self.begin(Method::DELETE, &target, &()).await
    }

    /// Reverts all disks of a halted machine to a snapshot of it.
    pub async fn vm_revert(&self, uuid: Uuid, asked: &VmRevert) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "revert"), asked).await
    }

    /// Creates a halted machine with thin clones of the disks of another.
    pub async fn vm_clone(&self, uuid: Uuid, asked: &VmClone) -> Result<Answer<Vm>, Problem> {
        self.begin(Method::POST, &Target::verb(VMS, uuid, "clone"), asked).await
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
