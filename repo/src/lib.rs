//! Storage repositories, disks and machines as data.
//!
//! [`catalogue`] stores everything on this host in one SQLite file; [`driver`] handles the directories that contain
//! images; [`inventory`] is a repository's own record in such a directory. All of them know files by name only: no
//! image is ever opened here; that is the disk process's business.

#![forbid(unsafe_code)]

pub mod blocking;
pub mod catalogue;
pub mod driver;
mod hash;
pub mod inventory;
pub mod replace;

pub use catalogue::{Catalogue, Tx, View};
