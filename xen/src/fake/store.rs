//! The fake store: clients, their watches and transactions.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::MutexGuard;

use super::nodes::{Change, Changed, Nodes, is_path};
use super::{Host, Subsystem};
use crate::pending::{Pending, at_or_below};
use crate::wire::PAYLOAD_MAX;
use crate::{DomId, Store, StoreError, Transaction, WatchEvent};

/// The store and its clients.
#[derive(Default)]
pub(super) struct State {
    nodes: Nodes,
    clients: BTreeMap<u64, Client>,
    last_client: u64,
    begun: u32,
}

struct Client {
    /// The prefix of relative paths, with a trailing slash.
    home: String,
    pending: Pending,
    transactions: BTreeMap<Transaction, OpenTransaction>,
    lost: bool,
}

/// The error code for a lost connection, which no real store returns.
const LOST: &str = "lost";

/// An open transaction.
struct OpenTransaction {
    /// The nodes as the transaction sees them.
    nodes: Nodes,
    /// The nodes that it has read or changed, with their previous generation.
    seen: BTreeMap<String, Option<u64>>,
    changes: Vec<Change>,
}

impl OpenTransaction {
    fn record_access(&mut self, path: &str) {
        if !self.seen.contains_key(path) {
            self.seen.insert(path.to_owned(), self.nodes.changed(path));
        }
    }

    fn change(&mut self, change: Change) -> Result<(), &'static str> {
        for path in self.nodes.affected_nodes(&change) {
            self.record_access(&path);
        }
        self.nodes.change(&change)?;
        self.changes.push(change);
        Ok(())
    }

    fn has_conflict(&self, nodes: &Nodes) -> bool {
        self.seen.iter().any(|(path, &changed)| nodes.changed(path) != changed)
    }
}

impl State {
    pub(super) fn watched(&self) -> usize {
        self.clients.values().map(|client| client.pending.watches().len()).sum()
    }

    pub(super) fn transactions(&self) -> usize {
        self.clients.values().map(|client| client.transactions.len()).sum()
    }

    /// Breaks all existing connections; clients that wait are woken.
    pub(super) fn break_connections(&mut self) {
        for client in self.clients.values_mut() {
            client.lost = true;
            let woken = client.pending.wake();
            debug_assert!(woken.is_ok(), "cannot write to an eventfd");
        }
    }

    pub(super) fn permissions(&self, path: &str) -> Option<Vec<String>> {
        self.nodes.permissions(path)
    }

    /// Fires watches for something that is not a node: a domain that was created or destroyed.
    pub(super) fn fire(&mut self, path: &str) {
        let notified = self.fire_watches(&[Changed { path: path.to_owned(), exact: true }]);
        debug_assert!(notified.is_ok(), "cannot write to an eventfd");
    }

    fn fire_watches(&mut self, changes: &[Changed]) -> io::Result<()> {
        for client in self.clients.values_mut() {
            let Client { home, pending, .. } = client;
            let watches = pending.watches().to_vec();
            for (watch, token) in watches {
                let absolute_path = absolute(home, &watch);
                for Changed { path, exact } in changes {
                    if if *exact { *path == absolute_path } else { at_or_below(path, &absolute_path) } {
                        let relative = if absolute_path == watch {
                            path.as_str()
                        } else {
                            path.strip_prefix(&*home).unwrap_or(path)
                        };
                        pending.push(WatchEvent { path: relative.to_owned(), token: token.clone() })?;
                    }
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, change: &Change) -> Result<(), &'static str> {
        let changed = self.nodes.change(change)?;
        self.fire_watches(&changed).map_err(|_| "EIO")
    }
}

/// A client of the store; its watches and transactions end with it.
pub struct FakeStore {
    host: Host,
    client: u64,
    readable: OwnedFd,
}

/// A call, as errors describe it.
struct StoreCall<'a> {
    what: &'static str,
    path: &'a str,
}

impl StoreCall<'_> {
    fn error(&self, code: &str) -> StoreError {
        match code {
            "ENOENT" => StoreError::NoEntry { path: self.path.to_owned() },
            "EAGAIN" => StoreError::Again,
            LOST => StoreError::Lost {
                what: self.what,
                path: self.path.to_owned(),
                source: io::ErrorKind::NotConnected.into(),
            },
            code => StoreError::Refused { what: self.what, path: self.path.to_owned(), code: code.to_owned() },
        }
    }
}

impl FakeStore {
    pub(super) fn new(host: Host, domain: DomId) -> io::Result<FakeStore> {
        let pending = Pending::new()?;
        let readable = pending.fd().try_clone_to_owned()?;
        let mut state = host.lock();
        state.store.last_client += 1;
        let client = state.store.last_client;
        let home = format!("/local/domain/{domain}/");
        state.store.clients.insert(client, Client { home, pending, transactions: BTreeMap::new(), lost: false });
        drop(state);
        Ok(FakeStore { host, client, readable })
    }

    fn enter(&self) -> Result<MutexGuard<'_, super::State>, &'static str> {
        let state = self.host.enter(Subsystem::Store).map_err(|_| "EIO")?;
        let lost = state.store.clients.get(&self.client).is_some_and(|client| client.lost);
        if lost { Err(LOST) } else { Ok(state) }
    }

    /// Reads a node, in a transaction or outside.
    fn read_node<T>(
        &self,
        within: Option<Transaction>,
        path: &str,
        read_node: impl Fn(&Nodes, &str) -> Option<T>,
    ) -> Result<Option<T>, &'static str> {
        let mut state = self.enter()?;
        let State { nodes, clients, .. } = &mut state.store;
        let client = clients.get_mut(&self.client).ok_or("EBADF")?;
        let path = checked(&client.home, path)?;
        match within {
            None => Ok(read_node(nodes, &path)),
            Some(transaction) => {
                let begun = client.transactions.get_mut(&transaction).ok_or("EINVAL")?;
                begun.record_access(&path);
                Ok(read_node(&begun.nodes, &path))
            }
        }
    }

    /// Changes the store, in a transaction or outside.
    fn change(
        &self,
        within: Option<Transaction>,
        path: &str,
        change: impl FnOnce(String) -> Change,
    ) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.store.clients.get_mut(&self.client).ok_or("EBADF")?;
        let change = change(checked(&client.home, path)?);
        match within {
            None => state.store.change(&change),
            Some(transaction) => client.transactions.get_mut(&transaction).ok_or("EINVAL")?.change(change),
        }
    }

    fn end_transaction(&self, transaction: Transaction, commit: bool) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.store.clients.get_mut(&self.client).ok_or("EBADF")?;
        let begun = client.transactions.remove(&transaction).ok_or("EINVAL")?;
        if !commit {
            return Ok(());
        }
        if begun.has_conflict(&state.store.nodes) {
            return Err("EAGAIN");
        }
        begun.changes.iter().try_for_each(|change| state.store.change(change))
    }

    fn add_watch(&self, path: &str, token: &str) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.store.clients.get_mut(&self.client).ok_or("EBADF")?;
        checked(&client.home, path)?;
        if client.pending.watches().iter().any(|watch| (watch.0.as_str(), watch.1.as_str()) == (path, token)) {
            return Err("EEXIST");
        }
        client.pending.watch(path, token);
        let event = WatchEvent { path: path.to_owned(), token: token.to_owned() };
        client.pending.push(event).map_err(|_| "EIO")
    }

    fn remove_watch(&self, path: &str, token: &str) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.store.clients.get_mut(&self.client).ok_or("EBADF")?;
        let existed = client.pending.unwatch(path, token).map_err(|_| "EIO")?;
        if existed { Ok(()) } else { Err("ENOENT") }
    }

    fn begin_transaction(&self) -> Result<Transaction, &'static str> {
        let mut state = self.enter()?;
        state.store.begun += 1;
        let transaction = Transaction(state.store.begun);
        let State { nodes, clients, .. } = &mut state.store;
        let begun = OpenTransaction { nodes: nodes.clone(), seen: BTreeMap::new(), changes: Vec::new() };
        clients.get_mut(&self.client).ok_or("EBADF")?.transactions.insert(transaction, begun);
        Ok(transaction)
    }
}

impl Drop for FakeStore {
    fn drop(&mut self) {
        self.host.lock().store.clients.remove(&self.client);
    }
}

impl Store for FakeStore {
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.read_node(within, path, Nodes::value).map_err(|code| StoreCall { what: "reading", path }.error(code))
    }

    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        self.read_node(within, path, Nodes::children).map_err(|code| StoreCall { what: "listing", path }.error(code))
    }

    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError> {
        let call = StoreCall { what: "writing", path };
        if path.len() + 1 + value.len() > PAYLOAD_MAX {
            return Err(call.error("E2BIG"));
        }
        self.change(within, path, |path| Change::Write(path, value.to_vec())).map_err(|code| call.error(code))
    }

    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError> {
        match self.change(within, path, Change::Remove) {
            Ok(()) | Err("ENOENT") => Ok(()),
            Err(code) => Err(StoreCall { what: "removing", path }.error(code)),
        }
    }

    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError> {
        let call = StoreCall { what: "setting the permissions of", path };
        if who.is_empty() || !who.iter().all(|who| is_permission(who)) {
            return Err(call.error("EINVAL"));
        }
        let who = who.iter().map(|&who| who.to_owned()).collect();
        self.change(within, path, |path| Change::Permissions(path, who)).map_err(|code| call.error(code))
    }

    fn begin(&mut self) -> Result<Transaction, StoreError> {
        self.begin_transaction().map_err(|code| StoreCall { what: "beginning", path: "a transaction" }.error(code))
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError> {
        let call = StoreCall { what: "ending", path: "a transaction" };
        self.end_transaction(transaction, commit).map_err(|code| call.error(code))
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.add_watch(path, token).map_err(|code| StoreCall { what: "watching", path }.error(code))
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.remove_watch(path, token).map_err(|code| StoreCall { what: "no longer watching", path }.error(code))
    }

    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        let path = domain.to_string();
        let call = StoreCall { what: "looking for domain", path: &path };
        self.enter().map(|state| state.domains.contains(&domain)).map_err(|code| call.error(code))
    }

    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        let call = StoreCall { what: "waiting for", path: "events" };
        let mut state = self.enter().map_err(|code| call.error(code))?;
        let client = state.store.clients.get_mut(&self.client).ok_or_else(|| call.error("EBADF"))?;
        client.pending.take().map_err(|_| call.error("EIO"))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The absolute path of a node, if the store accepts it.
fn checked(home: &str, path: &str) -> Result<String, &'static str> {
    let absolute_path = absolute(home, path);
    if is_path(&absolute_path) { Ok(absolute_path) } else { Err("EINVAL") }
}

/// Makes a path absolute. A path that begins with `@` is the name of an event, not of a node.
fn absolute(home: &str, path: &str) -> String {
    if path.starts_with(['/', '@']) { path.to_owned() } else { format!("{home}{path}") }
}

fn is_permission(who: &str) -> bool {
    let mut letters = who.chars();
    letters.next().is_some_and(|letter| "nrwb".contains(letter)) && letters.as_str().parse::<u16>().is_ok()
}
