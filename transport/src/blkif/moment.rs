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
    /// A front end whose rings cannot be taken is told to close.
    FailureIsFinal,
    /// What an earlier kernel of the guest's has chosen is taken for the present one's.
    StaleChoices,
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

    use super::Mistake;

    thread_local! {
        static MISTAKE: Cell<Option<Mistake>> = const { Cell::new(None) };
        static STEP: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
    }

    pub fn mistake(which: Mistake) -> bool {
        MISTAKE.get() == Some(which)
    }

    /// This thread makes the mistake from now on.
    pub fn make(mistake: Option<Mistake>) {
        MISTAKE.set(mistake);
    }

    pub fn step() {
        STEP.with_borrow(|step| step.as_ref().inspect(|step| step()).is_some());
    }

    /// What happens at each step of this thread from now on.
    pub fn at_each_step(step: Option<Box<dyn Fn()>>) {
        STEP.set(step);
    }
}
