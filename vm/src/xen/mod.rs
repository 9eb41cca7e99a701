//! Guests of Xen: their disks in the store, and their domains by `xl`.
//!
//! Knows nothing of images and of who serves a disk. [`give`] and [`take`] are what a toolstack writes of a disk,
//! [`disks`] the same for a domain that is ours, [`domain`] and [`xl`] the domains, [`config`] what `xl` is told of
//! one, [`lend`] what a disk's process needs that only root can open, [`statistics`] where others look for its numbers,
//! [`departures`] that a domain has ended.

pub mod config;
pub mod departures;
pub mod device;
pub mod disks;
pub mod domain;
mod error;
pub mod give;
pub mod lend;
pub mod machine;
pub mod statistics;
pub mod take;
pub mod vdev;
pub mod xl;

pub use error::NotDone;
