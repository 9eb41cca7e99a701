//! Shortens chains that cannot get longer, so that schedules do not fail until an administrator intervenes.
//!
//! It knows nothing about schedules. Invariant: only images are merged that the daemon would merge anyway.

use api::{Code, ObjectKind, Problem};
use uuid::Uuid;

use super::subject::Subject;
use crate::daemon::Daemon;
use crate::task::job::Job;
use crate::vdi::{Merge, begin, must_be_shallow};

/// Whether the chain of one of the subject's disks cannot get longer.
pub async fn is_lacking(daemon: &Daemon, subject: Subject) -> Result<bool, Problem> {
    Ok(!deep(daemon, subject).await?.is_empty())
}

/// Merges hidden images of such disks until there are none left. Obstacles are left to the next period.
pub async fn make(daemon: &Daemon, subject: Subject) -> Result<(), Problem> {
    for (vdi, sr) in deep(daemon, subject).await? {
        while is_deep(daemon, vdi).await? {
            let merge = match begin::merge(daemon, vdi).await {
                // A merge was begun when a snapshot was destroyed.
                Err(problem) if matches!(problem.code, Code::Busy | Code::InUse) => at_work(daemon, sr).await?,
                Err(problem) => {
                    tracing::info!(%vdi, "its chain cannot be made shorter: {problem}");
                    None
                }
                Ok(task) => Some(task),
            };
            let Some(merge) = merge else { break };
            if let Err(problem) = daemon.tasks.success_of(merge.uuid).await {
                tracing::info!(%vdi, "its chain was not made shorter: {problem}");
                break;
            }
        }
    }
    Ok(())
}

/// The disks whose chains cannot get longer, with their repositories.
async fn deep(daemon: &Daemon, subject: Subject) -> Result<Vec<(Uuid, Uuid)>, Problem> {
    let read = daemon.catalogue.read(move |view| {
        let disks = subject.disks(view)?.into_iter();
        Ok(disks.filter(|vdi| must_be_shallow(vdi).is_err()).map(|vdi| (vdi.uuid, vdi.sr)).collect())
    });
    read.await
}

async fn is_deep(daemon: &Daemon, vdi: Uuid) -> Result<bool, Problem> {
    daemon.catalogue.read(move |view| Ok(must_be_shallow(&view.vdi(vdi)?).is_err())).await
}

/// An unfinished merge in a repository.
async fn at_work(daemon: &Daemon, sr: Uuid) -> Result<Option<api::Task>, Problem> {
    let tasks = daemon.catalogue.read(|view| view.tasks(true)).await?;
    let is_it = |task: &api::Task| {
        let about = task.about.iter().any(|about| about.kind == ObjectKind::Sr && about.uuid == sr);
        about && task.verb == Merge::VERB
    };
    Ok(tasks.into_iter().find(is_it))
}
