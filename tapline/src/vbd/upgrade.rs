//! `tapline vbd upgrade`: one task per block device, all started together, with their results in one table.
//!
//! The daemon runs a few at a time. A failed upgrade does not affect the others.

use api::client::{Answer, Client};
use api::{Code, Problem, Task, TaskState, VbdState, VbdUpgraded};
use serde::Serialize;
use tokio::signal::unix::{Signal, SignalKind, signal};
use uuid::Uuid;

use crate::column::{Column, Uuids};
use crate::output::say;
use crate::session::{Listing, Session, print};
use crate::wait;

/// Duration of a long-poll request for a task's end, in seconds.
const STEP: u32 = 10;

/// Arguments of `vbd upgrade`.
#[derive(clap::Args)]
pub struct Upgrade {
    #[command(flatten)]
    which: UpgradeSelection,
    /// Return as soon as all tasks have begun, and print their UUIDs
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    listing: Listing,
}

/// Some block devices, or all plugged ones.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct UpgradeSelection {
    /// UUID prefix; if several are given, a failure does not stop the others
    vbd: Vec<String>,
    /// All plugged block devices, a few at a time
    #[arg(long)]
    all: bool,
}

/// A block device, and the result of its upgrade when known.
#[derive(Debug, Serialize)]
struct UpgradeRow {
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

type UpgradeColumn = Column<UpgradeRow>;

const COLUMNS: &[UpgradeColumn] = &[
    UpgradeColumn::new("uuid", |row, uuids| uuids.show(row.vbd)),
    UpgradeColumn::new("pause", |row, _| {
        row.upgraded.as_ref().and_then(|done| done.pause_us).map(pause).unwrap_or_default()
    })
    .right(),
    UpgradeColumn::new("pid", |row, _| number(row, |done| done.vbd.pid)).right(),
    UpgradeColumn::new("replaced", |row, _| number(row, |done| Some(done.replaced))).right(),
    UpgradeColumn::new("note", note),
];

fn number(row: &UpgradeRow, of: impl Fn(&VbdUpgraded) -> Option<u32>) -> String {
    row.upgraded.as_ref().and_then(of).map(|number| number.to_string()).unwrap_or_default()
}

fn note(row: &UpgradeRow, _: Uuids) -> String {
    match (&row.problem, &row.upgraded) {
        (Some(problem), _) => format!("failed: {problem}"),
        (None, Some(upgraded)) => upgraded.note.clone().unwrap_or_default(),
        (None, None) => String::new(),
    }
}

/// Formats microseconds as milliseconds.
fn pause(us: u64) -> String {
    format!("{}.{} ms", us / 1000, us % 1000 / 100)
}

impl Upgrade {
    /// Runs the verb and prints its output.
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
        wait_for_all(&session.client, &mut rows).await?;
        // If there was only one upgrade and it failed, the error message suffices.
        let is_only_a_problem = matches!(rows.as_slice(), [UpgradeRow { problem: Some(_), .. }]);
        if session.json() || !is_only_a_problem {
            session.list(&rows, COLUMNS, &self.listing)?;
        }
        outcome(&rows)
    }
}

impl UpgradeSelection {
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

async fn begin(client: &Client, vbd: Uuid) -> UpgradeRow {
    let mut row = UpgradeRow { vbd, task: None, upgraded: None, problem: None };
    match client.vbd_upgrade(vbd).await {
        Ok(Answer::Begun(task)) => row.take(*task),
        Ok(Answer::Done(upgraded)) => row.upgraded = Some(upgraded),
        Err(problem) => row.problem = Some(problem),
    }
    row
}

/// Waits for all tasks. The first interrupt cancels tasks that can be cancelled, the second one stops the wait.
async fn wait_for_all(client: &Client, rows: &mut [UpgradeRow]) -> Result<(), Problem> {
    let interrupts = signal(SignalKind::interrupt());
    let mut interrupts = interrupts.map_err(|error| Problem::failed("handle an interrupt", error))?;
    let mut interrupted = false;
    for at in 0..rows.len() {
        while let Some(open) = rows.get(at).and_then(UpgradeRow::open) {
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

/// Waits for a change of a task; `None` if interrupted.
async fn next(client: &Client, task: Uuid, interrupts: &mut Signal) -> Result<Option<Task>, Problem> {
    tokio::select! {
        now = client.task_wait(task, STEP) => now.map(Some),
        _ = interrupts.recv() => Ok(None),
    }
}

async fn cancel(client: &Client, row: &UpgradeRow) {
    let Some(task) = row.open() else { return };
    if let Err(problem) = client.task_cancel(task).await {
        say(&format!("tapline: {} continues: {problem}\n", row.vbd));
    }
}

impl UpgradeRow {
    /// The row's task if it has not ended.
    fn open(&self) -> Option<Uuid> {
        self.task.as_ref().filter(|task| !task.state.is_over()).map(|task| task.uuid)
    }

    /// Updates the row from its task.
    fn take(&mut self, task: Task) {
        match task.state {
            TaskState::Done => {
                self.upgraded = task.result.clone().and_then(|result| serde_json::from_value(result).ok());
            }
            state if state.is_over() => self.problem = Some(wait::failure(&task)),
            _ => {}
        }
        self.task = Some(task);
    }
}

/// Returns an error unless all upgrades succeeded.
fn outcome(rows: &[UpgradeRow]) -> Result<(), Problem> {
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
