//! What the tests of several crates need. No program of ours uses it, and it uses nothing of ours.

#![forbid(unsafe_code)]

pub mod firmware;
pub mod nbd;
pub mod program;
