//! `tapline task`: tasks of the daemon.

use std::ops::ControlFlow;

use api::client::StreamItem;
use api::{Change, Code, ObjectKind, Problem, Task, TaskState};

use crate::column::{Column, Names, Uuids};
use crate::confirm::Confirm;
use crate::output::say;
use crate::session::{Listing, Session, print_while_read};
use crate::{wait, word};

/// Operations on tasks.
#[derive(clap::Subcommand)]
pub enum TaskVerb {
    /// List unfinished tasks, the latest first
    #[command(visible_alias = "ls")]
    List {
        /// Also list finished tasks
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a task
    Show {
        /// UUID prefix
        task: String,
    },
    /// Wait until a task ends; fails if the task failed
    Wait {
        /// UUID prefix
        task: String,
    },
    /// Cancel a task and roll back what it has done
    Cancel {
        /// UUID prefix
        task: String,
    },
    /// Give up a task that can neither complete nor roll back; disks that it was changing are left for you to reconcile
    Abandon {
        /// UUID prefix
        task: String,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Print one line per step of each task until interrupted
    Watch,
}

type TaskColumn = Column<Task>;

const COLUMNS: &[TaskColumn] = &[
    TaskColumn::new("uuid", |task, uuids| uuids.show(task.uuid)),
    TaskColumn::new("verb", |task, _| task.verb.clone()),
    TaskColumn::new("state", |task, _| word::of(&task.state)),
    TaskColumn::new("done", |task, _| format!("{:.0} %", task.progress * 100.0)).right(),
    TaskColumn::new("step", |task, _| task.step.clone().unwrap_or_default()).if_room(),
    TaskColumn::new("created", |task, _| format!("{:.0}", task.created)).if_room(),
    TaskColumn::new("about", about),
    TaskColumn::new("requester", |task, _| task.requester.to_string()).wide(),
    TaskColumn::new("cancellable", |task, _| task.cancellable.to_string()).alone(),
    TaskColumn::new("ended", |task, _| task.ended.map(|at| format!("{at:.0}")).unwrap_or_default()).alone(),
    TaskColumn::new("problem", |task, _| {
        task.problem.as_ref().map(|problem| problem.detail.clone()).unwrap_or_default()
    })
    .alone(),
    TaskColumn::new("advice", |task, _| {
        task.problem.as_ref().and_then(|problem| problem.advice.clone()).unwrap_or_default()
    })
    .alone(),
    TaskColumn::new("result", |task, _| task.result.as_ref().map(|value| format!("{value:#}")).unwrap_or_default())
        .alone(),
];

fn about(task: &Task, uuids: Uuids) -> String {
    let objects = task.about.iter().map(|about| format!("{} {}", word::of(&about.kind), uuids.named(about.uuid)));
    objects.collect::<Vec<_>>().join(", ")
}

impl TaskVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        match self {
            TaskVerb::List { all, listing } => list(session, all, &listing).await,
            TaskVerb::Show { task } => session.show(&session.client.task(session.task(&task).await?).await?, COLUMNS),
            TaskVerb::Wait { task } => wait_for(session, &task).await,
            TaskVerb::Cancel { task } => {
                let task = session.client.task_cancel(session.task(&task).await?).await?;
                if session.json() { session.value(&task) } else { Ok(()) }
            }
            TaskVerb::Abandon { task, confirm } => {
                let task = session.client.task(session.task(&task).await?).await?;
                confirm.ask(&format!(
                    "abandon the task {} ({}); anything half done stays that way",
                    task.verb, task.uuid
                ))?;
                let task = session.client.task_abandon(task.uuid).await?;
                if session.json() { session.value(&task) } else { Ok(()) }
            }
            TaskVerb::Watch => watch(session).await,
        }
    }
}

async fn list(session: &Session, all: bool, listing: &Listing) -> Result<(), Problem> {
    let kinds = [ObjectKind::Sr, ObjectKind::Vdi, ObjectKind::Vm];
    session.list_named(&session.client.tasks(!all).await?, COLUMNS, listing, &kinds, Names::new()).await
}

async fn wait_for(session: &Session, task: &str) -> Result<(), Problem> {
    let task = session.client.task(session.task(task).await?).await?;
    let task = wait::until_over(&session.client, task, None).await?;
    session.show(&task, COLUMNS)?;
    if task.state == TaskState::Done { Ok(()) } else { Err(wait::failure(&task)) }
}

/// Prints unfinished tasks, then each change of a task, for as long as the output has a reader.
async fn watch(session: &Session) -> Result<(), Problem> {
    let mut events = session.client.events(None).await?;
    let mut tasks = session.client.tasks(true).await?;
    loop {
        for task in tasks.drain(..) {
            if print_task(session, &task)?.is_break() {
                return Ok(());
            }
        }
        match events.next().await {
            StreamItem::Change(event) if event.kind == ObjectKind::Task && event.change != Change::Removed => {
                let task: Option<Task> = event.object().map_err(|error| Problem::failed("read an event", error))?;
                tasks.extend(task);
            }
            StreamItem::Change(_) => {}
            StreamItem::Reset => tasks = session.client.tasks(true).await?,
            StreamItem::Lost(problem) if problem.code == Code::Unauthorized => return Err(problem),
            StreamItem::Lost(problem) => say(&format!("tapline: {problem}; reconnecting\n")),
        }
    }
}

fn print_task(session: &Session, task: &Task) -> Result<ControlFlow<()>, Problem> {
    if session.json() {
        return print_while_read(&format!("{}\n", word::json(task)?));
    }
    let percent = task.progress * 100.0;
    let step = task.step.as_deref().unwrap_or("-");
    let why = task.problem.as_ref().map(|problem| format!("  {problem}")).unwrap_or_default();
    let uuid = Uuids::SHORT.show(task.uuid);
    let line = format!("{uuid}  {:<16} {:<10} {percent:>3.0} %  {step}{why}\n", task.verb, word::of(&task.state));
    print_while_read(&api::visible(&line))
}
