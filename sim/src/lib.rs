//! Storage that crashes, fails and reorders, and what looks for mistakes upon it.
//!
//! [`io::SimIo`] is an engine under a test's control; [`file::SimFile`] below it knows what is durable.
//! [`oracle::Oracle`] knows what each sector may hold. [`run`] lets a workload live, [`crash`] looks at every state
//! in which a power loss could leave it, and [`explore`] does that for many workloads. [`planted`] names bugs that
//! must be found, and [`saboteur`] plants them.
//!
//! Knows nothing of clocks: all randomness comes from seeds, and the same arguments find the same.

#![forbid(unsafe_code)]

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
pub mod workload;
pub mod wreck;
