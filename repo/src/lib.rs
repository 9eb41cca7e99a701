//! Storage repositories, disks and machines as data.
//!
//! [`catalogue`] knows what exists on this host and keeps it in one SQLite file; [`driver`] knows the directories in
//! which images lie; [`inventory`], what a repository says of itself there. All know files by name only: no image is
//! ever opened here, that is the disk process's.

#![forbid(unsafe_code)]

pub mod catalogue;
pub mod driver;
pub mod inventory;

pub use catalogue::{Catalogue, Tx, View};
