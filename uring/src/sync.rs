//! The synchronisation primitives of [`crate::spsc`] and [`crate::bell`]. `tests/loom` compiles the two with those of
//! `loom` instead, which runs them under every interleaving that the memory model allows.

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
    /// Calls `act` with the address. Only one thread at a time may access the value.
    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
        act(self.0.get())
    }
}

/// An eventfd. A thread that watches it edge triggered never reads it.
pub(crate) struct WakeEvent(OwnedFd);

impl WakeEvent {
    pub(crate) fn new() -> io::Result<WakeEvent> {
        Ok(WakeEvent(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Wakes the thread that watches it, or ends its next sleep at once.
    pub(crate) fn signal(&self) {
        // It fails only with a count near 2^64, which is as readable as any other.
        rustix::io::write(&self.0, &1u64.to_ne_bytes()).ok();
    }
}

impl WakeEvent {
    /// Sleeps until it is signalled: for a thread without a backend to watch it.
    pub(crate) fn wait(&self) {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        // After a signal or an error the thread checks for work again.
        poll(&mut fds, None).unwrap_or_default();
        self.clear();
    }

    /// Takes back all signals so far.
    pub(crate) fn clear(&self) {
        rustix::io::read(&self.0, &mut [0; 8]).unwrap_or_default();
    }
}

impl AsFd for WakeEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
