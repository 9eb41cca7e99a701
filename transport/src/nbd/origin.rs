//! What the replies to a request repeat of its header.

/// The fields of a request that its replies repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) cookie: u64,
    /// The offset in its header. Only extended headers have it.
    pub(super) at: u64,
}
