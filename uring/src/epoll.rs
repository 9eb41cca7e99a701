//! The file descriptors watched alongside Linux AIO: an inner epoll, edge triggered.
//!
//! It holds its own duplicate of each descriptor, as `polls` does: two keys may watch one descriptor, and a caller may
//! close its descriptor too early.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};

/// The maximum number of events fetched by one system call.
const BATCH: usize = 32;

pub(crate) struct Epoll {
    fd: OwnedFd,
    by_key: BTreeMap<u64, OwnedFd>,
}

impl Epoll {
    pub(crate) fn new() -> io::Result<Epoll> {
        Ok(Epoll { fd: epoll::create(CreateFlags::CLOEXEC)?, by_key: BTreeMap::new() })
    }

    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.forget(key);
        let writable = if write { EventFlags::OUT } else { EventFlags::empty() };
        let events = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET | writable;
        epoll::add(&self.fd, &fd, EventData::new_u64(key), events)?;
        self.by_key.insert(key, fd);
        Ok(())
    }

    /// Returns whether the key was watched.
    pub(crate) fn forget(&mut self, key: u64) -> bool {
        let Some(fd) = self.by_key.remove(&key) else { return false };
        // Closing our descriptor alone would not end the watch: the caller has the file open too.
        let deleted = epoll::delete(&self.fd, &fd);
        debug_assert!(deleted.is_ok(), "a watched descriptor is missing from the epoll");
        true
    }

    /// Adds the ready keys to `ready`, without duplicates; sleeps until there is one, for at most `most`. Returns
    /// `false` if a signal or the timeout came first.
    pub(crate) fn wait(&self, most: Option<Duration>, ready: &mut Vec<u64>) -> io::Result<bool> {
        let mut events = [MaybeUninit::<Event>::uninit(); BATCH];
        let most = most.and_then(|most| Timespec::try_from(most).ok());
        match epoll::wait(&self.fd, &mut events, most.as_ref()) {
            Ok((events, _)) => {
                let is_ready = !events.is_empty();
                for event in events {
                    let key = event.data.u64();
                    if !ready.contains(&key) {
                        ready.push(key);
                    }
                }
                Ok(is_ready)
            }
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
