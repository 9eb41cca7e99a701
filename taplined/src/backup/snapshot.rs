//! Snapshots that exist for a backup only.
//!
//! 1. Its UUID is recorded. *If killed before:* nothing has happened.
//! 2. It is taken by the job `vdi-snapshot` or `vm-snapshot`, and read. *If killed:* the next daemon destroys it
//!    ([`remove_left_over`]), once that job is done or rolled back, and the VBD through which it was read is gone.
//! 3. It is destroyed, then its record. *If killed between:* the next daemon finds no snapshot, and removes the record.
//!
//! Invariant: nothing is destroyed but what was created under a UUID that was recorded before, and that is random.

use std::time::Duration;

use api::{Problem, VbdState};
use repo::catalogue::BackupSnapshot;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::vdi::begin;
use crate::vm;

/// The first and the longest pause before another attempt to destroy a snapshot.
const REST: Duration = Duration::from_secs(5);
const REST_MAX: Duration = Duration::from_secs(300);

/// How long a task waits for other readers of its snapshot. After that it is destroyed in the background.
const READERS_MAX: Duration = Duration::from_secs(30);

/// A recorded snapshot, whether it exists yet or not. It is destroyed when this is dropped.
#[derive(Debug)]
pub struct Temporary {
    daemon: Daemon,
    snapshot: Option<BackupSnapshot>,
}

impl Temporary {
    /// Records a snapshot that is to be taken; returns with it the UUID that it must get.
    pub async fn record(daemon: &Daemon, vm: Option<Uuid>) -> Result<(Temporary, Uuid), Problem> {
        let snapshot = BackupSnapshot { snapshot: Uuid::new_v4(), vm };
        daemon.catalogue.write(move |tx| tx.add_backup_snapshot(snapshot)).await?;
        Ok((Temporary { daemon: daemon.clone(), snapshot: Some(snapshot) }, snapshot.snapshot))
    }

    /// Destroys the snapshot, if it exists. If that cannot be done now, it is done as soon as possible.
    pub async fn remove(mut self) {
        // When the daemon stops, the next one does it.
        let Some(snapshot) = self.snapshot.filter(|_| !self.daemon.tasks.is_stopping()) else { return };
        match tokio::time::timeout(READERS_MAX, try_to_remove(&self.daemon, snapshot)).await {
            Ok(Ok(())) => self.snapshot = None,
            Ok(Err(problem)) => {
                tracing::warn!(snapshot = %snapshot.snapshot, "a snapshot for a backup stays: {problem}")
            }
            Err(_) => tracing::info!(snapshot = %snapshot.snapshot, "a snapshot for a backup is still being read"),
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(snapshot) = self.snapshot.take() {
            background::spawn(remove(self.daemon.clone(), snapshot));
        }
    }
}

/// Destroys a snapshot, however often that must be tried. When the daemon stops, the next one does it.
async fn remove(daemon: Daemon, snapshot: BackupSnapshot) {
    let mut rest = REST;
    while !daemon.tasks.is_stopping() {
        match try_to_remove(&daemon, snapshot).await {
            Ok(()) => return,
            Err(_) if daemon.tasks.is_stopping() => return,
            Err(problem) => {
                let snapshot = snapshot.snapshot;
                tracing::warn!(%snapshot, "a snapshot for a backup could not be destroyed: {problem}; trying again");
                tokio::time::sleep(rest).await;
                rest = rest.saturating_mul(2).min(REST_MAX);
            }
        }
    }
}

async fn try_to_remove(daemon: &Daemon, BackupSnapshot { snapshot, vm }: BackupSnapshot) -> Result<(), Problem> {
    // The task that takes it may not have ended, and would create it after this.
    let tasks = daemon.catalogue.read(|view| view.tasks(true)).await?;
    for task in tasks.iter().filter(|task| task.about.iter().any(|about| about.uuid == snapshot)) {
        if let Err(problem) = daemon.tasks.success_of(task.uuid).await {
            tracing::debug!(task = %task.uuid, "{problem}");
        }
    }
    match vm {
        None => destroy_vdi(daemon, snapshot).await?,
        Some(vm) => {
            let find = move |view: &repo::View<'_>| view.find_vm_snapshot(snapshot);
            if let Some(found) = daemon.catalogue.read(find).await? {
                for vdi in found.disks.iter().filter_map(|disk| disk.snapshot) {
                    until_unread(daemon, vdi).await?;
                }
                let task = vm::destroy_snapshot(daemon, vm, snapshot).await?;
                daemon.tasks.success_of(task.uuid).await?;
            }
        }
    }
    daemon.catalogue.write(move |tx| tx.forget_backup_snapshot(snapshot)).await
}

async fn destroy_vdi(daemon: &Daemon, snapshot: Uuid) -> Result<(), Problem> {
    if daemon.catalogue.read(move |view| view.find_vdi(snapshot)).await?.is_none() {
        return Ok(());
    }
    until_unread(daemon, snapshot).await?;
    let task = begin::destroy(daemon, snapshot).await?;
    daemon.tasks.success_of(task.uuid).await.map(drop)
}

/// Waits until the VBDs are gone through which a VDI was read.
async fn until_unread(daemon: &Daemon, vdi: Uuid) -> Result<(), Problem> {
    let mut events = daemon.catalogue.subscribe();
    let is_read = move |view: &repo::View<'_>| {
        let vbds = view.vbds(None, Some(vdi))?;
        Ok(vbds.iter().any(|vbd| vbd.for_nbd_address || vbd.state == VbdState::Unplugging))
    };
    while daemon.catalogue.read(is_read).await? {
        // An event that was missed is no end: the state is read again.
        drop(events.recv().await);
    }
    Ok(())
}

/// Destroys the snapshots that the previous daemon had for its backups, which have ended with it.
pub async fn remove_left_over(daemon: &Daemon) -> Result<(), Problem> {
    for snapshot in daemon.catalogue.read(|view| view.backup_snapshots()).await? {
        background::spawn(remove(daemon.clone(), snapshot));
    }
    Ok(())
}
