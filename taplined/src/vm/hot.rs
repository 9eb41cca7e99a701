//! Hot-plug of disks: attached to a running guest after a plug, and detached from it before an unplug.
//!
//! Invariant: a disk attached to a guest is served for as long as the guest has not released it; only force ends that
//! earlier, and then the guest's I/O to the disk hangs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Code, Power, Problem, Transport, Vbd};
use uuid::Uuid;

use super::guest::Guest;
use super::reach;
use crate::daemon::Daemon;

/// Interval of polling whether a guest has released a disk, while an unplug waits for that.
const LOOK_AFTER: Duration = Duration::from_millis(200);

/// Interval of repeating the request to release a disk: a guest that is still booting has not received it, and QEMU
/// accepts a repetition after five seconds.
const ASK_AGAIN: Duration = Duration::from_secs(6);

/// Checks that the slot of a VBD in its machine is free: a guest may not have released a disk that was unplugged by
/// force.
pub async fn expect_room(daemon: &Daemon, vbd: &Vbd) -> Result<(), Problem> {
    let Some(guest) = expected(daemon, vbd).await? else { return Ok(()) };
    let sought = vbd.clone();
    match guest.run(move |machine| machine.has(&sought)).await? {
        true => {
            Err(Problem::new(Code::InUse, format!("VM {} already has a disk at position {}", guest.vm, vbd.position))
                .advise(
                    "the guest has not released the previous disk; detach it inside the guest, or shut the guest down",
                ))
        }
        false => Ok(()),
    }
}

/// Attaches a served VBD to its guest, if that runs. `again`: the guest may still have the device, and only waits for
/// it.
pub async fn attach(daemon: &Daemon, vbd: Uuid, again: bool) -> Result<(), Problem> {
    let vbd = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
    let Some(guest) = expected(daemon, &vbd).await? else { return Ok(()) };
    let config = daemon.config.clone();
    let plugged = guest.run(move |machine| match again && machine.has(&vbd)? {
        true => Ok(()),
        false => machine.plug(&config, &vbd),
    });
    plugged.await
}

/// Makes the guest release a VBD, however long it takes.
pub async fn detach(daemon: &Daemon, vbd: &Vbd) -> Result<(), Problem> {
    let mut requested: Option<Instant> = None;
    while let Some(guest) = found(daemon, vbd) {
        let ask = requested.is_none_or(|requested| requested.elapsed() >= ASK_AGAIN);
        let sought = vbd.clone();
        let released = guest.run(move |machine| {
            if ask {
                machine.begin_unplug(&sought)?;
            }
            machine.finish_unplug(&sought)
        });
        if ask {
            requested = Some(Instant::now());
        }
        match released.await {
            Ok(true) => return Ok(()),
            Ok(false) => tokio::time::sleep(LOOK_AFTER).await,
            // All connections closed with QEMU.
            Err(_) if tokio::time::timeout(LOOK_AFTER, guest.ended()).await.is_ok() => return Ok(()),
            // QEMU may still forward the request, and the guest release the disk: the next response tells.
            Err(late) if late.code == Code::Timeout => tracing::warn!(vbd = %vbd.uuid, "{late}"),
            Err(problem) => return Err(problem),
        }
    }
    Ok(())
}

/// Requests the guest to release a VBD that is removed in any case. It may still do so later.
pub async fn request_release(daemon: &Daemon, vbd: &Vbd) {
    let Some(guest) = found(daemon, vbd) else { return };
    let sought = vbd.clone();
    if let Err(problem) = guest.run(move |machine| machine.begin_unplug(&sought)).await {
        tracing::warn!(vbd = %vbd.uuid, "its guest could not be requested to release it: {problem}");
    }
}

/// Whether the guest waits for I/O of a VBD that QEMU no longer forwards.
pub async fn has_lost(daemon: &Daemon, vbd: &Vbd) -> Result<bool, Problem> {
    let Some(guest) = found(daemon, vbd) else { return Ok(false) };
    let sought = vbd.clone();
    guest.run(move |machine| machine.has_lost(&sought)).await
}

/// The machine that has a VBD, if it runs and is reachable.
fn found(daemon: &Daemon, vbd: &Vbd) -> Option<Arc<Guest>> {
    vbd.vm.filter(|_| vbd.transport != Transport::Nbd).and_then(|vm| daemon.vms.guest(vm))
}

/// The machine that should have a VBD, if it runs; fails if it is unreachable.
async fn expected(daemon: &Daemon, vbd: &Vbd) -> Result<Option<Arc<Guest>>, Problem> {
    let Some(vm) = vbd.vm.filter(|_| vbd.transport != Transport::Nbd) else { return Ok(None) };
    match daemon.catalogue.read(move |view| view.vm(vm)).await?.power {
        Power::Running | Power::Paused => reach::reach(daemon, vm).await.map(Some),
        Power::Halted | Power::Starting | Power::Stopping | Power::Suspended => Ok(daemon.vms.guest(vm)),
    }
}
