//! A task that is a part of another one.

use api::{Code, Problem, Task};

use super::Context;
use crate::daemon::Daemon;

impl Context {
    /// Waits until a task that this one has begun has succeeded. If this one is cancelled meanwhile, so is the other;
    /// it may succeed nevertheless.
    pub async fn part(&self, daemon: &Daemon, begun: &Task) -> Result<Task, Problem> {
        match self.unless_cancelled(daemon.tasks.success_of(begun.uuid)).await {
            Err(problem) if problem.code == Code::Cancelled => {
                if let Err(late) = daemon.tasks.cancel(begun.uuid).await {
                    tracing::debug!(task = %begun.uuid, "it is about to end: {late}");
                }
                daemon.tasks.success_of(begun.uuid).await
            }
            done => done,
        }
    }
}
