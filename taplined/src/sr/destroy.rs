//! `sr destroy`: removes the files of a repository without VDIs, and then the repository. Foreign files stay.
//!
//! 1. With the intent, it is detached: no operation can start in it. There is no rollback from the first step on.
//! 2. `remove`: its images, its label and its lock are removed. This is idempotent.
//! 3. `forget`: it is removed from the catalogue, and unmounted if the daemon had mounted it.

use std::sync::Arc;

use api::{About, Code, ObjectKind, Problem, Sr, SrDestroyPlan, SrSource, SrState};
use repo::driver::{self, Directory, LABEL, LOCK};
use repo::inventory::{DAMAGED, INVENTORY};
use repo::{Tx, View};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Srs;
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Destroy {
    /// The repository as it was.
    pub sr: Sr,
    /// The files of its images.
    pub files: Vec<String>,
}

impl Destroy {
    /// Creates the job for a repository that may be destroyed.
    pub fn of(view: &View<'_>, uuid: uuid::Uuid) -> Result<Destroy, Problem> {
        let sr = view.sr(uuid)?;
        check(view, &sr)?;
        let files = view.images_of_sr(uuid)?.into_iter().map(|image| image.file).collect();
        Ok(Destroy { sr, files })
    }

    /// Detaches it, in the commit that records the intent, so that no operation can start.
    pub fn prepare(&self, tx: &mut Tx<'_>) -> Result<(), Problem> {
        let now = Destroy::of(tx, self.sr.uuid)?;
        if now.files != self.files {
            return Err(Problem::new(Code::Busy, "a task was just using it").advise("try again"));
        }
        tx.set_sr_state(self.sr.uuid, SrState::Detached, None)
    }

    /// The files that it would remove, and those that it would leave.
    pub async fn plan(&self, srs: &Srs) -> Result<SrDestroyPlan, Problem> {
        let directory = srs.directory(self.sr.uuid).await?;
        let entries = srs.patience.ask(self.sr.uuid, "list", move || directory.entries()).await?;
        let ours = |name: &String| self.files.contains(name) || [LABEL, LOCK, INVENTORY, DAMAGED].contains(&&**name);
        let (removes, leaves) = entries.into_iter().map(|entry| entry.name).partition(ours);
        Ok(SrDestroyPlan { removes, leaves })
    }

    async fn remove(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (srs, uuid) = (&daemon.srs, self.sr.uuid);
        let path = srs.place_of(&self.sr).await?;
        let open = srs.open().get(&uuid).cloned();
        srs.leave_log(uuid);
        let files = self.files.clone();
        srs.patience
            .ask(uuid, "remove", move || {
                // Not open if an earlier daemon has started this job.
                let directory = open.map_or_else(|| Directory::open(&path).map(Arc::new), Ok)?;
                files.iter().try_for_each(|file| directory.remove_image(file))?;
                driver::unmake(&path, uuid)
            })
            .await
    }

    async fn forget(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (srs, uuid) = (&daemon.srs, self.sr.uuid);
        srs.close_directory(uuid).await?;
        srs.leave_place(&self.sr).await;
        srs.forget_space(uuid);
        let forgotten = daemon.catalogue.write(move |tx| match tx.find_sr(uuid)? {
            Some(_) => tx.remove_sr(uuid),
            None => Ok(()),
        });
        forgotten.await
    }
}

/// Refuses to destroy a repository that is in use, read-only or a library.
fn check(view: &View<'_>, sr: &Sr) -> Result<(), Problem> {
    let uuid = sr.uuid;
    if matches!(sr.source, SrSource::Iso { .. }) {
        let what = format!("the library {uuid} is read-only, and its files do not belong to Tapline");
        return Err(Problem::new(Code::Unsupported, what).advise("detach it and forget it"));
    }
    view.attached_sr(uuid)?;
    if sr.is_read_only() {
        let what = format!("nothing can be removed from the repository {uuid}: it is mounted read-only");
        return Err(Problem::new(Code::ReadOnly, what).advise("forget it, or mount it read-write"));
    }
    let vdis = view.vdis(Some(uuid))?;
    if let Some(vdi) = vdis.first() {
        let what = format!("the repository {uuid} has {} VDIs, for example '{}' ({})", vdis.len(), vdi.name, vdi.uuid);
        return Err(
            Problem::new(Code::InUse, what).advise("destroy its VDIs first, or forget it, which keeps its files")
        );
    }
    view.check_sr_unused(uuid)
}

declare_steps!(
    /// The steps of `sr-destroy`.
    DestroyStep { Remove = "remove", Forget = "forget" }
);

impl Job for Destroy {
    type Step = DestroyStep;

    const VERB: &'static str = "sr-destroy";
    const NO_RETURN: DestroyStep = DestroyStep::Remove;

    fn changes(&self) -> Vec<uuid::Uuid> {
        Vec::new()
    }

    fn about(&self) -> Vec<About> {
        vec![About { kind: ObjectKind::Sr, uuid: self.sr.uuid }]
    }

    async fn step(&self, step: DestroyStep, daemon: &Daemon, _context: &Context) -> Result<(), Problem> {
        match step {
            DestroyStep::Remove => self.remove(daemon).await,
            DestroyStep::Forget => self.forget(daemon).await,
        }
    }

    /// Killed or cancelled before the first step: nothing has changed.
    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        let uuid = self.sr.uuid;
        if !daemon.srs.open().contains_key(&uuid) {
            return daemon.srs.attach_or_lose(&self.sr, false).await;
        }
        daemon.catalogue.write(move |tx| tx.set_sr_state(uuid, SrState::Attached, None)).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.sr.uuid })
    }
}
