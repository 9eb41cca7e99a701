//! Attaches and detaches repositories, reattaches them when the daemon starts, and retries lost ones.
//!
//! Invariant: a repository whose directory is open here has the expected label and is locked; a detached one is not
//! open, not locked, and not mounted by us.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{AbsolutePath, Code, Problem, Sr, SrBelieve, SrSource, SrState, Storage};
use repo::driver::{self, Attached, Directory};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::take_over::Before;
use super::{Srs, inventory};
use crate::daemon::Daemon;

/// How long current users of the directory may take to release it during a detach. They are about to, because no disk
/// is plugged and no task is running.
const TO_LET_GO: Duration = Duration::from_secs(10);

/// Interval of checking this.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The storage on which the directory of a repository is.
pub fn storage_of(path: &Path) -> Result<Storage, Problem> {
    let found = path.metadata().and_then(|metadata| stats::storage_of(&metadata, path));
    let found =
        found.map_err(|error| Problem::failed(format_args!("find the storage of {}", path.display()), error))?;
    Ok(Storage { id: found.id, name: found.name })
}

impl Srs {
    /// Opens a repository at its source. If that fails, a mount made for it is unmounted.
    pub(super) async fn open_it(&self, sr: &Sr) -> Result<Attached, Problem> {
        let (source, uuid) = (sr.source.clone(), sr.uuid);
        let opened = match self.places.find(sr.uuid, &sr.source).await {
            Ok(path) => {
                let attach = move || {
                    let mut attached = driver::attach(&path, &source, uuid)?;
                    attached.variant.device = storage_of(path.as_path()).ok();
                    Ok(attached)
                };
                self.patience.ask(uuid, "attach", attach).await
            }
            Err(problem) => Err(problem),
        };
        if opened.is_err() {
            self.leave_place(sr).await;
        }
        opened
    }

    /// Unmounts a repository that is no longer needed; a failure is logged, and the mount is found again later.
    pub(super) async fn leave_place(&self, sr: &Sr) {
        if let Err(problem) = self.places.leave(sr.uuid, &sr.source).await {
            tracing::warn!(sr = %sr.uuid, "it could not be unmounted: {problem}");
        }
    }

    /// Makes the directory of an open repository available.
    pub(super) fn keep(&self, uuid: Uuid, directory: Arc<Directory>) {
        self.open().insert(uuid, directory);
    }

    /// Attaches a repository; idempotent.
    pub async fn attach(&self, uuid: Uuid) -> Result<(), Problem> {
        self.attach_as(uuid, None, false).await.map(drop)
    }

    /// Attaches a repository, and keeps one side if it and the catalogue have diverged. If the catalogue was older
    /// than the repository and `outdated` is set, its unfinished tasks there are ended, and returned, to be released.
    pub async fn attach_as(
        &self,
        uuid: Uuid,
        believe: Option<SrBelieve>,
        outdated: bool,
    ) -> Result<Vec<Uuid>, Problem> {
        let sr = self.catalogue.read(move |view| view.sr(uuid)).await?;
        if self.open().contains_key(&uuid) {
            return Ok(Vec::new());
        }
        let Attached { directory, variant } = self.open_it(&sr).await?;
        let directory = Arc::new(directory);
        if !variant.read_only && !matches!(sr.source, SrSource::Iso { .. }) {
            self.clear(&sr, &directory).await;
        }
        let examined = async {
            let before = self.discard_void_state(&sr, &directory, &variant).await?;
            let elsewhere = before == Before::Other;
            self.examine(&sr, &directory, &variant, believe, elsewhere).await.map(|examined| (examined, before))
        };
        let (examined, before) = match examined.await {
            Ok(found) => found,
            Err(problem) => {
                drop(directory);
                self.leave_place(&sr).await;
                return Err(problem);
            }
        };
        self.keep(uuid, directory.clone());
        let recorded = self.catalogue.write(move |tx| {
            tx.set_sr_state(uuid, SrState::Attached, Some(&variant))?;
            let taken = examined.record(tx, uuid, outdated)?;
            Ok((examined, taken))
        });
        let (examined, ended) = match recorded.await {
            Ok((examined, taken)) => {
                taken.iter().for_each(|(taken, _)| inventory::log_update(&sr, taken));
                (examined, taken.map(|(_, ended)| ended).unwrap_or_default())
            }
            Err(problem) => {
                drop(directory);
                self.close_directory(uuid).await?;
                return Err(problem);
            }
        };
        if let Ok(Err(problem)) = self.catalogue.read(move |view| Ok(view.sr(uuid)?.policy_in_force().map(drop))).await
        {
            tracing::warn!(sr = %uuid, name = %sr.name, "transfers of its disks are left as they are: {problem}");
        }
        self.record_last_host(uuid, &directory, before).await;
        drop(directory);
        self.keep_log(uuid, examined);
        if let Err(problem) = self.keep_inventory(uuid).await {
            tracing::error!(sr = %uuid, name = %sr.name, "its inventory is out of date; retrying: {problem}");
        }
        self.remember_space(&sr);
        self.measure_now(uuid).await;
        Ok(ended)
    }

    /// Removes files that a killed daemon was creating. Failure is only logged.
    async fn clear(&self, sr: &Sr, directory: &Arc<Directory>) {
        let at = directory.clone();
        match self.patience.ask(sr.uuid, "clear up", move || at.remove_unfinished()).await {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => tracing::info!(sr = %sr.uuid, ?removed, "removed unfinished files"),
            Err(problem) => tracing::warn!(sr = %sr.uuid, "unfinished files may remain: {problem}"),
        }
    }

    /// Detaches a repository that is not in use; if that fails, it stays attached.
    pub async fn detach(&self, uuid: Uuid) -> Result<(), Problem> {
        // The next host that attaches it must find all changes in its inventory.
        if self.open().contains_key(&uuid) {
            self.keep_inventory(uuid).await?;
        }
        let written = self.catalogue.outbox().written(uuid);
        let sr = self
            .catalogue
            .write(move |tx| {
                tx.check_sr_unused(uuid)?;
                tx.set_sr_state(uuid, SrState::Detached, None)?;
                written.map_or(Ok(()), |written| tx.trim_inventory(uuid, written))?;
                tx.sr(uuid)
            })
            .await?;
        let left = match self.close_directory(uuid).await {
            Ok(()) => self.places.leave(uuid, &sr.source).await,
            Err(problem) => Err(problem),
        };
        if let Err(problem) = left {
            if self.open().contains_key(&uuid) {
                self.catalogue.write(move |tx| tx.set_sr_state(uuid, SrState::Attached, None)).await?;
            } else {
                self.attach(uuid).await?;
            }
            return Err(problem);
        }
        self.forget_space(uuid);
        Ok(())
    }

    /// Closes the directory of a repository when all users have released it.
    pub(super) async fn close_directory(&self, uuid: Uuid) -> Result<(), Problem> {
        let Some(mut directory) = self.open().remove(&uuid) else { return Ok(()) };
        let begun = tokio::time::Instant::now();
        loop {
            match Arc::try_unwrap(directory) {
                Ok(last) => {
                    self.leave_log(uuid);
                    return self.patience.ask(uuid, "close", move || close(last)).await;
                }
                Err(shared) if begun.elapsed() < TO_LET_GO => directory = shared,
                Err(shared) => {
                    self.open().insert(uuid, shared);
                    let what = format!("a request to the repository {uuid} is still outstanding");
                    return Err(Problem::new(Code::Busy, what).advise("check its storage"));
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Attaches, concurrently, the repositories that were attached when the daemon ended. Missing ones are marked as
    /// lost.
    pub async fn attach_again(daemon: &Daemon) -> Result<(), Problem> {
        let srs = daemon.catalogue.read(|view| view.srs()).await?;
        let mut attaching = JoinSet::new();
        for sr in srs.into_iter().filter(|sr| sr.state != SrState::Detached) {
            let daemon = daemon.clone();
            attaching.spawn(async move {
                daemon.srs.attach_or_lose(&sr, true).await?;
                // Before a disk is started on one of them.
                if daemon.srs.open().contains_key(&sr.uuid) {
                    super::doubtful::hold(&daemon, sr.uuid).await;
                }
                Ok::<(), Problem>(())
            });
        }
        while let Some(done) = attaching.join_next().await {
            done.map_err(|error| Problem::new(Code::Internal, format!("attaching repositories ended: {error}")))??;
        }
        Ok(())
    }

    /// Attaches a repository; marks it as lost if that fails.
    pub(super) async fn attach_or_lose(&self, sr: &Sr, outdated: bool) -> Result<(), Problem> {
        match self.attach_as(sr.uuid, None, outdated).await {
            Ok(_) => Ok(()),
            Err(problem) => self.lose(sr, &problem).await,
        }
    }

    /// Marks a repository as lost, because its storage has disappeared or been replaced.
    pub(super) async fn lose(&self, sr: &Sr, why: &Problem) -> Result<(), Problem> {
        let uuid = sr.uuid;
        self.open().remove(&uuid);
        self.leave_log(uuid);
        let first = why.advice.as_deref().unwrap_or("restore its storage");
        let retry = self.intervals.lost.as_secs();
        let advice = format!(
            "{first}; it is then attached again within {retry} s, or at once by: tapline sr attach {}",
            sr.name
        );
        let why = why.clone().advise(advice);
        if sr.state == SrState::Lost && sr.problem.as_ref() == Some(&why) {
            return Ok(());
        }
        tracing::error!(sr = %uuid, name = %sr.name, "lost the repository: {why}");
        self.catalogue.write(move |tx| tx.set_sr_lost(uuid, &why)).await
    }

    /// The path of a repository, for its removal.
    pub(super) async fn place_of(&self, sr: &Sr) -> Result<AbsolutePath, Problem> {
        self.places.find(sr.uuid, &sr.source).await
    }
}

/// Closes the directory, which also releases the lock; a server may hold it.
fn close(directory: Directory) -> Result<(), Problem> {
    drop(directory);
    Ok(())
}
