//! A store in memory for tests: it crashes, fails, loses names that were not synced, leaves temporary files, answers
//! late and lists late, each when a test wants it.
//!
//! Several handles are several hosts on one target. Knows nothing of what objects contain. The order of steps in a
//! `put` is that of `directory.rs`: temporary file, its sync, its name, the sync of the directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{ObjectStore, StoreError, StoreErrorKind};
use crate::id::Id;
use crate::name::Name;

/// The moment within a call at which a fault takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Nothing of the call has happened.
    Before,
    /// A part of a temporary file is written.
    Writing,
    /// The temporary file is complete and has no name; or it had one that was not synced and is lost.
    Unnamed,
    /// The object has its name, which was not synced: others see it until [`Memory::lose_power`].
    Unsynced,
    /// All has happened, and the answer is lost.
    After,
}

impl Moment {
    /// All moments, in order.
    pub const ALL: [Moment; 5] = [Moment::Before, Moment::Writing, Moment::Unnamed, Moment::Unsynced, Moment::After];
}

/// A fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The host loses power: this call and all later ones of the handle fail.
    Crash(Moment),
    /// The call fails; later ones succeed.
    Fail(StoreErrorKind, Moment),
}

/// Objects that all handles share.
#[derive(Clone, Default)]
struct Objects {
    found: BTreeMap<Name, Vec<u8>>,
    /// Those whose names a power loss takes.
    unsynced: BTreeSet<Name>,
}

impl Objects {
    /// Syncs the directories of these names.
    fn sync(&mut self, is_in: impl Fn(&Name) -> bool) {
        self.unsynced.retain(|name| !is_in(name));
    }
}

/// What is called before each call of a handle: a test may decide there which host is next.
type Gate = Arc<dyn Fn() + Send + Sync>;

/// One host's handle of a store in memory.
pub struct Memory {
    objects: Arc<Mutex<Objects>>,
    host: Mutex<Host>,
    gate: Option<Gate>,
}

#[derive(Default)]
struct Host {
    calls: u64,
    fault: Option<(u64, Fault)>,
    is_dead: bool,
    /// The names as of the last late listing; `None` if listings are up to date.
    late: Option<Vec<(Name, u64)>>,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

impl Memory {
    /// An empty store.
    pub fn new() -> Memory {
        Memory { objects: Arc::default(), host: Mutex::default(), gate: None }
    }

    /// Another host on this store, without faults.
    pub fn host(&self) -> Memory {
        Memory { objects: Arc::clone(&self.objects), host: Mutex::default(), gate: None }
    }

    /// A store with a copy of the objects.
    pub fn copy(&self) -> Memory {
        Memory { objects: Arc::new(Mutex::new(self.objects().clone())), ..Memory::new() }
    }

    /// Plans a fault of the call of this number, counted from 0.
    pub fn fault_at(self, call: u64, fault: Fault) -> Memory {
        self.state().fault = Some((call, fault));
        self
    }

    /// Makes each second listing one of the past.
    pub fn late(self) -> Memory {
        self.state().late = Some(Vec::new());
        self
    }

    /// Sets a function that is called before each call.
    pub fn gated(mut self, gate: Gate) -> Memory {
        self.gate = Some(gate);
        self
    }

    /// Number of calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Names of all objects, temporary files included.
    pub fn names(&self) -> Vec<Name> {
        self.objects().found.keys().cloned().collect()
    }

    /// The bytes of an object.
    pub fn bytes(&self, name: &Name) -> Option<Vec<u8>> {
        self.objects().found.get(name).cloned()
    }

    /// The storage loses its power: names that were not synced are gone.
    pub fn lose_power(&self) {
        let mut objects = self.objects();
        let Objects { found, unsynced } = &mut *objects;
        found.retain(|name, _| !unsynced.contains(name));
        unsynced.clear();
    }

    /// Replaces or removes an object, as no call of a store does.
    pub fn set(&self, name: &Name, bytes: Option<Vec<u8>>) {
        match bytes {
            Some(bytes) => self.objects().found.insert(name.clone(), bytes),
            None => self.objects().found.remove(name),
        };
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, Host> {
        self.host.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a call: the moment of its fault and its error, if it has one.
    fn begin(&self, attempt: &'static str, name: &str) -> Result<Option<(Moment, StoreError)>, StoreError> {
        if let Some(gate) = &self.gate {
            gate();
        }
        let mut host = self.state();
        let error = |kind| StoreError::new(kind, attempt, name, None);
        if host.is_dead {
            return Err(error(StoreErrorKind::Vanished));
        }
        let call = host.calls;
        host.calls += 1;
        let fault = match host.fault.filter(|&(at, _)| at == call) {
            None => return Ok(None),
            Some((_, Fault::Crash(moment))) => {
                host.is_dead = true;
                (moment, error(StoreErrorKind::Vanished))
            }
            Some((_, Fault::Fail(kind, moment))) => (moment, error(kind)),
        };
        if fault.0 == Moment::Before { Err(fault.1) } else { Ok(Some(fault)) }
    }

    /// Begins a call that changes nothing, so that it fails before or not at all.
    fn begin_read(&self, attempt: &'static str, name: &str) -> Result<(), StoreError> {
        self.begin(attempt, name)?.map_or(Ok(()), |(_, error)| Err(error))
    }
}

impl ObjectStore for Memory {
    fn put(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError> {
        let fault = self.begin("create", name.as_str())?;
        let mut objects = self.objects();
        let leave = |objects: &mut Objects, bytes: &[u8]| {
            objects.found.insert(Name::temporary(Id::random()), bytes.to_vec());
        };
        match fault {
            Some((Moment::Writing, error)) => {
                leave(&mut objects, bytes.get(..bytes.len() / 2).unwrap_or_default());
                return Err(error);
            }
            Some((Moment::Unnamed, error)) => {
                leave(&mut objects, bytes);
                return Err(error);
            }
            _ => {}
        }
        if objects.found.contains_key(name) {
            return Err(StoreError::new(StoreErrorKind::Exists, "create", name.as_str(), None));
        }
        objects.found.insert(name.clone(), bytes.to_vec());
        if fault.as_ref().is_some_and(|(moment, _)| *moment == Moment::Unsynced) {
            objects.unsynced.insert(name.clone());
        } else {
            objects.sync(|other| other.directory() == name.directory());
        }
        fault.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn get(&self, name: &Name, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        self.begin_read("read", name.as_str())?;
        let objects = self.objects();
        let found = objects.found.get(name);
        let bytes = found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, "read", name.as_str(), None))?;
        let clamp = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
        Ok(bytes.get(clamp(range.start)..clamp(range.end)).unwrap_or_default().to_vec())
    }

    fn size(&self, name: &Name) -> Result<u64, StoreError> {
        self.begin_read("find", name.as_str())?;
        let objects = self.objects();
        let found = objects.found.get(name).map(|bytes| u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        found.ok_or_else(|| StoreError::new(StoreErrorKind::NotFound, "find", name.as_str(), None))
    }

    fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, StoreError> {
        self.begin_read("list", prefix)?;
        let size = |bytes: &Vec<u8>| u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let now: Vec<_> = self.objects().found.iter().map(|(name, bytes)| (name.clone(), size(bytes))).collect();
        let mut host = self.state();
        let is_even = host.calls % 2 == 0;
        let shown = match &mut host.late {
            Some(late) if is_even => std::mem::replace(late, now),
            Some(late) => {
                late.clone_from(&now);
                now
            }
            None => now,
        };
        Ok(shown.into_iter().filter(|(name, _)| name.as_str().starts_with(prefix)).collect())
    }

    fn delete(&self, name: &Name) -> Result<(), StoreError> {
        let fault = self.begin("delete", name.as_str())?;
        if fault.as_ref().is_none_or(|(moment, _)| *moment == Moment::After) {
            let mut objects = self.objects();
            objects.found.remove(name);
            objects.sync(|other| other.directory() == name.directory());
        }
        fault.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn settle(&self, prefix: &str) -> Result<(), StoreError> {
        self.begin_read("sync", prefix)?;
        self.objects().sync(|name| name.as_str().starts_with(prefix));
        Ok(())
    }
}
