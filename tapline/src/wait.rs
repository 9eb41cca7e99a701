//! Waits for a task, with its progress on a terminal or as lines; an interrupt cancels the task.
//!
//! A task belongs to the daemon and continues without a client. The first interrupt cancels it and keeps waiting until
//! it has ended; the second one stops the wait.

mod progress;

use api::client::Client;
use api::{Code, Problem, Task, TaskState};
use tokio::signal::unix::{SignalKind, signal};

pub use progress::{Progress, figures};

/// Duration of a long-poll request for the task's progress, in seconds.
const STEP: u32 = 1;

/// Waits until a task has ended. `note` is printed if that takes more than a moment.
pub async fn until_over(client: &Client, mut task: Task, mut note: Option<String>) -> Result<Task, Problem> {
    let interrupts = signal(SignalKind::interrupt());
    let mut interrupts = interrupts.map_err(|error| Problem::failed("handle an interrupt", error))?;
    let mut progress = Progress::new();
    let mut interrupted = false;
    while !task.state.is_over() {
        progress.show(&task);
        tokio::select! {
            now = client.task_wait(task.uuid, STEP) => {
                task = now?;
                if let Some(note) = note.take_if(|_| !task.state.is_over()) {
                    progress.say(&format!("tapline: {note}"));
                }
            }
            _ = interrupts.recv() => {
                if interrupted {
                    return Err(still_running(&task));
                }
                interrupted = true;
                progress.say(&cancel(client, &task).await);
            }
        }
    }
    progress.show(&task);
    Ok(task)
}

async fn cancel(client: &Client, task: &Task) -> String {
    match client.task_cancel(task.uuid).await {
        Ok(_) => {
            format!("{}: cancelling; Ctrl-C again to stop waiting", task.verb)
        }
        Err(problem) => format!("{}: cannot be cancelled: {problem}; Ctrl-C again to stop waiting", task.verb),
    }
}

fn still_running(task: &Task) -> Problem {
    let what = format!("{} is still running in the background", task.verb);
    Problem::new(Code::Failed, what).advise(format!("wait for it with 'tapline task wait {}'", task.uuid))
}

/// The reason why a task that has ended did not succeed.
pub fn failure(task: &Task) -> Problem {
    let step = task.step.as_ref().map(|step| format!(" at step {step}")).unwrap_or_default();
    task.problem.clone().unwrap_or_else(|| match task.state {
        TaskState::Cancelled => Problem::new(Code::Cancelled, format!("{} was cancelled{step}", task.verb)),
        _ => Problem::new(Code::Failed, format!("{} failed{step}", task.verb)),
    })
}
