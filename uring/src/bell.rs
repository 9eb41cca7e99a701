//! Wakes a thread for work that other threads have published, only if it sleeps: one system call per sleep, not per
//! piece of work.
//!
//! The thread sets a flag that it sleeps, then checks for work again. Others publish work, then check the flag.
//! Both have a full fence between the two steps, so at least one of them sees what the other did. Without the fence, or
//! without the second check, the thread could sleep while there is work, and never be woken.
//!
//! Invariant: a thread for which there is work does not sleep, or its event has been signalled since it set the flag.
//!
//! `tests/loom` runs it under every interleaving that the memory model allows, and detects both mistakes.

use super::sync::{AtomicBool, Ordering, WakeEvent, fence};

/// Wakes one thread. The thread sleeps by watching the event.
pub(crate) struct Bell {
    /// The thread sleeps, or is about to.
    asleep: AtomicBool,
    event: WakeEvent,
}

impl Bell {
    /// A bell for a thread that is awake.
    pub(crate) fn new(event: WakeEvent) -> Bell {
        Bell { asleep: AtomicBool::new(false), event }
    }

    /// The event that the thread watches while it sleeps.
    pub(crate) fn event(&self) -> &WakeEvent {
        &self.event
    }

    /// Called by the thread before it sleeps. Returns true if it may: `has_work` finds nothing, and any work published
    /// later signals the event. [`Bell::awake`] must follow the sleep.
    #[inline]
    pub(crate) fn may_sleep(&self, has_work: impl FnOnce() -> bool) -> bool {
        // A swap, not a store: `loom` would not order a store after earlier changes of the flag by other threads.
        self.asleep.swap(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let finds_work = has_work();
        if finds_work {
            self.awake();
        }
        !finds_work
    }

    /// Called by the thread after its sleep.
    #[inline]
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Called by another thread after it has published work: wakes the thread if it sleeps.
    #[inline]
    pub(crate) fn ring(&self) {
        fence(Ordering::SeqCst);
        // If several find it asleep, one wakes it.
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.event.signal();
        }
    }
}
