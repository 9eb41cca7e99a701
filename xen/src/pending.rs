//! Watch events that wait to be taken, and the file descriptor that says so.
//!
//! Knows nothing of where they come from. Keeps: one of a kind, a bounded number, and none of a watch that is gone; what
//! does not fit becomes an event for the watched node itself, so that nothing is lost that a watcher would look for.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{Errno, read, write};

use crate::WatchEvent;

/// Events kept before they are merged: a device has a dozen nodes that change, and a guest that floods is to be no burden.
const KEPT: usize = 256;

/// Readable while it rings.
pub(crate) struct Bell {
    fd: OwnedFd,
    rings: bool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Bell> {
        Ok(Bell { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, rings: false })
    }

    /// Lets it ring, or not.
    pub(crate) fn set(&mut self, rings: bool) -> io::Result<()> {
        if rings == self.rings {
            return Ok(());
        }
        match rings {
            true => write(&self.fd, &1u64.to_ne_bytes()).map(drop)?,
            false => match read(&self.fd, &mut [0; 8]) {
                Ok(_) | Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            },
        }
        self.rings = rings;
        Ok(())
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The watches of one client, and the events of theirs that were not taken yet.
pub(crate) struct Pending {
    watches: Vec<(String, String)>,
    events: VecDeque<WatchEvent>,
    bell: Bell,
}

impl Pending {
    pub(crate) fn new() -> io::Result<Pending> {
        Ok(Pending { watches: Vec::new(), events: VecDeque::new(), bell: Bell::new()? })
    }

    /// Watches, as path and token.
    pub(crate) fn watches(&self) -> &[(String, String)] {
        &self.watches
    }

    /// Is readable though nothing has happened: whoever listens is to look.
    pub(crate) fn ring(&mut self) -> io::Result<()> {
        self.bell.set(true)
    }

    pub(crate) fn watch(&mut self, path: &str, token: &str) {
        self.watches.push((path.to_owned(), token.to_owned()));
    }

    /// Forgets a watch and its events; `false` if there is none such.
    pub(crate) fn unwatch(&mut self, path: &str, token: &str) -> io::Result<bool> {
        let before = self.watches.len();
        self.watches.retain(|watch| (watch.0.as_str(), watch.1.as_str()) != (path, token));
        let watches = &self.watches;
        self.events.retain(|event| watched(watches, event).is_some());
        self.bell.set(!self.events.is_empty())?;
        Ok(self.watches.len() < before)
    }

    /// Keeps an event, if it is of a watch and not yet there.
    pub(crate) fn push(&mut self, mut event: WatchEvent) -> io::Result<()> {
        let Some(path) = watched(&self.watches, &event) else { return Ok(()) };
        if self.events.len() >= KEPT {
            event.path = path.to_owned();
        }
        if !self.events.contains(&event) {
            self.events.push_back(event);
        }
        self.bell.set(true)
    }

    pub(crate) fn take(&mut self) -> io::Result<Option<WatchEvent>> {
        let event = self.events.pop_front();
        self.bell.set(!self.events.is_empty())?;
        Ok(event)
    }

    /// Readable while there are events.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// The path that was given with the watch to which `event` belongs.
fn watched<'w>(watches: &'w [(String, String)], event: &WatchEvent) -> Option<&'w str> {
    let watch = watches.iter().find(|(path, token)| *token == event.token && at_or_below(&event.path, path));
    watch.map(|(path, _)| path.as_str())
}

/// Whether `path` is `top` or lies below it.
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
    fn one_of_a_kind_is_kept() {
        let mut pending = Pending::new().unwrap();
        pending.watch("/a", "t");
        pending.push(event("/a/b", "t")).unwrap();
        pending.push(event("/a/b", "t")).unwrap();
        assert_eq!(pending.take().unwrap(), Some(event("/a/b", "t")));
        assert_eq!(pending.take().unwrap(), None);
    }

    #[test]
    fn a_flood_becomes_one_event_for_the_watched_node() {
        let mut pending = Pending::new().unwrap();
        pending.watch("/a", "t");
        for child in 0..10 * KEPT {
            pending.push(event(&format!("/a/{child}"), "t")).unwrap();
        }
        let mut events = Vec::new();
        while let Some(event) = pending.take().unwrap() {
            events.push(event);
        }
        assert_eq!(events.len(), KEPT + 1);
        assert_eq!(events.last(), Some(&event("/a", "t")));
    }

    #[test]
    fn events_of_a_watch_that_is_gone_are_not_reported() {
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
    fn everything_is_below_the_root_and_no_name_is_a_prefix() {
        assert!(at_or_below("/a", "/") && at_or_below("/a/b", "/a") && at_or_below("/a", "/a"));
        assert!(!at_or_below("/ab", "/a") && !at_or_below("/a", "/a/b"));
    }
}
