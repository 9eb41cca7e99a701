//! The stage of an engine for files that are exports of NBD servers ([`Remote`]): their operations go to a client
//! instead of the backend, which only watches their sockets. Likewise for files whose reads block ([`SourceFile`]),
//! which go to threads; the backend watches their event.
//!
//! It knows nothing about protocols. Invariant: an engine sleeps only while no export can continue without an event
//! of its socket, or until the time at which one can; while all servers are connected, there is no such time.

use std::time::Duration;

use disk::{Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Until};

use crate::backend::Backend;
use crate::blocking_source::SourceFile;
use crate::remote::Remote;
use crate::{EngineError, ImageFile};

/// The first key of the sockets; the others descend from it. They lie between those of servers and that of lanes.
const KEY: u64 = u64::MAX - 31;
/// The maximum number of exports of one engine: as many keys are reserved.
const REMOTES_MAX: usize = 32;

/// Where the bytes of a stand-in are.
#[derive(Clone, Debug)]
pub(crate) enum Elsewhere {
    Export(Remote),
    Source(SourceFile),
}

impl Elsewhere {
    /// That of a file, if it is a stand-in.
    pub(crate) fn of(file: &ImageFile) -> Option<Elsewhere> {
        let export = file.remote().cloned().map(Elsewhere::Export);
        export.or_else(|| file.source().cloned().map(Elsewhere::Source))
    }

    fn unwatch(&self) {
        match self {
            Elsewhere::Export(remote) => remote.unwatch(),
            Elsewhere::Source(source) => source.unwatch(),
        }
    }

    fn is_busy(&self) -> bool {
        match self {
            Elsewhere::Export(remote) => remote.is_busy(),
            Elsewhere::Source(source) => source.is_busy(),
        }
    }

    fn away(&self) -> Option<Duration> {
        match self {
            Elsewhere::Export(remote) => remote.away(),
            Elsewhere::Source(_) => None,
        }
    }

    fn push(&self, op: FileOp) -> Pushed {
        match self {
            Elsewhere::Export(remote) => remote.push(op).map_or_else(Pushed::Full, |()| Pushed::Accepted),
            Elsewhere::Source(source) => {
                source.push(op);
                Pushed::Accepted
            }
        }
    }

    fn turn(&self, done: &mut Vec<FileDone>) -> Option<Duration> {
        match self {
            Elsewhere::Export(remote) => remote.turn(done),
            Elsewhere::Source(source) => source.turn(done),
        }
    }

    fn watch_new(&self, backend: &mut Backend, key: u64) -> std::io::Result<()> {
        match self {
            Elsewhere::Export(remote) => remote.watch_new(|socket| match socket {
                Some(socket) => backend.watch(socket, true, key),
                None => {
                    backend.forget(key);
                    Ok(())
                }
            }),
            Elsewhere::Source(source) => source.watch_new(|event| backend.watch(event, false, key)),
        }
    }
}

/// The exports of an engine.
#[derive(Debug, Default)]
pub(crate) struct Remotes {
    slots: Vec<Option<(FileId, Elsewhere)>>,
    /// What the owner has allowed the next sleep to last.
    pub(crate) sleep_limit: Option<Duration>,
}

impl Remotes {
    /// Whether a key is one of those that are reserved.
    pub(crate) fn owns(key: u64) -> bool {
        KEY.checked_sub(key).is_some_and(|slot| slot < REMOTES_MAX as u64)
    }

    /// Adds an export or a source under the id that the backend has given its stand-in.
    pub(crate) fn add(&mut self, id: FileId, remote: Elsewhere) -> Result<(), EngineError> {
        remote.unwatch();
        if self.slots.is_empty() {
            self.slots.resize_with(REMOTES_MAX, || None);
        }
        let free = self.slots.iter_mut().find(|slot| slot.is_none()).ok_or(EngineError::TooManyFiles)?;
        *free = Some((id, remote));
        Ok(())
    }

    pub(crate) fn remove(&mut self, id: FileId, backend: &mut Backend) {
        for (slot, remote) in (0..).zip(&mut self.slots) {
            if remote.take_if(|(of, _)| *of == id).is_some() {
                backend.forget(KEY - slot);
            }
        }
    }

    fn all(&self) -> impl Iterator<Item = (u64, &Elsewhere)> {
        (0..).zip(&self.slots).filter_map(|(slot, remote)| Some((KEY - slot, &remote.as_ref()?.1)))
    }

    fn of(&self, id: FileId) -> Option<&Elsewhere> {
        self.slots.iter().flatten().find(|(of, _)| *of == id).map(|(_, remote)| remote)
    }

    /// How long the server that has been away longest is away.
    pub(crate) fn away(&self) -> Option<Duration> {
        self.all().filter_map(|(_, remote)| remote.away()).max()
    }

    /// Whether this file is an export with pending operations.
    pub(crate) fn uses(&self, id: FileId) -> bool {
        self.of(id).is_some_and(Elsewhere::is_busy)
    }

    /// Accepts an operation on an export; hands back all others, and those for which there is no room.
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub(crate) fn push(&self, op: FileOp) -> Pushed {
        match self.of(op.file) {
            None => Pushed::NotRemote(op),
            Some(remote) => remote.push(op),
        }
    }

    /// Which part of an export is allocated; `None` if the file is not one.
    pub(crate) fn allocated(&self, file: FileId, at: FileOffset, len: u64) -> Option<Allocation> {
        self.of(file).map(|remote| match remote {
            Elsewhere::Export(remote) => remote.allocated(at.0, len),
            Elsewhere::Source(_) => Allocation::Data(len),
        })
    }

    /// Moves bytes, and completed operations into `done`; returns how long the engine may sleep.
    pub(crate) fn turn(
        &self,
        backend: &mut Backend,
        done: &mut Vec<FileDone>,
    ) -> Result<Option<Duration>, EngineFailed> {
        let mut sleeps = None;
        for (key, remote) in self.all() {
            let left = remote.turn(done);
            sleeps = sleeps.into_iter().chain(left).min();
            remote.watch_new(backend, key).map_err(|error| EngineFailed {
                what: "watch the socket of an export, or the event of a source",
                errno: error.raw_os_error().unwrap_or(libc::EIO),
            })?;
        }
        Ok(sleeps)
    }

    /// Prepares a sleep of the backend; returns how long it may be.
    pub(crate) fn before_sleep(
        &mut self,
        until: Until,
        backend: &mut Backend,
        done: &mut Vec<FileDone>,
    ) -> Result<Until, EngineFailed> {
        let before = done.len();
        let sleeps = self.turn(backend, done)?;
        let limit = self.sleep_limit.take();
        if until == Until::Now || done.len() > before || sleeps == Some(Duration::ZERO) {
            return Ok(Until::Now);
        }
        if let Some(most) = sleeps.into_iter().chain(limit).min() {
            backend.limit_sleep(most);
        }
        Ok(Until::Any)
    }

    /// Takes what has happened during a sleep.
    pub(crate) fn after_sleep(&self, backend: &mut Backend, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.all().for_each(|(key, _)| backend.ignore_ready(key));
        self.turn(backend, done).map(drop)
    }
}

/// What has become of an operation.
pub(crate) enum Pushed {
    Accepted,
    NotRemote(FileOp),
    Full(FileOp),
}
