//! Snapshots that exist for a backup only.
//!
//! 1. Its UUID is recorded. *If killed before:* nothing has happened.
//! 2. It is taken by the job `vdi-snapshot` or `vm-snapshot`, and read. The commit with the intent of the latter
//!    records the UUIDs of the VDIs, too: they outlive the VM's snapshot if the VM is destroyed. *If killed:* the next
//!    daemon destroys it ([`remove_left_over`]), once that job is done or rolled back, and the VBD through which it was
//!    read is gone.
//! 3. If it was backed up and the changes since can be listed, it becomes the base of the next backup
//!    ([`keep_as_bases`]); in the same commit the base before is recorded as one to be destroyed. *If killed before:*
//!    as above. *After:* the next daemon does what is left.
//! 4. A base loses its data, and others are destroyed; then the record is removed. *If killed between:* the next daemon
//!    finds nothing to do, and removes the record.
//!
//! Invariant: nothing is destroyed but what was created under a UUID that was recorded before, and that is random; and
//! bases without data.

use std::time::Duration;

use api::{BackupBase, Code, Problem, VbdState, VdiState};
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
    snapshot: Option<Uuid>,
}

impl Temporary {
    /// Records a snapshot that is to be taken; returns with it the UUID that it must get.
    pub async fn record(daemon: &Daemon, vm: Option<Uuid>) -> Result<(Temporary, Uuid), Problem> {
        let snapshot = Uuid::new_v4();
        daemon.catalogue.write(move |tx| tx.add_backup_snapshot(snapshot, vm)).await?;
        Ok((Temporary { daemon: daemon.clone(), snapshot: Some(snapshot) }, snapshot))
    }

    /// One that is recorded.
    fn recorded(daemon: &Daemon, snapshot: Uuid) -> Temporary {
        Temporary { daemon: daemon.clone(), snapshot: Some(snapshot) }
    }

    /// Destroys the snapshot, or only its data if it is a base. If that cannot be done now, it is done as soon as
    /// possible.
    pub async fn remove(mut self) {
        // When the daemon stops, the next one does it.
        let Some(snapshot) = self.snapshot.filter(|_| !self.daemon.tasks.is_stopping()) else { return };
        match tokio::time::timeout(READERS_MAX, try_to_remove(&self.daemon, snapshot)).await {
            Ok(Ok(())) => self.snapshot = None,
            Ok(Err(problem)) => tracing::warn!(%snapshot, "a snapshot for a backup stays: {problem}"),
            Err(_) => tracing::info!(%snapshot, "a snapshot for a backup is still being read"),
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
async fn remove(daemon: Daemon, snapshot: Uuid) {
    let mut rest = REST;
    while !daemon.tasks.is_stopping() {
        match try_to_remove(&daemon, snapshot).await {
            Ok(()) => return,
            Err(_) if daemon.tasks.is_stopping() => return,
            Err(problem) => {
                tracing::warn!(%snapshot, "a snapshot for a backup could not be destroyed: {problem}; trying again");
                tokio::time::sleep(rest).await;
                rest = rest.saturating_mul(2).min(REST_MAX);
            }
        }
    }
}

async fn try_to_remove(daemon: &Daemon, snapshot: Uuid) -> Result<(), Problem> {
    loop {
        let found = daemon.catalogue.read(move |view| Ok((view.find_backup_snapshot(snapshot)?, view.tasks(true)?)));
        let (Some(recorded), tasks) = found.await? else { return Ok(()) };
        // The job that creates it may not have ended, and would create it after this.
        let is_of = |uuid: Uuid| uuid == snapshot || recorded.disks.contains(&uuid);
        for task in tasks.iter().filter(|task| task.about.iter().any(|about| is_of(about.uuid))) {
            if let Err(problem) = daemon.tasks.success_of(task.uuid).await {
                tracing::debug!(task = %task.uuid, "{problem}");
            }
        }
        destroy(daemon, &recorded).await?;
        let forgotten = daemon.catalogue.write(move |tx| {
            let own = recorded.vm.is_none().then_some(recorded.snapshot);
            for vdi in own.iter().chain(&recorded.disks) {
                // Another backup has become the base after its data was destroyed.
                if tx.find_vdi(*vdi)?.is_some_and(|vdi| vdi.state != VdiState::NoData || !vdi.is_backup_base()) {
                    let what = format!("VDI {vdi} is no longer a base, and is destroyed next");
                    return Err(Problem::new(Code::Busy, what));
                }
            }
            tx.forget_backup_snapshot(&recorded)
        });
        // The job may have begun since the record was read.
        if forgotten.await? {
            return Ok(());
        }
    }
}

async fn destroy(daemon: &Daemon, BackupSnapshot { snapshot, vm, disks }: &BackupSnapshot) -> Result<(), Problem> {
    let (snapshot, Some(vm)) = (*snapshot, *vm) else { return destroy_vdi(daemon, *snapshot).await };
    if daemon.catalogue.read(move |view| view.find_vm_snapshot(snapshot)).await?.is_some() {
        for vdi in disks {
            until_unread(daemon, *vdi).await?;
        }
        let task = vm::destroy_snapshot(daemon, vm, snapshot).await?;
        daemon.tasks.success_of(task.uuid).await?;
    }
    // Those that are left: the VM was destroyed, and its snapshot with it.
    for vdi in disks {
        destroy_vdi(daemon, *vdi).await?;
    }
    Ok(())
}

async fn destroy_vdi(daemon: &Daemon, snapshot: Uuid) -> Result<(), Problem> {
    until_unread(daemon, snapshot).await?;
    // It may have become a base meanwhile, or be one no longer.
    let Some(vdi) = daemon.catalogue.read(move |view| view.find_vdi(snapshot)).await? else { return Ok(()) };
    let task = match (vdi.is_backup_base(), vdi.state) {
        (true, VdiState::NoData) => return Ok(()),
        (true, _) => begin::data_destroy(daemon, snapshot).await?,
        (false, _) => begin::destroy(daemon, snapshot).await?,
    };
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

/// Has snapshots that were backed up become the bases of the next backups, where the changes since can be listed; those
/// of a VM together with its snapshot `of_vm`, which ends with that. Returns the bases before, and the snapshots that
/// are on their own now: all of them are to be removed.
pub async fn keep_as_bases(
    daemon: &Daemon,
    made: Vec<(Uuid, BackupBase)>,
    of_vm: Option<Uuid>,
) -> Result<Vec<Temporary>, Problem> {
    let kept = daemon.catalogue.write(move |tx| {
        let mut is_any_mapped = false;
        for (snapshot, _) in &made {
            is_any_mapped |= tx.vdi(*snapshot)?.cbt.is_some_and(|tracking| !tracking.maps.is_empty());
        }
        let mut alone = Vec::new();
        if let Some(vm) = of_vm.filter(|_| is_any_mapped) {
            tx.split_backup_snapshot(vm)?;
            alone.extend(made.iter().map(|(snapshot, _)| *snapshot));
        }
        for (snapshot, base) in made {
            match tx.set_backup_base(snapshot, &base) {
                Ok(before) => alone.extend(before),
                // Its next backup reads everything, as without tracking.
                Err(problem) if matches!(problem.code, Code::State | Code::InUse) => {
                    tracing::debug!(%snapshot, "not kept for the next backup: {problem}");
                }
                Err(problem) => return Err(problem),
            }
        }
        Ok(alone)
    });
    Ok(kept.await?.into_iter().map(|snapshot| Temporary::recorded(daemon, snapshot)).collect())
}

/// Destroys what no backup can make use of any more, in the background: bases whose disk, its tracking or the target is
/// gone, and snapshots for backups of which there is no record.
pub async fn sweep(daemon: &Daemon) {
    let swept = async {
        let is_clean = |view: &repo::View<'_>| {
            Ok(view.useless_backup_bases()?.is_empty() && view.stray_backup_snapshots()?.is_empty())
        };
        if daemon.catalogue.read(is_clean).await? {
            return Ok(());
        }
        for snapshot in drop_useless(daemon).await? {
            background::spawn(remove(daemon.clone(), snapshot));
        }
        Ok(())
    };
    let swept: Result<(), Problem> = swept.await;
    swept.unwrap_or_else(|problem| tracing::warn!("snapshots of backups that are of no use stay for now: {problem}"));
}

/// Records that they are to be destroyed; returns them.
async fn drop_useless(daemon: &Daemon) -> Result<Vec<Uuid>, Problem> {
    let dropped = daemon.catalogue.write(|tx| {
        let mut useless = tx.useless_backup_bases()?;
        useless.iter().try_for_each(|snapshot| tx.drop_backup_base(*snapshot))?;
        let stray = tx.stray_backup_snapshots()?;
        stray.iter().try_for_each(|snapshot| tx.add_backup_snapshot(*snapshot, None))?;
        useless.extend(stray);
        Ok(useless)
    });
    dropped.await
}

/// Destroys the snapshots that the previous daemon had for its backups, which have ended with it.
pub async fn remove_left_over(daemon: &Daemon) -> Result<(), Problem> {
    drop_useless(daemon).await?;
    for left in daemon.catalogue.read(|view| view.backup_snapshots()).await? {
        background::spawn(remove(daemon.clone(), left.snapshot));
    }
    Ok(())
}
