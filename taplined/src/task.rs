//! Tasks: long-running operations. Each runs as a tokio task; those that leave something behind use a journal
//! ([`job`]).

mod attend;
pub mod job;
mod part;
pub mod process;
pub mod started;
pub mod wanted;

use std::collections::HashMap;
use std::fmt::Display;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{Code, ObjectKind, Problem, Requester, Task, TaskState, Transfer};
use futures_util::future::BoxFuture;
use repo::Catalogue;
use repo::catalogue::{Answered, NewTask, RequestKey, on_behalf_of};
use serde_json::Value;
use tokio::sync::watch;
use uuid::Uuid;

use self::started::{Running, Started};
use self::wanted::{Want, Wanted};
use crate::background;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};
use crate::{panics, request};

/// Time limit for tasks to end when the daemon stops. The journal has those that have not.
const TO_STOP: Duration = Duration::from_secs(10);

/// Pause before recording the end of a task is retried.
const RECORD_AGAIN_AFTER: Duration = Duration::from_secs(5);

/// Advice about the objects of an abandoned task.
const ABANDONED: &str = "VDIs that it was changing are marked diverged: examine them with 'tapline sr scan', then \
    choose: tapline vdi reconcile VDI --believe disk|catalogue";

/// The step name under which a rollback is reported.
const UNDO: &str = "undo";

/// Delay of the threads of steps with the planted bug of a rollback that does not wait for them; the rollback itself
/// is not delayed, or it would come after them nevertheless.
const SLOW: Duration = Duration::from_millis(150);

/// The running tasks.
#[derive(Debug)]
pub struct Tasks {
    catalogue: Catalogue,
    running: Mutex<HashMap<Uuid, watch::Sender<TaskControl>>>,
    /// The number of running tasks, for waiting until all have ended.
    count: watch::Sender<usize>,
    /// Whether the daemon is stopping: tasks cancelled from then on were not cancelled by a user.
    stopping: AtomicBool,
    /// VDIs on which no merge may begin.
    pub wanted: Wanted,
    rules: Rules,
}

/// How a daemon's tasks treat the verbs that they carry out.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The verb of jobs that give way to any other operation on their VDI.
    pub gives_way: &'static str,
    /// Called when a task has ended.
    pub when_ended: fn(Daemon, Ended) -> BoxFuture<'static, ()>,
}

/// A task that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The VDIs that it was about.
    pub vdis: Vec<Uuid>,
    /// Repositories that may need a cleanup.
    pub tidies: Vec<Uuid>,
    /// Whether it succeeded.
    pub done: bool,
}

/// The context of a task.
#[derive(Clone, Debug)]
pub struct Context {
    /// The task, as it was when its step began.
    task: Task,
    catalogue: Catalogue,
    cancelled: watch::Receiver<TaskControl>,
    /// The same requests, for work that continues although the task was cancelled.
    abandoned: watch::Receiver<TaskControl>,
    /// Time of the last progress.
    progressed: watch::Sender<Instant>,
    /// Threads and processes of its steps that may still be running.
    started: Started,
}

/// A request to a running task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskControl {
    Continue,
    /// Roll back.
    Cancel,
    /// Leave everything as it is.
    Abandon,
}

/// The work of a task, behind pointers: all that follows is compiled once, not for each verb.
type Work = Box<dyn FnOnce(Context) -> BoxFuture<'static, Result<Value, Problem>> + Send>;

impl Tasks {
    /// Creates the state with no task running.
    pub fn new(catalogue: Catalogue, rules: Rules) -> Tasks {
        Tasks {
            catalogue,
            running: Mutex::default(),
            count: watch::channel(0).0,
            stopping: AtomicBool::new(false),
            wanted: Wanted::default(),
            rules,
        }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<Uuid, watch::Sender<TaskControl>>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a task that leaves nothing behind, or cleans up by itself.
    pub async fn start<W, F>(&self, daemon: &Daemon, new: NewTask, work: W) -> Result<Task, Problem>
    where
        W: FnOnce(Context) -> F + Send + 'static,
        F: Future<Output = Result<Value, Problem>> + Send + 'static,
    {
        let key = request::take_key();
        let task = self.catalogue.write(move |tx| add_task(tx, &new, key.as_ref())).await?;
        self.run(daemon, task.clone(), Vec::new(), work);
        Ok(task)
    }

    /// Runs a recorded task, and starts a cleanup of its repositories afterwards if necessary.
    fn run<W, F>(&self, daemon: &Daemon, task: Task, tidies: Vec<Uuid>, work: W)
    where
        W: FnOnce(Context) -> F + Send + 'static,
        F: Future<Output = Result<Value, Problem>> + Send + 'static,
    {
        self.run_boxed(daemon, task, tidies, Box::new(|context| Box::pin(work(context))));
    }

    fn run_boxed(&self, daemon: &Daemon, task: Task, tidies: Vec<Uuid>, work: Work) {
        let (cancel, cancelled) = watch::channel(TaskControl::Continue);
        let uuid = task.uuid;
        self.running().insert(uuid, cancel);
        self.count.send_modify(|count| *count = count.saturating_add(1));
        panics::tasks(*self.count.borrow());
        let verb = task.verb.clone();
        let of_vdis = task.about.iter().filter(|about| about.kind == ObjectKind::Vdi);
        let vdis: Vec<Uuid> = of_vdis.map(|about| about.uuid).collect();
        let name = format!("the task {uuid}, {verb}");
        let requester = task.requester.clone();
        let abandoned = cancelled.clone();
        let progressed = watch::channel(Instant::now()).0;
        let (catalogue, started) = (self.catalogue.clone(), Started::none());
        let context = Context { task, catalogue, cancelled, abandoned, progressed, started };
        let daemon = daemon.clone();
        background::spawn(panics::during(
            name,
            on_behalf_of(requester, async move {
                let outcome = work(context).await;
                let done = outcome.is_ok();
                daemon.tasks.end(uuid, &verb, outcome).await;
                let when_ended = daemon.tasks.rules.when_ended;
                when_ended(daemon, Ended { vdis, tidies, done }).await;
            }),
        ));
    }

    async fn end(&self, uuid: Uuid, verb: &str, outcome: Result<Value, Problem>) {
        match &outcome {
            Ok(_) => tracing::info!(task = %uuid, verb, "done"),
            Err(problem) => tracing::warn!(task = %uuid, verb, code = ?problem.code, "{problem}"),
        }
        loop {
            let outcome = outcome.clone();
            // An abandoned task has already ended.
            let ended = self.catalogue.write(move |tx| match tx.task(uuid)?.state.is_over() {
                true => Ok(()),
                false => tx.end_task(uuid, outcome),
            });
            let Err(problem) = ended.await else { break };
            // The catalogue's file system may be full. The objects stay reserved until the end is recorded.
            tracing::error!(task = %uuid, verb, "its end could not be recorded; retrying: {problem}");
            tokio::time::sleep(RECORD_AGAIN_AFTER).await;
        }
        self.running().remove(&uuid);
        self.count.send_modify(|count| *count = count.saturating_sub(1));
        panics::tasks(*self.count.borrow());
    }

    /// Cancels a task, which then rolls back; does not wait for that.
    pub async fn cancel(&self, uuid: Uuid) -> Result<Task, Problem> {
        let task = self.catalogue.write(move |tx| tx.set_task_cancelling(uuid)).await?;
        self.notify_cancelled(uuid);
        Ok(task)
    }

    /// Notifies a task that is recorded as cancelled.
    pub fn notify_cancelled(&self, uuid: Uuid) {
        if let Some(cancel) = self.running().get(&uuid) {
            cancel.send_replace(TaskControl::Cancel);
        }
    }

    /// Abandons a task that can neither complete nor roll back, and releases its objects. What it has left half done
    /// is unknown: VDIs whose files it was changing are not used until a user has decided about them.
    pub async fn abandon(&self, uuid: Uuid) -> Result<Task, Problem> {
        let task = self.catalogue.read(move |view| view.task(uuid)).await?;
        let retried = task.problem.filter(|_| !task.state.is_over() || task.state == TaskState::Stuck);
        let Some(why) = retried else {
            let what = format!("the task {} {uuid} makes progress: it is not stuck or being retried", task.verb);
            return Err(Problem::new(Code::State, what).advise("cancel it or wait for it"));
        };
        let what = format!("it was abandoned unfinished: {}", why.detail);
        let problem = Problem::new(Code::Failed, what).advise(ABANDONED);
        tracing::warn!(task = %uuid, verb = task.verb, "{problem}");
        let abandoned = problem.clone();
        let abandoned = request::change(&self.catalogue, 200, move |tx| {
            tx.abandon_task(uuid, &abandoned)?;
            tx.task(uuid)
        });
        let task = abandoned.await?;
        if let Some(running) = self.running().get(&uuid) {
            running.send_replace(TaskControl::Abandon);
        }
        Ok(task)
    }

    /// Makes tasks that have ended according to the catalogue stop without rolling back.
    pub fn abandon_ended(&self, ended: &[Uuid]) {
        let running = self.running();
        for task in ended.iter().filter_map(|task| running.get(task)) {
            task.send_replace(TaskControl::Abandon);
        }
    }

    /// Waits until a task has ended, at most for `patience`; returns its state then.
    pub async fn wait(&self, uuid: Uuid, patience: Duration) -> Result<Task, Problem> {
        match tokio::time::timeout(patience, self.end_of(uuid)).await {
            Ok(task) => task,
            Err(_) => self.catalogue.read(move |view| view.task(uuid)).await,
        }
    }

    /// Waits until a task has ended, without time limit; returns the task, or the problem with which it failed.
    pub async fn success_of(&self, uuid: Uuid) -> Result<Task, Problem> {
        let task = self.end_of(uuid).await?;
        if task.state == TaskState::Done {
            return Ok(task);
        }
        let unknown = || Problem::new(Code::Failed, format!("the task {} {uuid} has failed", task.verb));
        Err(task.problem.unwrap_or_else(unknown))
    }

    async fn end_of(&self, uuid: Uuid) -> Result<Task, Problem> {
        let mut events = self.catalogue.subscribe();
        loop {
            let task = self.catalogue.read(move |view| view.task(uuid)).await?;
            if task.state.is_over() {
                return Ok(task);
            }
            // A receiver that lags behind has missed events: the current state counts.
            while let Ok(event) = events.recv().await {
                if event.uuid == uuid {
                    break;
                }
            }
        }
    }

    /// Waits until no task changes the layers of a VDI. For a stuck task, it is unknown what it has changed.
    pub async fn leave(&self, vdi: Uuid) -> Result<(), Problem> {
        loop {
            let _want = self.give_way(vdi).await?;
            let Some(task) = self.catalogue.read(move |view| view.claimant(vdi)).await? else { return Ok(()) };
            let task = self.wait(task, TO_STOP).await?;
            if let (TaskState::Stuck, Some(problem)) = (task.state, task.problem) {
                return Err(problem);
            }
        }
    }

    /// Stops a merge that keeps other operations from a VDI, because it can run at any other time. None begins there
    /// while the returned value exists.
    pub async fn give_way(&self, vdi: Uuid) -> Result<Want, Problem> {
        let want = self.wanted.want(vdi);
        let gives_way = self.rules.gives_way;
        // Comes after all pending commits: a merge that has not seen the request may be among them.
        let merge = self.catalogue.write(move |tx| {
            let holders = tx.holders(vdi)?.into_iter().map(|holder| holder.holder);
            let tasks = tx.claimant(vdi)?.into_iter().chain(holders).map(|task| tx.find_task(task));
            let tasks = tasks.collect::<Result<Vec<_>, Problem>>()?;
            let mut tasks = tasks.into_iter().flatten();
            Ok(tasks.find(|task| task.verb == gives_way && task.state != TaskState::Stuck))
        });
        let Some(merge) = merge.await? else { return Ok(want) };
        if let Err(problem) = self.cancel(merge.uuid).await {
            tracing::debug!(task = %merge.uuid, "it is about to end: {problem}");
        }
        self.wait(merge.uuid, TO_STOP).await.map(|_| want)
    }

    /// Ends the tasks without a journal entry: they ended with the daemon that ran them.
    pub async fn end_unjournalled(&self) -> Result<(), Problem> {
        let ended = || Problem::new(Code::Failed, "the daemon stopped while this was in progress").advise("try again");
        self.catalogue
            .write(move |tx| {
                let journalled: Vec<Uuid> = tx.journal()?.iter().map(|entry| entry.task.uuid).collect();
                for task in tx.tasks(true)?.iter().filter(|task| !journalled.contains(&task.uuid)) {
                    tx.end_task(task.uuid, Err(ended()))?;
                }
                Ok(())
            })
            .await
    }

    /// Whether the daemon is stopping.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Cancels the tasks that can be cancelled, and waits for all, up to a time limit.
    pub async fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        for cancel in self.running().values() {
            cancel.send_replace(TaskControl::Cancel);
        }
        let mut count = self.count.subscribe();
        let ended = tokio::time::timeout(TO_STOP, count.wait_for(|count| *count == 0)).await.is_ok();
        if !ended {
            tracing::warn!(tasks = self.running().len(), "stopping before all tasks have ended; the journal has them");
        }
    }
}

impl Context {
    /// The UUID of the task.
    pub fn uuid(&self) -> Uuid {
        self.task.uuid
    }

    /// Begins a step, unless the task was cancelled. Its name is durable before this returns; from the first
    /// non-cancellable step on, the task cannot be cancelled.
    pub async fn step(&mut self, name: &'static str, cancellable: bool) -> Result<(), Problem> {
        let uuid = self.task.uuid;
        self.task = self.catalogue.write(move |tx| tx.set_task_step(uuid, name, cancellable)).await?;
        Ok(())
    }

    /// Reports the task's progress, from 0 to 1.
    pub fn progress(&self, part: f64) {
        self.progressed.send_replace(Instant::now());
        self.catalogue.progress(&self.task, part);
    }

    /// Reports what the task has transferred.
    pub fn transferred(&self, transfer: Transfer) {
        self.progressed.send_replace(Instant::now());
        self.catalogue.transferred(&self.task, transfer);
    }

    /// Who requested the task.
    pub fn requester(&self) -> Requester {
        self.task.requester.clone()
    }

    /// An error if the task was cancelled.
    pub fn check(&self) -> Result<(), Problem> {
        if *self.cancelled.borrow() == TaskControl::Continue { Ok(()) } else { Err(cancelled()) }
    }

    /// Waits before a retry, and shows the reason in the meantime; an error if the task is abandoned.
    pub async fn rest(&self, pause: Duration, problem: &Problem) -> Result<(), Problem> {
        self.show(Some(problem.clone())).await;
        let mut requested = self.abandoned.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            Ok(_) = requested.wait_for(|requested| *requested == TaskControl::Abandon) => Err(problem.clone()),
        }
    }

    /// A context that ignores cancellation, for work that must complete.
    pub fn regardless(&self) -> Context {
        Context { cancelled: watch::channel(TaskControl::Continue).1, ..self.clone() }
    }

    /// Waits until the task is cancelled.
    pub async fn cancelled(&self) {
        let mut requested = self.cancelled.clone();
        if requested.wait_for(|requested| *requested != TaskControl::Continue).await.is_err() {
            // It can no longer be cancelled.
            std::future::pending().await
        }
    }

    /// Waits for `work` until the task is cancelled; `work` is then dropped.
    pub async fn unless_cancelled<T>(&self, work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        tokio::select! {
            done = work => done,
            () = self.cancelled() => Err(cancelled()),
        }
    }
}

/// Records a task, and that it is the response to the request with this key.
fn add_task(tx: &mut repo::Tx<'_>, new: &NewTask, key: Option<&RequestKey>) -> Result<Task, Problem> {
    let task = tx.add_task(new)?;
    key.map_or(Ok(()), |key| tx.keep_answer(key, &Answered::Task(task.uuid)))?;
    Ok(task)
}

/// Runs work that may wait for storage or another program on a separate thread. `tried` is reported if that thread
/// dies. The thread runs to completion even if the caller stops waiting; an undo of its job waits for it.
pub async fn blocking<T: Send + 'static>(
    tried: impl Display,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let running = Running::begin();
    let counted = move || {
        if running.is_counted() && fault::planted(Planted::HastyUndo) {
            std::thread::sleep(SLOW);
        }
        let done = work();
        drop(running);
        done
    };
    repo::blocking::start(counted).ended().await.unwrap_or_else(|died| Err(Problem::failed(tried, died)))
}

fn cancelled() -> Problem {
    Problem::new(Code::Cancelled, "it was cancelled")
}
