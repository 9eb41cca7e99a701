//! Simulated storage that crashes, fails and reorders, and searches for bugs on it.
//!
//! [`io::SimIo`] is an engine under a test's control; [`file::SimFile`] below it records what is durable.
//! [`oracle::Oracle`] records what each sector may hold. [`run`] runs a workload, [`crash`] examines every state in
//! which a power loss could leave it, and [`explore`] does that for many workloads. [`planted`] lists bugs that must be
//! found, and [`saboteur`] plants them.
//!
//! Knows nothing about clocks: all randomness comes from seeds, and the same arguments yield the same result.

#![forbid(unsafe_code)]

pub mod changes;
pub mod cluster;
pub mod compressed;
pub mod crash;
pub mod explore;
pub mod fault;
pub mod file;
pub mod flat;
pub mod io;
pub mod link;
pub mod logs;
pub mod media;
pub mod oracle;
pub mod planted;
pub mod qcow2;
pub mod random;
pub mod reader;
mod restored;
pub mod run;
pub mod saboteur;
pub mod schedule;
pub mod sector;
pub mod shared;
pub mod shrink;
pub mod sibling;
pub mod subclusters;
pub mod subject;
pub mod theme;
mod violation;
pub mod workload;
pub mod wreck;
