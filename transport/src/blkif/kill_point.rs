//! Points at which a test can kill the process, and bugs that a test can inject to check that they are detected.
//!
//! It knows nothing about the operations at these points. Invariant: outside of this crate's own tests it does nothing
//! and costs nothing.

/// A bug that can be injected, to be detected by [`model`](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "used by tests only"))]
pub enum InjectedBug {
    /// A response is written into its slot before the request in that slot has been moved.
    ResponseBeforeMove,
    /// The intent record of a response is cleared before the response is counted.
    IntentClearedEarly,
    /// The intent record of a killed process is not completed.
    IntentNotCompleted,
    /// A front end's choices are checked against the features of this process, not those that it was offered.
    OwnFeatures,
    /// Persistent grants are used if this process supports them, even if the front end was not offered them.
    OwnPersistence,
    /// A front end whose rings cannot be attached is made to close.
    FailureIsFinal,
    /// The number of queues chosen by an earlier guest kernel is used for the current one.
    StaleQueueCount,
    /// The front end is not notified of responses of an earlier process.
    NoInitialNotification,
    /// Requests of a closing front end that a killed process left unanswered are not answered.
    ClosedUnanswered,
    /// A failed notification is not retried.
    NotificationLost,
}

#[cfg(not(test))]
#[inline(always)]
pub fn injected(_: InjectedBug) -> bool {
    false
}

/// Called before an externally visible store: a test may kill the process here.
#[cfg(not(test))]
#[inline(always)]
pub fn kill_point() {}

#[cfg(test)]
pub use test::*;

#[cfg(test)]
mod test {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use xen::fake::Subsystem;

    use super::InjectedBug;

    /// The operation that follows a kill point.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum KillPoint {
        /// A store to a ring.
        Stored,
        /// A call of Xen.
        Called(Subsystem),
    }

    type Hook = Rc<dyn Fn(KillPoint) -> bool>;

    thread_local! {
        static INJECTED: Cell<Option<InjectedBug>> = const { Cell::new(None) };
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    pub fn injected(bug: InjectedBug) -> bool {
        INJECTED.get() == Some(bug)
    }

    /// Injects a bug in this thread from now on; `None` for no bug.
    pub fn inject(bug: Option<InjectedBug>) {
        INJECTED.set(bug);
    }

    pub fn kill_point() {
        run_hook(KillPoint::Stored);
    }

    /// Called for each call of Xen in this thread; returns true if the call must fail.
    pub fn xen_called(part: Subsystem) -> bool {
        run_hook(KillPoint::Called(part))
    }

    fn run_hook(point: KillPoint) -> bool {
        let hook = HOOK.with_borrow(Clone::clone);
        hook.is_some_and(|hook| hook(point))
    }

    /// Sets the hook for each kill point of this thread.
    pub fn on_each(hook: Option<Hook>) {
        HOOK.set(hook);
    }
}
