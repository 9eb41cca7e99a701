//! Jobs: tasks whose effect is all or nothing, even if the daemon is killed (P8).
//!
//! 1. The *intent* is recorded: everything needed to carry out the job or to roll it back, including the names and
//!    identities of what it will create. *If killed before this:* nothing has happened, and nothing was promised.
//! 2. Before each step its name is recorded; each step is idempotent. *If killed before the point of no return:* the
//!    starting daemon rolls the job back, which removes whatever its steps may have created. *If killed after it:* the
//!    job continues from the last recorded step.
//! 3. Its end is recorded, in one commit with the release of its leases.
//!
//! A step that fails before the point of no return is rolled back at once. One that fails after it is retried, by this
//! daemon or the next, until it succeeds: there is no rollback. Only an administrator can end that
//! ([`Tasks::abandon`]).

use std::future::Future;
use std::time::Duration;

use api::{About, Code, Problem, Task, TaskState};
use repo::catalogue::{Journalled, NewTask};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use uuid::Uuid;

use super::{Context, Tasks};
use crate::daemon::Daemon;
use crate::fault;
use crate::request;
use crate::sr;
use crate::vdi;
use crate::vm;

/// How long to wait before a step is tried again that cannot be undone.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// A kind of job: its value is the intent.
pub trait Job: Clone + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The verb.
    const VERB: &'static str;
    /// The steps, in order.
    const STEPS: &'static [&'static str];
    /// The first step that cannot be rolled back.
    const NO_RETURN: &'static str;
    /// Whether there may be something to tidy up in the repositories that it changes when it is over.
    const TIDIES: bool = false;

    /// Whether a step after the point of no return has failed in a way that retrying cannot fix. The job is then rolled
    /// back as far as possible.
    fn is_hopeless(&self, _: &Problem) -> bool {
        false
    }

    /// The repositories whose catalogue entries it changes: their inventories are updated before the next step, and
    /// before the end.
    fn changes(&self) -> Vec<Uuid>;

    /// The repositories that must be attached until it is over.
    fn needs(&self) -> Vec<Uuid> {
        self.changes()
    }

    /// The objects concerned.
    fn about(&self) -> Vec<About>;

    /// Does a step. It may have been done before, in part or in full.
    fn step(&self, name: &str, daemon: &Daemon, context: &Context) -> impl Future<Output = Result<(), Problem>> + Send;

    /// Removes all that any step before the point of no return may have left. May itself be done twice.
    fn undo(&self, daemon: &Daemon) -> impl Future<Output = Result<(), Problem>> + Send;

    /// The result.
    fn result(&self) -> Value;
}

impl Tasks {
    /// Begins a job. `prepare` records, in one commit with the intent, what must be so before anything is done: leases,
    /// places that are taken; it refuses the job if that cannot be.
    pub async fn start_job<J: Job>(
        &self,
        daemon: &Daemon,
        job: J,
        prepare: impl FnOnce(&J, Uuid, &mut repo::Tx<'_>) -> Result<(), Problem> + Send + 'static,
    ) -> Result<Task, Problem> {
        let intent =
            serde_json::to_value(&job).map_err(|error| Problem::failed("record the intent of a job", error))?;
        let (about, kept) = (job.about(), job.clone());
        let (key, condition) = (request::take_key(), request::condition());
        let task = self.catalogue.write(move |tx| {
            condition.map_or(Ok(()), |condition| condition.check(tx))?;
            let new = NewTask { uuid: Uuid::new_v4(), verb: J::VERB, about, cancellable: true, intent: Some(intent) };
            let task = super::add_task(tx, &new, key.as_ref())?;
            kept.needs().into_iter().try_for_each(|sr| tx.use_sr(sr, task.uuid))?;
            prepare(&kept, task.uuid, tx)?;
            Ok(task)
        });
        let task = task.await?;
        let at_work = daemon.clone();
        let tidies = tidies(&job);
        self.run(daemon, task.clone(), tidies, move |context| async move { run(job, &at_work, context, 0).await });
        Ok(task)
    }
}

/// The repositories in which there may be something to tidy up when a job is over.
fn tidies<J: Job>(job: &J) -> Vec<Uuid> {
    if J::TIDIES { job.changes() } else { Vec::new() }
}

/// Does a job from a step on, and undoes it if that fails.
async fn run<J: Job>(job: J, daemon: &Daemon, mut context: Context, from: usize) -> Result<Value, Problem> {
    let no_return = index::<J>(J::NO_RETURN);
    for (at, name) in J::STEPS.iter().enumerate().skip(from) {
        let recorded = match keep_inventory(&job, daemon).await {
            Ok(()) => context.step(name, at < no_return).await,
            Err(problem) => Err(problem),
        };
        // Until the first of these steps is recorded there is a way back, for who has cancelled it just then too.
        let committed = at > no_return || at == no_return && (recorded.is_ok() || from == at);
        fault::point(J::VERB, name, false);
        let done = match recorded {
            Ok(()) => context.attend(daemon, name, job.step(name, daemon, &context)).await,
            Err(problem) => Err(problem),
        };
        match done {
            Ok(()) => fault::point(J::VERB, name, true),
            Err(problem) if !committed || job.is_hopeless(&problem) => {
                undo_until_done(&job, daemon, &context, None).await?;
                if let Err(late) = keep_inventory(&job, daemon).await {
                    tracing::warn!(task = %context.uuid(), verb = J::VERB, "the inventory is out of date: {late}");
                }
                return Err(problem);
            }
            Err(problem) => insist(&job, name, daemon, &context, problem).await?,
        }
    }
    for sr in job.changes() {
        // The catalogue keeps what the inventory of a repository that has gone does not have.
        while let Err(problem) = daemon.srs.keep_inventory(sr).await {
            tracing::error!(task = %context.uuid(), verb = J::VERB, "the inventory is out of date: {problem}");
            if daemon.srs.directory(sr).await.is_err() {
                break;
            }
            context.rest(AGAIN_AFTER, &problem).await?;
        }
    }
    Ok(job.result())
}

async fn keep_inventory<J: Job>(job: &J, daemon: &Daemon) -> Result<(), Problem> {
    for sr in job.changes() {
        daemon.srs.keep_inventory(sr).await?;
    }
    Ok(())
}

/// Retries a step until it succeeds; an error only if the task was abandoned.
async fn insist<J: Job>(
    job: &J,
    name: &str,
    daemon: &Daemon,
    context: &Context,
    first: Problem,
) -> Result<(), Problem> {
    let mut problem = first;
    loop {
        tracing::error!(task = %context.uuid(), verb = J::VERB, step = name, "retrying: {problem}");
        context.rest(AGAIN_AFTER, &problem).await?;
        let done = match keep_inventory(job, daemon).await {
            Ok(()) => context.attend(daemon, name, job.step(name, daemon, context)).await,
            failed => failed,
        };
        match done {
            Ok(()) => return Ok(()),
            Err(again) => problem = again,
        }
    }
}

/// Rolls a job back; a failure is retried after a while. An error only if the task was abandoned.
async fn undo_until_done<J: Job>(
    job: &J,
    daemon: &Daemon,
    context: &Context,
    mut failed: Option<Problem>,
) -> Result<(), Problem> {
    fault::point(J::VERB, "undo", false);
    loop {
        if let Some(problem) = failed {
            let what = "cleanup after a failed job did not succeed; retrying";
            tracing::error!(task = %context.uuid(), verb = J::VERB, "{what}: {problem}");
            context.rest(AGAIN_AFTER, &problem).await?;
        }
        match context.attend(daemon, "undo", job.undo(daemon)).await {
            Ok(()) => break,
            Err(problem) => failed = Some(problem),
        }
    }
    fault::point(J::VERB, "undo", true);
    Ok(())
}

fn index<J: Job>(step: &str) -> usize {
    J::STEPS.iter().position(|name| *name == step).unwrap_or(0)
}

/// Resumes the journal's jobs. Jobs to be rolled back are rolled back before this returns; the others continue. One
/// that is not understood, because of a newer daemon or a damaged catalogue, is left as it is with its objects
/// reserved: it is unknown what is half done.
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

/// Calls `$with!` with the kinds of jobs there are.
macro_rules! with_kinds {
    ($with:ident) => {
        $with!(
            sr::Create,
            sr::Destroy,
            sr::Introduce,
            vdi::Clone,
            vdi::Copy,
            vdi::Create,
            vdi::Destroy,
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

/// Does or undoes a job of the journal; or why that cannot be.
async fn recover_known(daemon: &Daemon, entry: Journalled) -> Result<Option<String>, Problem> {
    macro_rules! by_verb {
        ($($job:ty),+) => {
            match entry.task.verb.as_str() {
                $(<$job>::VERB => match serde_json::from_value::<$job>(entry.intent) {
                    Ok(job) => recover_as(daemon, job, entry.task).await.map(|()| None),
                    Err(error) => Ok(Some(format!("its intent cannot be read: {error}"))),
                },)+
                _ => Ok(Some("this version does not know this kind of job".into())),
            }
        };
    }
    with_kinds!(by_verb)
}

/// All steps of all kinds of jobs, `VERB STEP` a line: where tests kill the daemon.
pub fn steps() -> String {
    macro_rules! all {
        ($($job:ty),+) => { [$((<$job>::VERB, <$job>::STEPS)),+] };
    }
    let lines = with_kinds!(all).into_iter().flat_map(|(verb, steps)| steps.iter().map(move |step| (verb, step)));
    lines.map(|(verb, step)| format!("{verb} {step}\n")).collect()
}

async fn recover_as<J: Job>(daemon: &Daemon, job: J, task: Task) -> Result<(), Problem> {
    if task.state == TaskState::Stuck {
        daemon.catalogue.write(move |tx| tx.set_task_unstuck(task.uuid)).await?;
    }
    let reached = task.step.as_deref().map_or(0, index::<J>);
    if task.step.is_some() && reached >= index::<J>(J::NO_RETURN) {
        tracing::info!(task = %task.uuid, verb = J::VERB, step = task.step, "resuming");
        let at_work = daemon.clone();
        let tidies = tidies(&job);
        daemon.tasks.run(
            daemon,
            task,
            tidies,
            move |context| async move { run(job, &at_work, context, reached).await },
        );
        return Ok(());
    }
    tracing::info!(task = %task.uuid, verb = J::VERB, step = task.step, "rolling back");
    let why = match task.state {
        TaskState::Cancelling => super::cancelled(),
        _ => Problem::new(Code::Failed, "the daemon stopped while this was in progress; it was rolled back")
            .advise("try again"),
    };
    let patience = daemon.config.storage.patience();
    let undone = tokio::time::timeout(patience, job.undo(daemon)).await;
    let undone = undone.unwrap_or_else(|_| {
        Err(Problem::new(Code::Timeout, format!("rolling back has taken more than {} s", patience.as_secs())))
    });
    if let Err(problem) = undone {
        // Its repository may not be there or not respond. Whatever else there is to serve does not wait for that; what
        // the job holds does.
        let at_work = daemon.clone();
        daemon.tasks.run(daemon, task, tidies(&job), move |context| async move {
            undo_until_done(&job, &at_work, &context, Some(problem)).await?;
            Err(why)
        });
        return Ok(());
    }
    fault::point(J::VERB, "undo", true);
    daemon.catalogue.write(move |tx| tx.end_task(task.uuid, Err(why))).await
}
