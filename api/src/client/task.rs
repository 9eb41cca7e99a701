//! `/tasks`, and waiting for one.

use std::time::Duration;

use hyper::Method;
use tokio::time::Instant;
use uuid::Uuid;

use super::Client;
use super::exchange::Failure;
use super::target::Target;
use crate::{Problem, Task};

/// How long a daemon may be away while somebody waits for its task, which goes on when it comes again.
const AWAY: Duration = Duration::from_secs(60);
/// How long to rest before it is looked for again.
const REST: Duration = Duration::from_millis(500);

impl Client {
    /// The tasks, those asked for last first; with `open`, only those that are not over.
    pub async fn tasks(&self, open: bool) -> Result<Vec<Task>, Problem> {
        self.get(&Target::new("tasks").query("open", open.then_some(true))).await
    }

    /// A task.
    pub async fn task(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.get(&Target::object("tasks", uuid)).await
    }

    /// A task when it is over, or after `seconds` (at most 60). A daemon that is restarted meanwhile is waited for.
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

    /// Asks a task to end and to undo what it has done; does not wait for that.
    pub async fn task_cancel(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.change(Method::POST, &Target::verb("tasks", uuid, "cancel"), &()).await
    }

    /// Gives up one that can be neither done nor undone.
    pub async fn task_abandon(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.change(Method::POST, &Target::verb("tasks", uuid, "abandon"), &()).await
    }
}
