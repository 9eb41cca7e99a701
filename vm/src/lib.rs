//! Virtual machine monitors: the configuration that they need for a disk, and drivers for QEMU and Xen.
//!
//! It knows nothing about images, storage and daemons; a disk is a socket at which it is served, or two nodes in
//! xenstore. Everything here blocks, for a bounded time: callers that must not wait use threads.

#![forbid(unsafe_code)]
// They panic where nothing can be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod guest_port;
pub mod paste;
pub mod qemu;
pub mod qmp;
mod socket;
pub mod syntax;
pub mod xen;
