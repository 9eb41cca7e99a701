//! Waiting for a task: how far it is on a terminal or in lines, and an interrupt that asks the daemon to end it.
//!
//! A task is the daemon's: it goes on when nobody waits for it. The first interrupt asks for its end, and the wait goes on
//! until that has come; the second one only ends the wait.

mod progress;

use api::client::Client;
use api::{Code, Problem, Task, TaskState};
use tokio::signal::unix::{SignalKind, signal};

use progress::Progress;

/// Seconds after which to see how far the task is.
const STEP: u32 = 1;

/// Waits for a task's end.
pub async fn until_over(client: &Client, mut task: Task) -> Result<Task, Problem> {
    let interrupts = signal(SignalKind::interrupt());
    let mut interrupts = interrupts.map_err(|error| Problem::failed("handle an interrupt", error))?;
    let mut progress = Progress::new();
    let mut asked = false;
    while !task.state.is_over() {
        progress.show(&task);
        tokio::select! {
            now = client.task_wait(task.uuid, STEP) => task = now?,
            _ = interrupts.recv() => {
                if asked {
                    return Err(left(&task));
                }
                asked = true;
                progress.say(&ask_to_end(client, &task).await);
            }
        }
    }
    progress.show(&task);
    Ok(task)
}

async fn ask_to_end(client: &Client, task: &Task) -> String {
    match client.task_cancel(task.uuid).await {
        Ok(_) => {
            format!("{}: asked to end and to undo what it has done; interrupt again to leave it to itself", task.verb)
        }
        Err(problem) => format!("{}: cannot be cancelled: {problem}; interrupt again to leave it to itself", task.verb),
    }
}

fn left(task: &Task) -> Problem {
    let what = format!("{} was left while it goes on", task.verb);
    Problem::new(Code::Failed, what).advise(format!("see how it ends with «tapline task wait {}»", task.uuid))
}

/// Why a task that is over is not done.
pub fn why(task: &Task) -> Problem {
    let step = task.step.as_ref().map(|step| format!(" at the step {step}")).unwrap_or_default();
    task.problem.clone().unwrap_or_else(|| match task.state {
        TaskState::Cancelled => Problem::new(Code::Cancelled, format!("{} was cancelled{step}", task.verb)),
        _ => Problem::new(Code::Failed, format!("{} failed{step}", task.verb)),
    })
}
