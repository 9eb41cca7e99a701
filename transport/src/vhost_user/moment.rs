//! The moments at which the process may be killed, for tests: before anything that outlives it.
//!
//! Knows nothing about what is done there. Invariant: outside of tests this is nothing; in a test that has chosen a
//! moment nothing that comes after it leaves the process, so that what is left is what a kill leaves.

/// To be asked before each store, signal or answer that others see. `false`: the process is dead, and it must not be
/// done.
#[cfg(not(test))]
#[inline(always)]
pub fn lives() -> bool {
    true
}

#[cfg(test)]
pub use test::{Bug, is_planted, lives};

#[cfg(test)]
pub mod test {
    use std::cell::Cell;

    thread_local! {
        static PASSED: Cell<u64> = const { Cell::new(0) };
        static LAST: Cell<u64> = const { Cell::new(u64::MAX) };
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Mistakes that the model must find.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// A request is no longer in flight before its answer can be seen.
        ClearBeforePublish,
        /// The used index of the region is left as it was.
        UsedIndexLost,
        /// What was in flight is taken again from the last to the first.
        Reversed,
        /// The last batch of a killed process is not finished.
        BatchNotFinished,
        /// An answer is dropped while the ring's memory is gone: the table changed under a transfer.
        AnswerWithoutRing,
        /// Without a region, answers are given as they come.
        OutOfOrder,
        /// A request that waits is done although its queue was stopped.
        DoneAfterStop,
        /// What is new is taken before what was in flight.
        NewFirst,
        /// The base that the front-end gives is believed, whatever the region says.
        BaseBelieved,
        /// A request is marked as in flight only when it is answered.
        MarkedLate,
        /// What a process before this one may not have signalled is not signalled.
        SignalLost,
        /// The process that takes over goes on behind all that was taken, answered or not.
        BaseOfTaken,
        /// It is not told of the record of what is in flight.
        RegionUntold,
        /// Nor of memory that was taken away and may come back.
        GoneUntold,
        /// What the storage has failed is answered as if it were done.
        ErrorLost,
        /// Of the requests of a chain the one that ends last says how it went.
        LastSaysAll,
        /// A failed read is answered as if its bytes had been written.
        LengthOfFailure,
        /// All queues use the record of the first.
        OneRecord,
        /// When a queue is to stop, what waits in the others is given back as well.
        RecallsAll,
        /// A queue stops only when nothing is under way in the others.
        WaitsForAll,
        /// Answers are published in the first queue only.
        FirstPublished,
        /// A chain of which a part was given back is answered.
        GivenBackAnswered,
    }

    /// All of them.
    pub const BUGS: [Bug; 22] = [
        Bug::ClearBeforePublish,
        Bug::UsedIndexLost,
        Bug::Reversed,
        Bug::BatchNotFinished,
        Bug::AnswerWithoutRing,
        Bug::OutOfOrder,
        Bug::DoneAfterStop,
        Bug::NewFirst,
        Bug::BaseBelieved,
        Bug::MarkedLate,
        Bug::SignalLost,
        Bug::ErrorLost,
        Bug::LastSaysAll,
        Bug::LengthOfFailure,
        Bug::OneRecord,
        Bug::RecallsAll,
        Bug::WaitsForAll,
        Bug::FirstPublished,
        Bug::GivenBackAnswered,
        Bug::BaseOfTaken,
        Bug::RegionUntold,
        Bug::GoneUntold,
    ];

    /// Another moment is reached; whether the process still lives.
    pub fn lives() -> bool {
        let passed = PASSED.get().saturating_add(1);
        PASSED.set(passed);
        passed <= LAST.get()
    }

    /// Counts from zero; the process dies after `last` moments.
    pub fn die_after(last: u64) {
        PASSED.set(0);
        LAST.set(last);
    }

    /// Whether the process has been killed.
    pub fn is_dead() -> bool {
        PASSED.get() > LAST.get()
    }

    /// Plants a bug, or none.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }

    /// Whether a bug is planted.
    pub fn is_planted(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }
}
