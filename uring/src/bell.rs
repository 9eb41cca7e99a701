//! How a thread that sleeps is woken for work that others have for it, and only then: a system call for each sleep,
//! none for each piece of work.
//!
//! The thread says that it sleeps, then looks once more. Others publish work, then look whether it sleeps. Between the
//! two steps each has a full fence: so at least one of them sees what the other did. Without it, or without the second
//! look, the thread could sleep while there is work, with no other wake-up to come.
//!
//! Invariant: a thread for which there is work does not sleep, or its event has been signalled since it said so.
//!
//! `tests/loom` runs it in every order that the memory model allows, and finds both mistakes.

use super::sync::{AtomicBool, Event, Ordering, fence};

/// Wakes one thread. The thread sleeps by watching the event.
pub(crate) struct Bell {
    /// The thread sleeps, or is about to.
    asleep: AtomicBool,
    event: Event,
}

impl Bell {
    /// The bell of a thread that does not sleep.
    pub(crate) fn new(event: Event) -> Bell {
        Bell { asleep: AtomicBool::new(false), event }
    }

    /// What the thread watches.
    pub(crate) fn event(&self) -> &Event {
        &self.event
    }

    /// The thread is about to sleep. Whether it may: if `has_work` does not find any now, whatever comes from now on
    /// signals the event. [`Bell::awake`] must follow the sleep.
    #[inline]
    pub(crate) fn may_sleep(&self, has_work: impl FnOnce() -> bool) -> bool {
        // In place of a store, so that it follows all that others have done to the flag: `loom` would not know.
        self.asleep.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let works = has_work();
        if works {
            self.awake();
        }
        !works
    }

    /// The thread does not sleep any more.
    #[inline]
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Another thread has published work for this one, and wakes it if it sleeps.
    #[inline]
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        // Only one of those who find it asleep wakes it.
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.event.signal();
        }
    }
}
