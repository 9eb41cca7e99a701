//! Moments at which a test has the process killed, and mistakes that a test makes it do, to see that they are found.
//!
//! Knows nothing of what happens there. Invariant: outside of this crate's own tests it is nothing, and costs nothing.

/// A mistake of which there is one, here and in [`model`](super), to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "made by tests only"))]
pub enum Mistake {
    /// An answer is put into its slot before the request that lies there has another.
    SlotBeforeMove,
    /// The note of an answer is void before that is counted.
    NoteClearedEarly,
    /// What a process that is gone has noted is not finished.
    NoteNotRead,
    /// A front end is judged by what this process offers, not by what it was offered.
    OwnOffer,
    /// Likewise, of pages that stay mapped.
    OwnPersistence,
    /// A front end whose rings cannot be taken is told to close.
    FailureIsFinal,
    /// The number of queues that an earlier kernel of the guest's has chosen is taken for the present one's.
    StaleQueues,
    /// The front end is not told of what another process has answered.
    NotToldAfterwards,
    /// What a front end that closes is owed by a process that is gone is not answered.
    ClosedUnanswered,
    /// A signal that failed is not owed.
    SignalLost,
}

#[cfg(not(test))]
#[inline(always)]
pub fn mistake(_: Mistake) -> bool {
    false
}

/// Something lasting is about to be done: before it the process may be killed.
#[cfg(not(test))]
#[inline(always)]
pub fn step() {}

#[cfg(test)]
pub use test::*;

#[cfg(test)]
mod test {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use xen::fake::Part;

    use super::Mistake;

    /// What is about to be done.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Moment {
        /// Something is stored in a ring.
        Stored,
        /// Xen is called.
        Called(Part),
    }

    type Hook = Rc<dyn Fn(Moment) -> bool>;

    thread_local! {
        static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    pub fn mistake(which: Mistake) -> bool {
        MISTAKE.get() == Some(which)
    }

    /// This thread makes the mistake from now on.
    pub fn make(mistake: Option<Mistake>) {
        MISTAKE.set(mistake);
    }

    pub fn step() {
        at(Moment::Stored);
    }

    /// A call of Xen's, in this thread; whether it fails.
    pub fn called(part: Part) -> bool {
        at(Moment::Called(part))
    }

    fn at(moment: Moment) -> bool {
        let hook = HOOK.with_borrow(Clone::clone);
        hook.is_some_and(|hook| hook(moment))
    }

    /// What happens at each moment of this thread from now on.
    pub fn at_each(hook: Option<Hook>) {
        HOOK.set(hook);
    }
}
