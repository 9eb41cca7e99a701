//! A fake hypervisor: domains whose pages are in one memory file, event channels, and a store.
//!
//! For tests and fuzz targets, also of other crates. A test drives a guest through [`Guest`]; the code under test gets
//! a [`GrantTable`], [`Channels`] and a [`FakeStore`], as a backend in domain 0 would. It knows nothing about what is
//! done with these. Invariant: what Xen refuses is refused here, and everything mapped, bound or watched is counted
//! ([`Host::counts`]).

mod channels;
mod guest;
mod nodes;
mod store;
mod table;

pub use channels::Channels;
pub use guest::{Access, Guest, Page};
pub use store::FakeStore;
pub use table::GrantTable;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::DomId;

/// The part of Xen that the code under test calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subsystem {
    /// Copying and mapping.
    Grants,
    /// Event channels.
    Channels,
    /// The store.
    Store,
}

/// What the code under test currently holds: all zero when it has cleaned up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Mapped pages of guests.
    pub mapped: usize,
    /// Bound event channels.
    pub bound: usize,
    /// Watches of all clients of the store.
    pub watched: usize,
    /// Open transactions of all clients.
    pub transactions: usize,
}

/// The machine. A clone refers to the same one.
#[derive(Clone)]
pub struct Host {
    /// The pages of all guests.
    memory: Arc<OwnedFd>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    domains: BTreeSet<DomId>,
    calls: BTreeMap<Subsystem, Calls>,
    observer: Option<Observer>,
    /// Total size of the pages of all guests.
    memory_len: u64,
    table: table::Table,
    channels: channels::ChannelTable,
    store: store::State,
}

/// How many calls a subsystem has received, and which one is to fail.
#[derive(Default)]
struct Calls {
    made: u64,
    fails: Option<u64>,
    act: Option<(u64, Act)>,
}

/// Called before each call of the code under test; returns whether that call fails. If it unwinds, the code under test
/// is killed there.
pub type Observer = fn(Subsystem) -> bool;

/// An action of someone else.
type Act = Box<dyn FnOnce(&mut FakeStore) + Send>;

impl Host {
    /// A machine with nothing but domain 0.
    pub fn new() -> io::Result<Host> {
        let memory = Arc::new(memfd_create("guests", MemfdFlags::CLOEXEC)?);
        Ok(Host { memory, state: Arc::default() })
    }

    /// Creates a domain.
    pub fn guest(&self, domain: DomId) -> Guest {
        let mut state = self.lock();
        state.domains.insert(domain);
        state.store.fire("@introduceDomain");
        drop(state);
        Guest::new(self.clone(), domain)
    }

    /// The backend's grant interface.
    pub fn grants(&self) -> GrantTable {
        GrantTable::new(self.clone())
    }

    /// The backend's event channel interface.
    pub fn channels(&self) -> io::Result<Channels> {
        Channels::new(self.clone())
    }

    /// The store, for a client in `domain`.
    pub fn store(&self, domain: DomId) -> io::Result<FakeStore> {
        FakeStore::new(self.clone(), domain)
    }

    /// Makes the `nth` call of `part` from now on fail; 1 is the next.
    pub fn fail(&self, part: Subsystem, nth: u64) {
        let mut state = self.lock();
        let calls = state.calls.entry(part).or_default();
        calls.fails = calls.made.checked_add(nth);
    }

    /// Runs `act`, as a client in domain 0, just before the `nth` call of `part` from now on; its own calls do not
    /// count.
    pub fn when(&self, part: Subsystem, nth: u64, act: impl FnOnce(&mut FakeStore) + Send + 'static) {
        let mut state = self.lock();
        let calls = state.calls.entry(part).or_default();
        let at = calls.made.saturating_add(nth);
        calls.act = Some((at, Box::new(act)));
    }

    /// Observes each call of any subsystem from now on.
    pub fn observe(&self, observer: Option<Observer>) {
        self.lock().observer = observer;
    }

    /// The number of calls of `part`.
    pub fn calls(&self, part: Subsystem) -> u64 {
        self.lock().calls.get(&part).map_or(0, |calls| calls.made)
    }

    /// What is currently held.
    pub fn counts(&self) -> Counts {
        let state = self.lock();
        Counts {
            mapped: state.table.mapped(),
            bound: state.channels.bound(),
            watched: state.store.watched(),
            transactions: state.store.transactions(),
        }
    }

    /// Breaks every existing connection to the store, as when xenstored ends. New ones may be made.
    pub fn break_store_connections(&self) {
        self.lock().store.break_connections();
    }

    /// The permissions of a node of the store; recorded but not enforced.
    pub fn permissions(&self, path: &str) -> Option<Vec<String>> {
        self.lock().store.permissions(path)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panicked while it held the lock has failed anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, for a call of `part`; an error if this call is to fail.
    fn enter(&self, part: Subsystem) -> io::Result<MutexGuard<'_, State>> {
        let observer = self.lock().observer;
        if observer.is_some_and(|fails| fails(part)) {
            return Err(io::Error::other(format!("a call of {part:?} was made to fail")));
        }
        let mut state = self.lock();
        let calls = state.calls.entry(part).or_default();
        if let Some((_, act)) = calls.act.take_if(|(at, _)| *at == calls.made + 1) {
            let made = calls.made;
            drop(state);
            act(&mut self.store(DomId(0))?);
            state = self.lock();
            state.calls.entry(part).or_default().made = made;
        }
        let calls = state.calls.entry(part).or_default();
        calls.made += 1;
        match calls.fails == Some(calls.made) {
            true => Err(io::Error::other(format!("call {} of {part:?} was made to fail", calls.made))),
            false => Ok(state),
        }
    }
}
