//! Virtual machine monitors: what they want to hear of a disk, and how QEMU and Xen are driven.
//!
//! Knows nothing of images, storage and daemons; a disk is a socket at which somebody serves it, or
//! two nodes in Xen's store. Everything here blocks, for a
//! bounded time: callers that must not wait have threads.

#![forbid(unsafe_code)]
// They panic where nothing can be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod paste;
pub mod qemu;
pub mod qmp;
mod socket;
pub mod syntax;
#[cfg(test)]
mod test_script;
pub mod xen;
