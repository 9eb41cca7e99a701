//! `tapline vbd upgrade`: one task per block device, all begun together, with their results in one table.
//!
//! The daemon runs a few at a time. A failed upgrade does not stop the others.

use api::client::{Answer, Client};
use api::{Code, Problem, Task, TaskState, VbdState, VbdUpgraded};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};
use uuid::Uuid;

use crate::column::{Column, Uuids};
use crate::output::say;
use crate::session::{Listing, Session, print};
use crate::wait;

/// Seconds of each long-poll request for a task's end.
const STEP: u32 = 10;

/// Replaces the processes of block devices.
#[derive(clap::Args)]
pub struct Upgrade {
    #[command(flatten)]
    which: Which,
    /// Return as soon as all tasks have begun, and print their UUIDs
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    listing: Listing,
}

/// Some block devices, or all.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// UUID prefix; if several are given, a failure does not stop the others
    vbd: Vec<String>,
    /// All plugged block devices, a few at a time
    #[arg(long)]
    all: bool,
}

/// The result of one upgrade, once it is known.
#[derive(Debug, Serialize)]
struct Row {
    vbd: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    task: Option<Task>,
    /// The result recorded in the task.
    #[serde(skip)]
    upgraded: Option<VbdUpgraded>,
    /// Why the upgrade failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<Problem>,
}

type Shown = Column<Row>;

const COLUMNS: &[Shown] = &[
    Shown::new("uuid", |row, uuids| uuids.show(row.vbd)),
    Shown::new("pause", |row, _| row.upgraded.as_ref().and_then(|done| done.pause_us).map(pause).unwrap_or_default())
        .right(),
    Shown::new("pid", |row, _| number(row, |done| done.vbd.pid)).right(),
    Shown::new("replaced", |row, _| number(row, |done| Some(done.replaced))).right(),
    Shown::new("note", note),
];

fn number(row: &Row, of: impl Fn(&VbdUpgraded) -> Option<u32>) -> String {
    row.upgraded.as_ref().and_then(of).map(|number| number.to_string()).unwrap_or_default()
}

fn note(row: &Row, _: Uuids) -> String {
    match (&row.problem, &row.upgraded) {
        (Some(problem), _) => format!("failed: {problem}"),
        (None, Some(upgraded)) => upgraded.note.clone().unwrap_or_default(),
        (None, None) => String::new(),
    }
}

/// Formats microseconds for people.
fn pause(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

impl Upgrade {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let vbds = self.which.find(session).await?;
        if vbds.is_empty() && !session.json() {
            say("tapline: no block device is plugged\n");
            return Ok(());
        }
        let mut rows = Vec::with_capacity(vbds.len());
        for vbd in vbds {
            rows.push(begin(&session.client, vbd).await);
        }
        if self.no_wait {
            let begun: Vec<&Task> = rows.iter().filter_map(|row| row.task.as_ref()).collect();
            let uuids = || begun.iter().map(|task| format!("{}\n", task.uuid)).collect::<String>();
            if session.json() {
                session.value(&rows)?
            } else {
                print(&uuids())?
            }
            return outcome(&rows);
        }
        see_to_end(&session.client, &mut rows).await?;
        // If the only upgrade failed, its error message is enough.
        let is_only_a_problem = matches!(rows.as_slice(), [Row { problem: Some(_), .. }]);
        if session.json() || !is_only_a_problem {
            session.list(&rows, COLUMNS, &self.listing)?;
        }
        outcome(&rows)
    }
}

impl Which {
    async fn find(&self, session: &Session) -> Result<Vec<Uuid>, Problem> {
        let mut vbds = Vec::new();
        if self.all {
            let all = session.client.vbds(None, None, None).await?;
            vbds.extend(all.into_iter().filter(|vbd| vbd.state == VbdState::Plugged).map(|vbd| vbd.uuid));
        }
        for vbd in &self.vbd {
            let vbd = session.vbd(vbd).await?;
            if !vbds.contains(&vbd) {
                vbds.push(vbd);
            }
        }
        Ok(vbds)
    }
}

async fn begin(client: &Client, vbd: Uuid) -> Row {
    let mut row = Row { vbd, task: None, upgraded: None, problem: None };
    match client.vbd_upgrade(vbd).await {
        Ok(Answer::Begun(task)) => row.take(*task),
        Ok(Answer::Done(upgraded)) => row.upgraded = Some(upgraded),
        Err(problem) => row.problem = Some(problem),
    }
    row
}

/// Waits for all tasks. The first interrupt cancels those that can be cancelled, the second one stops waiting.
async fn see_to_end(client: &Client, rows: &mut [Row]) -> Result<(), Problem> {
    let interrupts = signal(SignalKind::interrupt());
    let mut interrupts = interrupts.map_err(|error| Problem::failed("handle an interrupt", error))?;
    let mut interrupted = false;
    for at in 0..rows.len() {
        while let Some(open) = rows.get(at).and_then(Row::open) {
            match next(client, open, &mut interrupts).await? {
                Some(task) => rows.iter_mut().skip(at).take(1).for_each(|row| row.take(task.clone())),
                None if interrupted => {
                    let what = "the upgrades are still running in the background";
                    return Err(Problem::new(Code::Failed, what).advise("follow them with 'tapline task list'"));
                }
                None => {
                    interrupted = true;
                    say("tapline: cancelling upgrades that have not begun; Ctrl-C again to stop waiting\n");
                    for row in rows.iter().skip(at) {
                        cancel(client, row).await;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A task's state after a while; `None` if interrupted.
async fn next(client: &Client, task: Uuid, interrupts: &mut Signal) -> Result<Option<Task>, Problem> {
    tokio::select! {
        now = client.task_wait(task, STEP) => now.map(Some),
        _ = interrupts.recv() => Ok(None),
    }
}

async fn cancel(client: &Client, row: &Row) {
    let Some(task) = row.open() else { return };
    if let Err(problem) = client.task_cancel(task).await {
        say(&format!("tapline: {} continues: {problem}\n", row.vbd));
    }
}

impl Row {
    /// The row's task, unless it has ended.
    fn open(&self) -> Option<Uuid> {
        self.task.as_ref().filter(|task| !task.state.is_over()).map(|task| task.uuid)
    }

    /// Updates the row from its task.
    fn take(&mut self, task: Task) {
        match task.state {
            TaskState::Done => {
                self.upgraded = task.result.clone().and_then(|result| serde_json::from_value(result).ok());
            }
            state if state.is_over() => self.problem = Some(wait::why(&task)),
            _ => {}
        }
        self.task = Some(task);
    }
}

/// An error unless all upgrades succeeded.
fn outcome(rows: &[Row]) -> Result<(), Problem> {
    let failed: Vec<&Problem> = rows.iter().filter_map(|row| row.problem.as_ref()).collect();
    match failed.as_slice() {
        [] => Ok(()),
        [one] if rows.len() == 1 => Err((*one).clone()),
        [first, ..] => {
            let what = format!("{} of {} block devices were not upgraded", failed.len(), rows.len());
            let problem = Problem::new(Code::Failed, what);
            Err(match &first.advice {
                Some(advice) => problem.advise(format!("for the first one: {advice}")),
                None => problem,
            })
        }
    }
}
