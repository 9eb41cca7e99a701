//! Failures of backups: the attempt, its object, and what to do next. No key is ever part of one.

use std::io;

use crate::id::Id;
use crate::name::Name;
use crate::store::StoreError;

/// A failure of an operation on a backup target.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The store failed; its text has the advice.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The disk that is backed up could not be read.
    #[error("cannot read {len} bytes at {at} of the disk: check its storage, and repeat the backup")]
    Source {
        /// Offset in bytes.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The place to which a backup is restored could not be written.
    #[error("cannot write {len} bytes at {at} of the restored disk: check its storage, and repeat")]
    Sink {
        /// Offset in bytes.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// Values that the caller gave do not fit.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// There is no target.
    #[error(
        "there is no backup target: 'format' does not exist; check the path and that it is mounted, or create a target"
    )]
    NoTarget,
    /// There is a target already.
    #[error("there is a backup target already: open it, or use an empty directory or another prefix")]
    TargetExists,
    /// A later version of this program made the target.
    #[error("the target has version {found} of the format, and this program knows up to {known}: update the program")]
    NewerVersion {
        /// The version of the target.
        found: u64,
        /// The latest known version.
        known: u64,
    },
    /// Another key than that of the target.
    #[error("this is not the key of the target: nothing was read or written; use the key file it was created with")]
    WrongKey,
    /// The target is encrypted and no key was given.
    #[error("the target is encrypted: give the key file that it was created with")]
    KeyNeeded,
    /// A key was given for a target that does not encrypt.
    #[error("a key was given and the target is not encrypted: omit the key, or create an encrypted target")]
    NotEncrypted,
    /// An object is not as it was written.
    #[error("object '{name}' of the target is damaged: {what}; verify the target to see which backups that costs")]
    Damaged {
        /// The object.
        name: Name,
        /// The damage.
        what: String,
    },
    /// Content of a backup is on the target in no undamaged copy.
    #[error(
        "the target has no sound copy of {len} bytes at {at} of backup {backup}: verify the target, and make \
         a new backup"
    )]
    Lost {
        /// The backup.
        backup: Id,
        /// Offset in the disk in bytes.
        at: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The base of an incremental backup is not the one whose changes were given.
    #[error("backup {backup} cannot be the base of this incremental backup: {what}; make a full backup")]
    WrongBase {
        /// The base that was named.
        backup: Id,
        /// The difference.
        what: String,
    },
    /// No such backup.
    #[error("the target has no backup {0}: list the backups; it may have been removed")]
    NoBackup(Id),
    /// The caller set the flag.
    #[error("cancelled: nothing counts that was not finished; a repeated backup uses what was sent")]
    Cancelled,
    /// Other hosts changed the target at each attempt.
    #[error("other hosts changed the target during each of {0} attempts to {1}: repeat, and prune less often")]
    Contended(u32, &'static str),
    /// The store listed a past state at each attempt.
    #[error(
        "the listing of the log does not agree with its objects: wait a minute for the file server's caches, and repeat"
    )]
    Stale,
}

/// An object that is not as it was written.
pub(crate) fn damaged(name: &Name, what: impl Into<String>) -> Error {
    Error::Damaged { name: name.clone(), what: what.into() }
}
