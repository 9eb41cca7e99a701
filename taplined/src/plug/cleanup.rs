//! Cleanup after the process of a VBD has exited: sockets, statistics, xenstore nodes, and finally the lease.

use api::{Problem, Vbd};
use uuid::Uuid;

use super::xen_disk::XenDisk;
use crate::catalogue;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::disk::process::DiskProcess;
use crate::task::blocking;

/// Removes the statistics of a VBD whose process has exited.
pub async fn forget_statistics(daemon: &Daemon, vbd: Uuid) {
    // Without a domain there are none.
    if let Ok(Some(disk)) = daemon.catalogue.read(move |view| XenDisk::of(view, &view.vbd(vbd)?)).await {
        disk.forget_statistics().await;
    }
}

/// Removes the xenstore nodes of a VBD that is no longer served. Failure is harmless: the next plug reports them.
pub async fn forget(daemon: &Daemon, vbd: Uuid) {
    let found = daemon.catalogue.read(move |view| XenDisk::of(view, &view.vbd(vbd)?)).await;
    let forgotten = match found {
        Ok(Some(disk)) => disk.forget().await,
        // Without a domain there are none.
        Ok(None) | Err(_) => Ok(()),
    };
    if let Err(problem) = forgotten {
        tracing::error!(%vbd, "its nodes in xenstore could not be removed: {problem}");
    }
}

/// Kills the process of an aborted plug or restart, and releases everything except the lease.
pub async fn clear(daemon: &Daemon, vbd: Uuid, process: Option<DiskProcess>) -> Result<(), Problem> {
    if let Some(mut process) = process {
        process.kill().await?;
    }
    forget_statistics(daemon, vbd).await;
    let place = DiskPaths::of(&daemon.config, vbd);
    blocking("remove the sockets of a VBD", move || place.remove()).await
}

/// Cleans up after the process, and releases the lease.
pub async fn clear_and_unplug(daemon: &Daemon, vbd: Uuid, problem: Option<Problem>) -> Result<Vbd, Problem> {
    clear(daemon, vbd, None).await?;
    forget(daemon, vbd).await;
    daemon.disks.open_files.forget(vbd);
    // Measured before the lease is released: the next task that writes to the image measures again.
    if let Ok(Vbd { vdi, mode: api::Mode::ReadWrite, .. }) = daemon.catalogue.read(move |view| view.vbd(vbd)).await {
        daemon.srs.measure_image_of(vdi).await;
    }
    catalogue::record(&daemon.catalogue, move |tx| tx.end_unplug(vbd, problem.as_ref())).await
}

/// Removes an unplugged VBD.
pub async fn remove(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    daemon.catalogue.write(move |tx| tx.remove_vbd(vbd)).await?;
    remove_logs(daemon, vbd);
    Ok(())
}

/// Removes the logs of a VBD that is gone.
pub fn remove_logs(daemon: &Daemon, vbd: Uuid) {
    if let Err(problem) = DiskPaths::of(&daemon.config, vbd).remove_logs() {
        tracing::warn!("{problem}");
    }
}
