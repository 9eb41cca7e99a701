//! What the tests of several crates need. No program of ours uses it, and of ours it uses only the guest's memory.

#![forbid(unsafe_code)]

pub mod certificates;
pub mod firmware;
pub mod nbd;
pub mod nginx;
pub mod program;
pub mod ring;
#[cfg(feature = "s3")]
pub mod s3_server;
pub mod vhost;
pub mod web_server;
