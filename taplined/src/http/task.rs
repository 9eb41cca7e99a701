//! `/tasks`: long-running operations.

use std::time::Duration;

use api::{Code, Problem, Task, TaskState};
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

use super::Answer;
use super::answer::listed;
use super::extract::{Id, QueryParams};
use super::list::{Page, Paging};
use crate::daemon::Daemon;
use crate::request;

/// The maximum wait in seconds: proxies and clients often have no longer timeouts.
const WAIT_MAX: u32 = 60;

/// The routes of tasks.
pub fn routes() -> OpenApiRouter<Daemon> {
    OpenApiRouter::new()
        .routes(routes!(task_list))
        .routes(routes!(task_show))
        .routes(routes!(task_cancel))
        .routes(routes!(task_abandon))
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
struct TaskFilter {
    /// Only unfinished tasks.
    #[serde(default)]
    open: bool,
    /// Only those in this state.
    #[param(inline)]
    state: Option<TaskState>,
    /// Only those of this verb: vdi-snapshot.
    verb: Option<String>,
    /// Only those about the object with this UUID.
    about: Option<Uuid>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TaskWait {
    /// Answer when the task has ended, or after this many seconds.
    #[serde(default)]
    #[param(maximum = 60)]
    wait: u32,
}

/// Lists the tasks, the latest first.
#[utoipa::path(
    get, path = "/tasks", tag = "task", params(TaskFilter, Paging), responses((status = 200, body = Vec<Task>))
)]
async fn task_list(State(daemon): State<Daemon>, QueryParams(filter): QueryParams<TaskFilter>, page: Page) -> Answer {
    let question = move |view: &repo::View<'_>| {
        let mut found = view.tasks(filter.open)?;
        found.retain(|task| {
            filter.state.is_none_or(|state| state == task.state)
                && filter.verb.as_ref().is_none_or(|verb| *verb == task.verb)
                && filter.about.is_none_or(|uuid| task.about.iter().any(|about| about.uuid == uuid))
        });
        Ok(found)
    };
    listed(&daemon, page, |task| task.uuid, question).await
}

/// Gets a task.
#[utoipa::path(get, path = "/tasks/{uuid}", tag = "task", params(Id, TaskWait), responses((status = 200, body = Task)))]
async fn task_show(
    State(daemon): State<Daemon>,
    Id(uuid): Id,
    QueryParams(patience): QueryParams<TaskWait>,
) -> Answer<Json<Task>> {
    if patience.wait > WAIT_MAX {
        let what = format!("a wait must be at most {WAIT_MAX} seconds, not {}", patience.wait);
        return Err(Problem::new(Code::Invalid, what)
            .field("wait")
            .advise("repeat the request until the task ends")
            .into());
    }
    let patience = Duration::from_secs(patience.wait.into());
    Ok(Json(daemon.tasks.wait(uuid, patience).await?))
}

/// Cancels a task, which then rolls back what it has done. The response does not wait for that.
#[utoipa::path(post, path = "/tasks/{uuid}/cancel", tag = "task", params(Id), responses((status = 200, body = Task)))]
async fn task_cancel(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Task>> {
    let task = request::change(&daemon.catalogue, 200, move |tx| tx.set_task_cancelling(uuid)).await?;
    daemon.tasks.notify_cancelled(uuid);
    Ok(Json(task))
}

/// Abandons a task that can neither complete nor roll back, or makes no progress, and releases its objects. VDIs that
/// it was changing are then diverged.
#[utoipa::path(post, path = "/tasks/{uuid}/abandon", tag = "task", params(Id), responses((status = 200, body = Task)))]
async fn task_abandon(State(daemon): State<Daemon>, Id(uuid): Id) -> Answer<Json<Task>> {
    Ok(Json(daemon.tasks.abandon(uuid).await?))
}
