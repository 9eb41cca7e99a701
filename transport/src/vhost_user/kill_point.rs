//! The points at which tests may kill the process: before every externally visible effect.
//!
//! It knows nothing about the effects. Invariant: outside of tests this does nothing; in a test, nothing after the
//! chosen point leaves the process, so that the remaining state is that of a real kill.

/// Must be called before each store, signal or reply that is visible to others. If it returns `false`, the process is
/// dead, and the effect must not happen.
#[cfg(not(test))]
#[inline(always)]
pub fn is_alive() -> bool {
    true
}

#[cfg(test)]
pub use test::{Bug, is_alive, is_planted};

#[cfg(test)]
pub mod test {
    use std::cell::Cell;

    thread_local! {
        static PASSED: Cell<u64> = const { Cell::new(0) };
        static LAST: Cell<u64> = const { Cell::new(u64::MAX) };
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Bugs that the model must detect.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// A request is no longer in flight before its answer is visible.
        ClearBeforePublish,
        /// The used index of the region is not updated.
        UsedIndexLost,
        /// Requests in flight are taken again in reverse order.
        Reversed,
        /// The last batch of a killed process is not completed.
        BatchNotFinished,
        /// An answer is dropped while the ring's memory is removed: the table changed during a transfer.
        AnswerWithoutRing,
        /// Without a region, answers are given in the order of completion.
        OutOfOrder,
        /// A waiting request is performed although its queue was stopped.
        DoneAfterStop,
        /// New requests are taken before those in flight.
        NewFirst,
        /// The base sent by the front-end is used, regardless of the region.
        BaseTrusted,
        /// A request is marked as in flight only when it is answered.
        MarkedLate,
        /// An answer that an earlier process may not have signalled is not signalled.
        SignalLost,
        /// The successor continues after all requests taken, answered or not.
        BaseOfTaken,
        /// The successor does not get the record of requests in flight.
        RegionOmitted,
        /// The successor does not get the regions that were removed and may be added again.
        RemovedRegionsOmitted,
        /// A failed request is answered as successful.
        ErrorLost,
        /// The status of a chain is that of its last request.
        LastStatusWins,
        /// A failed read is answered with the length of a successful one.
        LengthOfFailure,
        /// All queues use the record of the first.
        OneRecord,
        /// When a queue is stopped, waiting requests of the others are given back as well.
        RecallsAll,
        /// A queue stops only when nothing is in progress in the others either.
        WaitsForAll,
        /// Answers are published in the first queue only.
        FirstPublished,
        /// A chain is answered although one of its requests was given back.
        GivenBackAnswered,
        /// Data of reads is not in the dirty log.
        ReadNotLogged,
        /// The used ring of a killed process is not in the dirty log.
        UsedRingNotLoggedAtStart,
        /// The successor does not get the dirty log.
        LogOmitted,
    }

    /// All bugs.
    pub const BUGS: [Bug; 25] = [
        Bug::ClearBeforePublish,
        Bug::UsedIndexLost,
        Bug::Reversed,
        Bug::BatchNotFinished,
        Bug::AnswerWithoutRing,
        Bug::OutOfOrder,
        Bug::DoneAfterStop,
        Bug::NewFirst,
        Bug::BaseTrusted,
        Bug::MarkedLate,
        Bug::SignalLost,
        Bug::ErrorLost,
        Bug::LastStatusWins,
        Bug::LengthOfFailure,
        Bug::OneRecord,
        Bug::RecallsAll,
        Bug::WaitsForAll,
        Bug::FirstPublished,
        Bug::GivenBackAnswered,
        Bug::BaseOfTaken,
        Bug::RegionOmitted,
        Bug::RemovedRegionsOmitted,
        Bug::ReadNotLogged,
        Bug::UsedRingNotLoggedAtStart,
        Bug::LogOmitted,
    ];

    /// Passes the next kill point; returns true if the process is still alive.
    pub fn is_alive() -> bool {
        let passed = PASSED.get() + 1;
        PASSED.set(passed);
        passed <= LAST.get()
    }

    /// Restarts the count; the process dies after `last` points.
    pub fn die_after(last: u64) {
        PASSED.set(0);
        LAST.set(last);
    }

    /// Returns true if the process has been killed.
    pub fn is_dead() -> bool {
        PASSED.get() > LAST.get()
    }

    /// Plants a bug in this thread; `None` for no bug.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }

    /// Returns true if this bug is planted.
    pub fn is_planted(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }
}
