//! What [`crate::spsc`] and [`crate::bell`] are made of. `tests/loom` compiles the two on top of `loom` instead, which
//! runs them in every order that the memory model allows.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

/// Memory that two threads use in turn.
#[derive(Default)]
pub(crate) struct Place<T>(UnsafeCell<T>);

impl<T> Place<T> {
    /// Passes the address on. Only one thread at a time may use what is there.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
        act(self.0.get())
    }
}

/// An eventfd. It is watched edge triggered, and never read by a thread that watches it.
pub(crate) struct Event(OwnedFd);

impl Event {
    pub(crate) fn new() -> io::Result<Event> {
        Ok(Event(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Wakes the thread that watches it, or has its next sleep end at once.
    pub(crate) fn signal(&self) {
        // It fails only with a count near 2^64, which is as readable as any other.
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).ok();
    }
}

impl Event {
    /// Sleeps until it is signalled: for a thread that has nothing to watch it with.
    pub(crate) fn wait(&self) {
        let mut look = [PollFd::new(&self.0, PollFlags::IN)];
        // Nothing else can be ready, and the thread looks again after a signal or an error.
        poll(&mut look, None).unwrap_or_default();
        rustix::io::read(&self.0, &mut [0; 8]).unwrap_or_default();
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
