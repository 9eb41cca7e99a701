//! Xen guests: their disks in xenstore, and their domains through `xl`.
//!
//! It knows nothing about images and serving processes. [`give`] and [`take`] write a toolstack's part of a disk,
//! [`disks`] does so for a domain of ours; [`domain`] and [`xl`] handle domains, [`config`] their xl configuration,
//! [`lend`] the descriptors of a disk's process that only root can open, [`statistics`] the files in which tools look
//! for its numbers, [`departures`] the end of domains.

pub mod adopt;
pub mod both_ends;
pub mod claim;
pub mod config;
pub mod departures;
pub mod device;
pub mod disks;
pub mod domain;
pub mod fake;
pub mod firmware;
pub mod give;
pub mod lend;
pub mod local;
pub mod machine;
pub mod stale_files;
pub mod statistics;
pub mod take;
pub mod vdev;
pub mod wait;
pub mod xl;
