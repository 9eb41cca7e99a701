//! Bugs that the tests plant and must find. No target has one outside of tests.

/// A bug in one place of the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code, reason = "only tests plant bugs"))]
pub(crate) enum Bug {
    /// A backup is published before its last pack is written.
    PublishedBeforeChunks,
    /// A writer trusts the packs that it found when it began.
    PacksTrusted,
    /// A pruner appends its state without looking again when others appended first.
    PruneNotRepeated,
    /// Packs are deleted before the state that dooms them is in the log.
    DeletedBeforeDoomed,
    /// A free number of the log is taken for the next one.
    UnconfirmedAppend,
    /// The size of a pack is not compared with its table.
    CutOffAccepted,
    /// An incremental backup takes whichever base is named.
    AnyBase,
    /// What was found on the target counts as durable.
    FoundTakenForDurable,
    /// Doomed objects are forgotten without looking whether they are gone.
    DoomForgotten,
}
