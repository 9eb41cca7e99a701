//! The kinds of jobs, and their hooks into the rest of the daemon.
//!
//! [`task`](crate::task) runs jobs without knowing their kinds; this file lists all of them.

use api::{Code, Problem};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use repo::catalogue::Journalled;
use uuid::Uuid;

use crate::backup;
use crate::daemon::Daemon;
use crate::differences;
use crate::reconcile;
use crate::sr::{self, WhenAttached};
use crate::task::job::{Job, Step, recover_as};
use crate::task::{Ended, Rules};
use crate::vdi;
use crate::vm;

/// How [`task`](crate::task) treats the verbs of jobs.
pub const RULES: Rules = Rules { gives_way: vdi::Merge::VERB, when_ended: tidy_up };

/// The actions after a repository is attached.
pub const WHEN_ATTACHED: WhenAttached = WhenAttached { reconcile: reconcile_sr, collect: vdi::collect };

fn reconcile_sr(daemon: Daemon, sr: Uuid) -> BoxFuture<'static, ()> {
    async move {
        differences::heal_sr(&daemon, sr).await;
        backup::sweep(&daemon).await;
    }
    .boxed()
}

/// Compares the disks of VDIs with the catalogue, and starts merges of images that are no longer needed.
fn tidy_up(daemon: Daemon, Ended { vdis, tidies, done }: Ended) -> BoxFuture<'static, ()> {
    async move {
        reconcile::of_vdis(&daemon, vdis).await;
        if done && !tidies.is_empty() {
            backup::sweep(&daemon).await;
        }
        for sr in tidies {
            vdi::tidy_up(&daemon, sr, done);
        }
    }
    .boxed()
}

/// Resumes the journal's jobs. Jobs to be rolled back are rolled back before this returns; the others continue. A job
/// that is not understood, because of a newer daemon or a damaged catalogue, is left unchanged with its objects
/// reserved: how far it got is unknown.
pub async fn recover(daemon: &Daemon) -> Result<(), Problem> {
    for entry in daemon.catalogue.read(|view| view.journal()).await? {
        let (uuid, verb) = (entry.task.uuid, entry.task.verb.clone());
        if let Some(why) = recover_known(daemon, entry).await? {
            let what = format!("cannot resume the task {verb} {uuid}: {why}; its objects stay reserved");
            let problem = Problem::new(Code::Failed, what).advise(
                "start the taplined version that began it, or a later one, which resumes it automatically; if the \
                 catalogue is damaged, restore a backup",
            );
            tracing::error!(task = %uuid, verb, "{problem}");
            daemon.catalogue.write(move |tx| tx.set_task_stuck(uuid, &problem)).await?;
        }
    }
    Ok(())
}

/// Calls `$with!` with all kinds of jobs.
macro_rules! with_kinds {
    ($with:ident) => {
        $with!(
            backup::Restore,
            backup::RestoreInPlace,
            backup::RestoreVm,
            backup::RestoreVmInPlace,
            sr::Create,
            sr::Destroy,
            sr::Introduce,
            vdi::Clone,
            vdi::Copy,
            vdi::Create,
            vdi::DataDestroy,
            vdi::Destroy,
            vdi::DisableTracking,
            vdi::Fetch,
            vdi::EnableTracking,
            vdi::Export,
            vdi::Import,
            vdi::Merge,
            vdi::Reclaim,
            vdi::Resize,
            vdi::Revert,
            vdi::Snapshot,
            vm::Clone,
            vm::DestroySnapshot,
            vm::Revert,
            vm::Snapshot,
            vm::Suspend
        )
    };
}

/// Resumes a job of the journal; returns the reason if that is impossible.
async fn recover_known(daemon: &Daemon, entry: Journalled) -> Result<Option<String>, Problem> {
    macro_rules! by_verb {
        ($($job:ty),+) => {
            match entry.task.verb.as_str() {
                $(<$job>::VERB => match serde_json::from_value::<$job>(entry.intent) {
                    Ok(job) => recover_as(daemon, job, entry.task).await,
                    Err(error) => Ok(Some(format!("its intent cannot be read: {error}"))),
                },)+
                _ => Ok(Some("this version does not know this kind of job".into())),
            }
        };
    }
    with_kinds!(by_verb)
}

/// All steps of all kinds of jobs, `VERB STEP` per line, for tests that kill the daemon there.
pub fn steps() -> String {
    macro_rules! all {
        ($($job:ty),+) => { [$((<$job>::VERB, words::<$job>())),+] };
    }
    let lines = with_kinds!(all).into_iter().flat_map(|(verb, steps)| steps.into_iter().map(move |step| (verb, step)));
    lines.map(|(verb, step)| format!("{verb} {step}\n")).collect()
}

fn words<J: Job>() -> Vec<&'static str> {
    J::Step::ALL.iter().map(|step| step.word()).collect()
}
