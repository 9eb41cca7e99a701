//! Files without a name that exist while clients use them: uploads and downloads.
//!
//! Invariant: such a file is in no directory and has no entry in the catalogue, so that neither a client that
//! disappears nor a killed daemon leaves one behind; one that no client has used for [`IDLE`] is removed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;

/// Time without a use after which a file is removed.
const IDLE: Duration = Duration::from_secs(3600);

/// The most files of a kind: each may take as much space as a disk.
pub const MAX: usize = 32;

/// A file that a client uses.
pub trait Transient: Send + Sync + 'static {
    /// The repository whose space it takes.
    fn sr(&self) -> Uuid;

    /// When it was used last.
    fn last_use(&self) -> Instant;

    /// All files of this kind.
    fn all_of(daemon: &Daemon) -> &Transients<Self>
    where
        Self: Sized;
}

/// The files of a kind, by UUID.
#[derive(Debug)]
pub struct Transients<T>(Mutex<HashMap<Uuid, Arc<T>>>);

impl<T> Default for Transients<T> {
    fn default() -> Transients<T> {
        Transients(Mutex::default())
    }
}

impl<T: Transient> Transients<T> {
    fn lock(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The files, in no order.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.lock().values().cloned().collect()
    }

    /// The file with this UUID.
    pub fn find(&self, uuid: Uuid) -> Option<Arc<T>> {
        self.lock().get(&uuid).cloned()
    }

    /// Whether there are as many as there may be.
    pub fn is_full(&self) -> bool {
        self.lock().len() >= MAX
    }

    /// Removes a file, if it exists.
    pub fn remove(&self, uuid: Uuid) {
        self.lock().remove(&uuid);
    }

    /// Removes the files of a repository, which is about to be detached.
    pub fn remove_of(&self, sr: Uuid) {
        self.lock().retain(|_, file| file.sr() != sr);
    }

    /// Time until a file has been idle for too long; `None` if it is gone or has been idle.
    fn left(&self, uuid: Uuid) -> Option<Duration> {
        IDLE.checked_sub(self.find(uuid)?.last_use().elapsed())
    }
}

/// Adds a file; returns whether there were fewer than there may be.
pub fn add<T: Transient>(daemon: &Daemon, uuid: Uuid, file: T) -> bool {
    let mut all = T::all_of(daemon).lock();
    if all.len() >= MAX {
        return false;
    }
    all.insert(uuid, Arc::new(file));
    background::spawn(end_when_idle::<T>(daemon.clone(), uuid));
    true
}

async fn end_when_idle<T: Transient>(daemon: Daemon, uuid: Uuid) {
    while let Some(left) = T::all_of(&daemon).left(uuid) {
        tokio::time::sleep(left.max(Duration::from_secs(1))).await;
    }
    T::all_of(&daemon).remove(uuid);
}
