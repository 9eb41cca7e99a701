//! The store without its daemon: clients, their watches and transactions.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::MutexGuard;

use super::nodes::{Change, Changed, Nodes, is_path};
use super::{Host, Part};
use crate::pending::{Pending, at_or_below};
use crate::wire::PAYLOAD_MAX;
use crate::{DomId, Store, StoreError, Transaction, WatchEvent};

/// The store, and who uses it.
#[derive(Default)]
pub(super) struct State {
    nodes: Nodes,
    clients: BTreeMap<u64, Client>,
    joined: u64,
    begun: u32,
}

struct Client {
    /// What a relative path is relative to, with a slash behind it.
    home: String,
    pending: Pending,
    transactions: BTreeMap<Transaction, Begun>,
    lost: bool,
}

/// The word for a connection that is lost, which no store says.
const LOST: &str = "lost";

/// A transaction that has not ended.
struct Begun {
    /// As the transaction sees them.
    nodes: Nodes,
    /// What it has looked at or changed: the number that each node had before.
    seen: BTreeMap<String, Option<u64>>,
    changes: Vec<Change>,
}

impl Begun {
    fn see(&mut self, path: &str) {
        if !self.seen.contains_key(path) {
            self.seen.insert(path.to_owned(), self.nodes.changed(path));
        }
    }

    fn change(&mut self, change: Change) -> Result<(), &'static str> {
        for path in self.nodes.touched(&change) {
            self.see(&path);
        }
        self.nodes.change(&change)?;
        self.changes.push(change);
        Ok(())
    }

    fn is_overtaken(&self, nodes: &Nodes) -> bool {
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

    /// Nobody who is connected now is answered any more; who waits is woken.
    pub(super) fn lose(&mut self) {
        for client in self.clients.values_mut() {
            client.lost = true;
            let rung = client.pending.ring();
            debug_assert!(rung.is_ok(), "an eventfd cannot be written");
        }
    }

    pub(super) fn permissions(&self, path: &str) -> Option<Vec<String>> {
        self.nodes.permissions(path)
    }

    /// Tells watches of something that is no node: a domain that came or went.
    pub(super) fn fire(&mut self, path: &str) {
        let told = self.tell(&[Changed { path: path.to_owned(), exact: true }]);
        debug_assert!(told.is_ok(), "an eventfd cannot be written");
    }

    fn tell(&mut self, changes: &[Changed]) -> io::Result<()> {
        for client in self.clients.values_mut() {
            let Client { home, pending, .. } = client;
            let watches = pending.watches().to_vec();
            for (watch, token) in watches {
                let whole = absolute(home, &watch);
                for Changed { path, exact } in changes {
                    if if *exact { *path == whole } else { at_or_below(path, &whole) } {
                        let relative =
                            if whole == watch { path.as_str() } else { path.strip_prefix(&*home).unwrap_or(path) };
                        pending.push(WatchEvent { path: relative.to_owned(), token: token.clone() })?;
                    }
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, change: &Change) -> Result<(), &'static str> {
        let changed = self.nodes.change(change)?;
        self.tell(&changed).map_err(|_| "EIO")
    }
}

/// A client of the store; its watches and transactions end with it.
pub struct Tree {
    host: Host,
    client: u64,
    readable: OwnedFd,
}

/// A question, in the words of an error.
struct Asked<'a> {
    what: &'static str,
    path: &'a str,
}

impl Asked<'_> {
    fn answer(&self, code: &str) -> StoreError {
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

impl Tree {
    pub(super) fn new(host: Host, domain: DomId) -> io::Result<Tree> {
        let pending = Pending::new()?;
        let readable = pending.fd().try_clone_to_owned()?;
        let mut state = host.lock();
        state.tree.joined += 1;
        let client = state.tree.joined;
        let home = format!("/local/domain/{domain}/");
        state.tree.clients.insert(client, Client { home, pending, transactions: BTreeMap::new(), lost: false });
        drop(state);
        Ok(Tree { host, client, readable })
    }

    fn enter(&self) -> Result<MutexGuard<'_, super::State>, &'static str> {
        let state = self.host.enter(Part::Store).map_err(|_| "EIO")?;
        let lost = state.tree.clients.get(&self.client).is_some_and(|client| client.lost);
        if lost { Err(LOST) } else { Ok(state) }
    }

    /// Looks at a node, in a transaction or without.
    fn look<T>(
        &self,
        within: Option<Transaction>,
        path: &str,
        look: impl Fn(&Nodes, &str) -> Option<T>,
    ) -> Result<Option<T>, &'static str> {
        let mut state = self.enter()?;
        let State { nodes, clients, .. } = &mut state.tree;
        let client = clients.get_mut(&self.client).ok_or("EBADF")?;
        let path = checked(&client.home, path)?;
        match within {
            None => Ok(look(nodes, &path)),
            Some(transaction) => {
                let begun = client.transactions.get_mut(&transaction).ok_or("EINVAL")?;
                begun.see(&path);
                Ok(look(&begun.nodes, &path))
            }
        }
    }

    /// Changes something, in a transaction or without.
    fn change(
        &self,
        within: Option<Transaction>,
        path: &str,
        change: impl FnOnce(String) -> Change,
    ) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.tree.clients.get_mut(&self.client).ok_or("EBADF")?;
        let change = change(checked(&client.home, path)?);
        match within {
            None => state.tree.change(&change),
            Some(transaction) => client.transactions.get_mut(&transaction).ok_or("EINVAL")?.change(change),
        }
    }

    fn end_transaction(&self, transaction: Transaction, commit: bool) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.tree.clients.get_mut(&self.client).ok_or("EBADF")?;
        let begun = client.transactions.remove(&transaction).ok_or("EINVAL")?;
        if !commit {
            return Ok(());
        }
        if begun.is_overtaken(&state.tree.nodes) {
            return Err("EAGAIN");
        }
        begun.changes.iter().try_for_each(|change| state.tree.change(change))
    }

    fn add_watch(&self, path: &str, token: &str) -> Result<(), &'static str> {
        let mut state = self.enter()?;
        let client = state.tree.clients.get_mut(&self.client).ok_or("EBADF")?;
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
        let client = state.tree.clients.get_mut(&self.client).ok_or("EBADF")?;
        let was_there = client.pending.unwatch(path, token).map_err(|_| "EIO")?;
        if was_there { Ok(()) } else { Err("ENOENT") }
    }

    fn begin_transaction(&self) -> Result<Transaction, &'static str> {
        let mut state = self.enter()?;
        state.tree.begun += 1;
        let transaction = Transaction(state.tree.begun);
        let State { nodes, clients, .. } = &mut state.tree;
        let begun = Begun { nodes: nodes.clone(), seen: BTreeMap::new(), changes: Vec::new() };
        clients.get_mut(&self.client).ok_or("EBADF")?.transactions.insert(transaction, begun);
        Ok(transaction)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.host.lock().tree.clients.remove(&self.client);
    }
}

impl Store for Tree {
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.look(within, path, Nodes::value).map_err(|code| Asked { what: "reading", path }.answer(code))
    }

    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        self.look(within, path, Nodes::children).map_err(|code| Asked { what: "listing", path }.answer(code))
    }

    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError> {
        let asked = Asked { what: "writing", path };
        if path.len() + 1 + value.len() > PAYLOAD_MAX {
            return Err(asked.answer("E2BIG"));
        }
        self.change(within, path, |path| Change::Write(path, value.to_vec())).map_err(|code| asked.answer(code))
    }

    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError> {
        match self.change(within, path, Change::Remove) {
            Ok(()) | Err("ENOENT") => Ok(()),
            Err(code) => Err(Asked { what: "removing", path }.answer(code)),
        }
    }

    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError> {
        let asked = Asked { what: "setting the permissions of", path };
        if who.is_empty() || !who.iter().all(|who| is_permission(who)) {
            return Err(asked.answer("EINVAL"));
        }
        let who = who.iter().map(|&who| who.to_owned()).collect();
        self.change(within, path, |path| Change::Permissions(path, who)).map_err(|code| asked.answer(code))
    }

    fn begin(&mut self) -> Result<Transaction, StoreError> {
        self.begin_transaction().map_err(|code| Asked { what: "beginning", path: "a transaction" }.answer(code))
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError> {
        let asked = Asked { what: "ending", path: "a transaction" };
        self.end_transaction(transaction, commit).map_err(|code| asked.answer(code))
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.add_watch(path, token).map_err(|code| Asked { what: "watching", path }.answer(code))
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        self.remove_watch(path, token).map_err(|code| Asked { what: "no longer watching", path }.answer(code))
    }

    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        let path = domain.to_string();
        let asked = Asked { what: "looking for domain", path: &path };
        self.enter().map(|state| state.domains.contains(&domain)).map_err(|code| asked.answer(code))
    }

    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        let asked = Asked { what: "waiting for", path: "events" };
        let mut state = self.enter().map_err(|code| asked.answer(code))?;
        let client = state.tree.clients.get_mut(&self.client).ok_or_else(|| asked.answer("EBADF"))?;
        client.pending.take().map_err(|_| asked.answer("EIO"))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

/// The whole path of a node, if it is one that the store takes.
fn checked(home: &str, path: &str) -> Result<String, &'static str> {
    let whole = absolute(home, path);
    if is_path(&whole) { Ok(whole) } else { Err("EINVAL") }
}

/// A path, whole. What begins with `@` is the name of an event, not of a node.
fn absolute(home: &str, path: &str) -> String {
    if path.starts_with(['/', '@']) { path.to_owned() } else { format!("{home}{path}") }
}

fn is_permission(who: &str) -> bool {
    let mut letters = who.chars();
    letters.next().is_some_and(|letter| "nrwb".contains(letter)) && letters.as_str().parse::<u16>().is_ok()
}
