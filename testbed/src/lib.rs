//! Guests, daemons and Xen under emulation, and what is tried in them: the demo, guests that lose their disks'
//! processes, a bootstorm, xfstests, servers of NFS and SMB, Xen.
//!
//! `figures`, `tool`, `options`, `progress`, `programs`, `process`, `guest`, `tapline` and `daemon` are what the
//! others, the model and the benchmarks are made of. `cargo xtask` names what can be run.

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
