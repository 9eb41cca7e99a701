//! The store of disk backups.
//!
//! A *target* is an object store (a directory, a mount, a bucket of S3) with chunks of disks, compressed, and encrypted
//! if it was created with a key. A *backup* is the content of one disk at one moment. Equal chunks are stored once,
//! whichever disk and host they come from, and several hosts use one target at the same time without locks.
//!
//! [`Target`] is the door: [`Target::back_up`], [`Target::backups`], [`Reader`], [`Target::verify`], [`Target::prune`].
//! Callers bring the disk as a [`Source`] and the time; nothing here has a clock. Retention is the caller's: it says
//! which backups to remove.
//!
//! What is on a target: `format`, `packs/` (chunks and pages, see `pack.rs`), `backups/` (indices, see `index.rs`) and
//! `log/` (what counts, see `log.rs`). Everything is written once under a name that is never given out again.

#![forbid(unsafe_code)]

mod chunks;
mod codec;
mod create;
mod error;
mod id;
mod index;
mod key;
mod log;
mod name;
mod pack;
mod planted;
mod prune;
mod reader;
mod source;
mod store;
mod target;
#[cfg(test)]
mod test;
mod verify;
mod writer;

pub use error::Error;
pub use id::{Digest, Id};
pub use index::Statistics;
pub use key::{Key, KeyError};
pub use log::{MachineMoment, Record};
pub use name::{Name, prefix};
pub use prune::{Prune, Pruned};
pub use reader::Reader;
pub use source::{Extent, RawFile, Sink, Source};
pub use store::{Directory, Fault, Memory, Moment, ObjectStore, StoreError, StoreErrorKind};
pub use target::{Layout, Target};
pub use verify::{BackupDamage, Verified};
pub use writer::{Base, Control, Job};
