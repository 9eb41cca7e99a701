//! A VBD's device in the Xen domain of its VM: what its disk process needs, and the cleanup.

use std::path::Path;

use ::vm::xen::disks::Guest;
use ::vm::xen::lend::{Lent, lend};
use ::vm::xen::machine;
use ::vm::xen::statistics::{self, Files, Statistics};
use ::vm::xen::vdev::Vdev;
use api::{AbsolutePath, Code, Problem, Transport, Vbd};
use repo::View;
use uuid::Uuid;

use crate::task;
use crate::vm::domain;

/// The device of a disk in a domain.
#[derive(Clone, Debug)]
pub struct XenDisk {
    vm: Uuid,
    guest: Guest,
    vdev: Vdev,
}

impl XenDisk {
    /// The device of a VBD; `None` if it is not served to Xen. Fails if the VM has no domain.
    pub fn of(view: &View<'_>, vbd: &Vbd) -> Result<Option<XenDisk>, Problem> {
        if vbd.transport != Transport::Blkif {
            return Ok(None);
        }
        let handle = vbd.vm.map(|vm| view.vm(vm).map(|vm| (vm.uuid, vm.handle))).transpose()?;
        let number = handle.and_then(|(vm, handle)| Some((vm, handle?.parse().ok()?)));
        let Some((vm, number)) = number else {
            let what = format!("VBD {} cannot be plugged: its VM is not running, so there is no Xen domain", vbd.uuid);
            return Err(Problem::new(Code::State, what).advise("start the VM, which plugs all its VBDs"));
        };
        let guest = Guest::numbered(number, &vm.to_string());
        Ok(Some(XenDisk { vm, guest, vdev: Vdev::of_position(vbd.position) }))
    }

    /// The device's name on the disk process's command line.
    pub fn word(&self) -> String {
        format!("{}/{}", self.guest.domain, self.vdev)
    }

    /// The xenstore node of our end of the device.
    pub async fn node(&self) -> Result<AbsolutePath, Problem> {
        let this = self.clone();
        let node =
            domain::query(self.vm, move || Ok(this.guest.device(&mut machine::store()?, this.vdev)?.backend())).await?;
        node.try_into().map_err(|why: String| Problem::new(Code::Internal, format!("a node in the store: {why}")))
    }

    /// The descriptors that its process needs and cannot open itself.
    pub async fn lend(&self) -> Result<Lent, Problem> {
        let domain = self.guest.domain;
        domain::query(self.vm, move || lend(domain)).await
    }

    /// The directory in which Xen's tools look for the statistics of its process.
    fn statistics(&self) -> Statistics {
        Statistics::of(Path::new(statistics::PLACE), self.guest.domain, self.vdev)
    }

    /// Creates the statistics files for the process with this pid. Failure is only logged.
    pub async fn make_statistics(&self, pid: u32) -> Option<Files> {
        let this = self.statistics();
        let made = task::blocking("create files for a disk's statistics", move || {
            this.make(pid)
                .map_err(|error| Problem::failed(format_args!("create files in {}", statistics::PLACE), error))
        });
        made.await.map_err(|problem| tracing::warn!(vm = %self.vm, "a disk has no statistics: {problem}")).ok()
    }

    /// Removes the statistics of a process that has exited.
    pub async fn forget_statistics(&self) {
        let this = self.statistics();
        let removed = task::blocking("remove a disk's statistics", move || {
            this.remove_left()
                .map_err(|error| Problem::failed(format_args!("remove files in {}", statistics::PLACE), error))
        });
        if let Err(problem) = removed.await {
            tracing::warn!(vm = %self.vm, "{problem}");
        }
    }

    /// Whether the device is finished, closed by its guest or by the toolstack: its process then exits by itself.
    pub async fn is_done_with(&self) -> Result<bool, Problem> {
        let this = self.clone();
        domain::query(self.vm, move || this.guest.is_done_with(&mut machine::store()?, this.vdev)).await
    }

    /// Removes the device's nodes from xenstore, once no process serves it.
    pub async fn forget(&self) -> Result<(), Problem> {
        let this = self.clone();
        domain::query(self.vm, move || this.guest.forget(&mut machine::store()?, this.vdev)).await
    }
}
