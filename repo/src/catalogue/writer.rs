//! The only thread that writes. It takes all pending changes, makes one commit of them, and then answers each.
//!
//! Invariants: a refused change leaves nothing, whatever else is in the same commit; no change is answered, and no
//! event published, before the commit is durable, in a file that is still in place.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use api::{Code, Problem, Requester};
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::event::EventBus;
use super::inventory::Outbox;
use super::last_commit::LastCommit;
use super::location::FileLocation;
use super::{PATIENCE, Tx, View, failed, requester, reserve};

/// Changes that may wait; who comes then waits to be let in.
const WAITING_MAX: usize = 1024;

/// Changes in one commit: beyond this the sync is a small part of its cost.
const BATCH_MAX: usize = 256;

/// The way to the thread.
#[derive(Debug)]
pub struct Writer {
    changes: mpsc::Sender<Asking>,
    commits: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

/// State of the writer's thread, and the receivers of its commits.
#[derive(Debug)]
pub struct State {
    pub connection: Connection,
    pub location: FileLocation,
    pub event_bus: Arc<EventBus>,
    pub outbox: Arc<Outbox>,
    /// Counts the commits, if they are to be counted.
    pub last_commit: Option<LastCommit>,
    /// A secret was deleted, and may still be in the log.
    pub wipes: bool,
}

impl State {
    /// Empties the log if a deleted secret may be in it; while somebody reads, that is left to the next commit.
    fn wipe(&mut self) {
        if self.wipes && empty_log(&self.connection).is_ok() {
            self.wipes = false;
            self.connection.path().map(Path::new).into_iter().for_each(reserve::keep_for_log_of);
        }
    }
}

/// Moves what is in the log to the catalogue's file, and cuts it off. Does not wait for readers.
pub fn empty_log(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(Duration::ZERO)?;
    let busy = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, bool>(0));
    connection.busy_timeout(PATIENCE)?;
    match busy? {
        false => Ok(()),
        true => Err(rusqlite::Error::QueryReturnedNoRows),
    }
}

/// A request to the thread.
enum Asking {
    Change(Box<dyn Pending>),
    /// To end, with all that it has written in the one file.
    End(oneshot::Sender<Result<(), Problem>>),
}

/// A change, with its waiting caller.
trait Pending: Send {
    /// Applies it, within a transaction that may still fail; returns whether it succeeded.
    fn make(&mut self, tx: &mut Tx<'_>) -> bool;
    /// Says what came of it, when the transaction has ended.
    fn answer(self: Box<Self>, committed: Result<(), Problem>);
}

/// A change of the catalogue, whose closure is behind a pointer so that the rest is compiled for each result only.
pub type Change<T> = Box<dyn FnOnce(&mut Tx<'_>) -> Result<T, Problem> + Send>;

struct Asked<T> {
    change: Option<Change<T>>,
    requester: Requester,
    outcome: Option<Result<T, Problem>>,
    who: oneshot::Sender<Result<T, Problem>>,
}

impl<T: Send> Pending for Asked<T> {
    fn make(&mut self, tx: &mut Tx<'_>) -> bool {
        tx.requester = self.requester.clone();
        self.outcome = self.change.take().map(|change| change(tx));
        matches!(self.outcome, Some(Ok(_)))
    }

    fn answer(self: Box<Self>, committed: Result<(), Problem>) {
        let outcome = match (self.outcome, committed) {
            (Some(Err(refused)), _) => Err(refused),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (_, Err(problem)) => Err(problem),
            (None, Ok(())) => Err(ended()),
        };
        // The caller may have stopped waiting; the change stays.
        self.who.send(outcome).ok();
    }
}

impl Writer {
    /// Starts the thread, which ends when no handle is left.
    pub fn start(state: State) -> Result<Writer, Problem> {
        let (changes, waiting) = mpsc::channel(WAITING_MAX);
        let thread = std::thread::Builder::new().name("catalogue".into());
        let commits = Arc::<AtomicU64>::default();
        let counted = commits.clone();
        let started = thread.spawn(move || run(state, waiting, &counted));
        let thread = started.map_err(|error| Problem::failed("start the catalogue's thread", error))?;
        Ok(Writer { changes, commits, thread })
    }

    /// Waits for the end of the thread, after all requested changes.
    pub fn join(self) {
        drop(self.changes);
        // Its panic has already been reported.
        self.thread.join().ok();
    }

    /// How many commits there were.
    pub fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// Applies a change.
    pub async fn write<T: Send + 'static>(&self, change: Change<T>) -> Result<T, Problem> {
        let (who, answer) = oneshot::channel();
        let asked = Box::new(Asked { change: Some(change), requester: requester::current(), outcome: None, who });
        self.changes.send(Asking::Change(asked)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }

    /// Stops the thread after all earlier requests.
    pub async fn end(&self) -> Result<(), Problem> {
        let (who, answer) = oneshot::channel();
        self.changes.send(Asking::End(who)).await.map_err(|_| ended())?;
        answer.await.map_err(|_| ended())?
    }
}

fn ended() -> Problem {
    Problem::new(Code::Internal, "the catalogue's thread has ended")
}

fn run(mut state: State, mut waiting: mpsc::Receiver<Asking>, commits: &AtomicU64) {
    let mut batch = Vec::new();
    let mut end = None;
    while let Some(first) = waiting.blocking_recv() {
        let mut next = Some(first);
        while let Some(asking) = next.take() {
            match asking {
                Asking::Change(change) => batch.push(change),
                Asking::End(who) => end = Some(who),
            }
            if end.is_none() && batch.len() < BATCH_MAX {
                next = waiting.try_recv().ok();
            }
        }
        if !batch.is_empty() {
            let there = state.location.must_be_there();
            let committed = there.and_then(|()| commit(&mut state, &mut batch));
            if matches!(&committed, Err(problem) if problem.code == Code::NoSpace) {
                start_log_again(&state.connection);
            }
            commits.fetch_add(1, Ordering::Relaxed);
            state.wipe();
            for change in batch.drain(..) {
                change.answer(committed.clone());
            }
        }
        if let Some(who) = end.take() {
            // The caller may have stopped waiting.
            who.send(put_into_one(&state.connection)).ok();
            return;
        }
    }
}

/// Moves the content of the log to the catalogue's file, so that the next commit finds the log's space free. A client
/// whose commit was refused retries.
fn start_log_again(connection: &Connection) {
    // If there is no space for that either, the next commit says so.
    connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).ok();
}

/// Moves everything committed into the one file, and removes the files next to it.
fn put_into_one(connection: &Connection) -> Result<(), Problem> {
    let busy: bool = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0)).map_err(failed)?;
    match busy {
        false => Ok(()),
        true => Err(Problem::new(Code::Busy, "the catalogue still has readers")),
    }
}

/// One commit of all changes that are not refused. Those who were are known by their outcome.
fn commit(state: &mut State, batch: &mut [Box<dyn Pending>]) -> Result<(), Problem> {
    let State { connection, event_bus, outbox, last_commit, .. } = state;
    let unchanged = connection.total_changes();
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).map_err(failed)?;
    let view = View { connection: &transaction, event_bus };
    let mut tx = Tx { view, requester: Requester::Daemon, touched: Vec::new(), noted: Vec::new(), wipes: false };
    for change in batch {
        let (before, noted) = (tx.touched.len(), tx.noted.len());
        tx.execute("SAVEPOINT change", [])?;
        if !change.make(&mut tx) {
            tx.execute("ROLLBACK TO change", [])?;
            tx.touched.truncate(before);
            tx.noted.truncate(noted);
        }
        tx.execute("RELEASE change", [])?;
    }
    let wipes = tx.wipes;
    let recorded = tx.record_inventories(outbox)?;
    let events = tx.events()?;
    // A commit of nothing costs no sync.
    let mut counts = last_commit.as_mut().filter(|_| transaction.total_changes() != unchanged);
    counts.as_mut().map_or(Ok(()), |last| last.count(&transaction)).map_err(failed)?;
    transaction.commit().map_err(failed)?;
    counts.into_iter().for_each(LastCommit::made);
    outbox.recorded(&recorded);
    event_bus.tell(events);
    state.wipes |= wipes;
    Ok(())
}
