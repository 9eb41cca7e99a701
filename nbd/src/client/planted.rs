//! Bugs that the exploration must find; only its tests plant them.

/// A bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    /// A flush on a new connection is taken to cover writes that were answered on an earlier one.
    FlushAcrossReconnect,
    /// What was not answered is sent again behind newer writes to the same place.
    ResentBehindNewer,
    /// Overlapping writes are in flight together.
    OverlapsInFlight,
    /// Replies are matched by order, not by cookie.
    MatchedByOrder,
    /// A read ends although not all of its data has arrived.
    ShortRead,
    /// An export of another size is used after a reconnect.
    SizeChange,
    /// A flush drops also what was answered after it had been sent.
    FlushCoversLater,
    /// The sample is not compared.
    NotCompared,
    /// The sample has blocks that no flush covers.
    SampleNotFlushed,
    /// A flush is sent, and trusted, while another one is in flight, whose failure the server reports only once.
    FlushesTogether,
}
