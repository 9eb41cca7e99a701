//! Xenstore: a tree of small values through which both ends of a device find each other.
//!
//! It knows nothing about devices. A path is absolute, or relative to `/local/domain/` and the id of our own domain
//! (Xen, docs/misc/xenstore.txt).

use std::os::fd::BorrowedFd;

use crate::DomId;

/// Why a store operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No store is reachable.
    #[error("no store at {tried}: {advice}")]
    Unreachable {
        /// The paths that were tried.
        tried: String,
        /// What to do.
        advice: &'static str,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The node does not exist.
    #[error("no store node {path}")]
    NoEntry {
        /// The node.
        path: String,
    },
    /// Another client changed what a transaction read or wrote; retry it.
    #[error("the transaction conflicted with another client; retry")]
    Again,
    /// Any other error code of the store: EACCES, EINVAL, ENOSPC, EQUOTA, …
    #[error("{what} {path}: the store returned {code}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// The error code.
        code: String,
    },
    /// The store did not reply in time.
    #[error("{what} {path}: no answer from the store in {seconds} s")]
    TimedOut {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// How long we waited.
        seconds: u64,
    },
    /// The connection is closed, or a protocol error occurred.
    #[error("{what} {path}: the connection to the store is lost")]
    Lost {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

/// A change at or below a watched node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// The changed node: the watched node or one below it.
    pub path: String,
    /// The token that the watcher chose.
    pub token: String,
}

/// A transaction: changes that become visible together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transaction(pub u32);

/// One client's view of the store. Each call waits for its reply, for a bounded time; watch events that arrive
/// meanwhile are kept, a bounded number of them without duplicates.
pub trait Store {
    /// The value of a node; `None` if there is no such node.
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// The names of a node's children; `None` if there is no such node.
    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError>;

    /// Sets the value of a node, creating it and its missing parents.
    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError>;

    /// Removes a node and everything below it. A missing node is not an error.
    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError>;

    /// Sets the permissions of a node: its owner first, as `n0`, then others as `r5`, `w5`, `b5`.
    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError>;

    /// Starts a transaction.
    fn begin(&mut self) -> Result<Transaction, StoreError>;

    /// Ends a transaction: commits all its changes atomically, or discards them. Returns [`StoreError::Again`] on a
    /// conflict.
    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError>;

    /// Reports changes at and below a node from now on, and once right away.
    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;

    /// Stops reporting.
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;

    /// Whether the store serves this domain: from its creation until it begins to die. Watches of `@introduceDomain`
    /// and `@releaseDomain` report these.
    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError>;

    /// The next event, without waiting.
    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError>;

    /// Readable when there may be events, including ones that arrived while another call waited for its reply.
    fn fd(&self) -> BorrowedFd<'_>;
}
