//! Tests with guests, daemons and Xen under emulation: the demo, guests whose disk processes are killed, a bootstorm,
//! xfstests, servers of NFS and SMB, Xen.
//!
//! `figures`, `tool`, `options`, `progress`, `programs`, `process`, `guest`, `tapline` and `daemon` are shared by these
//! tests, the model and the benchmarks. `cargo xtask` lists what can be run.

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "used by this project's own tests and benchmarks only")]

pub mod bootstorm;
pub mod daemon;
pub mod demo;
pub mod figures;
pub mod guest;
pub mod guest_kill;
pub mod options;
pub mod process;
pub mod programs;
pub mod progress;
pub mod shares;
pub mod tapline;
pub mod tool;
pub mod xen;
pub mod xfstests;
