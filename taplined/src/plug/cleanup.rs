//! Removes what the process of a VBD leaves when it has ended: sockets, statistics, nodes in xenstore, and at last the
//! lease.

use api::{Problem, Vbd};
use uuid::Uuid;

use super::xen_disk::XenDisk;
use crate::catalogue;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::disk::process::DiskProcess;
use crate::task::blocking;

/// Removes the statistics of a VBD whose process has ended.
pub async fn forget_statistics(daemon: &Daemon, vbd: Uuid) {
    // Without a domain there are none.
    if let Ok(Some(disk)) = daemon.catalogue.read(move |view| XenDisk::of(view, &view.vbd(vbd)?)).await {
        disk.forget_statistics().await;
    }
}

/// Removes the remains in xenstore of a VBD that is no longer served. If this fails they do no harm: the next plug
/// reports them.
pub async fn forget(daemon: &Daemon, vbd: Uuid) {
    let found = daemon.catalogue.read(move |view| XenDisk::of(view, &view.vbd(vbd)?)).await;
    let forgotten = match found {
        Ok(Some(disk)) => disk.forget().await,
        // Without a domain there is nothing.
        Ok(None) | Err(_) => Ok(()),
    };
    if let Err(problem) = forgotten {
        tracing::error!(%vbd, "its nodes in xenstore could not be removed: {problem}");
    }
}

/// Ends a process whose plug or restart was given up, and releases everything but the lease.
pub async fn clear(daemon: &Daemon, vbd: Uuid, process: Option<DiskProcess>) -> Result<(), Problem> {
    if let Some(mut process) = process {
        process.kill().await?;
    }
    forget_statistics(daemon, vbd).await;
    let place = DiskPaths::of(&daemon.config, vbd);
    blocking("remove the sockets of a VBD", move || place.remove()).await
}

/// Removes what the process has left, and gives the lease back.
pub async fn clear_and_unplug(daemon: &Daemon, vbd: Uuid, problem: Option<Problem>) -> Result<Vbd, Problem> {
    clear(daemon, vbd, None).await?;
    forget(daemon, vbd).await;
    daemon.disks.open_files.forget(vbd);
    // While it has the lease still: what the next task writes to the image is measured as well.
    if let Ok(Vbd { vdi, mode: api::Mode::ReadWrite, .. }) = daemon.catalogue.read(move |view| view.vbd(vbd)).await {
        daemon.srs.measure_image_of(vdi).await;
    }
    catalogue::record(&daemon.catalogue, move |tx| tx.end_unplug(vbd, problem.as_ref())).await
}
