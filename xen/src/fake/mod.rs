//! A hypervisor without Xen: domains whose pages lie in one file of memory, event channels, and a store.
//!
//! For tests and fuzz targets, also of other crates. A test plays a guest by [`Guest`]; what is tested gets a
//! [`GrantTable`], [`Channels`] and a [`Tree`], as a backend in domain 0 has them. Knows nothing of what is done with
//! these. Keeps: what Xen refuses is refused here, and all that is mapped, bound or watched is counted
//! ([`Host::counts`]).

mod channels;
mod guest;
mod nodes;
mod table;
mod tree;

pub use channels::Channels;
pub use guest::{Access, Guest, Page};
pub use table::GrantTable;
pub use tree::Tree;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, memfd_create};

use crate::DomId;

/// What the tested side calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Copying and mapping.
    Grants,
    /// Event channels.
    Channels,
    /// The store.
    Store,
}

/// What the tested side holds just now: all zero when it has cleaned up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages of guests that are mapped.
    pub mapped: usize,
    /// Event channels that are bound.
    pub bound: usize,
    /// Watches of the store, of all its clients.
    pub watched: usize,
    /// Transactions that have begun and not ended, of all clients.
    pub transactions: usize,
}

/// The machine. A clone is the same one.
#[derive(Clone)]
pub struct Host {
    /// The pages of all guests.
    memory: Arc<OwnedFd>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    domains: BTreeSet<DomId>,
    calls: BTreeMap<Part, Calls>,
    observer: Option<Observer>,
    /// Bytes of the pages of all guests.
    memory_len: u64,
    table: table::Table,
    lines: channels::Lines,
    tree: tree::State,
}

/// How often a part was called, and which of its calls fails.
#[derive(Default)]
struct Calls {
    made: u64,
    fails: Option<u64>,
    act: Option<(u64, Act)>,
}

/// Asked before each call of the tested side, whether it fails; one that unwinds is how the tested side is killed
/// there.
pub type Observer = fn(Part) -> bool;

/// What somebody else does.
type Act = Box<dyn FnOnce(&mut Tree) + Send>;

impl Host {
    /// A machine with nothing but domain 0.
    pub fn new() -> io::Result<Host> {
        let memory = Arc::new(memfd_create("guests", MemfdFlags::CLOEXEC)?);
        Ok(Host { memory, state: Arc::default() })
    }

    /// Makes a domain.
    pub fn guest(&self, domain: DomId) -> Guest {
        let mut state = self.lock();
        state.domains.insert(domain);
        state.tree.fire("@introduceDomain");
        drop(state);
        Guest::new(self.clone(), domain)
    }

    /// What the backend's side uses for grants.
    pub fn grants(&self) -> GrantTable {
        GrantTable::new(self.clone())
    }

    /// What the backend's side uses for event channels.
    pub fn channels(&self) -> io::Result<Channels> {
        Channels::new(self.clone())
    }

    /// The store, for a client in `domain`.
    pub fn store(&self, domain: DomId) -> io::Result<Tree> {
        Tree::new(self.clone(), domain)
    }

    /// Lets the `nth` call of `part` from now on fail; 1 is the next.
    pub fn fail(&self, part: Part, nth: u64) {
        let mut state = self.lock();
        let calls = state.calls.entry(part).or_default();
        calls.fails = calls.made.checked_add(nth);
    }

    /// Just before the `nth` call of `part` from now on, has `act` happen, by a client of domain 0's; its own calls do
    /// not count.
    pub fn when(&self, part: Part, nth: u64, act: impl FnOnce(&mut Tree) + Send + 'static) {
        let mut state = self.lock();
        let calls = state.calls.entry(part).or_default();
        let at = calls.made.saturating_add(nth);
        calls.act = Some((at, Box::new(act)));
    }

    /// Has each call of any part observed from now on.
    pub fn observe(&self, observer: Option<Observer>) {
        self.lock().observer = observer;
    }

    /// How often `part` was called.
    pub fn calls(&self, part: Part) -> u64 {
        self.lock().calls.get(&part).map_or(0, |calls| calls.made)
    }

    /// What is held.
    pub fn counts(&self) -> Counts {
        let state = self.lock();
        Counts {
            mapped: state.table.mapped(),
            bound: state.lines.bound(),
            watched: state.tree.watched(),
            transactions: state.tree.transactions(),
        }
    }

    /// Every connection to the store that there is now is lost, as when its daemon ends. Another may be made.
    pub fn lose_stores(&self) {
        self.lock().tree.lose();
    }

    /// Who may read and write a node of the store; kept, and not enforced.
    pub fn permissions(&self, path: &str) -> Option<Vec<String>> {
        self.lock().tree.permissions(path)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A test that panicked while it held the lock has failed anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, for a call of `part`; or that this is the one which fails.
    fn enter(&self, part: Part) -> io::Result<MutexGuard<'_, State>> {
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
