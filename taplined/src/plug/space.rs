//! Learns from a disk that its guest waits for space, and when it continues: over a connection that is idle while
//! nothing changes.

use std::time::Duration;

use api::Problem;
use control::answer::Change;
use control::ask;
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;

/// Pause before a running disk is contacted again after a failure: it may have had too many clients.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// Time limit for a disk to accept a notification.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// A subscription to a disk's events, which dropping it ends.
#[derive(Debug)]
pub struct Subscription(JoinHandle<()>);

impl Drop for Subscription {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Subscribes to the events of a VBD's disk.
pub fn subscribe(daemon: &Daemon, vbd: Uuid) -> Subscription {
    let daemon = daemon.clone();
    Subscription(background::spawn(async move {
        loop {
            // When the disk's supervision ends, so does this.
            if let Err(problem) = receive(&daemon, vbd).await {
                tracing::debug!(%vbd, "{problem}");
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }))
}

async fn receive(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let (now, mut watch) = daemon.disks.watch(vbd).await?;
    record(daemon, vbd, now.full).await?;
    if now.broken {
        record_broken(daemon, vbd).await?;
    }
    log_fatal(vbd, now.fatal);
    while let Some(event) = watch.event().await? {
        match event {
            Change::Full { .. } => record(daemon, vbd, true).await?,
            Change::Resumed { .. } => record(daemon, vbd, false).await?,
            Change::Broken { .. } => record_broken(daemon, vbd).await?,
            Change::Fatal { fatal } => log_fatal(vbd, fatal),
            Change::Other => {}
        }
    }
    Ok(())
}

/// Records that a sync failed, so that the disk refuses to write until another process serves it.
async fn record_broken(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    tracing::error!(%vbd, "a sync failed on its storage: the disk no longer writes");
    daemon.catalogue.write(move |tx| tx.see_vbd(vbd, |seen| seen.broken = true)).await
}

/// Logs that requests crashed several processes of the disk in turn.
fn log_fatal(vbd: Uuid, count: u64) {
    if count > 0 {
        let what = "requests that crashed this disk's processes were failed with an error: see its log";
        tracing::error!(%vbd, count, "{what}");
    }
}

/// Records whether the guest waits for space, if that has changed, and updates its repository.
async fn record(daemon: &Daemon, vbd: Uuid, waits: bool) -> Result<(), Problem> {
    let found = daemon.catalogue.read(move |view| {
        let vbd = view.vbd(vbd)?;
        Ok((vbd.waits_for_space, view.vdi(vbd.vdi)?.sr))
    });
    let (before, sr) = found.await?;
    if before != waits {
        tracing::warn!(%vbd, waits, "its guest started or stopped waiting for space in the repository");
        daemon.catalogue.write(move |tx| tx.set_vbd_waits(vbd, waits)).await?;
    }
    if waits {
        return daemon.srs.reported_full(sr).await;
    }
    if before {
        let others = daemon.catalogue.read(move |view| view.waiting_in_sr(sr)).await?;
        if others.is_empty() {
            daemon.srs.no_longer_full(sr).await;
        }
    }
    Ok(())
}

/// Notifies disks whose guests wait for space that their repository has space. Runs as long as the daemon.
pub async fn notify_of_space(daemon: Daemon, mut relieved: broadcast::Receiver<Uuid>) {
    loop {
        let sr = match relieved.recv().await {
            Ok(sr) => Some(sr),
            // Some notifications were missed: all disks are notified, and those without space keep waiting.
            Err(RecvError::Lagged(_)) => None,
            Err(RecvError::Closed) => return,
        };
        if let Err(problem) = notify(&daemon, sr).await {
            tracing::warn!("disks could not be notified of free space, but will notice it themselves: {problem}");
        }
    }
}

async fn notify(daemon: &Daemon, sr: Option<Uuid>) -> Result<(), Problem> {
    let waiting = daemon.catalogue.read(move |view| match sr {
        Some(sr) => view.waiting_in_sr(sr),
        None => Ok(view.vbds(None, None)?.into_iter().filter(|vbd| vbd.waits_for_space).map(|vbd| vbd.uuid).collect()),
    });
    for vbd in waiting.await? {
        let notified = daemon.disks.ask(vbd, ask::Space {}, NOTIFY_TIMEOUT).await;
        if let Err(problem) = notified {
            tracing::warn!(%vbd, "it could not be notified of free space: {problem}");
        }
    }
    Ok(())
}
