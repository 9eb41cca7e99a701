//! The object store below a target: whole objects under names, written once.
//!
//! Five calls, which a directory, a mount of NFS or SMB, and S3 with conditional writes can offer. Knows nothing of
//! what objects contain.
//!
//! The contract, on which the proof in `log.rs` rests:
//!
//! - `put` is atomic and create-only, and the object is durable when it returns. Of two writers of one name one wins.
//!   No object is ever replaced: there is no such call.
//! - `delete` is durable when it returns.
//! - `settle` makes durable all objects below a prefix that a call has shown: the put of another writer, which may be
//!   dead, has named them, and not necessarily returned.
//! - `get`, `size`, `put` and `delete` of one name are linearizable over all hosts.
//! - `list` may be late: it may miss new objects and show deleted ones.

mod directory;
mod memory;

use std::ops::Range;

pub use directory::Directory;
pub use memory::{Fault, Memory, Moment};

use crate::name::Name;

/// A store of whole objects. See the head of the file for what each call guarantees.
pub trait ObjectStore: Send + Sync {
    /// Creates an object; durable when it returns. Fails with [`StoreErrorKind::Exists`] if the name is taken. After
    /// any other failure the object may be there or not; it is never there in part.
    fn put(&self, name: &Name, bytes: &[u8]) -> Result<(), StoreError>;

    /// Reads a range of an object; fewer bytes if the object ends within it.
    fn get(&self, name: &Name, range: Range<u64>) -> Result<Vec<u8>, StoreError>;

    /// The size of an object in bytes.
    fn size(&self, name: &Name) -> Result<u64, StoreError>;

    /// Names and sizes of all objects whose name begins with `prefix`, in the order of names. Names that are not ours
    /// are left out.
    fn list(&self, prefix: &str) -> Result<Vec<(Name, u64)>, StoreError>;

    /// Deletes an object; durable when it returns. An object that does not exist is no error.
    fn delete(&self, name: &Name) -> Result<(), StoreError>;

    /// Makes all objects durable that exist below `prefix`, also those of writers that died before `put` returned.
    fn settle(&self, prefix: &str) -> Result<(), StoreError>;
}

/// Kinds of failures of a store that callers treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The name of a new object is taken.
    Exists,
    /// No such object.
    NotFound,
    /// No space, or no quota.
    NoSpace,
    /// The mount, server or directory is not reachable any more.
    Vanished,
    /// The storage cannot create an object atomically without replacing another.
    Unsuitable,
    /// The server does not accept the credentials, or does not let them do this.
    Refused,
    /// The server has no such bucket.
    NoBucket,
    /// The server redirects requests to another one.
    Elsewhere,
    /// Any other failure of the storage.
    Io,
}

impl StoreErrorKind {
    const fn advice(self) -> &'static str {
        match self {
            Self::Exists => "it exists already",
            Self::NotFound => "it does not exist; if nothing was pruned meanwhile, verify the target",
            Self::NoSpace => "the target is full: free space or prune backups, and repeat; data sent so far is kept",
            Self::Vanished => "the target is not reachable: check the mount, the server or the network, and repeat",
            Self::Unsuitable => {
                "the storage cannot create an object without replacing another, which two hosts on one target need (a \
                 file system: by hard links, or renames that do not replace; S3: by If-None-Match); use another storage"
            }
            Self::Refused => {
                "the server refuses access: check the credentials, their rights and the name of the bucket"
            }
            Self::NoBucket => "the server has no such bucket: check its name, the server and the region, or create it",
            Self::Elsewhere => {
                "the bucket is elsewhere: set AWS_REGION and AWS_ENDPOINT_URL, or --region and --endpoint, to the \
                 region and the server that it is in"
            }
            Self::Io => "the storage failed: check the server or the disk, and repeat",
        }
    }
}

/// A failure of a store: the attempted call, on which object, and what to do next.
#[derive(Debug, thiserror::Error)]
#[error("cannot {attempt} '{name}' on the backup target: {}", kind.advice())]
pub struct StoreError {
    /// The kind, for decisions.
    pub kind: StoreErrorKind,
    /// The call as a verb.
    pub attempt: &'static str,
    /// The object or prefix.
    pub name: String,
    /// The cause from the system.
    #[source]
    pub source: Option<std::io::Error>,
}

impl StoreError {
    /// A failure with a cause from the system.
    pub fn new(kind: StoreErrorKind, attempt: &'static str, name: &str, source: Option<std::io::Error>) -> StoreError {
        StoreError { kind, attempt, name: name.to_owned(), source }
    }
}

/// Whether an error says that an object does not exist.
pub(crate) fn is_missing(error: &StoreError) -> bool {
    error.kind == StoreErrorKind::NotFound
}

/// Reads a whole object.
pub(crate) fn get_all(store: &dyn ObjectStore, name: &Name) -> Result<Vec<u8>, StoreError> {
    let size = store.size(name)?;
    store.get(name, 0..size)
}

/// Creates an object whose bytes contain a random id, so that equal bytes under the name are ours: an answer may be
/// lost, and the repeated call then finds its own object.
pub(crate) fn put_own(store: &dyn ObjectStore, name: &Name, bytes: &[u8]) -> Result<bool, StoreError> {
    match store.put(name, bytes) {
        Ok(()) => Ok(true),
        Err(error) if error.kind == StoreErrorKind::Exists => match get_all(store, name) {
            Ok(found) => Ok(found == bytes),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    }
}
