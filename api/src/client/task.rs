//! `/tasks`, and waiting for one.

use std::time::Duration;

use hyper::Method;
use tokio::time::Instant;
use uuid::Uuid;

use super::Client;
use super::exchange::Failure;
use super::target::Target;
use crate::{Problem, Task};

/// How long a daemon may be away while a client waits for its task, which continues when the daemon is back.
const AWAY: Duration = Duration::from_secs(60);
/// Pause before the next attempt to reach the daemon.
const REST: Duration = Duration::from_millis(500);

impl Client {
    /// Lists the tasks, the latest first; with `open`, only unfinished ones.
    pub async fn tasks(&self, open: bool) -> Result<Vec<Task>, Problem> {
        self.get(&Target::new("tasks").query("open", open.then_some(true))).await
    }

    /// Gets a task by its UUID.
    pub async fn task(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.get(&Target::object("tasks", uuid)).await
    }

    /// Gets a task when it has ended, or after `seconds` (at most 60). Waits for a daemon that is being restarted.
    pub async fn task_wait(&self, uuid: Uuid, seconds: u32) -> Result<Task, Problem> {
        let target = Target::object("tasks", uuid).query("wait", Some(seconds));
        let mut away_since = None;
        loop {
            match self.look(&target).await {
                Ok(task) => return Ok(task),
                Err(Failure::Refused(problem)) => return Err(problem),
                Err(Failure::Absent(problem) | Failure::Gone(problem)) => {
                    if away_since.get_or_insert_with(Instant::now).elapsed() > AWAY {
                        return Err(problem);
                    }
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    /// Cancels a task, which then rolls back what it has done; does not wait for that.
    pub async fn task_cancel(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.change(Method::POST, &Target::verb("tasks", uuid, "cancel"), &()).await
    }

    /// Abandons a task that can neither complete nor roll back.
    pub async fn task_abandon(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.change(Method::POST, &Target::verb("tasks", uuid, "abandon"), &()).await
    }
}
