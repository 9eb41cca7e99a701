//! Domains of Xen: found by the VM that they are, followed to their end, and what the disks of one need.
//!
//! A domain is found by its identity, which is the VM's: nothing of it is recorded that a crash of the daemon could
//! lose. Its number, which people and the store know it by, is the VM's handle.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use ::vm::xen::departures::Departures;
use ::vm::xen::disks::Guest;
use ::vm::xen::lend::{Lent, lend};
use ::vm::xen::machine::{self, Status, XenDomain};
use ::vm::xen::statistics::{self, Files, Statistics};
use ::vm::xen::vdev::Vdev;
use ::vm::xen::xl::Xl;
use api::{AbsolutePath, Code, Problem, Transport, Vbd};
use repo::View;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use uuid::Uuid;

use super::machine::by_xen;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::task;

/// Before a store is tried again that was lost.
const TO_COME_BACK: Duration = Duration::from_secs(10);

/// A disk of a domain.
#[derive(Clone, Debug)]
pub struct Disk {
    vm: Uuid,
    guest: Guest,
    vdev: Vdev,
}

/// The toolstack of this host.
pub fn xl(config: &Config) -> Xl {
    Xl::of(&config.xl_program)
}

/// The domain of a VM, if there is one.
pub async fn find(daemon: &Daemon, vm: Uuid) -> Result<Option<XenDomain>, Problem> {
    let xl = xl(&daemon.config);
    blocking(vm, move || XenDomain::find(&xl, &vm.to_string())).await
}

/// Ends a domain.
pub async fn destroy(vm: Uuid, domain: XenDomain) -> Result<(), Problem> {
    blocking(vm, move || domain.end()).await
}

/// The device of a VBD in the domain of its VM; `None` if it is served otherwise. Without a domain it cannot be used.
pub fn disk(view: &View<'_>, vbd: &Vbd) -> Result<Option<Disk>, Problem> {
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
    Ok(Some(Disk { vm, guest, vdev: Vdev::of_position(vbd.position) }))
}

impl Disk {
    /// How the disk process calls it.
    pub fn word(&self) -> String {
        format!("{}/{}", self.guest.domain, self.vdev)
    }

    /// Where it is served: our end's node in the store.
    pub async fn node(&self) -> Result<AbsolutePath, Problem> {
        let this = self.clone();
        let node =
            blocking(self.vm, move || Ok(this.guest.device(&mut machine::store()?, this.vdev)?.backend())).await?;
        node.try_into().map_err(|why: String| Problem::new(Code::Internal, format!("a node in the store: {why}")))
    }

    /// The descriptors that its process needs and cannot open.
    pub async fn lend(&self) -> Result<Lent, Problem> {
        let domain = self.guest.domain;
        blocking(self.vm, move || lend(domain)).await
    }

    /// Where tools look for the statistics of its process.
    fn statistics(&self) -> Statistics {
        Statistics::of(Path::new(statistics::PLACE), self.guest.domain, self.vdev)
    }

    /// Creates the statistics files for the process with this pid. It serves even if that fails.
    pub async fn make_statistics(&self, pid: u32) -> Option<Files> {
        let this = self.statistics();
        let made = task::blocking("create files for a disk's statistics", move || {
            this.make(pid)
                .map_err(|error| Problem::failed(format_args!("create files in {}", statistics::PLACE), error))
        });
        made.await.map_err(|problem| tracing::warn!(vm = %self.vm, "a disk has no statistics: {problem}")).ok()
    }

    /// Removes the statistics of a process that has ended.
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
        blocking(self.vm, move || this.guest.is_done_with(&mut machine::store()?, this.vdev)).await
    }

    /// Removes the remains of the device from xenstore, when no process serves it any more.
    pub async fn forget(&self) -> Result<(), Problem> {
        let this = self.clone();
        blocking(self.vm, move || this.guest.forget(&mut machine::store()?, this.vdev)).await
    }
}

async fn blocking<T: Send + 'static>(
    vm: Uuid,
    work: impl FnOnce() -> Result<T, control::Error> + Send + 'static,
) -> Result<T, Problem> {
    task::blocking(format!("query Xen about VM {vm}"), move || work().map_err(by_xen(vm))).await
}

/// Watches a domain; the value becomes true at its end. Stops when there is no receiver.
pub fn follow(vm: Uuid, domain: XenDomain) -> watch::Receiver<bool> {
    let (ended, listens) = watch::channel(false);
    tokio::spawn(async move {
        loop {
            let followed = tokio::select! {
                () = ended.closed() => return,
                followed = to_the_end(vm, &domain) => followed,
            };
            match followed {
                Ok(()) => {
                    ended.send_replace(true);
                    return;
                }
                Err(problem) => tracing::error!(%vm, "cannot watch for its end at the moment: {problem}"),
            }
            tokio::time::sleep(TO_COME_BACK).await;
        }
    });
    listens
}

/// Waits until a domain has ended. It is only checked when some domain has ended.
async fn to_the_end(vm: Uuid, domain: &XenDomain) -> Result<(), Problem> {
    let mut departures = blocking(vm, Departures::watch).await?;
    let listen = |error: std::io::Error| Problem::failed("watch xenstore", error);
    let descriptor = departures.as_fd().try_clone_to_owned().map_err(listen)?;
    // It is deprecated for types that may return another descriptor each time; its replacement is unsafe for their
    // sake.
    #[allow(deprecated, reason = "an OwnedFd has one descriptor")]
    let readable = AsyncFd::with_interest(descriptor, Interest::READABLE).map_err(listen)?;
    loop {
        // Later notifications are received in the next iteration.
        readable.readable().await.map_err(listen)?.clear_ready();
        if departures.take().map_err(by_xen(vm))? {
            let domain = domain.clone();
            match blocking(vm, move || domain.status()).await? {
                Status::Running | Status::Paused => {}
                Status::Down(_) | Status::Gone => return Ok(()),
            }
        }
    }
}
