//! Storage that crashes, fails and reorders, and what looks for mistakes upon it.
#![forbid(unsafe_code)]

pub mod file;
pub mod io;
pub mod oracle;
pub mod random;
pub mod media;
pub mod sector;
