//! Tasks, and the journal of those that must be all or nothing.
//!
//! A task that leaves something behind records its *intent* before it does anything: everything needed to complete it
//! or to roll it back, including the UUIDs of what it will create. Then, before each step, the step's name. Unfinished
//! tasks are completed or rolled back from that when the daemon starts.

use api::{About, Change, Code, ObjectKind, Problem, Task, TaskState};
use jiff::Timestamp;
use rusqlite::{Row, named_params};
use serde_json::Value;
use uuid::Uuid;

use super::image::{Image, ImageState};
use super::row::{Id, Json, Time, Word};
use super::{Tx, View, not_found};

/// The maximum number of finished tasks kept for later queries.
const OVER_KEPT: u32 = 2000;

/// A task that is to be.
#[derive(Clone, Debug)]
pub struct NewTask {
    /// Its identity.
    pub uuid: Uuid,
    /// The verb.
    pub verb: &'static str,
    /// The objects concerned.
    pub about: Vec<About>,
    /// Whether it can be cancelled at once.
    pub cancellable: bool,
    /// Everything needed to complete it or to roll it back; `None` if it leaves nothing behind.
    pub intent: Option<Value>,
}

/// A task of the journal that is not over.
#[derive(Clone, Debug, PartialEq)]
pub struct Journalled {
    /// The task.
    pub task: Task,
    /// Everything needed to complete it or to roll it back; a string if it is not even JSON.
    pub intent: Value,
}

const COLUMNS: &str = "uuid, verb, about, state, step, cancellable, intent, result, problem, created, ended, requester";

impl View<'_> {
    fn task_of_row(&self, row: &Row<'_>) -> rusqlite::Result<Task> {
        let uuid = row.get::<_, Id>("uuid")?.0;
        let state: TaskState = row.get::<_, Word<_>>("state")?.0;
        let (progress, transfer) = match state {
            TaskState::Done => (1.0, None),
            _ => self.event_bus.progress_of(uuid).unwrap_or_default(),
        };
        Ok(Task {
            uuid,
            verb: row.get("verb")?,
            about: row.get::<_, Json<_>>("about")?.0,
            state,
            progress,
            transfer,
            step: row.get("step")?,
            cancellable: row.get("cancellable")?,
            result: row.get::<_, Option<Json<_>>>("result")?.map(|json| json.0),
            problem: row.get::<_, Option<Json<Problem>>>("problem")?.map(|json| json.0.of_task(uuid)),
            requester: row.get::<_, Json<_>>("requester")?.0,
            created: row.get::<_, Time>("created")?.0,
            ended: row.get::<_, Option<Time>>("ended")?.map(|time| time.0),
        })
    }

    /// The tasks, latest first; with `open` only unfinished ones.
    pub fn tasks(&self, open: bool) -> Result<Vec<Task>, Problem> {
        let over = "('done', 'failed', 'cancelled')";
        let only = if open { format!("WHERE state NOT IN {over}") } else { String::new() };
        self.rows(&format!("SELECT {COLUMNS} FROM task {only} ORDER BY seq DESC"), [], |row| self.task_of_row(row))
    }

    /// How many tasks are not over.
    pub fn count_open_tasks(&self) -> Result<u64, Problem> {
        let sql = "SELECT count(*) FROM task WHERE state NOT IN ('done', 'failed', 'cancelled')";
        Ok(self.row(sql, [], |row| row.get(0))?.unwrap_or(0))
    }

    /// The number of tasks that have not ended and have no problem.
    pub fn count_working_tasks(&self) -> Result<u64, Problem> {
        let sql = "SELECT count(*) FROM task WHERE state IN ('pending', 'running', 'cancelling') AND problem IS NULL";
        Ok(self.row(sql, [], |row| row.get(0))?.unwrap_or(0))
    }

    /// A task, if there is one.
    pub fn find_task(&self, uuid: Uuid) -> Result<Option<Task>, Problem> {
        self.row(&format!("SELECT {COLUMNS} FROM task WHERE uuid = ?1"), [Id(uuid)], |row| self.task_of_row(row))
    }

    /// A task; an error if there is none with this UUID.
    pub fn task(&self, uuid: Uuid) -> Result<Task, Problem> {
        self.find_task(uuid)?.ok_or_else(|| not_found(ObjectKind::Task, uuid))
    }

    /// The unfinished tasks of the journal, in the order of their requests.
    pub fn journal(&self) -> Result<Vec<Journalled>, Problem> {
        let sql = format!(
            "SELECT {COLUMNS} FROM task WHERE state NOT IN ('done', 'failed', 'cancelled') AND intent IS NOT NULL
             ORDER BY seq"
        );
        self.rows(&sql, [], |row| {
            let intent: String = row.get("intent")?;
            let intent = serde_json::from_str(&intent).unwrap_or(Value::String(intent));
            Ok(Journalled { task: self.task_of_row(row)?, intent })
        })
    }
}

impl Tx<'_> {
    /// Records a task.
    pub fn add_task(&mut self, task: &NewTask) -> Result<Task, Problem> {
        self.execute(
            "INSERT INTO task (uuid, verb, about, state, cancellable, intent, created, requester)
             VALUES (:uuid, :verb, :about, :state, :cancellable, :intent, :created, :requester)",
            named_params! {
                ":uuid": Id(task.uuid), ":verb": task.verb, ":about": Json(&task.about),
                ":state": Word(TaskState::Pending), ":cancellable": task.cancellable,
                ":intent": task.intent.as_ref().map(Json), ":created": Time(Timestamp::now()),
                ":requester": Json(&self.requester),
            },
        )?;
        self.execute(
            "DELETE FROM task WHERE seq IN (SELECT seq FROM task WHERE state IN ('done', 'failed', 'cancelled')
             ORDER BY seq DESC LIMIT -1 OFFSET ?1)",
            [OVER_KEPT],
        )?;
        self.touch(ObjectKind::Task, task.uuid, Change::Added);
        self.task(task.uuid)
    }

    /// A task begins a step, unless it was cancelled.
    pub fn set_task_step(&mut self, uuid: Uuid, step: &str, cancellable: bool) -> Result<Task, Problem> {
        if self.task(uuid)?.state == TaskState::Cancelling {
            return Err(Problem::new(Code::Cancelled, "it was cancelled"));
        }
        self.execute(
            "UPDATE task SET step = ?2, cancellable = ?3, problem = ?4,
             state = CASE state WHEN 'pending' THEN 'running' ELSE state END WHERE uuid = ?1",
            (Id(uuid), step, cancellable, self.stuck_disk_of(uuid)?.as_ref().map(Json)),
        )?;
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        self.task(uuid)
    }

    /// A cancelled task starts to roll back. Refused in the commit that begins a step of no return, and from then on.
    pub fn set_task_cancelling(&mut self, uuid: Uuid) -> Result<Task, Problem> {
        let task = self.task(uuid)?;
        if task.state.is_over() || !task.cancellable {
            return Err(not_cancellable(task));
        }
        self.execute(
            "UPDATE task SET state = ?2, cancellable = FALSE WHERE uuid = ?1",
            (Id(uuid), Word(TaskState::Cancelling)),
        )?;
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        self.task(uuid)
    }

    /// A task of the journal that this daemon can neither complete nor roll back, and why. It keeps its objects.
    pub fn set_task_stuck(&mut self, uuid: Uuid, why: &Problem) -> Result<(), Problem> {
        self.execute(
            "UPDATE task SET state = ?2, cancellable = FALSE, problem = ?3 WHERE uuid = ?1",
            (Id(uuid), Word(TaskState::Stuck), Json(why)),
        )?;
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        Ok(())
    }

    /// Why a task makes no progress: its step is being retried or waits; `None` if it makes progress. While a
    /// disk that it changes is stuck, that is why.
    pub fn set_task_problem(&mut self, uuid: Uuid, why: Option<&Problem>) -> Result<(), Problem> {
        let stuck = self.stuck_disk_of(uuid)?;
        let why = stuck.as_ref().or(why);
        let sql = "UPDATE task SET problem = ?2 WHERE uuid = ?1 AND ended IS NULL";
        self.execute(sql, (Id(uuid), why.map(Json)))?;
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        Ok(())
    }

    /// Ends a task that can be neither completed nor rolled back, and releases its objects. The state of its images is
    /// unknown.
    pub fn abandon_task(&mut self, uuid: Uuid, why: &Problem) -> Result<(), Problem> {
        let held =
            self.rows("SELECT object FROM claim WHERE task = ?1", [Id(uuid)], |row| Ok(row.get::<_, Id>(0)?.0))?;
        for object in held {
            let image = match self.find_vdi(object)? {
                Some(vdi) => Some(self.vdi_image(vdi.uuid)?),
                None => self.find_image(object)?.map(|image| image.uuid),
            };
            let Some(image) = image.map(|image| self.image(image)).transpose()? else { continue };
            if image.state == ImageState::Ready {
                self.set_image(&Image { state: ImageState::Diverged, ..image })?;
            }
        }
        self.end_task(uuid, Err(why.clone()))
    }

    /// Resumes a task that was stuck in an earlier daemon.
    pub fn set_task_unstuck(&mut self, uuid: Uuid) -> Result<(), Problem> {
        self.execute(
            "UPDATE task SET state = ?2, problem = NULL WHERE uuid = ?1 AND state = ?3",
            (Id(uuid), Word(TaskState::Running), Word(TaskState::Stuck)),
        )?;
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        Ok(())
    }

    /// Ends a task and releases its objects.
    pub fn end_task(&mut self, uuid: Uuid, outcome: Result<Value, Problem>) -> Result<(), Problem> {
        let state = match &outcome {
            Ok(_) => TaskState::Done,
            Err(problem) if problem.code == Code::Cancelled => TaskState::Cancelled,
            Err(_) => TaskState::Failed,
        };
        let (result, problem) = match &outcome {
            Ok(value) => (Some(Json(value)), None),
            Err(problem) => (None, Some(Json(problem))),
        };
        self.execute(
            "UPDATE task SET state = ?2, cancellable = FALSE, result = ?3, problem = ?4, ended = ?5 WHERE uuid = ?1",
            (Id(uuid), Word(state), result, problem, Time(Timestamp::now())),
        )?;
        self.drop_leases(uuid)?;
        self.drop_claims(uuid)?;
        self.drop_name_claim(uuid)?;
        self.event_bus.forget_progress(uuid);
        self.touch(ObjectKind::Task, uuid, Change::Changed);
        Ok(())
    }
}

/// Why a task cannot be cancelled, and what to do.
fn not_cancellable(task: Task) -> Problem {
    let stuck = task.problem.and_then(|problem| problem.advice).filter(|_| task.state == TaskState::Stuck);
    let (why, advice) = match (task.state, task.step, stuck) {
        (_, _, Some(advice)) => ("is stuck".into(), advice),
        (state, ..) if state.is_over() => ("has ended".into(), "see its result: tapline task show".into()),
        (TaskState::Cancelling, ..) => ("is being cancelled".into(), "wait until it is rolled back".into()),
        (_, Some(step), _) => {
            (format!("has begun its step '{step}', which has no rollback"), "wait for its end".into())
        }
        (_, None, _) => ("has no rollback".into(), "wait for its end".into()),
    };
    let what = format!("the task {} {} cannot be cancelled: it {why}", task.verb, task.uuid);
    Problem::new(Code::State, what).advise(advice)
}
