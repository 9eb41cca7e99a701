//! `vdi-restore-in-place`: the content of a VDI is replaced by that of a backup of it. As after `vdi-revert`, it is
//! otherwise the same VDI.
//!
//! 1. `copy`: the backup becomes a new image, as by [`super::restore`]. Nothing refers to it yet. *If killed:* it is
//!    removed.
//! 2. `record`: it becomes the VDI's image, in place of the present one, with its size. *If killed before:* as above.
//! 3. `remove`: the file of the old image is removed, if no image is based on it. *If killed:* repeated.
//!
//! Invariant: the backup is one of this very disk by the log of the target, unless the request accepts another one.

use api::{About, BackupId, BackupTarget, Code, Problem, Task, VdiRestoreInPlace};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::restore::{Shown, fill};
use super::target;
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::task::wanted::Want;
use crate::vdi::{Replacement, about_vdi, begin};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RestoreInPlace {
    /// The backup target, as it was when the task began.
    pub from: BackupTarget,
    /// The backup.
    pub backup: BackupId,
    /// The new image of the VDI.
    pub replacement: Replacement,
}

/// Starts a `vdi-restore-in-place` task.
pub async fn restore_in_place(daemon: &Daemon, vdi: Uuid, asked: VdiRestoreInPlace) -> Result<Task, Problem> {
    let found = begin::replaceable(daemon, vdi).await?;
    let from = daemon.catalogue.read(move |view| view.backup_target(asked.target)).await;
    let from = from.map_err(|problem| problem.field("target"))?;
    let shown = Shown::of(daemon, &from, &asked.backup).await?;
    if !asked.other_disk {
        must_be_of(daemon, &from, &shown, vdi).await?;
    }
    daemon.srs.room(found.sr, shown.takes()).await?;
    let (replacement, _want) = plan(daemon, vdi, &shown).await?;
    let job = RestoreInPlace { from, backup: shown.id, replacement };
    let held = |job: &RestoreInPlace, task, tx: &mut repo::Tx<'_>| begin::hold_replacement(&job.replacement, task, tx);
    daemon.tasks.start_job(daemon, job, held).await
}

/// The new image of a VDI that is restored.
pub async fn plan(daemon: &Daemon, vdi: Uuid, shown: &Shown) -> Result<(Replacement, Want), Problem> {
    begin::plan_replacement(daemon, vdi, shown.size, shown.properties().logical_block_size).await
}

/// Refuses a backup unless it is one of this VDI of this host. That is what the log of the target says: what the
/// maker of a backup has kept with it is no proof, since a VDI can be on another host as well.
pub async fn must_be_of(daemon: &Daemon, from: &BackupTarget, shown: &Shown, vdi: Uuid) -> Result<(), Problem> {
    let own = target::backups_on(daemon, from, Some(vdi)).await?;
    if own.iter().any(|backup| backup.id == shown.id) {
        return Ok(());
    }
    let (backup, name) = (&shown.id, &from.name);
    let what = format!("backup {backup} on '{name}' is not one of VDI {vdi} of this host");
    Err(Problem::new(Code::State, what).field("backup").advise(format!(
        "list its backups: tapline target backups {name} --vdi {vdi}; restore this one to a new disk: tapline vdi \
         restore {name} {backup} --name NEW; or, if the disk is to have the content of another one: other_disk \
         (--other-disk)"
    )))
}

/// Creates the new image of a VDI from a backup. The old one must not be in use when it is exchanged.
pub async fn copy(
    daemon: &Daemon,
    context: &Context,
    (from, backup): (&BackupTarget, &BackupId),
    replacement: &Replacement,
) -> Result<(), Problem> {
    context.unless_cancelled(fill(daemon, context, (from, backup), replacement.into())).await?;
    begin::must_be_unwritten(daemon, replacement.vdi).await
}

/// Why changes since earlier states of a restored VDI are not known.
pub fn reason(backup: &BackupId) -> String {
    format!("it was restored from backup {backup}")
}

declare_steps!(
    /// The steps of `vdi-restore-in-place`.
    InPlaceStep { Copy = "copy", Record = "record", Remove = "remove" }
);

impl Job for RestoreInPlace {
    type Step = InPlaceStep;

    const VERB: &'static str = "vdi-restore-in-place";
    const NO_RETURN: InPlaceStep = InPlaceStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.replacement.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.replacement.vdi)]
    }

    async fn step(&self, step: InPlaceStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            InPlaceStep::Copy => copy(daemon, context, (&self.from, &self.backup), &self.replacement).await,
            InPlaceStep::Record => {
                let (job, image) = (self.clone(), self.replacement.described(daemon).await?);
                let recorded = move |tx: &mut repo::Tx<'_>| {
                    let RestoreInPlace { backup, replacement, .. } = &job;
                    replacement.record_in(tx, &image, &reason(backup))
                };
                daemon.catalogue.write(recorded).await
            }
            InPlaceStep::Remove => self.replacement.remove(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.replacement.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.replacement.vdi, "backup": self.backup })
    }
}
