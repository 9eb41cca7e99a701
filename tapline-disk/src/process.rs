//! The process itself: where it runs, how it is confined, what it prints and logs, and how it ends.

pub mod confine;
pub mod exit_with_parent;
pub mod failure;
pub mod fault;
pub mod log;
pub mod output;
pub mod panics;
pub mod placement;
pub mod signals;
