//! Jobs: tasks whose effect is all or nothing, even if the daemon is killed.
//!
//! 1. The *intent* is recorded: everything needed to carry out the job or to roll it back, including the names and
//!    UUIDs of the objects to create. *If killed before this:* nothing has happened, and nothing was promised.
//! 2. Before each step its name is recorded: a job without one has begun nothing. Each step is idempotent. *If killed
//!    before the point of no return:* the next daemon rolls the job back, which removes whatever its steps may have
//!    created, unless what they have done is worth continuing ([`Job::is_continued`]). *If killed after it:* the job
//!    continues from the last recorded step.
//! 3. Its end is recorded, in one commit with the release of its leases.
//!
//! A step that fails before the point of no return is rolled back at once. One that fails after it is retried, by
//! this daemon or the next, until it succeeds: there is no rollback, unless retrying cannot help
//! ([`Job::is_hopeless`]). An administrator can end that, too ([`Tasks::abandon`]). A job whose recorded step is
//! unknown to this version is stuck, and its objects stay reserved.
//!
//! A cancellation is a commit as well. The commit that begins the step of no return refuses a cancelled task, and a
//! cancellation is refused from that commit on: one of the two wins, whatever the job waits for.

use std::future::Future;
use std::time::Duration;

use api::{About, Code, Problem, Task, TaskState};
use repo::catalogue::NewTask;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use uuid::Uuid;

use super::started::Started;
use super::{Context, Tasks, UNDO};
use crate::daemon::Daemon;
use crate::fault::{self, Planted};
use crate::request;

/// Pause before a step that cannot be undone is retried.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// The steps of a kind of job: the variants of a type, in order ([`declare_steps!`]).
pub trait Step: Copy + Ord + Send + Sync + 'static {
    /// All steps.
    const ALL: &'static [Self];

    /// The step's name in the journal and in views of the task.
    fn word(self) -> &'static str;

    /// The step with this name; `None` if this version has no such step.
    fn with_word(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|step| step.word() == word)
    }
}

/// Declares the steps of a kind of job, each with its name:
/// `declare_steps!(MergeStep { Merge = "merge", Record = "record" })`.
macro_rules! declare_steps {
    ($(#[$about:meta])* $name:ident { $($step:ident = $word:literal),+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $(#[doc = concat!("`", $word, "`.")] $step),+ }

        impl $crate::task::job::Step for $name {
            const ALL: &'static [$name] = &[$($name::$step),+];

            fn word(self) -> &'static str {
                match self { $($name::$step => $word),+ }
            }
        }
    };
}
pub(crate) use declare_steps;

/// A kind of job: its value is the intent.
pub trait Job: Clone + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// The steps.
    type Step: Step;

    /// The verb.
    const VERB: &'static str;
    /// The first step that cannot be rolled back.
    const NO_RETURN: Self::Step;
    /// Whether the repositories that it changes may need a cleanup when it is over.
    const TIDIES: bool = false;

    /// Whether a step after the point of no return has failed in a way that retrying cannot fix. The job is then
    /// rolled back as far as possible.
    fn is_hopeless(&self, _: &Problem) -> bool {
        false
    }

    /// Whether the next daemon continues the job from this step, which comes before the point of no return, instead of
    /// rolling it back, unless it was cancelled.
    fn is_continued(&self, _: Self::Step) -> bool {
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

    /// Runs a step. It may have been run before, in part or in full.
    fn step(
        &self,
        step: Self::Step,
        daemon: &Daemon,
        context: &Context,
    ) -> impl Future<Output = Result<(), Problem>> + Send;

    /// Removes everything that any step before the point of no return may have left. Idempotent.
    fn undo(&self, daemon: &Daemon) -> impl Future<Output = Result<(), Problem>> + Send;

    /// The result.
    fn result(&self) -> Value;
}

impl Tasks {
    /// Begins a job. `prepare` records its prerequisites, such as leases and reserved names, in one commit with the
    /// intent; it refuses the job if they cannot be met.
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
        self.run(daemon, task.clone(), tidies, move |context| async move { run(job, &at_work, context, None).await });
        Ok(task)
    }
}

/// The repositories that may need a cleanup when a job is over.
fn tidies<J: Job>(job: &J) -> Vec<Uuid> {
    if J::TIDIES { job.changes() } else { Vec::new() }
}

/// The state of a running job.
struct Run<'a, J: Job> {
    job: &'a J,
    daemon: &'a Daemon,
    context: Context,
    /// The last step recorded as begun; `None` before the first.
    begun: Option<J::Step>,
}

/// Runs a job: all of it, or the rest from the step recorded as begun. Rolls it back if that fails.
async fn run<J: Job>(job: J, daemon: &Daemon, context: Context, begun: Option<J::Step>) -> Result<Value, Problem> {
    let mut run = Run { job: &job, daemon, context, begun };
    for step in J::Step::ALL.iter().copied().filter(|step| begun.is_none_or(|begun| *step >= begun)) {
        let mut recorded = false;
        while let Err(problem) = run.step(step, &mut recorded).await {
            run.retry_or_roll_back(step, problem).await?;
        }
    }
    run.finish().await
}

/// Whether the first step is the point of no return: until it begins there is nothing to undo.
fn has_nothing_to_undo<J: Job>() -> bool {
    J::Step::ALL.first() == Some(&J::NO_RETURN)
}

impl<J: Job> Run<'_, J> {
    /// Whether a rollback is no longer possible.
    fn is_committed(&self) -> bool {
        if fault::planted(Planted::DeafDestroy) && has_nothing_to_undo::<J>() {
            return true;
        }
        self.begun.is_some_and(|begun| begun >= J::NO_RETURN)
    }

    /// Executes a step. Its begin is recorded first, unless it is `recorded` already.
    async fn step(&mut self, step: J::Step, recorded: &mut bool) -> Result<(), Problem> {
        let word = step.word();
        let kept = keep_inventory(self.job, self.daemon);
        match self.is_committed() {
            true => kept.await?,
            false => self.context.unless_cancelled(kept).await?,
        }
        if !*recorded {
            match self.context.step(word, step < J::NO_RETURN).await {
                Err(_) if fault::planted(Planted::DeafDestroy) && has_nothing_to_undo::<J>() => {}
                begun => begun?,
            }
            (*recorded, self.begun) = (true, Some(step));
        }
        fault::point(J::VERB, word, false);
        let work = Box::pin(self.job.step(step, self.daemon, &self.context));
        self.context.attend(self.daemon, word, work).await?;
        fault::point(J::VERB, word, true);
        Ok(())
    }

    /// Handles a failed step: waits before a retry, or rolls back and returns the problem.
    async fn retry_or_roll_back(&self, step: J::Step, problem: Problem) -> Result<(), Problem> {
        let (uuid, verb, committed) = (self.context.uuid(), J::VERB, self.is_committed());
        if committed && !self.job.is_hopeless(&problem) {
            tracing::error!(task = %uuid, verb, step = step.word(), "retrying: {problem}");
            return self.context.rest(AGAIN_AFTER, &problem).await;
        }
        // A job that has not begun and has nothing to undo waits until it can begin, and can be cancelled.
        if !committed && has_nothing_to_undo::<J>() && problem.code != Code::Cancelled {
            tracing::warn!(task = %uuid, verb, step = step.word(), "waiting to begin: {problem}");
            return match self.context.unless_cancelled(self.context.rest(AGAIN_AFTER, &problem)).await {
                Err(cancelled) if cancelled.code == Code::Cancelled => self.roll_back(cancelled).await,
                rested => rested,
            };
        }
        self.roll_back(problem).await
    }

    /// Rolls back; always returns the problem.
    async fn roll_back(&self, problem: Problem) -> Result<(), Problem> {
        undo_until_done(self.job, self.daemon, &self.context, None).await?;
        if let Err(late) = keep_inventory(self.job, self.daemon).await {
            tracing::warn!(task = %self.context.uuid(), verb = J::VERB, "the inventory is out of date: {late}");
        }
        Err(problem)
    }

    /// Brings the inventories up to date, and returns the result.
    async fn finish(&self) -> Result<Value, Problem> {
        for sr in self.job.changes() {
            // The catalogue keeps the changes that are missing from the inventory of a lost repository.
            while let Err(problem) = self.daemon.srs.keep_inventory(sr).await {
                let (uuid, verb) = (self.context.uuid(), J::VERB);
                tracing::error!(task = %uuid, verb, "the inventory is out of date: {problem}");
                if self.daemon.srs.directory(sr).await.is_err() {
                    break;
                }
                self.context.rest(AGAIN_AFTER, &problem).await?;
            }
        }
        Ok(self.job.result())
    }
}

async fn keep_inventory<J: Job>(job: &J, daemon: &Daemon) -> Result<(), Problem> {
    for sr in job.changes() {
        daemon.srs.keep_inventory(sr).await?;
    }
    Ok(())
}

/// Rolls a job back, with retries. Fails only if the task was abandoned.
async fn undo_until_done<J: Job>(
    job: &J,
    daemon: &Daemon,
    context: &Context,
    mut failed: Option<Problem>,
) -> Result<(), Problem> {
    fault::point(J::VERB, UNDO, false);
    loop {
        if let Some(problem) = failed {
            let what = "cleanup after a failed job did not succeed; retrying";
            tracing::error!(task = %context.uuid(), verb = J::VERB, "{what}: {problem}");
            context.rest(AGAIN_AFTER, &problem).await?;
        }
        match context.attend(daemon, UNDO, Box::pin(job.undo(daemon))).await {
            Ok(()) => break,
            Err(problem) => failed = Some(problem),
        }
    }
    fault::point(J::VERB, UNDO, true);
    Ok(())
}

/// Resumes a job of the journal, or rolls it back; returns the reason if that is impossible.
pub async fn recover_as<J: Job>(daemon: &Daemon, job: J, task: Task) -> Result<Option<String>, Problem> {
    let begun = match task.step.as_deref() {
        None if fault::planted(Planted::NothingIsBegun) => J::Step::ALL.first().copied(),
        None => None,
        Some(word) => match J::Step::with_word(word) {
            Some(step) => Some(step),
            None => return Ok(Some(format!("this version does not know its step '{word}'"))),
        },
    };
    if task.state == TaskState::Stuck {
        daemon.catalogue.write(move |tx| tx.set_task_unstuck(task.uuid)).await?;
    }
    let is_continued = |begun| task.state != TaskState::Cancelling && job.is_continued(begun);
    if begun.is_some_and(|begun| begun >= J::NO_RETURN || is_continued(begun)) {
        tracing::info!(task = %task.uuid, verb = J::VERB, step = task.step, "resuming");
        let at_work = daemon.clone();
        let tidies = tidies(&job);
        daemon.tasks.run(daemon, task, tidies, move |context| async move { run(job, &at_work, context, begun).await });
        return Ok(None);
    }
    tracing::info!(task = %task.uuid, verb = J::VERB, step = task.step, "rolling back");
    let why = match task.state {
        TaskState::Cancelling => super::cancelled(),
        _ => Problem::new(Code::Failed, "the daemon stopped while this was in progress; it was rolled back")
            .advise("try again"),
    };
    let (patience, started) = (daemon.config.storage.patience(), Started::none());
    let undone = tokio::time::timeout(patience, started.during(job.undo(daemon))).await;
    let undone = undone.unwrap_or_else(|_| {
        Err(Problem::new(Code::Timeout, format!("rolling back has taken more than {} s", patience.as_secs())))
    });
    if let Err(problem) = undone {
        // Its repository may be missing or not respond. The start of the daemon does not wait for that; the job's
        // objects stay reserved.
        let at_work = daemon.clone();
        daemon.tasks.run(daemon, task, tidies(&job), move |context| async move {
            let context = Context { started, ..context };
            undo_until_done(&job, &at_work, &context, Some(problem)).await?;
            Err(why)
        });
        return Ok(None);
    }
    fault::point(J::VERB, UNDO, true);
    daemon.catalogue.write(move |tx| tx.end_task(task.uuid, Err(why))).await.map(|()| None)
}
