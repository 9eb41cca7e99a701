//! The catalogue of everything on this host, in one SQLite file.
//!
//! Readers see the state between two commits; writes go through one thread, which makes one commit of all pending
//! changes, so that many small changes cost one sync. An acknowledged change survives a power loss; a refused one
//! leaves nothing. Every change of an object is published as an event, after its commit and in commit order.
//!
//! It knows rows, not what they stand for: no files, no processes, and no time but the ones that it is given to record.

mod autostart;
pub mod backup;
mod backup_base;
mod backup_schedule;
mod backup_target;
mod cbt;
mod event;
mod health;
mod identity;
mod image;
mod inventory;
mod last_commit;
mod lease;
mod location;
mod name;
mod request;
mod requester;
mod reserve;
mod row;
mod seal;
mod seed;
mod sound;
mod sr;
mod take_in;
mod task;
mod token;
mod vbd;
mod vdi;
mod vm;
mod vm_memory;
mod vm_snapshot;
mod writer;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{Code, ObjectKind, Problem, Requester};
use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension};
use tokio::sync::{Semaphore, broadcast};
use uuid::Uuid;

use crate::blocking;

pub use autostart::ToStart;
pub use backup_base::KeptBase;
pub use backup_schedule::BackupOutcome;
pub use backup_target::BackupSnapshot;
pub use event::{EventBus, Past};
use health::HealthBoard;
pub use image::{Image, ImageState, file_name};
pub use inventory::{Outbox, Recorded};
use last_commit::LastCommit;
pub use lease::Holder;
use location::FileLocation;
pub use name::Among;
pub use request::{Answered, RequestKey};
pub use requester::on_behalf_of;
pub use sound::Look;
pub use take_in::TakenIn;
pub use task::{Journalled, NewTask};
pub use token::SecretHash;
pub use vbd::Process;
pub use vdi::{NewVdi, must_divide};
pub use vm::VmProcess;
pub use vm_memory::{ADVICE as ADVICE_FOR_SUSPENDED, DiskOfMemory, ImageOfMemory, VmMemory};
use writer::{Change, State, Writer};

/// The version of the schema, in the file's `user_version`.
const VERSION: i64 = 24;

/// The version that `schema.sql` creates. Catalogues of earlier versions are refused: Tapline 0.1 is the first release.
const FIRST: i64 = 17;

/// The first entry creates version [`FIRST`]; each later version adds an entry, which upgrades the schema of the one
/// before.
const MIGRATIONS: [&str; 8] = [
    include_str!("catalogue/schema.sql"),
    include_str!("catalogue/schema-18.sql"),
    include_str!("catalogue/schema-19.sql"),
    include_str!("catalogue/schema-20.sql"),
    include_str!("catalogue/schema-21.sql"),
    include_str!("catalogue/schema-22.sql"),
    include_str!("catalogue/schema-23.sql"),
    include_str!("catalogue/schema-24.sql"),
];

/// How long another program that reads the file may lock it.
const PATIENCE: Duration = Duration::from_secs(10);

/// Concurrent reads by the daemon itself, and by its clients: each has a thread and a connection. More would wait for
/// processors anyway; and however many clients there are, they take none from the daemon.
const READERS: usize = 4;
const READERS_OF_CLIENTS: usize = 4;

/// The catalogue. Cheap to clone; all clones are the same one.
#[derive(Clone, Debug)]
pub struct Catalogue {
    writer: Arc<Writer>,
    readers: Arc<Readers>,
    event_bus: Arc<EventBus>,
    outbox: Arc<Outbox>,
    damage: Arc<Damage>,
}

/// Damage of the file that was found while it was in use.
#[derive(Debug, Default)]
struct Damage {
    found: Mutex<Option<Problem>>,
    told: tokio::sync::Notify,
}

/// Read access to a snapshot of the catalogue.
#[derive(Debug)]
pub struct View<'a> {
    connection: &'a Connection,
    event_bus: &'a EventBus,
}

/// Read and write access within one change, which is all or nothing.
#[derive(Debug)]
pub struct Tx<'a> {
    view: View<'a>,
    /// Who requested the change.
    requester: Requester,
    touched: Vec<event::Touched>,
    noted: Vec<(Uuid, Option<inventory::Noted>)>,
    /// A secret was deleted.
    wipes: bool,
}

impl<'a> std::ops::Deref for Tx<'a> {
    type Target = View<'a>;

    fn deref(&self) -> &View<'a> {
        &self.view
    }
}

/// A question to a consistent state of the catalogue.
type Question<T> = Box<dyn FnOnce(&View<'_>) -> Result<T, Problem> + Send>;

impl Catalogue {
    /// Opens the catalogue at `path`, or creates it. A damaged file is refused as [`Code::Damaged`], before anything is
    /// written to it.
    pub fn open(path: &Path) -> Result<Catalogue, Problem> {
        Catalogue::open_with(path, None, || {})
    }

    /// The same; before what an older daemon has written is changed for good, `before_change` is called. The number of
    /// the last commit is kept in the file `last_commit` too ([`View::may_be_older`]).
    pub fn open_with(
        path: &Path,
        last_commit: Option<&Path>,
        before_change: impl FnOnce(),
    ) -> Result<Catalogue, Problem> {
        let failed = |error: rusqlite::Error| cannot_open(path, error);
        seal::check(path)?;
        let mut connection = Connection::open(path).map_err(failed)?;
        // Another program that reads the file may lock it for a moment.
        connection.busy_timeout(PATIENCE).map_err(failed)?;
        // Before any other query.
        sound::check_pages(&connection, Look::Bounded)?;
        let version = version_of(&connection, path)?;
        // A reader never waits for the writer, nor the writer for readers; a commit is durable (sqlite.org/wal.html).
        connection.pragma_update(None, "journal_mode", "WAL").map_err(failed)?;
        connection.pragma_update(None, "synchronous", "FULL").map_err(failed)?;
        connection.pragma_update(None, "foreign_keys", true).map_err(failed)?;
        // What is deleted may be a secret: it is overwritten, and not only free space.
        connection.pragma_update(None, "secure_delete", true).map_err(failed)?;
        if (FIRST..VERSION).contains(&version) {
            before_change();
        }
        migrate(&mut connection, version).map_err(failed)?;
        sound::check_rows(&connection)?;
        let starts = count_start(&mut connection).map_err(failed)?;
        reserve::keep_for_log_of(path);
        let last_commit = last_commit.map(|path| LastCommit::begin(&mut connection, path)).transpose()?;
        let event_bus = Arc::new(EventBus::new(starts, HealthBoard::load(&connection)));
        let readers = Arc::new(Readers::new(path));
        let outbox = Arc::new(Outbox::default());
        let view = View { connection: &connection, event_bus: &event_bus };
        outbox.recorded(&view.inventory_heads()?);
        for sr in view.srs()? {
            event_bus.health().note_condition(&sr);
        }
        let location = FileLocation::of(path)?;
        let state = State {
            connection,
            location,
            event_bus: event_bus.clone(),
            outbox: outbox.clone(),
            last_commit,
            wipes: false,
        };
        let writer = Arc::new(Writer::start(state)?);
        Ok(Catalogue { writer, readers, event_bus, outbox, damage: Arc::default() })
    }

    /// Changes the catalogue: `change` in full, durable when this returns, or not at all. `change` runs on the writer's
    /// thread and must not wait for anything.
    pub fn write<T, F>(&self, change: F) -> impl Future<Output = Result<T, Problem>> + Send
    where
        T: Send + 'static,
        F: FnOnce(&mut Tx<'_>) -> Result<T, Problem> + Send + 'static,
    {
        self.apply(Box::new(change))
    }

    async fn apply<T: Send + 'static>(&self, change: Change<T>) -> Result<T, Problem> {
        self.writer.write(change).await.map_err(|problem| self.noted(problem))
    }

    /// Reads a consistent state of the catalogue, for the daemon's own work. Waits for its turn if the maximum number
    /// of readers is active.
    pub fn read<T, F>(&self, question: F) -> impl Future<Output = Result<T, Problem>> + Send
    where
        T: Send + 'static,
        F: FnOnce(&View<'_>) -> Result<T, Problem> + Send + 'static,
    {
        self.ask(&self.readers.own, Box::new(question))
    }

    /// The same for clients: they take turns among themselves, and never delay the daemon's own work.
    pub fn read_for_client<T, F>(&self, question: F) -> impl Future<Output = Result<T, Problem>> + Send
    where
        T: Send + 'static,
        F: FnOnce(&View<'_>) -> Result<T, Problem> + Send + 'static,
    {
        self.ask(&self.readers.of_clients, Box::new(question))
    }

    async fn ask<T: Send + 'static>(&self, turns: &Arc<Semaphore>, question: Question<T>) -> Result<T, Problem> {
        let ended =
            |why: &dyn std::fmt::Display| Problem::new(Code::Internal, format!("a catalogue reader ended: {why}"));
        let turn = turns.clone().acquire_owned().await.map_err(|closed| ended(&closed))?;
        let (readers, event_bus) = (self.readers.clone(), self.event_bus.clone());
        let mut asked = blocking::start(move || {
            // Held until the query is done, even if the caller stops waiting.
            let _turn = turn;
            let connection = readers.take()?;
            let answer = question(&View { connection: &connection, event_bus: &event_bus });
            readers.give_back(connection);
            answer
        });
        asked.ended().await.map_err(|died| ended(&died))?.map_err(|problem| self.noted(problem))
    }

    /// Notifies waiters if a problem concerns the file itself, and returns it.
    fn noted(&self, problem: Problem) -> Problem {
        if problem.code == Code::Damaged {
            let mut found = self.damage.found.lock().unwrap_or_else(PoisonError::into_inner);
            found.get_or_insert_with(|| problem.clone());
            self.damage.told.notify_one();
        }
        problem
    }

    /// Waits until the file is found to be damaged, which is permanent; returns what is wrong.
    pub async fn damaged(&self) -> Problem {
        loop {
            let found = self.damage.found.lock().unwrap_or_else(PoisonError::into_inner).clone();
            match found {
                Some(problem) => return problem,
                None => self.damage.told.notified().await,
            }
        }
    }

    /// Checks all of the file, as thoroughly as possible, on a thread and a connection of its own.
    pub async fn examine(&self) -> Result<(), Problem> {
        let readers = self.readers.clone();
        let mut looked = blocking::start(move || {
            let connection = readers.open().map_err(|error| cannot_open(&readers.path, error))?;
            sound::check_pages(&connection, Look::Whole)?;
            sound::check_rows(&connection)
        });
        let looked = looked.ended().await.map_err(|error| Problem::failed("examine the catalogue", error))?;
        looked.map_err(|problem| self.noted(problem))
    }

    /// How many commits there were since it was opened.
    pub fn commits(&self) -> u64 {
        self.writer.commits()
    }

    /// Ends, with the thread that writes and all that is open.
    fn end(self) {
        let Catalogue { writer, readers, .. } = self;
        drop(readers);
        if let Some(writer) = Arc::into_inner(writer) {
            writer.join();
        }
    }

    /// Stops all writing, and seals the file as it is then: the next process to open it detects whether a byte has
    /// changed. Requests from now on are refused.
    pub async fn close(&self) -> Result<(), Problem> {
        self.writer.end().await?;
        let path = self.readers.path.clone();
        let tried = format!("seal the catalogue {}", path.display());
        let sealed = blocking::start(move || seal::write(&path)).ended().await;
        let sealed = sealed.map_err(|error| Problem::failed(&tried, error))?;
        sealed.map_err(|error| Problem::failed(&tried, error))
    }

    /// Inventory lines that are recorded and may not be in the repositories' files yet.
    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Events from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<api::Event>> {
        self.event_bus.subscribe()
    }

    /// Events after number `seq`, and all from now on.
    pub fn subscribe_behind(&self, seq: u64) -> Past {
        self.event_bus.subscribe_behind(seq)
    }

    /// Reports what a task has transferred.
    pub fn transferred(&self, task: &api::Task, transfer: api::Transfer) {
        self.event_bus.progress(task, transfer.part(), Some(transfer));
    }

    /// Reports the progress of a task, from 0 to 1. Not stored: a restarted task starts from zero.
    pub fn progress(&self, task: &api::Task, progress: f64) {
        self.event_bus.progress(task, progress, None);
    }
}

/// Idle connections for readers, at most as many as there are permits.
#[derive(Debug)]
struct Readers {
    path: std::path::PathBuf,
    idle: Mutex<Vec<Connection>>,
    own: Arc<Semaphore>,
    of_clients: Arc<Semaphore>,
}

impl Readers {
    fn new(path: &Path) -> Readers {
        let turns = |count| Arc::new(Semaphore::new(count));
        Readers {
            path: path.to_owned(),
            idle: Mutex::default(),
            own: turns(READERS),
            of_clients: turns(READERS_OF_CLIENTS),
        }
    }

    fn take(&self) -> Result<Connection, Problem> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(|| self.open().map_err(|error| cannot_open(&self.path, error)), Ok)
    }

    fn open(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.path, flags)?;
        connection.busy_timeout(Duration::from_secs(10))?;
        Ok(connection)
    }

    fn give_back(&self, connection: Connection) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }
}

/// The version of a catalogue's schema, 0 of an empty file. Other versions than those that can be upgraded are refused.
fn version_of(connection: &Connection, path: &Path) -> Result<i64, Problem> {
    let version = connection
        .pragma_query_value(None, "user_version", |row| row.get(0))
        .map_err(|error| cannot_open(path, error))?;
    let (why, advice) = match version {
        0 | FIRST..=VERSION => return Ok(version),
        ..FIRST => (
            "a version before 0.1, which is not supported",
            "move it away, then create another one from the repositories' inventories: taplined --rebuild DIRECTORY…; or \
             start empty: taplined --init. See docs/recover.md",
        ),
        _ => ("a newer taplined", "start the newer taplined again, or restore a backup"),
    };
    let what = format!("cannot use the catalogue {}: it was written by {why}", path.display());
    Err(Problem::new(Code::Unsupported, what).advise(advice))
}

/// Upgrades the schema from a version that [`version_of`] has returned.
fn migrate(connection: &mut Connection, version: i64) -> rusqlite::Result<()> {
    let done = usize::try_from(version.saturating_sub(FIRST).saturating_add(1)).unwrap_or(0);
    let transaction = connection.transaction()?;
    for migration in MIGRATIONS.iter().skip(done) {
        transaction.execute_batch(migration)?;
    }
    transaction.pragma_update(None, "user_version", VERSION)?;
    transaction.commit()
}

/// How often the catalogue was opened: events of a later time have higher numbers.
fn count_start(connection: &mut Connection) -> rusqlite::Result<u64> {
    let transaction = connection.transaction()?;
    let starts = meta(&transaction, "starts")?;
    let starts = starts.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0).saturating_add(1);
    set_meta(&transaction, "starts", &starts.to_string())?;
    transaction.commit()?;
    Ok(starts)
}

/// A value that belongs to no object.
fn meta(connection: &Connection, key: &str) -> rusqlite::Result<Option<String>> {
    connection.query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0)).optional()
}

/// Stores one.
fn set_meta(connection: &Connection, key: &str, value: &str) -> rusqlite::Result<()> {
    connection.prepare_cached("INSERT OR REPLACE INTO meta VALUES (?1, ?2)")?.execute([key, value]).map(drop)
}

fn cannot_open(path: &Path, error: rusqlite::Error) -> Problem {
    if sound::tells_of_damage(&error) {
        return sound::damaged(error);
    }
    let usual = "check that its directory exists and is writable, and that no other taplined uses it";
    let advice = advice(&error).unwrap_or_else(|| usual.into());
    Problem::failed(format_args!("open the catalogue {}", path.display()), error).advise(advice)
}

impl View<'_> {
    /// A value stored under a key, besides the objects.
    pub fn meta(&self, key: &str) -> Result<Option<String>, Problem> {
        meta(self.connection, key).map_err(failed)
    }
}

impl Tx<'_> {
    /// Stores a value that belongs to no object.
    pub fn set_meta(&mut self, key: &str, value: &str) -> Result<(), Problem> {
        set_meta(self.connection, key, value).map_err(failed)
    }

    /// Runs a statement that changes something.
    fn execute(&self, sql: &str, values: impl rusqlite::Params) -> Result<usize, Problem> {
        self.connection.prepare_cached(sql).and_then(|mut statement| statement.execute(values)).map_err(failed)
    }
}

/// Converts an unexpected SQLite error.
fn failed(error: rusqlite::Error) -> Problem {
    let code = match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Code::NoSpace,
        Some(ErrorCode::ReadOnly) => Code::ReadOnly,
        _ if sound::tells_of_damage(&error) => return sound::damaged(error),
        // Each row was checked when the file was opened: either it has been damaged since, or this is a bug.
        _ if sound::is_foreign(&error) => Code::Internal,
        _ => Code::Failed,
    };
    Problem { advice: advice(&error), ..Problem::new(code, format!("the catalogue failed: {error}")) }
}

/// Advice if the file system that a catalogue is on is the cause.
fn advice(error: &rusqlite::Error) -> Option<String> {
    let what = match error.sqlite_error_code()? {
        ErrorCode::DiskFull => "free space on the file system of the state directory and retry",
        ErrorCode::ReadOnly => "find out why the file system of the state directory is read-only, then retry",
        _ => return None,
    };
    Some(format!("{what}; nothing was changed, and disks keep running"))
}

/// There is no such object.
fn not_found(kind: ObjectKind, uuid: Uuid) -> Problem {
    let noun = match kind {
        ObjectKind::Host => "host",
        ObjectKind::Sr => "SR",
        ObjectKind::Vdi => "VDI",
        ObjectKind::Vbd => "VBD",
        ObjectKind::Vm => "VM",
        ObjectKind::Task => "task",
    };
    Problem::new(Code::NotFound, format!("there is no {noun} {uuid}"))
}

#[cfg(test)]
mod test;
