//! An export of an NBD server in place of a file: opened, read synchronously, and shared with the engine that serves
//! it ([`crate::Engine`]).
//!
//! Invariant: all handles of one export share one client, so that whatever was answered to any of them is covered by a
//! flush of any of them.

mod connection;
mod socket;

use std::fmt;
use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use disk::{Action, Allocation, FileDone, FileError, FileId, FileOffset, FileOp, OpId};
use memory::Segments;
use nbd::client::{Client, Described, NameTooLong};
use nbd::tls::ClientTls;
use nbd::uri::{TOKEN, Uri};
use rustix::fs::OFlags;

use connection::Connection;
use socket::Target;

/// Marks operations of the synchronous methods among those of an engine, whose files have smaller numbers.
const SYNCHRONOUS: FileId = FileId(u8::MAX);
/// How long opening an export waits for its server.
const OPENING: Duration = Duration::from_secs(10);
/// How long a question about allocation may take: without an answer everything counts as data.
const ALLOCATION: Duration = Duration::from_secs(60);
/// The part of an export whose allocation is queried at once.
const ASKED: u64 = 1 << 30;

/// Longer than any token.
const TOKEN_MAX: u64 = 1024;

/// How an export is used.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// Also for writing.
    pub write: bool,
    /// The settings of TLS, if the URI requires it.
    pub tls: Option<ClientTls>,
    /// How long operations wait for a server that is away before they fail; `None` for ever.
    pub patience: Option<Duration>,
    /// The process is a job: [`disk::Io::allocated`] may wait for the server, and answers "data" otherwise.
    pub may_wait: bool,
    /// Returns true once the process is to end: a server that then answers nothing for some seconds is given up. A
    /// served disk must turn its engine when that begins.
    pub stopping: fn() -> bool,
    /// Receives messages for people: lost and new connections. It is called with the connection locked.
    pub report: fn(&str),
}

/// The state of the connection to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteState {
    /// How long there has been no connection that works, if there is none.
    pub away: Option<Duration>,
    /// The last error, while there is none.
    pub why: Option<String>,
    /// Attempts to connect since the last one that worked.
    pub attempts: u32,
    /// Writes that were answered and that no answered flush covers: they are sent again on a new connection.
    pub kept: usize,
}

/// An export cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot open {uri}: {why}")]
pub struct RemoteOpenError {
    uri: String,
    why: String,
}

/// An open export. Clones share the connection.
#[derive(Clone, Debug)]
pub struct Remote {
    shared: Arc<Mutex<Shared>>,
    size: u64,
    unit: u32,
    may_wait: bool,
}

#[derive(Debug)]
struct Shared {
    connection: Connection,
    /// Completed operations of the engine that a synchronous method has found.
    done: Vec<FileDone>,
}

/// The name of the export that is sent to the server: with a token, if the URI names a file with one.
fn export_of(uri: &Uri) -> Result<String, RemoteOpenError> {
    let Some(path) = &uri.token_file else { return Ok(uri.export.clone()) };
    let failed = |why: &dyn fmt::Display| RemoteOpenError {
        uri: uri.to_string(),
        why: format!("cannot read the token in {}: {why}", path.display()),
    };
    // A FIFO must not keep us waiting.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(|error| failed(&error))?;
    let found = file.metadata().map_err(|error| failed(&error))?;
    if !found.is_file() || found.mode() & 0o077 != 0 {
        return Err(failed(&"it must be a file that only its owner can read: chmod 600"));
    }
    let mut text = String::new();
    file.by_ref().take(TOKEN_MAX).read_to_string(&mut text).map_err(|error| failed(&error))?;
    Ok(format!("{}{TOKEN}{}", uri.export, text.trim()))
}

impl Remote {
    /// Connects to an export, and waits for it.
    pub fn open(uri: &Uri, options: RemoteOptions) -> Result<Remote, RemoteOpenError> {
        let client = Client::new(&export_of(uri)?, options.write);
        Remote::connect(uri, options, client)
    }

    /// Connects for reading, with another metadata context than `base:allocation`; see [`Remote::described`].
    pub fn of_context(uri: &Uri, context: &str, options: RemoteOptions) -> Result<Remote, RemoteOpenError> {
        let client = Client::of_context(&export_of(uri)?, context);
        Remote::connect(uri, RemoteOptions { write: false, ..options }, client)
    }

    fn connect(
        uri: &Uri,
        options: RemoteOptions,
        client: Result<Client, NameTooLong>,
    ) -> Result<Remote, RemoteOpenError> {
        let failed = |why: String| RemoteOpenError { uri: uri.to_string(), why };
        let client = client.map_err(|error| failed(error.to_string()))?;
        let client = match (&uri.tls, &options.tls) {
            (None, None) => client,
            (Some(_), Some(tls)) => client.with_tls(tls.clone()),
            // Nothing is ever sent unencrypted to a server that is named with TLS.
            (Some(_), None) | (None, Some(_)) => return Err(failed("TLS has no settings, or is not requested".into())),
        };
        let targets = Target::all(uri).map_err(|error| failed(error.to_string()))?;
        let attempts = targets.len();
        let (begun, may_wait, stopping) = (Instant::now(), options.may_wait, options.stopping);
        let mut connection = Connection::new(client, uri.clone(), targets, options, begun);
        let mut done = Vec::new();
        loop {
            let now = Instant::now();
            connection.turn(now, &mut done);
            if let Some(export) = connection.client.export().filter(|_| connection.client.is_up()) {
                let (size, unit) = (export.size, export.block_min);
                connection.opened();
                let shared = Arc::new(Mutex::new(Shared { connection, done }));
                return Ok(Remote { shared, size, unit, may_wait });
            }
            // Opening a disk fails at once if its server is not there.
            if connection.failures() >= attempts || now.duration_since(begun) > OPENING {
                return Err(failed(connection.why.clone()));
            }
            if stopping() {
                return Err(failed("interrupted by a signal".to_owned()));
            }
            connection.wait(OPENING, now);
        }
    }

    /// Whether there are other handles of it.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// The size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The unit of its offsets and lengths.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Each method leaves it consistent, whatever panics.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does one action, and waits for it. `Unsupported` and other errors are those of the action.
    pub fn wait_for(&self, action: Action) -> Result<(), FileError> {
        let mut shared = self.lock();
        let Shared { connection, done } = &mut *shared;
        let mut op = Some(FileOp { id: OpId(u64::MAX), file: SYNCHRONOUS, action });
        loop {
            if let Some(refused) = op.take().and_then(|op| connection.push(op).err()) {
                op = Some(refused);
            }
            let now = Instant::now();
            connection.turn(now, done);
            if let Some(index) = done.iter().position(|done| done.op.file == SYNCHRONOUS) {
                return done.remove(index).result;
            }
            connection.wait(OPENING, now);
        }
    }

    /// Reads from any offset.
    pub fn wait_to_read(&self, at: u64, bytes: &mut [u8]) -> Result<(), FileError> {
        let unit = u64::from(self.unit);
        let (start, end) = (at - at % unit, (at + memory::size::on_disk(bytes.len())).next_multiple_of(unit));
        let into = Segments::zeroed(memory::size::in_memory(end - start));
        self.wait_for(Action::Read { at: FileOffset(start), into: into.clone() })?;
        into.slice(memory::size::in_memory(at - start), bytes.len()).copy_to(bytes);
        Ok(())
    }

    /// Writes at any offset; nothing else may write.
    pub fn wait_to_write(&self, at: u64, bytes: &[u8]) -> Result<(), FileError> {
        let unit = u64::from(self.unit);
        let (start, end) = (at - at % unit, (at + memory::size::on_disk(bytes.len())).next_multiple_of(unit));
        let from = Segments::zeroed(memory::size::in_memory(end - start));
        let from_at = memory::size::in_memory(at - start);
        if from.len() != bytes.len() {
            self.wait_for(Action::Read { at: FileOffset(start), into: from.clone() })?;
        }
        from.slice(from_at, bytes.len()).copy_from(bytes);
        self.wait_for(Action::Write { at: FileOffset(start), from })
    }

    /// Which part of the export is allocated; see [`disk::Io::allocated`].
    pub fn allocated(&self, at: u64, len: u64) -> Allocation {
        let mut shared = self.lock();
        let Shared { connection, done } = &mut *shared;
        if let Some(known) = connection.known_allocation(at, len) {
            return known;
        }
        if !self.may_wait {
            return Allocation::Data(len);
        }
        let begun = Instant::now();
        let asked = len.max(ASKED).min(self.size.saturating_sub(at));
        connection.client.describe(at, asked);
        loop {
            let now = Instant::now();
            connection.turn(now, done);
            if let Some(described) = connection.client.take_described() {
                connection.remember(at, described);
                return connection.known_allocation(at, len).unwrap_or(Allocation::Data(len));
            }
            let left = ALLOCATION.saturating_sub(now.duration_since(begun));
            if left.is_zero() {
                return Allocation::Data(len);
            }
            connection.wait(left, now);
        }
    }

    /// The extents of the context at an offset that is a multiple of the unit; empty if the server does not have the
    /// context, or does not answer.
    pub fn described(&self, at: u64) -> Vec<Described> {
        let mut shared = self.lock();
        let Shared { connection, done } = &mut *shared;
        let begun = Instant::now();
        connection.client.describe(at, ASKED.min(self.size.saturating_sub(at)));
        loop {
            let now = Instant::now();
            connection.turn(now, done);
            if let Some(described) = connection.client.take_described() {
                return described;
            }
            let left = ALLOCATION.saturating_sub(now.duration_since(begun));
            if left.is_zero() {
                return Vec::new();
            }
            connection.wait(left, now);
        }
    }

    /// Accepts an operation of an engine.
    pub(crate) fn push(&self, op: FileOp) -> Result<(), FileOp> {
        self.lock().connection.push(op)
    }

    /// Does what can be done now; returns how long nothing more happens without an event of the socket, `None` for
    /// ever.
    pub(crate) fn turn(&self, done: &mut Vec<FileDone>) -> Option<Duration> {
        let mut shared = self.lock();
        let now = Instant::now();
        done.append(&mut shared.done);
        shared.connection.turn(now, done);
        if shared.connection.more { Some(Duration::ZERO) } else { shared.connection.sleeps(now) }
    }

    /// Calls `watch` with a socket that is not watched yet, or with none if the one that was watched is gone.
    pub(crate) fn watch_new(
        &self,
        watch: impl FnOnce(Option<BorrowedFd<'_>>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        let mut shared = self.lock();
        if !std::mem::take(&mut shared.connection.unwatched) {
            return Ok(());
        }
        watch(shared.connection.socket().map(|socket| socket.as_fd()))
    }

    /// The engine that watched its socket does so no longer.
    pub(crate) fn unwatch(&self) {
        self.lock().connection.unwatched = true;
    }

    /// Whether operations are pending.
    pub(crate) fn is_busy(&self) -> bool {
        let shared = self.lock();
        !shared.connection.client.is_idle() || !shared.done.is_empty()
    }

    /// Whether the server was given up because the process is to end: all operations fail.
    pub fn is_given_up(&self) -> bool {
        self.lock().connection.is_given_up()
    }

    /// The state of the connection.
    pub fn state(&self) -> RemoteState {
        self.lock().connection.state(Instant::now())
    }

    /// How long the server is away by now.
    pub fn away(&self) -> Option<Duration> {
        self.lock().connection.lost().map(|lost| lost.elapsed())
    }
}
