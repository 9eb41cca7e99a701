//! Pending watch events, and the file descriptor that signals them.
//!
//! It knows nothing about their origin. Invariant: there are no duplicates, a bounded number, and none of a removed
//! watch; an event that does not fit is replaced by one for the watched node itself, so that a watcher misses no
//! change.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::WatchEvent;

/// Events kept before they are merged: a device has a dozen nodes that change, and a flooding guest must not use much
/// memory.
const EVENTS_MAX: usize = 256;

/// An eventfd that is readable while it is set.
pub(crate) struct Notifier {
    fd: OwnedFd,
    is_set: bool,
}

impl Notifier {
    pub(crate) fn new() -> io::Result<Notifier> {
        Ok(Notifier { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, is_set: false })
    }

    /// Sets or clears it.
    pub(crate) fn set(&mut self, is_set: bool) -> io::Result<()> {
        if is_set == self.is_set {
            return Ok(());
        }
        match is_set {
            true => write(&self.fd, &1u64.to_ne_bytes()).map(drop)?,
            false => match read(&self.fd, &mut [0; 8]) {
                Ok(_) | Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            },
        }
        self.is_set = is_set;
        Ok(())
    }
}

impl AsFd for Notifier {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The watches of one client, and their events not yet taken.
pub(crate) struct Pending {
    watches: Vec<(String, String)>,
    events: VecDeque<WatchEvent>,
    notifier: Notifier,
}

impl Pending {
    pub(crate) fn new() -> io::Result<Pending> {
        Ok(Pending { watches: Vec::new(), events: VecDeque::new(), notifier: Notifier::new()? })
    }

    /// The watches, as path and token.
    pub(crate) fn watches(&self) -> &[(String, String)] {
        &self.watches
    }

    /// Makes the descriptor readable although there is no event, so that the client wakes up.
    pub(crate) fn wake(&mut self) -> io::Result<()> {
        self.notifier.set(true)
    }

    pub(crate) fn watch(&mut self, path: &str, token: &str) {
        self.watches.push((path.to_owned(), token.to_owned()));
    }

    /// Removes a watch and its events; returns `false` if there is no such watch.
    pub(crate) fn unwatch(&mut self, path: &str, token: &str) -> io::Result<bool> {
        let before = self.watches.len();
        self.watches.retain(|watch| (watch.0.as_str(), watch.1.as_str()) != (path, token));
        let watches = &self.watches;
        self.events.retain(|event| watched(watches, event).is_some());
        self.notifier.set(!self.events.is_empty())?;
        Ok(self.watches.len() < before)
    }

    /// Adds an event, if it belongs to a watch and is not a duplicate.
    pub(crate) fn push(&mut self, mut event: WatchEvent) -> io::Result<()> {
        let Some(path) = watched(&self.watches, &event) else { return Ok(()) };
        if self.events.len() >= EVENTS_MAX {
            event.path = path.to_owned();
        }
        if !self.events.contains(&event) {
            self.events.push_back(event);
        }
        self.notifier.set(true)
    }

    pub(crate) fn take(&mut self) -> io::Result<Option<WatchEvent>> {
        let event = self.events.pop_front();
        self.notifier.set(!self.events.is_empty())?;
        Ok(event)
    }

    /// Readable while there are events.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }
}

/// The path of the watch to which `event` belongs.
fn watched<'w>(watches: &'w [(String, String)], event: &WatchEvent) -> Option<&'w str> {
    let watch = watches.iter().find(|(path, token)| *token == event.token && at_or_below(&event.path, path));
    watch.map(|(path, _)| path.as_str())
}

/// Whether `path` is `top` or below it.
pub(crate) fn at_or_below(path: &str, top: &str) -> bool {
    match path.strip_prefix(top) {
        Some(rest) => rest.is_empty() || rest.starts_with('/') || top == "/",
        None => false,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn event(path: &str, token: &str) -> WatchEvent {
        WatchEvent { path: path.to_owned(), token: token.to_owned() }
    }

    #[test]
    fn duplicate_events_are_merged() {
        let mut pending = Pending::new().unwrap();
        pending.watch("/a", "t");
        pending.push(event("/a/b", "t")).unwrap();
        pending.push(event("/a/b", "t")).unwrap();
        assert_eq!(pending.take().unwrap(), Some(event("/a/b", "t")));
        assert_eq!(pending.take().unwrap(), None);
    }

    #[test]
    fn a_flood_of_events_is_merged_into_one_for_the_watched_node() {
        let mut pending = Pending::new().unwrap();
        pending.watch("/a", "t");
        for child in 0..10 * EVENTS_MAX {
            pending.push(event(&format!("/a/{child}"), "t")).unwrap();
        }
        let mut events = Vec::new();
        while let Some(event) = pending.take().unwrap() {
            events.push(event);
        }
        assert_eq!(events.len(), EVENTS_MAX + 1);
        assert_eq!(events.last(), Some(&event("/a", "t")));
    }

    #[test]
    fn events_of_a_removed_watch_are_not_reported() {
        let mut pending = Pending::new().unwrap();
        pending.watch("/a", "t");
        pending.watch("/b", "t");
        pending.push(event("/a/x", "t")).unwrap();
        pending.push(event("/ab", "t")).unwrap();
        pending.push(event("/b", "t")).unwrap();
        assert!(pending.unwatch("/a", "t").unwrap());
        pending.push(event("/a/x", "t")).unwrap();
        assert_eq!(pending.take().unwrap(), Some(event("/b", "t")));
        assert_eq!(pending.take().unwrap(), None);
        assert!(!pending.unwatch("/a", "t").unwrap());
    }

    #[test]
    fn a_path_is_below_its_parents_but_not_below_a_name_prefix() {
        assert!(at_or_below("/a", "/") && at_or_below("/a/b", "/a") && at_or_below("/a", "/a"));
        assert!(!at_or_below("/ab", "/a") && !at_or_below("/a", "/a/b"));
    }
}
