//! Xenstore: a tree of small values in which both ends of a device find each other.
//!
//! Knows nothing of devices. A path is absolute, or relative to `/local/domain/` and the number of our own domain
//! (Xen, docs/misc/xenstore.txt).

use std::os::fd::BorrowedFd;

use crate::DomId;

/// Why the store did not do something.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is none to be reached.
    #[error("no store at {tried}: {advice}")]
    Unreachable {
        /// Where it was looked for.
        tried: String,
        /// What may be done.
        advice: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// There is no such node.
    #[error("there is no {path}")]
    NoEntry {
        /// The node.
        path: String,
    },
    /// Somebody else changed what a transaction was about; it is to be tried again.
    #[error("the transaction was overtaken")]
    Again,
    /// Another answer of the store, as it names it: EACCES, EINVAL, ENOSPC, EQUOTA, …
    #[error("{what} {path}: the store answers {code}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// The store's word.
        code: String,
    },
    /// It did not answer in time.
    #[error("{what} {path}: no answer from the store in {seconds} s")]
    Mute {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// How long we waited.
        seconds: u64,
    },
    /// The connection is gone, or what came is not the protocol.
    #[error("{what} {path}: the connection to the store is lost")]
    Lost {
        /// What was tried.
        what: &'static str,
        /// On which node.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Something changed at or below a watched node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchEvent {
    /// What changed: the watched node or one below it.
    pub path: String,
    /// The watcher's own word for the watch.
    pub token: String,
}

/// Changes that become visible together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transaction(pub u32);

/// The store, for one client. Each call waits for its answer, a bounded time; watch events that come meanwhile are kept,
/// a bounded number of them, and one of each kind.
pub trait Store {
    /// The value of a node; `None` if there is no such node.
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// The names of a node's children; `None` if there is no such node.
    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError>;

    /// Gives a node a value; it and its parents are made where they are missing.
    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError>;

    /// Removes a node and all below it. That it was not there is no error.
    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError>;

    /// Says who may read and write a node: its owner first, as `n0`, then others as `r5`, `w5`, `b5`.
    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError>;

    /// Begins a transaction.
    fn begin(&mut self) -> Result<Transaction, StoreError>;

    /// Ends one: all its changes at once, or none. [`StoreError::Again`] if others were faster.
    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError>;

    /// Reports changes at and below a node from now on, and once at the beginning.
    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;

    /// No more reports.
    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError>;

    /// Whether the store serves this domain: from its making until it begins to die, which `@introduceDomain` and
    /// `@releaseDomain` report to whoever watches these names.
    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError>;

    /// The next report, without waiting.
    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError>;

    /// Readable when something may be reported, also what came while another call waited for its answer.
    fn fd(&self) -> BorrowedFd<'_>;
}
