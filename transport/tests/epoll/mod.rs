//! The event loop of a test's thread, with epoll.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use transport::{Interest, Watch, WatchKey};

/// The event loop of a test's thread.
pub struct Epoll {
    epoll: OwnedFd,
    /// Watched descriptors, kept to be unwatched by key.
    fds: Vec<(WatchKey, OwnedFd)>,
}

impl Epoll {
    pub fn new() -> Epoll {
        Epoll { epoll: epoll::create(CreateFlags::CLOEXEC).unwrap(), fds: Vec::new() }
    }

    /// The ready keys; waits for one if `sleep`.
    pub fn wait(&self, sleep: bool) -> Vec<WatchKey> {
        let mut events: Vec<Event> = Vec::with_capacity(64);
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let long = Timespec { tv_sec: 120, tv_nsec: 0 };
        let timeout = if sleep { &long } else { &none };
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(timeout)).unwrap();
        assert!(!sleep || !events.is_empty(), "no event arrived");
        events.iter().map(|event| WatchKey(event.data.u64())).collect()
    }
}

impl Watch for Epoll {
    fn watch(&mut self, fd: BorrowedFd<'_>, interest: Interest, key: WatchKey) -> std::io::Result<()> {
        self.forget(key);
        let write = if interest == Interest::ReadWrite { EventFlags::OUT } else { EventFlags::empty() };
        let copy = fd.try_clone_to_owned()?;
        let flags = EventFlags::IN | EventFlags::ET | write;
        epoll::add(&self.epoll, &copy, EventData::new_u64(key.0), flags)?;
        self.fds.push((key, copy));
        Ok(())
    }

    fn forget(&mut self, key: WatchKey) {
        if let Some(at) = self.fds.iter().position(|(known, _)| *known == key) {
            let (_, fd) = self.fds.swap_remove(at);
            epoll::delete(&self.epoll, &fd).unwrap();
        }
    }
}
