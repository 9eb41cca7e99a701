//! The named steps of an operation, each with a time limit and each a point at which tests kill the daemon.

use std::future::Future;
use std::time::Duration;

use api::{Code, Problem};

use crate::config::Config;
use crate::fault;
use crate::task::Context;

/// Runs the steps of an operation.
#[derive(Debug)]
pub struct Steps {
    verb: &'static str,
    limit: Duration,
    /// The task that shows the steps; `None` for one of many VBDs, and for a restart.
    task: Option<Context>,
}

impl Steps {
    /// The steps of a verb.
    pub fn of(verb: &'static str, config: &Config, task: Option<Context>) -> Steps {
        Steps { verb, limit: Duration::from_secs(config.plug.step_timeout.into()), task }
    }

    /// Time limit for a step.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Runs a step that may be cancelled at any moment.
    pub async fn step<T>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        self.begin(name, true).await?;
        let done = tokio::time::timeout(self.limit, work).await.unwrap_or_else(|_| {
            let what = format!("the step '{name}' of {} has not ended in {} s", self.verb, self.limit.as_secs());
            Err(Problem::new(Code::Timeout, what).advise("check the storage, or raise plug.step-timeout"))
        })?;
        self.done(name);
        Ok(done)
    }

    /// Starts a step that cannot be rolled back.
    pub async fn last(&mut self, name: &'static str) -> Result<(), Problem> {
        self.begin(name, false).await
    }

    /// Starts a step that must be completed, even if its start cannot be recorded.
    pub async fn insist(&mut self, name: &'static str) {
        if let Err(problem) = self.last(name).await {
            tracing::warn!(verb = self.verb, step = name, "continuing although this cannot be recorded: {problem}");
        }
    }

    /// Executes a step that cannot be rolled back, however long it takes.
    pub async fn last_step<T>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, Problem>>,
    ) -> Result<T, Problem> {
        self.last(name).await?;
        let done = work.await;
        self.done(name);
        done
    }

    /// Marks a started step as complete.
    pub fn done(&self, name: &'static str) {
        fault::point(self.verb, name, true);
    }

    async fn begin(&mut self, name: &'static str, cancellable: bool) -> Result<(), Problem> {
        if let Some(task) = &mut self.task {
            task.step(name, cancellable).await?;
        }
        fault::point(self.verb, name, false);
        Ok(())
    }
}
